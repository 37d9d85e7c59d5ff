"""Small tokenizers, trained on the spot."""

from __future__ import annotations

import json
from typing import Any

import pytest

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "héllo wörld — 歪 日本語",
    "  spaces,\ttabs\nand lines  ",
    "numbers 0123456789 and def f(x): return x",
] * 3


def trained(kind: str) -> Any:
    """A small tokenizer of one of the two usual styles, wrapped by transformers."""
    pytest.importorskip("transformers", reason="the torch extra is not installed")
    from tokenizers import (
        Tokenizer as Backend,
    )
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "</s>", "<unk>"]
    if kind == "byte-level":
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    else:
        backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace("\u2581", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=special, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    if kind == "sentencepiece":  # byte pieces are ordinary entries there, and not learned
        state = json.loads(backend.to_str())
        vocabulary = state["model"]["vocab"]
        first = max(vocabulary.values()) + 1
        vocabulary |= {f"<0x{byte:02X}>": first + byte for byte in range(256)}
        backend = Backend.from_str(json.dumps(state))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.add_tokens(["<plain added>"])
    return tokenizer
