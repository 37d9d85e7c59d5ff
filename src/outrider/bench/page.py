"""The report of a run, or of two, as one HTML file that needs nothing else."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from typing import Any, Final

from outrider.bench.comparison import Change, Group
from outrider.bench.drawing import against, dots, timelines
from outrider.bench.experiment import Experiment
from outrider.bench.figures import Estimate, Row, rows
from outrider.bench.journal import Cell, Header
from outrider.bench.papertable import pair, paper_table
from outrider.bench.validation import LIMIT, held, verdict

MAX_TIMELINES: Final = 4
"""Points whose timelines are drawn: each is some 50 kB."""

SHEET: Final = """
:root { color-scheme: light dark; --ink: #1c2733; --paper: #fff; --soft: #e8edf2; --edge: #d9822b;
  --link: #6b8fb3; --up: #a3bdd6; --cloud: #3d6b4f; --queue: #b9d1c2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4eaf0; --paper: #14191f; --soft: #26303a;
  --edge: #f0a04b; --link: #7fa6cc; --up: #47617c; --cloud: #6fae88; --queue: #3a5445; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1160px; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
th, td { padding: .25em .7em; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--soft); }
th:first-child, td:first-child, .two td:nth-child(2), .two th:nth-child(2) { text-align: left; }
.base td { font-weight: 600; } .noise { opacity: .6; }
svg { width: 100%; min-width: 620px; height: auto; } svg text { font-size: 11px; fill: var(--ink); }
.grid { stroke: var(--soft); } .range { stroke: var(--link); stroke-width: 3; }
.dot, .shown { fill: var(--edge); } .miss { fill: none; stroke: var(--edge); stroke-width: 2.5; }
.off td { color: var(--edge); font-weight: 600; } .lane { fill: var(--soft); opacity: .6; }
.step { fill: var(--cloud); } .queue { fill: var(--queue); }
.down { fill: var(--link); } .up { fill: var(--up); }
"""

Columns = Sequence[tuple[str, str]]
COLUMNS: Final[tuple[tuple[str, str, int], ...]] = (
    ("ms a token", "ms_per_token", 1),
    ("mean", "mean_ms_per_token", 1),
    ("speed", "speed", 2),
    ("TTFT ms", "ttft_ms", 0),
    ("calls a token", "forwards_per_token", 2),
    ("target time", "cloud_share", 2),
    ("B up", "bytes_up", 1),
    ("B down", "bytes_down", 1),
    ("accepted", "acceptance", 2),
    ("score", "score", 2),
    ("same text", "identical", 0),
    ("answers", "answers", 0),
)


def table(
    heads: Sequence[str], lines: Sequence[tuple[str, Sequence[str]]], *, names: int = 1
) -> str:
    """`lines`: (class, cells); the first `names` columns (one or two) are words."""
    top = "".join(f"<th>{escape(h)}</th>" for h in heads)
    body = "".join(
        f'<tr class="{kind}">' + "".join(f"<td>{escape(c)}</td>" for c in cells) + "</tr>"
        for kind, cells in lines
    )
    kind = "two" if names > 1 else "one"
    return (
        f'<div class="wide"><table class="{kind}"><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def shown(value: Any, digits: int) -> str:
    """A figure, with its interval where it has one."""
    if value is None:
        return "-"
    if not isinstance(value, Estimate):
        return f"{value:.{digits}f}"
    text = f"{value.value:.{digits}f}"
    if value.low is None or value.high is None:
        return text
    return f"{text} [{value.low:.{digits}f}, {value.high:.{digits}f}]"


def _whole(title: str, parts: Sequence[str]) -> str:
    name = escape(title or "outrider bench")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{SHEET}</style></head><body><h1>{name}</h1>{''.join(parts)}</body></html>\n"
    )


def _said(words: str) -> str:
    return f"<p>{escape(words)}</p>"


def _about(experiment: Experiment, header: Header, found: Sequence[Row]) -> list[str]:
    machine = header.machine
    cold = any(row.warm_up == 0 for row in found)
    lost = sum(row.unfinished for row in found)
    said = [
        f"{'Simulated' if experiment.system == 'simulator' else 'Live'}, from {header.name}"
        f"{' with --quick' if header.quick else ''}; outrider {machine.get('outrider', '?')} on "
        f"{machine.get('system', '?')}, {machine.get('cores', '?')} cores, "
        f"{machine.get('memory_gib', '?')} GiB, Python {machine.get('python', '?')}"
        + (f", {machine['pinning']}." if "pinning" in machine else "."),
        "ms a token and speed are medians over answers, mean is sum of time over sum of tokens, "
        f"brackets hold 95 % bootstrap intervals; speed is against {experiment.base} on the same "
        "question and seed. edge-only is another text. Calls and bytes are a token's share.",
    ]
    if header.pins:
        pins = ", ".join(f"{name.partition('@')[0]} at {pin}" for name, pin in header.pins.items())
        said.append(f"Data sets from the hub: {pins}.")
    if cold:
        said.append("cold: no warm-up before the first answer that counts.")
    if lost:
        said.append(f"{lost} answers failed and are not in the figures.")
    return [_said(text) for text in said]


def run_page(experiment: Experiment, header: Header, cells: Sequence[Cell]) -> str:
    """A run as HTML."""
    found = rows(cells, base=experiment.base)
    parts = _about(experiment, header, found)
    parts += _validation(cells)
    if experiment.paper is not None:
        parts += _paper(experiment, found)
    for number, (point, data) in enumerate(dict.fromkeys((r.point, r.data) for r in found)):
        title = " / ".join(part for part in (point, data) if part) or "figures"
        here = [r for r in found if (r.point, r.data) == (point, data)]
        parts.append(f"<h2>{escape(title)}</h2>")
        parts.append(dots(here, label=f"time per token, {title}"))
        parts.append(_figures(here, experiment.base))
        if number < MAX_TIMELINES:
            parts += _timelines([c for c in cells if (c.key.point, c.key.data) == (point, data)])
    return _whole(experiment.title, parts)


def _validation(cells: Sequence[Cell]) -> list[str]:
    """Each cell's twin beside it."""
    found = held(cells)
    if not found:
        return []
    heads = ["link", "way to decode", "ms live", "simulated", "error %", "noise %", "own %"]
    heads += ("forwards live", "simulated", "error %", "accepted live", "simulated", "answers")
    lines = [
        (
            "off" if h.beyond else "",
            [
                h.point,
                h.arm,
                f"{h.live_ms:.1f}",
                f"{h.simulated_ms:.1f}",
                _percent(h.error),
                "-" if h.noise is None else f"{100 * h.noise:.1f}",
                f"{100 * h.own:+.1f}",
                f"{h.live_forwards:.3f}",
                f"{h.simulated_forwards:.3f}",
                f"{100 * h.forwards_error:+.1f}",
                str(h.live_accepted),
                str(h.simulated_accepted),
                str(h.answers),
            ],
        )
        for h in found
    ]
    return [
        "<h2>The simulator against life</h2>",
        _said(f"{verdict(found)}."),
        against(
            [(f"{h.arm}, {h.point}", h.live_ms, h.simulated_ms) for h in found],
            limit=LIMIT,
            label="time per token, simulated against live",
        ),
        _said(f"The band is {100 * LIMIT:.0f} %; hollow: beyond it."),
        table(heads, lines, names=2),
        _said(
            "Each live answer was played once more in virtual time: with what forwards, drafts and "
            "the ways between them took in short answers asked for in between, and with the "
            "guesses that stood. Times are medians over answers; error: the median of simulated "
            "over live, less 1, with its interval; noise: half of the middle half of the answers' "
            "errors; own: the error when the twin is told what the answer's own forwards and "
            "drafts took, which is the model's alone. Coloured: time or forwards off by more than "
            f"{100 * LIMIT:.0f} %."
        ),
    ]


def _percent(error: Estimate) -> str:
    text = f"{100 * error.value:+.1f}"
    if error.low is None or error.high is None:
        return text
    return f"{text} [{100 * error.low:+.1f}, {100 * error.high:+.1f}]"


def _figures(found: Sequence[Row], base: str) -> str:
    heads = ["way to decode", *(head for head, _, _ in COLUMNS)]
    lines = [
        (
            "base" if row.arm == base else "",
            [row.arm, *(shown(getattr(row, name), digits) for _, name, digits in COLUMNS)],
        )
        for row in found
    ]
    return table(heads, lines)


def _timelines(cells: Sequence[Cell]) -> list[str]:
    """The first answer of each arm."""
    firsts: dict[str, Cell] = {}
    for cell in cells:
        if cell.marks:
            firsts.setdefault(cell.key.arm, cell)
    if not firsts:
        return []
    lanes = []
    for arm, cell in firsts.items():
        lanes.append((arm, cell.marks))
        if cell.twin is not None:
            lanes.append((f"{arm}, simulated", cell.twin.marks))
    picture = timelines(lanes, label="blocks of one answer")
    return [
        "<h3>One answer, block by block</h3>",
        picture,
        _said(
            "Edge: tokens shown, as high as they are many. Link: drafts up (pale) and the verdict "
            "down, half of what the network took drawn each way. Cloud: waiting (pale) and forward."
        ),
    ]


def _paper(experiment: Experiment, found: Sequence[Row]) -> list[str]:
    paper = experiment.paper
    assert paper is not None
    made = paper_table(experiment, found)
    lines = [
        (
            "base" if line.left_out else "",
            [line.name, *(pair(p, o) for p, o in zip(line.published, line.ours, strict=True))],
        )
        for line in made.lines
    ]
    parts = [f"<h2>{escape(paper.table)}: paper / here</h2>", _said(f"{paper.source}.")]
    parts.append(table([made.figure, *(p or "all" for p in made.points)], lines))
    for words, text in (
        ("Not stated there, ours", paper.not_found),
        ("Left out there (bold)", paper.left_out),
        ("Why they differ", paper.reason),
    ):
        if text:
            parts.append(_said(f"{words}: {text}."))
    return parts


def comparison_page(names: tuple[str, str], found: Sequence[Change], only: Sequence[Group]) -> str:
    """Two runs as HTML."""
    lines = [
        (
            "base" if change.beyond_noise else "noise",
            [
                change.arm,
                change.point,
                change.data,
                shown(change.ratio, 3),
                "yes" if change.beyond_noise else "no",
                str(change.answers),
            ],
        )
        for change in found
    ]
    parts = [
        _said(
            f"How many times as fast {names[1]} is as {names[0]}: median over answers to the same "
            "question and seed, with its 95 % bootstrap interval. Beyond noise: the interval "
            "leaves 1 out. One in twenty does so by chance."
        ),
        table(["way to decode", "point", "data", "ratio", "beyond noise", "answers"], lines),
    ]
    if only:
        parts.append(_said(f"In one of them alone: {'; '.join(' / '.join(g) for g in only)}."))
    return _whole(f"{names[0]} and {names[1]}", parts)


def flat(row: Row) -> dict[str, Any]:
    """A row with intervals in columns of their own."""
    found: dict[str, Any] = {}
    for name, value in asdict(row).items():
        if isinstance(value, dict):
            found |= {
                name: value["value"],
                f"{name}_low": value["low"],
                f"{name}_high": value["high"],
            }
        else:
            found[name] = value
    return found


def table_csv(found: Sequence[Row]) -> str:
    """All rows as CSV."""
    lines = [flat(row) for row in found]
    heads = list(dict.fromkeys(name for line in lines for name in line))
    out = io.StringIO()
    writer = csv.DictWriter(out, heads, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()
