"""Sketches: exactly what is sampled, and bytes that nothing else fits into."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laws import ALARM, fit
from outrider.core import rng
from outrider.core.rng import Purpose
from outrider.core.sampling import Distribution
from outrider.core.sparse import (
    MAX_CODE,
    MAX_SKETCH,
    STEP,
    Sketch,
    SketchError,
    read_sketch,
    sketched,
)
from outrider.core.tokens import ParameterError


def distribution(weights, ids=None) -> Distribution:
    at = np.arange(len(weights)) if ids is None else np.array(ids)
    at = at.astype(np.int64)
    return Distribution(at, np.array(weights, dtype=np.float32), rng.token_offsets(at))


def of(*p: float) -> Distribution:
    with np.errstate(divide="ignore"):
        return distribution(np.log(np.array(p)))


weights = st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=90)


def test_the_likeliest_ids_are_listed():
    sketch, drawn = sketched(of(0.1, 0.4, 0.05, 0.3, 0.15), 2)
    assert sketch.ids == (1, 3)
    assert sketch.codes == (round(-math.log(0.4) / STEP), round(-math.log(0.3) / STEP))
    assert sketch.tail == pytest.approx(0.3, rel=3e-4)
    assert drawn.ids.tolist() == [0, 1, 2, 3, 4]


def test_ties_go_to_the_lower_id():
    assert sketched(of(0.25, 0.25, 0.25, 0.25), 2)[0].ids == (0, 1)
    assert sketched(of(0.1, 0.3, 0.3, 0.3), 2)[0].ids == (1, 2)


@given(weights, st.integers(1, MAX_SKETCH))
def test_the_draft_is_drawn_from_what_the_sketch_says(values: list[float], k: int):
    q = distribution(values)
    sketch, drawn = sketched(q, k)
    listed = drawn.dense(len(values))[list(sketch.ids)]
    assert listed == pytest.approx(sketch.probabilities(), rel=1e-13)
    others = np.delete(drawn.dense(len(values)), sketch.ids)
    assert others.sum() == pytest.approx(sketch.tail, rel=1e-12, abs=1e-300)
    assert sketch.probabilities().sum() + sketch.tail == pytest.approx(1.0, abs=1e-14)
    changed = np.abs(drawn.dense(len(values)) - q.dense(len(values))).sum() / 2
    assert changed <= STEP / 2 + 1e-6


@given(weights, st.integers(1, MAX_SKETCH))
def test_bytes_and_back(values: list[float], k: int):
    ids = np.cumsum(np.arange(len(values)) ** 3 + 1)
    sketch, _ = sketched(distribution(values, ids), k)
    data = sketch.to_bytes()
    assert Sketch.from_bytes(data) == sketch
    assert read_sketch(b"ab" + data + b"c", 2) == (sketch, 2 + len(data))
    for cut in range(len(data)):
        with pytest.raises(SketchError):
            Sketch.from_bytes(data[:cut])


def test_golden_bytes():
    sketch = Sketch(ids=(3, 300), codes=(1419, 2839), rest=0.25)
    assert sketch.to_bytes().hex() == "8203a802" + "8b05170b" + struct.pack("<d", 0.25).hex()
    assert Sketch(ids=(7,), codes=(0,)).to_bytes().hex() == "01070000"


def test_sixteen_ids_take_73_bytes():
    row = np.random.default_rng(1).normal(0, 3, size=49_152)
    sketch, _ = sketched(distribution(row), 16)
    gaps = np.diff((-1, *sketch.ids)) - 1
    assert ((gaps >= 128) & (gaps < 16_384)).all()
    assert len(sketch.to_bytes()) == 73


def test_one_certain_id_stays_certain():
    sketch, drawn = sketched(distribution([5.0], [9]), 16)
    assert sketch == Sketch(ids=(9,), codes=(0,))
    assert sketch.tail == 0.0
    assert sketch.probabilities().tolist() == [1.0]
    assert drawn.ids.tolist() == [9]


def test_ids_that_cannot_occur_are_no_tail():
    sketch, drawn = sketched(of(0.5, 0.0, 0.5, 0.0), 2)
    assert sketch.rest == 0.0
    assert drawn.ids.tolist() == [0, 2]
    assert sketch.may_draw(0)
    assert not sketch.may_draw(1)


def test_what_is_too_unlikely_for_a_code_is_in_the_rest():
    sketch, drawn = sketched(distribution([0.0, -31.0, -33.0]), 3)
    assert sketch.ids == (0, 1)
    assert sketch.rest == pytest.approx(math.exp(-33))
    assert sketch.may_draw(2)
    assert drawn.ids.tolist() == [0, 1, 2]


def test_draws_follow_the_sketch():
    sketch, drawn = sketched(of(0.05, 0.5, 0.25, 0.2), 2)
    counts = [0, 0, 0]
    for i in range(4000):
        token = drawn.draw(rng.key(3, Purpose.DRAFT, i))
        counts[sketch.ids.index(token) if token in sketch.ids else 2] += 1
    assert fit(counts, [*sketch.probabilities(), sketch.tail]) > ALARM


@pytest.mark.parametrize("k", [0, -1, MAX_SKETCH + 1, True, 2.0, math.nan])
def test_sizes_that_are_refused(k):
    with pytest.raises(ParameterError, match="sketch: must list 1 to 64 ids"):
        sketched(of(0.5, 0.5), k)


HALF = round(math.log(2) / STEP)


@pytest.mark.parametrize(
    ("ids", "codes", "rest", "why"),
    [
        ((), (), 1.0, "as many codes"),
        ((1, 2), (HALF,), 0.5, "as many codes"),
        (tuple(range(65)), (9000,) * 65, 0.0, "as many codes"),
        ((2, 1), (HALF, HALF), 0.0, "ascending"),
        ((1, 1), (HALF, HALF), 0.0, "ascending"),
        ((-1, 1), (HALF, HALF), 0.0, "ascending"),
        ((1, 2**31), (HALF, HALF), 0.0, "above"),
        ((1, 2), (HALF, MAX_CODE + 1), 0.5, "codes must be"),
        ((1, 2), (-1, MAX_CODE), 0.0, "codes must be"),
        ((1,), (HALF,), math.nan, "rest is nan"),
        ((1,), (HALF,), math.inf, "rest is inf"),
        ((1,), (HALF,), -0.5, "rest is -0.5"),
        ((1, 2), (HALF, HALF), 0.01, "sum to 1.00979"),
        ((1,), (HALF,), 0.4, "sum to 0.899894"),
    ],
)
def test_what_is_no_sketch(ids, codes, rest: float, why: str):
    with pytest.raises(SketchError, match=why):
        Sketch(ids=ids, codes=codes, rest=rest)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ("", "cut short"),
        ("00", "0 ids"),
        ("80", "0 ids"),
        ("41", "65 ids"),
        ("01070000" + "00", "1 bytes too many"),
        ("01870000" + "00", "shortest form"),
        ("01ffffffffff7f0000", "more than 5 bytes"),
        ("01ffffffff7f0000", "above"),
        ("8107" + "0000" + "00" * 8, "left out"),
    ],
)
def test_bytes_that_are_refused(data: str, why: str):
    with pytest.raises(SketchError, match=why):
        Sketch.from_bytes(bytes.fromhex(data))


@given(st.binary(max_size=40))
def test_any_bytes_are_refused_or_their_own_sketch(data: bytes):
    try:
        sketch = Sketch.from_bytes(data)
    except SketchError:
        return
    assert sketch.to_bytes() == data
