"""Expectations of a renewal against chance itself, and against figures stated before it existed."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

import pytest

from outrider.plan.facts import Curve, Facts
from outrider.plan.inequalities import pearl_seconds, stream_seconds
from outrider.plan.walk import renewal
from outrider.session.cloud import StepPolicy, Take
from outrider.session.schedules import Plan, Schedule, plan
from outrider.session.window import WindowPolicy

LONG = Facts(draft=0.005, verify=((1, 0.060),), curve=Curve.constant(0.8), round_trip=0.100)
"""The slow target of docs/architecture.md's free-run: t_v = 60, t_d = 5, R = 100 ms."""


def cycle(facts: Facts, schedule: Schedule, length: int = 4, window: int = 16):
    return renewal(facts, plan(schedule, draft_length=length, window=window))


@pytest.mark.parametrize(
    ("schedule", "length", "ms", "forwards"),
    [
        (Schedule.SYNC, 9, 45.9, 0.22),
        (Schedule.STREAM, 4, 42.0, 0.34),
        (Schedule.FREERUN, 4, 34.7, 0.58),
    ],
)
def test_the_figures_of_an_event_simulation(schedule, length, ms, forwards):
    found = cycle(LONG, schedule, length)
    assert 1e3 * found.seconds / found.tokens == pytest.approx(ms, rel=0.01)
    assert found.forwards / found.tokens == pytest.approx(forwards, abs=0.01)


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("length", [1, 4, 9])
def test_sync_is_its_closed_form(alpha, length):
    facts = replace(LONG, curve=Curve.constant(alpha), draft=0.0071)
    found = cycle(facts, Schedule.SYNC, length)
    tokens = (1 - alpha ** (length + 1)) / (1 - alpha)
    spent = length * facts.draft + 0.100 + 0.060
    assert found.seconds / found.tokens == pytest.approx(spent / tokens, rel=1e-3)
    assert found.forwards / found.tokens == pytest.approx(1 / tokens, rel=1e-3)
    assert found.drafted / found.tokens == pytest.approx(length / tokens, rel=1e-3)


def test_a_curve_that_is_not_geometric_is_taken_point_by_point():
    """Published: the first draft falls at 46 %, those behind it seldom."""
    curve = Curve.of((0.462, 0.328, 0.256, 0.214, 0.188))
    found = cycle(replace(LONG, curve=curve), Schedule.SYNC, 5)
    tokens = 1 + 0.462 + 0.328 + 0.256 + 0.214 + 0.188
    assert found.seconds / found.tokens == pytest.approx(0.185 / tokens, rel=1e-3)


# ------------------------------------------------------------------------------ chance


def chances(alpha: float, seed: int):
    """Runs of drafts that stand."""
    source = random.Random(seed)

    def run() -> int:
        length = 0
        while source.random() < alpha:
            length += 1
        return length

    return run


@pytest.mark.parametrize(("alpha", "length"), [(0.6, 3), (0.8, 6), (0.9, 12)])
@pytest.mark.parametrize("trip", [0.010, 0.120])
def test_one_block_ahead_by_monte_carlo(alpha, length, trip):
    """Blocks of k, the next one made while the last is judged; no bonus token when all stand."""
    run, tokens, now, block, wait = chances(alpha, 1), 0, 0.0, length * 0.005, trip + 0.060
    for _ in range(40_000):
        stood = run()
        whole, rest = divmod(stood, length)
        tokens += stood + 1
        now += block + whole * max(block, wait) + wait
    assert rest < length
    expected = pearl_seconds(alpha, length, 0.005, 0.060, trip)
    assert now / tokens == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("alpha", "chunk"), [(0.6, 13), (0.9, 16)])
def test_streaming_in_chunks_by_monte_carlo(alpha, chunk):
    """A server that keeps up judges a chunk as soon as it is made and has crossed."""
    run, tokens, now = chances(alpha, 2), 0, 0.0
    for _ in range(40_000):
        stood = run()
        tokens += stood + 1
        now += (stood // chunk + 1) * chunk * 0.005 + 0.100 + 0.060
    expected = stream_seconds(alpha, chunk, 0.005, 0.060, 0.100)
    assert now / tokens == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("alpha", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("chunk", [13, 20])
def test_the_walk_is_that_closed_form_where_both_mean_the_same(alpha, chunk):
    """Chunks of g sent at once to a cloud that takes all of them, g t_d >= t_v, a window without
    end. What the walk knows better: the chunk in the making when the edge hears of a rejection is
    finished first, and the bonus token of a chunk that stands whole."""
    facts = replace(LONG, curve=Curve.constant(alpha))
    streaming = Plan(
        window=WindowPolicy(window=4000, chunk=chunk), step=StepPolicy.WAIT, take=Take.ALL
    )
    found = renewal(facts, streaming)
    per_cycle = (found.seconds - found.unfinished) / found.tokens
    assert per_cycle == pytest.approx(stream_seconds(alpha, chunk, 0.005, 0.060, 0.100), rel=0.02)


def test_what_the_engine_has_to_finish_delays_the_next_cycle():
    """Drafts of 7 ms against a forward of 60 and a trip of 100: on the average half a draft."""
    facts = replace(LONG, draft=0.0071, round_trip=0.0937)
    found = cycle(facts, Schedule.STREAM, window=64)
    assert 0.0 < found.unfinished < 0.0071


def test_free_run_by_monte_carlo():
    """Token by token, with no trick: coins are thrown when a draft is made."""
    for trip, draft in ((0.1003, 0.0051), (0.0401, 0.0171)):
        facts = replace(LONG, round_trip=trip, draft=draft)
        found = cycle(facts, Schedule.FREERUN, window=16)
        seconds, forwards = free_run(trip, draft, 0.060, 0.8, 16, tokens=30_000)
        assert found.seconds / found.tokens == pytest.approx(seconds, rel=0.02)
        assert found.forwards / found.tokens == pytest.approx(forwards, rel=0.02)


def free_run(trip, draft, verify, alpha, window, *, tokens):
    """Seconds and forwards per token. Each draft throws its coin when it is made. The cloud takes
    all that are pending (rows cost nothing here); a chain is dead at the first wrong draft; the
    edge begins a new one when it hears a token that it had guessed otherwise."""
    return _FreeRun(trip, draft, verify, alpha, window).until(tokens)


class _FreeRun:
    def __init__(self, trip, draft, verify, alpha, window):
        self.way, self.draft, self.verify, self.window = trip / 2, draft, verify, window
        source = random.Random(3)
        self.coin = lambda: source.random() < alpha
        self.events: list[tuple] = []
        self.count = 0
        self.forwards = self.committed = self.taken = 0
        self.chain, self.alive = 0, True
        self.pending: dict[int, bool] = {}
        self.known = self.made = self.epoch = 0
        self.busy = False
        self.coins: dict[int, bool] = {}

    def push(self, at, kind, *what):
        self.count += 1
        heapq.heappush(self.events, (at, self.count, kind, what))

    def until(self, tokens):
        self.forward(0.0)
        self.push(self.way, self.heard, 0)
        now = 0.0
        while self.committed < tokens:
            now, _, happens, what = heapq.heappop(self.events)
            happens(now, *what)
        return now / self.committed, self.forwards / self.committed

    def forward(self, now):
        self.taken = 0
        while self.committed + self.taken + 1 in self.pending:
            self.taken += 1
        self.push(now + self.verify, self.judged)

    def judged(self, now):
        self.forwards += 1
        for _ in range(self.taken + 1):
            self.committed += 1
            if not self.pending.pop(self.committed, True):
                self.pending.clear()
                self.alive = False
                break
        self.push(now + self.way, self.heard, self.committed)
        self.forward(now)

    def arrived(self, now, position, right, epoch):
        if epoch > self.chain:
            self.chain, self.alive = epoch, True
            self.pending.clear()
        if epoch < self.chain or not self.alive:
            return
        if position > self.committed:
            self.pending[position] = right
        elif not right:
            self.pending.clear()
            self.alive = False

    def heard(self, now, committed):
        fresh = range(self.known + 1, committed + 1)
        if not all(self.coins.pop(p, True) for p in fresh):
            self.epoch += 1
            self.coins.clear()
            self.made = committed
        self.known, self.made = committed, max(committed, self.made)
        self.start(now)

    def start(self, now):
        if not self.busy and self.made - self.known < self.window:
            self.busy = True
            self.push(now + self.draft, self.drafted, self.made + 1, self.epoch)

    def drafted(self, now, position, epoch):
        self.busy = False
        if epoch == self.epoch and position > self.known:
            right = self.coin()
            self.made, self.coins[position] = position, right
            self.push(now + self.way, self.arrived, position, right, epoch)
        self.start(now)


# ------------------------------------------------------------------------------ the link


def test_a_thin_uplink_holds_drafts_up():
    thin = replace(LONG, up_bps=50e3)
    fast, slow = (cycle(f, Schedule.STREAM) for f in (LONG, thin))
    assert slow.seconds / slow.tokens > 1.1 * fast.seconds / fast.tokens


def test_payload_is_counted_frame_by_frame():
    found = cycle(LONG, Schedule.SYNC, 4)
    rounds = found.forwards
    assert found.up == pytest.approx(rounds * (8 + 4 * 3))
    assert found.down == pytest.approx(rounds * 12)
