"""`outrider.core.rng.integers` in torch: the same integers, on the model's device.

torch's 64-bit integers are signed. Addition and multiplication wrap modulo 2**64 just the
same; only the right shift copies the sign, so the copies are masked off.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from outrider.core import rng

_M1: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
_M2: Final = 0x94D049BB133111EB - (1 << 64)


def token_offsets(ids: Tensor | int, *, device: str | torch.device = "cpu") -> Tensor:
    """(token + 1) * GOLDEN for given ids, or for range(n): int64, bits as in core.rng."""
    if isinstance(ids, int):
        ids = torch.arange(ids, dtype=torch.int64, device=device)
    return (ids + 1) * signed(rng.GOLDEN)


def integers(draw_key: int, offsets: Tensor) -> Tensor:
    """The 64-bit integers x(key, token) behind `offsets`, as int64 with the same bits."""
    z = offsets + signed(draw_key)
    z = (z ^ _shifted(z, 30)) * _M1
    z = (z ^ _shifted(z, 27)) * _M2
    return z ^ _shifted(z, 31)


def exponentials(x: Tensor) -> Tensor:
    """Standard exponentials E, float64. Equal to core.rng's up to the last bit or so of
    log1p, which libraries do not agree on; the integers are the contract."""
    v = (_shifted(x, 12).double() + 0.5) * 2.0**-52
    return -torch.log1p(-v)


def signed(value: int) -> int:
    """A 64-bit pattern as the signed integer that torch takes."""
    value &= rng.MASK
    return value - (1 << 64) if value >> 63 else value


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Logical right shift."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
