"""Thousands of edges on many verifiers: round by round instead of frame by frame.

What is kept of the fine simulation (sim.run): arrivals, answers, luck, what forwards cost, who
shares one, the row budget, first come first served, the way there and back, the window. What is
left out: the protocol's own frames and connections; an edge's answers draft side by side, not in
turn; acceptance and row costs are known, not learnt. tests/sim/test_scale.py compares both.

A verifier's edges share nothing with those of another, so each verifier is a run of its own: a loop
over its forwards, and arrays over the sessions in them. `_Chain` is free-run as arithmetic: guess
number p arrives one draft time behind guess p - 1, the first wrong one ends the chain, and the next
chain begins when the edge has heard so.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from outrider.core.link import FRAME_OVERHEAD, MIN_RTO_S
from outrider.core.tokens import Rule
from outrider.session.schedules import Schedule
from outrider.sim.acceptance import Survival
from outrider.sim.devices import Load
from outrider.sim.scenario import Arm, Scenario, ScenarioError

F64Array = npt.NDArray[np.float64]
I64Array = npt.NDArray[np.int64]

SCHEDULES: Final = (
    Schedule.CLOUD_ONLY,
    Schedule.COLOCATED,
    Schedule.SYNC,
    Schedule.STREAM,
    Schedule.FREERUN,
)
"""Those whose rounds are arithmetic."""
STREAMED: Final = (Schedule.STREAM, Schedule.FREERUN)
NEVER: Final = 1 << 40
"""Place of the first wrong guess where every guess stands."""
FRAME: Final = 6
ID: Final = 3
"""Bytes of a DRAFT without its ids, and of an id."""
BLOCK: Final = 4096
"""Chances that are drawn at once."""
ALL: Final = slice(None)
MOST_HEARD: Final = 128
"""Commits that may be on their way to an edge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """What became of all answers of one way to decode. Seconds."""

    schedule: Schedule
    asked: int
    answers: int
    """Complete within the time simulated."""
    tokens: int
    """All that were committed."""
    per_token: float | None
    first: tuple[float, float] | None
    """Time to first token, median and 95th percentile, of all that had one."""
    forwards: int
    rows: int
    busy: float
    """Share of the time that a verifier's engine works, mean over verifiers."""
    seconds: float
    fingerprint: str

    @property
    def tokens_each_second(self) -> float:
        return self.tokens / self.seconds

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.schedule.value,
            "asked": self.asked,
            "answers": self.answers,
            "tokens": self.tokens,
            "ms_per_token": None if self.per_token is None else 1e3 * self.per_token,
            "ttft_ms": None if self.first is None else 1e3 * self.first[0],
            "ttft_p95_ms": None if self.first is None else 1e3 * self.first[1],
            "forwards_per_token": self.forwards / self.tokens if self.tokens else None,
            "rows_per_token": self.rows / self.tokens if self.tokens else None,
            "busy": self.busy,
            "tokens_per_second": self.tokens_each_second,
            "event_hash": self.fingerprint,
        }


def check(scenario: Scenario) -> None:
    """Raises ScenarioError for what only the fine simulation knows."""
    conditions = scenario.conditions
    reasons = (
        (scenario.workload.rate is None, "workload.rate must say how often an edge asks"),
        (scenario.curve is None, "acceptance must be alpha or a curve"),
        (
            bool(conditions.levels or conditions.outages or scenario.cuts),
            "the link must not change",
        ),
        (
            conditions.link.up_server is not None or conditions.link.down_server is not None,
            "the link must have rates, not traces",
        ),
    )
    for holds, reason in reasons:
        if holds:
            raise ScenarioError(f"--scale: {reason}")
    for arm in scenario.arms:
        if arm.asked and not _known(arm):
            known = ", ".join(SCHEDULES)
            raise ScenarioError(
                f"--scale: [schedule] names: {arm.name} needs the fine simulation (leave --scale "
                f"out); known here are {known}, without controller or rule"
            )


def _known(arm: Arm) -> bool:
    plain = arm.controller == "fixed" and arm.rule is Rule.COUPLED
    return plain and arm.schedule in (*SCHEDULES, Schedule.EDGE_ONLY)


def schedules(scenario: Scenario) -> list[Schedule]:
    """Those of the scenario's ways to decode that are known here."""
    wanted = {arm.schedule for arm in scenario.arms if _known(arm)}
    return [schedule for schedule in SCHEDULES if schedule in wanted]


def crowds(scenario: Scenario, *, told: Callable[[], None] = lambda: None) -> list[Crowd]:
    """Every way to decode of the scenario that can be simulated so; `told` after each verifier."""
    check(scenario)
    return [crowd(scenario, schedule, told=told) for schedule in schedules(scenario)]


def crowd(
    scenario: Scenario, schedule: Schedule, *, told: Callable[[], None] = lambda: None
) -> Crowd:
    """One way to decode, all verifiers."""
    runs = []
    for number in range(scenario.clouds):
        run = _Verifier(scenario, schedule, number)
        run.go()
        runs.append(run)
        told()
    firsts = np.concatenate([r.first[r.first > 0.0] for r in runs])
    gaps = sum(r.gaps for r in runs)
    digest = hashlib.blake2b(digest_size=8)
    for run in runs:
        digest.update(run.done.tobytes() + run.first.tobytes() + run.last.tobytes())
    spans = [float(x) for x in np.percentile(firsts, (50, 95))] if len(firsts) else None
    return Crowd(
        schedule=schedule,
        asked=sum(len(r.done) for r in runs),
        answers=sum(int((r.done == r.length).sum()) for r in runs),
        tokens=sum(int(r.done.sum()) for r in runs),
        per_token=sum(r.rest for r in runs) / gaps if gaps else None,
        first=(spans[0], spans[1]) if spans else None,
        forwards=sum(r.forwards for r in runs),
        rows=sum(r.rows for r in runs),
        busy=sum(r.busy for r in runs) / (scenario.clouds * scenario.duration),
        seconds=scenario.duration,
        fingerprint=digest.hexdigest(),
    )


class _Verifier:
    """One verifier and the answers of its edges, arrays over answers in the order of asking."""

    def __init__(self, scenario: Scenario, schedule: Schedule, number: int) -> None:
        self._scenario = scenario
        self._schedule = schedule
        self._chance = np.random.default_rng([scenario.seed, number])
        curve = scenario.curve
        assert curve is not None, "checked before"
        self._curve = curve
        self._luck = _Luck(curve, self._chance)
        self._count = scenario.draft_length
        self._link = _Way(scenario, self._chance)
        self.asked = self._arrivals(number)
        answers = len(self.asked)
        low, high = scenario.workload.max_tokens
        self.length: I64Array = self._chance.integers(low, high, answers, endpoint=True)
        self.done: I64Array = np.zeros(answers, dtype=np.int64)
        """Tokens committed."""
        self.first: F64Array = np.zeros(answers)
        """Time to first token; 0: none yet."""
        self.last: F64Array = np.zeros(answers)
        """When the newest token was shown."""
        self._ready: F64Array = self.asked + self._link.up(answers, ID * scenario.workload.prompt)
        self._chain = _Chain(scenario, self._luck, self.asked) if schedule in STREAMED else None
        self._best: dict[int, int] = {}
        self.forwards = self.rows = 0
        self.busy = 0.0

    def _arrivals(self, number: int) -> F64Array:
        scenario = self._scenario
        edges = len(range(number, scenario.edges, scenario.clouds))
        rate = (scenario.workload.rate or 0.0) * edges
        # A crowd's arrivals are one Poisson process.
        count = int(self._chance.poisson(rate * scenario.duration))
        return np.asarray(np.sort(self._chance.random(count)) * scenario.duration)

    @property
    def rest(self) -> float:
        """Seconds from first to last token, of all answers."""
        shown = self.done > 0
        return float((self.last - self.asked - self.first)[shown].sum())

    @property
    def gaps(self) -> int:
        return int((self.done - 1)[self.done > 0].sum())

    def go(self) -> None:
        """Forward by forward, until the time is over."""
        now, come = 0.0, 0
        order = np.argsort(self._ready, kind="stable")
        arrives: list[float] = [*self._ready[order].tolist(), math.inf]
        live: I64Array = np.zeros(0, dtype=np.int64)
        while True:
            if arrives[come] <= now:
                new = bisect_right(arrives, now, come)
                live = np.concatenate([live, order[come:new]])
                come = new
            waits = self._ready[live]
            here = (waits <= now).nonzero()[0]
            if not len(here):
                now = min(float(waits.min()) if len(live) else math.inf, arrives[come])
                if now >= self._scenario.duration:
                    return
                continue
            now, ended = self._forward(live[here], waits[here], now)
            if ended:
                live = live[self.done[live] < self.length[live]]
            if now >= self._scenario.duration:
                return

    # ---------------------------------------------------------------- one forward

    def _batch(
        self, ready: I64Array, since: F64Array, done: I64Array, length: I64Array, now: float
    ) -> tuple[I64Array | slice, I64Array]:
        """Who of those ready takes part, oldest first within the row budget, and with how many
        drafts."""
        budget = self._scenario.batch_rows
        counts = np.minimum(self._drafts(ready, done, now), length - done - 1)
        if len(ready) + int(counts.sum()) <= budget:
            return ALL, counts
        order = np.argsort(since, kind="stable")
        if self._chain is not None:  # a row each, then as many drafts as there is room for
            order = order[:budget]
            room = budget - len(order) - np.cumsum(counts[order])
            fits = np.maximum(0, counts[order] + np.minimum(room, 0))
            return order, fits
        before = np.cumsum(1 + counts[order]) - (1 + counts[order])
        order = order[before < budget]
        return order, counts[order]

    def _drafts(self, ready: I64Array, done: I64Array, now: float) -> I64Array:
        """Drafts at hand for each of the sessions that could run."""
        match self._schedule:
            case Schedule.CLOUD_ONLY:
                return np.zeros(len(ready), dtype=np.int64)
            case Schedule.COLOCATED:
                return np.full(len(ready), self._count)
            case Schedule.SYNC:
                return self._count * (done > 0)
        assert self._chain is not None, "the other schedules stream"
        pending = self._chain.pending(ready, done, now)
        return np.minimum(pending, self._most(len(ready))) * (done > 0)

    def _most(self, sessions: int) -> int:
        """How many drafts of each of so many sessions pay (control.costs.share_rows)."""
        known = self._best.get(sessions)
        if known is None:
            most = max(0, self._scenario.batch_rows // sessions - 1)
            most = min(most, self._scenario.window)
            gained = 1.0 + np.concatenate([[0.0], np.cumsum(self._curve.survival(most))])
            times = [
                self._scenario.cloud.seconds(
                    Load(rows=sessions * (m + 1), sessions=sessions, context=0)
                )
                for m in range(most + 1)
            ]
            known = self._best[sessions] = int(np.argmax(gained / np.array(times)))
        return known

    def _forward(self, ready: I64Array, since: F64Array, now: float) -> tuple[float, bool]:
        """Judge, commit, and say when each session is ready again; when the forward ends, and
        whether an answer did."""
        prompt = self._scenario.workload.prompt
        done, length = self.done[ready], self.length[ready]
        part, counts = self._batch(ready, since, done, length, now)
        batch, done, length = ready[part], done[part], length[part]
        rows = len(batch) + int(counts.sum())
        own = self._schedule is Schedule.COLOCATED
        fresh = (done == 0).nonzero()[0]
        load = Load(
            rows=rows,
            sessions=len(batch),
            context=prompt * len(batch) + int(done.sum()) if self._scenario.cloud.context else 0,
            taken_in=(prompt - 1) * len(fresh),
            drafted=int(counts.max()) if own else 0,
        )
        spent = self._scenario.cloud.start + self._scenario.cloud.seconds(load)
        end = now + spent
        self.forwards += 1
        self.rows += rows
        self.busy += min(end, self._scenario.duration) - now
        accepted = self._accepted(batch, counts, done)
        self.done[batch] = done = np.minimum(done + accepted + 1, length)
        shown = end + self._link.down(len(batch))
        if len(fresh):
            new = batch[fresh]
            self.first[new] = shown[fresh] - self.asked[new]
        self.last[batch] = shown
        left = length - done
        self._ready[batch] = self._next(batch, done, left, end, shown)
        return end, not left.all()

    def _accepted(self, batch: I64Array, counts: I64Array, done: I64Array) -> I64Array:
        if self._chain is not None:
            return self._chain.right(batch, done, counts)
        if self._schedule is Schedule.CLOUD_ONLY:
            return counts
        return np.minimum(self._luck.runs(len(batch)), counts)

    def _next(
        self, batch: I64Array, done: I64Array, left: I64Array, end: float, shown: F64Array
    ) -> F64Array | float:
        """When each session could run again."""
        if self._chain is not None:
            self._chain.heard(batch, done, shown, self._link)
            if self._schedule is Schedule.FREERUN:
                return end
            return np.maximum(end, self._chain.arrival(batch, done))
        if self._schedule is not Schedule.SYNC:
            return end
        drafts = np.minimum(self._count, np.maximum(0, left - 1))
        times = self._scenario.edge
        drafting = times.draft * drafts
        if times.start:
            drafting += times.start * (drafts > 0)
        return shown + drafting + self._link.up(len(batch), FRAME + ID * self._count)


class _Way:
    """Both directions of every edge's link: the same for all, each with its own luck."""

    def __init__(self, scenario: Scenario, chance: np.random.Generator) -> None:
        link = scenario.conditions.link
        self._half = link.rtt_s / 2
        self._jitter, self._loss = link.jitter_s, link.loss
        self._timeout = link.rtt_s + max(MIN_RTO_S, 4 * link.jitter_s)
        self._rates = (link.up_bps, link.down_bps)
        self._chance = chance
        self.trip = link.rtt_s
        self._late: F64Array = np.zeros(0)
        """Jitter and losses, drawn ahead: many at once cost hardly more than one."""
        self._at = 0

    def up(self, count: int, size: int = 0) -> F64Array:
        return self._times(count, self._rates[0], size)

    def down(self, count: int, size: int = FRAME + ID) -> F64Array:
        return self._times(count, self._rates[1], size)

    def _times(self, count: int, rate: float, size: int) -> F64Array:
        least = self._half + 8.0 * (size + FRAME_OVERHEAD) / rate
        if not self._jitter and not self._loss:
            return np.full(count, least)
        if self._at + count > len(self._late):
            self._late, self._at = self._drawn(max(count, BLOCK)), 0
        self._at += count
        return self._late[self._at - count : self._at] + least

    def _drawn(self, count: int) -> F64Array:
        late = self._jitter * self._chance.random(count)
        if self._loss:
            late += self._timeout * (self._chance.geometric(1.0 - self._loss, count) - 1)
        return late


class _Luck:
    """How many guesses stand before one falls; drawn ahead."""

    def __init__(self, curve: Survival, chance: np.random.Generator) -> None:
        self._curve = curve
        self._chance = chance
        self._runs: I64Array = np.zeros(0, dtype=np.int64)
        self._at = 0

    def runs(self, count: int) -> I64Array:
        """For `count` chains that begin."""
        if self._at + count > len(self._runs):
            self._runs, self._at = self._drawn(max(count, BLOCK)), 0
        self._at += count
        return self._runs[self._at - count : self._at]

    def _drawn(self, count: int) -> I64Array:
        curve = self._curve
        luck = self._chance.random(count)
        points = np.array(curve.points)
        run = (luck[:, None] < points).sum(axis=1) if len(points) else np.zeros(count, dtype=int)
        # Beyond the points the tail is geometric: S(n + j) = S(n) tail^j > luck.
        last = float(points[-1]) if len(points) else 1.0
        if curve.tail >= 1.0:
            more = np.full(count, NEVER)
        elif curve.tail <= 0.0 or last <= 0.0:
            more = np.zeros(count)
        else:
            with np.errstate(divide="ignore"):
                more = np.ceil(np.log(luck / last) / math.log(curve.tail)) - 1
        whole = run == len(points)
        return np.asarray(run + np.where(whole, np.clip(more, 0, NEVER), 0), dtype=np.int64)


@dataclass(slots=True)
class _Chain:
    """Guesses on their way, arrays over answers: guess p (counted in output tokens) reaches the
    verifier at `origin + p t_d`."""

    scenario: Scenario
    luck: _Luck
    asked: F64Array
    each: float = field(init=False)
    """Seconds from guess to guess."""
    origin: F64Array = field(init=False)
    wrong: I64Array = field(init=False)
    """The first guess of the chain that falls."""
    told_at: F64Array = field(init=False)
    """When the edge heard of a commit, the newest ones, [ring, answers]."""
    told: I64Array = field(init=False)
    """And how many tokens there were then."""
    _turn: int = 0

    def __post_init__(self) -> None:
        count, link = len(self.asked), self.scenario.conditions.link
        times, step = self.scenario.edge, max(self.scenario.cloud.rows(1), 1e-6)
        first = times.seconds(1, self.scenario.workload.prompt) + link.rtt_s / 2
        self.each = times.draft + times.start
        self.origin = self.asked + first
        self.wrong = self.luck.runs(count).copy()
        ring = min(MOST_HEARD, math.ceil((link.rtt_s + times.draft) / step) + 2)
        self.told_at = np.full((ring, count), -1.0)
        self.told = np.zeros((ring, count), dtype=np.int64)

    def arrival(self, who: I64Array, place: I64Array) -> F64Array:
        """When the guess at `place` reaches the verifier."""
        times: F64Array = self.origin[who] + place * self.each
        return times

    def pending(self, who: I64Array, done: I64Array, now: float) -> I64Array:
        """Guesses from `done` on that have arrived, within the window that the edge knew."""
        each = self.each
        ahead = now - self.arrival(who, done)
        some = (
            np.floor(ahead / each) + 1.0
            if each > 0.0
            else np.where(ahead >= 0.0, self.scenario.window, 0)
        )
        back = self.scenario.conditions.link.rtt_s / 2 + each
        known = ((self.told_at[:, who] <= now - back) * self.told[:, who]).max(axis=0)
        room = known + (self.scenario.window - done)
        pending: I64Array = np.maximum(np.minimum(some, room), 0).astype(np.int64)
        return pending

    def right(self, who: I64Array, done: I64Array, counts: I64Array) -> I64Array:
        """How many of the first `counts` guesses stand."""
        return np.asarray(np.maximum(np.minimum(counts, self.wrong[who] - done), 0))

    def heard(self, who: I64Array, done: I64Array, shown: F64Array, link: _Way) -> None:
        """A forward left `done` tokens; the edges hear of it at `shown`."""
        times = self.scenario.edge
        again = shown + times.seconds(1) + link.up(len(who), FRAME + ID)
        fell = done > self.wrong[who]
        new = (fell | (again < self.arrival(who, done))).nonzero()[0]
        self.origin[who[new]] = again[new] - done[new] * self.each
        lost = fell.nonzero()[0]
        if len(lost):
            self.wrong[who[lost]] = done[lost] + self.luck.runs(len(lost))
        self.told_at[self._turn, who] = shown
        self.told[self._turn, who] = done
        self._turn = (self._turn + 1) % len(self.told)
