"""Slopes with a prior, with literal numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.control.regression import MAX_BYTE_SECONDS, ByteTimes, DraftTimes


def test_nothing_known():
    times = DraftTimes(0.02)
    assert (times.each, times.start) == (0.02, 0.0)
    assert ByteTimes(8e-7, 1e-7).slopes() == pytest.approx((8e-7, 1e-7))


def test_one_count_cannot_tell_a_start_up_part():
    times = DraftTimes(0.02)
    for _ in range(50):
        times.observe(4, 0.050)
    assert times.each == pytest.approx(0.0125)
    assert times.start == pytest.approx(0.0)


def test_start_up_part_and_tokens():
    times = DraftTimes(0.02)
    for i in range(300):
        count = (2, 6, 12)[i % 3]
        times.observe(count, 0.030 + 0.010 * count)
    assert times.each == pytest.approx(0.010, rel=0.02)
    assert times.start == pytest.approx(0.030, rel=0.06)


def test_longer_jobs_that_took_less():
    times = DraftTimes(0.02)
    for i in range(100):
        times.observe(*((2, 0.2), (12, 0.1))[i % 2])
    assert times.each == 0.0
    assert times.start == pytest.approx(0.15, rel=0.01)


def test_no_negative_start():
    times = DraftTimes(0.02)
    for i in range(100):
        times.observe(*((2, 0.01), (12, 0.2))[i % 2])
    assert times.start == 0.0
    assert times.each == pytest.approx(0.105 / 7, rel=0.02)


def test_draft_times_forget():
    times = DraftTimes(0.02)
    for _ in range(100):
        times.observe(4, 0.04)
    for _ in range(400):
        times.observe(4, 0.08)
    # 0.98**400 = 0.0003 of the old is left
    assert times.each == pytest.approx(0.02, rel=1e-3)


def test_bytes_from_frames_of_unequal_size():
    times = ByteTimes(8e-7, 1.6e-7)
    for i in range(400):
        up, down = (20, 300_000)[i % 2], (12, 50_000, 200_000)[i % 3]
        times.observe(up, down, 0.05 + up * 4e-6 + down * 2e-7)
    assert times.slopes() == pytest.approx((4e-6, 2e-7), rel=0.01)


def test_small_frames_leave_the_prior_alone():
    times = ByteTimes(8e-7, 1.6e-7)
    for i in range(400):
        times.observe(20 + i % 16, 12, 0.05 + 0.005 * ((i * 7919) % 11 - 5))
    assert times.slopes() == pytest.approx((8e-7, 1.6e-7), rel=0.05)


@pytest.mark.parametrize(("up", "down"), [(-4e-6, 1e-6), (1e-6, -4e-6), (-1e-6, -1e-6)])
def test_never_a_negative_slope(up: float, down: float):
    times = ByteTimes(8e-7, 1.6e-7)
    for i in range(400):
        x, y = (20, 300_000)[i % 2], (12, 50_000, 200_000)[i % 3]
        times.observe(x, y, 2.0 + x * up + y * down)
    got = times.slopes()
    assert got == pytest.approx((max(0.0, up), max(0.0, down)), rel=0.2, abs=1e-7)
    assert min(got) >= 0.0


def test_a_restart_keeps_the_slopes():
    times = ByteTimes(8e-7, 1.6e-7)
    for i in range(200):
        times.observe((20, 300_000)[i % 2], 12, 0.05 + (20, 300_000)[i % 2] * 4e-6)
    before = times.slopes()
    times.restart()
    assert times.slopes() == pytest.approx(before)


@given(
    st.lists(
        st.tuples(st.floats(0, 1e9), st.floats(0, 1e9), st.floats(0, 600)),
        max_size=40,
    )
)
def test_slopes_stay_in_range(facts: list[tuple[float, float, float]]):
    times = ByteTimes(8e-7, 1.6e-7)
    for fact in facts:
        times.observe(*fact)
    for slope in times.slopes():
        assert math.isfinite(slope)
        assert 0.0 <= slope <= MAX_BYTE_SECONDS


def test_a_held_length_does_not_wear_off_what_was_told_apart():
    times = DraftTimes(0.02)
    for i in range(60):
        count = (2, 6)[i % 2]
        times.observe(count, 0.030 + 0.010 * count)
    for _ in range(400):
        times.observe(4, 0.070)
    assert times.each == pytest.approx(0.010, rel=0.05)
    assert times.start == pytest.approx(0.030, rel=0.06)
