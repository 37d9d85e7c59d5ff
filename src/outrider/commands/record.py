"""`outrider record`: a draft's guesses along the target's answers, to be replayed without it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer
from msgspec import structs

from outrider.commands import console, models, specs
from outrider.commands.errors import CommandError
from outrider.commands.options import (
    DEFAULT_TARGET,
    DEFAULT_TEMPERATURE,
    SAMPLING,
    Json,
    MinP,
    Target,
    Temperature,
    Threads,
    TopK,
    TopP,
)
from outrider.commands.traces import (
    RECORDING,
    PromptsOption,
    SamplesOption,
    SeedOption,
    TokensOption,
    bars,
    calibration_errors,
)
from outrider.engines.replay import DEFAULT_WINDOW, MAX_WINDOW

DEFAULT_DRAFT: Final = "large"


def record(
    file: Annotated[Path, typer.Argument(help="JSONL to write; one that was begun goes on.")],
    target: Target = DEFAULT_TARGET,
    draft: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="Whose guesses: small, large, a hub id, or a folder.",
            rich_help_panel=RECORDING,
        ),
    ] = DEFAULT_DRAFT,
    prompts: PromptsOption = None,
    samples: SamplesOption = 16,
    max_tokens: TokensOption = 128,
    window: Annotated[
        int,
        typer.Option(
            metavar="W",
            min=1,
            max=MAX_WINDOW,
            help="Guesses kept behind a wrong one: as many as a schedule may have under way.",
            rich_help_panel=RECORDING,
        ),
    ] = DEFAULT_WINDOW,
    temperature: Temperature = DEFAULT_TEMPERATURE,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos",
            metavar="",
            help="Go on past the model's own end: every answer is --max-tokens long.",
            rich_help_panel=SAMPLING,
        ),
    ] = False,
    seed: SeedOption = 0,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Record a draft for replay: --draft replay:FILE then guesses the same at no compute.

    Target and draft run here, in one process. Each answer is written as soon as it is made: after
    Ctrl-C the same command goes on where it stopped. Answer number i is drawn with seed + i. The
    time of a guess is measured and slept at replay, so that one machine can stand for many edges
    (outrider load).

    Examples:

    ```
    outrider record drafts.jsonl --prompts questions.jsonl --samples 32
    OUTRIDER_DATA=folder outrider record drafts.jsonl --draft small --max-tokens 64
    outrider load --draft replay:drafts.jsonl --edges 8
    ```
    """
    from outrider.bench import recording
    from outrider.calibrate.questions import questions
    from outrider.engines.load import load_drafter, load_target
    from outrider.engines.replay import Shape

    if draft == "none" or draft.startswith(("lookup", "replay:")):
        raise CommandError(
            "--draft must be a model: copied guesses cost nothing and need no recording"
        )
    specs.refuse_bare("--target", target)
    specs.refuse_bare("--draft", draft)
    shape = Shape(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
    )
    shape.params(seed)
    with calibration_errors():
        asked = questions(samples, prompts or ())
    with console.waiting(f"loading {target} and {draft}"):
        loaded = load_target(target, threads=threads)
        drafter = load_drafter(draft, loaded, threads=threads)
    assert drafter is not None, "none was refused above"
    wanted = recording.header(loaded, draft, shape, seed=seed, window=window, spent=0.0)
    todo = [
        (seed + number, (task, models.encode(loaded.tokenizer, text, raw=False, system=None)))
        for number, (task, text) in enumerate(asked)
    ]
    with recording.alone_in(file):
        out, before = _record(file, loaded, drafter, todo, wanted)
    _report(out, before, len(todo) - before, as_json=as_json)


def _record(file: Path, loaded: Any, drafter: Any, todo: list[Any], wanted: Any) -> tuple[Any, int]:
    """Record what the file lacks; the file, and how many of `todo` it held before."""
    from outrider.bench import recording

    out = recording.RecordFile(file, wanted)
    shape, seed, window = wanted.sampling, wanted.seed, wanted.window
    if out.fresh:
        first = todo[0][1][1]
        spent = recording.token_seconds(drafter, first, shape.params(seed))
        out.begin(structs.replace(wanted, token_seconds=spent))
    left = [(s, question) for s, question in todo if (s, question[1]) not in out.done]
    before = len(todo) - len(left)
    with bars() as show:
        show("record", before, len(todo))
        for made, answer in enumerate(
            recording.record(loaded, drafter, left, shape, window=window), start=before + 1
        ):
            out.add(answer)
            show("record", made, len(todo))
    return out, before


def _report(out: Any, before: int, made: int, *, as_json: bool) -> None:
    ms = out.header.token_seconds * 1e3
    if as_json:
        console.print_json(
            {
                "file": str(out.path),
                "answers": len(out.done),
                "made_now": made,
                "draft": out.header.draft,
                "target": out.header.target.name,
                "window": out.header.window,
                "draft_ms_per_token": ms,
            }
        )
        return
    held = f", {before} of them from before" if before else ""
    console.messages().print(
        f"{out.path}: {len(out.done)} answers{held}; {out.header.draft} takes {ms:.2f} ms a "
        f"guess. Use it with --draft replay:{out.path}",
        style="dim",
        markup=False,
    )
