"""The five-layer predictor g(r, dr) -> (omega, W), forward only, in numpy.

E2-SCI (docs/papers.md, 1, Predictor) names a five-layer feed-forward network and nothing more about
it. Ours: five dense layers, ReLU between them; omega = softplus(first output) > 0, W = W_min +
(W_max - W_min) * sigmoid(second output). `calibrate.train` makes the weights.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from outrider.control.base import MAX_LENGTH, CalibrationError
from outrider.control.calibration import Layer, PredictorWeights

LAYERS: Final = 5
INPUTS: Final = 2
OUTPUTS: Final = 2
MAX_WIDTH: Final = 256
"""Widest layer taken from a file: bounds what a call may cost."""

F32Array = npt.NDArray[np.float32]


class Predictor:
    """See the module docstring."""

    __slots__ = ("_layers", "_low", "_span")

    def __init__(self, stored: PredictorWeights) -> None:
        """Raises CalibrationError for weights that are not such a network."""
        self._layers = tuple(_arrays(stored))
        if not 1 <= stored.window_min <= stored.window_max <= MAX_LENGTH:
            raise CalibrationError(
                f"the predictor's windows {stored.window_min}..{stored.window_max} are not in "
                f"[1, {MAX_LENGTH}]: run `outrider calibrate` again"
            )
        self._low = stored.window_min
        self._span = stored.window_max - stored.window_min

    def __call__(self, credit: float, change: float) -> tuple[float, float]:
        """(omega, W) at a credit in [0, 1] and its last change in [-1, 1]; W is not rounded."""
        x = np.array((credit, change), dtype=np.float32)
        for weights, bias in self._layers[:-1]:
            x = weights @ x
            x += bias
            np.maximum(x, 0.0, out=x)
        weights, bias = self._layers[-1]
        first, second = (weights @ x + bias).tolist()
        return _softplus(first), self._low + self._span * _sigmoid(second)


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _sigmoid(x: float) -> float:
    e = math.exp(-abs(x))
    return 1.0 / (1.0 + e) if x >= 0.0 else e / (1.0 + e)


def _arrays(stored: PredictorWeights) -> list[tuple[F32Array, F32Array]]:
    if len(stored.layers) != LAYERS:
        raise _bad(f"{len(stored.layers)} layers instead of {LAYERS}")
    found, inputs = [], INPUTS
    for layer in stored.layers:
        weights, bias = _pair(layer)
        if weights.ndim != 2 or weights.shape[1] != inputs or bias.shape != weights.shape[:1]:
            raise _bad("layers that do not fit together")
        if not (np.isfinite(weights).all() and np.isfinite(bias).all()):
            raise _bad("weights that are not finite")
        inputs = weights.shape[0]
        if not 0 < inputs <= MAX_WIDTH:
            raise _bad(f"a layer of {inputs} outputs")
        found.append((weights, bias))
    if inputs != OUTPUTS:
        raise _bad(f"{inputs} outputs instead of {OUTPUTS}")
    return found


def _pair(layer: Layer) -> tuple[F32Array, F32Array]:
    try:
        return np.array(layer.weights, np.float32), np.array(layer.bias, np.float32)
    except ValueError:  # rows of different lengths
        raise _bad("a ragged matrix") from None


def _bad(what: str) -> CalibrationError:
    return CalibrationError(f"the predictor has {what}: run `outrider calibrate` again")
