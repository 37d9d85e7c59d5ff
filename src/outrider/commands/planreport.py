"""What `outrider plan` shows: a table, the recommendations, the inequalities, or JSON."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, Final

from rich import box
from rich.markup import escape
from rich.table import Table

from outrider.commands import console
from outrider.commands.planfacts import Known
from outrider.plan.choose import Choice, Objective, Survey, joules, money
from outrider.plan.facts import Facts
from outrider.plan.inequalities import (
    Inequality,
    capacity_gain,
    critical_delay_of,
    inequalities,
)
from outrider.plan.modes import (
    EDGE_CLOUD,
    Estimate,
    ceiling,
    saturation,
    shared,
)
from outrider.session.schedules import Schedule

APART: Final = tuple(s for s in Schedule if s is not Schedule.COLOCATED)
"""Ways to decode where the cloud hosts no draft."""
DOING: Final = {
    Schedule.CLOUD_ONLY: "stream from the cloud, without a draft",
    Schedule.COLOCATED: "let the cloud draft",
    Schedule.EDGE_ONLY: "let the draft answer by itself",
}
"""What to do where the answer is: do not speculate at the edge."""
PER: Final = 1000
"""Tokens that money is shown for."""


def row_of(survey: Survey, estimate: Estimate) -> dict[str, Any]:
    """One way to decode, at its best length for latency."""
    facts = survey.facts
    plain = survey.best(Objective.LATENCY, Schedule.CLOUD_ONLY)
    assert plain is not None, "cloud-only is always possible"
    at_edge = estimate.schedule in EDGE_CLOUD
    return {
        "name": estimate.schedule.value,
        "length": estimate.length,
        "same_text": not estimate.own_text,
        "ms_per_token": 1e3 * estimate.seconds,
        "ms_per_token_shared": 1e3 * shared(facts, estimate),
        "speedup": shared(facts, plain) / shared(facts, estimate),
        "forwards_per_token": estimate.forwards,
        "cloud_ms_per_token": 1e3 * estimate.cloud_seconds,
        "drafted_per_token": estimate.drafted,
        "bytes_up_per_token": estimate.up,
        "bytes_down_per_token": estimate.down,
        "money_per_1000_tokens": PER * money(facts, estimate) if facts.prices.money else None,
        "joules_per_token": joules(facts, estimate) if facts.prices.power else None,
        "tokens_per_second_per_verifier": _finite(estimate.capacity),
        "requests_that_fill_the_edge": saturation(facts, estimate) if at_edge else None,
        "rtt_ceiling_ms": _ceiling(facts, estimate.schedule),
    }


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else value


def _ceiling(facts: Facts, schedule: Schedule) -> float | str | None:
    """ms; None where the question means nothing, else a word."""
    if schedule not in EDGE_CLOUD:
        return None
    found = ceiling(facts, schedule)
    if found is None:
        return "never"
    return "always" if math.isinf(found) else 1e3 * found


def rows_of(survey: Survey) -> list[dict[str, Any]]:
    """Cloud streaming first, then the others by name of the schedule."""
    order = [Schedule.CLOUD_ONLY, *EDGE_CLOUD, Schedule.COLOCATED, Schedule.EDGE_ONLY]
    best = (survey.best(Objective.LATENCY, schedule) for schedule in order)
    return [row_of(survey, estimate) for estimate in best if estimate is not None]


# ------------------------------------------------------------------------------ JSON


def as_json(survey: Survey, known: Known) -> dict[str, Any]:
    """The one object of `--json`."""
    facts = survey.facts
    sync = survey.best(Objective.LATENCY, Schedule.SYNC)
    assert sync is not None, "sync is always possible"
    return {
        "facts": _facts(facts, known),
        "rows": rows_of(survey),
        "recommendations": {
            o.value: {
                "best": _choice(survey, survey.choose(o)),
                "without_a_draft_in_the_cloud": _choice(survey, survey.choose(o, APART)),
            }
            for o in Objective
        },
        "critical_delay_ms": _finite(1e3 * critical_delay_of(facts)),
        "capacity_gain_over_colocated": capacity_gain(facts, sync.length),
        "inequalities": [_inequality(i) for i in inequalities(facts)],
    }


def _facts(facts: Facts, known: Known) -> dict[str, Any]:
    return {
        "t_draft_ms": 1e3 * facts.draft,
        "t_verify_ms": [[rows, 1e3 * s] for rows, s in facts.verify],
        "t_plain_ms": 1e3 * facts.step,
        "t_draft_cloud_ms": None if facts.cloud_draft is None else 1e3 * facts.cloud_draft,
        "round_trip_ms": 1e3 * facts.round_trip,
        "up_bps": _finite(facts.up_bps),
        "down_bps": _finite(facts.down_bps),
        "survival": facts.curve.survival(16),
        "alpha": facts.curve.alpha,
        "rule": facts.rule.value,
        "requests": facts.requests,
        "edges": facts.edges,
        "prices": asdict(facts.prices),
        "sources": dict(known.sources),
    }


def _choice(survey: Survey, choice: Choice) -> dict[str, Any]:
    runner_up = choice.runner_up
    return {
        "schedule": choice.best.schedule.value,
        "length": choice.best.length,
        "ms_per_token": 1e3 * shared(survey.facts, choice.best),
        "cloud_ms_per_token": 1e3 * choice.best.cloud_seconds,
        "value": choice.value,
        "runner_up": None if runner_up is None else runner_up.schedule.value,
        "margin": choice.margin,
        "draft_at_the_edge": choice.speculate_at_edge,
        "best_at_the_edge": None if choice.edge is None else choice.edge.schedule.value,
        "gain_at_the_edge": choice.edge_gain,
    }


def _inequality(found: Inequality) -> dict[str, Any]:
    left, right = _finite(found.left), _finite(found.right)
    return asdict(found) | {"left": left, "right": right, "holds": found.holds}


# ------------------------------------------------------------------------------ for people


def show(survey: Survey, known: Known, *, explain: bool) -> None:
    """Table, recommendations, and the inequalities if asked for."""
    out = console.facts()
    facts = survey.facts
    out.print(_title(facts, known), markup=False, soft_wrap=True)
    out.print(_table(survey))
    for line in _notes(survey):
        out.print(line, markup=False, soft_wrap=True)
    out.print()
    for objective in Objective:
        for line in recommendation(survey, objective):
            out.print(escape(line), soft_wrap=True)
    if explain:
        out.print()
        for found in inequalities(facts):
            out.print(_explained(found), markup=False, soft_wrap=True)


def _title(facts: Facts, known: Known) -> str:
    def said(name: str) -> str:
        source = known.sources.get(name, "given")
        return "" if source == "given" else f" ({source})"

    rows = ", ".join(f"{n}: {1e3 * s:.4g}" for n, s in facts.verify)
    verify = f"{1e3 * facts.step:.4g} ms" if len(facts.verify) == 1 else f"{rows} ms by rows"
    cloud = "none" if facts.cloud_draft is None else f"{1e3 * facts.cloud_draft:.4g} ms"
    return (
        f"edge draft {1e3 * facts.draft:.4g} ms{said('draft')} | target {verify}"
        f"{said('verify')} | draft in the cloud {cloud}{said('cloud_draft')} | round trip "
        f"{1e3 * facts.round_trip:.4g} ms{said('round_trip')} | acceptance "
        f"{facts.curve.alpha:.3g}{said('curve')}"
    )


COLUMNS: Final = (
    ("ms_per_token_shared", "ms", ".1f"),
    ("speedup", "x", ".3g"),
    ("forwards_per_token", "fwd", ".2f"),
    ("cloud_ms_per_token", "cloud", ".1f"),
    ("bytes_up_per_token", "up", ".0f"),
    ("bytes_down_per_token", "down", ".0f"),
    ("money_per_1000_tokens", "price", ".3g"),
    ("joules_per_token", "J", ".3g"),
    ("tokens_per_second_per_verifier", "tok/s", ".0f"),
    ("rtt_ceiling_ms", "R max", ".0f"),
)
"""Key of a row, heading, format. A column nobody gave a price for is left out."""


def _table(survey: Survey) -> Table:
    rows = rows_of(survey)
    shown = [c for c in COLUMNS if any(row[c[0]] is not None for row in rows)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("K", *(heading for _, heading, _ in shown)):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        name = row["name"] + ("" if row["same_text"] else " *")
        cells = [_cell(row[key], form) for key, _, form in shown]
        table.add_row(name, str(row["length"] or "-"), *cells)
    return table


def _cell(value: float | str | None, form: str) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:{form}}"


def _notes(survey: Survey) -> list[str]:
    facts = survey.facts
    sync = survey.best(Objective.LATENCY, Schedule.SYNC)
    assert sync is not None, "sync is always possible"
    critical = critical_delay_of(facts)
    short = f"Blocks of one guess are best up to a one-way delay of {_ms(critical)}."
    many = math.ceil(saturation(facts, sync))
    lines = [
        "Per committed token; ms: time. K: guesses a block, or the window. x: against cloud "
        "streaming. fwd, cloud: forwards, and ms of the verifier's engine. up, down: bytes. tok/s: "
        "what one verifier can commit for all. R max: the round trip, ms, up to which it is faster "
        "than cloud streaming (freerun: by a hundredth).",
        short if critical > 0.0 else "Blocks of more than one guess are best at any delay.",
        f"multiplex: from {many} answers at a time at one edge on, sync keeps its engine or the "
        f"verifier busy: {1.0 / _bound(facts, sync):.1f} tokens/s; fewer take "
        f"{1e3 * sync.seconds:.1f} ms per token each.",
    ]
    if facts.prices.money:
        lines.append(f"price: per {PER} tokens.")
    lines.append("*: the draft's own text, which is another.")
    gain = capacity_gain(facts, sync.length)
    if gain is not None:
        lines.append(
            f"A saturated verifier serves {gain:.2f} times the edges in sync as it would drafting "
            "for them (1 + K t_d' / t_v)."
        )
    return lines


def _bound(facts: Facts, estimate: Estimate) -> float:
    """Seconds per token of one edge's answers together, at best."""
    return max(estimate.edge_seconds, facts.edges * estimate.cloud_seconds)


def _ms(seconds: float) -> str:
    return "any length" if math.isinf(seconds) else f"{1e3 * seconds:.0f} ms"


def recommendation(survey: Survey, objective: Objective) -> list[str]:
    """What to do for an objective, by how much, and what if the cloud hosts no draft."""
    choice = survey.choose(objective)
    lines = [f"{objective.value:<9} {_advice(survey, choice)}"]
    if choice.best.schedule is Schedule.COLOCATED:
        other = survey.choose(objective, APART)
        lines.append(f"{'':<9} if it cannot: {_advice(survey, other)}")
    return lines


def _advice(survey: Survey, choice: Choice) -> str:
    best, runner_up = choice.best, choice.runner_up
    doing = DOING.get(best.schedule) or f"draft at the edge, --schedule {best.schedule.value}"
    text = doing + (f" ({_option(best)})" if best.length else "")
    text += f": {_value(survey, choice.objective, best)}"
    if runner_up is not None:
        text += (
            f"; next {runner_up.schedule.value}, {_value(survey, choice.objective, runner_up)} "
            f"({100.0 * choice.margin:+.1f} %)"
        )
    if not choice.speculate_at_edge:
        text = f"don't draft at the edge: {text}"
    return text


def _option(estimate: Estimate) -> str:
    windowed = estimate.schedule in (Schedule.STREAM, Schedule.FREERUN)
    return f"--{'window' if windowed else 'draft-length'} {estimate.length}"


def _value(survey: Survey, objective: Objective, estimate: Estimate) -> str:
    facts = survey.facts
    waited, cloud = 1e3 * shared(facts, estimate), 1e3 * estimate.cloud_seconds
    match objective:
        case Objective.LATENCY:
            return f"{waited:.1f} ms per token"
        case Objective.BALANCED:
            return f"{waited:.1f} ms + {survey.weight:g} x {cloud:.1f} ms of the cloud"
    if facts.prices.money:
        return f"{PER * money(facts, estimate):.4g} per {PER} tokens at {waited:.1f} ms"
    return f"{cloud:.1f} ms of the cloud per token at {waited:.1f} ms"


def _explained(found: Inequality) -> str:
    verdict = "holds" if found.holds else "does not hold"
    return f"({found.number}) {found.claim}: {verdict}\n    {found.formula}\n    {found.numbers}"
