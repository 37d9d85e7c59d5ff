"""`outrider bench`: ways to decode x links x data x seeds, live or simulated."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from outrider.commands import console
from outrider.commands.benchtable import show
from outrider.commands.errors import INTERRUPTED, CommandError
from outrider.commands.options import Json
from outrider.commands.simulate import record_of
from outrider.commands.traces import bars
from outrider.core.reasons import why

if TYPE_CHECKING:
    from outrider.bench.experiment import Experiment
    from outrider.bench.journal import Header, Journal

DEFAULT_OUTPUT: Final = Path("outrider-bench.jsonl")
QUICK: Final = "quick.toml"
VALIDATE: Final = "validate.toml"
WORTH_TELLING: Final = 10.0
"""Seconds: a shorter run is over before its estimate is read."""


def bench(
    scenario: Annotated[
        Path | None,
        typer.Argument(
            metavar="[SCENARIO]",
            help="A TOML file (docs/bench.md); left out with --quick: the built-in pair, live.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", metavar="", help="Few answers and one seed: minutes, for a first look."
        ),
    ] = False,
    validate: Annotated[
        bool,
        typer.Option(
            "--validate",
            metavar="",
            help="The built-in pair on four links, each live answer once more in the simulator, "
            "and how far apart they are; with --quick a cut of it.",
        ),
    ] = False,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="Where each cell is written.")
    ] = DEFAULT_OUTPUT,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Go on with a run that was interrupted; it knows its scenario.",
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Another value for a key of the scenario, as in live.pace=60; may be repeated.",
            show_default=False,
        ),
    ] = None,
    run_code: Annotated[
        bool,
        typer.Option(
            "--run-code",
            metavar="",
            help="Score humaneval by running what the model wrote, in a process with limits on "
            "time, memory and files. It is no wall against code that means harm.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare ways to decode: on links, data sets and seeds, on a live pair or in the simulator.

    Each finished cell is written at once; Ctrl-C loses nothing, and --resume goes on. Arms warm up
    and take turns; cloud-only, co-located, plain synchronous and edge-only decoding are always in
    the table; figures carry bootstrap intervals. `outrider report FILE` makes a page of it.

    Examples:

    ```
    outrider bench --quick
    outrider bench scenarios/phone.toml -o phone.jsonl
    outrider bench --resume phone.jsonl
    outrider bench --validate -o validation.jsonl
    ```
    """
    from outrider.bench import journal
    from outrider.runtime.process import CloudProcessError

    try:
        if validate and (scenario is not None or resume is not None or run_code):
            raise CommandError(
                "--validate runs a scenario of its own: give --quick, --set or -o beside it (in a "
                'file, [bench] system = "validate" does the same)'
            )
        built_in = VALIDATE if validate else QUICK if quick else None
        book = _opened(scenario or built_in, output, resume, settings or [], quick, run_code)
    except journal.JournalError as error:
        raise CommandError(str(error)) from None
    experiment = load(book.header)
    _warn(book.header)
    complete = False
    try:
        asyncio.run(_run(experiment, book))
        complete = True
    except KeyboardInterrupt:
        pass
    except CloudProcessError as error:
        raise CommandError(f"the verifier did not start: {error}") from None
    finally:
        if not complete:
            _left_off(book)
    if not complete:
        raise typer.Exit(INTERRUPTED)
    show(experiment, book.header, book.cells, as_json=as_json)


def _left_off(book: Journal) -> None:
    """Say how to go on; a run without a cell leaves no file behind."""
    count, path = len(book.cells), book.path
    if count:
        book.keep()
        kept = f"{count} cells are in {path}; go on: outrider bench --resume {path}"
        console.messages().print(kept, markup=False)
    else:
        path.unlink(missing_ok=True)


def _opened(
    scenario: Path | str | None,
    output: Path,
    resume: Path | None,
    settings: list[str],
    quick: bool,
    run_code: bool,
) -> Journal:
    """The run's file. `scenario`: a file, or the name of one of ours."""
    from outrider.bench import journal

    if resume is not None:
        if isinstance(scenario, Path) or settings or quick or run_code:
            raise CommandError("--resume goes on with what the run is of: give nothing beside it")
        book = journal.Journal.resume(resume)
        here = _pinning(load(book.header))
        if here != {name: book.header.machine.get(name) for name in here}:
            console.messages().print(f"from here on {here['pinning']}", markup=False)
        return book
    if scenario is None:
        raise CommandError(
            "say what to compare: a scenario (docs/bench.md), --quick, or --validate"
        )
    if output.exists():  # told before data sets are fetched
        raise journal.JournalError(journal.TAKEN.format(output))
    header = header_of(scenario, tuple(settings), quick=quick, run_code=run_code)
    experiment = load(header)
    header = replace(header, pins=_pins(experiment), machine=header.machine | _pinning(experiment))
    return journal.Journal.begin(output, header)


def _pinning(experiment: Experiment) -> dict[str, str]:
    """What the machine's description says of cores, where real models run."""
    from outrider.bench.experiment import System
    from outrider.runtime.cores import cores

    return {} if experiment.system is System.SIMULATOR else {"pinning": cores().words}


def _pins(experiment: Experiment) -> dict[str, str]:
    """Commits of the data sets that are the hub's; all are tried before anything is begun."""
    from outrider.bench.questions import QuestionError, pinned

    try:
        return pinned(data for point in experiment.points if point.pair for data in point.pair.data)
    except QuestionError as error:
        raise CommandError(f"[live] data: {error}") from None


def header_of(
    scenario: Path | str, settings: tuple[str, ...], *, quick: bool, run_code: bool
) -> Header:
    """Of a run of a scenario: a file, or the name of one of ours."""
    from outrider.bench.journal import Header
    from outrider.diagnose import machine

    if isinstance(scenario, str):
        text = (resources.files("outrider") / "data" / scenario).read_text(encoding="utf-8")
        name, folder = scenario, "."
    else:
        try:
            text = scenario.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CommandError(f"cannot read the scenario {scenario}: {why(error)}") from None
        name, folder = scenario.name, str(scenario.parent)
    return Header(
        name=name,
        text=text,
        folder=folder,
        overrides=settings,
        quick=quick,
        machine=machine(),
        run_code=run_code,
    )


def load(header: Header) -> Experiment:
    """The experiment that a run is of. Raises CommandError."""
    from outrider.bench.experiment import parse
    from outrider.runtime.shaping import load_trace
    from outrider.sim.scenario import Loaders, ScenarioError

    folder = Path(header.folder)
    loaders = Loaders(
        link=lambda file: load_trace(str(folder / file)),
        record=lambda file: record_of(folder / file),
    )
    try:
        return parse(
            header.text,
            name=header.name,
            overrides=header.overrides,
            loaders=loaders,
            quick=header.quick,
        )
    except ScenarioError as error:
        raise CommandError(str(error)) from None


def _warn(header: Header) -> None:
    from outrider.bench.sandbox import allowed

    if header.run_code and (can := allowed()):
        console.messages().print(f"warning: code that is run here can {', '.join(can)}")


async def _run(experiment: Experiment, book: Journal) -> None:
    from outrider.bench.questions import QuestionError
    from outrider.bench.runner import backend, run, total

    where: Any = backend(experiment, run_code=book.header.run_code, pins=book.header.pins)
    try:
        whole = total(experiment, where)
    except QuestionError as error:
        raise CommandError(str(error)) from None
    done = {cell.key for cell in book.cells}
    count, began = len(done), time.monotonic()
    with bars() as tell:
        tell("cells", count, whole)
        async with aclosing(run(experiment, where, done)) as cells:  # type: ignore[type-var]
            async for cell in cells:
                book.append(cell)
                count += 1
                tell("cells", count, whole)
                if count == len(done) + 1:
                    live = experiment.system == "live"  # whose first cell waited for models
                    took = cell.seconds if live else time.monotonic() - began
                    _foretell(took, whole - count)


def _foretell(seconds: float, left: int) -> None:
    """How long it will take, by the first cell: a guess, since arms differ."""
    if seconds * left >= WORTH_TELLING:
        text = f"the first cell took {seconds:.1f} s; {left} to go, about {_span(seconds * left)}"
        console.messages().print(text, markup=False)


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90.0 else f"{seconds / 60.0:.0f} min"
