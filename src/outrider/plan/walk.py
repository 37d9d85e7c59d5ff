"""Time per token of a schedule that runs ahead, from its own two policies.

Between two rejections nothing is random: drafts take t_d, forwards t_v(rows), frames their way.
Only *where* the next draft falls is. And until the edge hears of a fall, both sides do just what
they would have done had it stood. So one walk along the path on which every draft stands says,
for each position w: when the cloud commits w, after how many forwards, bytes and drafts, and what
the edge's engine still has to finish when it hears of w. A draft falls first at w with probability
S(w-1) - S(w), and there the same walk begins again: a renewal, whose expectations are exact sums

    E[seconds per token] = sum over w of P(w) T(w) / sum over w of P(w) w.

Exact for constant acceptance under `wait`; the rest is approximated: what the edge's engine has to
finish, and a thin uplink to send in vain, enters by its mean, and answers are long. Where a draft's
chance hangs on its depth, depth is the number of guesses not judged yet when it was made.

The policies are those of `session.schedules`, so a new schedule needs no formula here.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final, NamedTuple

from outrider.control.costs import share_rows
from outrider.core.link import FRAME_OVERHEAD
from outrider.plan.facts import VERDICT_BYTES, Facts
from outrider.session.cloud import StepPolicy, Take
from outrider.session.schedules import Plan

NEGLIGIBLE: Final = 1e-5
"""Probability that drafts stand so far: what lies behind changes no figure."""
FARTHEST: Final = 1024
"""Positions a walk goes at most."""
BITS: Final = 8.0
QUEUE_WALKS: Final = 4
"""Walks until what one cycle leaves in a thin uplink's queue for the next has settled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """Expectations from one rejection to the next."""

    tokens: float = 0.0
    seconds: float = 0.0
    forwards: float = 0.0
    cloud_seconds: float = 0.0
    """Of the engine."""
    drafted: float = 0.0
    """Drafts the edge made, in vain or not."""
    up: float = 0.0
    """Payload bytes."""
    down: float = 0.0
    unfinished: float = 0.0
    """Seconds that the edge's engine is not free yet when the rejection arrives."""
    queued: float = 0.0
    """Seconds that the uplink still serves frames nobody wants then."""


def renewal(facts: Facts, plan: Plan) -> Cycle:
    """Expectations of a cycle under a schedule with drafts of the edge's own."""
    found = Cycle()
    for _ in range(2 if math.isinf(facts.up_bps) else QUEUE_WALKS):
        found = _Walk(facts, plan, found).go()
    return found


class _Wire:
    """One direction: a queue at a rate, then the delay (core.link)."""

    def __init__(self, bps: float, delay: float) -> None:
        self._bps = bps
        self._delay = delay
        self._free = -math.inf

    def hold(self, until: float) -> None:
        """It serves what was sent before."""
        self._free = until

    def queued(self, now: float) -> float:
        """Seconds until a frame sent now would be served."""
        return max(0.0, self._free - now)

    def arrival(self, size: float, now: float) -> float:
        self._free = max(now, self._free) + BITS * (size + FRAME_OVERHEAD) / self._bps
        return self._free + self._delay


class _Judged(NamedTuple):
    """A forward's answer on its way down."""

    arrives: float
    committed: int
    """Positions committed with it, from the cycle's beginning."""
    done: float
    """When the forward ended."""
    forwards: int
    cloud_seconds: float
    down: float


class _Walk:
    """The path on which every draft stands. Time 0: the cloud has just committed the token where
    a draft fell, position 0."""

    def __init__(self, facts: Facts, plan: Plan, before: Cycle) -> None:
        """`before`: what the cycle before leaves behind, in the mean."""
        self._facts = facts
        self._policy = plan.window
        self._steps = plan.step is StepPolicy.STEP
        self._chooses = plan.take is Take.BEST
        self._up = _Wire(facts.up_bps, facts.round_trip / 2)
        self._down = _Wire(facts.down_bps, facts.round_trip / 2)
        self._rejection_up, rejection_down = facts.rejection_bytes
        self._chances: dict[int, float] = {}
        """By position: that its draft stands, if those before it do. None is drafted: certain."""
        # The cloud.
        self._committed = 0
        self._here = 0
        """Last draft that has arrived."""
        self._forward: tuple[float, float, int] | None = None
        """End, length and tokens of the forward in flight."""
        self._forwards = 0
        self._cloud_seconds = 0.0
        self._sent_down = rejection_down
        # The edge.
        self._known = -1
        self._drafted = 0
        self._job: tuple[float, int] | None = None
        """End and first position behind the job in flight."""
        self._made = 0
        self._sent_up = self._rejection_up
        self._grown = 1.0
        self._unfinished = before.unfinished
        self._frames: deque[tuple[float, int]] = deque()
        start = self._down.arrival(VERDICT_BYTES + rejection_down, 0.0)
        self._up.hold(start + before.queued)
        self._verdicts: deque[_Judged] = deque([_Judged(start, 0, 0.0, 0, 0.0, 0.0)])
        # Sums over where the first draft falls.
        self._alive = 1.0
        self._sums = [0.0] * len(Cycle.__slots__)

    def go(self) -> Cycle:
        now = 0.0
        self._start_forward(now)
        while self._alive > NEGLIGIBLE and self._known < FARTHEST:
            now, happen = min(
                (self._frames[0][0] if self._frames else math.inf, self._arrive),
                (self._forward[0] if self._forward else math.inf, self._judge),
                (self._verdicts[0].arrives if self._verdicts else math.inf, self._learn),
                (self._job[0] if self._job else math.inf, self._send),
                key=lambda event: event[0],
            )
            happen(now)
        return Cycle(**dict(zip(Cycle.__slots__, self._sums, strict=True)))

    # ---------------------------------------------------------------- the cloud

    def _arrive(self, now: float) -> None:
        _, self._here = self._frames.popleft()
        self._start_forward(now)

    def _start_forward(self, now: float) -> None:
        pending = max(0, self._here - self._committed)
        if self._forward is not None or not (pending or self._steps):
            return
        count = self._worth(pending) if self._chooses else pending
        seconds = self._facts.seconds(count + 1)
        self._forward = (now + seconds, seconds, count + 1)

    def _worth(self, pending: int) -> int:
        """How many pending drafts pay (control.costs)."""
        if not pending:
            return 0
        alive, likely = 1.0, []
        for position in range(self._committed + 1, self._committed + 1 + pending):
            alive *= self._chances[position]
            likely.append(alive)
        return share_rows([likely], self._facts)[0]

    def _judge(self, now: float) -> None:
        assert self._forward is not None, "no forward is in flight"
        _, seconds, tokens = self._forward
        self._forward = None
        self._forwards += 1
        self._cloud_seconds += seconds
        self._committed += tokens
        self._sent_down += VERDICT_BYTES
        self._verdicts.append(
            _Judged(
                self._down.arrival(VERDICT_BYTES, now),
                self._committed,
                now,
                self._forwards,
                self._cloud_seconds,
                self._sent_down,
            )
        )
        self._start_forward(now)

    # ---------------------------------------------------------------- the edge

    def _learn(self, now: float) -> None:
        """Tokens arrive: what if the draft at one of them had fallen?"""
        told = self._verdicts.popleft()
        rest = self._job[0] - now if self._job else 0.0
        for position in range(self._known + 1, told.committed + 1):
            left = (rest, self._up.queued(now))
            self._fall(position, told, left, self._chances.get(position, 1.0))
        if self._policy.reach and self._known >= 0:
            self._grown = min(self._grown * (1.0 + self._policy.growth), float(self._policy.reach))
        self._known = told.committed
        self._drafted = max(self._drafted, self._known)
        self._start_job(now + (self._unfinished if self._made == 0 else 0.0))

    def _fall(self, position: int, told: _Judged, left: tuple[float, float], stands: float) -> None:
        last = position >= FARTHEST or self._alive * stands <= NEGLIGIBLE
        falls = self._alive * (1.0 if last else 1.0 - stands)
        self._alive *= 0.0 if last else stands
        reached = (
            position,
            told.done,
            told.forwards,
            told.cloud_seconds,
            self._made,
            self._sent_up,
            told.down,
            *left,
        )
        self._sums = [s + falls * value for s, value in zip(self._sums, reached, strict=True)]

    def _window(self) -> int:
        policy = self._policy
        if not policy.reach:
            return policy.window
        return min(int(policy.window * self._grown), max(policy.reach, policy.window))

    def _start_job(self, now: float) -> None:
        outstanding = self._drafted - self._known
        if self._job is not None or (outstanding and self._policy.wait_empty):
            return
        chunk = self._policy.chunk if outstanding else self._policy.lead or self._policy.chunk
        count = min(chunk, self._window() - outstanding)
        if count < 1:
            return
        for ahead in range(count):
            depth = outstanding + ahead
            self._chances[self._drafted + 1 + ahead] = self._facts.curve.at(depth)
        self._job = (now + count * self._facts.draft, self._drafted + count)
        self._made += count

    def _send(self, now: float) -> None:
        assert self._job is not None, "no job is in flight"
        _, last = self._job
        self._job = None
        fresh = last - self._drafted
        self._drafted = max(self._drafted, last)
        if fresh > 0:
            size = self._facts.up_bytes(fresh)
            self._sent_up += size
            self._frames.append((self._up.arrival(size, now), last))
        self._start_job(now)
