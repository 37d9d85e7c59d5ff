"""What is believed of link, engines and acceptance, learnt from what a live edge measures.

Pure: time is an argument. Named hooks take facts, `snapshot` gives `Estimates`.

Rules:

1. Everything forgets. Means keep a stated weight a round; the network's time also forgets by
   time, so that the first round after a pause counts for much.
2. A change is noticed (`control.changes`) in the network's time and in acceptance. What is known
   then starts again from the rounds since the change.
3. The network's time is a round trip less queue and forward, which the verdict tells, and less
   what its bytes took. Given or learnt delay levels are kept beside it.
4. Credit is computed from the strict rule alone (docs/papers.md, 1, Cautions).
5. Bad facts are ignored: NaN, infinite or negative times, times above MAX_SECONDS, zero rows,
   counts below 1. Clamped: more accepted than drafted, queue and forward beyond the time that
   passed (the network took 0 then), slopes of bytes to [0, MAX_BYTE_SECONDS]. A clock that goes
   backwards counts as standing still; a round trip that ended before it began says nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Final

from outrider.control.base import Estimates
from outrider.control.changes import CLIP, DelayLevels, PageHinkley
from outrider.control.costs import PrefixCurve, RowCosts
from outrider.control.curves import ChainedCurve
from outrider.control.regression import MAX_BYTE_SECONDS, ByteTimes, DraftTimes

DEFAULT_ROUND_TRIP: Final = 0.05
"""Seconds assumed before the first verdict (our default)."""
DEFAULT_DRAFT: Final = 0.01
"""t_d assumed before the first draft (our default)."""
DEFAULT_BYTE_UP: Final = 8e-7
"""10 Mb/s (our default)."""
DEFAULT_BYTE_DOWN: Final = 1.6e-7
"""50 Mb/s (our default)."""
MAX_SECONDS: Final = 600.0
"""Longest time believed: beyond it a machine slept, and no link was slow."""
MAX_BYTES: Final = 1 << 30

LINK_FORGET: Final = 0.9
"""Weight kept a round by the network's time and the queue: about 10 rounds count (our default)."""
IDLE: Final = 30.0
"""Seconds in which their weight falls to 1/e besides (our default)."""
SPREAD_SHARE: Final = 0.02
"""Least jitter assumed, relative to the mean; and in seconds: (our defaults)"""
SPREAD_LEAST: Final = 0.0002
SPREAD_RATE: Final = 0.1

BETA: Final = 0.3
"""Of credit (E2-SCI; docs/papers.md, 1)."""
HISTORY: Final = 5
"""Window rates kept: k of E2-SCI."""
CREDIT_START: Final = 0.5
"""r before anything was judged (our default)."""
VERDICTS_KEPT: Final = 64
"""Rounds that the prefix curve can start again from."""
VERDICTS_LEAST: Final = 16
"""Rounds before a change of acceptance can be told from learning it (our default)."""
ACCEPTANCE_SLACK: Final = 0.5
ACCEPTANCE_LIMIT: Final = 10.0
"""Of its change test, in standard deviations of a round's accepted drafts (our defaults)."""
LEAST_VARIANCE: Final = 0.05


class Fading:
    """A mean over about the last 1 / (1 - LINK_FORGET) rounds and IDLE seconds."""

    __slots__ = ("mean", "weight")

    def __init__(self, default: float) -> None:
        self.mean = default
        self.weight = 0.0

    def age(self, seconds: float) -> None:
        self.weight *= math.exp(-seconds / IDLE)

    def observe(self, value: float) -> None:
        self.weight = self.weight * LINK_FORGET + 1.0
        self.mean += (value - self.mean) / self.weight


class Watched(Fading):
    """The same, starting again after a change."""

    __slots__ = ("_recent", "_spread", "_test")

    def __init__(self, default: float) -> None:
        super().__init__(default)
        self._spread = 0.0
        self._test = PageHinkley()
        self._recent: deque[float] = deque(maxlen=VERDICTS_KEPT)

    def watch(self, value: float) -> bool:
        """Like `observe`; True when this was a change."""
        known = bool(self._recent)
        self._recent.append(value)
        if not known:
            self.observe(value)
            self._spread = 0.1 * value
            return False
        scale = max(self._spread, SPREAD_SHARE * self.mean, SPREAD_LEAST)
        off = value - self.mean
        since = self._test.observe(off / scale)
        self._spread += SPREAD_RATE * (min(abs(off), CLIP * scale) - self._spread)
        if since is None:
            self.observe(value)
            return False
        kept = list(self._recent)[-since:]
        self.weight, self.mean = float(len(kept)), sum(kept) / len(kept)
        return True


class Estimators:
    """See the module docstring. One per link and pair of models; requests may share it."""

    def __init__(
        self,
        *,
        delays: Sequence[float] = (),
        verify: RowCosts | None = None,
        curve: PrefixCurve | None = None,
        round_trip: float = DEFAULT_ROUND_TRIP,
        draft: float = DEFAULT_DRAFT,
        byte_up: float = DEFAULT_BYTE_UP,
        byte_down: float = DEFAULT_BYTE_DOWN,
    ) -> None:
        """What is known beforehand: delay levels (seconds, ascending), measured costs, a curve,
        seconds of a round trip and of a draft token, seconds a byte (a bandwidth of zero, so an
        infinite time, is clamped to MAX_BYTE_SECONDS; NaN and negative: the default). Raises
        ValueError for delay levels out of order.
        """
        self.verify = verify if verify is not None else RowCosts()
        self.curve: PrefixCurve = curve if curve is not None else ChainedCurve()
        self._levels = DelayLevels(delays)
        self._network = Watched(_time_or(round_trip, DEFAULT_ROUND_TRIP))
        self._queue = Fading(0.0)
        self._draft = DraftTimes(_time_or(draft, DEFAULT_DRAFT))
        self._bytes = ByteTimes(
            _byte_or(byte_up, DEFAULT_BYTE_UP), _byte_or(byte_down, DEFAULT_BYTE_DOWN)
        )
        self._told_costs = self._told_link = False
        self._now: float | None = None
        self._credit, self._change = CREDIT_START, 0.0
        self._history: deque[float] = deque(maxlen=HISTORY)
        self._verdicts: deque[tuple[int, int]] = deque(maxlen=VERDICTS_KEPT)
        self._test = PageHinkley(slack=ACCEPTANCE_SLACK, limit=ACCEPTANCE_LIMIT)
        self._rounds = 0

    # ------------------------------------------------------------------------------ hooks

    def draft(self, count: int, seconds: float) -> None:
        """A drafting job made `count` tokens in `seconds`."""
        if count >= 1 and _is_time(seconds):
            self._draft.observe(count, seconds)

    def target(self, points: Sequence[tuple[int, float]]) -> None:
        """The target's own row costs, (rows, seconds), as its side measured them; taken where
        nothing is known yet. Points that are no times of rows are left out."""
        good = [(rows, seconds) for rows, seconds in points if rows >= 1 and _is_time(seconds)]
        if good and not self.verify:
            self.verify = RowCosts(good)
            self._told_costs = True

    def greeting(self, *, network: float, now: float, bytes_up: float = 0) -> None:
        """The cloud's answer to an OPEN of `bytes_up` bytes came after `network` seconds."""
        before = self._network.weight
        self.round_trip(network=network, now=now, bytes_up=bytes_up)
        self._told_link = self._told_link or self._network.weight > before

    def step(self, rows: int, seconds: float) -> None:
        """A target forward over `rows` rows took `seconds`."""
        if rows >= 1 and _is_time(seconds):
            self.verify.observe(rows, seconds)

    def round_trip(
        self,
        *,
        network: float,
        now: float,
        queue: float = 0.0,
        bytes_up: float = 0,
        bytes_down: float = 0,
    ) -> None:
        """A frame and its verdict spent `network` seconds on the way, `queue` waiting.

        `network` may come out a little negative where two clocks disagree: 0 then, if it is
        within a millisecond; else the fact is ignored.
        """
        if not math.isfinite(network) or not -1e-3 <= network <= MAX_SECONDS:
            return
        self._tick(now)
        if _is_time(queue):
            self._queue.observe(queue)
        network = max(0.0, network)
        up, down = _is_size(bytes_up) or 0.0, _is_size(bytes_down) or 0.0
        byte_up, byte_down = self._bytes.slopes()
        bare = max(0.0, network - up * byte_up - down * byte_down)
        if self._network.watch(bare):
            self._bytes.restart()
        self._bytes.observe(up, down, network)
        self._levels.observe(bare)

    def answer(
        self,
        *,
        sent_at: float,
        now: float,
        queue: float,
        step: float,
        rows: int,
        bytes_up: float = 0,
        bytes_down: float = 0,
    ) -> None:
        """A verdict came at `now` for the frame sent at `sent_at` (seconds of one clock).

        `queue` and `step` (seconds) are what the verdict says the cloud spent on it.
        """
        passed = now - sent_at
        if not _is_time(passed):
            return
        queue = min(queue, passed) if _is_time(queue) else 0.0
        step = min(step, passed) if _is_time(step) else 0.0
        self.step(rows, step)
        network = max(0.0, passed - queue - step)
        self.round_trip(
            network=network, now=now, queue=queue, bytes_up=bytes_up, bytes_down=bytes_down
        )

    def verdict(self, *, drafted: int, accepted: int) -> None:
        """Of `drafted` drafts the first `accepted` stand by the strict rule."""
        if not (drafted >= 1 and accepted >= 0):
            return
        accepted = min(accepted, drafted)
        rate = accepted / drafted
        before = self._credit
        self._credit = (1.0 - BETA) * before + BETA * rate
        self._change = self._credit - before
        self._history.append(rate)
        self._rounds += 1
        since = self._surprise(drafted, accepted)
        self._verdicts.append((drafted, accepted))
        if since is None:
            self.curve.observe(drafted=drafted, accepted=accepted)
        else:
            self._relearn(since)

    # ------------------------------------------------------------------------------ answers

    @property
    def history(self) -> tuple[float, ...]:
        """Strict acceptance of the last HISTORY windows, oldest first (H_t of E2-SCI)."""
        return tuple(self._history)

    def snapshot(self, now: float) -> Estimates:
        """What is believed at `now`. `verify` and `curve` are live: they go on learning."""
        self._tick(now)
        byte_up, byte_down = self._bytes.slopes()
        return Estimates(
            round_trip=self._network.mean,
            queue=self._queue.mean,
            draft=self._draft.each,
            draft_start=self._draft.start,
            verify=self.verify,
            curve=self.curve,
            byte_up=byte_up,
            byte_down=byte_down,
            credit=self._credit,
            credit_change=self._change,
            delay_state=self._levels.state,
            delay_levels=self._levels.levels,
            informed=self._told_costs and self._told_link,
            rounds=self._rounds,
        )

    # ------------------------------------------------------------------------------ inside

    def _tick(self, now: float) -> None:
        if not math.isfinite(now):
            return
        passed = max(0.0, now - self._now) if self._now is not None else 0.0
        self._now = now
        self._network.age(passed)
        self._queue.age(passed)

    def _surprise(self, drafted: int, accepted: int) -> int | None:
        """Standardise the accepted drafts of a round under the present curve, and test."""
        if self._rounds <= VERDICTS_LEAST:
            return None
        alive = self.curve.survival(drafted)
        mean = sum(alive)
        square = sum((2 * i + 1) * s for i, s in enumerate(alive))
        spread = math.sqrt(max(square - mean * mean, LEAST_VARIANCE))
        return self._test.observe((accepted - mean) / spread)

    def _relearn(self, since: int) -> None:
        kept = list(self._verdicts)[-since:]
        judged = sum(min(d, a + 1) for d, a in kept)
        stood = sum(a for _, a in kept)
        # Half a hit and half a miss keep the prior inside (0, 1).
        self.curve = ChainedCurve(prior=(stood + 0.5) / (judged + 1.0))
        for d, a in kept:
            self.curve.observe(drafted=d, accepted=a)


def _is_time(seconds: float) -> bool:
    return 0.0 <= seconds <= MAX_SECONDS  # NaN is not


def _is_size(size: float) -> float | None:
    return float(size) if 0 <= size <= MAX_BYTES else None


def _time_or(seconds: float, default: float) -> float:
    return seconds if _is_time(seconds) else default


def _byte_or(seconds: float, default: float) -> float:
    return min(seconds, MAX_BYTE_SECONDS) if seconds >= 0.0 else default
