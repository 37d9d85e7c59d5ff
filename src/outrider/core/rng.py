"""Randomness with an address instead of a state.

Every draw is a pure function of (seed, purpose, position, index): reordering, batching,
retrying or moving a session to another machine cannot change it (I1, I4). docs/protocol.md
states the construction to the bit, with test vectors; `outrider.engines.noise_torch` makes
the same integers in torch.

Construction, all arithmetic modulo 2**64, `mix` the finaliser of SplitMix64 (Steele, Lea,
Flood, OOPSLA 2014; constants of Stafford's Mix13):

    key(seed, purpose, position, index)
                  = mix(mix(seed + (purpose + 256*index)*GOLDEN) + (position + 1)*GOLDEN)
    x(key, token) = mix(key + (token + 1)*GOLDEN)

so the integers of one position are the SplitMix64 stream seeded with its key, one per token
id. The noise of a token is the standard exponential

    v = ((x >> 12) + 0.5) * 2**-52           in (0, 1), exact in float64
    E = -log1p(-v)                           G = -ln(E) is the Gumbel noise

and the coupled draw is argmin E/p, the same token as argmax(log p + G), with one logarithm
instead of three.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

GOLDEN: Final = 0x9E3779B97F4A7C15
MASK: Final = (1 << 64) - 1
_M1: Final = 0xBF58476D1CE4E5B9
_M2: Final = 0x94D049BB133111EB
_GOLDEN64, _M1_64, _M2_64 = np.uint64(GOLDEN), np.uint64(_M1), np.uint64(_M2)
_ONE, _SHIFT_12, _SHIFT_27, _SHIFT_30, _SHIFT_31 = (np.uint64(n) for n in (1, 12, 27, 30, 31))

U64Array = npt.NDArray[np.uint64]
F64Array = npt.NDArray[np.float64]


class Purpose(IntEnum):
    """What a draw is for. Two draws of one position never share bits unless meant to."""

    TOKEN = 0
    """The token itself: shared by draft and target in the coupled rule."""
    ACCEPT = 1
    """The uniform of the ratio rule's accept test."""
    DRAFT = 2
    """Drafting under the ratio rule, independent of the target's draws."""
    PROPOSAL = 3
    """Fresh draws y ~ p of the residual dialogue; `index` counts them."""
    PROPOSAL_ACCEPT = 4
    """The uniforms that judge those proposals; `index` counts them."""
    RESIDUAL = 5
    """A draw from the exact residual when the full row is at hand."""
    CHOICE = 6
    """Seeds of the choices of one request with n > 1."""


def mix(z: int) -> int:
    """SplitMix64's finaliser on one 64-bit integer."""
    z = ((z ^ (z >> 30)) * _M1) & MASK
    z = ((z ^ (z >> 27)) * _M2) & MASK
    return z ^ (z >> 31)


def key(seed: int, purpose: Purpose, position: int, index: int = 0) -> int:
    """The 64-bit key of a draw; `index` counts draws of one purpose at one position."""
    if position < 0 or index < 0:
        raise ValueError("position and index must not be negative")
    stream = mix((seed + (purpose + (index << 8)) * GOLDEN) & MASK)
    return mix((stream + (position + 1) * GOLDEN) & MASK)


def token_uniform(draw_key: int, token: int) -> float:
    """v of one token id, in (0, 1)."""
    x = mix((draw_key + (token + 1) * GOLDEN) & MASK)
    return ((x >> 12) + 0.5) * 2.0**-52


def uniform(seed: int, purpose: Purpose, position: int, index: int = 0) -> float:
    """One uniform in (0, 1): the v of token id 0 under the draw's key."""
    return token_uniform(key(seed, purpose, position, index), 0)


def choice_seed(seed: int, choice: int) -> int:
    """Seed of choice number `choice` of one request; choice 0 keeps the request's seed."""
    if choice == 0:
        return seed
    return mix(key(seed, Purpose.CHOICE, choice)) >> 1


def token_offsets(ids: npt.NDArray[np.int64] | int) -> U64Array:
    """(token + 1) * GOLDEN for given ids, or for range(n): the constant part of the hash."""
    tokens = np.arange(ids, dtype=np.uint64) if isinstance(ids, int) else ids.astype(np.uint64)
    return (tokens + _ONE) * _GOLDEN64


def integers(draw_key: int, offsets: U64Array) -> U64Array:
    """The 64-bit integers x(key, token) of all tokens behind `offsets`. A new array."""
    z = offsets + np.uint64(draw_key)
    t = z >> _SHIFT_30
    np.bitwise_xor(z, t, out=z)
    np.multiply(z, _M1_64, out=z)
    np.right_shift(z, _SHIFT_27, out=t)
    np.bitwise_xor(z, t, out=z)
    np.multiply(z, _M2_64, out=z)
    np.right_shift(z, _SHIFT_31, out=t)
    np.bitwise_xor(z, t, out=z)
    return z


class Scratch:
    """Memory for draws over rows of one width: a draw then allocates nothing of that size.

    Holds nothing between calls. One thread at a time.
    """

    __slots__ = ("x", "y")

    def __init__(self, width: int) -> None:
        self.x = np.empty(width, dtype=np.uint64)
        self.y = np.empty(width, dtype=np.uint64)


def rough_integers(draw_key: int, offsets: U64Array, scratch: Scratch) -> U64Array:
    """`integers` without the last xorshift of `mix`, in the scratch's memory.

    That step changes the lower 33 bits only. The upper 31 are enough to tell that most ids
    cannot win a draw, and leaving it out saves a quarter of the time.
    """
    z, t = scratch.x, scratch.y
    np.add(offsets, np.uint64(draw_key), out=z)
    np.right_shift(z, _SHIFT_30, out=t)
    np.bitwise_xor(z, t, out=z)
    np.multiply(z, _M1_64, out=z)
    np.right_shift(z, _SHIFT_27, out=t)
    np.bitwise_xor(z, t, out=z)
    np.multiply(z, _M2_64, out=z)
    return z


def rough_limit(v: float) -> np.uint64:
    """No id whose rough integer is larger has a uniform of `v` or less."""
    cells = min(int(v * (1 << 31)) + 2, 1 << 31)  # one for rounding, one for the cell v lies in
    return np.uint64((cells << 33) - 1)


def exponentials(x: U64Array) -> F64Array:
    """Standard exponentials E of 64-bit integers, float64, strictly positive and finite."""
    v = ((x >> _SHIFT_12).astype(np.float64) + 0.5) * 2.0**-52
    return -np.log1p(-v)
