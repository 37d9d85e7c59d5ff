"""A published table beside ours: pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from outrider.bench.experiment import BASELINES, Experiment
from outrider.bench.figures import Row, value

NAMES: Final = {
    "ms_per_token": "ms a token (median)",
    "mean_ms_per_token": "ms a token",
    "tokens_per_second": "tokens a second",
    "speed": "speed against the base arm",
    "forwards_per_token": "target calls a token",
    "cloud_share": "target time, share of the base arm's",
    "score": "score",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A method: published and ours by point; None: not published, or not run."""

    name: str
    published: tuple[float | None, ...]
    ours: tuple[float | None, ...]
    left_out: bool = False
    """A baseline that the paper's table has not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperTable:
    """Lines by method, columns by point."""

    figure: str
    points: tuple[str, ...]
    lines: tuple[Line, ...]


def paper_table(experiment: Experiment, rows: Sequence[Row]) -> PaperTable:
    """All arms of an experiment with a paper, and the methods that nothing here is."""
    paper = experiment.paper
    assert paper is not None
    points = tuple(p.name for p in experiment.points)
    found = {(r.point, r.arm): value(r, paper.figure) for r in rows}
    lines = []
    for arm in experiment.arms:
        published = paper.published.get(arm, {})
        label = paper.labels.get(arm)
        lines.append(
            Line(
                name=f"{label} ({arm})" if label else arm,
                published=tuple(published.get(p) for p in points),
                ours=tuple(found.get((p, arm)) for p in points),
                left_out=arm in BASELINES and not published,
            )
        )
    for name, published in paper.unmatched.items():
        there = tuple(published.get(p) for p in points)
        lines.append(Line(name=f"{name} (not run)", published=there, ours=(None,) * len(points)))
    return PaperTable(figure=NAMES[paper.figure], points=points, lines=tuple(lines))


def shown(number: float | None) -> str:
    """Three figures that count, or a dash."""
    if number is None:
        return "-"
    return f"{number:.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def pair(published: float | None, ours: float | None) -> str:
    """'published / ours'."""
    return f"{shown(published)} / {shown(ours)}"


def markdown(experiment: Experiment, rows: Sequence[Row], scenario: str, *, note: str = "") -> str:
    """A section of docs/results.md. `note`: under which conditions ours was measured."""
    paper = experiment.paper
    assert paper is not None
    table = paper_table(experiment, rows)
    out = [f"## {paper.table}", "", f"{paper.source}. Scenario: `{scenario}`."]
    if paper.not_found:
        out.append(f"Not stated there, ours: {paper.not_found}.")
    if note:
        out.append(note)
    out += ["", f"{table.figure}, paper / here; **bold**: baselines that the table left out.", ""]
    heads = " | ".join(point or "all" for point in table.points)
    out += [f"| way to decode | {heads} |", "| --- |" + " --- |" * len(table.points)]
    for line in table.lines:
        name = f"**{line.name}**" if line.left_out else line.name
        cells = " | ".join(pair(p, o) for p, o in zip(line.published, line.ours, strict=True))
        out.append(f"| {name} | {cells} |")
    if paper.left_out:
        out += ["", f"*Left out there*: {paper.left_out}."]
    if paper.reason:
        out += ["", f"*Why they differ*: {paper.reason}."]
    return "\n".join(out) + "\n"
