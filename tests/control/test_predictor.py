"""The predictor's forward with numbers done by hand, and files it refuses."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrations import network
from outrider.control.base import CalibrationError
from outrider.control.calibration import Layer, PredictorWeights
from outrider.control.predictor import Predictor


def line(scale: float, shift: float) -> PredictorWeights:
    """One unit wide: x = relu(credit + change), then scaled twice over."""
    passing = Layer(weights=[[1.0]], bias=[0.0])
    first = Layer(weights=[[1.0, 1.0]], bias=[0.0])
    last = Layer(weights=[[scale], [-scale]], bias=[shift, 0.0])
    return PredictorWeights(
        layers=[first, passing, passing, passing, last], window_min=1, window_max=11
    )


def test_five_layers_by_hand() -> None:
    omega, window = Predictor(line(2.0, 0.5))(0.5, 0.25)
    assert omega == pytest.approx(math.log1p(math.exp(2.0)))  # 2 * .75 + .5
    assert window == pytest.approx(1 + 10 / (1 + math.exp(1.5)))


def test_relu_cuts_what_is_negative() -> None:
    assert Predictor(line(2.0, 0.0))(0.2, -0.5) == (pytest.approx(math.log(2.0)), 6.0)


def test_a_bias_in_every_layer_counts() -> None:
    plain = line(1.0, 0.0)
    for i in range(5):
        layers = list(plain.layers)
        layers[i] = msgspec.structs.replace(layers[i], bias=[b + 1.0 for b in layers[i].bias])
        moved = Predictor(msgspec.structs.replace(plain, layers=layers))
        assert moved(0.5, 0.0)[0] == pytest.approx(math.log1p(math.exp(1.5)))


@given(st.floats(0, 1), st.floats(-1, 1), st.floats(-1000, 1000), st.floats(-1000, 1000))
def test_the_answer_is_always_usable(
    credit: float, change: float, scale: float, shift: float
) -> None:
    omega, window = Predictor(line(scale, shift))(credit, change)
    assert 0.0 <= omega < math.inf
    assert 1.0 <= window <= 11.0


def bad(changes: dict[int, Layer]) -> PredictorWeights:
    layers = [changes.get(i, layer) for i, layer in enumerate(network().layers)]
    return PredictorWeights(layers=layers, window_min=2, window_max=6)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (PredictorWeights(layers=[], window_min=2, window_max=6), "0 layers instead of 5"),
        (bad({0: Layer(weights=[[0.0] * 3] * 3, bias=[0.0] * 3)}), "do not fit together"),
        (bad({2: Layer(weights=[[0.0] * 3] * 3, bias=[0.0] * 2)}), "do not fit together"),
        (bad({1: Layer(weights=[[0.0], [0.0, 1.0]], bias=[0.0] * 2)}), "ragged"),
        (bad({3: Layer(weights=[[math.inf] * 3] * 3, bias=[0.0] * 3)}), "not finite"),
        (bad({4: Layer(weights=[[0.0] * 3], bias=[0.0])}), "1 outputs instead of 2"),
        (network(width=257), "a layer of 257 outputs"),
        (msgspec.structs.replace(network(), window_min=0), "windows 0..6"),
        (msgspec.structs.replace(network(), window_max=65), "windows 2..65"),
    ],
)
def test_what_is_no_such_network(stored: PredictorWeights, message: str) -> None:
    with pytest.raises(CalibrationError, match=message) as caught:
        Predictor(stored)
    assert "outrider calibrate" in str(caught.value)
