"""Who shares a forward: literal cases of each rule, and fairness over many forwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from outrider.control.costs import Costs
from outrider.session.batching import (
    ACTIVE_S,
    INTAKE_BURST_S,
    INTAKE_STRETCH,
    QUANTUM_ROWS,
    REMEMBER_S,
    WHOLE_PROMPT,
    FairShare,
    Ready,
    Share,
    most_rows,
)


class Curve:
    """t_v as a function of rows."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self._seconds = seconds

    def seconds(self, rows: int) -> float:
        return self._seconds(rows)


FLAT = Curve(lambda _: 0.03)
LINEAR = Curve(lambda rows: 0.01 * rows)
OFFSET = Curve(lambda rows: 0.02 + 0.005 * rows)
STEPS = Curve(lambda rows: 0.03 * -(-rows // 8))
"""A pass of 8 rows, or several of them: the deterministic engine."""


def same(curve: Costs) -> Callable[[int], Costs]:
    return lambda _: curve


def survive(alpha: float) -> Callable[[int], Sequence[float]]:
    return lambda n: [alpha ** (i + 1) for i in range(n)]


def ready(key: int, tenant: str = "ann", **changes: object) -> Ready:
    values: dict[str, object] = {
        "due": float(key),
        "most": 0,
        "chooses": True,
        "survival": survive(0.8),
        **changes,
    }
    return Ready(key=key, tenant=tenant, **values)  # type: ignore[arg-type]


def keys(shares: Sequence[Share]) -> list[int]:
    return [s.key for s in shares]


def test_nobody_is_ready():
    assert FairShare(budget=8).batch([], same(FLAT), 0.0, alone=False) == []


def test_within_a_tenant_the_earliest_due_goes_first():
    waiting = [ready(1, due=3.0), ready(2, due=1.0), ready(3, due=2.0)]
    shares = FairShare(budget=2).batch(waiting, same(FLAT), 0.0, alone=False)
    assert keys(shares) == [2, 3]


def test_tenants_take_turns_however_many_sessions_they_have():
    many = [ready(n) for n in range(1, 9)]
    one = ready(9, "bob", due=100.0)
    shares = FairShare(budget=4).batch([*many, one], same(FLAT), 0.0, alone=False)
    assert keys(shares) == [1, 9, 2, 3]


@pytest.mark.parametrize(
    ("curve", "sessions", "expected"),
    [
        (FLAT, 20, 20),  # rows are free: everybody
        (STEPS, 20, 8),  # a full step; nine would be served as slowly as sixteen
        (STEPS, 7, 7),
        (LINEAR, 20, 1),  # sharing gains nothing, so nobody waits for another
    ],
)
def test_the_row_budget_follows_the_cost_of_rows(curve: Curve, sessions: int, expected: int):
    waiting = [ready(n) for n in range(1, sessions + 1)]
    shares = FairShare(budget=64).batch(waiting, same(curve), 0.0, alone=False)
    assert len(shares) == expected


def test_a_block_is_judged_whole_unless_tenants_compete():
    """`all` is the published synchronous loop; junk of one tenant is no work for two."""
    block = ready(1, chooses=False, most=16, survival=survive(0.1))
    shares = FairShare(budget=64).batch([block], same(LINEAR), 0.0, alone=True)
    assert [s.drafts for s in shares] == [16]
    fair = FairShare(budget=64)
    shares = fair.batch([block, ready(2, "bob")], same(STEPS), 0.0, alone=False)
    assert {s.key: s.drafts for s in shares} == {1: 6, 2: 0}, "what is left of the step is free"
    shares = fair.batch([block, ready(2, "bob")], same(LINEAR), 0.0, alone=False)
    assert {s.key: s.drafts for s in shares} == {1: 0}


def test_no_block_breaks_the_budget():
    block = ready(1, chooses=False, most=200)
    (share,) = FairShare(budget=32).batch([block], same(FLAT), 0.0, alone=True)
    assert share.drafts == 31


def test_a_tenant_over_its_share_fills_free_rows_only():
    fair = FairShare(budget=64, stretch=0.05)
    heavy = [ready(n) for n in range(1, 33)]
    light = ready(100, "bob", due=1000.0)
    served: list[list[int]] = []
    for i in range(50):
        shares = fair.batch([*heavy, light], same(STEPS), 0.03 * i, alone=False)
        for share in shares:
            tenant = "bob" if share.key == 100 else "ann"
            fair.charge(tenant, rows=1, fed=0, seconds=0.03, others=True, now=0.03 * i)
        served.append(keys(shares))
    assert all(100 in batch for batch in served), "the light tenant is in every forward"
    late = served[int(QUANTUM_ROWS) :]
    assert all(len(batch) == 8 for batch in late), "and the others fill its step, not another"
    by_cost = fair.batch([*heavy, light], same(LINEAR), 2.0, alone=False)
    assert keys(by_cost) == [100], "where a row costs something they do not ride along"


def test_a_session_that_needs_a_pass_of_its_own_does_not_ride_along():
    """Rows of one session are free here, a second session is not: its cache has another length."""

    def costs(sessions: int) -> Costs:
        return Curve(lambda _: 0.03 * sessions)

    fair = FairShare(budget=64)
    fair.batch([ready(1), ready(2, "bob")], costs, 0.0, alone=False)
    fair.charge("ann", rows=100, fed=0, seconds=0.03, others=True, now=0.0)
    assert keys(fair.batch([ready(1), ready(2, "bob")], costs, 0.1, alone=False)) == [2]


def test_while_the_light_one_waits_for_its_network_the_heavy_one_stays_short():
    fair = FairShare(budget=64)
    heavy = [ready(n) for n in range(1, 33)]
    fair.batch([*heavy, ready(100, "bob")], same(STEPS), 0.0, alone=False)
    fair.charge("ann", rows=200, fed=0, seconds=0.03, others=True, now=0.0)
    assert len(fair.batch(heavy, same(OFFSET), 0.1, alone=False)) == 6
    gone = fair.batch(heavy, same(FLAT), 0.1 + 2 * ACTIVE_S, alone=False)
    assert len(gone) == 32, "a session that hangs holds nobody back for long"


def test_service_is_not_saved_up_by_pausing_nor_shed_by_leaving():
    fair = FairShare(budget=8)
    ann, bob = ready(1), ready(2, "bob")
    fair.batch([ann, bob], same(FLAT), 0.0, alone=False)
    fair.charge("ann", rows=100, fed=0, seconds=0.1, others=True, now=0.0)
    fair.charge("bob", rows=40, fed=0, seconds=0.1, others=True, now=0.0)
    late = 5 * ACTIVE_S
    fair.batch([bob], same(FLAT), late, alone=False)
    assert fair.service()["ann"] == 100, "it is remembered while others have used less"
    fair.batch([ann, bob], same(FLAT), late + 0.1, alone=False)
    assert fair.service()["ann"] == 100
    fair.charge("ann", rows=50, fed=0, seconds=0.1, others=True, now=late + 0.1)
    fair.batch([ann, bob, ready(3, "eve")], same(FLAT), late + 0.2, alone=False)
    assert fair.service()["eve"] == 40, "a newcomer begins with the least of the active ones"
    fair.batch([bob], same(FLAT), late + 2 * REMEMBER_S, alone=False)
    assert "ann" not in fair.service(), "in the end everything is forgiven"


def test_the_table_of_tenants_does_not_grow_for_ever():
    fair = FairShare(budget=8)
    for i in range(1000):
        fair.batch([ready(1, f"tenant-{i}")], same(FLAT), 10.0 * i, alone=True)
    assert len(fair.service()) == 1


def test_prompts_are_taken_in_whole_when_nobody_waits():
    (share,) = FairShare(budget=64).batch([ready(1)], same(LINEAR), 0.0, alone=True)
    assert share.room == WHOLE_PROMPT
    (first, _) = FairShare(budget=64).batch([ready(1), ready(2)], same(STEPS), 0.0, alone=False)
    assert first.room == 8 * INTAKE_STRETCH, "an id counts as a row among sixteen"


def test_what_a_prompt_takes_is_learnt_from_prompts():
    """A curve over a few rows that looks flat, as on a busy machine, makes no prompt free."""
    fair = FairShare(budget=64)
    both = [ready(1), ready(2)]
    fair.took(100, 1.0)
    (first, _) = fair.batch(both, same(FLAT), 0.0, alone=False)
    assert first.room == int(INTAKE_STRETCH * 0.03 / 0.01)
    for _ in range(50):
        fair.took(100, 0.0)
    (first, _) = fair.batch(both, same(FLAT), 0.0, alone=False)
    assert first.room == WHOLE_PROMPT


def test_a_tenant_cannot_stretch_forwards_for_prompts_for_ever():
    fair = FairShare(budget=64)
    both = [ready(1), ready(2, "bob")]
    before = {s.key: s.room for s in fair.batch(both, same(STEPS), 0.0, alone=False)}
    fair.charge("ann", rows=0, fed=500, seconds=INTAKE_BURST_S + 1, others=True, now=0.0)
    after = {s.key: s.room for s in fair.batch(both, same(STEPS), 0.0, alone=False)}
    assert after[2] == before[2] == before[1]
    assert after[1] == 8 - 2, "it rides along"
    later = {s.key: s.room for s in fair.batch(both, same(STEPS), 60.0, alone=False)}
    assert later[1] == before[1], "and has its share again after a while"
    fair.charge("ann", rows=0, fed=500, seconds=100.0, others=False, now=60.0)
    alone = {s.key: s.room for s in fair.batch(both, same(STEPS), 60.0, alone=False)}
    assert alone[1] == before[1], "what nobody waited for is not held against it"


@pytest.mark.parametrize(
    ("curve", "seconds", "most", "expected"),
    [(STEPS, 0.03, 64, 8), (STEPS, 0.0, 64, 1), (FLAT, 1.0, 64, 64), (LINEAR, 0.055, 64, 5)],
)
def test_most_rows(curve: Curve, seconds: float, most: int, expected: int):
    assert most_rows(curve, seconds, most) == expected
