"""Options that several commands share, with their help. One place, one wording."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from outrider.core.relaxed import RelaxedRule
from outrider.core.residual import DEFAULT_TOP_K
from outrider.session.schedules import Schedule

DEFAULT_TARGET: Final = "builtin:smollm2"
DEFAULT_MAX_TOKENS: Final = 256
DEFAULT_TEMPERATURE: Final = 0.7
"""Small targets ramble at 1; 0.7 is what chat front ends commonly use."""
DEFAULT_DRAFT_LENGTH: Final = 4

MODELS: Final = "Models"
SAMPLING: Final = "Sampling"
LENGTH: Final = "Length and stopping"
NUMERICS: Final = "Numerics"
SPECULATION: Final = "Speculation"
OUTPUT: Final = "Prompt and output"
NETWORK: Final = "Network"
RELAXING: Final = "Relaxed acceptance (lossy, and reported)"
DEFAULT_THRESHOLD: Final = 0.1
DEFAULT_BUDGET: Final = 1.0
"""Nats and total variation (our defaults): a few tokens of an answer may differ."""


class Dtype(StrEnum):
    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class Verify(StrEnum):
    COUPLED = "coupled"
    RATIO = "ratio"
    RELAXED = "relaxed"


Target = Annotated[
    str,
    typer.Option(
        metavar="MODEL",
        help="The model whose text you get: builtin:smollm2, a hub id, a folder, or a .gguf file "
        "(builtin:smollm2-gguf: the built-in one on llama.cpp).",
        rich_help_panel=MODELS,
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Who guesses: small, large (both ship with builtin:smollm2), lookup (copies from "
        "the text so far), lookup+small, lookup+large, none, a hub id, a folder, a .gguf file "
        "(builtin:smollm2-gguf fits builtin:smollm2), or replay:FILE (outrider record). "
        "Default: lookup+small for the built-in target, lookup for any other.",
        show_default=False,
        rich_help_panel=MODELS,
    ),
]
DtypeOption = Annotated[
    Dtype,
    typer.Option(
        "--dtype",
        metavar="TYPE",
        help="Number format: bfloat16, float16, float32; auto: bfloat16 for the built-in "
        "target, else the checkpoint's own; a .gguf file has its own, too.",
        rich_help_panel=NUMERICS,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Where the models run: auto, cpu, cuda, cuda:1.",
        rich_help_panel=MODELS,
    ),
]
Deterministic = Annotated[
    bool,
    typer.Option(
        metavar="",
        help="The same seed gives the same text whatever the draft, by forwards of one fixed shape "
        "(llama.cpp needs none). Off is faster, and near-ties may then fall the other way (they "
        "are counted).",
        rich_help_panel=NUMERICS,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=1024,
        metavar="N",
        help="Processor threads for the models; left out, torch chooses; llama.cpp takes half of "
        "the processors.",
        show_default=False,
        rich_help_panel=NUMERICS,
    ),
]


def sampling(name: str, text: str) -> Any:
    """An option of how tokens are drawn."""
    return typer.Option(name, metavar="N", help=text, rich_help_panel=SAMPLING)


Temperature = Annotated[
    float, sampling("--temperature", "0 = always the likeliest token, 1 = as the model is.")
]
TopK = Annotated[int, sampling("--top-k", "Keep the k likeliest tokens; 0 = all.")]
TopP = Annotated[
    float, sampling("--top-p", "Keep the likeliest tokens up to this probability; 1 = all.")
]
MinP = Annotated[
    float, sampling("--min-p", "Drop tokens below this share of the likeliest; 0 = none.")
]
DraftLength = Annotated[
    int,
    typer.Option(
        metavar="K",
        help="Guesses a round, 0 (none) to 64.",
        rich_help_panel=SPECULATION,
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json",
        metavar="",
        help="Exactly one JSON object on stdout and nothing else there.",
        rich_help_panel=OUTPUT,
    ),
]
Cloud = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Ask the verifier at ws://HOST:PORT or wss://HOST:PORT (outrider cloud); this side "
        "loads the draft and the target's tokenizer only.",
        show_default=False,
        rich_help_panel=NETWORK,
    ),
]
ScheduleOption = Annotated[
    Schedule,
    typer.Option(
        "--schedule",
        metavar="NAME",
        help="Who waits for whom. freerun: the target never waits, guesses that arrive in time "
        "let it skip. stream: guesses ahead, the target waits for them. sync: K guesses, then "
        "wait. multiplex: the same, and requests that share a draft guess by turns and together. "
        "hybrid: as multiplex, and ahead when no other request waits for the draft. pearl: a "
        "block ahead, its first guess first. plc: as pearl, in a window that grows while blocks "
        "stand. cloud-only: no guesses. colocated: the cloud's own draft. edge-only: the draft by "
        "itself.",
        rich_help_panel=NETWORK,
    ),
]
ControllerOption = Annotated[
    str | None,
    typer.Option(
        "--controller",
        metavar="NAME",
        help="Who says how many guesses: fixed (K and W as given), auto (by measured costs and "
        "acceptance; may let the cloud stream alone), never, and the published ones: specstop, "
        "ucb-specstop, ... Options behind a colon: ucb-specstop:beta=0.5. See docs/controllers.md. "
        "Default: auto in sync unless --draft-length is given, else fixed.",
        show_default=False,
        rich_help_panel=SPECULATION,
    ),
]
RelaxRuleOption = Annotated[
    RelaxedRule,
    typer.Option(
        "--relax-rule",
        metavar="NAME",
        help="With --verify relaxed. relaxed: guesses whose distribution is close enough, within "
        "the budget. fsd, e2sci (with --controller credit), typical: as published.",
        rich_help_panel=RELAXING,
    ),
]
Threshold = Annotated[
    float,
    typer.Option(
        metavar="T",
        help="How far the draft's distribution may be from the target's: nats of Jensen-Shannon "
        "divergence, at most ln 2 = 0.693.",
        rich_help_panel=RELAXING,
    ),
]
Budget = Annotated[
    float,
    typer.Option(
        metavar="B",
        help="Most total variation distance of the whole answer from the target's law; 0 is "
        "exact, inf (as published) knows no end.",
        rich_help_panel=RELAXING,
    ),
]
SketchOption = Annotated[
    int,
    typer.Option(
        "--sketch",
        metavar="K",
        help="Likeliest ids of a guess's distribution that go up with it, 1 to 64.",
        rich_help_panel=RELAXING,
    ),
]
TopKReplyOption = Annotated[
    int | None,
    typer.Option(
        "--top-k-reply",
        metavar="K",
        help="With --cloud --verify ratio: where a guess falls, the verifier may answer with its K "
        "likeliest tokens, 1 to 1024; 0: never. It does so where no other is possible (exact), or "
        f"where --tv-budget may pay. Default: 0, or {DEFAULT_TOP_K} with a budget.",
        show_default=False,
        rich_help_panel=SPECULATION,
    ),
]
TvBudget = Annotated[
    float,
    typer.Option(
        "--tv-budget",
        metavar="B",
        help="With --cloud --verify ratio: most total variation distance of the whole answer from "
        "the target's law, to be spent on such cut-off answers; 0 is exact. Lossy above, and "
        "reported.",
        rich_help_panel=SPECULATION,
    ),
]
Growth = Annotated[
    float,
    typer.Option(
        metavar="ETA",
        help="plc: a block that stands whole lets the window grow by the factor 1 + ETA.",
        rich_help_panel=NETWORK,
    ),
]
Window = Annotated[
    int,
    typer.Option(
        metavar="W",
        help="Guesses that may be on their way in freerun, stream and plc, 1 to 256; with a "
        "--controller the most it may ask for.",
        rich_help_panel=NETWORK,
    ),
]

LinkOption = Annotated[
    str | None,
    typer.Option(
        "--link",
        metavar="SPEC",
        help="Shape the link in user space: rtt=50ms,up=1mbit,down=20mbit,jitter=5ms,loss=1% "
        "(any of them), or up-trace=FILE,down-trace=FILE; weak, medium, strong or UP/DOWN in "
        "Mbit/s may stand first: .5/5,rtt=50ms.",
        show_default=False,
        rich_help_panel=NETWORK,
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="Bearer token for the cloud; or set OUTRIDER_TOKEN.",
        show_default=False,
        rich_help_panel=NETWORK,
    ),
]
CaFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="Trust this certificate authority (PEM) for wss://.",
        show_default=False,
        rich_help_panel=NETWORK,
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        metavar="",
        help="Send the token over ws:// to another host, unencrypted.",
        rich_help_panel=NETWORK,
    ),
]
