"""The change test and the delay levels, with literal numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from outrider.control.changes import MAX_LEVELS, STALE, DelayLevels, PageHinkley


def fed(levels: DelayLevels, *delays: float) -> DelayLevels:
    for delay in delays:
        levels.observe(delay)
    return levels


def test_one_outlier_is_no_change_two_are():
    test = PageHinkley()
    assert [test.observe(x) for x in (0.0, 100.0, 0.0, 0.0)] == [None] * 4
    for _ in range(6):  # the outlier's excess of 3.75 wears off at 0.75 a sample
        test.observe(0.0)
    assert [test.observe(x) for x in (100.0, 100.0)] == [None, 2]
    assert [test.observe(x) for x in (-100.0, -100.0)] == [None, 2], "it begins anew"


def test_a_small_shift_adds_up_and_says_since_when():
    test = PageHinkley()
    answers = [test.observe(x) for x in [0.0] * 5 + [2.0] * 6]
    # 1.25 a sample above the slack: 7.5 > 7 after six
    assert answers == [None] * 10 + [6]


def test_slack_is_no_change_however_long():
    test = PageHinkley()
    assert all(test.observe(0.75) is None for _ in range(10_000))


def test_false_alarms_are_rare():
    samples = np.random.default_rng(1).standard_normal(20_000)
    test = PageHinkley()
    # Two-sided CUSUM with k = .75, h = 7 (in sigma): fewer than one alarm in 10,000 rounds.
    assert sum(test.observe(float(x)) is not None for x in samples) <= 2


@pytest.mark.parametrize(
    "levels", [(0.1, 0.05), (0.1, 0.1), (-0.1, 0.2), (0.1, math.inf), (math.nan,)]
)
def test_given_levels_are_checked(levels: tuple[float, ...]):
    with pytest.raises(ValueError, match="delay levels"):
        DelayLevels(levels)


def test_given_levels_stay_and_have_a_margin():
    levels = DelayLevels((0.02, 0.10))
    states = []
    # the middle is 60 ms; the margin a tenth of the 80 ms between
    for delay in (0.02, 0.061, 0.067, 0.069, 0.059, 0.053, 0.051, 5.0):
        levels.observe(delay)
        states.append(levels.state)
    assert states == [0, 0, 0, 1, 1, 1, 0, 1]
    assert levels.levels == (0.02, 0.10)


def test_levels_are_learnt():
    levels = fed(DelayLevels(), 0.074)
    assert (levels.levels, levels.state) == ((0.074,), 0)
    fed(levels, 0.220, 0.222)
    assert levels.levels == (0.074,), "two rounds make no level"
    fed(levels, 0.218)
    assert levels.levels == pytest.approx((0.074, 0.220))
    assert levels.state == 1
    assert fed(levels, 0.075).state == 0
    assert fed(levels, 0.221).state == 1, "a known level needs no second confirmation"


def test_jitter_makes_no_levels():
    levels = DelayLevels()
    for delay in np.random.default_rng(2).normal(0.05, 0.003, 2000):
        levels.observe(float(delay))
    assert len(levels.levels) == 1


def test_an_interrupted_row_of_strangers_makes_none():
    assert fed(DelayLevels(), 0.05, 0.2, 0.2, 0.05, 0.2, 0.2).levels == pytest.approx((0.05,))
    assert fed(DelayLevels(), 0.05, 0.2, 0.4, 0.2, 0.4).levels == pytest.approx((0.05,))


def test_a_level_follows_a_drift():
    levels = DelayLevels()
    for i in range(400):
        levels.observe(0.020 + 0.130 * i / 399)
    assert levels.levels[levels.state] == pytest.approx(0.150, rel=0.05)


def test_levels_that_met_become_one():
    levels = fed(DelayLevels(), 0.05, 0.08, 0.08, 0.08)
    assert len(levels.levels) == 2
    for i in range(60):
        levels.observe(0.08 - 0.03 * i / 59)  # drifts back to where the first still is
    assert len(levels.levels) == 1


def test_the_other_way_round_too():
    levels = fed(DelayLevels(), 0.05, 0.08, 0.08, 0.08)
    for i in range(60):
        levels.observe(0.05 + 0.03 * i / 59)
    assert levels.levels == pytest.approx((0.08,), rel=0.1)


def test_unvisited_levels_are_forgotten():
    levels = fed(DelayLevels(), 0.05, 0.2, 0.2, 0.2)
    for _ in range(STALE):
        levels.observe(0.05)
    assert len(levels.levels) == 2
    levels.observe(0.05)
    assert levels.levels == pytest.approx((0.05,))


def test_there_are_few():
    levels = DelayLevels()
    for i in range(8):
        fed(levels, *[0.02 * 2**i] * 3)
    assert len(levels.levels) == MAX_LEVELS
    assert levels.levels[-1] == pytest.approx(2.56)
    assert levels.state == MAX_LEVELS - 1


def test_the_first_level_counts_from_nothing():
    levels = DelayLevels()
    assert (levels.levels, levels.state) == ((), 0)
    assert fed(levels, 0.0, 0.0).levels == (0.0,)
