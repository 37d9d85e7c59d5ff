"""The calibration file: what is kept, what is refused, and the words of the refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from calibrations import DRAFT, TARGET, calibration, network, table
from outrider.control.base import CalibrationError, ControllerFacts
from outrider.control.calibration import FILE, ModelFacts, ThresholdLaw, decode, encode, load
from outrider.control.registry import make


def test_what_is_written_is_read(tmp_path: Path) -> None:
    made = calibration()
    (tmp_path / FILE).write_bytes(encode(made))
    assert load(tmp_path) == load(tmp_path / FILE) == made
    assert decode(encode(calibration(predictor=None))).predictor is None


def changed(**changes: Any) -> bytes:
    return json.dumps({**json.loads(encode(calibration())), **changes}).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "damaged or no calibration"),
        (b"\xff\xfe", "damaged or no calibration"),
        (b"[1]", "damaged or no calibration"),
        (b"{}", "no known format"),
        (changed(version=2), "version 2; this Outrider reads outrider-calibration version 1"),
        (changed(format="outrider-traces"), "is outrider-traces"),
        (changed(law={"t_base": 0.5}), "out of order"),
        (changed(law={"t_base": "x"}), "damaged"),
        (changed(extra=1), "unknown field"),
        (encode(calibration())[:200], "damaged"),
    ],
)
def test_what_is_no_calibration_is_refused_with_the_fix(content: bytes, message: str) -> None:
    with pytest.raises(CalibrationError, match=message) as caught:
        decode(content)
    assert "outrider calibrate" in str(caught.value)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="make one with `outrider calibrate`"):
        load(tmp_path / "missing")


def other(facts: ModelFacts, **changes: Any) -> ModelFacts:
    return msgspec.structs.replace(facts, **changes)


def test_another_model_is_refused() -> None:
    made = calibration()
    made.require()
    made.require(target=TARGET, draft=DRAFT)
    made.require(target=other(TARGET, dtype="float32"), draft=other(DRAFT, parameters=0))
    for changes in ({"name": "x"}, {"vocabulary": "cd" * 32}, {"parameters": 101}):
        with pytest.raises(CalibrationError, match=r"made for the target big .* this pair"):
            made.require(target=other(TARGET, **changes))
        with pytest.raises(CalibrationError, match="made for the draft little"):
            made.require(target=TARGET, draft=other(DRAFT, **changes))


def test_the_law_is_the_published_one_clipped() -> None:
    law = ThresholdLaw(t_base=0.1, alpha=0.4, tau_credit=0.5, t_min=0.05, t_max=0.2)
    assert law.threshold(1.0, 0.6) == pytest.approx(0.14)
    assert law.threshold(2.0, 0.6) == pytest.approx(0.18)
    assert law.threshold(9.0, 0.6) == 0.2
    assert law.threshold(9.0, 0.4) == 0.05


@pytest.mark.parametrize(
    "bad",
    [
        {"t_min": 0.2},
        {"t_max": 0.05},
        {"t_max": 0.7},
        {"t_min": -0.1},
        {"alpha": float("nan")},
        {"alpha": -1.0},
        {"tau_credit": 1.1},
    ],
)
def test_constants_out_of_order(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"order|alpha"):
        ThresholdLaw(**bad)


def test_bins_hold_their_lower_edge() -> None:
    found = table()
    assert [found.bin(r) for r in (0.0, 0.49, 0.5, 1.0)] == [0, 0, 1, 1]
    assert found.lookup(0.5) == (0.2, 6)


@pytest.mark.parametrize(
    "bad",
    [
        {"edges": [0.5, 0.2]},
        {"thresholds": []},
        {"visits": [1]},
        {"best_window": [2]},
        {"best_threshold": [0.0, 0.7]},
        {"best_window": [0, 2]},
        {"windows": [2, 65]},
        {"seconds": [[[1.0, 2.0]]]},
        {"quality": [[[1.0], [1.0]]] * 2},
    ],
)
def test_a_table_that_does_not_fit_together(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        table(**bad)


def test_files_that_are_none_are_refused_and_never_read_whole(tmp_path):
    """A device, a file without end, one so deep that a parser gives up."""
    with pytest.raises(CalibrationError, match="no calibration file"):
        load("/dev/zero")
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(1 << 34)  # sparse
    with pytest.raises(CalibrationError, match="too large"):
        load(huge)
    deep = tmp_path / "deep.json"
    deep.write_bytes(encode(calibration())[:-2] + b',"x":' + b"[" * 200_000)
    with pytest.raises(CalibrationError):
        load(deep)


def test_a_network_that_gives_no_numbers_is_refused(tmp_path):
    weights = network()
    for layer in weights.layers:
        for row in layer.weights:
            row[:] = [3e38] * len(row)
    stored = tmp_path / "calibration.json"
    stored.write_bytes(encode(msgspec.structs.replace(calibration(), predictor=weights)))
    with pytest.raises(CalibrationError, match="no numbers"):
        make("credit", ControllerFacts(calibration=str(stored)))
