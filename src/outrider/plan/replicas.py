"""How many verifiers so many edges need: answers that share forwards, by a mean value analysis.

A verifier with S answers is a closed network of two stations. What an answer does without the
engine between two of its forwards (drafting, the link) takes Z and is nobody else's; the engine
takes all that are ready into one forward, up to its row budget. With c seconds from forward to
forward of an answer,

    n = max(1, S f / c)              answers in a forward of f = f(n) seconds, within the budget
    w = min(1, (S - 1) f / c) f / 2  what one that comes waits: the rest of a forward that runs, if
                                     one runs; none where Z = 0: it is there when the next begins
    c = Z + w + f                    or S f / n where the budget is full

and the time per token is c times the forwards per token (ours; approximate, as answers are taken to
come back independently). Questions come by chance, so a verifier is planned for one standard
deviation more answers than its share (the square root staffing rule of Halfin and Whitt, 1981).

Only for ways to decode whose rounds are of one size: schedules that run ahead guess less under
load, which `outrider simulate --scale` knows. tests/plan/test_fleet.py compares with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from outrider.plan.facts import MOST_ROWS, Facts
from outrider.plan.modes import BLOCKS, Estimate, estimates
from outrider.session.schedules import Schedule

BATCH_ROWS: Final = 64
"""Rows of a forward: what `outrider cloud --batch-rows` is unless said otherwise."""
SLOTS: Final = 64
"""Answers under way on one verifier: what `outrider cloud --slots` is unless said otherwise."""
PLANNED: Final = (Schedule.CLOUD_ONLY, Schedule.SYNC, Schedule.COLOCATED)
"""Ways to decode whose rounds are of one size."""
_ALONE: Final = 1e-9
"""Share of a cycle below which an answer does nothing without the engine."""
_HALVINGS: Final = 30
"""Of at most 64 answers: to less than a millionth of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One verifier with so many answers at a time."""

    answers: int
    seconds: float
    """Per token of each answer."""
    batch: float
    """Answers in a forward."""
    forward: float
    """Seconds of a forward."""
    cycle: float
    """From forward to forward of an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Verifiers for a number of edges."""

    estimate: Estimate
    verifiers: int
    edges: int
    """At most, on one verifier."""
    share: Share
    """Of a verifier with so many edges and what chance adds."""
    more: Share | None
    """The same with an edge more, which is too many; None: slots or edges are what limits."""


def share(facts: Facts, estimate: Estimate, answers: int, *, budget: int = BATCH_ROWS) -> Share:
    """What becomes of one way to decode while `answers` run on a verifier. Raises ValueError for
    one that has no forwards."""
    if not estimate.forwards or answers < 1:
        raise ValueError("at least one answer, and forwards to share")
    alone = estimate.seconds / estimate.forwards
    single = estimate.cloud_seconds / estimate.forwards
    away = max(0.0, alone - single)
    waits = away > _ALONE * alone
    rows = float(1 + estimate.length)
    scale = single / _seconds(facts, rows)

    def at(batch: float) -> tuple[float, float]:
        """f(n), and c without a full budget."""
        forward = scale * _seconds(facts, batch * rows)
        free = away + forward
        if not waits:
            return forward, free
        # c = Z + f + (S - 1) f^2 / (2 c), as long as the engine is not always busy.
        cycle = (free + math.sqrt(free * free + 2.0 * (answers - 1) * forward * forward)) / 2.0
        return forward, min(cycle, free + forward / 2.0)

    def left(batch: float) -> float:
        """By how much more than `batch` answers come while one forward of theirs runs."""
        forward, cycle = at(batch)
        return answers * forward / cycle - batch

    low, high = 1.0, min(float(answers), max(1.0, min(budget, MOST_ROWS) / rows))
    if left(high) >= 0.0:
        low = high  # full, or all of them
    elif left(low) <= 0.0:
        high = low
    for _ in range(_HALVINGS if low < high else 0):
        middle = (low + high) / 2.0
        low, high = (middle, high) if left(middle) > 0.0 else (low, middle)
    forward, cycle = at(high)
    cycle = max(cycle, answers * forward / high if low == high and high > 1.0 else 0.0)
    return Share(
        answers=answers,
        seconds=cycle * estimate.forwards,
        batch=high,
        forward=forward,
        cycle=cycle,
    )


def _seconds(facts: Facts, rows: float) -> float:
    """t_v, between whole rows too."""
    low = min(int(rows), MOST_ROWS)
    high = min(low + 1, MOST_ROWS)
    return facts.seconds(low) + (rows - low) * (facts.seconds(high) - facts.seconds(low))


def fleet(
    facts: Facts,
    estimate: Estimate,
    *,
    edges: int,
    seconds: float,
    budget: int = BATCH_ROWS,
    slots: int = SLOTS,
) -> Fleet | None:
    """The fewest verifiers on which `edges` edges with `facts.requests` answers each have a token
    every `seconds`; None: no number of verifiers is enough."""
    if not estimate.forwards or facts.requests * estimate.edge_seconds > seconds:
        return None

    def planned(count: int) -> int:
        """Answers that a verifier with so many edges is planned for."""
        mean = count * facts.requests
        return min(mean + math.ceil(math.sqrt(mean)), edges * facts.requests)

    def of(count: int) -> Share:
        return share(facts, estimate, planned(count), budget=budget)

    def fits(count: int) -> bool:
        return planned(count) <= slots and of(count).seconds <= seconds

    if not fits(1):
        return None
    low, high = 1, edges + 1  # low fit, high do not or are more than there are
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    tight = low < edges and planned(low + 1) <= slots
    return Fleet(
        estimate=estimate,
        verifiers=math.ceil(edges / low),
        edges=low,
        share=of(low),
        more=of(low + 1) if tight else None,
    )


def fleets(facts: Facts, *, edges: int, seconds: float) -> list[Fleet]:
    """For each of PLANNED that is fast enough, its length (of BLOCKS) with the fewest verifiers; of
    equals the one with the least time."""
    found = []
    for schedule in PLANNED:
        made = [
            each
            for estimate in estimates(facts, schedule)
            if estimate.length in (0, *BLOCKS)
            and (each := fleet(facts, estimate, edges=edges, seconds=seconds)) is not None
        ]
        if made:
            found.append(min(made, key=lambda each: (each.verifiers, each.share.seconds)))
    return found
