"""Llama-like decoders, as far as a draft cut out of one needs to know them.

Covered are the families whose layer is: RMS norm, rotary attention with grouped key/value heads
(Qwen2: a bias on query, key, value; Qwen3: RMS norm of each query and key head), RMS norm,
SwiGLU. A layer is handled as four fused matrices and a few vectors (`MATRICES`, `VECTORS`),
under names of our own, so that trainer, file format and run-time agree.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from outrider.engines.base import UnsupportedModelError

FAMILIES: Final = ("llama", "qwen2", "qwen3")
MATRICES: Final = ("qkv", "out", "gate_up", "down")
"""Linear weights of a layer: query, key and value rows in one matrix; gate and up too."""
VECTORS: Final = ("attention_norm", "mlp_norm", "qkv_bias", "q_norm", "k_norm")
"""Small parameters; the last three only where the family has them."""
EMBEDDING: Final = "model.embed_tokens.weight"
FINAL_NORM: Final = "model.norm.weight"
HEAD: Final = "lm_head.weight"
_SAMPLE_ROWS: Final = 4

State = Mapping[str, Tensor]
"""A model's weights by transformers' names."""
Layer = dict[str, Tensor]
"""The parameters of one layer by the names in MATRICES and VECTORS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Shape of a decoder."""

    family: str
    """transformers' `model_type`, one of FAMILIES."""
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    """Rows of the embedding."""
    layers: int
    norm_eps: float
    rope: tuple[float, ...]
    """Inverse frequencies of the rotary embedding, head_dim / 2 radians per position."""
    context: int
    """Most positions the model was made for."""

    @property
    def qkv_rows(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def vectors(self) -> tuple[str, ...]:
        """Which of VECTORS a layer of this family has."""
        extra = {"llama": (), "qwen2": ("qkv_bias",), "qwen3": ("q_norm", "k_norm")}
        return ("attention_norm", "mlp_norm", *extra[self.family])

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a layer's parameter; matrices are [outputs, inputs]."""
        return {
            "qkv": (self.qkv_rows, self.hidden),
            "out": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "attention_norm": (self.hidden,),
            "mlp_norm": (self.hidden,),
            "qkv_bias": (self.qkv_rows,),
            "q_norm": (self.head_dim,),
            "k_norm": (self.head_dim,),
        }[name]


def geometry_of(config: Any) -> Geometry:
    """Geometry of a transformers config; UnsupportedModelError with the reason otherwise."""
    family = config.model_type
    if family not in FAMILIES:
        raise UnsupportedModelError(
            f"drafts are cut out of {', '.join(FAMILIES)} models, not of model type {family!r}"
        )
    if getattr(config, "hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"{family} with activation {config.hidden_act!r}")
    if getattr(config, "mlp_bias", False) or getattr(config, "attention_bias", False):
        raise UnsupportedModelError(f"{family} with biases on its linear layers")
    if getattr(config, "use_sliding_window", False):
        raise UnsupportedModelError(f"{family} with sliding-window attention")
    heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return Geometry(
        family=family,
        hidden=int(config.hidden_size),
        intermediate=int(config.intermediate_size),
        heads=heads,
        kv_heads=int(config.num_key_value_heads),
        head_dim=head_dim,
        vocab=int(config.vocab_size),
        layers=int(config.num_hidden_layers),
        norm_eps=float(config.rms_norm_eps),
        rope=_inverse_frequencies(config, head_dim),
        context=int(config.max_position_embeddings),
    )


def _inverse_frequencies(config: Any, head_dim: int) -> tuple[float, ...]:
    """What transformers itself would use, for rope variants that scale statically."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind == "default":
        theta = float(rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)
        places = torch.arange(0, head_dim, 2, dtype=torch.int64).float()
        frequencies = 1.0 / (theta ** (places / head_dim))
    elif kind in ("linear", "llama3"):
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        if factor != 1.0:
            raise UnsupportedModelError(f"rotary embedding that scales attention by {factor}")
    else:
        raise UnsupportedModelError(f"rotary embedding of type {kind!r}")
    return tuple(float(value) for value in frequencies)


def layer_of(state: State, geometry: Geometry, index: int) -> Layer:
    """Layer `index` of the model, fused; tensors keep the state's dtype."""
    prefix = f"model.layers.{index}."

    def join(*names: str) -> Tensor:
        parts = [_take(state, f"{prefix}{name}") for name in names]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    layer = {
        "qkv": join(*(f"{name}.weight" for name in attention)),
        "out": join("self_attn.o_proj.weight"),
        "gate_up": join("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "down": join("mlp.down_proj.weight"),
        "attention_norm": join("input_layernorm.weight"),
        "mlp_norm": join("post_attention_layernorm.weight"),
    }
    if "qkv_bias" in geometry.vectors:
        layer["qkv_bias"] = join(*(f"{name}.bias" for name in attention))
    if "q_norm" in geometry.vectors:
        layer["q_norm"] = join("self_attn.q_norm.weight")
        layer["k_norm"] = join("self_attn.k_norm.weight")
    for name, tensor in layer.items():
        if tuple(tensor.shape) != geometry.shape(name):
            raise UnsupportedModelError(
                f"layer {index}: {name} is {tuple(tensor.shape)}, not {geometry.shape(name)}"
            )
    return layer


def embedding_of(state: State) -> Tensor:
    """[vocab, hidden]."""
    return _take(state, EMBEDDING)


def head_of(state: State) -> Tensor:
    """[vocab, hidden]; the embedding where the two are tied."""
    return state[HEAD] if HEAD in state else _take(state, EMBEDDING)


def target_fingerprint(state: State, geometry: Geometry) -> str:
    """Content hash of a target, hex: equal for the same weights in float32 and in bfloat16.

    Covers the geometry, every norm, and a few rows of the embedding and of every matrix, in
    bfloat16: any training of the model shows there, and it takes milliseconds.
    """
    digest = hashlib.sha256()
    facts = {name: getattr(geometry, name) for name in Geometry.__dataclass_fields__}
    facts.pop("context")  # a limit, not a weight
    digest.update(json.dumps(facts, sort_keys=True).encode())
    tensors = [embedding_of(state)[: 16 * _SAMPLE_ROWS], _take(state, FINAL_NORM)]
    for index in range(geometry.layers):
        prefix = f"model.layers.{index}."
        tensors += [
            _take(state, f"{prefix}{name}.weight")[:_SAMPLE_ROWS]
            for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
        ]
        tensors += [
            _take(state, f"{prefix}{name}.weight")
            for name in ("input_layernorm", "post_attention_layernorm")
        ]
    for tensor in tensors:
        digest.update(tensor.to(torch.bfloat16).contiguous().cpu().view(torch.uint8).numpy())
    return digest.hexdigest()


def _take(state: State, name: str) -> Tensor:
    try:
        return state[name]
    except KeyError:
        raise UnsupportedModelError(f"the model has no tensor {name!r}") from None
