"""Tables of `outrider bench`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich.table import Table

from outrider.commands import console

if TYPE_CHECKING:
    from outrider.bench.experiment import Experiment
    from outrider.bench.figures import Estimate, Row
    from outrider.bench.journal import Cell, Header

NARROW: Final = (0, 1, 0, 0)
"""Space in a cell (top, right, bottom, left): both tables whole in 80 columns."""


def facts(experiment: Experiment, header: Header, cells: Sequence[Cell]) -> dict[str, Any]:
    """The JSON object of a run."""
    from outrider.bench.figures import rows
    from outrider.bench.validation import as_rows, held

    twins = held(cells)
    more = {"validation": as_rows(twins)} if twins else {}
    return {
        "title": experiment.title,
        "system": experiment.system.value,
        "base": experiment.base,
        "quick": header.quick,
        "machine": header.machine,
        "data": header.pins,
        "rows": [asdict(row) for row in rows(cells, base=experiment.base)],
        **more,
    }


def show(experiment: Experiment, header: Header, cells: Sequence[Cell], *, as_json: bool) -> None:
    """A run's figures, as a table or as JSON."""
    from outrider.bench.figures import rows

    if as_json:
        console.print_json(facts(experiment, header, cells))
        return
    out = console.facts()
    found = rows(cells, base=experiment.base)
    for point, data in dict.fromkeys((row.point, row.data) for row in found):
        title = " / ".join(part for part in (experiment.title, point, data) if part)
        out.print(_table(title, [r for r in found if (r.point, r.data) == (point, data)]))
    for note in notes(experiment, found):
        out.print(note, markup=False, soft_wrap=True)
    if experiment.system == "validate":
        _show_twins(cells)


def _show_twins(cells: Sequence[Cell]) -> None:
    """How far the simulator is from life."""
    from outrider.bench.validation import held, verdict

    found = held(cells)
    table = Table(title="simulated beside live", box=box.SIMPLE_HEAD, padding=NARROW)
    table.add_column("link", no_wrap=True)
    table.add_column("way to decode", no_wrap=True)
    for heading in ("ms live", "sim.", "error %", "own %", "fwd. live", "sim.", "error %", ""):
        table.add_column(heading, justify="right")
    for h in found:
        table.add_row(
            h.point,
            h.arm,
            f"{h.live_ms:.1f}",
            f"{h.simulated_ms:.1f}",
            f"{100 * h.error.value:+.1f}",
            f"{100 * h.own:+.1f}",
            f"{h.live_forwards:.3f}",
            f"{h.simulated_forwards:.3f}",
            f"{100 * h.forwards_error:+.1f}",
            "beyond" if h.beyond else "",
        )
    out = console.facts()
    out.print(table)
    out.print(f"{verdict(found)}.", markup=False, soft_wrap=True)


def notes(experiment: Experiment, found: Sequence[Row]) -> list[str]:
    """What a reader has to know of the figures."""
    kind = "Simulated." if experiment.system == "simulator" else "Live."
    said = [
        f"{kind} ms and speed: medians over answers; interval: 95 % bootstrap; speed is against "
        f"{experiment.base} on the same question and seed. edge-only is another text."
    ]
    if any(row.warm_up == 0 for row in found):
        said.append("cold: no warm-up before the first answer that counts.")
    lost = sum(row.unfinished for row in found)
    if lost:
        said.append(f"{lost} answers failed and are not in the figures.")
    return said


def _table(title: str, found: Sequence[Row]) -> Table:
    table = Table(title=title or None, box=box.SIMPLE_HEAD, padding=NARROW)
    # A long name takes two lines, no figure does.
    table.add_column("way to decode", overflow="fold")
    headings = (
        "ms per\ntoken",
        "interval",
        "speed",
        "interval",
        "TTFT\nms",
        "for-\nwards",
        "score",
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in found:
        table.add_row(
            row.arm,
            *_shown(row.ms_per_token, 1),
            *_shown(row.speed, 2),
            "-" if row.ttft_ms is None else f"{row.ttft_ms:.0f}",
            "-" if row.forwards_per_token is None else f"{row.forwards_per_token:.2f}",
            "-" if row.score is None else f"{row.score.value:.2f}",
        )
    return table


def _shown(estimate: Estimate | None, digits: int) -> tuple[str, str]:
    if estimate is None:
        return "-", ""
    value = f"{estimate.value:.{digits}f}"
    if estimate.low is None or estimate.high is None:
        return value, ""
    return value, f"{estimate.low:.{digits}f}-{estimate.high:.{digits}f}"
