"""Estimators told literal facts; and told nonsense."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.control.costs import PrefixCurve, RowCosts
from outrider.control.estimators import (
    CREDIT_START,
    DEFAULT_DRAFT,
    DEFAULT_ROUND_TRIP,
    IDLE,
    LINK_FORGET,
    MAX_SECONDS,
    Estimators,
)


def trip(known: Estimators, network: float, now: float = 0.0, **facts: float) -> None:
    known.round_trip(network=network, now=now, **facts)


def test_nothing_known():
    e = Estimators().snapshot(0.0)
    assert (e.round_trip, e.draft, e.draft_start) == (DEFAULT_ROUND_TRIP, DEFAULT_DRAFT, 0.0)
    assert (e.queue, e.credit, e.credit_change, e.rounds) == (0.0, CREDIT_START, 0.0, 0)
    assert (e.byte_up, e.byte_down) == pytest.approx((8e-7, 1.6e-7))
    assert (e.delay_state, e.delay_levels) == (0, ())
    assert not e.verify
    assert e.curve.survival(1) == pytest.approx([0.6])


def test_what_is_known_beforehand():
    verify, curve = RowCosts([(1, 0.03)]), PrefixCurve(prior=0.8)
    known = Estimators(
        delays=(0.02, 0.1), verify=verify, curve=curve, round_trip=0.1, draft=0.004, byte_up=1e-6
    )
    e = known.snapshot(0.0)
    assert e.verify is verify
    assert e.curve is curve
    assert (e.round_trip, e.draft, e.delay_levels) == (0.1, 0.004, (0.02, 0.1))
    assert e.byte_up == pytest.approx(1e-6)


def test_a_round_trip_is_split():
    known = Estimators(byte_up=0.0, byte_down=0.0)
    known.answer(sent_at=10.0, now=10.2, queue=0.03, step=0.05, rows=5)
    e = known.snapshot(10.2)
    assert e.round_trip == pytest.approx(0.12)
    assert e.queue == pytest.approx(0.03)
    assert e.verify.seconds(5) == pytest.approx(0.05)


def test_bytes_are_taken_off():
    known = Estimators(byte_up=1e-6, byte_down=2e-6)
    trip(known, 0.100, bytes_up=20_000, bytes_down=10_000)
    assert known.snapshot(0.0).round_trip == pytest.approx(0.060)


def test_byte_times_are_learnt():
    known = Estimators()
    for i in range(300):
        size = (100, 100_000)[i % 2]
        trip(known, 0.05 + size * 4e-6, now=0.1 * i, bytes_up=size)
    e = known.snapshot(30.0)
    assert e.byte_up == pytest.approx(4e-6, rel=0.05)
    assert e.round_trip == pytest.approx(0.05, rel=0.1)


def test_the_mean_forgets_by_rounds():
    known = Estimators(byte_up=0.0, byte_down=0.0)
    for delay in (0.100, 0.110):
        trip(known, delay)
    # weights .9 and 1
    expected = (LINK_FORGET * 0.100 + 0.110) / (LINK_FORGET + 1.0)
    assert known.snapshot(0.0).round_trip == pytest.approx(expected)


def test_and_by_time():
    known = Estimators(byte_up=0.0, byte_down=0.0)
    trip(known, 0.100, now=0.0)
    known.snapshot(IDLE)  # asking changes nothing
    trip(known, 0.110, now=2 * IDLE)
    old = LINK_FORGET * math.exp(-2.0)
    assert known.snapshot(2 * IDLE).round_trip == pytest.approx((old * 0.100 + 0.110) / (old + 1.0))


def test_a_jump_of_the_delay_is_believed_after_two_rounds():
    known = Estimators(byte_up=0.0, byte_down=0.0)
    for _ in range(50):
        trip(known, 0.074)
    trip(known, 0.222)
    assert known.snapshot(0.0).round_trip == pytest.approx(0.1, rel=0.15), "one may be an outlier"
    trip(known, 0.222)
    assert known.snapshot(0.0).round_trip == pytest.approx(0.222)


def test_a_drift_is_followed():
    known = Estimators()
    delays = np.linspace(0.020, 0.150, 400)
    for delay in delays:
        trip(known, float(delay))
    assert known.snapshot(0.0).round_trip == pytest.approx(0.150, rel=0.03)


def test_jitter_is_averaged():
    known = Estimators()
    for delay in np.random.default_rng(3).normal(0.050, 0.005, 500):
        trip(known, float(delay))
    # ten rounds' mean: sigma 1.2 ms; three of them
    assert known.snapshot(0.0).round_trip == pytest.approx(0.050, abs=0.0036)


def test_drafting():
    known = Estimators()
    for i in range(200):
        count = (2, 8)[i % 2]
        known.draft(count, 0.02 + 0.005 * count)
    e = known.snapshot(0.0)
    assert e.draft == pytest.approx(0.005, rel=0.02)
    assert e.draft_start == pytest.approx(0.02, rel=0.05)


def test_credit_is_the_published_average():
    known = Estimators()
    known.verdict(drafted=4, accepted=4)
    e = known.snapshot(0.0)
    assert e.credit == pytest.approx(0.7 * CREDIT_START + 0.3)
    assert e.credit_change == pytest.approx(0.3 - 0.3 * CREDIT_START)
    known.verdict(drafted=4, accepted=1)
    e = known.snapshot(0.0)
    assert e.credit == pytest.approx(0.7 * 0.65 + 0.3 * 0.25)
    assert e.credit_change == pytest.approx(0.53 - 0.65)
    assert e.rounds == 2
    for accepted in (0, 2, 3, 4):
        known.verdict(drafted=4, accepted=accepted)
    assert known.history == (0.25, 0.0, 0.5, 0.75, 1.0), "the last five"


def test_a_rejection_tells_shorter_lengths():
    known = Estimators()
    for _ in range(200):
        known.verdict(drafted=8, accepted=2)
    alive = known.snapshot(0.0).curve.survival(3)
    assert alive[1] > 0.9
    assert alive[2] < 0.1


def test_a_change_of_acceptance_starts_the_curve_again():
    rng = np.random.default_rng(4)

    def play(known: Estimators, alpha: float, rounds: int) -> None:
        for _ in range(rounds):
            stands = rng.random(6) < alpha
            known.verdict(drafted=6, accepted=6 if stands.all() else int(np.argmin(stands)))

    known, plain = Estimators(), PrefixCurve()
    play(known, 0.9, 200)
    for d, a in known._verdicts:
        plain.observe(drafted=d, accepted=a)
    before = known.snapshot(0.0).curve
    assert before.survival(1)[0] == pytest.approx(0.9, abs=0.1)
    play(known, 0.3, 25)
    after = known.snapshot(0.0).curve
    assert after is not before
    assert after.survival(1)[0] == pytest.approx(0.3, abs=0.2)
    for d, a in list(known._verdicts)[-25:]:
        plain.observe(drafted=d, accepted=a)
    assert plain.survival(1)[0] > after.survival(1)[0] + 0.1, "forgetting alone is slower"


def test_steady_acceptance_is_rarely_a_change():
    rng = np.random.default_rng(5)
    known, curves = Estimators(), []
    for _ in range(2000):
        stands = rng.random(6) < 0.7
        known.verdict(drafted=6, accepted=6 if stands.all() else int(np.argmin(stands)))
        if not curves or curves[-1] is not known.curve:
            curves.append(known.curve)
    assert len(curves) <= 3


def test_delay_states():
    known = Estimators(delays=(0.02, 0.1))
    trip(known, 0.11)
    assert known.snapshot(0.0).delay_state == 1
    learnt = Estimators(byte_up=0.0, byte_down=0.0)
    for delay in (0.02, 0.02, 0.1, 0.1, 0.1):
        trip(learnt, delay)
    e = learnt.snapshot(0.0)
    assert (e.delay_state, e.delay_levels) == (1, pytest.approx((0.02, 0.1)))


# ------------------------------------------------------------------------------ bad input

BAD_TIMES = [math.nan, math.inf, -math.inf, -1.0, MAX_SECONDS * 1.01, 1e300]


@pytest.mark.parametrize("bad", BAD_TIMES)
def test_bad_times_are_ignored(bad: float):
    known = Estimators()
    fresh = known.snapshot(0.0)
    known.draft(4, bad)
    known.step(4, bad)
    trip(known, bad)
    known.answer(sent_at=0.0, now=bad, queue=0.0, step=0.0, rows=1)
    assert not known.verify
    e = known.snapshot(0.0)
    assert (e.round_trip, e.draft, e.queue) == (fresh.round_trip, fresh.draft, fresh.queue)


@pytest.mark.parametrize("bad", BAD_TIMES)
def test_a_bad_split_leaves_the_whole(bad: float):
    known = Estimators(byte_up=0.0, byte_down=0.0)
    known.answer(sent_at=1.0, now=1.2, queue=bad, step=bad, rows=3)
    e = known.snapshot(1.2)
    assert e.round_trip == pytest.approx(0.2)
    assert e.queue == 0.0
    assert not e.verify


def test_a_cloud_that_claims_more_than_passed():
    known = Estimators()
    known.answer(sent_at=1.0, now=1.1, queue=50.0, step=60.0, rows=3)
    e = known.snapshot(1.1)
    assert e.round_trip == 0.0
    assert e.queue == pytest.approx(0.1)
    assert e.verify.seconds(3) == pytest.approx(0.1)


@pytest.mark.parametrize("count", [0, -3])
def test_no_tokens_no_rows(count: int):
    known = Estimators()
    known.draft(count, 0.1)
    known.step(count, 0.1)
    known.verdict(drafted=count, accepted=0)
    assert not known.verify
    e = known.snapshot(0.0)
    assert (e.draft, e.rounds, e.credit) == (DEFAULT_DRAFT, 0, CREDIT_START)


def test_impossible_verdicts():
    known = Estimators()
    known.verdict(drafted=4, accepted=-1)
    assert known.snapshot(0.0).rounds == 0
    known.verdict(drafted=4, accepted=9)
    assert known.history == (1.0,)


def test_a_slightly_negative_network_is_none():
    known = Estimators()
    trip(known, -0.0005)
    assert known.snapshot(0.0).round_trip == 0.0


def test_a_clock_that_goes_backwards():
    known = Estimators(byte_up=0.0, byte_down=0.0)
    trip(known, 0.1, now=1000.0)
    known.answer(sent_at=900.0, now=899.0, queue=0.0, step=0.0, rows=1)
    assert known.snapshot(0.0).round_trip == pytest.approx(0.1)
    trip(known, 0.11, now=-5.0)
    # no time passed between: weights .9 and 1
    assert known.snapshot(math.nan).round_trip == pytest.approx((0.09 + 0.11) / 1.9)


@pytest.mark.parametrize(
    ("byte_time", "believed"), [(math.inf, 1e-3), (1.0, 1e-3), (-1.0, 8e-7), (math.nan, 8e-7)]
)
def test_zero_bandwidth(byte_time: float, believed: float):
    assert Estimators(byte_up=byte_time).snapshot(0.0).byte_up == pytest.approx(believed)


@pytest.mark.parametrize("size", [math.nan, -5.0, math.inf, 1e30])
def test_bad_sizes_count_as_none(size: float):
    known = Estimators()
    trip(known, 0.1, bytes_up=size, bytes_down=size)
    assert known.snapshot(0.0).round_trip == pytest.approx(0.1)


def test_bad_beginnings():
    e = Estimators(round_trip=math.nan, draft=-1.0).snapshot(0.0)
    assert (e.round_trip, e.draft) == (DEFAULT_ROUND_TRIP, DEFAULT_DRAFT)
    with pytest.raises(ValueError, match="delay levels"):
        Estimators(delays=(0.2, 0.1))


ANY = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(st.tuples(st.sampled_from("drtva"), ANY, ANY, ANY, st.integers(-3, 40))))
def test_estimates_are_finite_whatever_was_fed(facts):
    known = Estimators()
    now = 0.0
    for kind, x, y, z, n in facts:
        match kind:
            case "d":
                known.draft(n, x)
            case "r":
                known.step(n, x)
            case "t":
                known.round_trip(network=x, now=y, queue=z, bytes_up=n, bytes_down=x)
            case "v":
                known.verdict(drafted=n, accepted=n // 2)
            case _:
                known.answer(sent_at=x, now=y, queue=z, step=x, rows=n)
        now = y
    e = known.snapshot(now)
    numbers = (
        e.round_trip, e.queue, e.draft, e.draft_start, e.byte_up, e.byte_down, e.credit,
        e.verify.seconds(1), e.verify.seconds(9), *e.delay_levels, *e.curve.survival(3),
    )  # fmt: skip
    assert all(math.isfinite(x) and x >= 0.0 for x in numbers)
    assert 0 <= e.delay_state < max(1, len(e.delay_levels))
