"""A controller's seat in one session: it is told what the session sees, and asked how far to go.

Rules:

1. The controller is asked once a round: before the first draft behind newly committed tokens.
   Between two commits its answer stands, however often the window is looked at.
2. A round is what ends with tokens: a verdict, a correction drawn here, or tokens that the cloud
   decided alone. In the synchronous loop it lasts from the start of drafting to its verdict, in
   the streaming schedules from the commit before: what a round costs when rounds overlap.
3. Network time comes from verdicts, less what the cloud says it spent. A streamed block may have
   waited behind another forward without that being anybody's queue, so there the smallest of
   the last `STREAM_SAMPLES` is taken.
4. A session's first drafting job reads the whole prompt: it does not say what a draft token costs.
   t_d is what a token costs the draft engine: where several draft in step, a session's share of
   it. What it waited for the others is queueing, as in the cloud, and shows in the round's time.
   A frame of a chain that was dropped is forgotten, or the next verdict at its place would be
   taken for its answer.
5. The prefill says nothing about a step's cost and is nobody's round. The controller is asked
   before it all the same: a session that is not to speculate says so when it opens, not a round
   trip later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from outrider.control.base import MAX_LENGTH, Controller, Decision, Observation, Outcome
from outrider.control.estimators import Estimators
from outrider.core.draft import StopRule
from outrider.proto.messages import Load

STREAM_SAMPLES: Final = 16
"""Streamed verdicts whose smallest network time counts (our default): a second or two."""
MAX_MARKS: Final = 256
"""Sent frames whose verdict may still come: as many as the largest window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What became of a block."""

    start: int = 0
    """Position of its first draft."""
    drafted: int = 0
    accepted: int = 0
    strict: int = 0
    """Leading drafts that the strict rule had accepted."""
    tokens: int
    """Committed."""
    load: Load


class Pilot:
    """Without a controller: as far as the window policy allows, whatever happens."""

    def length(self, now: float, room: int) -> int:  # noqa: ARG002
        """Most unjudged drafts now, in [0, room]; 0: let the cloud stream alone."""
        return room

    def greeted(self, network: float, size: int, now: float) -> None:
        """The cloud answered an OPEN of about `size` bytes after `network` seconds."""

    def stop_rule(self) -> StopRule | None:
        """Ends the next block early; None: draft all of it."""
        return None

    @property
    def decision(self) -> Decision | None:
        """The controller's, in force; None: there is no controller."""
        return None

    @property
    def threshold(self) -> float | None:
        """T of the relaxed rules, nats; None: the request's own."""
        return self.decision.threshold if self.decision else None

    @property
    def network(self) -> float | None:
        """Seconds of the newest block's way there and back; None: not measured."""
        return None

    def drafted(self, count: int, seconds: float) -> None:
        """A drafting job made `count` tokens in `seconds` of the draft engine's time. In a batch,
        its share: of each step, one part for each session that was in it."""

    def sent(self, end: int, size: int, now: float) -> None:
        """A frame of about `size` bytes left with the drafts up to position `end`."""

    def dropped(self) -> None:
        """What was sent is void: its verdicts will not come, and what follows takes its places."""

    def verdict(self, judged: Judged, now: float) -> None:
        """A block was judged."""

    def streamed(self, tokens: int, load: Load, now: float) -> None:
        """The cloud committed `tokens` on its own."""

    def resumed(self, now: float) -> None:
        """A pause is over, which nothing of the pair was the reason of."""


class WatchingPilot(Pilot):
    """Decides nothing and times the way of blocks, for whoever watches."""

    def __init__(self) -> None:
        self._marks: deque[tuple[int, int, float]] = deque(maxlen=MAX_MARKS)
        self._void = False
        self._newest: float | None = None

    @property
    def network(self) -> float | None:
        return self._newest

    def dropped(self) -> None:
        self._void = True  # the verdict that says so still wants its own mark

    def sent(self, end: int, size: int, now: float) -> None:
        self._forget_void()
        self._marks.append((end, size, now))

    def verdict(self, judged: Judged, now: float) -> None:
        if judged.drafted:
            self._way(judged, now)
            self._forget_void()

    def _forget_void(self) -> None:
        if self._void:
            self._marks.clear()
            self._void = False

    def _way(self, judged: Judged, now: float) -> tuple[int, float] | None:
        """Size of the frame that completed the block, and the seconds that it and the verdict were
        on their way; None where it was sent again after a cut: its way says nothing."""
        end = judged.start + judged.drafted
        while self._marks and self._marks[0][0] < end:
            self._marks.popleft()
        if not self._marks:
            return None
        _, size, sent_at = self._marks[0]
        self._newest = now - sent_at - (judged.load.queue_us + judged.load.step_us) / 1e6
        return size, self._newest


class ControlledPilot(WatchingPilot):
    """See the module docstring. Controller and estimators may serve other sessions too."""

    def __init__(
        self,
        controller: Controller,
        estimators: Estimators,
        *,
        streaming: bool,
        now: float,
        free: bool = False,
    ) -> None:
        """`streaming`: drafts go out while others are unjudged. `free`: the cloud never waits."""
        super().__init__()
        self._controller = controller
        self._estimators = estimators
        self._streaming = streaming
        self._free = free
        self._decision = Decision(length=0)
        self._asked = False
        self._began = now
        self._delay_state = 0
        self._network: deque[float] = deque(maxlen=STREAM_SAMPLES)
        self._warm_draft = False
        self._heard = False
        self._prefilled = False

    def length(self, now: float, room: int) -> int:
        if room < 1:
            return 0
        if not self._asked:
            self._asked = True
            if not self._streaming:
                self._began = now
            estimates = self._estimators.snapshot(now)
            self._delay_state = estimates.delay_state
            question = Observation(
                now=now,
                room=min(room, MAX_LENGTH),
                estimates=estimates,
                opening=not (self._heard or self._prefilled),
                streaming=self._streaming,
                free=self._free,
            )
            self._decision = self._controller.decide(question)
        return min(self._decision.length, room)

    def greeted(self, network: float, size: int, now: float) -> None:
        self._estimators.greeting(network=network, now=now, bytes_up=size)
        self._heard, self._asked = True, False  # it knows more now

    def stop_rule(self) -> StopRule | None:
        return self._controller.stop_rule()

    @property
    def decision(self) -> Decision:
        return self._decision

    def drafted(self, count: int, seconds: float) -> None:
        if self._warm_draft:
            self._estimators.draft(count, seconds)
        self._warm_draft = True

    def verdict(self, judged: Judged, now: float) -> None:
        drafted = judged.drafted
        if drafted:
            self._time(judged, now)
            self._forget_void()
            self._estimators.verdict(drafted=drafted, accepted=judged.strict)
        self._end_round(judged, now)

    def streamed(self, tokens: int, load: Load, now: float) -> None:
        if not self._prefilled:
            self._prefilled = True
            self._asked, self._began = False, now
            return
        if load.step_us:
            self._estimators.step(rows=1, seconds=load.step_us / 1e6)
        self._end_round(Judged(tokens=tokens, load=load), now)

    def resumed(self, now: float) -> None:
        self._asked, self._began = False, now

    def _time(self, judged: Judged, now: float) -> None:
        """Split the way of the frame that completed the block into network, queue and forward."""
        load = judged.load
        if self._prefilled:
            self._estimators.step(rows=judged.drafted + 1, seconds=load.step_us / 1e6)
        self._prefilled = True
        way = self._way(judged, now)
        if way is None:
            return
        size, network = way
        if self._streaming:
            self._network.append(network)
            network = min(self._network)
        queue = load.queue_us / 1e6
        self._estimators.round_trip(network=network, queue=queue, bytes_up=size, now=now)

    def _end_round(self, judged: Judged, now: float) -> None:
        outcome = Outcome(
            decision=self._decision,
            drafted=judged.drafted,
            accepted=judged.accepted,
            strict=judged.strict,
            tokens=judged.tokens,
            seconds=max(0.0, now - self._began),
            delay_state=self._delay_state,
        )
        if self._asked and judged.tokens:
            self._controller.observe(outcome, now)
        self._asked = False
        self._began = now
