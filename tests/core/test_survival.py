"""S(k) from what is known of it."""

from __future__ import annotations

import pytest

from outrider.core.survival import Survival


def test_constant_acceptance_is_a_geometric_curve():
    curve = Survival.constant(0.5)
    assert curve.survival(3) == pytest.approx([0.5, 0.25, 0.125])
    assert curve.at(0) == curve.at(99) == 0.5
    assert curve.survival(0) == []


def test_points_stand_as_they_are_and_the_tail_goes_on():
    curve = Survival.of((0.8, 0.4))
    assert curve.survival(1) == [0.8]
    assert curve.survival(4) == pytest.approx([0.8, 0.4, 0.2, 0.1])
    assert [curve.at(depth) for depth in (0, 1, 2, 9)] == pytest.approx([0.8, 0.5, 0.5, 0.5])


def test_a_curve_that_ends_at_nothing():
    assert Survival((0.5, 0.0), 1.0).survival(3) == [0.5, 0.0, 0.0]
    assert Survival((0.0, 0.0), 1.0).at(1) == 0.0
    assert Survival.of((0.0, 0.0)).tail == 0.0


def test_the_tail_of_measured_points_has_a_bound():
    assert Survival.of((0.9,), 0.5).tail == 0.5
    with pytest.raises(ValueError, match="at least one point"):
        Survival.of(())


@pytest.mark.parametrize(
    ("points", "tail"),
    [((0.5, 0.6), 0.5), ((1.1,), 0.5), ((-0.1,), 0.5), ((float("nan"),), 0.5), ((), 1.5)],
)
def test_a_survival_curve_falls(points: tuple[float, ...], tail: float):
    with pytest.raises(ValueError, match="S must fall"):
        Survival(points=points, tail=tail)
