"""Pictures (matplotlib): the cost surface of a calibration, and inertia beside its control."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from outrider.control.calibration import Calibration
from outrider.engines.base import MissingExtraError

FORMATS: Final = (".png", ".svg", ".pdf")
PANELS: Final = 4
"""Bins of credit shown, the most visited ones."""


def figure_of(width: float, height: float) -> Any:
    """Drawn straight to a file: no window, no state shared between figures."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise MissingExtraError(
            "matplotlib is not installed; run: pip install 'outrider[plots]'"
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def require() -> None:
    """Raises MissingExtraError now and not after minutes of work."""
    figure_of(1, 1)


def save(figure: Any, path: Path) -> None:
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        figure.savefig(partial, dpi=120)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def draw_surface(calibration: Calibration, path: Path) -> None:
    """ms a token by threshold and window, a panel for each much-visited bin of the credit."""
    table, made = calibration.table, calibration.provenance
    shown = sorted(sorted(range(len(table.visits)), key=lambda b: -table.visits[b])[:PANELS])
    shown = [b for b in shown if table.visits[b]]
    ms = 1e3 * np.array(table.seconds) / np.array(table.tokens)
    quality = np.array(table.quality)
    figure = figure_of(3.4 * len(shown) + 1.2, 3.8)
    axes = figure.subplots(1, len(shown), squeeze=False, sharey=True)[0]
    limits = {"vmin": ms[shown].min(), "vmax": np.quantile(ms[shown], 0.9)}
    for axis, b in zip(axes, shown, strict=True):
        image = axis.imshow(ms[b], origin="lower", aspect="auto", cmap="viridis_r", **limits)
        if quality[b].min() < made.delta < quality[b].max():
            axis.contour(quality[b], levels=[made.delta], colors="white", linewidths=1)
        column = table.windows.index(table.best_window[b])
        axis.plot(column, table.thresholds.index(table.best_threshold[b]), "r*", markersize=12)
        axis.set_title(f"credit {_range(table.edges, b)}, {table.visits[b]} windows", fontsize=9)
        axis.set_xticks(range(len(table.windows)), table.windows, fontsize=8)
        axis.set_xlabel("window W")
    axes[0].set_yticks(
        range(len(table.thresholds)), [f"{t:.2f}" for t in table.thresholds], fontsize=8
    )
    axes[0].set_ylabel("threshold T (nats of JSD)")
    figure.colorbar(image, ax=axes, label="ms per token", extend="max")
    figure.suptitle(
        f"{made.draft.name} for {made.target.name}, {made.schedule}, round trip "
        f"{1e3 * made.round_trip:g} ms; white: Acc = {made.delta:g}; star: label",
        fontsize=9,
    )
    save(figure, path)


def _range(edges: Sequence[float], b: int) -> str:
    low = edges[b - 1] if b else 0.0
    return f"{low:.1f}-{edges[b] if b < len(edges) else 1.0:.1f}"


def draw_inertia(groups: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """`groups`: `Inertia` as dictionaries. Left: correlation; right: rate after a high and after
    a low history. Dots with intervals: measured; crosses: within-prompt shuffle."""
    figure = figure_of(9.5, 1.6 + 0.45 * len(groups))
    left, right = figure.subplots(1, 2, sharey=True)
    for name, axis, colour, shift in (
        ("correlation", left, "tab:blue", 0.0),
        ("high", right, "tab:green", 0.12),
        ("low", right, "tab:red", -0.12),
    ):
        for row, group in enumerate(groups):
            _mark(axis, group["figures"][name], row + shift, colour)
    left.set_yticks(range(len(groups)), [g["group"] for g in groups])
    left.invert_yaxis()
    left.axvline(0, color="grey", linewidth=0.8)
    left.set_xlabel("correlation of adjacent windows (x: within-prompt shuffle)")
    right.set_xlabel("acceptance after a high (green) and a low (red) history")
    right.set_xlim(0, 1)
    figure.suptitle(title, fontsize=10)
    save(figure, path)


def _mark(axis: Any, found: Mapping[str, Any], y: float, colour: str) -> None:
    if found["value"] is None:
        return
    if found["interval"]:
        axis.plot(found["interval"], [y, y], color=colour, linewidth=1.5)
    axis.plot(found["value"], y, "o", color=colour)
    if found["control"] is not None:
        axis.plot(found["control"], y, "x", color="black")
