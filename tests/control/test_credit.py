"""The credit controller with literal rates: recurrence, rule, hysteresis, safety, options."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrations import calibration
from outrider.control.base import (
    CalibrationError,
    ControllerFacts,
    Decision,
    Estimates,
    Observation,
    Outcome,
)
from outrider.control.calibration import FILE, LN2, encode
from outrider.control.costs import PrefixCurve, RowCosts
from outrider.control.credit import Credit, CreditHistory, CreditState
from outrider.control.registry import make
from outrider.core.tokens import ParameterError


def asked(room: int = 64) -> Observation:
    known = Estimates(round_trip=0.05, draft=0.005, verify=RowCosts(), curve=PrefixCurve())
    return Observation(now=0.0, room=room, estimates=known)


def credit(calibration: str | None = None, max_length: int = 16, **options: float) -> Credit:
    facts = ControllerFacts(max_length=max_length, options=options, calibration=calibration)
    return Credit(facts)


def tell(controller: Credit, accepted: int, strict: int | None = None, drafted: int = 10) -> None:
    outcome = Outcome(
        decision=Decision(length=drafted, threshold=controller.threshold),
        drafted=drafted,
        accepted=accepted,
        strict=accepted if strict is None else strict,
        tokens=accepted + 1,
        seconds=0.1,
    )
    controller.observe(outcome, now=1.0)


# -- the history --------------------------------------------------------------------------------


def test_credit_is_the_published_recurrence_over_the_history_s_mean() -> None:
    history = CreditHistory(k=2, beta=0.3)
    assert (history.credit, history.mean, history.change) == (0.5, 0.5, 0.0)
    history.observe(0.8)
    assert (history.credit, history.change) == (0.8, 0.0)
    history.observe(0.4)  # mean(H) = .6
    assert history.credit == pytest.approx(0.7 * 0.8 + 0.3 * 0.6)
    history.observe(0.0)  # the .8 has left: mean(H) = .2
    assert history.mean == pytest.approx(0.2)
    assert history.credit == pytest.approx(0.7 * 0.74 + 0.3 * 0.2)
    assert history.change == pytest.approx(0.578 - 0.74)


def test_with_k_1_the_rate_itself_is_smoothed() -> None:
    history = CreditHistory(k=1, beta=0.3)
    for rate in (1.0, 0.0, 0.5):
        history.observe(rate)
    assert history.credit == pytest.approx(0.7 * 0.7 + 0.3 * 0.5)


@given(st.lists(st.floats(0, 1), max_size=30), st.integers(1, 10), st.floats(0.01, 1))
def test_credit_stays_a_rate(rates: list[float], k: int, beta: float) -> None:
    history = CreditHistory(k=k, beta=beta)
    for rate in rates:
        history.observe(rate)
        assert -1e-12 <= history.credit <= 1 + 1e-12
        assert -1 <= history.change <= 1


# -- the default rule ---------------------------------------------------------------------------


def test_before_anything_is_known() -> None:
    fresh = credit()
    assert fresh.credit == 0.5
    assert fresh.threshold == 0.1
    assert fresh.window == 8  # 1 + .5 * 15 = 8.5, to even
    assert fresh.state is CreditState.BETWEEN
    assert fresh.quality == 1.0
    assert fresh.stop_rule() is None


def test_window_and_threshold_follow_the_credit() -> None:
    controller = credit(t_base=0.1, alpha=0.4, tau_credit=0.5, t_min=0.02, t_max=0.25)
    tell(controller, 7)
    assert controller.credit == 0.7
    assert controller.threshold == pytest.approx(0.1 + 0.4 * 0.2)
    assert controller.window == 12  # 1 + .7 * 15 = 11.5, to even
    high, low = credit(t_max=0.25), credit(t_min=0.02)
    tell(high, 10)
    tell(low, 0)
    assert (high.threshold, high.window) == (0.25, 16)
    assert (low.threshold, low.window) == (0.02, 1)


def test_room_caps_the_length_and_asking_changes_nothing() -> None:
    controller = credit()
    assert controller.decide(asked()).length == 8
    assert controller.decide(asked(room=3)) == Decision(length=3, threshold=0.1, credit=0.5)
    assert controller.decide(asked(room=0)).length == 0
    assert controller.decide(asked()).length == 8


def test_credit_comes_from_the_strict_verdict_alone() -> None:
    relaxed, exact = credit(), credit()
    tell(relaxed, accepted=9, strict=2)
    tell(exact, accepted=2)
    assert relaxed.credit == exact.credit == 0.2
    assert relaxed.threshold == exact.threshold


def test_a_round_without_drafts_tells_nothing() -> None:
    controller = credit()
    tell(controller, 0, drafted=0)
    assert controller.credit == 0.5
    tell(controller, 5)
    assert controller.credit == 0.5  # the first window that counts


# -- hysteresis and refresh ---------------------------------------------------------------------


def test_nothing_moves_between_refreshes() -> None:
    controller = credit(refresh=3, hysteresis=0, k=1)
    tell(controller, 8)
    assert controller.window == 13
    tell(controller, 0)
    tell(controller, 0)
    assert controller.window == 13
    tell(controller, 0)
    assert controller.credit == pytest.approx(0.8 * 0.7**3)
    assert controller.window == round(1 + 15 * 0.8 * 0.7**3) == 5


def test_small_moves_are_ignored() -> None:
    controller = credit(refresh=1, hysteresis=0.1, k=1, beta=1)
    tell(controller, 5)
    tell(controller, 6)  # .1 is not more than .1
    assert controller.window == 8
    tell(controller, 7)
    assert controller.window == 12


def test_states_have_a_width() -> None:
    controller = credit(k=1, tau_high=0.8, tau_low=0.4, hysteresis=0.15)
    seen = []
    for accepted in (8, 9, 7, 6, 3, 5, 6):
        tell(controller, accepted)
        seen.append(controller.state.value)
    assert seen == ["between", "high", "high", "between", "low", "low", "between"]


# -- safety -------------------------------------------------------------------------------------


def test_poor_quality_makes_the_threshold_conservative_until_the_buffer_is_full_again() -> None:
    controller = credit(buffer=3, delta=0.8, t_min=0.01, refresh=1, hysteresis=0)
    tell(controller, accepted=10, strict=7)
    tell(controller, accepted=10, strict=7)
    assert controller.threshold == pytest.approx(0.1 + 0.4 * 0.2)
    assert not controller.conservative
    tell(controller, accepted=10, strict=7)  # Acc = .7, over a full buffer
    assert controller.conservative
    assert controller.threshold == 0.01
    assert controller.quality == 1.0  # begun anew
    tell(controller, accepted=7)
    tell(controller, accepted=7)
    assert controller.threshold == 0.01
    tell(controller, accepted=7)
    assert not controller.conservative
    assert controller.threshold == pytest.approx(0.1 + 0.4 * 0.2)


def test_safety_does_not_wait_for_the_refresh() -> None:
    controller = credit(buffer=2, refresh=1000, t_min=0.0)
    tell(controller, accepted=10, strict=10)
    assert controller.threshold == 0.3
    tell(controller, accepted=10, strict=0)
    assert controller.threshold == 0.0


def test_quality_at_delta_is_enough() -> None:
    controller = credit(buffer=2, delta=0.8)
    tell(controller, accepted=10, strict=8)
    tell(controller, accepted=5, strict=4)
    assert controller.quality == 0.8
    assert not controller.conservative


# -- ablations ----------------------------------------------------------------------------------


def test_threshold_off_keeps_it_fixed_whatever_happens() -> None:
    controller = credit(threshold=0, t_base=0.12, buffer=2)
    for _ in range(6):
        tell(controller, accepted=10, strict=0)
    assert controller.threshold == 0.12
    assert controller.window == 1  # the window goes on moving


def test_history_off_leaves_the_last_window() -> None:
    controller = credit(history=0)
    for accepted in (10, 10, 10, 3):
        tell(controller, accepted)
    assert controller.credit == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("k", "expected"), [(1, 0.7), (5, 0.7 + 0.3 * 0.8), (10, 0.7 + 0.3 * 8 / 9)]
)
def test_a_longer_history_falls_more_slowly(k: int, expected: float) -> None:
    controller = credit(k=k)
    for accepted in (*([10] * 8), 0):
        tell(controller, accepted)
    assert controller.credit == pytest.approx(expected)


# -- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"t_min": 0.2, "t_base": 0.1}, "out of order"),
        ({"t_base": 0.4, "t_max": 0.3}, "out of order"),
        ({"t_max": 0.7}, "t_max must be in"),
        ({"tau_low": 0.8, "tau_high": 0.8}, "tau_low must be less"),
        ({"window_min": 9, "window_max": 8}, "window_min must be at most"),
        ({"k": 2.5}, "k must be a whole number"),
        ({"k": 0}, "k must be in"),
        ({"beta": 0}, "beta must be in"),
        ({"beta": math.nan}, "beta must be in"),
        ({"threshold": 0.5}, "whole number"),
        ({"gamma": 1}, "no option 'gamma'"),
    ],
)
def test_bad_options_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        credit(**options)


def test_thresholds_may_reach_ln_2_and_touch() -> None:
    controller = credit(t_min=0.3, t_base=0.3, t_max=LN2)
    tell(controller, 0)
    assert controller.threshold == 0.3


# -- with a calibration ---------------------------------------------------------------------------


def stored(folder: Path) -> str:
    (folder / FILE).write_bytes(encode(calibration()))
    return str(folder)


def test_the_table_s_labels_are_used_as_they_stand(tmp_path: Path) -> None:
    controller = credit(stored(tmp_path), predictor=0)
    assert controller.window == 2  # the bin of tau_credit = .4
    tell(controller, 4)
    assert (controller.threshold, controller.window) == (0.05, 2)
    other = credit(stored(tmp_path), predictor=0)
    tell(other, 9)
    assert (other.threshold, other.window) == (0.2, 6)


def test_the_predictor_s_omega_goes_through_the_threshold_law(tmp_path: Path) -> None:
    """Its weights are zero: omega = ln 2 and W in the middle of 2..6 at any credit."""
    controller = credit(stored(tmp_path))
    tell(controller, 6)
    assert controller.threshold == pytest.approx(0.05 + 0.5 * math.log(2) * 0.2)
    assert controller.window == 4


def test_options_come_before_the_calibration_s_law(tmp_path: Path) -> None:
    controller = credit(stored(tmp_path), t_base=0.15, alpha=0)
    tell(controller, 6)
    assert controller.threshold == 0.15


def test_history_and_delta_are_those_of_the_calibration(tmp_path: Path) -> None:
    controller = credit(stored(tmp_path), buffer=3)
    for accepted in (8, 4, 0):
        tell(controller, accepted)
    assert controller.credit == pytest.approx(0.5 * (0.5 * 0.8 + 0.5 * 0.6) + 0.5 * 0.2)
    tell(controller, accepted=10, strict=6)
    assert not controller.conservative  # Acc = 10/14
    tell(controller, accepted=10, strict=2)  # 8/20
    assert controller.conservative
    own = credit(stored(tmp_path), k=1, beta=1)
    for accepted in (8, 4, 1):
        tell(own, accepted)
    assert own.credit == pytest.approx(0.1)


def test_no_calibration_where_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="outrider calibrate"):
        credit(str(tmp_path / "none"))


def test_by_name() -> None:
    assert make("credit").name == "credit"


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=40))
def test_whatever_happens_the_answer_is_in_range(rounds: list[tuple[int, int]]) -> None:
    controller = credit(max_length=8, buffer=3, refresh=1, t_min=0.01)
    for accepted, strict in rounds:
        tell(controller, accepted, min(accepted, strict), drafted=8)
        decision = controller.decide(asked())
        assert 1 <= decision.length <= 8
        assert decision.threshold is not None
        assert 0.01 <= decision.threshold <= 0.3
