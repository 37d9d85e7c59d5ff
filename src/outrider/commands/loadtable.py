"""What `outrider load` shows of a run: one table of figures, and what to mind about them."""

from __future__ import annotations

from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from outrider.commands import console

BUSY: Final = 0.8
"""Share of a core from which on the edges' own process may be what limits a run (our choice)."""
EDGES_SHOWN: Final = 16
"""Edges with a row of their own; the rest are in the JSON."""


def report(facts: dict[str, Any]) -> None:
    out = console.facts()
    settings, cloud = facts["settings"], facts["cloud"]
    out.print(f"[bold]{escape(_title(settings, cloud))}[/bold]", soft_wrap=True)
    out.print(escape(_where(settings, cloud)), soft_wrap=True)
    table = _table("", "p50", "p95", "p99")
    for name, key in (
        ("first token, ms", "ttft_ms"),
        ("ms per token", "ms_per_token"),
        ("wait in the cloud, ms", "queue_ms"),
        ("forward, ms", "step_ms"),
    ):
        row = facts[key]
        table.add_row(name, *(_number(row.get(each)) for each in ("p50", "p95", "p99")))
    out.print(table)
    for line in _lines(facts):
        out.print(line, markup=False, soft_wrap=True)
    if len(facts["edges"]) > 1:
        out.print(_shares("edge", {str(e["edge"]): e for e in facts["edges"][:EDGES_SHOWN]}))
    if len(facts["tenants"]) > 1:
        out.print(_shares("tenant", facts["tenants"]))
    for line in _notes(facts):
        out.print(line, style="dim", markup=False, soft_wrap=True)


def _title(settings: dict[str, Any], cloud: dict[str, Any]) -> str:
    draft = settings["draft"] or settings["cloud_draft"]
    if draft and draft.startswith("replay:"):
        draft = f"{settings['recorded_draft']} (replayed)"
    guesses = f" with {draft}" if draft else ""
    return f"{cloud['target']}{guesses}, {settings['schedule']}/{settings['controller']}"


def _where(settings: dict[str, Any], cloud: dict[str, Any]) -> str:
    parts = [
        f"{settings['edges']} edges x {settings['requests']} answers",
        f"{settings['per_edge']} at once each",
        settings["arrivals"],
        f"link {settings['link'] or 'as it is'}",
        f"T={settings['temperature']:g}",
    ]
    if cloud["target_pace_ms"]:
        parts.append(f"{cloud['target_pace_ms']:g} ms added to a forward")
    if cloud["options"]:
        parts.append(f"verifier {cloud['options']}")
    return ", ".join(parts)


def _table(*headings: str) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(headings[0])
    for heading in headings[1:]:
        table.add_column(heading, justify="right")
    return table


def _number(value: float | None, form: str = ".1f") -> str:
    return "-" if value is None else format(value, form)


def _lines(facts: dict[str, Any]) -> list[str]:
    up, down = facts["bytes_up_per_token"], facts["bytes_down_per_token"]
    rows = facts["rows_per_forward"]
    accepted = facts["acceptance"]
    return [
        f"{_number(facts['tokens_per_s'])} tokens/s: {facts['tokens']} tokens of "
        f"{facts['answers']} answers in {facts['seconds']:.1f} s",
        f"a token: {_number(facts['forwards_per_token'], '.2f')} forwards of "
        f"{_number(rows, '.2f')} rows, {_number(up)} bytes up, {_number(down)} down",
        *_cloud_lines(facts),
        f"guesses accepted: {'-' if accepted is None else f'{accepted:.0%}'}, dropped unjudged: "
        f"{facts['wasted']}",
        f"fairness over edges (Jain): {_number(facts['fairness'], '.3f')}",
    ]


def _cloud_lines(facts: dict[str, Any]) -> list[str]:
    """What the verifier itself counted, if it tells."""
    if facts["cloud_forwards"] is None:
        return []
    per_token = _number(facts["cloud_forwards_per_token"], ".2f")
    rows = _number(facts["cloud_rows_per_forward"], ".2f")
    evicted = f", {facts['cloud_evictions']} evictions" if facts["cloud_evictions"] else ""
    counted = f"{facts['cloud_forwards']} forwards of {rows} rows, {per_token} a token{evicted}"
    return [f"the verifier: {counted}"]


def _shares(what: str, parts: dict[str, dict[str, Any]]) -> Table:
    table = _table(what, "answers", "tokens/s", "first p50", "ms/token p50", "p95")
    for name, part in parts.items():
        table.add_row(
            escape(name),
            str(part["answers"]),
            _number(part["tokens_per_s"]),
            _number(part["ttft_ms"]["p50"]),
            _number(part["ms_per_token"]["p50"]),
            _number(part["ms_per_token"]["p95"]),
        )
    return table


def _notes(facts: dict[str, Any]) -> list[str]:
    """What a reader must know to read the figures right."""
    settings = facts["settings"]
    warm = facts["warm_up_answers"]
    notes = [
        f"warm-up: {warm} short answers, not counted" if warm else "cold: nothing was warmed up",
        "forwards and rows a token: as each answer sees them; one forward may serve several",
    ]
    if settings["prompts"] < facts["asked"]:
        notes.append(
            f"{facts['asked']} answers of {settings['prompts']} prompts: some were asked again, "
            "and the verifier may have held what it needs of them"
        )
    if facts["interrupted"]:
        notes.append(f"interrupted: {facts['unfinished']} answers are missing and not counted")
    elif facts["unfinished"]:
        notes.append(f"{facts['unfinished']} answers were not asked for: their edge lost its link")
    for code, count in facts["errors"].items():
        notes.append(f"{count} answers failed ({code}); the first: {facts['first_error']}")
    if (facts["edges_cpu"] or 0.0) > BUSY:
        notes.append(
            f"the edges' process was busy for {facts['edges_cpu']:.0%} of a core: it may be the "
            "limit here, and not the verifier"
        )
    if len(facts["edges"]) > EDGES_SHOWN:
        notes.append(f"edges 0 to {EDGES_SHOWN - 1} of {len(facts['edges'])}; --json has all")
    return notes
