"""`outrider report`: a run of the bench as a page, or two runs beside each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from outrider.commands import console
from outrider.commands.bench import load
from outrider.commands.benchtable import facts, show
from outrider.commands.errors import CommandError
from outrider.commands.options import Json

if TYPE_CHECKING:
    from outrider.bench.comparison import Change, Group
    from outrider.bench.journal import Run

FORMS: Final = (".html", ".json", ".csv", ".md")


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A file of `outrider bench`.")],
    other: Annotated[
        Path | None,
        typer.Argument(
            metavar="[OTHER]",
            help="A second run: how much faster it is, and which differences are beyond noise.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Write a page (.html), or figures (.json, .csv), or the table of a paper (.md); "
            "left out: a table here.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a page of a bench run: figures, plots, timelines of edge, link and cloud.

    The page is one file that loads nothing from anywhere.

    Examples:

    ```
    outrider report run.jsonl -o report.html
    outrider report before.jsonl after.jsonl
    ```
    """
    from outrider.bench.journal import JournalError, read

    if output is not None and output.suffix not in FORMS:
        raise CommandError(f"-o {output}: the name must end in {', '.join(FORMS)}")
    try:
        first = read(run)
        second = None if other is None else read(other)
    except JournalError as error:
        raise CommandError(str(error)) from None
    if not first.cells or (second is not None and not second.cells):
        raise CommandError("the run holds no cell yet: go on with it (outrider bench --resume)")
    if other is not None and second is not None:
        _compare((run, other), (first, second), output, as_json=as_json)
    elif output is None:
        show(load(first.header), first.header, first.cells, as_json=as_json)
    else:
        output.write_text(_written(first, output), encoding="utf-8")


def _written(run: Run, output: Path) -> str:
    from outrider.bench.figures import rows
    from outrider.bench.page import run_page, table_csv
    from outrider.bench.papertable import markdown

    experiment = load(run.header)
    match output.suffix:
        case ".html":
            return run_page(experiment, run.header, run.cells)
        case ".json":
            return json.dumps(facts(experiment, run.header, run.cells), indent=1) + "\n"
        case ".csv":
            return table_csv(rows(run.cells, base=experiment.base))
    if experiment.paper is None:
        raise CommandError("-o .md is for scenarios with a [paper]: name a .html file instead")
    return markdown(experiment, rows(run.cells, base=experiment.base), run.header.name)


def _compare(
    paths: tuple[Path, Path], runs: tuple[Run, Run], output: Path | None, *, as_json: bool
) -> None:
    from outrider.bench.comparison import changes
    from outrider.bench.page import comparison_page

    found, only = changes(runs[0].cells, runs[1].cells)
    if not found:
        raise CommandError("the two runs have no arm at the same point on the same data")
    names = (paths[0].name, paths[1].name)
    if output is not None and output.suffix == ".html":
        output.write_text(comparison_page(names, found, only), encoding="utf-8")
        return
    if output is not None and output.suffix != ".json":
        raise CommandError("two runs go into a .html or a .json file")
    if output is not None:
        output.write_text(json.dumps(_facts(found, only), indent=1) + "\n", encoding="utf-8")
    elif as_json:
        console.print_json(_facts(found, only))
    else:
        _show(names, found, only)


def _facts(found: list[Change], only: list[Group]) -> dict[str, object]:
    from dataclasses import asdict

    rows = [{**asdict(change), "beyond_noise": change.beyond_noise} for change in found]
    return {"rows": rows, "in_one_only": [list(group) for group in only]}


def _show(names: tuple[str, str], found: list[Change], only: list[Group]) -> None:
    from rich import box
    from rich.table import Table

    from outrider.bench.page import shown

    table = Table(title=f"{names[1]} against {names[0]}", box=box.SIMPLE_HEAD)
    for heading in ("way to decode", "point", "data", "times as fast", "beyond noise"):
        table.add_column(heading)
    for change in found:
        beyond = "yes" if change.beyond_noise else "no"
        where = (change.arm, change.point, change.data)
        table.add_row(*where, shown(change.ratio, 3), beyond)
    out = console.facts()
    out.print(table)
    out.print(
        "Medians over answers to the same question and seed, 95 % bootstrap intervals; of twenty "
        "that only chance moves, one is beyond noise.",
        markup=False,
        soft_wrap=True,
    )
    if only:
        out.print(f"In one run alone: {'; '.join(' / '.join(g) for g in only)}.", markup=False)
