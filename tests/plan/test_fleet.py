"""Verifiers for so many edges: against closed forms and the simulator of crowds."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from outrider.plan.facts import Curve, Facts
from outrider.plan.modes import cloud_only, colocated, edge_only, sync
from outrider.plan.replicas import BATCH_ROWS, PLANNED, SLOTS, fleet, fleets, share
from outrider.session.schedules import Schedule
from outrider.sim.scale import crowd
from outrider.sim.scenario import Scenario, parse

FLAT = Facts(
    draft=0.005,
    verify=((1, 0.06),),
    curve=Curve.constant(0.8),
    round_trip=0.1,
    cloud_draft=0.005,
)
COSTLY = replace(FLAT, verify=((1, 0.06), (9, 0.09), (65, 0.4)))
TOKENS = 100
LENGTH = 4


def test_one_answer_alone_is_the_estimate() -> None:
    for facts in (FLAT, COSTLY):
        for estimate in (cloud_only(facts), sync(facts, 4), colocated(facts, 4)):
            assert share(facts, estimate, 1).seconds == pytest.approx(estimate.seconds)


def test_rows_that_cost_nothing_cost_nobody_anything_until_the_budget_is_full() -> None:
    """Cloud streaming: every answer is in every forward."""
    estimate = cloud_only(FLAT)
    for answers in (2, 17, BATCH_ROWS):
        found = share(FLAT, estimate, answers)
        assert found.batch == pytest.approx(answers, rel=1e-4)
        assert found.seconds == pytest.approx(FLAT.step)
    twice = share(FLAT, estimate, 2 * BATCH_ROWS)
    assert twice.seconds == pytest.approx(2.0 * FLAT.step)


def test_rows_that_cost_are_paid_by_all() -> None:
    estimate = cloud_only(COSTLY)
    for answers in (4, 9, 33):
        assert share(COSTLY, estimate, answers).seconds == pytest.approx(COSTLY.seconds(answers))


def test_more_answers_are_never_faster() -> None:
    for facts in (FLAT, COSTLY):
        for estimate in (cloud_only(facts), sync(facts, 6), colocated(facts, 3)):
            times = [share(facts, estimate, n).seconds for n in range(1, 129)]
            assert all(b >= a * (1.0 - 1e-9) for a, b in pairwise(times))


def test_the_fewest_verifiers() -> None:
    """Cloud streaming: n answers, n rows; n + sqrt(n) of them are planned for."""
    found = fleet(COSTLY, cloud_only(COSTLY), edges=100, seconds=0.1)
    assert found is not None
    assert found.more is not None
    assert COSTLY.seconds(found.share.answers) <= 0.1 < COSTLY.seconds(found.more.answers)
    assert found.share.answers == found.edges + math.ceil(math.sqrt(found.edges))
    assert found.verifiers == math.ceil(100 / found.edges)
    two = fleet(replace(COSTLY, requests=2), cloud_only(COSTLY), edges=100, seconds=0.1)
    assert two is not None
    assert two.edges == found.edges // 2


def test_slots_limit_where_time_does_not() -> None:
    found = fleet(FLAT, cloud_only(FLAT), edges=1000, seconds=60.0)
    assert found is not None
    assert (found.edges, found.more) == (56, None)
    assert found.share.answers == SLOTS == 56 + 8


def test_one_verifier_needs_no_room_for_more_edges_than_there_are() -> None:
    found = fleet(FLAT, cloud_only(FLAT), edges=SLOTS, seconds=0.06)
    assert found is not None
    assert (found.verifiers, found.share.answers, found.more) == (1, SLOTS, None)


def test_what_no_number_of_verifiers_makes_faster() -> None:
    assert fleet(FLAT, cloud_only(FLAT), edges=10, seconds=0.059) is None
    assert fleet(FLAT, edge_only(FLAT), edges=10, seconds=1.0) is None
    slow_edge = replace(FLAT, draft=0.03, requests=8)
    assert fleet(slow_edge, sync(slow_edge, 4), edges=10, seconds=0.2) is None
    assert fleets(FLAT, edges=10, seconds=0.001) == []
    with pytest.raises(ValueError, match="forwards"):
        share(FLAT, edge_only(FLAT), 1)
    with pytest.raises(ValueError, match="answer"):
        share(FLAT, cloud_only(FLAT), 0)


def test_each_way_takes_its_best_length() -> None:
    found = {each.estimate.schedule: each for each in fleets(COSTLY, edges=200, seconds=0.12)}
    assert set(found) == set(PLANNED)
    other = fleet(COSTLY, sync(COSTLY, 16), edges=200, seconds=0.12)
    assert other is None or other.verifiers > found[Schedule.SYNC].verifiers
    nobody = replace(COSTLY, cloud_draft=None)
    assert Schedule.COLOCATED not in {
        f.estimate.schedule for f in fleets(nobody, edges=9, seconds=1)
    }


def world(facts: Facts, length: int, *, edges: int, verifiers: int, seconds: float) -> Scenario:
    """Edges that ask so often that each has one answer under way if a token takes `seconds`."""
    rows = ",".join(f'[{n},"{1e3 * s:g}ms"]' for n, s in facts.verify)
    values = {
        "link.rtt": f"{1e3 * facts.round_trip:g}ms",
        "edge.draft": "5ms",
        "cloud.draft": "5ms",
        "cloud.verify": f"[{rows}]",
        "cloud.count": str(verifiers),
        "edge.count": str(edges),
        "acceptance.alpha": "0.8",
        "workload.rate": str(1.0 / (TOKENS * seconds)),
        "workload.requests": "1",
        "workload.max-tokens": str(TOKENS),
        "workload.prompt": "4",
        "schedule.draft-length": str(max(1, length)),
        "scale.duration": "40s",
    }
    return parse("", overrides=[f"{key}={value}" for key, value in values.items()])


CELLS = {
    "rows cost": (COSTLY, 0.12),
    "rows are free, near": (replace(FLAT, round_trip=0.02), 0.09),
    "rows cost, near": (replace(COSTLY, round_trip=0.02), 0.1),
    "rows are free": (FLAT, 0.09),
}
EDGES = 120
TOLERANCE = 1.1
"""Of the time per token wanted, in a crowd whose questions come by chance."""


@pytest.mark.parametrize("schedule", PLANNED)
@pytest.mark.parametrize(
    "cell", [pytest.param(c, marks=pytest.mark.slow if "near" in c else ()) for c in CELLS]
)
def test_so_many_are_enough_and_half_as_many_are_not(cell: str, schedule: Schedule) -> None:
    facts, wanted = CELLS[cell]
    (found,) = [
        f for f in fleets(facts, edges=EDGES, seconds=wanted) if f.estimate.schedule is schedule
    ]
    assert found.verifiers >= 2

    def seen(verifiers: int) -> float:
        made = world(facts, found.estimate.length, edges=EDGES, verifiers=verifiers, seconds=wanted)
        per_token = crowd(made, schedule).per_token
        assert per_token is not None
        return per_token

    assert seen(found.verifiers) <= TOLERANCE * wanted
    assert seen(found.verifiers // 2) > wanted or found.more is None
