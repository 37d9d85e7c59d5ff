"""Which way to decode, for which aim, by how much; and when not to.

* `latency`: seconds per token.
* `balanced`: seconds per token + weight x engine seconds of the cloud per token, the aim of E2-SCI
  (E[T] + gamma E_cloud; docs/papers.md, 1).
* `cost`: money per token where there are prices, else engine seconds of the cloud; among those
  that are no slower than cloud streaming, or the longest blocks would always win.

Of the lengths of a schedule within SAME of its best, the shortest is taken: what it gives away is
less than an estimate is good for, and a long window is dropped unjudged more often.

A schedule that drafts at the edge has to earn its keep: one that is within WORTH of a simpler way
(cloud streaming, co-located) loses to it, and the answer is "don't".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from outrider.plan.facts import Facts
from outrider.plan.modes import EDGE_CLOUD, Estimate, everything, shared
from outrider.session.schedules import Schedule

WORTH: Final = 0.01
"""Gain below which drafting at the edge is not worth a second model and a link (our default): no
estimate is better than that."""
SAME: Final = 0.005
"""Relative difference of lengths that is none (our default)."""
WEIGHT: Final = 1.0
"""gamma: seconds of waiting that an engine second of the cloud is worth (our default)."""
MEGA: Final = 1e6


class Objective(StrEnum):
    LATENCY = "latency"
    BALANCED = "balanced"
    COST = "cost"


def money(facts: Facts, estimate: Estimate) -> float:
    """Per token, in the currency of the prices."""
    prices = facts.prices
    return (
        prices.cloud_second * estimate.cloud_seconds
        + prices.cloud_forward * estimate.forwards
        + prices.cloud_token * (not estimate.own_text)
        + prices.megabyte * (estimate.up + estimate.down) / MEGA
    )


def joules(facts: Facts, estimate: Estimate) -> float:
    """Per token: engines at work. What either draws while it waits is not counted."""
    prices = facts.prices
    return prices.edge_watts * estimate.edge_seconds + prices.cloud_watts * estimate.cloud_seconds


def value(facts: Facts, objective: Objective, estimate: Estimate, weight: float = WEIGHT) -> float:
    """What the objective wants least of."""
    match objective:
        case Objective.LATENCY:
            return shared(facts, estimate)
        case Objective.BALANCED:
            return shared(facts, estimate) + weight * estimate.cloud_seconds
        case Objective.COST:
            return money(facts, estimate) if facts.prices.money else estimate.cloud_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A recommendation."""

    objective: Objective
    best: Estimate
    value: float
    runner_up: Estimate | None
    """The best of another schedule; None: there is no other."""
    margin: float
    """By which the runner-up's value is higher, relative; 0 without one."""
    edge: Estimate | None
    """The best that drafts at the edge; None: none is fast enough (`cost`)."""
    edge_gain: float
    """By which cloud streaming's value is higher than that, relative; negative: it is lower; 0
    where there is none."""

    @property
    def speculate_at_edge(self) -> bool:
        """Or don't."""
        return self.best.schedule in EDGE_CLOUD


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Every estimate of some facts, computed once."""

    facts: Facts
    estimates: tuple[Estimate, ...]
    weight: float = WEIGHT

    @classmethod
    def of(cls, facts: Facts, *, weight: float = WEIGHT) -> Survey:
        return cls(facts=facts, estimates=tuple(everything(facts)), weight=weight)

    def value(self, objective: Objective, estimate: Estimate) -> float:
        return value(self.facts, objective, estimate, self.weight)

    def best(self, objective: Objective, schedule: Schedule) -> Estimate | None:
        """The length of a schedule that the objective likes most; None where it cannot be."""
        found = [e for e in self.estimates if e.schedule is schedule]
        if objective is Objective.COST:
            found = [e for e in found if shared(self.facts, e) <= self._slowest()]
        if not found:
            return None
        least = min(self.value(objective, e) for e in found)
        return next(e for e in found if self.value(objective, e) <= least * (1.0 + SAME))

    def _slowest(self) -> float:
        """Seconds per token of cloud streaming."""
        plain = next(e for e in self.estimates if e.schedule is Schedule.CLOUD_ONLY)
        return shared(self.facts, plain)

    def choose(self, objective: Objective, among: Sequence[Schedule] = tuple(Schedule)) -> Choice:
        """The recommendation. `among` holds cloud-only and at least one edge-cloud schedule."""
        field = [
            e
            for schedule in among
            if (e := self.best(objective, schedule)) and (self.facts.own_text or not e.own_text)
        ]
        order = sorted(field, key=lambda e: self.value(objective, e))
        edge = next((e for e in order if e.schedule in EDGE_CLOUD), None)
        simple = next(e for e in order if e.schedule not in EDGE_CLOUD)
        best = order[0]
        floor = self.value(objective, best)
        if best is edge and self.value(objective, simple) <= floor * (1.0 + WORTH):
            best = simple
        runner_up = next((e for e in order if e is not best), None)
        plain = next(e for e in order if e.schedule is Schedule.CLOUD_ONLY)
        return Choice(
            objective=objective,
            best=best,
            value=self.value(objective, best),
            runner_up=runner_up,
            margin=_more(self._of(objective, runner_up), self.value(objective, best)),
            edge=edge,
            edge_gain=_more(self.value(objective, plain), self.value(objective, edge or plain)),
        )

    def _of(self, objective: Objective, estimate: Estimate | None) -> float | None:
        return None if estimate is None else self.value(objective, estimate)


def _more(other: float | None, this: float) -> float:
    """How much higher, relative to this; 0 where there is nothing to compare."""
    return 0.0 if other is None or this <= 0.0 else other / this - 1.0
