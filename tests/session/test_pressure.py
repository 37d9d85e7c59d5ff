"""Back-pressure: the ladder, its dwell, its hysteresis; and a whole loaded verifier."""

from __future__ import annotations

import pytest

from outrider.session.pressure import DWELL_S, EVERY_S, Pressure


def held(pressure: Pressure, worth: float, seconds: float, start: float = 0.0) -> int:
    """Looks at a constant load for so long; how often the limit moved."""
    looks = round(seconds / EVERY_S)
    return sum(pressure.judge(worth, start + EVERY_S * i) for i in range(looks + 1))


@pytest.mark.parametrize(
    ("worth", "limit"),
    [(8.0, None), (4.0, 8), (3.0, 8), (2.0, 4), (1.0, 2), (0.3, 2), (0.2, 0)],
)
def test_the_limit_is_twice_what_is_worth_judging(worth: float, limit: int | None):
    pressure = Pressure()
    held(pressure, worth, 2 * DWELL_S)
    assert pressure.limit == limit


def test_it_moves_once_and_only_after_a_while():
    pressure = Pressure()
    assert held(pressure, 1.0, DWELL_S / 2) == 0
    assert held(pressure, 1.0, 3 * DWELL_S, start=DWELL_S / 2) == 1
    assert pressure.limit == 2


def test_speculation_that_is_off_comes_back_only_for_a_whole_draft():
    pressure = Pressure()
    held(pressure, 0.0, 2 * DWELL_S)
    assert pressure.limit == 0
    held(pressure, 0.9, 20.0, start=10.0)
    assert pressure.limit == 0
    held(pressure, 1.2, 10.0, start=40.0)
    assert pressure.limit == 4


def test_a_load_that_hops_moves_nothing():
    """Field case 17."""
    pressure = Pressure()
    for i in range(600):
        pressure.judge(1.0 if i % 2 else 3.0, EVERY_S * i)
    first = pressure.limit
    moved = sum(pressure.judge(1.0 if i % 2 else 3.0, 60 + EVERY_S * i) for i in range(600))
    assert moved == 0
    assert first is not None
