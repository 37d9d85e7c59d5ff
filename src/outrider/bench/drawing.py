"""Pictures of a run as SVG, written by hand: they need no library and no file beside the page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from outrider.bench.figures import Row
from outrider.bench.journal import Mark

WIDTH: Final = 860
LABEL: Final = 190
"""Pixels for names at the left."""
RIGHT: Final = 70
LINE: Final = 22
LANE: Final = 13
BLOCKS: Final = 24
"""Blocks of an answer that a timeline shows at most."""
STEPS: Final = (1, 2, 5)
SQUARE: Final = 420.0
"""Side of a picture that sets two figures against each other."""


def _text(x: float, y: float, words: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _svg(height: float, parts: Sequence[str], *, label: str) -> str:
    box = f'viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}"'
    return f'<div class="wide"><svg {box}>' + "".join(parts) + "</svg></div>"


def ticks(most: float, count: int = 6) -> list[float]:
    """About `count` round numbers from 0 to `most`."""
    if most <= 0:
        return [0.0]
    size = 1e-6
    while True:
        for step in STEPS:
            if most / (size * step) <= count:
                found = size * step
                return [i * found for i in range(int(most / found) + 1)]
        size *= 10


def _axis(most: float, height: float, unit: str) -> list[str]:
    scale = (WIDTH - LABEL - RIGHT) / most
    parts = []
    for at in ticks(most):
        x = LABEL + at * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="4" x2="{x:.1f}" y2="{height:.0f}"/>')
        parts.append(_text(x, height + 14, f"{at:g}", anchor="middle"))
    parts.append(_text(LABEL - 8, height + 14, unit, anchor="end"))
    return parts


def dots(rows: Sequence[Row], *, label: str) -> str:
    """ms a token of each arm, with its interval."""
    known = [(row, row.ms_per_token) for row in rows if row.ms_per_token is not None]
    most = max((e.high or e.value for _, e in known), default=1.0) or 1.0
    scale = (WIDTH - LABEL - RIGHT) / most
    height = LINE * len(known) + 8
    parts = _axis(most, height, "ms a token")
    for i, (row, found) in enumerate(known):
        y = LINE * i + 18
        x = LABEL + found.value * scale
        parts.append(_text(LABEL - 8, y + 4, row.arm, anchor="end"))
        if found.low is not None and found.high is not None:
            a, b = LABEL + found.low * scale, LABEL + found.high * scale
            parts.append(f'<line class="range" x1="{a:.1f}" y1="{y}" x2="{b:.1f}" y2="{y}"/>')
        parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{y}" r="4"/>')
        edge = LABEL + (found.high or found.value) * scale
        parts.append(_text(edge + 9, y + 4, f"{found.value:.1f}"))
    return _svg(height + 20, parts, label=label)


def against(pairs: Sequence[tuple[str, float, float]], *, limit: float, label: str) -> str:
    """`pairs`: name, live, simulated, in ms a token. A dot for each above its live figure, the line
    of equality, and the band of `limit` (a share) around it."""
    most = 1.05 * max((max(a, b) for _, a, b in pairs), default=1.0)
    side = SQUARE / most
    left, floor = LABEL, SQUARE + 8.0

    def at(live: float, simulated: float) -> str:
        return f"{left + live * side:.1f},{floor - simulated * side:.1f}"

    low, high = most * (1.0 - limit), most / (1.0 + limit)
    parts = [
        f'<polygon class="lane" points="{at(0, 0)} {at(most, low)} {at(most, most)} '
        f'{at(high, most)}"/>',
        f'<line class="range" x1="{left}" y1="{floor}" x2="{left + SQUARE}" y2="{floor - SQUARE}" '
        'style="stroke-width:1"/>',
    ]
    for tick in ticks(most):
        x, y = left + tick * side, floor - tick * side
        parts.append(f'<line class="grid" x1="{left}" y1="{y:.1f}" x2="{left + SQUARE}" ')
        parts.append(f'y2="{y:.1f}"/>')
        parts.append(_text(left - 8, y + 4, f"{tick:g}", anchor="end"))
        parts.append(_text(x, floor + 16, f"{tick:g}", anchor="middle"))
    for name, live, simulated in pairs:
        cx, cy = at(live, simulated).split(",")
        kind = "dot" if abs(simulated / live - 1.0) <= limit else "miss"
        said = f"{name}: {live:.1f} live, {simulated:.1f} simulated"
        parts.append(f'<circle class="{kind}" cx="{cx}" cy="{cy}" r="5">')
        parts.append(f"<title>{escape(said)}</title></circle>")
    parts.append(_text(left + SQUARE + 12, floor + 4, "ms a token, live"))
    parts.append(_text(left - 8, 14, "simulated", anchor="end"))
    return _svg(floor + 22, parts, label=label)


def timelines(answers: Sequence[tuple[str, Sequence[Mark]]], *, label: str) -> str:
    """Lanes of edge, link and cloud, one group an arm, all on one time scale that begins with
    the question."""
    most = max((marks[:BLOCKS][-1].at for _, marks in answers if marks), default=1.0)
    scale = (WIDTH - LABEL - RIGHT) / (1e3 * most)
    group = 3 * LANE + 12
    height = group * len(answers) + 4
    parts = _axis(1e3 * most, height, "ms")
    for i, (arm, marks) in enumerate(answers):
        top = group * i + 6
        parts.append(_text(LABEL - 52, top + LANE + 9, arm, anchor="end"))
        for lane, name in enumerate(("edge", "link", "cloud")):
            y = top + lane * LANE
            parts.append(_text(LABEL - 6, y + 10, name, anchor="end"))
            parts.append(f'<rect class="lane" x="{LABEL}" y="{y}" width="{WIDTH - LABEL - RIGHT}" ')
            parts.append(f'height="{LANE - 2}"/>')
        for mark in marks[:BLOCKS]:
            parts += _block(mark, top, 1e3 * scale)
    return _svg(height + 20, parts, label=label)


def _block(mark: Mark, top: float, scale: float) -> list[str]:
    """A block's way back from the moment it was shown: down, forward, queue, up. Half of what the
    network took is drawn in each direction, since only the sum is known."""
    half = (mark.network or 0.0) / 2
    out = mark.at - half
    begun = out - mark.step
    came = begun - mark.queue
    what = f"{mark.tokens} shown, {mark.accepted} of {mark.drafted} drafts stand"

    def bar(kind: str, lane: int, since: float, until: float) -> str:
        x, wide = LABEL + max(since, 0.0) * scale, max((until - max(since, 0.0)) * scale, 0.6)
        return (
            f'<rect class="{kind}" x="{x:.1f}" y="{top + lane * LANE}" width="{wide:.1f}" '
            f'height="{LANE - 2}"><title>{what}</title></rect>'
        )

    parts = [bar("step", 2, begun, out)]
    if mark.queue > 0:
        parts.append(bar("queue", 2, came, begun))
    if half:
        parts.append(bar("down", 1, out, mark.at))
        if mark.drafted:
            parts.append(bar("up", 1, came - half, came))
    x = LABEL + mark.at * scale
    tall = min(LANE - 2, 2 + 2 * mark.tokens)
    parts.append(
        f'<rect class="shown" x="{x - 1:.1f}" y="{top + LANE - 2 - tall}" width="2" '
        f'height="{tall}"><title>{what}</title></rect>'
    )
    return parts
