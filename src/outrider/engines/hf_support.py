"""Which transformers models the hf engine may run, and what their cache looks like.

A target must be able to forget: after a rejection the cache has to be exactly what it was
before the rejected tokens. Full attention can (drop the rows). A sliding window cannot once it
has slid, recurrent state never can. Judged by the cache layers transformers itself would
create for the config, by the class's own flags, and by one probing forward: names of families
are not looked at.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from outrider.engines.base import UnsupportedModelError
from outrider.engines.hf_config import number
from outrider.engines.slots import LayerShape

_EXPERT_COUNTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PROBE_TOKENS: Final = 7
_AGREEMENT: Final = 0.95


def require_supported(config: Any, kind: type, *, deterministic: bool) -> None:
    """Raise UnsupportedModelError with the reason if a model of class `kind` with this config
    cannot be used exactly. Needs no weights, so it can be asked before they are loaded."""
    encoder_decoder = config.is_encoder_decoder
    config = config.get_text_config(decoder=True)
    family = f"model type {config.model_type!r}"
    if encoder_decoder:
        raise UnsupportedModelError(f"{family} is an encoder-decoder; decoder-only is needed")
    if getattr(kind, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{family} keeps recurrent state, which cannot be rolled back after a rejection"
        )
    if not getattr(kind, "_supports_attention_backend", False):
        raise UnsupportedModelError(f"{family} does not let its attention function be chosen")
    _require_full_attention(config, family)
    if not getattr(config, "is_causal", True):
        raise UnsupportedModelError(f"{family} attends in both directions")
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise UnsupportedModelError(f"{family} caps its attention logits (softcapping)")
    if deterministic and any(number(config, name) > 1 for name in _EXPERT_COUNTS):
        raise UnsupportedModelError(
            f"{family} routes tokens to experts, so the bits of a row depend on its neighbours; "
            "load it with deterministic off"
        )


def _require_full_attention(config: Any, family: str) -> None:
    try:
        layers = DynamicCache(config=config).layers
    except (KeyError, AttributeError, TypeError) as error:
        raise UnsupportedModelError(f"{family} has no usable key/value cache") from error
    for index, layer in enumerate(layers):
        if getattr(layer, "is_sliding", False):
            raise UnsupportedModelError(
                f"{family} has sliding-window attention (layer {index}, window "
                f"{getattr(layer, 'sliding_window', '?')}): what has left the window cannot be "
                "rolled back to; a GGUF file of it on llama.cpp keeps every position, or take a "
                "model with full attention"
            )
        if type(layer) is not DynamicLayer:
            raise UnsupportedModelError(
                f"{family} has a {type(layer).__name__} cache (layer {index}), which cannot be "
                "rolled back after a rejection"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What a few tokens through the stock model, without our code, have shown."""

    ids: tuple[int, ...]
    shapes: tuple[LayerShape, ...]
    """Cache shape of every layer."""
    logits: Tensor
    """float32 [logits_width], of the last token."""

    def agrees(self, logits: Tensor) -> bool:
        """Whether the same tokens through our cache and attention came to the same row, up
        to rounding: correlation, because bf16 moves single logits by several percent."""
        pair = torch.stack([self.logits[: len(logits)], logits])
        return bool(torch.corrcoef(pair.double())[0, 1] > _AGREEMENT)


def probe(model: Any) -> Probe:
    """Run a few tokens through the stock model and look at logits and cache."""
    model.set_attn_implementation("eager")
    cache = DynamicCache()
    width = int(model.get_input_embeddings().weight.shape[0])
    # Spread over the vocabulary: the first ids are control tokens, whose logits are erratic.
    ids = tuple(width * (2 * i + 1) // (2 * _PROBE_TOKENS) for i in range(_PROBE_TOKENS))
    inputs = torch.tensor([ids], device=model.device)
    with torch.inference_mode():
        result = model(input_ids=inputs, use_cache=True, **{cache_keyword(model): cache})
    shapes: list[LayerShape] = []
    for index, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer or layer.keys is None or layer.values is None:
            raise UnsupportedModelError(f"layer {index} keeps no keys and values of its own")
        shapes.append(
            LayerShape(
                heads=layer.keys.shape[1],
                key_dim=layer.keys.shape[-1],
                value_dim=layer.values.shape[-1],
            )
        )
    if not shapes:
        raise UnsupportedModelError("the model does not use the cache it is given")
    return Probe(ids=ids, shapes=tuple(shapes), logits=result.logits[0, -1].float().cpu())


def cache_keyword(model: Any) -> str:
    """Name of the forward argument that takes the cache (renamed in transformers 5)."""
    names = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in names else "past_key_values"
