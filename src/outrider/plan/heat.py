"""Round trip x acceptance: which way to decode wins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.plan.choose import WEIGHT, Objective, Survey
from outrider.plan.facts import Curve, Facts
from outrider.session.schedules import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat:
    """Winners by [acceptance][round trip], and what they gain."""

    facts: Facts
    objective: Objective
    trips: tuple[float, ...]
    """Seconds, ascending."""
    alphas: tuple[float, ...]
    winners: tuple[tuple[Schedule, ...], ...]
    """Of all ways to decode."""
    at_edge: tuple[tuple[Schedule, ...], ...]
    """The same without a draft in the cloud."""
    gains: tuple[tuple[float, ...], ...]
    """By which cloud streaming's value is higher than that of `at_edge`, relative."""


def heat(
    facts: Facts,
    objective: Objective,
    trips: Sequence[float],
    alphas: Sequence[float],
    *,
    weight: float = WEIGHT,
    told: Callable[[int, int], None] | None = None,
) -> Heat:
    """Constant acceptance in place of the facts' curve. `told(done, whole)` after each row."""
    apart = [s for s in Schedule if s is not Schedule.COLOCATED]
    winners, at_edge, gains = [], [], []
    for done, alpha in enumerate(alphas, 1):
        row = [
            Survey.of(replace(facts, curve=Curve.constant(alpha), round_trip=trip), weight=weight)
            for trip in trips
        ]
        winners.append(tuple(s.choose(objective).best.schedule for s in row))
        choices = [s.choose(objective, apart) for s in row]
        at_edge.append(tuple(c.best.schedule for c in choices))
        gains.append(tuple(max(0.0, c.edge_gain) for c in choices))
        if told is not None:
            told(done, len(alphas))
    return Heat(
        facts=facts,
        objective=objective,
        trips=tuple(trips),
        alphas=tuple(alphas),
        winners=tuple(winners),
        at_edge=tuple(at_edge),
        gains=tuple(gains),
    )
