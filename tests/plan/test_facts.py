"""What a plan may start from."""

from __future__ import annotations

import pytest

from outrider.core.tokens import Rule
from outrider.plan.facts import Curve, Facts, PlanError, longest

GOOD = {"draft": 0.005, "verify": ((1, 0.06),), "curve": Curve.constant(0.8), "round_trip": 0.05}


def test_constant_acceptance():
    curve = Curve.constant(0.8)
    assert curve.survival(3) == pytest.approx([0.8, 0.64, 0.512])
    assert curve.alpha == pytest.approx(0.8)
    assert curve.at(0) == curve.at(99) == 0.8


def test_a_measured_curve_goes_on_as_it_ended():
    curve = Curve.of((0.5, 0.4, 0.36))
    assert curve.survival(4) == pytest.approx([0.5, 0.4, 0.36, 0.324])
    assert curve.at(0) == 0.5
    assert curve.at(1) == pytest.approx(0.8)
    run = 0.5 + 0.4 + 0.36 / (1 - 0.9)
    assert curve.alpha == pytest.approx(run / (run + 1))


def test_a_curve_that_ends_at_nothing():
    curve = Curve.of((0.5, 0.0))
    assert curve.survival(4) == [0.5, 0.0, 0.0, 0.0]
    assert curve.at(2) == 0.0
    assert Curve.of((0.0, 0.0)).tail == 0.0


@pytest.mark.parametrize("points", [(0.5, 0.6), (1.1,), (-0.1,), (float("nan"),)])
def test_no_curve(points):
    with pytest.raises(PlanError, match="fall from 1"):
        Curve(points, 0.5)


def test_a_curve_needs_a_point_and_an_end():
    with pytest.raises(PlanError, match="at least one point"):
        Curve.of(())
    with pytest.raises(PlanError, match="acceptance must be in"):
        Curve.constant(1.0)
    assert Curve.of((1.0, 1.0)).tail < 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draft": 0.0}, "t_d must"),
        ({"draft": float("nan")}, "t_d must"),
        ({"verify": ((1, 61.0),)}, "t_v must"),
        ({"verify": ()}, "at least one point"),
        ({"verify": ((0, 0.1),)}, "at least one row"),
        ({"plain": -1.0}, "t_ar must"),
        ({"cloud_draft": 0.0}, "t_d' must"),
        ({"round_trip": -1.0}, "round trip"),
        ({"rule": Rule.RELAXED}, "coupled or ratio"),
    ],
)
def test_facts_that_mean_nothing(change, message):
    with pytest.raises(PlanError, match=message):
        Facts(**(GOOD | change))


def test_forwards_never_take_less_than_a_plain_step():
    facts = Facts(**(GOOD | {"verify": ((1, 0.06), (9, 0.076)), "plain": 0.07}))
    assert facts.seconds(1) == 0.07
    assert facts.seconds(2) == 0.07
    assert facts.seconds(9) == pytest.approx(0.076)


def test_blocks_are_as_long_as_drafts_may_stand():
    assert longest(Facts(**GOOD)) == 61
    assert longest(Facts(**(GOOD | {"curve": Curve.constant(0.0)}))) == 1
