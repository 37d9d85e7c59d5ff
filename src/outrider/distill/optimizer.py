"""Muon: momentum whose matrix updates are made orthogonal.

A draft is trained for hundreds of steps rather than hundreds of thousands, and there the even use
of all directions of a matrix pays: each update is replaced by (nearly) the closest orthogonal
matrix, found with five steps of a Newton-Schulz iteration in low precision. Its size is matched to
an Adam update's (root mean square .2), so that one learning rate serves both. Vectors (norms) go
to AdamW.

Muon: Jordan et al. 2024; size matching: Liu et al. 2025 (arXiv 2502.16982).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

_QUINTIC: Final = (3.4445, -4.7750, 2.0315)
"""Coefficients that drive all singular values into about .7 to 1.2 in five steps."""
_STEPS: Final = 5
_RMS: Final = 0.2


class Muon(Optimizer):
    """For two-dimensional parameters only."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """`dtype`: of the iteration."""
        super().__init__(
            parameters,
            {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "dtype": dtype},
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            raise ValueError("Muon takes no closure")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                ahead = parameter.grad.lerp(state["momentum"], group["momentum"])  # Nesterov
                update = orthogonal(ahead.to(group["dtype"]))
                size = _RMS * max(parameter.shape) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update.to(parameter.dtype), alpha=-group["lr"] * size)


def orthogonal(matrix: Tensor) -> Tensor:
    """Nearly the orthogonal factor of `matrix` [rows, columns]: its singular values become
    about one."""
    a, b, c = _QUINTIC
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T.contiguous() if tall else matrix
    x = x / x.float().norm().clamp_min(1e-12).to(x.dtype)
    for _ in range(_STEPS):
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.T if tall else x
