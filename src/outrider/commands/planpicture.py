"""The heat map of `outrider plan`: who wins by round trip and acceptance (matplotlib)."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from outrider.calibrate.plot import figure_of, save
from outrider.commands.errors import CommandError
from outrider.plan.choose import Objective
from outrider.plan.facts import Facts
from outrider.plan.heat import Heat, heat
from outrider.session.schedules import Schedule

FORMATS: Final = (".png", ".svg", ".html")
TRIPS: Final = 25
"""Columns: round trips from 0 to LONGEST target steps, or twice the facts' own."""
LONGEST: Final = 5.0
ALPHAS: Final = tuple(0.30 + 0.025 * i for i in range(27))
"""Rows: acceptance .30 to .95."""
LEVELS: Final = (0.05, 0.25, 0.5, 1.0, 2.0)
"""Contours of the gain over cloud streaming."""
COLOURS: Final = {
    Schedule.CLOUD_ONLY: "#d9d9d9",
    Schedule.COLOCATED: "#80b1d3",
    Schedule.SYNC: "#fdb462",
    Schedule.PEARL: "#fccde5",
    Schedule.PLC: "#bc80bd",
    Schedule.STREAM: "#b3de69",
    Schedule.MULTIPLEX: "#fb8072",
    Schedule.HYBRID: "#ccebc5",
    Schedule.FREERUN: "#8dd3c7",
    Schedule.EDGE_ONLY: "#ffffb3",
}


def require(path: Path) -> None:
    """Raises CommandError, MissingExtraError before anything is computed."""
    if path.suffix not in FORMATS:
        raise CommandError(f"--heatmap {path.name}: name a .png, .svg or .html file")
    if not path.parent.is_dir():
        raise CommandError(f"--heatmap: there is no folder {path.parent}")
    figure_of(1, 1)


def draw(
    facts: Facts,
    objective: Objective,
    path: Path,
    *,
    weight: float,
    told: Callable[[int, int], None],
) -> Path:
    """Compute and draw. The file is whole or not there."""
    longest = max(LONGEST * facts.step, 2.0 * facts.round_trip)
    trips = [longest * i / (TRIPS - 1) for i in range(TRIPS)]
    found = heat(facts, objective, trips, ALPHAS, weight=weight, told=told)
    figure = _figure(found)
    if path.suffix != ".html":
        save(figure, path)
        return path
    drawing = io.StringIO()
    figure.savefig(drawing, format="svg")
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(_page(found, drawing.getvalue()), encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _figure(found: Heat) -> Any:
    figure = figure_of(11.0, 4.6)
    panels = [("the draft runs at the edge only", found.at_edge)]
    if found.facts.cloud_draft is not None:
        panels.append(("the cloud may draft, too", found.winners))
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axis, (title, winners) in zip(axes, panels, strict=True):
        _panel(axis, found, winners)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("round trip (ms)")
    gains = axes[0].contour(
        1e3 * np.array(found.trips),
        found.alphas,
        np.array(found.gains),
        levels=LEVELS,
        colors="black",
        linewidths=0.8,
    )
    axes[0].clabel(gains, fmt=lambda x: f"+{100 * x:.0f} %", fontsize=7)
    axes[0].set_ylabel("acceptance")
    _legend(figure, found)
    figure.suptitle(_title(found), fontsize=10)
    return figure


def _panel(axis: Any, found: Heat, winners: Sequence[Sequence[Schedule]]) -> None:
    from matplotlib.colors import to_rgb

    image = np.array([[to_rgb(COLOURS[s]) for s in row] for row in winners])
    trips, alphas = found.trips, found.alphas
    half_x, half_y = (trips[1] - trips[0]) / 2, (alphas[1] - alphas[0]) / 2
    extent = (
        1e3 * (trips[0] - half_x),
        1e3 * (trips[-1] + half_x),
        alphas[0] - half_y,
        alphas[-1] + half_y,
    )
    axis.imshow(image, origin="lower", aspect="auto", extent=extent, interpolation="nearest")
    axis.plot(1e3 * found.facts.round_trip, found.facts.curve.alpha, "k*", markersize=10)
    axis.set_xlim(extent[0], extent[1])
    axis.set_ylim(extent[2], extent[3])


def _legend(figure: Any, found: Heat) -> None:
    from matplotlib.patches import Patch

    seen = {s for rows in (found.winners, found.at_edge) for row in rows for s in row}
    patches = [Patch(color=COLOURS[s], label=s.value) for s in Schedule if s in seen]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8)


def _title(found: Heat) -> str:
    facts = found.facts
    return (
        f"{found.objective.value}: target {1e3 * facts.step:.4g} ms, draft "
        f"{1e3 * facts.draft:.4g} ms at the edge; star: here; lines: gain over cloud streaming"
    )


def _page(found: Heat, drawing: str) -> str:
    """One self-contained file."""
    title = html.escape(f"outrider plan, {_title(found)}")
    image = drawing[drawing.index("<svg") :]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<h1>{title}</h1>{image}</html>\n"
    )
