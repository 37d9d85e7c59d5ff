"""Models of acceptance, links and devices, and chance itself."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from outrider.core.link import MIN_RTO_S, Link
from outrider.core.survival import Survival
from outrider.sim.acceptance import ByDepth, Constant, Recorded, Swinging
from outrider.sim.devices import CloudTimes, EdgeTimes, Load, ScriptedTarget, fit_line, scripted
from outrider.sim.events import Chance, Heap, RestlessError
from outrider.sim.links import Conditions, Levels, Wire

PLACES = 20_000


def rate(model: object, depth: int = 0) -> float:
    stands = [model.stands(3, place, depth) for place in range(PLACES)]  # type: ignore[attr-defined]
    return sum(stands) / PLACES


def test_constant_acceptance():
    assert rate(Constant(alpha=0.8)) == pytest.approx(0.8, abs=0.01)
    assert rate(Constant(alpha=0.0)) == 0.0
    assert rate(Constant(alpha=1.0)) == 1.0


def test_a_position_curve_is_conditional():
    model = ByDepth(curve=Survival(points=(0.8, 0.4), tail=0.5))
    assert [rate(model, depth) for depth in (0, 1, 2, 9)] == pytest.approx(
        [0.8, 0.5, 0.5, 0.5], abs=0.015
    )


def test_swinging_acceptance_keeps_its_mean_and_has_memory():
    model = Swinging(alpha=0.6, spread=0.3, memory=50.0)
    stands = np.array(
        [model.stands(r, place, 0) for r in range(20) for place in range(2000)], dtype=float
    )
    assert stands.mean() == pytest.approx(0.6, abs=0.03)
    centred = stands - stands.mean()
    # Neighbours share their stretch: spread^2 of covariance, less what switching takes.
    assert (centred[1:] * centred[:-1]).mean() == pytest.approx(0.09, abs=0.02)
    again = Swinging(alpha=0.6, spread=0.3, memory=50.0)
    assert [again.stands(19, place, 0) for place in range(50)] == [
        model.stands(19, place, 0) for place in range(50)
    ]


def test_a_record_is_read_from_its_beginning():
    model = Recorded(answers=((True, False, True), (False,)))
    assert [model.stands(0, place, 5) for place in range(4)] == [True, False, True, True]
    assert not model.stands(1, 7, 0)
    assert model.stands(2, 0, 0)
    with pytest.raises(ValueError):
        Recorded(answers=())


# ------------------------------------------------------------------------------ links


def wire(**values: object) -> Wire:
    conditions = Conditions(**values)  # type: ignore[arg-type]
    return Wire(conditions, Levels(conditions, Chance(0)), Chance(1))


def test_an_outage_holds_what_is_under_way_and_keeps_order():
    held = wire(link=Link(rtt_s=0.1), outages=((1.0, 0.5),))
    back = 1.5 + MIN_RTO_S
    assert held.arrival("up", 10, 0.5) == pytest.approx(0.55)
    assert held.arrival("up", 10, 0.97) == pytest.approx(back)  # would arrive inside
    assert held.arrival("up", 10, 1.2) == pytest.approx(back + 0.05)
    assert held.arrival("up", 10, back + 0.01) == pytest.approx(back + 0.06)
    assert held.arrival("down", 10, 0.2) == pytest.approx(0.25)


def test_levels_are_a_chain_in_time():
    conditions = Conditions(levels=(0.02, 0.2), switch=0.1, every=0.1)
    levels = Levels(conditions, Chance(5))
    seen = [levels.at(0.1 * i + 0.05) for i in range(20_000)]
    assert sum(t == 0.2 for t in seen) / len(seen) == pytest.approx(0.5, abs=0.05)
    changes = sum(a != b for a, b in pairwise(seen))
    assert changes / len(seen) == pytest.approx(0.1, abs=0.01)
    assert levels.at(0.05) == seen[0]  # asking about the past changes nothing


def test_frames_are_held_up_with_all_behind_them():
    path = wire(link=Link(rtt_s=0.1))
    assert path.arrival("up", 10, 0.0, 0.5) == pytest.approx(0.55)
    assert path.arrival("up", 10, 0.1) == pytest.approx(0.55)


# ------------------------------------------------------------------------------ devices


def test_times_of_a_verifier():
    times = CloudTimes(
        verify=((1, 0.06), (9, 0.068)), session=0.001, context=1e-6, prefill=1e-4, draft=0.005
    )
    assert times.rows(5) == pytest.approx(0.064)
    assert times.rows(17) == pytest.approx(0.076)
    load = Load(rows=5, sessions=3, context=1000, taken_in=10, drafted=4)
    assert times.seconds(load) == pytest.approx(0.064 + 0.002 + 0.001 + 0.001 + 0.020)
    assert EdgeTimes(draft=0.005, start=0.002, prefill=1e-4).seconds(4, 100) == pytest.approx(0.032)


def test_a_line_through_measured_points():
    base, slope = fit_line([(1, 0.061), (5, 0.065), (9, 0.069)])
    assert (base, slope) == pytest.approx((0.060, 0.001))
    assert fit_line([(3, 0.06)]) == pytest.approx((0.06, 0.0))
    assert fit_line([(1, 0.06), (9, 0.05)])[1] == 0.0  # rows never save time
    assert fit_line([(10, 0.010), (100, 0.2)])[0] == 0.0
    with pytest.raises(ValueError):
        fit_line([])


def test_the_scripted_target_looks_at_positions_alone():
    from outrider.engines.base import Block

    model = ScriptedTarget(context_length=100)
    slot = model.open()
    rows = model.forward([Block(slot=slot, start=0, tokens=(1, 2, 3), rows=2)])[0]
    assert [int(r.argmax()) for r in rows] == [scripted(2), scripted(3)]


# ------------------------------------------------------------------------------ time


def test_events_of_one_time_keep_their_order():
    heap, seen = Heap(), []
    for name in "abc":
        heap.at(1.0, lambda n=name: seen.append((heap.now, n)))  # type: ignore[misc]
    heap.at(0.5, lambda: heap.at(0.1, lambda: seen.append((heap.now, "late"))))
    heap.run(2.0)
    assert seen == [(0.5, "late"), (1.0, "a"), (1.0, "b"), (1.0, "c")]
    assert heap.now == 2.0


def test_a_world_without_rest_is_an_error():
    heap = Heap()

    def again() -> None:
        heap.at(heap.now + 1.0, again)

    again()
    with pytest.raises(RestlessError):
        heap.run(steps=100)


def test_chance_is_uniform_and_has_an_address():
    chance = Chance(7, 1)
    drawn = [chance.uniform() for _ in range(PLACES)]
    assert 0.0 <= min(drawn) < max(drawn) < 1.0
    assert sum(drawn) / PLACES == pytest.approx(0.5, abs=0.01)
    assert Chance(7, 1).uniform() == drawn[0] != Chance(7, 2).uniform()
    assert sum(Chance(7, n).exponential(2.0) for n in range(PLACES)) / PLACES == pytest.approx(
        2.0, rel=0.05
    )
    assert {Chance(7, n).between(3, 5) for n in range(100)} == {3, 4, 5}
