"""The model's mean error by delay state, with literal numbers."""

from __future__ import annotations

import math

import pytest

from outrider.control.corrections import MAX_STATES, Corrections


def test_a_mean_at_first_then_it_forgets():
    errors = Corrections()
    assert errors.extra(0) == 0.0
    errors.observe(0, predicted=0.1, seconds=0.12)
    errors.observe(0, predicted=0.1, seconds=0.14)
    assert errors.extra(0) == pytest.approx(0.03)
    for _ in range(200):
        errors.observe(0, predicted=0.1, seconds=0.09)
    assert errors.extra(0) == pytest.approx(-0.01)


def test_states_apart():
    errors = Corrections()
    errors.observe(1, predicted=0.1, seconds=0.15)
    assert (errors.extra(0), errors.extra(1)) == (0.0, pytest.approx(0.05))
    errors.observe(10**9, predicted=0.1, seconds=0.11)
    errors.observe(-5, predicted=0.1, seconds=0.12)
    assert errors.extra(MAX_STATES + 7) == pytest.approx(0.01)
    assert errors.extra(0) == pytest.approx(0.02)


def test_a_cut_teaches_little():
    errors = Corrections()
    errors.observe(0, predicted=0.1, seconds=300.0)
    assert errors.extra(0) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("predicted", "seconds"),
    [(0.1, math.nan), (0.1, math.inf), (0.1, -1.0), (math.nan, 0.1), (math.inf, 0.1)],
)
def test_nonsense_is_not_learnt(predicted: float, seconds: float):
    errors = Corrections()
    errors.observe(0, predicted=predicted, seconds=seconds)
    assert errors.extra(0) == 0.0
