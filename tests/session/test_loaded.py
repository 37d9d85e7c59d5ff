"""A verifier with many sessions in virtual time: back-pressure, tenants beside a greedy one."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from itertools import pairwise

import pytest

from outrider.control.costs import RowCosts
from outrider.core.tokens import SamplingParams
from outrider.engines.measure import ROWS
from outrider.session.events import Ended
from outrider.session.schedules import Schedule
from toys import TARGET, VOCAB, draft
from world import World, alone

PASS = 0.03


def steps(rows: int) -> float:
    """An engine whose pass has eight rows."""
    return PASS * -(-rows // 8)


def flat(rows: int) -> float:
    return PASS + 0.0001 * rows


def seeded(w: World) -> World:
    """With the row costs that a verifier measures before it serves."""
    w.service.costs = RowCosts([(n, w.step_time(n)) for n in ROWS])
    return w


def params(seed: int, tokens: int = 60) -> SamplingParams:
    return SamplingParams(seed=seed, temperature=0.8, max_tokens=tokens, ignore_eos=True)


@functools.cache
def rate(
    schedule: Schedule, sessions: int, step_time: Callable[[int], float], share: float = 0.3
) -> tuple[float, World]:
    """Tokens a virtual second of so many endless answers at once, after the first ones."""
    w = World(
        TARGET, draft(share), vocab_size=VOCAB, rtt=0.04, step_time=step_time, draft_time=0.0005
    )
    seeded(w)
    for n in range(sessions):
        w.edges[0].ask((1, 2, n), params(n, 60), schedule=schedule)
    w.run(until=600.0)
    for answer in w.edges[0].answers.values():
        assert isinstance(answer.end, Ended)
        assert tuple(answer.ids) == alone(
            TARGET, answer.prompt, answer.params, vocab_size=VOCAB, eos=w.eos
        )
    times = sorted(t for a in w.edges[0].answers.values() for t in a.times)
    middle = times[len(times) // 4 : 3 * len(times) // 4]
    return len(middle) / (middle[-1] - middle[0]), w


@pytest.mark.parametrize("schedule", [Schedule.FREERUN, Schedule.SYNC])
def test_where_rows_are_full_a_loaded_cloud_turns_speculation_off(schedule: Schedule):
    """Sixteen answers fill two passes with one row each: a draft's row would be another pass."""
    plain, _ = rate(Schedule.CLOUD_ONLY, 16, steps)
    speculating, w = rate(schedule, 16, steps)
    assert speculating > 0.95 * plain
    limits = {m.window.limit for m in w.edges[0].machines.values() if m is not None}
    assert limits == {0}


def test_where_rows_are_free_nobody_is_limited():
    plain, _ = rate(Schedule.CLOUD_ONLY, 8, flat)
    speculating, w = rate(Schedule.FREERUN, 8, flat)
    assert speculating > 1.4 * plain
    assert {m.window.limit for m in w.edges[0].machines.values() if m is not None} <= {None, 8}


def test_one_session_is_nobodys_load():
    _, w = rate(Schedule.FREERUN, 1, steps, share=1.0)
    assert {m.window.limit for m in w.edges[0].machines.values() if m is not None} == {None}


@pytest.mark.parametrize("schedule", [Schedule.FREERUN, Schedule.CLOUD_ONLY])
def test_a_greedy_tenant_hardly_moves_another_one(schedule: Schedule):
    """Two dozen answers of one login, more rows than a batch takes, beside one answer of another:
    its 95th percentile of the time between two tokens stays within a tenth. Were both one login's,
    it would be four times as long."""

    def gaps(greedy: int) -> float:
        w = World(
            TARGET, draft(0.3), vocab_size=VOCAB, rtt=0.04, step_time=steps, edges=2,
            draft_time=0.0005,
        )  # fmt: skip
        seeded(w)
        victim, other = w.edges
        other.tenant = "greedy"
        for n in range(greedy):
            other.ask((2, n % VOCAB, 3), params(n, 1200), schedule=Schedule.FREERUN)
        w.run(until=1.0, idle=False)
        times = victim.answers[victim.ask((1, 2), params(1, 50), schedule=schedule)].times
        while len(times) < 50:
            w.run(until=w.now + 0.25, idle=False)
        waits = [b - a for a, b in pairwise(times[10:])]
        return statistics.quantiles(waits, n=20)[-1]

    assert gaps(24) < 1.10 * gaps(0)
