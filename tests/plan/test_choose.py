"""What is recommended, by how much, and when not to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.plan.choose import WORTH, Objective, Survey, joules, money, value
from outrider.plan.facts import Curve, Facts, Prices
from outrider.plan.heat import heat
from outrider.plan.modes import EDGE_CLOUD, cloud_only, edge_only, shared, sync
from outrider.session.schedules import Schedule

NEAR = Facts(draft=0.005, verify=((1, 0.060),), curve=Curve.constant(0.8), round_trip=0.050)


def choose(facts: Facts, objective: Objective = Objective.LATENCY, **how):
    return Survey.of(facts, **how).choose(objective)


def test_latency_takes_free_run_where_the_cloud_has_no_draft():
    choice = choose(NEAR)
    assert choice.best.schedule is Schedule.FREERUN
    assert choice.speculate_at_edge
    assert choice.edge is choice.best
    assert choice.value == pytest.approx(choice.best.seconds)
    assert choice.margin == pytest.approx(choice.runner_up.seconds / choice.best.seconds - 1)
    assert choice.margin > 0.0
    assert choice.edge_gain == pytest.approx(0.060 / choice.best.seconds - 1)


def test_dont_where_the_draft_is_as_slow_as_the_target():
    choice = choose(replace(NEAR, draft=0.060))
    assert choice.best.schedule is Schedule.CLOUD_ONLY
    assert not choice.speculate_at_edge
    assert choice.edge.schedule in EDGE_CLOUD


def test_dont_where_nothing_is_accepted():
    for objective in Objective:
        choice = choose(replace(NEAR, curve=Curve.constant(0.0)), objective)
        assert choice.best.schedule is Schedule.CLOUD_ONLY, objective


def test_dont_for_less_than_estimates_are_good_for():
    """On a long link free-run gains a little, and not enough for a second model."""
    far = replace(NEAR, round_trip=1.1)
    choice = choose(far)
    assert choice.best.schedule is Schedule.CLOUD_ONLY
    assert choice.runner_up.seconds < 0.060
    assert choice.runner_up.seconds > 0.060 / (1 + WORTH)


def test_co_locate_where_the_cloud_can_host_the_draft():
    choice = choose(replace(NEAR, cloud_draft=0.005))
    assert choice.best.schedule is Schedule.COLOCATED
    assert not choice.speculate_at_edge
    assert choice.edge.schedule is Schedule.FREERUN


def test_the_edge_alone_only_where_its_own_text_would_do():
    assert choose(replace(NEAR, own_text=True)).best.schedule is Schedule.EDGE_ONLY
    assert choose(NEAR).best.schedule is not Schedule.EDGE_ONLY
    assert choose(NEAR).runner_up.schedule is not Schedule.EDGE_ONLY


def test_balanced_lies_between_the_two_others():
    """More weight, fewer forwards; none: latency."""
    light, heavy = (choose(NEAR, Objective.BALANCED, weight=w) for w in (0.0, 20.0))
    assert light.best.schedule is choose(NEAR).best.schedule
    assert heavy.best.cloud_seconds < light.best.cloud_seconds
    assert heavy.best.seconds > light.best.seconds


def test_cost_is_never_slower_than_streaming():
    for trip in (0.02, 0.1, 0.15, 0.3):
        facts = replace(NEAR, round_trip=trip)
        choice = choose(facts, Objective.COST)
        assert shared(facts, choice.best) <= 0.060
    assert choice.best.schedule is Schedule.FREERUN  # at 300 ms no round pays


def test_no_schedule_at_the_edge_may_be_fast_enough():
    """Forty answers share an edge's engine: all it could draft for is slower than the cloud."""
    crowded = replace(NEAR, draft=0.050, requests=40, edges=1)
    free = replace(crowded, verify=((1, 0.0011),))
    choice = choose(free, Objective.COST)
    assert choice.edge is None
    assert choice.edge_gain == 0.0
    assert choice.best.schedule is Schedule.CLOUD_ONLY


def test_prices():
    prices = Prices(
        cloud_second=2.0,
        cloud_forward=3.0,
        cloud_token=5.0,
        megabyte=7e6,
        edge_watts=11.0,
        cloud_watts=13.0,
    )
    facts = replace(NEAR, prices=prices)
    block = sync(facts, 4)
    expected = 2 * block.cloud_seconds + 3 * block.forwards + 5 + 7 * (block.up + block.down)
    assert money(facts, block) == pytest.approx(expected)
    assert value(facts, Objective.COST, block) == pytest.approx(expected)
    assert value(NEAR, Objective.COST, block) == block.cloud_seconds
    assert joules(facts, block) == pytest.approx(11 * block.edge_seconds + 13 * block.cloud_seconds)
    assert money(facts, edge_only(facts)) == 0.0
    assert money(facts, cloud_only(facts)) == pytest.approx(2 * 0.060 + 3 + 5 + 7 * 12)


def test_a_dear_link_speaks_against_long_windows():
    cheap = choose(replace(NEAR, prices=Prices(cloud_second=1.0)), Objective.COST)
    dear = choose(replace(NEAR, prices=Prices(cloud_second=1e-6, megabyte=1000.0)), Objective.COST)
    assert cheap.best.schedule is Schedule.SYNC
    assert dear.best.up + dear.best.down < cheap.best.up + cheap.best.down


def test_lengths_that_differ_by_less_than_an_estimate_are_one_and_the_shortest_is_taken():
    best = Survey.of(NEAR).best(Objective.LATENCY, Schedule.FREERUN)
    longer = [
        e
        for e in Survey.of(NEAR).estimates
        if e.schedule is Schedule.FREERUN and e.length > best.length
    ]
    assert longer
    assert min(e.seconds for e in longer) > best.seconds * (1 - 0.006)


def test_heat():
    told = []
    found = heat(
        replace(NEAR, cloud_draft=0.005),
        Objective.LATENCY,
        (0.0, 0.1, 2.0),
        (0.1, 0.9),
        told=lambda done, whole: told.append((done, whole)),
    )
    assert told == [(1, 2), (2, 2)]
    assert found.at_edge[0][2] is Schedule.CLOUD_ONLY
    assert found.at_edge[1][1] is Schedule.FREERUN
    assert found.winners[1][2] is Schedule.COLOCATED
    assert found.gains[1][0] > found.gains[1][1] > found.gains[0][1] >= 0.0
