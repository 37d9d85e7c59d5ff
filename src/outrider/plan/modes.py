"""Every way to decode, at every length: what a token takes and costs.

Closed forms where there are any (docs/papers.md, 0): cloud streaming, co-located and synchronous
speculation from Speculation at a Distance (arXiv 2606.25091), with payload, row costs and a general
prefix curve (ours). Schedules that run ahead: `plan.walk`. All of long answers, one at a time;
`shared` says what is left when answers share an edge and edges share a verifier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from outrider.control.specstop import cheapest, expected_tokens
from outrider.core.link import FRAME_OVERHEAD
from outrider.plan.facts import MAX_SECONDS, VERDICT_BYTES, Facts, longest
from outrider.plan.walk import BITS, renewal
from outrider.session.schedules import DEFAULT_WINDOW, MAX_WINDOW, Schedule, plan

EDGE_CLOUD: Final = (
    Schedule.SYNC,
    Schedule.PEARL,
    Schedule.PLC,
    Schedule.STREAM,
    Schedule.MULTIPLEX,
    Schedule.HYBRID,
    Schedule.FREERUN,
)
"""Schedules that draft at the edge. `multiplex` is the loop of `sync` by turns: it stands beside it
where several answers run at an edge."""
BLOCKS: Final = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
"""Lengths tried for `pearl` and `multiplex`."""
WINDOWS: Final = (4, 8, 16, 32, 64, 128)
"""Windows tried for `stream` and `freerun`, and lengths with which `plc` and `hybrid` begin."""
_REACHING: Final = frozenset({Schedule.PLC, Schedule.HYBRID})
"""Schedules with a length and a window."""
FAINT: Final = 0.01
"""Free-run fades with the round trip and never turns: its ceiling is where a hundredth is left."""
NEAR: Final = 1e-3
"""A ceiling is found to a thousandth of its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One way to decode at one length. Everything per committed token."""

    schedule: Schedule
    length: int
    """K, or the window of `stream` and `freerun`; 0 where nothing is drafted in blocks."""
    seconds: float
    """Of one answer alone."""
    forwards: float
    cloud_seconds: float
    """Of the verifier's engine, its own drafting included."""
    drafted: float
    """By the edge, in vain or not."""
    edge_seconds: float
    """Of the edge's engine."""
    up: float
    """Payload bytes."""
    down: float

    @property
    def capacity(self) -> float:
        """Tokens a second that one verifier can commit, one block a forward."""
        return 1.0 / self.cloud_seconds if self.cloud_seconds else float("inf")

    @property
    def own_text(self) -> bool:
        """The draft's text instead of the target's."""
        return self.schedule is Schedule.EDGE_ONLY


def cloud_only(facts: Facts) -> Estimate:
    """The cloud streams, one forward a token; a thin link may be slower than the model."""
    wire = BITS * (VERDICT_BYTES + FRAME_OVERHEAD) / facts.down_bps
    return Estimate(
        schedule=Schedule.CLOUD_ONLY,
        length=0,
        seconds=max(facts.step, wire),
        forwards=1.0,
        cloud_seconds=facts.step,
        drafted=0.0,
        edge_seconds=0.0,
        up=0.0,
        down=VERDICT_BYTES,
    )


def edge_only(facts: Facts) -> Estimate:
    """The draft by itself: no link, no target, another text."""
    return Estimate(
        schedule=Schedule.EDGE_ONLY,
        length=0,
        seconds=facts.draft,
        forwards=0.0,
        cloud_seconds=0.0,
        drafted=1.0,
        edge_seconds=facts.draft,
        up=0.0,
        down=0.0,
    )


def payload_seconds(facts: Facts, length: int) -> float:
    """What a block and its verdict take on the wire beside the delay."""
    up = BITS * (facts.up_bytes(length) + FRAME_OVERHEAD) / facts.up_bps
    return up + BITS * (VERDICT_BYTES + FRAME_OVERHEAD) / facts.down_bps


def round_seconds(facts: Facts, length: int) -> float:
    """N(k) of the synchronous loop: k t_d + R + bytes up and down + t_v(k + 1)."""
    work = length * facts.draft + facts.seconds(length + 1)
    return work + facts.round_trip + payload_seconds(facts, length)


def sync(facts: Facts, length: int) -> Estimate:
    """N(k) / B(k)."""
    alive = facts.curve.survival(length)
    tokens = expected_tokens(alive)[-1]
    more_up, more_down = facts.rejection_bytes
    falls = 1.0 - alive[-1]
    return Estimate(
        schedule=Schedule.SYNC,
        length=length,
        seconds=(round_seconds(facts, length) + falls * _dialogue_seconds(facts)) / tokens,
        forwards=1.0 / tokens,
        cloud_seconds=facts.seconds(length + 1) / tokens,
        drafted=length / tokens,
        edge_seconds=length * facts.draft / tokens,
        up=(facts.up_bytes(length) + falls * more_up) / tokens,
        down=(VERDICT_BYTES + falls * more_down) / tokens,
    )


def _dialogue_seconds(facts: Facts) -> float:
    """What a rejection's answer takes on the wire; its way up is that of the next drafts."""
    up, down = facts.rejection_bytes
    return BITS * (up / facts.up_bps + down / facts.down_bps)


def colocated(facts: Facts, length: int) -> Estimate:
    """(k t_d' + t_v(k + 1)) / B(k). Raises ValueError where the cloud cannot draft."""
    if facts.cloud_draft is None:
        raise ValueError("the cloud has no draft")
    tokens = expected_tokens(facts.curve.survival(length))[-1]
    seconds = (length * facts.cloud_draft + facts.seconds(length + 1)) / tokens
    return Estimate(
        schedule=Schedule.COLOCATED,
        length=length,
        seconds=seconds,
        forwards=1.0 / tokens,
        cloud_seconds=seconds,
        drafted=0.0,
        edge_seconds=0.0,
        up=0.0,
        down=VERDICT_BYTES / tokens,
    )


def ahead(facts: Facts, schedule: Schedule, length: int) -> Estimate:
    """A schedule that drafts while others are judged. `length`: K, or its window."""
    window = max(DEFAULT_WINDOW, length) if schedule in _REACHING else length
    cycle = renewal(facts, plan(schedule, draft_length=length, window=min(window, MAX_WINDOW)))
    tokens = cycle.tokens
    return Estimate(
        schedule=schedule,
        length=length,
        seconds=cycle.seconds / tokens,
        forwards=cycle.forwards / tokens,
        cloud_seconds=cycle.cloud_seconds / tokens,
        drafted=cycle.drafted / tokens,
        edge_seconds=cycle.drafted * facts.draft / tokens,
        up=cycle.up / tokens,
        down=cycle.down / tokens,
    )


# ------------------------------------------------------------------------------ all of them


def lengths(facts: Facts, schedule: Schedule) -> Sequence[int]:
    """Those worth trying."""
    most = longest(facts)
    match schedule:
        case Schedule.SYNC | Schedule.COLOCATED:
            return range(1, most + 1)
        case Schedule.PEARL | Schedule.MULTIPLEX:
            return [k for k in BLOCKS if k <= most]
        case Schedule.PLC | Schedule.HYBRID:
            return [k for k in (2, *WINDOWS) if k <= min(most, DEFAULT_WINDOW)] or [1]
        case Schedule.STREAM | Schedule.FREERUN:
            return WINDOWS
    return [0]


def estimates(facts: Facts, schedule: Schedule) -> list[Estimate]:
    """One for each length worth trying; none where it cannot be."""
    match schedule:
        case Schedule.CLOUD_ONLY:
            return [cloud_only(facts)]
        case Schedule.EDGE_ONLY:
            return [edge_only(facts)]
        case Schedule.SYNC:
            return [sync(facts, k) for k in lengths(facts, schedule)]
        case Schedule.COLOCATED:
            possible = facts.cloud_draft is not None
            return [colocated(facts, k) for k in lengths(facts, schedule)] if possible else []
        case Schedule.MULTIPLEX if facts.requests == 1:
            return []
    return [ahead(facts, schedule, k) for k in lengths(facts, schedule)]


def everything(facts: Facts) -> Iterator[Estimate]:
    """Every schedule at every length."""
    for schedule in Schedule:
        yield from estimates(facts, schedule)


def fastest(facts: Facts, schedule: Schedule) -> Estimate:
    """The length with the least time per token, the shortest of equals."""
    found = estimates(facts, schedule)
    return found[cheapest([e.seconds for e in found], least=0)]


# ------------------------------------------------------------------------------ sharing


def shared(facts: Facts, estimate: Estimate) -> float:
    """Seconds per token of an answer while `requests` answers run at each of `edges` edges.

    The asymptotic bound of a closed network: no answer is faster than alone, an edge's engine
    commits no more than 1 / edge_seconds tokens a second for all its answers, a verifier's no more
    than 1 / cloud_seconds for all edges. Queues before these bounds are not in it, so it is a
    lower bound near the knee; drafts and blocks that share a forward are not either, so it is an
    upper one behind it.
    """
    here = facts.requests * estimate.edge_seconds
    there = facts.requests * facts.edges * estimate.cloud_seconds
    return max(estimate.seconds, here, there)


def saturation(facts: Facts, estimate: Estimate) -> float:
    """Answers at a time at one edge that keep its engine or the verifier busy: from there on
    confirmed-prefix multiplexing has a draft to make or a block to judge at any time
    ((k t_d + R + t_v) / max(k t_d, t_v), docs/papers.md, 0)."""
    busiest = max(estimate.edge_seconds, facts.edges * estimate.cloud_seconds)
    return estimate.seconds / busiest if busiest else float("inf")


# ------------------------------------------------------------------------------ turning points


def ceiling(facts: Facts, schedule: Schedule) -> float | None:
    """Largest round trip (seconds) at which a schedule is faster than cloud streaming, at its best
    length there; None: at none. inf: at every one up to a minute.

    Time per token never falls with R, so it is found by halving. `freerun` counts as faster while
    at least FAINT is gained: it fades, and is never slower.
    """
    plain = cloud_only(facts).seconds * (1.0 - FAINT if schedule is Schedule.FREERUN else 1.0)

    def pays(round_trip: float) -> bool:
        return fastest(replace(facts, round_trip=round_trip), schedule).seconds < plain

    return _largest(pays, facts.step)


def _largest(pays: Callable[[float], bool], guess: float) -> float | None:
    """Largest argument at which `pays` holds, if it holds up to somewhere and no further."""
    if not pays(0.0):
        return None
    low, high = 0.0, guess
    while pays(high):
        low, high = high, 2.0 * high
        if high > MAX_SECONDS:
            return float("inf")
    while high - low > NEAR * high and high - low > 1e-6:
        middle = (low + high) / 2.0
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low
