"""Keeps element-wise activations from mixing up rows, to the bit.

torch's CPU kernels compute most elements with vector instructions and the last few of a chunk
with scalar ones, and for sigmoid, SiLU and tanh-GELU the two differ in the last bit. Which
elements are "the last few" depends on the size of the whole array and on how threads cut it,
so the same row could come out otherwise at another place of a pass. Called row by row, an
activation cuts every row at the same columns.

Products, sums, norms, softmax, sine, cosine, exp and tanh were tried (2 to 24 rows, 18 widths,
both dtypes) and do not depend on the place; `HFModel` checks the whole model at loading.
"""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from torch import Tensor, nn

_CHUNK: Final = 64
"""Two vectors of 32 bf16 elements: widths that are a multiple leave no scalar rest, on any
vector unit of up to 512 bits."""
_GRAIN: Final = 32768
"""Smaller arrays are never cut into chunks for threads (at::internal::GRAIN_SIZE)."""
_HOMES: Final = ("torch.nn.modules.activation", "transformers.activations")


class RowWise(nn.Module):
    """An activation whose result for a row does not depend on where the row stands."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Any shape; the last axis is a row."""
        width = x.shape[-1]
        if x.is_cuda or (width % _CHUNK == 0 and x.numel() <= _GRAIN):
            return cast(Tensor, self.inner(x))
        rows = [self.inner(row) for row in x.reshape(-1, width).unbind()]
        return torch.stack(rows).reshape(x.shape)


def make_rowwise(model: Any) -> None:
    """Wrap every activation module of the model, once."""
    for parent in list(model.modules()):
        if isinstance(parent, RowWise):
            continue
        for name, child in list(parent.named_children()):
            if type(child).__module__ in _HOMES:
                setattr(parent, name, RowWise(child))
