"""Tiny random models of four families, made on the spot, and what they should answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

torch = pytest.importorskip("torch", reason="the torch extra is not installed")
pytest.importorskip("transformers", reason="the torch extra is not installed")

from transformers import (  # noqa: E402
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from outrider.engines.base import Block, LanguageModel  # noqa: E402

FloatRows = npt.NDArray[np.float32]
CONTEXT = 200
"""Not a power of two, and beyond two bucket borders (64 and 128)."""

_COMMON = {
    "num_hidden_layers": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.25,  # wide, so that rows differ and errors show
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def llama(**changes: Any) -> Any:
    """Grouped heads (3 queries a key head), an odd vocabulary, a head of its own."""
    settings = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    }
    return _made(LlamaForCausalLM, LlamaConfig(**(_COMMON | settings | changes)))


def qwen2(**changes: Any) -> Any:
    """Biased projections, tied head, a padded vocabulary (300 for 290 ids)."""
    settings = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }
    return _made(Qwen2ForCausalLM, Qwen2Config(**(_COMMON | settings | changes)))


def qwen3(**changes: Any) -> Any:
    """Normalised queries and keys, heads wider than hidden / heads, no grouping."""
    settings = {
        "vocab_size": 64,
        "hidden_size": 40,
        "intermediate_size": 72,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "tie_word_embeddings": False,
    }
    return _made(Qwen3ForCausalLM, Qwen3Config(**(_COMMON | settings | changes)))


def gemma(**changes: Any) -> Any:
    """One key head for all, scaled embeddings, tied head."""
    settings = {
        "vocab_size": 130,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    return _made(GemmaForCausalLM, GemmaConfig(**(_COMMON | settings | changes)))


FAMILIES: dict[str, Callable[..., Any]] = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma": gemma,
}


def _made(kind: Any, config: Any) -> Any:
    """The same weights for the same arguments, whatever ran before."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return kind(config).eval()


def full_rows(model: Any, ids: Sequence[int]) -> FloatRows:
    """Rows of one plain forward without any cache, float32 [len(ids), width]."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    rows: FloatRows = logits.float().numpy()
    return rows


def feed(model: LanguageModel, slot: int, ids: Sequence[int]) -> FloatRows:
    """Append ids to a slot in one block; rows of all of them."""
    start = model.length(slot)
    return model.forward([Block(slot=slot, start=start, tokens=tuple(ids), rows=len(ids))])[0]


def fresh_rows(model: LanguageModel, ids: Sequence[int]) -> FloatRows:
    """Rows of ids in a slot of their own, one token a forward."""
    slot = model.open()
    rows = [feed(model, slot, [token])[0] for token in ids]
    model.close(slot)
    return np.array(rows)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch on `count` threads, and back."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
