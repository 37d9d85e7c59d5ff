"""The residual dialogue through the wire: laws, budgets, bytes, faults and hostile frames."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laws import ALARM, fit, normal_tail
from outrider.bench.dialogues import Talk
from outrider.core import rng
from outrider.core.ledger import TvLedger
from outrider.core.residual import MAX_TOP_K, TopKReply
from outrider.core.sampling import Distribution
from outrider.core.tokens import Origin, ParameterError, Rule, SamplingParams
from outrider.core.verify import Rejection, ResidualStep, leftover, proposal_count
from outrider.engines.base import FloatRow
from outrider.engines.toy import random_law, table_law
from outrider.proto.codec import decode, encode
from outrider.proto.errors import RemoteError
from outrider.proto.messages import Code, Correct, Message, Open, Proposals, Row, TopK
from outrider.session.dialogue import MAX_CALLS, Call, Choice
from outrider.session.events import Ended, Failed
from outrider.session.schedules import Schedule
from toys import TARGET, VOCAB, remember
from world import Answer, Pipe, RandomFaults, World, alone

EOS = frozenset({0})
PROMPT = (1, 2, 3)
WIRED = (Schedule.SYNC, Schedule.PEARL, Schedule.PLC, Schedule.STREAM, Schedule.FREERUN)
OTHER = random_law(9, VOCAB)


def nearly(context: tuple[int, ...]) -> FloatRow:
    """A draft that is never quite right and never far off."""
    return (TARGET(context) + 0.5 * OTHER(context)).astype("float32")


NEAR = remember(nearly, 3)


class Watch:
    """Looks at every frame, and lets one happen to it."""

    def __init__(self, kind: type = int, nth: int = 0, act: str = "") -> None:
        self.kind, self.nth, self.act = kind, nth, act
        self.seen: list[Message] = []
        self.met = 0

    def frames(self, world: World, pipe: Pipe, way: str, frame: bytes) -> list[tuple[float, bytes]]:
        message = decode(frame)
        self.seen.append(message)
        if not isinstance(message, self.kind):
            return [(0.0, frame)]
        self.met += 1
        if self.met == self.nth:
            match self.act:
                case "lose-and-cut":
                    world.cut(pipe)
                    return []
                case "arrive-and-cut":
                    world.at(world.now + world.delay(pipe, way) + 1e-6, lambda: world.cut(pipe))
                case "restart":
                    world.at(world.now, world.restart)
                    return []
                case "repeat":
                    return [(0.0, frame)] * 3
        return [(0.0, frame)]

    def of(self, kind: type) -> list:  # type: ignore[type-arg]
        return [m for m in self.seen if isinstance(m, kind)]


def ask(w: World, reply: TopKReply, params: SamplingParams, **options: object) -> Answer:
    edge = w.edges[0]
    options = {"schedule": Schedule.SYNC, **options}
    number = edge.ask(PROMPT, params, rule=Rule.RATIO, reply=reply, **options)  # type: ignore[arg-type]
    w.run()
    return edge.answers[number]


def tv_of(w: World, number: int = 1) -> TvLedger:
    machine = w.edges[0].machines[number]
    assert machine is not None
    return machine.tv


def world(**options: object) -> World:
    return World(TARGET, NEAR, vocab_size=VOCAB, **options)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------- budget 0


P = {0: (0.1, 0.4, 0.3, 0.2), 1: (0.35, 0.05, 0.25, 0.35), 2: (0.6, 0.2, 0.2), 3: (0.0, 0.3, 0.7)}
Q = {0: (0.4, 0.1, 0.2, 0.3), 1: (0.3, 0.5, 0.1, 0.1), 2: (0.1, 0.1, 0.8), 3: (0.5, 0.25, 0.25)}
JOINT = [P[1][a] * (*P[a], 0.0)[b] for a in range(4) for b in range(4)]


def pairs(reply: TopKReply, runs: int, faults: object = None, **options: object):  # type: ignore[no-untyped-def]
    """Counts of the first two tokens behind (1,), the steps, and what was charged in all."""
    seen, steps, spent = Counter[tuple[int, ...]](), Counter[str](), 0.0
    w = World(table_law(P, 4), table_law(Q, 4), vocab_size=4, rtt=0.002, faults=faults, slots=4)  # type: ignore[arg-type]
    edge = w.edges[0]
    for seed in range(runs):
        params = SamplingParams(seed=seed, max_tokens=3)
        number = edge.ask(
            (1,),
            params,
            rule=Rule.RATIO,
            reply=reply,
            **{"schedule": Schedule.SYNC, "draft_length": 2, **options},  # type: ignore[arg-type]
        )
        w.run()
        answer = edge.answers.pop(number)
        seen[tuple(answer.ids[:2])] += 1
        steps.update(answer.counters.residual)  # type: ignore[attr-defined]
        spent += edge.machines.pop(number).tv.spent  # type: ignore[union-attr]
    return [seen[a, b] for a in range(4) for b in range(4)], steps, spent


@pytest.mark.parametrize(
    ("schedule", "k"),
    [(schedule, 3) for schedule in WIRED]
    + [(Schedule.SYNC, k) for k in (2, 4)]
    + [
        pytest.param(schedule, k, marks=pytest.mark.slow)
        for k in (2, 4)
        for schedule in WIRED
        if schedule is not Schedule.SYNC
    ],
)
def test_a_budget_of_nothing_is_exact_and_lists_are_whole(schedule: Schedule, k: int):
    """I1. p of 2 has three possible ids and p of 3 two, so lists of 3 and 2 are all of them; the
    others have four. Error rate of each: 1 in 1000 for a right law; the seeds are fixed."""
    watch = Watch()
    counts, steps, spent = pairs(TopKReply(k=k), 400, watch, schedule=schedule)
    assert fit(counts, JOINT) > ALARM
    assert spent == 0.0
    assert all(m.rest == 0.0 and m.first == 0 for m in watch.of(TopK)), "no useless list"
    assert not [m for m in watch.of(Correct) if m.listed or m.left is not None]
    assert steps["top-k"] > 0
    assert steps["proposals"] > 0 or k == 4
    assert set(steps) <= {"top-k", "proposals", "more-proposals"} - (
        {"proposals"} if k == 4 else set()
    )


@pytest.mark.parametrize("params", [{"top_k": 3}, {"top_p": 0.6}, {"temperature": 0.0}], ids=str)
def test_filters_make_lists_exact(params: dict[str, float]):
    """Few ids are possible: one reply ends every rejection, without a charge."""
    for seed in range(6):
        watch = Watch()
        w = world(faults=watch)
        answer = ask(
            w, TopKReply(k=40), SamplingParams(**{"seed": seed, "max_tokens": 30, **params})
        )
        assert set(answer.counters.residual) <= {"top-k"}  # type: ignore[attr-defined]
        assert tv_of(w) == TvLedger()
        assert not watch.of(Proposals)
        assert Origin.TRUNCATED not in answer.origins
        if params == {"temperature": 0.0}:
            greedy = SamplingParams(temperature=0.0, seed=seed, max_tokens=30)
            assert tuple(answer.ids) == alone(TARGET, PROMPT, greedy, vocab_size=VOCAB)


# ------------------------------------------------------------------------------- one dialogue


def dist(weights: np.ndarray) -> Distribution:
    ids = np.arange(len(weights), dtype=np.int64)
    return Distribution(ids, weights.astype(np.float32), rng.token_offsets(ids))


def test_proposals_fail_as_often_as_they_must():
    """(1 - Z)^n for each batch of n. Error rate: 1 in 1000 a batch for right code."""
    p = np.array([0.26, 0.25, 0.25, 0.24])
    q = np.array([0.24, 0.25, 0.25, 0.26])  # Z = .02
    rows = dist(np.log(p)), dist(np.log(q))
    runs, failed = 2000, Counter[int]()
    counts = np.zeros(4)
    for seed in range(runs):
        talk = Talk(*rows, 3, TopKReply(), seed=seed)
        choice = talk.run()
        counts[choice.token] += 1
        failed.update(range(len(talk.frames) - 1))
    left, tried = 0.02, runs
    for batch, n in enumerate((16, 64, 256)):
        expected = (1 - left) ** n
        sigma = math.sqrt(tried * expected * (1 - expected))
        assert normal_tail((failed[batch] - tried * expected) / sigma) > ALARM, batch
        tried = failed[batch]
    assert counts[0] == runs, "the residual has one id"
    assert tried < 20, "the row is the last resort"


@pytest.mark.parametrize("k", [0, 2, 5])
@pytest.mark.parametrize("near", [0.05, 0.5, 3.0])
def test_the_residual_through_every_step(k: int, near: float):
    """Drawn exactly, whichever step ends it: proposals or lists of all there is. Rows:
    tests/session/test_faults.py. Error rate: 1 in 1000 a case for right code."""
    source = np.random.default_rng(4)
    base = source.normal(0.0, 1.5, 8)
    for width in (8, 5):
        p = dist(base[:width])
        q = dist(base[:width] + near * source.normal(0.0, 1.0, width))
        left = np.maximum(leftover(p, q), 0.0)
        token = int(leftover(p, q).argmin())
        found = [Talk(p, q, token, TopKReply(k=k), seed=seed).run() for seed in range(500)]
        counts = np.bincount([c.token for c in found], minlength=width)
        assert fit(counts, left / left.sum()) > ALARM
        assert not any(c.charge for c in found)
        whole = {c.step for c in found} == {ResidualStep.TOP_K}
        assert whole is (k == width)


@given(
    st.integers(0, 10**6),
    st.integers(1, 20),
    st.floats(0.0, 1.0),
    st.floats(0.02, 3.0),
    st.floats(0.3, 3.0),
)
@settings(max_examples=150, deadline=None)
def test_steps_only_go_down_and_no_entry_comes_twice(
    seed: int, k: int, budget: float, near: float, spread: float
):
    source = np.random.default_rng(seed)
    p = dist(source.normal(0.0, spread, 64))
    q = dist(p.weights + near * source.normal(0.0, 1.0, 64))
    talk = Talk(p, q, int(leftover(p, q).argmin()), TopKReply(k=k, budget=budget), seed=seed)
    choice = talk.run()
    kinds = [type(f) for f in talk.frames]
    assert kinds == sorted(kinds, key=[TopK, Proposals, Row].index)
    lists = [f for f in talk.frames if isinstance(f, TopK)]
    ids = [i for f in lists for i in f.ids]
    assert len(set(ids)) == len(ids) <= MAX_TOP_K
    assert [f.first for f in lists] == [
        sum(len(g.ids) for g in lists[:i]) for i in range(len(lists))
    ]
    # Rank order from frame to frame.
    parts = [np.frombuffer(f.weights, "<f4") for f in lists]
    assert all(a.min() >= b.max() for a, b in pairwise(parts))
    assert choice.charge == 0.0 or talk.ledger.fits(choice.charge)
    assert (choice.charge > 0.0) <= (choice.step in (ResidualStep.TOP_K, ResidualStep.LARGER_K))
    # What a truncated draw is charged covers what it may be wrong by.
    if choice.charge:
        left = np.maximum(leftover(p, q), 0.0)
        assert 1.0 - left[ids].sum() / left.sum() <= choice.charge


def test_a_longer_list_ends_what_a_short_one_could_not():
    source = np.random.default_rng(2)
    p = dist(-0.12 * np.arange(200.0))
    q = dist(p.weights + 0.1 * source.normal(0.0, 1.0, 200))
    talk = Talk(p, q, int(leftover(p, q).argmin()), TopKReply(k=16, budget=0.6))
    choice = talk.run()
    assert [(f.first, len(f.ids)) for f in talk.frames if isinstance(f, TopK)] == [
        (0, 16),
        (16, 48),
    ]
    assert choice.step is ResidualStep.LARGER_K
    assert 0.0 < choice.charge <= 0.6


def test_a_part_of_a_list_counts_once_and_in_its_place():
    """Repeated and late frames: a part that is known, or that something is missing before, is
    dropped; the first begins anew."""
    p = dist(-0.05 * np.arange(64.0))
    talk = Talk(p, dist(p.weights + 0.01 * (np.arange(64.0) % 2)), 1, TopKReply(k=4, budget=0.9))
    first = talk.cloud.first(1)
    assert talk.hear(first) == Call(listed=4)
    more = talk.cloud.more(Correct(session=1, position=9, listed=4))
    assert talk.hear(talk.cloud.more(Correct(session=1, position=9, listed=16))) is None, (
        "too early"
    )
    found = talk.hear(more)
    assert found is not None
    assert talk.hear(more) is None, "again"
    assert talk.hear(first) == Call(listed=4)
    assert talk.hear(more) == found


def test_a_row_leaves_out_what_it_can():
    """Dense rows go without ids, sparse ones without what is impossible; either way it is p."""
    source = np.random.default_rng(1)
    q = dist(source.normal(0.0, 1.0, 300))
    for possible in (300, 299, 250, 100, 3):
        weights = np.full(300, -np.inf)
        chosen = source.choice(300, possible, replace=False)
        weights[chosen] = source.normal(0.0, 1.0, possible)
        talk = Talk(dist(weights), q, 0, TopKReply())
        row = talk.cloud.more(Correct(session=1, position=9, have=10**9))
        assert isinstance(row, Row)
        assert (row.ids is None) is (possible >= 240)
        assert len(encode(row)) <= min(4 * 300, 6 * possible) + 8
        heard = talk.hear(row)
        direct = talk.edge._residual(dist(weights))
        assert isinstance(heard, Choice)
        assert heard.token == direct


# ------------------------------------------------------------------------------- within a budget


def test_measured_distance_is_within_what_was_charged():
    """The law moves, and by no more than the ledger says: P(a pair differs) <= mean charges.
    Error rate: noise of three standard errors of a total variation over 16 cells."""
    runs = 1200
    counts, steps, spent = pairs(TopKReply(k=1, budget=2.0), runs, schedule=Schedule.SYNC)
    assert steps["top-k"] > runs / 10
    law = np.array(JOINT)
    distance = float(np.abs(np.array(counts) / runs - law).sum() / 2)
    noise = 3 * float(np.sqrt(law * (1 - law) / runs).sum()) / 2
    assert fit(counts, JOINT) < ALARM, "or the test could see nothing"
    assert distance <= spent / runs + noise
    assert distance > 0.01


@pytest.mark.parametrize("block", range(4))
def test_the_budget_holds_on_any_path(block: int):
    """Cuts, restarts and repetitions in mid-dialogue: never overdrawn, every charge marked."""
    charged = 0
    for seed in range(12 * block, 12 * block + 12):
        budget = (0.0, 0.05, 0.5, 3.0)[seed % 4]
        faults = RandomFaults(
            seed, quiet_after=60.0, cut=0.02, cut_after=0.02, restart=0.02, repeat=0.05, late=0.03
        )
        w = world(seed=seed, faults=faults)
        reply = TopKReply(k=4, budget=budget)
        schedule = WIRED[seed % len(WIRED)]
        answer = ask(w, reply, SamplingParams(seed=seed, max_tokens=40), schedule=schedule)
        assert isinstance(answer.end, Ended)
        ledger = tv_of(w)
        assert ledger.budget == budget
        assert ledger.spent <= budget
        assert ledger.events == answer.origins.count(Origin.TRUNCATED)
        assert (ledger.events > 0) is (ledger.spent > 0.0)
        charged += ledger.events
    assert charged > 20


@given(st.integers(0, 10**6), st.integers(1, 24), st.floats(0.0, 4.0))
@settings(max_examples=25, deadline=None)
def test_the_budget_holds_for_any_wish(seed: int, k: int, budget: float):
    w = world(seed=seed)
    answer = ask(w, TopKReply(k=k, budget=budget), SamplingParams(seed=seed, max_tokens=25))
    assert tv_of(w).spent <= budget
    assert tv_of(w).events == answer.origins.count(Origin.TRUNCATED)


def test_once_the_budget_is_spent_no_useless_list_comes():
    """CORRECT tells what is left; the cloud then begins with proposals at once."""
    useless, begun = 0, 0
    for seed in range(10):
        watch = Watch()
        w = world(faults=watch, seed=seed)
        ask(w, TopKReply(k=4, budget=0.4), SamplingParams(seed=seed, max_tokens=60))
        left = 0.4
        for message in watch.seen:
            match message:
                case Correct(left=float(now)):
                    left = now
                case TopK(first=0):
                    begun += 1
                    useless += message.rest > left
        assert left == tv_of(w).left
    assert begun > 10
    assert useless == 0


def test_what_lies_behind_an_end_is_not_charged():
    """An accepted draft ends the answer before the correction: nobody sees that one."""
    unseen = 0
    for seed in range(40):
        watch = Watch()
        w = world(faults=watch, seed=seed)
        params = SamplingParams(
            seed=seed, max_tokens=60, stop=("7", "3")
        )  # the draft knows of none
        answer = ask(w, TopKReply(k=2, budget=50.0), params, draft_length=8)
        assert tv_of(w).events == answer.origins.count(Origin.TRUNCATED)
        unseen += sum(m.left is not None for m in watch.of(Correct)) > tv_of(w).events
    assert unseen > 0


# ------------------------------------------------------------------------------- the account


def test_bytes_are_counted_step_by_step():
    """To the byte: what the wire saw of the dialogue is what the answer reports."""
    for reply in (TopKReply(), TopKReply(k=4, budget=1.0), TopKReply(k=16)):
        watch = Watch()
        w = world(faults=watch, seed=3)
        answer = ask(w, reply, SamplingParams(seed=3, max_tokens=80))
        counters = answer.counters
        down = watch.of(Proposals) + watch.of(TopK) + watch.of(Row)
        assert sum(counters.residual_down.values()) == sum(len(encode(m)) for m in down)  # type: ignore[attr-defined]
        up = sum(len(encode(m)) for m in watch.of(Correct))
        assert sum(counters.residual_up.values()) == up  # type: ignore[attr-defined]
        assert set(counters.residual) <= set(counters.residual_down)  # type: ignore[attr-defined]
        by_kind = {
            "top-k": [m for m in watch.of(TopK) if not m.first],
            "larger-k": [m for m in watch.of(TopK) if m.first],
            "proposals": [m for m in watch.of(Proposals) if not m.first],
            "more-proposals": [m for m in watch.of(Proposals) if m.first],
            "full-row": watch.of(Row),
        }
        for step, frames in by_kind.items():
            size = sum(len(encode(m)) for m in frames)
            assert counters.residual_down.get(step, 0) == size  # type: ignore[attr-defined]


def test_the_first_batch_is_as_long_as_the_bound_says():
    watch = Watch()
    w = world(faults=watch, seed=1)
    ask(w, TopKReply(), SamplingParams(seed=1, max_tokens=80))
    sizes = {len(m.tokens) for m in watch.of(Proposals) if not m.first}
    assert len(sizes) > 2
    assert max(sizes) <= 16
    assert proposal_count(Rejection(position=1, token=1, p=0.1, q=0.6)) == 5


# ------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("act", ["lose-and-cut", "arrive-and-cut", "restart", "repeat"])
@pytest.mark.parametrize("kind", [TopK, Proposals, Correct])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_dialogue_replays_and_never_redraws(kind: type, act: str, logprobs: int | None):
    """Same ids, same ledger, same origins as without the fault (I4)."""
    met = 0
    for seed in range(8):
        params = SamplingParams(seed=seed, max_tokens=16, ignore_eos=True, logprobs=logprobs)
        reply = TopKReply(k=4, budget=(0.0, 0.4, 5.0)[seed % 3])
        plain = world()
        expected = ask(plain, reply, params)
        watch = Watch(kind, 1 + seed % 3, act)
        w = world(faults=watch)
        answer = ask(w, reply, params)
        assert answer.ids == expected.ids
        assert tv_of(w) == tv_of(plain)
        assert isinstance(answer.end, Ended)
        if act == "repeat":
            assert answer.origins == expected.origins
        met += watch.met >= watch.nth
    assert met > 2


class RestartAt:
    """The verifier dies with the first frame of a kind: only rejections meet it."""

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.done = False

    def frames(self, world: World, pipe: Pipe, way: str, frame: bytes) -> list[tuple[float, bytes]]:
        if not self.done and isinstance(decode(frame), self.kind):
            self.done = True
            world.at(world.now, world.restart)
            return []
        return [(0.0, frame)]


def test_a_rejection_met_by_a_restart_keeps_the_law():
    """As tests/session/test_faults.py, with exact lists: no second chance for a position."""
    seen = Counter[tuple[int, ...]]()
    for seed in range(400):
        w = World(table_law(P, 4), table_law(Q, 4), vocab_size=4, rtt=0.002, faults=RestartAt(TopK))
        edge = w.edges[0]
        number = edge.ask(
            (1,),
            SamplingParams(seed=seed, max_tokens=3),
            schedule=Schedule.SYNC,
            rule=Rule.RATIO,
            draft_length=1,
            reply=TopKReply(k=4),
        )
        w.run()
        seen[tuple(edge.answers[number].ids[:2])] += 1
    assert fit([seen[a, b] for a in range(4) for b in range(4)], JOINT) > ALARM


def test_a_rebuilt_session_is_told_what_is_left():
    """The next verifier begins its dialogues as the last one would have."""
    opened = 0
    for seed in range(8):
        watch = Watch(Correct, 4, "restart")
        w = world(faults=watch)
        ask(w, TopKReply(k=4, budget=2.0), SamplingParams(seed=seed, max_tokens=40))
        first, *later = watch.of(Open)
        assert (first.top_k_reply, first.tv_left) == (4, 2.0)
        opened += len(later)
        assert all(o.top_k_reply == 4 and 0.0 <= o.tv_left < 2.0 for o in later)
    assert opened > 3


# ------------------------------------------------------------------------------- hostile peers


def spoiled(good: TopK, **changes: object) -> TopK:
    return msgspec.structs.replace(good, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"ids": (1, VOCAB)},
        {"ids": (1, 2**32 - 1)},
        {"weights": np.array([math.nan, 0.0], "<f4").tobytes()},
        {"weights": np.array([5.0, 5.0], "<f4").tobytes()},
        {"log_total": math.nan},
        {"rest": -1.0},
        {"rest": math.inf},
        {"ids": (), "weights": b""},
        {"epoch": 77},
        {"accepted": 900, "drafted": 901},
        {"start": 10**6},
    ],
    ids=str,
)
def test_a_list_that_is_none_costs_a_link_and_commits_nothing(changes: dict[str, object]):
    """I5 the other way round: a faulty cloud ends its connection, and the answer goes on."""
    half = np.log([0.5, 0.25]).astype("<f4").tobytes()

    class Spoil:
        done = False

        def frames(self, world: World, pipe: Pipe, way: str, frame: bytes):  # type: ignore[no-untyped-def]
            message = decode(frame)
            if self.done or not isinstance(message, Proposals | TopK):
                return [(0.0, frame)]
            self.done = True
            good = TopK(
                session=message.session,
                epoch=message.epoch,
                start=message.start,
                drafted=message.drafted,
                accepted=message.accepted,
                first=0,
                ids=(1, 2),
                weights=half,
                log_total=0.0,
                rest=0.25,
            )
            return [(0.0, encode(spoiled(good, **changes)))]

    spoil = Spoil()
    w = world(faults=spoil)
    answer = ask(w, TopKReply(k=4, budget=1.0), SamplingParams(seed=1, max_tokens=30))
    assert spoil.done
    assert isinstance(answer.end, Ended)
    assert w.edges[0].client.tally.reconnects == 1
    assert len(answer.ids) == 30
    assert tv_of(w).spent <= 1.0


def test_a_list_nobody_asked_for_is_refused():
    half = np.log([0.5, 0.25]).astype("<f4").tobytes()
    frame = TopK(
        session=1,
        epoch=0,
        start=4,
        drafted=1,
        accepted=0,
        first=0,
        ids=(1, 2),
        weights=half,
        log_total=0.0,
        rest=0.25,
    )
    w = world()
    edge = w.edges[0]

    def meddle() -> None:
        edge.client.receive(encode(frame), w.now)
        edge.act()

    w.later(0.3, meddle)
    answer = ask(w, TopKReply(), SamplingParams(seed=1, max_tokens=30))
    assert isinstance(answer.end, Ended)
    assert edge.client.tally.reconnects == 1


@pytest.mark.parametrize(
    "call",
    [
        Correct(session=1, position=0, listed=2**32 - 1),
        Correct(session=1, position=0, listed=MAX_TOP_K),
        Correct(session=1, position=0, listed=VOCAB),
        Correct(session=1, position=0, token=VOCAB),
        Correct(session=1, position=0, token=1, left=math.nan),
        Correct(session=1, position=0, token=1, left=-1.0),
    ],
    ids=str,
)
def test_absurd_calls_end_one_session_and_no_other(call: Correct):
    """I5: the session fails with a code, a neighbour goes on to the same end as ever."""

    class Meddle:
        done = False

        def frames(self, world: World, pipe: Pipe, way: str, frame: bytes):  # type: ignore[no-untyped-def]
            message = decode(frame)
            if self.done or not isinstance(message, Correct):
                return [(0.0, frame)]
            self.done = True
            return [(0.0, encode(msgspec.structs.replace(call, position=message.position)))]

    w = world(faults=Meddle(), edges=2)
    params = SamplingParams(seed=2, max_tokens=30)
    neighbour = w.edges[1].ask(PROMPT, params)
    answer = ask(w, TopKReply(k=4, budget=1.0), SamplingParams(seed=1, max_tokens=40))
    w.run()
    assert isinstance(answer.end, Failed)
    assert answer.end.code in (Code.STATE, Code.MALFORMED)
    expected = alone(TARGET, PROMPT, params, vocab_size=VOCAB)
    assert tuple(w.edges[1].answers[neighbour].ids) == expected


def test_absurd_proposals_judged_get_the_row_and_repeated_calls_an_end():
    p = dist(np.zeros(8))
    talk = Talk(p, dist(np.arange(8.0)), 7, TopKReply())
    call = Correct(session=1, position=9, have=2**32 - 1)
    for _ in range(MAX_CALLS):
        assert isinstance(talk.cloud.more(call), Row)
    with pytest.raises(RemoteError) as refused:
        talk.cloud.more(call)
    assert refused.value.code is Code.STATE
    assert refused.value.session == 1


@pytest.mark.parametrize(
    "wish", [{"top_k_reply": MAX_TOP_K + 1}, {"top_k_reply": 4, "tv_left": -1.0}, {"tv_left": 0.5}]
)
def test_wishes_out_of_range_are_refused(wish: dict[str, float]):
    class Wish:
        def frames(self, world: World, pipe: Pipe, way: str, frame: bytes):  # type: ignore[no-untyped-def]
            message = decode(frame)
            if isinstance(message, Open):
                frame = encode(msgspec.structs.replace(message, **wish))
            return [(0.0, frame)]

    w = world(faults=Wish())
    answer = ask(w, TopKReply(), SamplingParams(seed=1, max_tokens=5))
    assert isinstance(answer.end, Failed)
    assert answer.end.code is Code.PARAMETER


def test_lists_are_of_the_ratio_rule():
    w = world()
    with pytest.raises(ParameterError, match="ratio"):
        w.edges[0].ask(PROMPT, SamplingParams(), rule=Rule.COUPLED, reply=TopKReply(k=4))
    opened = Watch()
    w = world(faults=opened)
    ask(w, TopKReply(k=4), SamplingParams(seed=1, max_tokens=3))
    (message,) = opened.of(Open)
    other = msgspec.structs.replace(message, rule="coupled", uid=bytes(16))
    w.service.connected(77, "tenant")
    (error,) = w.service.receive(77, other, w.now)
    assert error.message.code is Code.PARAMETER  # type: ignore[union-attr]
