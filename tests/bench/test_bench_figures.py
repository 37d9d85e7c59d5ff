"""Intervals on known data, and rows of a table from literal cells."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.bench.figures import Estimate, bootstrap, median, ratio_of_sums, rows
from outrider.bench.journal import Answer, Cell, Key


def answer(ms: float, tokens: int = 11, **changes: object) -> Answer:
    """`tokens`, the first of which comes alone, `ms` apart."""
    values = {
        "tokens": tokens,
        "first": 0.1,
        "rest": ms * (tokens - 1) / 1e3,
        "later": tokens - 1,
        "finish": "length",
        "drafted": 0,
        "accepted": 0,
        **changes,
    }
    return Answer(**values)  # type: ignore[arg-type]


def cell(arm: str, *answers: Answer, seed: int = 0, **changes: object) -> Cell:
    values = {
        "key": Key(point="p", data="", item="", arm=arm, seed=seed),
        "answers": answers,
        "forwards": 5,
        "busy": 0.5,
        "seconds": 1.0,
        "bytes_up": 10,
        "bytes_down": 20,
        "warm_up": 1,
        **changes,
    }
    return Cell(**values)  # type: ignore[arg-type]


def test_an_interval_covers_as_often_as_it_says():
    """The mean of 40 normal numbers: 95 % of intervals hold it (percentile: a little fewer)."""
    chance = np.random.default_rng(7)
    hits = 0
    for _ in range(200):
        values = np.stack([chance.normal(5.0, 1.0, 40), np.ones(40)], axis=1)
        found = bootstrap(values, ratio_of_sums)
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= 5.0 <= found.high
    assert 0.88 <= hits / 200 <= 0.99


def test_known_values():
    values = np.array([[1.0], [2.0], [30.0]])
    assert bootstrap(values, median).value == 2.0
    same = np.full((9, 1), 4.0)
    assert bootstrap(same, median) == Estimate(value=4.0, low=4.0, high=4.0)
    assert bootstrap(values[:2], median) == Estimate(value=1.5)
    assert bootstrap(values, median) == bootstrap(values, median), "seeded"


def test_a_row():
    cells = [
        cell("cloud-only", answer(60.0), answer(60.0), answer(80.0), forwards=33),
        cell("sync", answer(30.0), answer(20.0), answer(40.0, drafted=8, accepted=6)),
    ]
    plain, sync = rows(cells, base="cloud-only")
    assert plain.speed is not None
    assert plain.speed.value == pytest.approx(1.0)
    assert sync.speed is not None
    assert sync.speed.value == pytest.approx(2.0), "of ratios 2, 3, 2"
    assert sync.ms_per_token is not None
    assert sync.ms_per_token.value == pytest.approx(30.0)
    assert sync.forwards_per_token == pytest.approx(5 / 33)
    assert sync.tokens_per_second == pytest.approx(33.0)
    assert sync.acceptance == 0.75
    assert plain.acceptance is None, "no drafts: null, not NaN"
    assert sync.cloud_share == pytest.approx(1.0)
    assert sync.score is None
    assert sync.identical is None


def test_texts_are_compared_by_digest():
    cells = [
        cell("cloud-only", answer(60.0, digest="a"), answer(60.0, digest="b")),
        cell("sync", answer(60.0, digest="a"), answer(60.0, digest="x")),
    ]
    assert [row.identical for row in rows(cells, base="cloud-only")] == [2, 1]


def test_an_answer_of_one_block_has_no_time_per_token():
    only = answer(0.0, tokens=1)
    row = rows([cell("sync", only)], base="cloud-only")[0]
    assert row.ms_per_token is None
    assert row.speed is None
