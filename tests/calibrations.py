"""A small calibration with literal numbers, for tests."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from outrider.control.calibration import (
    Calibration,
    Layer,
    ModelFacts,
    PredictorWeights,
    Provenance,
    Table,
    ThresholdLaw,
)

TARGET = ModelFacts(name="big", vocabulary="ab" * 32, dtype="bfloat16", parameters=100)
DRAFT = ModelFacts(name="little", vocabulary="ab" * 32, dtype="int8", parameters=10)


def network(width: int = 3) -> PredictorWeights:
    widths = (2, *(width,) * 4, 2)
    layers = [
        Layer(weights=[[0.0] * i for _ in range(o)], bias=[0.0] * o) for i, o in pairwise(widths)
    ]
    return PredictorWeights(layers=layers, window_min=2, window_max=6)


def table(**changes: Any) -> Table:
    """Two bins, two thresholds, two windows."""
    cube = [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]]
    fields: dict[str, Any] = {
        "edges": [0.5],
        "thresholds": [0.0, 0.2],
        "windows": [2, 6],
        "visits": [40, 50],
        "best_threshold": [0.05, 0.2],
        "best_window": [2, 6],
        "seconds": cube,
        "tokens": cube,
        "quality": [[[1.0, 1.0], [0.8, 0.9]]] * 2,
    }
    return Table(**{**fields, **changes})


def calibration(**changes: Any) -> Calibration:
    fields: dict[str, Any] = {
        "provenance": Provenance(
            outrider="0",
            target=TARGET,
            draft=DRAFT,
            temperature=0.7,
            data={"sums": 3},
            data_digest="00",
            positions=300,
            seed=1,
            schedule="sync",
            round_trip=0.05,
            draft_seconds=0.004,
            verify_seconds=[(1, 0.03), (8, 0.04)],
            gamma=0.02,
            delta=0.6,
            k=2,
            beta=0.5,
        ),
        "law": ThresholdLaw(t_base=0.05, alpha=0.5, tau_credit=0.4, t_max=0.2),
        "table": table(),
        "predictor": network(),
    }
    return Calibration(**{**fields, **changes})
