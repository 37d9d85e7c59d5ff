"""Traces for `calibrate` and `inertia`: read where the file exists, else recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from outrider.bench.prompts import PROMPTS
from outrider.commands import console
from outrider.commands.errors import CommandError
from outrider.commands.options import DEFAULT_TARGET
from outrider.control.base import CalibrationError

if TYPE_CHECKING:
    from outrider.calibrate.trace import Traces

DEFAULT_DRAFT: Final = "small"
RECORDING: Final = "Recording"

TargetOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help=f"Whose text it is; else the traces' own, or {DEFAULT_TARGET}.",
        show_default=False,
        rich_help_panel=RECORDING,
    ),
]
DraftOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help=f"Whose guesses: small, large, a hub id, or a folder; else the traces' own, or "
        f"{DEFAULT_DRAFT}.",
        show_default=False,
        rich_help_panel=RECORDING,
    ),
]
TracesOption = Annotated[
    Path | None,
    typer.Option(
        "--traces",
        metavar="FILE",
        dir_okay=False,
        help="Recorded text: used where the file exists, else recorded and written there.",
        show_default=False,
        rich_help_panel=RECORDING,
    ),
]
PromptsOption = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="JSONL with prompts; the file's name is the task; repeatable. Else the question sets "
        "of the folder in OUTRIDER_DATA.",
        show_default=False,
        rich_help_panel=RECORDING,
    ),
]
SamplesOption = Annotated[
    int,
    typer.Option(
        metavar="N", min=1, max=10_000, help="Prompts to record.", rich_help_panel=RECORDING
    ),
]
TokensOption = Annotated[
    int,
    typer.Option(
        "--max-tokens",
        metavar="N",
        min=2,
        max=4096,
        help="Longest answer.",
        rich_help_panel=RECORDING,
    ),
]
TemperatureOption = Annotated[
    float,
    typer.Option(metavar="T", min=0.0, max=100.0, rich_help_panel=RECORDING),
]
SeedOption = Annotated[
    int, typer.Option(metavar="N", min=0, max=2**62, help="Same seed, same result.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What the options ask for; None: whatever the traces hold, or our default."""

    target: str | None
    draft: str | None
    path: Path | None
    prompts: Sequence[Path]
    samples: int
    max_tokens: int
    temperature: float
    seed: int
    threads: int | None
    built_in: bool = False
    """Without files ask our own prompts (bench.prompts), not the folder's question sets."""


@contextmanager
def calibration_errors() -> Iterator[None]:
    """A calibration or trace file that cannot be used is bad input, not a bug."""
    try:
        yield
    except CalibrationError as error:
        raise CommandError(str(error)) from None


@contextmanager
def bars() -> Iterator[Callable[[str, int, int], None]]:
    """One progress bar a stage, on stderr; silent where that is no terminal."""
    screen = console.messages()
    with Progress(
        TextColumn("{task.description:<10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=screen,
        disable=not screen.is_terminal,
    ) as progress:
        tasks: dict[str, TaskID] = {}

        def show(stage: str, done: int, whole: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=whole)
            progress.update(tasks[stage], completed=done, total=whole)

        yield show


def obtain(wanted: Recording, show: Callable[[str, int, int], None]) -> Traces:
    """Read or record. Raises CommandError when the file holds other models than asked for."""
    from outrider.calibrate import trace

    if wanted.path is not None and wanted.path.exists():
        found = trace.read(wanted.path)
        _check(found, wanted, wanted.path)
        return found
    return _record(wanted, show)


def _check(found: Traces, wanted: Recording, path: Path) -> None:
    header = found.header
    for option, asked, held in (
        ("--target", wanted.target, header.target.name),
        ("--draft", wanted.draft, header.draft.name),
    ):
        if asked is not None and asked != held:
            raise CommandError(
                f"{path.name} was recorded with {option} {held}, not {asked}: name another file "
                f"to record, or leave {option} out"
            )
    if not found.answers:
        raise CommandError(f"{path.name} holds no answer: record it anew")


def _record(wanted: Recording, show: Callable[[str, int, int], None]) -> Traces:
    from outrider.calibrate import questions, trace
    from outrider.calibrate.record import record
    from outrider.engines.load import load_draft_model, load_target

    asked = [("built-in", text) for text in PROMPTS[: wanted.samples]]
    if wanted.prompts or not wanted.built_in:
        asked = questions.questions(wanted.samples, wanted.prompts)
    spec, draft_spec = wanted.target or DEFAULT_TARGET, wanted.draft or DEFAULT_DRAFT
    if draft_spec == "none" or draft_spec.startswith("lookup"):
        raise CommandError("--draft must be a model: a copied guess has no distribution")
    with console.waiting(f"loading {spec} and {draft_spec}"):
        target = load_target(spec, threads=wanted.threads)
        draft = load_draft_model(draft_spec, target, threads=wanted.threads)
    header, answers = record(
        target,
        draft,
        asked,
        temperature=wanted.temperature,
        max_tokens=wanted.max_tokens,
        seed=wanted.seed,
        told=lambda done, whole: show("record", done, whole),
    )
    if not answers:
        raise CommandError("every answer ended at once: nothing to learn from these prompts")
    if wanted.path is not None:
        trace.write(wanted.path, header, answers)
    return trace.Traces(header=header, answers=tuple(answers))
