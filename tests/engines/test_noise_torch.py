"""The noise is the same integers in numpy and torch."""

from __future__ import annotations

import random

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the torch extra is not installed")

from outrider.core import rng  # noqa: E402
from outrider.engines import noise_torch  # noqa: E402

KEYS = [
    0,
    1,
    rng.MASK,
    1 << 63,
    (1 << 63) - 1,
    *(random.Random(7).getrandbits(64) for _ in "x" * 60),
]


@pytest.mark.parametrize("key", KEYS)
def test_same_integers(key: int) -> None:
    expected = rng.integers(key, rng.token_offsets(2000))
    got = noise_torch.integers(key, noise_torch.token_offsets(2000))
    assert (got.numpy().view(np.uint64) == expected).all()


def test_same_integers_for_chosen_ids() -> None:
    ids = np.array([0, 5, 49151, 2**31 - 1], np.int64)
    expected = rng.integers(3, rng.token_offsets(ids))
    got = noise_torch.integers(3, noise_torch.token_offsets(torch.from_numpy(ids)))
    assert (got.numpy().view(np.uint64) == expected).all()


def test_same_exponentials_up_to_rounding() -> None:
    x = rng.integers(9, rng.token_offsets(5000))
    expected = rng.exponentials(x)
    got = noise_torch.exponentials(torch.from_numpy(x.view(np.int64))).numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-14)


def test_a_key_is_a_draws_address() -> None:
    key = rng.key(42, rng.Purpose.TOKEN, 17)
    x = noise_torch.integers(key, noise_torch.token_offsets(300))
    assert int(x[299]) & rng.MASK == rng.mix((key + 300 * rng.GOLDEN) & rng.MASK)
