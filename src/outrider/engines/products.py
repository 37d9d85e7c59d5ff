"""Matrix products with narrow weights: what a draft's layers and head are made of.

int8 and int4 products come from torch's own operators; which of them this build has on a device
`resolve` finds out.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import linear

from outrider.engines.base import EngineError

OPERATORS: Final = {"int8": "_weight_int8pack_mm", "int4": "_weight_int4pack_mm_for_cpu"}
"""torch's operator for each kind of narrow product."""
INT8_ROWS: Final = 8
"""Up to so many rows the narrow operators are the faster ones; beyond, weights are widened."""
INT8_WIDTH: Final = 16
"""The int8 operator wants a multiple of it as width."""
INT4_GROUP: Final = 32
INT4_ROWS: Final = 64
"""The int4 operator wants a multiple of it as number of outputs."""
COMPUTE: Final = ("auto", "int8", "int4", "bfloat16", "float32")


class Linear:
    """x [n, inputs] -> x W^T [n, outputs], W held plainly, in the dtype of x."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        """`weight` float32 [outputs, inputs]."""
        self.parameters = weight.numel()
        self._weight = weight.to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self._weight)


class Int8Linear:
    """The same with W in int8, one scale a row."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.parameters = weight.numel()
        scale = (weight.abs().amax(1) / 127).clamp_min(1e-12)
        self._weight = (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
        self._scale = scale.to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) <= INT8_ROWS:
            return torch._weight_int8pack_mm(x, self._weight, self._scale)
        return linear(x, self._weight.to(x.dtype)) * self._scale


class Int4Linear:
    """The same with W in 4 bits, a scale and an offset for every INT4_GROUP inputs.

    A third of the time of int8 for a layer that is not in the cache. Targets that come as Q4_1
    have just this form already, so their unchanged layers lose next to nothing."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.parameters = weight.numel()
        rows, columns = weight.shape
        entries = weight.reshape(rows, columns // INT4_GROUP, INT4_GROUP)
        low, high = entries.aminmax(dim=-1, keepdim=True)
        scale = ((high - low) / 15).clamp_min(1e-12)
        codes = ((entries - low) / scale).round().clamp(0, 15)
        packed = codes.to(torch.int32).view(rows, columns)
        self._weight = torch._convert_weight_to_int4pack_for_cpu(packed, 1)
        # The operator computes (code - 8) * scale + offset; pairs by group, then row.
        pairs = torch.cat([scale, low + 8 * scale], -1)
        self._pairs = pairs.transpose(0, 1).contiguous().to(dtype)
        # Kept a second time for many rows, where the operator's cost grows with each of them.
        self._codes = (codes - 8).to(torch.int8)
        self._wide = pairs.to(dtype)[..., None]

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) <= INT8_ROWS:
            return torch._weight_int4pack_mm_for_cpu(x, self._weight, INT4_GROUP, self._pairs)
        weight = self._codes.to(x.dtype) * self._wide[:, :, 0] + self._wide[:, :, 1]
        return linear(x, weight.view(len(weight), -1))


Product = Linear | Int8Linear | Int4Linear


def make_product(weight: Tensor, dtype: torch.dtype, kind: str) -> Product:
    """The narrowest form of `weight` that `kind` allows and the operators can take."""
    rows, columns = weight.shape
    if kind == "int4" and columns % INT4_GROUP == 0 and rows % INT4_ROWS == 0:
        return Int4Linear(weight, dtype)
    # The int8 kernel reads whole vectors: other widths give it junk behind each row (NaN).
    if kind in ("int8", "int4") and columns % INT8_WIDTH == 0:
        return Int8Linear(weight, dtype)
    return Linear(weight, dtype)


def resolve(compute: str, device: str, precision: str) -> str:
    """What the products run in; 'auto' takes the file's own choice on a CPU whose torch has
    the operator."""
    if compute not in COMPUTE:
        raise EngineError(f"unknown dtype {compute!r} of a draft; use one of {', '.join(COMPUTE)}")
    on_cpu = torch.device(device).type == "cpu"
    able = [kind for kind, operator in OPERATORS.items() if on_cpu and hasattr(torch, operator)]
    if compute in OPERATORS and compute not in able:
        raise EngineError(f"no {compute} products on {device} in this torch; use dtype bfloat16")
    if compute == "auto":
        return precision if precision in able else "bfloat16"
    return compute
