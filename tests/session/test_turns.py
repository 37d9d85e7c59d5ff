"""Whose turn it is on the draft engine: the rules of `session.turns`, on queues made up here."""

from __future__ import annotations

import random

import pytest

from outrider.session.turns import Ready, choose


def ready(number: int, *, turn: int = 1, ahead: bool = False, fresh: bool = False) -> Ready:
    return Ready(number=number, ahead=ahead, turn=turn, fresh=fresh)


def test_nobody_wants_one():
    assert choose([]) == ()


def test_a_confirmed_prefix_comes_before_running_ahead_however_long_that_waited():
    queue = [ready(1, turn=1, ahead=True), ready(2, turn=9), ready(3, turn=8)]
    assert choose(queue) == (3, 2)
    assert choose(queue[:1]) == (1,)


def test_the_longest_wait_goes_first_and_a_batch_has_a_limit():
    queue = [ready(n, turn=100 - n) for n in range(12)]
    assert choose(queue, 4) == (11, 10, 9, 8)
    assert len(choose(queue)) == 8


def test_a_newcomer_goes_alone_and_queues_by_its_arrival():
    queue = [ready(1, turn=5), ready(2, turn=6, fresh=True), ready(3, turn=7)]
    assert choose(queue) == (1,), "nobody overtakes it"
    assert choose(queue[1:]) == (2,)


@pytest.mark.parametrize("limit", [1, 3, 8])
def test_between_two_turns_of_a_waiting_session_any_other_has_one_at_most(limit: int):
    """Rule 3, over sessions that come, go, and are now and then not ready at all."""
    chance = random.Random(limit)
    turn, arrivals = 0, 0
    sessions: dict[int, Ready] = {}
    waited: dict[int, dict[int, int]] = {}
    """By a session that is confirmed and ready: turns that others had since it is."""
    longest = 0
    for _ in range(3000):
        if len(sessions) < 12 and chance.random() < 0.2:
            arrivals += 1
            sessions[arrivals] = ready(arrivals, turn=turn, fresh=True)
        if sessions and chance.random() < 0.05:
            gone = chance.choice(list(sessions))
            del sessions[gone]
            waited.pop(gone, None)
        for n in sessions:
            if n not in waited and chance.random() < 0.5:
                waited[n] = {}
        queue = [sessions[n] for n in waited]
        if not queue:
            continue
        turn += 1
        for n in choose(queue, limit):
            longest = max(longest, sum(waited.pop(n).values()))
            sessions[n] = ready(n, turn=turn)
            for others in waited.values():
                others[n] = others.get(n, 0) + 1
        assert all(count == 1 for others in waited.values() for count in others.values())
    assert longest >= 5, "somebody did wait"
