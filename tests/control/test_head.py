"""The stop head's forward by hand, its file, and what it refuses."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path

import numpy as np
import pytest

from outrider.control import head
from outrider.control.base import CalibrationError
from outrider.control.head import FILE, StopHead, load

F = np.float32


def tiny(**changes: object) -> StopHead:
    """Width 2, size 1, one block: z = h0 + 2 h1 + 3 log q + 4 H + .5; z + silu(-z + 1);
    logit = 2 z - 1."""
    parts: dict[str, object] = {
        "project": np.array([[1, 2, 3, 4]], F),
        "project_bias": np.array([0.5], F),
        "blocks": np.array([[[-1]]], F),
        "block_biases": np.array([[1]], F),
        "read_out": np.array([2, -1], F),
        "weight": 6.0,
        "about": {"draft": "toy"},
    }
    return StopHead(**(parts | changes))  # type: ignore[arg-type]


def random_head(width: int, size: int, blocks: int = 3, **about: object) -> StopHead:
    draw = np.random.default_rng(7)

    def array(*shape: int) -> np.ndarray:
        return draw.normal(size=shape, scale=0.25).astype(np.float16).astype(F)

    return StopHead(
        project=array(size, width + 2),
        project_bias=array(size),
        blocks=array(blocks, size, size),
        block_biases=array(blocks, size),
        read_out=array(size + 1),
        weight=6.0,
        about={"draft": "toy", **about},
    )


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_the_forward_by_hand():
    hidden, q, entropy = np.array([0.25, -0.5], F), 0.5, 0.75
    z = 0.25 - 1.0 + 3 * math.log(0.5) + 3.0 + 0.5
    z += (1 - z) * sigmoid(1 - z)
    assert tiny().weighted(hidden, q, entropy) == pytest.approx(sigmoid(2 * z - 1), rel=1e-5)
    unbent = tiny().acceptance(hidden, q, entropy)
    assert unbent == pytest.approx(sigmoid(2 * z - 1 + math.log(6)), rel=1e-5)


@pytest.mark.parametrize("true", [0.05, 0.5, 0.9])
def test_the_class_weight_is_taken_out_again(true):
    """A cross entropy with weight 6 on rejections has its least at a / (a + 6 (1 - a))."""
    grid = np.linspace(1e-4, 1 - 1e-4, 99_999)
    loss = -true * np.log(grid) - 6 * (1 - true) * np.log(1 - grid)
    bent = float(grid[loss.argmin()])
    assert bent == pytest.approx(true / (true + 6 * (1 - true)), abs=1e-4)
    logit = math.log(bent / (1 - bent))
    flat = {"project": np.zeros((1, 4), F), "project_bias": np.zeros(1, F)}
    made = tiny(**flat, block_biases=np.zeros((1, 1), F), read_out=np.array([0, logit], F))
    assert made.weighted(np.zeros(2, F), 1.0, 0.0) == pytest.approx(bent, abs=1e-5)
    assert made.acceptance(np.zeros(2, F), 1.0, 0.0) == pytest.approx(true, abs=1e-3)


def test_impossible_and_extreme_inputs_stay_in_range():
    made = random_head(8, 4)
    for q in (0.0, 1e-300, 1.0):
        for scale in (0.0, 1e4, -1e4):
            found = made.acceptance(np.full(8, scale, F), q, 10.8)
            assert 0.0 <= found <= 1.0
    assert made.acceptance(np.zeros(8, F), 0.0, 1.0) == made.acceptance(np.zeros(8, F), 1e-12, 1.0)
    assert math.isnan(made.acceptance(np.full(8, np.nan, F), 0.5, 1.0))


def test_another_width_is_refused():
    with pytest.raises(CalibrationError, match="reads states of width 8, this draft's are"):
        random_head(8, 4).acceptance(np.zeros(9, F), 0.5, 1.0)


def test_a_file_gives_back_what_was_saved():
    made = random_head(8, 4, seed=3, figures={"auc": 0.75})
    found = StopHead.from_bytes(made.to_bytes())
    for name in ("project", "project_bias", "blocks", "block_biases", "read_out"):
        assert np.array_equal(getattr(found, name), getattr(made, name))
    assert (found.weight, found.width, found.draft) == (6.0, 8, "toy")
    assert found.about == {"draft": "toy", "seed": 3, "figures": {"auc": 0.75}}


def rewritten(**changes: object) -> bytes:
    """A head's file with other entries; `about` is merged, None leaves an entry out."""
    with np.load(io.BytesIO(random_head(8, 4).to_bytes())) as file:
        parts = {name: file[name] for name in file.files}
    about = json.loads(parts["about"].tobytes()) | changes.pop("about", {})  # type: ignore[operator]
    parts["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    parts = {k: v for k, v in (parts | changes).items() if v is not None}
    file = io.BytesIO()
    np.savez(file, **parts)
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no stop head"),
        (b"\x80\x04]q\x00.", "no stop head"),
        (random_head(8, 4).to_bytes()[:700], "no stop head"),
        (rewritten(blocks=None), "no stop head"),
        (rewritten(about={"format": "outrider-draft"}), "another kind of file"),
        (rewritten(about={"version": 2}), "format 2, this is 1"),
        (rewritten(about={"weight": "six"}), "'six' is no number"),
        (rewritten(about={"weight": 0.0}), "weight 0.0 is not > 0"),
        (rewritten(about={"draft": None}), "which draft"),
        (rewritten(read_out=np.zeros(4, np.float16)), r"read_out is float32\[4\], not"),
        (rewritten(read_out=np.zeros(5, F)), "not float16"),
        (rewritten(blocks=np.zeros((4, 4), np.float16)), "blocks is"),
        (rewritten(read_out=np.full(5, np.nan, np.float16)), "no numbers"),
        (rewritten(read_out=np.array([{}] * 5, dtype=object)), "no stop head"),
    ],
)
def test_bad_files_are_refused_in_one_line(data, reason):
    with pytest.raises(CalibrationError, match=reason) as caught:
        StopHead.from_bytes(data)
    assert "\n" not in str(caught.value)
    assert "bench/train_stop_head.py" in str(caught.value)


def test_where_a_head_may_lie(tmp_path: Path, monkeypatch):
    data = random_head(8, 4, number=1).to_bytes()
    (tmp_path / FILE).write_bytes(data)
    assert load(str(tmp_path)).about["number"] == 1
    assert load(str(tmp_path / FILE)).about["number"] == 1
    with pytest.raises(CalibrationError, match="no stop head at 'nobody'"):
        load("nobody")
    with pytest.raises(CalibrationError, match="no stop head at"):
        load(str(tmp_path / "none.npz"))
    monkeypatch.setattr(head, "MAX_FILE_BYTES", 100)
    with pytest.raises(CalibrationError, match="too large"):
        load(str(tmp_path))


def test_heads_are_values():
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny().weight = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("draft", ["small", "large"])
def test_the_heads_that_ship(draft):
    made = load(draft)
    assert (made.draft, made.width, made.blocks.shape) == (draft, 576, (3, 64, 64))
    assert load(f"lookup+{draft}").about == made.about
    assert len(made.to_bytes()) < 200_000
    held_out = made.about["held_out"]
    assert held_out["brier"] < held_out["base"]
    assert held_out["auc"] > 0.5
