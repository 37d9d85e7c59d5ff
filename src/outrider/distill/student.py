"""The draft as a network that can be trained.

Every layer is a layer of the target plus a trainable *difference* (float32), because that is
what the file stores and what weight decay should shrink. Layers named as frozen stay the
target's own: they cost nothing in the file and a third of the work in training. Embedding and
head are the target's and never move. Arithmetic runs in `dtype`; differences, optimiser and norms
stay in float32.

With quantisation on, the forward pass uses the differences as they will be read back from the
file, while gradients go straight through to the exact ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from outrider.engines.decoder import (
    FINAL_NORM,
    MATRICES,
    Geometry,
    State,
    embedding_of,
    head_of,
    layer_of,
)
from outrider.engines.draftfile import LayerPlan, dequantize, quantize


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantizer:
    """How differences are stored: see `engines.draftfile`."""

    levels: dict[int, tuple[float, ...]]
    group: int

    def round_trip(self, matrix: Tensor, bits: int) -> Tensor:
        """`matrix` as it will be read back."""
        codes, scales = quantize(matrix, self.levels[bits], self.group)
        return dequantize(codes, scales, self.levels[bits])


class StudentLayer(nn.Module):
    """One decoder layer; `bits` of its plan 0 means frozen."""

    def __init__(self, geometry: Geometry, state: State, plan: LayerPlan, dtype: torch.dtype):
        super().__init__()
        self.plan = plan
        self._geometry = geometry
        source = layer_of(state, geometry, plan.source)
        for name in MATRICES:
            base = (source[name].float() * plan.factor(name)).to(dtype)
            self.register_buffer(f"base_{name}", base, persistent=False)
            if plan.bits:
                difference = torch.zeros(geometry.shape(name), dtype=torch.float32)
                self.register_parameter(name, nn.Parameter(difference))
        for name in geometry.vectors:
            vector = nn.Parameter(source[name].float().clone(), requires_grad=bool(plan.bits))
            self.register_parameter(name, vector)

    def matrix(self, name: str, quantizer: Quantizer | None) -> Tensor:
        """The weight [outputs, inputs] in the dtype of the arithmetic."""
        base: Tensor = getattr(self, f"base_{name}")
        if not self.plan.bits:
            return base
        difference: Tensor = getattr(self, name)
        if quantizer is not None:
            stored = quantizer.round_trip(difference.detach(), self.plan.bits)
            difference = difference + (stored - difference).detach()  # straight through
        return (base.float() + difference).to(base.dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, quantizer: Quantizer | None) -> Tensor:
        """x [batch, length, hidden], causal."""
        g = self._geometry
        batch, length, _ = x.shape
        h = _norm(x, self.attention_norm, g.norm_eps)
        bias = getattr(self, "qkv_bias", None)
        qkv = linear(h, self.matrix("qkv", quantizer), None if bias is None else bias.to(x.dtype))
        qkv = qkv.view(batch, length, g.heads + 2 * g.kv_heads, g.head_dim).transpose(1, 2)
        queries, keys, values = qkv.split((g.heads, g.kv_heads, g.kv_heads), 1)
        if "q_norm" in g.vectors:
            queries = _norm(queries, self.q_norm, g.norm_eps)
            keys = _norm(keys, self.k_norm, g.norm_eps)
        seen = scaled_dot_product_attention(
            _turn(queries, cos, sin),
            _turn(keys, cos, sin).repeat_interleave(g.heads // g.kv_heads, 1),
            values.repeat_interleave(g.heads // g.kv_heads, 1),
            is_causal=True,
        )
        seen = seen.transpose(1, 2).reshape(batch, length, -1)
        x = x + linear(seen, self.matrix("out", quantizer))
        h = _norm(x, self.mlp_norm, g.norm_eps)
        gate, up = linear(h, self.matrix("gate_up", quantizer)).chunk(2, -1)
        return x + linear(silu(gate) * up, self.matrix("down", quantizer))


class Student(nn.Module):
    """A trainable draft of a target."""

    def __init__(
        self,
        geometry: Geometry,
        state: State,
        plans: Sequence[LayerPlan],
        support: Tensor,
        *,
        quantizer: Quantizer,
        dtype: torch.dtype = torch.bfloat16,
        norm_scale: float = 0.3,
    ) -> None:
        """`support` int64 [n], ascending ids of the head. `norm_scale`: factor on the target's
        final norm at the start; early layers say little about the next token, and the target's
        own norm would make them say it so loudly that the loss starts above uniform."""
        super().__init__()
        self.geometry = geometry
        self.quantizer = quantizer
        self.dtype = dtype
        self.layers = nn.ModuleList(StudentLayer(geometry, state, plan, dtype) for plan in plans)
        self.final_norm = nn.Parameter(state[FINAL_NORM].float() * norm_scale)
        self.register_buffer("support", support.long(), persistent=False)
        self.register_buffer("embedding", embedding_of(state).to(dtype), persistent=False)
        self.register_buffer("head", head_of(state)[support].to(dtype), persistent=False)
        self.register_buffer("rope", torch.tensor(geometry.rope), persistent=False)
        self.quantized = False
        """Whether the forward pass sees differences as stored."""

    @property
    def plans(self) -> tuple[LayerPlan, ...]:
        return tuple(layer.plan for layer in self.layers)

    def forward(self, ids: Tensor) -> Tensor:
        """ids int64 [batch, length] -> residual stream [batch, length, hidden]."""
        x = self.embedding[ids]
        places = torch.arange(ids.shape[1], device=ids.device, dtype=torch.float32)
        angles = torch.cat([places[:, None] * self.rope] * 2, -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        quantizer = self.quantizer if self.quantized else None
        for layer in self.layers:
            x = layer(x, cos, sin, quantizer)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> [rows, support]."""
        return linear(_norm(hidden, self.final_norm, self.geometry.norm_eps), self.head)

    def matrices(self) -> list[nn.Parameter]:
        """The trainable differences."""
        return [p for p in self.parameters() if p.requires_grad and p.dim() == 2]

    def vectors(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad and p.dim() == 1]


def spread_layers(total: int, wanted: int) -> tuple[int, ...]:
    """Which target layers a draft of `wanted` starts from: the first ones, then the last ones.

    A run of consecutive layers works together, and both ends speak the language of embedding
    and head; cutting one piece out of the middle therefore hurts far less than taking every
    other layer (built-in target, untrained, acceptance at T=1: first 10 and last 8 layers .17,
    first 8 and ten of the rest .03).
    """
    if not 1 <= wanted <= total:
        raise ValueError(f"a draft of {wanted} layers out of {total}")
    first = (wanted + 1) // 2
    return (*range(first), *range(total - (wanted - first), total))


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin
