"""Plans against the simulator, which runs the real machines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.bench.planned import compare, play, worlds
from outrider.plan.facts import Curve, Facts
from outrider.plan.modes import ahead, estimates, fastest
from outrider.session.schedules import Schedule
from outrider.sim.acceptance import luck

WORLD = Facts(
    draft=0.007, verify=((1, 0.050), (17, 0.066)), curve=Curve.constant(0.7), round_trip=0.043
)
TOLERANCE = 0.04
"""Answers of 200 tokens: their last window is shorter than the plan's, and luck is luck."""
AHEAD = tuple(s for s in Schedule if s not in (Schedule.EDGE_ONLY, Schedule.MULTIPLEX))


def met(alpha: float, *, requests: int, tokens: int, seed: int) -> float:
    """The share of guesses that stand in the luck that these answers meet."""
    places = [(r, p) for r in range(requests) for p in range(tokens)]
    return sum(luck(seed, *place) < alpha for place in places) / len(places)


@pytest.mark.parametrize("schedule", [s for s in AHEAD if s is not Schedule.COLOCATED])
def test_time_and_forwards_are_the_simulator_s(schedule):
    size = {"requests": 6, "tokens": 200, "seed": 1}
    length = fastest(WORLD, schedule).length
    world = replace(WORLD, curve=Curve.constant(met(WORLD.curve.tail, **size)))
    planned = next(e for e in estimates(world, schedule) if e.length == length)
    # The simulator asks for acceptance alpha and deals the luck that makes `world` of it.
    played = play(WORLD, planned, **size)
    assert played.error == pytest.approx(0.0, abs=TOLERANCE)
    assert planned.forwards == pytest.approx(played.forwards, rel=TOLERANCE)


def test_a_thin_uplink_is_clogged_by_guesses_that_nobody_wants_any_more():
    """A frame takes 5.5 ms and a draft 4."""
    thin = replace(WORLD, draft=0.004, up_bps=100e3, down_bps=200e3)
    size = {"requests": 6, "tokens": 200, "seed": 1}
    met_there = replace(thin, curve=Curve.constant(met(0.7, **size)))
    played = play(thin, ahead(met_there, Schedule.FREERUN, 16), **size)
    assert played.error == pytest.approx(0.0, abs=TOLERANCE)


def test_worlds_are_the_same_for_a_seed():
    assert [f.draft for f in worlds(3, 1)] == [f.draft for f in worlds(3, 1)]
    assert [f.draft for f in worlds(3, 1)] != [f.draft for f in worlds(3, 2)]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_what_is_chosen_is_the_simulator_s_best():
    found = [compare(f, requests=4, tokens=256, seed=5) for f in worlds(20, 5)]
    assert sum(f.right for f in found) >= 19
    assert max(f.regret for f in found) <= 0.02
