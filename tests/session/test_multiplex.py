"""Many requests on one draft engine, in virtual time: turns, rates, and the same ids.

That the engine never idles while a session would draft, and that nobody runs ahead while a
confirmed prefix waits, `world.Edge` asserts at every moment of every test.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from outrider.core.tokens import Rule, SamplingParams
from outrider.session.events import Ended
from outrider.session.schedules import Schedule
from toys import TARGET, VOCAB, draft
from world import Edge, RandomFaults, World, alone

K = 4
STEP = 0.03
DRAFT = 0.005
SHARED = (Schedule.MULTIPLEX, Schedule.HYBRID)


def world(share: float = 0.3, **options: object) -> World:
    values: dict[str, object] = {
        "vocab_size": VOCAB,
        "step_time": lambda rows: STEP,
        "draft_time": DRAFT,
        "service": {"max_sessions": 64},
        **options,
    }
    return World(TARGET, draft(share), **values)  # type: ignore[arg-type]


def prompt(i: int) -> tuple[int, ...]:
    return (1 + i % 30, 2, 3 + i // 30)


def params(i: int, tokens: int) -> SamplingParams:
    return SamplingParams(seed=i, max_tokens=tokens, temperature=(0.0, 1.0)[i % 2])


def ask(w: World, count: int, schedule: Schedule, *, tokens: int = 40) -> Edge:
    (edge,) = w.edges
    for i in range(count):
        edge.ask(prompt(i), params(i, tokens), schedule=schedule, draft_length=K, window=12)
    return edge


def identical(edge: Edge, *, tokens: int) -> None:
    for i, answer in enumerate(edge.answers.values()):
        if answer.cancelled:
            continue
        assert isinstance(answer.end, Ended), i
        assert answer.end.confirmed
        own = alone(TARGET, prompt(i), params(i, tokens), vocab_size=VOCAB)
        assert tuple(answer.ids) == own, i


def empty(w: World) -> None:
    """Nothing is left on either side, once the cloud's patience with what was cut is over (I7)."""
    w.run(until=w.now + 100.0, idle=False)
    assert w.service.sessions == 0
    assert w.desk.held == 0
    assert w._draft_model.open_slots == 0
    assert not w.edges[0].client._drafting


# ------------------------------------------------------------------------------- I1


@pytest.mark.parametrize("schedule", [*SHARED, Schedule.PEARL, Schedule.FREERUN])
@pytest.mark.parametrize("count", [1, 3, 12])
def test_ids_are_the_targets_own(schedule: Schedule, count: int):
    w = world(jitter=0.03, seed=count)
    edge = ask(w, count, schedule)
    w.run()
    identical(edge, tokens=40)
    empty(w)


@pytest.mark.parametrize("schedule", SHARED)
def test_cases_11_and_32_cuts_and_cancels_in_the_middle_of_a_batch(schedule: Schedule):
    """Whoever goes while its drafts are being made leaves the others as they were."""
    inside = 0
    for seed in range(8):
        w = world(jitter=0.03, seed=seed, faults=RandomFaults(seed, cut=0.004, quiet_after=4.0))
        edge = ask(w, 10, schedule)
        for number in (2, 5, 9):

            def cancel(edge: Edge = edge, number: int = number) -> None:
                nonlocal inside
                inside += number in edge.client._drafting and len(edge.batches[-1].jobs) > 1
                edge.cancel(number)

            w.later(0.4 + 0.13 * number + 0.011 * seed, cancel)
        w.later(0.7, w.cut_all)
        w.run()
        assert edge.client.tally.reconnects
        identical(edge, tokens=40)
        empty(w)
    assert inside >= 3, "some of them were in a batch with others"


def test_ratio_answers_in_company_are_finished_and_confirmed():
    """Under the ratio rule the law is the target's and ids may differ; at T=0 they may not."""
    w = world(0.5)
    (edge,) = w.edges
    greedy = SamplingParams(temperature=0.0, max_tokens=30)
    for i in range(6):
        schedule = SHARED[i % 2]
        edge.ask(prompt(i), greedy, schedule=schedule, rule=Rule.RATIO, draft_length=K)
    w.run()
    for i, answer in enumerate(edge.answers.values()):
        assert tuple(answer.ids) == alone(TARGET, prompt(i), greedy, vocab_size=VOCAB)
    empty(w)


# ------------------------------------------------------------------------------- who drafts when


@pytest.mark.parametrize("count", [1, 8])
def test_multiplex_never_drafts_behind_unjudged_drafts(count: int):
    w = world()
    edge = ask(w, count, Schedule.MULTIPLEX)
    w.run()
    assert not any(any(batch.ahead.values()) for batch in edge.batches)
    assert sum(sum(batch.jobs.values()) for batch in edge.batches) > 30


def test_hybrid_runs_ahead_when_the_engine_would_idle_and_only_then():
    w = world()
    edge = ask(w, 1, Schedule.HYBRID)
    w.run()
    lone = sum(any(batch.ahead.values()) for batch in edge.batches) / len(edge.batches)
    assert lone > 0.5
    w = world()
    edge = ask(w, 32, Schedule.HYBRID, tokens=30)
    w.run(until=1.2)  # from then on the first ones end, and there is room again
    busy = [batch for batch in edge.batches if batch.at > 0.6]
    assert sum(any(batch.ahead.values()) for batch in busy) / len(busy) < 0.1
    w.run()
    identical(edge, tokens=30)


def test_a_batch_holds_one_kind_and_a_newcomer_reads_its_prompt_alone():
    w = world()
    edge = ask(w, 12, Schedule.HYBRID)
    w.run()
    first: set[int] = set()
    for batch in edge.batches:
        assert len(set(batch.ahead.values())) == 1
        assert len(batch.jobs) <= 8
        new = set(batch.jobs) - first
        assert not new or len(batch.jobs) == 1
        first |= new
    assert max(len(batch.jobs) for batch in edge.batches) > 2


def test_fair_among_requests_that_differ():
    """Sixteen requests that want the engine at once, some easy to guess and some not, of two
    schedules: nobody waits for two turns of another, and all have about as many."""
    w = world(0.5, draft_time=0.02, step_time=lambda rows: 0.01, rtt=0.01)
    (edge,) = w.edges
    for i in range(16):
        edge.ask(prompt(i), params(i, 60), schedule=SHARED[i % 2], draft_length=2)
    w.run(until=6.0)
    assert all(answer.end is None for answer in edge.answers.values())
    turns = Counter(n for batch in edge.batches for n in batch.jobs)
    assert len(turns) == 16
    assert max(turns.values()) <= 1.3 * min(turns.values()), turns
    last: dict[int, int] = {}
    for at, batch in enumerate(edge.batches):
        for number in batch.jobs:
            between = edge.batches[last.get(number, at) + 1 : at]
            others = Counter(n for b in between for n in b.jobs)
            # One turn while it waits, and one while its own drafts are on their way.
            assert all(count <= 2 for count in others.values()), (number, others)
            last[number] = at
    w.run()
    identical(edge, tokens=60)


def test_seven_that_run_ahead_do_not_starve_one_that_waits():
    """What a request of rounds waits for is its own K tokens in company, R, t_v, and a step of the
    others: not their windows of 32."""
    step = 0.02
    w = world(0.0, draft_step=lambda n: step)
    (edge,) = w.edges
    for i in range(7):
        edge.ask(prompt(i), params(i, 80), schedule=Schedule.STREAM, window=32)
    late = edge.ask(prompt(7), params(7, 30), schedule=Schedule.MULTIPLEX, draft_length=K)
    w.run()
    mine = [batch.at for batch in edge.batches if late in batch.jobs]
    assert len(mine) == 6
    longest = max(b - a for a, b in itertools.pairwise(mine))
    assert longest < K * step + 0.05 + 2 * STEP + 2 * step


# ------------------------------------------------------------------------------- rates


def rate(count: int, schedule: Schedule, *, tokens: int = 81, **options: object) -> float:
    """Tokens a second of `count` requests at once, drafts always right; the prefills left out."""
    w = world(0.0, **options)
    edge = ask(w, count, schedule, tokens=tokens)
    w.run()
    times = sorted(t for answer in edge.answers.values() for t in answer.times)
    return (len(times) - count) / (times[-1] - times[count - 1])


@pytest.mark.parametrize("count", [1, 2, 8, 32])
@pytest.mark.parametrize("bound", ["edge", "cloud"])
def test_the_rate_of_many_is_that_of_the_closed_form(count: int, bound: str):
    """As many rounds at once as there are requests, until the edge drafts, or the cloud verifies,
    all the time. Drafts that are always right bring K + 1 tokens a round."""
    rtt = 0.08
    if bound == "edge":  # company gains nothing: a token is 5 ms of the engine
        options: dict[str, object] = {"rtt": rtt}
        most = (K + 1) / (K * DRAFT)
        cycle = K * DRAFT + rtt + STEP
    else:  # drafting is next to nothing, a row is 4 ms of the cloud
        options = {"rtt": rtt, "draft_time": 1e-5, "step_time": lambda rows: 0.004 * rows}
        most = 1 / 0.004
        cycle = rtt + (K + 1) * 0.004
    expected = min(count * (K + 1) / cycle, most)
    assert rate(count, Schedule.MULTIPLEX, **options) == pytest.approx(expected, rel=0.12)


def test_many_together_against_one_after_the_other():
    one = rate(1, Schedule.MULTIPLEX)
    assert rate(8, Schedule.MULTIPLEX) > 4 * one
    together = rate(8, Schedule.MULTIPLEX, draft_step=lambda n: DRAFT * (0.6 + 0.4 * n))
    assert together > rate(8, Schedule.MULTIPLEX), "a batch that costs less brings more"


def test_alone_multiplex_is_sync_and_hybrid_is_faster():
    one = {schedule: rate(1, schedule) for schedule in (*SHARED, Schedule.SYNC)}
    assert one[Schedule.MULTIPLEX] == pytest.approx(one[Schedule.SYNC], rel=0.01)
    assert one[Schedule.HYBRID] > 1.5 * one[Schedule.SYNC]


# ------------------------------------------------------------------------------- what is told


def test_seconds_of_a_batch_are_shared_out():
    """All shares together are the engine's time, and each is its part of every step it was in."""
    told: list[tuple[int, float]] = []
    w = world(draft_step=lambda n: 0.002 + 0.001 * n)
    edge = ask(w, 6, Schedule.MULTIPLEX)
    inner = edge.client.drafted

    def listen(number: int, guess: object, now: float, *, seconds: float = 0.0) -> None:
        told.append((number, seconds))
        inner(number, guess, now, seconds=seconds)  # type: ignore[arg-type]

    edge.client.drafted = listen  # type: ignore[method-assign]
    w.run()
    busy = sum(batch.until - batch.at for batch in edge.batches)
    assert sum(seconds for _, seconds in told) == pytest.approx(busy)
