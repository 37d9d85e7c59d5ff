"""What loading a model takes and gives, and the checks that every backend begins with."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Final

from outrider.engines.absent import AbsentModel
from outrider.engines.base import LanguageModel, MissingExtraError, ModelInfo
from outrider.engines.tokenizer import Tokenizer

GGUF_MODULES: Final = {"llama_cpp": "llama-cpp-python", "jinja2": "jinja2"}
"""Modules of the llamacpp extra, and the distributions that bring them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A target with the tokenizer it speaks."""

    model: LanguageModel
    tokenizer: Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """How a model is to be run."""

    dtype: str
    device: str
    deterministic: bool
    threads: int | None
    max_slots: int
    rows: int | None
    context_length: int | None


def installed(*modules: str) -> bool:
    """Looks for them without importing them."""
    return all(importlib.util.find_spec(name) is not None for name in modules)


def require(*modules: str, extra: str = "torch") -> None:
    """MissingExtraError, with the command that helps, unless all modules are installed."""
    missing = [name for name in modules if not installed(name)]
    if missing:
        names = ", ".join(GGUF_MODULES.get(name, name) for name in missing)
        raise MissingExtraError(f"{names} not installed; run: pip install 'outrider[{extra}]'")


def absent(spec: str, tokenizer: Tokenizer, *, width: int, context: int) -> Loaded:
    """A tokenizer and the facts of a model that runs elsewhere. `width`: of its rows, in ids;
    `context`: in tokens."""
    info = ModelInfo(
        name=spec,
        vocab_size=tokenizer.vocab_size,
        logits_width=width,
        context_length=context,
        fingerprint=tokenizer.fingerprint,
        dtype="none",
        eos_token_ids=tokenizer.eos_token_ids,
    )
    return Loaded(model=AbsentModel(info), tokenizer=tokenizer)
