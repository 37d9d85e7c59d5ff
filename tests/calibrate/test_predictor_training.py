"""Training on surfaces whose best threshold and window are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the torch extra is not installed")

from outrider.calibrate.train import Lesson, train
from outrider.control.calibration import Table, ThresholdLaw
from outrider.control.predictor import Predictor

WINDOWS = [1, 4, 8]
THRESHOLDS = [0.0, 0.1, 0.3]


def table(**changes: Any) -> Table:
    """Two bins. One second a segment; tokens grow with the window in the upper bin alone."""
    short = [[2.0, 1.5, 1.0]] * 3
    long = [[2.0, 4.0, 8.0]] * 3
    fields: dict[str, Any] = {
        "edges": [0.5],
        "thresholds": THRESHOLDS,
        "windows": WINDOWS,
        "visits": [50, 50],
        "best_threshold": [0.05, 0.2],
        "best_window": [1, 8],
        "seconds": [[[1.0] * 3] * 3] * 2,
        "tokens": [short, long],
        "quality": [[[1.0] * 3] * 3] * 2,
    }
    return Table(**{**fields, **changes})


def lesson(found: Table, **law: float) -> Lesson:
    random = np.random.default_rng(1)
    pairs = np.stack([random.uniform(0, 1, 200), random.uniform(-0.2, 0.2, 200)], axis=1)
    constants = {"t_base": 0.1, "tau_credit": 0.5, "t_max": 0.3, **law}
    return Lesson(table=found, law=ThresholdLaw(**constants), pairs=pairs, gamma=0.2, delta=0.8)


def test_windows_and_thresholds_go_where_the_surface_falls() -> None:
    wanted = lesson(table())
    network = Predictor(train(wanted, seed=0))
    (low, low_w), (high, high_w) = network(0.1, 0.0), network(0.9, 0.0)
    assert low_w < 2
    assert high_w > 7
    assert wanted.law.threshold(low, 0.1) < 0.1 < wanted.law.threshold(high, 0.9)


def test_poor_quality_pulls_the_threshold_down_against_its_label() -> None:
    """Acc is good at T = 0 alone; the labels say .3."""
    poor = [[[1.0] * 3, [0.3] * 3, [0.1] * 3]] * 2
    wanted = lesson(
        table(best_threshold=[0.0, 0.3], quality=poor), t_base=0.0, tau_credit=0.0, alpha=1.0
    )
    omega, _ = Predictor(train(wanted, seed=0))(0.9, 0.0)
    assert wanted.law.threshold(omega, 0.9) < 0.03
    same = lesson(table(best_threshold=[0.0, 0.3]), t_base=0.0, tau_credit=0.0, alpha=1.0)
    omega, _ = Predictor(train(same, seed=0))(0.9, 0.0)
    assert same.law.threshold(omega, 0.9) > 0.2


def test_poor_quality_is_no_reason_for_a_short_window() -> None:
    """Acc is good with few drafts alone, whatever T: the window must not run there, although
    the price is twice what the drafts bring."""
    poor = [[[1.0, 0.8, 0.0]] * 3] * 2
    network = Predictor(train(lesson(table(quality=poor)), seed=0))
    assert network(0.9, 0.0)[1] > 7


def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    train(lesson(table()), seed=0, steps=3, told=lambda done, whole: told.append((done, whole)))
    assert told == [(1, 3), (2, 3), (3, 3)]
