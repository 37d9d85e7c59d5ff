"""Crowds of answers as arrays: all verifiers at once, each one forward further at every step.

A verifier's edges share nothing with those of another, so it does no harm that their clocks
differ: step n is everybody's n-th forward, begun as soon as that verifier has somebody ready.
State is a grid [seats, verifiers] with one answer in each taken seat; what a verifier has of its
own (its clock, its rows) is an array [verifiers] and meets the grid by broadcasting. Everything is
computed for all seats and kept for those `here`, who take part in the forward: on grids of some
thousand seats that costs less than picking them out.

How drafts come about is the kind of seat:

* `_Seats`: nobody drafts; `_Own`: the verifier does for itself. Both never wait.
* `_Blocks`: the edge drafts K, sends them and waits to hear.
* `_Chains`: drafts stream. Guess number p arrives one draft time behind guess p - 1, the first
  wrong one ends the chain, and the next chain begins when the edge has heard so.

A run is the same on every machine: behind numpy's generator, nothing that tokens or times depend on
is a logarithm, or a sum of floats in an order of numpy's choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import ClassVar, Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from outrider.core.link import FRAME_OVERHEAD, MIN_RTO_S
from outrider.core.survival import Survival
from outrider.session.outbox import FRAME_BYTES, ID_BYTES
from outrider.session.schedules import Schedule
from outrider.sim.devices import Load
from outrider.sim.scenario import Scenario

F64Array = npt.NDArray[np.float64]
I64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
T = TypeVar("T", bound=np.generic)

ONE_ID: Final = FRAME_BYTES + ID_BYTES
"""Bytes of a frame with one."""
CHANCES: Final = 1 << 16
"""Chances that are drawn at once: many cost hardly more than one."""
FIRST_SEATS: Final = 8
"""Seats of a verifier in the beginning; they double whenever one lacks a seat."""
MOST_HEARD: Final = 128
"""Commits that may be on their way to an edge."""
TELLS: Final = 256
"""Steps between two words about progress."""


class Lockstep:
    """One schedule, all verifiers. Answers are in the order of their verifiers, and at one verifier
    in the order of their coming."""

    def __init__(self, scenario: Scenario, schedule: Schedule) -> None:
        self._scenario = scenario
        chance = np.random.default_rng(scenario.seed)
        self._link = _Link(scenario, chance)
        counts = self._arrivals(chance)
        low, high = scenario.workload.max_tokens
        answers = int(counts.sum())
        self.length: I64Array = chance.integers(low, high, answers, endpoint=True)
        self.done: I64Array = np.zeros(answers, dtype=np.int64)
        """Tokens committed."""
        self.first: F64Array = np.zeros(answers)
        """Time to first token; 0: none yet."""
        self.last: F64Array = np.zeros(answers)
        """When the newest token was shown."""
        self._stop: I64Array = np.cumsum(counts)
        """Where each verifier's answers end."""
        self._turn: I64Array = self._stop - counts
        """The answer that comes next to each verifier."""
        self._next: F64Array = np.full(scenario.clouds, math.inf)
        """And when."""
        self._look(np.arange(scenario.clouds))
        self._now: F64Array = np.zeros(scenario.clouds)
        self._rows_cost = _rows_cost(scenario)
        self._seats = _KINDS[schedule](scenario, _Luck(scenario, chance), self._link)
        self.busy: F64Array = np.zeros(scenario.clouds)
        """Seconds that each engine worked."""
        self.forwards = self.rows = 0

    def _arrivals(self, chance: np.random.Generator) -> I64Array:
        """When every answer is asked for and when that comes; how many there are of each
        verifier."""
        scenario = self._scenario
        clouds = np.arange(scenario.clouds)
        edges = np.maximum(0, (scenario.edges - 1 - clouds) // scenario.clouds + 1)
        # A crowd's arrivals are one Poisson process.
        rate = scenario.workload.rate or 0.0
        counts: I64Array = chance.poisson(rate * edges * scenario.duration)
        home = np.repeat(clouds, counts)
        asked = chance.random(len(home)) * scenario.duration
        comes = asked + self._link.up((len(home),), ID_BYTES * scenario.workload.prompt)
        order = np.lexsort((comes, home))
        self.asked: F64Array = asked[order]
        self._comes: F64Array = comes[order]
        return counts

    def go(self, told: Callable[[float], None] = lambda _: None) -> None:
        """Until the time is over; `told` hears now and then which share of it is."""
        steps = 0
        while self._step():
            steps += 1
            if steps % TELLS == 0:
                told(float(self._now.min()) / self._scenario.duration)
        self._note(np.isfinite(self._seats.ready))

    # ---------------------------------------------------------------- one step

    def _step(self) -> bool:
        """A forward of every verifier whose time is not over; False when there is none."""
        seats, duration = self._seats, self._scenario.duration
        soonest = np.minimum(seats.ready.min(axis=0), self._next)
        self._now = now = np.minimum(np.maximum(self._now, soonest), duration)
        self._sit_down()
        runs = now < duration
        if not runs.any():
            return False
        here, counts = self._batch((seats.ready <= now) & runs, now)
        sessions = here.sum(axis=0)
        rows = sessions + counts.sum(axis=0)
        fresh = here & (seats.done == 0)
        end = now + self._spent(here, counts, fresh, sessions, rows)
        self.forwards += int(runs.sum())
        self.rows += int(rows.sum())
        self.busy += (np.minimum(end, duration) - now) * runs

        seats.done += (seats.right(counts) + 1) * here
        # What is sent later never overtakes.
        shown = np.maximum(end + self._link.down(here.shape), seats.last)
        np.copyto(seats.last, shown, where=here)
        if fresh.any():
            who = seats.answer[fresh]
            self.first[who] = seats.last[fresh] - self.asked[who]
        np.copyto(seats.ready, seats.heard(here, end, shown), where=here)
        over = here & (seats.done == seats.length)
        if over.any():
            self._note(over)
            seats.ready[over] = math.inf
        self._now = end
        return True

    def _batch(self, here: BoolArray, now: F64Array) -> tuple[BoolArray, I64Array]:
        """Who of those ready takes part, and with how many drafts."""
        seats = self._seats
        sessions = here.sum(axis=0)
        counts = np.minimum(seats.drafts(now, sessions), seats.length - seats.done - 1) * here
        full = (sessions + counts.sum(axis=0) > self._scenario.batch_rows).nonzero()[0]
        if len(full):  # oldest first within the row budget
            since = np.where(here[:, full], seats.ready[:, full], math.inf)
            order = since.argsort(axis=0, kind="stable")
            those, some = here[:, full], counts[:, full]
            fitting = self._fitting(
                np.take_along_axis(those, order, axis=0), np.take_along_axis(some, order, axis=0)
            )
            np.put_along_axis(those, order, fitting[0], axis=0)
            np.put_along_axis(some, order, fitting[1], axis=0)
            here[:, full], counts[:, full] = those, some
        return here, counts

    def _fitting(self, here: BoolArray, counts: I64Array) -> tuple[BoolArray, I64Array]:
        """What the row budget has room for, of sessions in their order."""
        budget = self._scenario.batch_rows
        if self._seats.shares:  # a row each, then as many drafts as there is room for
            here[budget:] = False
            counts = counts * here
            room = budget - here.sum(axis=0) - np.cumsum(counts, axis=0)
            return here, np.maximum(0, counts + np.minimum(room, 0))
        rows = (1 + counts) * here
        here &= np.cumsum(rows, axis=0) - rows < budget
        return here, counts * here

    def _spent(
        self,
        here: BoolArray,
        counts: I64Array,
        fresh: BoolArray,
        sessions: I64Array,
        rows: I64Array,
    ) -> F64Array:
        """What each forward takes: CloudTimes.seconds (sim.devices) of as many loads."""
        times, prompt = self._scenario.cloud, self._scenario.workload.prompt
        spent: F64Array = times.start + self._rows_cost[rows]
        if times.session:
            spent += times.session * np.maximum(0, sessions - 1)
        if times.context:
            spent += times.context * (prompt * sessions + (self._seats.done * here).sum(axis=0))
        if times.prefill:
            spent += times.prefill * ((prompt - 1) * fresh.sum(axis=0))
        if self._seats.drafts_here:
            spent += times.draft * counts.max(axis=0)
        return spent

    # ---------------------------------------------------------------- coming and going

    def _look(self, clouds: I64Array) -> None:
        """When the next answer comes to each of these verifiers."""
        turn = self._turn[clouds]
        more = turn < self._stop[clouds]
        self._next[clouds] = math.inf
        self._next[clouds[more]] = self._comes[turn[more]]

    def _sit_down(self) -> None:
        """Whoever has come takes a seat, one at each verifier in a turn of the loop."""
        seats = self._seats
        while len(clouds := (self._next <= self._now).nonzero()[0]):
            free = np.isinf(seats.ready[:, clouds])
            if not free.any(axis=0).all():
                seats.grow()
                continue
            who = self._turn[clouds]
            at = free.argmax(axis=0), clouds
            seats.answer[at] = who
            seats.length[at] = self.length[who]
            seats.done[at] = 0
            seats.last[at] = 0.0
            seats.ready[at] = self._comes[who]
            seats.begin(at, self.asked[who])
            self._turn[clouds] += 1
            self._look(clouds)

    def _note(self, those: BoolArray) -> None:
        """Keep what became of the answers in these seats."""
        who = self._seats.answer[those]
        self.done[who] = self._seats.done[those]
        self.last[who] = self._seats.last[those]


def _rows_cost(scenario: Scenario) -> F64Array:
    """t_v of 0, 1, ... rows: all that a forward can have, as a block that no longer fits whole
    goes along (session.batching)."""
    most = scenario.batch_rows + scenario.draft_length
    return np.array([scenario.cloud.rows(max(1, rows)) for rows in range(most + 1)])


# ------------------------------------------------------------------------------ kinds of seats

At = tuple[I64Array, I64Array]
"""Some seats: their rows and columns in the grid."""


class _Seats:
    """Who sits where, arrays [seats, verifiers]; here of cloud-only streaming, where nobody
    drafts."""

    shares: ClassVar[bool] = False
    """A full forward judges fewer drafts of each session instead of fewer sessions."""
    drafts_here: ClassVar[bool] = False
    """Drafts cost the verifier's time."""
    state: ClassVar[tuple[str, ...]] = ("answer", "length", "done", "ready", "last")
    """The arrays."""

    def __init__(self, scenario: Scenario, luck: _Luck, link: _Link) -> None:
        self._scenario, self._luck, self._link = scenario, luck, link
        shape = FIRST_SEATS, scenario.clouds
        self.answer: I64Array = np.zeros(shape, dtype=np.int64)
        self.length: I64Array = np.zeros(shape, dtype=np.int64)
        self.done: I64Array = np.zeros(shape, dtype=np.int64)
        """Tokens committed."""
        self.ready: F64Array = np.full(shape, math.inf)
        """When the session could take part in a forward; infinite: the seat is free."""
        self.last: F64Array = np.zeros(shape)
        """When its newest token was shown."""

    def grow(self) -> None:
        """Twice as many seats."""
        seats = len(self.ready)
        for name in self.state:
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros_like(array)], axis=-2))
        self.ready[seats:] = math.inf

    def begin(self, at: At, asked: F64Array) -> None:
        """Answers that were asked for then sit down."""

    def drafts(self, now: F64Array, sessions: I64Array) -> I64Array:  # noqa: ARG002
        """Drafts that are there and that a forward of so many sessions would judge."""
        return np.zeros_like(self.done)

    def right(self, counts: I64Array) -> I64Array:
        """How many of the first `counts` drafts stand."""
        return counts

    def heard(self, here: BoolArray, end: F64Array, shown: F64Array) -> F64Array:  # noqa: ARG002
        """A forward left those `here` with `done` tokens, their edges hear of it when it is
        `shown`: when could each run again?"""
        return end


class _Own(_Seats):
    """The verifier makes K drafts before each forward."""

    drafts_here = True

    def drafts(self, now: F64Array, sessions: I64Array) -> I64Array:  # noqa: ARG002
        return np.full_like(self.done, self._scenario.draft_length)

    def right(self, counts: I64Array) -> I64Array:
        return np.minimum(self._luck.runs(counts.shape), counts)


class _Drafted(_Seats):
    """Edges draft."""

    state = (*_Seats.state, "wrong")

    def __init__(self, scenario: Scenario, luck: _Luck, link: _Link) -> None:
        super().__init__(scenario, luck, link)
        self.wrong: I64Array = np.zeros_like(self.done)
        """The place of the first guess that falls."""
        self._most = _most(scenario)

    def right(self, counts: I64Array) -> I64Array:
        right: I64Array = np.clip(self.wrong - self.done, 0, counts)
        return right

    def paying(self, sessions: I64Array) -> I64Array:
        """How many drafts of each of so many sessions pay."""
        return self._most[np.minimum(sessions, len(self._most) - 1)]


class _Blocks(_Drafted):
    """The edge drafts K, sends them and waits to hear."""

    state = (*_Drafted.state, "stop")

    def __init__(self, scenario: Scenario, luck: _Luck, link: _Link) -> None:
        super().__init__(scenario, luck, link)
        self.stop: I64Array = np.zeros_like(self.done)
        """The place behind the block's last guess."""

    def begin(self, at: At, asked: F64Array) -> None:  # noqa: ARG002
        self.stop[at] = 0  # the first token goes without drafts

    def drafts(self, now: F64Array, sessions: I64Array) -> I64Array:  # noqa: ARG002
        left: I64Array = np.maximum(0, self.stop - self.done)
        return left

    def heard(self, here: BoolArray, end: F64Array, shown: F64Array) -> F64Array:
        """A block is over when a guess fell or none is left."""
        over = here & ((self.done > self.wrong) | (self.done >= self.stop))
        most, times = self._scenario.draft_length, self._scenario.edge
        # The last token of an answer is never drafted.
        count = np.clip(self.length - self.done - 1, 0, most)
        np.copyto(self.stop, self.done + count, where=over)
        np.copyto(self.wrong, self.done + self._luck.runs(over.shape), where=over)
        drafting = times.draft * count + times.start * (count > 0)
        back = shown + drafting + self._link.up(over.shape, FRAME_BYTES + ID_BYTES * most)
        return np.where(over, back, end)


class _Taken(_Blocks):
    """As many of a block at once as pay, the rest in the forwards behind."""

    shares = True

    def drafts(self, now: F64Array, sessions: I64Array) -> I64Array:
        return np.minimum(super().drafts(now, sessions), self.paying(sessions))


class _Chains(_Drafted):
    """Drafts stream: guess p (counted in output tokens) arrives at `origin + p t_d`, unless the
    window held it back. The verifier runs without drafts too."""

    shares = True
    state = (*_Drafted.state, "origin", "told", "told_at")

    def __init__(self, scenario: Scenario, luck: _Luck, link: _Link) -> None:
        super().__init__(scenario, luck, link)
        times, trip = scenario.edge, scenario.conditions.link.rtt_s
        self._each = times.draft + times.start
        """Seconds from guess to guess."""
        self._opening = times.seconds(1, scenario.workload.prompt) + trip / 2
        """From the question to the first guess's arrival."""
        self._back = trip / 2 + self._each
        """From hearing of a commit to the arrival of a guess that had waited for it."""
        self.origin: F64Array = np.zeros_like(self.ready)
        step = max(scenario.cloud.rows(1), 1e-6)
        ring = min(MOST_HEARD, math.ceil((trip + times.draft) / step) + 2)
        self.told: I64Array = np.zeros((ring, *self.done.shape), dtype=np.int64)
        """How many tokens the newest steps left, [step mod ring, seats, verifiers]."""
        self.told_at: F64Array = np.zeros(self.told.shape)
        """And when the edge heard so."""
        self._turn = 0

    def begin(self, at: At, asked: F64Array) -> None:
        self.origin[at] = asked + self._opening
        self.wrong[at] = self._luck.runs(asked.shape)
        self.told[:, *at] = 0

    def arrival(self) -> F64Array:
        """When the guess behind the committed tokens comes."""
        times: F64Array = self.origin + self.done * self._each
        return times

    def drafts(self, now: F64Array, sessions: I64Array) -> I64Array:
        window = self._scenario.window
        ahead = now - self.arrival()
        if self._each > 0.0:
            there = np.floor(ahead / self._each) + 1.0
        else:
            # All are sent at one moment, and the first to come starts the forward.
            there = np.where(ahead > 0.0, window, ahead == 0.0)
        # The edge drafts no further than a window beyond the newest commit that it knew of.
        known = ((self.told_at <= now - self._back) * self.told).max(axis=0)
        there = np.minimum(there, known + (window - self.done))
        most = self.paying(sessions) * (self.done > 0)  # the first token goes without drafts
        judged: I64Array = np.clip(there, 0, most).astype(np.int64)
        return judged

    def heard(self, here: BoolArray, end: F64Array, shown: F64Array) -> F64Array:
        """A chain begins anew where a guess fell, and where the edge is told of a token before its
        own guess of the next one could have come."""
        again = shown + self._scenario.edge.seconds(1) + self._link.up(here.shape, ONE_ID)
        fell = here & (self.done > self.wrong)
        anew = fell | (here & (again < self.arrival()))
        np.copyto(self.origin, again - self.done * self._each, where=anew)
        if fell.any():
            places = self.done[fell]
            self.wrong[fell] = places + self._luck.runs(places.shape)
        self._tell(here, shown)
        return end

    def _tell(self, here: BoolArray, shown: F64Array) -> None:
        """Who took no part knows what it knew a step ago."""
        now, ago = self._turn, self._turn - 1
        self.told[now] = np.where(here, self.done, self.told[ago])
        self.told_at[now] = np.where(here, shown, self.told_at[ago])
        self._turn = (now + 1) % len(self.told)


class _Awaited(_Chains):
    """The verifier waits for the next guess."""

    def heard(self, here: BoolArray, end: F64Array, shown: F64Array) -> F64Array:
        return np.maximum(super().heard(here, end, shown), self.arrival())


_KINDS: Final[Mapping[Schedule, type[_Seats]]] = {
    Schedule.CLOUD_ONLY: _Seats,
    Schedule.COLOCATED: _Own,
    Schedule.SYNC: _Blocks,
    Schedule.MULTIPLEX: _Taken,
    Schedule.STREAM: _Awaited,
    Schedule.FREERUN: _Chains,
}
SCHEDULES: Final = tuple(_KINDS)
"""Those whose rounds are arithmetic."""


def _most(scenario: Scenario) -> I64Array:
    """How many drafts of each of 0, 1, ... sessions pay (control.costs.share_rows)."""
    budget = scenario.batch_rows
    gained = 1.0 + np.concatenate([[0.0], np.cumsum(_curve(scenario).survival(scenario.window))])
    found = [0]
    for sessions in range(1, budget + 1):
        blocks = range(min(budget // sessions, scenario.window + 1))
        times = [
            scenario.cloud.seconds(Load(rows=sessions * (m + 1), sessions=sessions, context=0))
            for m in blocks
        ]
        found.append(int(np.argmax(gained[: len(times)] / np.array(times))))
    return np.array(found)


# ------------------------------------------------------------------------------ links and luck


class _Link:
    """Both directions of every edge's link: the same for all, each with its own luck."""

    def __init__(self, scenario: Scenario, chance: np.random.Generator) -> None:
        link = scenario.conditions.link
        self._half = link.rtt_s / 2
        self._jitter, self._loss = link.jitter_s, link.loss
        self._timeout = link.rtt_s + max(MIN_RTO_S, 4 * link.jitter_s)
        self._rates = (link.up_bps, link.down_bps)
        self._chance = chance
        self._late = _Ahead(self._drawn)

    def up(self, shape: tuple[int, ...], size: int) -> F64Array:
        return self._times(shape, self._rates[0], size)

    def down(self, shape: tuple[int, ...], size: int = ONE_ID) -> F64Array:
        return self._times(shape, self._rates[1], size)

    def _times(self, shape: tuple[int, ...], rate: float, size: int) -> F64Array:
        least = self._half + 8.0 * (size + FRAME_OVERHEAD) / rate
        if not self._jitter and not self._loss:
            return np.full(shape, least)
        times: F64Array = self._late.take(shape) + least
        return times

    def _drawn(self, count: int) -> F64Array:
        """Jitter and losses."""
        late = self._jitter * self._chance.random(count)
        if self._loss:
            late += self._timeout * (self._chance.geometric(1.0 - self._loss, count) - 1)
        return late


class _Luck:
    """How many guesses stand before one falls."""

    def __init__(self, scenario: Scenario, chance: np.random.Generator) -> None:
        most = scenario.workload.max_tokens[1]
        # S(most), ..., S(1): `most` guesses that stand are more than an answer can ask for.
        self._rising = np.array(_curve(scenario).survival(most)[::-1])
        self._chance = chance
        self._runs = _Ahead(self._drawn)

    def runs(self, shape: tuple[int, ...]) -> I64Array:
        """For chains or blocks that begin."""
        return self._runs.take(shape)

    def _drawn(self, count: int) -> I64Array:
        """The k for which S(k) > luck >= S(k + 1)."""
        luck = self._chance.random(count)
        return len(self._rising) - self._rising.searchsorted(luck, side="right")


class _Ahead(Generic[T]):
    """Values that are drawn ahead."""

    def __init__(self, draw: Callable[[int], npt.NDArray[T]]) -> None:
        self._draw = draw
        self._values = draw(0)
        self._at = 0

    def take(self, shape: tuple[int, ...]) -> npt.NDArray[T]:
        count = math.prod(shape)
        if self._at + count > len(self._values):
            self._values, self._at = self._draw(max(count, CHANCES)), 0
        self._at += count
        return self._values[self._at - count : self._at].reshape(shape)


def _curve(scenario: Scenario) -> Survival:
    assert scenario.curve is not None, "checked before (sim.scale)"
    return scenario.curve
