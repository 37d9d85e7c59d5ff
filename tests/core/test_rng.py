"""Noise: the document's vectors, a second implementation, and the statistics it rests on."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laws import ALARM, fit, normal_tail
from outrider.core import rng
from outrider.core.rng import Purpose

DOCUMENT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
NOISE = DOCUMENT[DOCUMENT.index("\n## Noise\n") :].split("\n## ")[1]

SEEDS = st.integers(0, 2**63 - 1)
POSITIONS = st.integers(0, 2**31 - 1)
TOKENS = st.integers(0, 2**31 - 1)
PURPOSES = st.sampled_from(Purpose)


def table(columns: int) -> list[list[str]]:
    """Rows of the document's tables of that many columns whose first cell is a number."""
    rows = re.findall(r"^\|(.*)\|$", NOISE, re.M)
    cells = [[c.strip(" `") for c in row.split("|")] for row in rows]
    return [c for c in cells if len(c) == columns and c[0].isdigit()]


# -- a second implementation, in plain integers, written from the document ----------------------

TWO64 = 2**64


def mix(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % TWO64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % TWO64
    return z ^ z >> 31


def key(seed: int, purpose: int, position: int, index: int) -> int:
    golden = 0x9E3779B97F4A7C15
    stream = mix((seed + (purpose + 256 * index) * golden) % TWO64)
    return mix((stream + (position + 1) * golden) % TWO64)


def x_of(draw_key: int, token: int) -> int:
    return mix((draw_key + (token + 1) * 0x9E3779B97F4A7C15) % TWO64)


# -- vectors ------------------------------------------------------------------------------------


def test_the_document_has_vectors():
    assert len(table(9)) >= 6
    assert len(table(3)) >= 4


@pytest.mark.parametrize("row", table(9), ids=lambda row: "-".join(row[:5]))
def test_vector(row):
    seed, purpose, position, index, token = (int(cell) for cell in row[:5])
    draw_key = rng.key(seed, Purpose(purpose), position, index)
    assert f"{draw_key:016x}" == row[5]
    offsets = rng.token_offsets(np.array([token], dtype=np.int64))
    x = rng.integers(draw_key, offsets)
    assert f"{int(x[0]):016x}" == row[6]
    v = ((int(x[0]) >> 12) + 0.5) * 2.0**-52
    assert v * 2.0**53 == int(row[7])
    assert rng.token_uniform(draw_key, token) == v
    assert rng.exponentials(x)[0] == pytest.approx(float(row[8]), rel=1e-15)
    if token == 0:
        assert rng.uniform(seed, Purpose(purpose), position, index) == v


@pytest.mark.parametrize("row", table(3), ids=lambda row: "-".join(row[:2]))
def test_choice_vector(row):
    assert rng.choice_seed(int(row[0]), int(row[1])) == int(row[2])


def test_mix_is_splitmix64():
    """First outputs of SplitMix64 seeded with 1234567, as its published test vectors have them."""
    assert rng.integers(1234567, rng.token_offsets(5)).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_purposes_are_as_documented():
    rows = re.findall(r"^\| ([a-z-]+) \| (\d) \|", NOISE, re.M)
    assert {name: int(n) for name, n in rows} == {
        p.name.lower().replace("_", "-"): p.value for p in Purpose
    }


# -- the second implementation agrees -----------------------------------------------------------


@given(SEEDS, PURPOSES, POSITIONS, st.integers(0, 2**20), st.lists(TOKENS, min_size=1, max_size=8))
def test_same_integers(seed, purpose, position, index, tokens):
    draw_key = rng.key(seed, purpose, position, index)
    assert draw_key == key(seed, purpose, position, index)
    offsets = rng.token_offsets(np.array(tokens, dtype=np.int64))
    assert rng.integers(draw_key, offsets).tolist() == [x_of(draw_key, t) for t in tokens]
    first = x_of(draw_key, 0)
    assert rng.uniform(seed, purpose, position, index) == ((first >> 12) + 0.5) / 2**52


@given(SEEDS, st.integers(1, 300))
def test_a_range_of_ids_is_the_list_of_them(draw_key, width):
    listed = rng.token_offsets(np.arange(width, dtype=np.int64))
    assert (rng.token_offsets(width) == listed).all()
    assert rng.integers(draw_key, listed).tolist() == [x_of(draw_key, t) for t in range(width)]


@given(SEEDS, st.integers(1, 300))
def test_rough_integers_have_the_upper_bits(draw_key, width):
    offsets = rng.token_offsets(width)
    rough = rng.rough_integers(draw_key, offsets, rng.Scratch(width))
    assert (rough >> np.uint64(33) == rng.integers(draw_key, offsets) >> np.uint64(33)).all()


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**33 - 1), st.floats(0.0, 2.0))
def test_rough_limit_loses_no_id(x, low, stretch):
    """Whatever the lower 33 bits of the rough integer are, v or less passes the limit of v."""
    v = ((x >> 12) + 0.5) * 2.0**-52
    rough = (x >> 33 << 33) | low
    assert rough <= int(rng.rough_limit(v))
    assert rough <= int(rng.rough_limit(v * (1.0 + stretch)))


def test_rough_limit_rules_out_most():
    rough = rng.rough_integers(5, rng.token_offsets(10_000), rng.Scratch(10_000))
    assert np.count_nonzero(rough <= rng.rough_limit(0.01)) == pytest.approx(100, abs=40)
    assert rng.rough_limit(40.0) == np.uint64(2**64 - 1)


# -- bounds -------------------------------------------------------------------------------------


def test_bounds_are_exact():
    ends = np.array([0, 4095, 2**64 - 4096, 2**64 - 1], dtype=np.uint64)
    e = rng.exponentials(ends)
    assert e[0] == e[1] == 2.0**-53  # -log1p(-v) = v to the last bit
    assert e[2] == e[3] == pytest.approx(53 * math.log(2), rel=1e-15)
    assert np.isfinite(e).all()


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=50))
def test_exponentials_stay_inside(values):
    e = rng.exponentials(np.array(values, dtype=np.uint64))
    v = ((np.array(values, dtype=np.uint64) >> np.uint64(12)).astype(float) + 0.5) / 2**52
    assert ((e >= 2.0**-53) & (e < 36.74)).all()
    assert (e >= v).all()  # what Distribution.draw rests on


def test_no_negative_address():
    with pytest.raises(ValueError):
        rng.key(1, Purpose.TOKEN, -1)
    with pytest.raises(ValueError):
        rng.key(1, Purpose.TOKEN, 0, -1)


# -- statistics; fixed seeds, so a pass is a pass for ever --------------------------------------

BITS52 = np.uint64(12)


def uniforms_over_tokens(draw_key: int, count: int) -> np.ndarray:
    x = rng.integers(draw_key, rng.token_offsets(count))
    return ((x >> BITS52).astype(float) + 0.5) * 2.0**-52


def uniforms_over_positions(seed: int, purpose: Purpose, count: int) -> np.ndarray:
    return np.array([rng.uniform(seed, purpose, n) for n in range(count)])


def uniforms_over_seeds(count: int) -> np.ndarray:
    return np.array([rng.uniform(s, Purpose.TOKEN, 9) for s in range(count)])


def uniforms_over_index(count: int) -> np.ndarray:
    return np.array([rng.uniform(3, Purpose.PROPOSAL, 9, i) for i in range(count)])


SERIES = {
    "tokens": lambda: uniforms_over_tokens(rng.key(1, Purpose.TOKEN, 5), 100_000),
    "tokens of key 0": lambda: uniforms_over_tokens(0, 100_000),
    "positions": lambda: uniforms_over_positions(1, Purpose.TOKEN, 20_000),
    "accept tests": lambda: uniforms_over_positions(0, Purpose.ACCEPT, 20_000),
    "seeds": lambda: uniforms_over_seeds(20_000),
    "indices": lambda: uniforms_over_index(20_000),
}


@pytest.mark.parametrize("name", SERIES)
def test_uniform_and_independent_along(name):
    u = SERIES[name]()
    cells = np.bincount((u * 100).astype(int), minlength=100)
    assert fit(cells, np.full(100, 0.01)) > ALARM
    pairs = (u[:-1] * 16).astype(int) * 16 + (u[1:] * 16).astype(int)
    assert fit(np.bincount(pairs, minlength=256), np.full(256, 1 / 256)) > ALARM
    low = (u * 2**52).astype(np.int64) & 63  # the lowest bits that are used
    assert fit(np.bincount(low, minlength=64), np.full(64, 1 / 64)) > ALARM
    for lag in (1, 2, 3, 7, 64):
        r = np.corrcoef(u[:-lag], u[lag:])[0, 1]
        assert normal_tail(r * math.sqrt(len(u) - lag)) > ALARM / 5


def test_exponential_law():
    e = rng.exponentials(rng.integers(rng.key(8, Purpose.TOKEN, 1), rng.token_offsets(100_000)))
    cells = np.bincount((np.exp(-e) * 50).astype(int), minlength=50)  # exp(-E) is uniform
    assert fit(cells, np.full(50, 0.02)) > ALARM
    assert e.mean() == pytest.approx(1, abs=4 / math.sqrt(1e5))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((5, Purpose.TOKEN, 3, 0), (5, Purpose.TOKEN, 4, 0)),  # next position
        ((5, Purpose.TOKEN, 3, 0), (6, Purpose.TOKEN, 3, 0)),  # next seed
        ((5, Purpose.TOKEN, 3, 0), (5, Purpose.DRAFT, 3, 0)),  # draft against target
        ((5, Purpose.PROPOSAL, 3, 0), (5, Purpose.PROPOSAL, 3, 1)),  # next proposal
        ((5, Purpose.PROPOSAL, 3, 0), (5, Purpose.PROPOSAL_ACCEPT, 3, 0)),  # and its judge
        ((5, Purpose.DRAFT, 3, 0), (5, Purpose.RESIDUAL, 3, 0)),
    ],
)
def test_draws_of_different_address_are_independent(first, second):
    a = uniforms_over_tokens(rng.key(*first), 50_000)
    b = uniforms_over_tokens(rng.key(*second), 50_000)
    for shift in (0, 1, 2):  # no key is a shifted copy of another
        cells = (a[shift:] * 16).astype(int) * 16 + (b[: len(b) - shift] * 16).astype(int)
        assert fit(np.bincount(cells, minlength=256), np.full(256, 1 / 256)) > ALARM


def test_no_two_addresses_share_a_key():
    keys = {
        rng.key(seed, purpose, position, index)
        for seed in (0, 1, 2, 2**63 - 1)
        for purpose in Purpose
        for position in range(100)
        for index in range(20)
    }
    assert len(keys) == 4 * 7 * 100 * 20


# -- choices ------------------------------------------------------------------------------------


@given(SEEDS, st.integers(1, 1000))
def test_choice_seeds_are_seeds(seed, choice):
    assert 0 <= rng.choice_seed(seed, choice) < 2**63
    assert rng.choice_seed(seed, 0) == seed


def test_choice_seeds_differ():
    seeds = [rng.choice_seed(s, c) for s in range(20) for c in range(128)]
    assert len(set(seeds)) == len(seeds)
