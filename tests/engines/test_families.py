"""Families by their own configs, from a folder as published: one vocabulary, one text (I1)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from outrider.core.tokens import Rule, SamplingParams
from outrider.engines.base import UnsupportedModelError
from outrider.engines.load import load_drafter, load_target, load_vocabulary
from outrider.runtime.local import GenerationRequest, LocalGenerator
from tiny import feed, full_rows
from words import trained

ROPE_OF_LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, Callable[..., Any]] = {
    "llama-3": functools.partial(tiny.llama, rope_parameters=ROPE_OF_LLAMA_3),
    "qwen-2": tiny.qwen2,
    "qwen-3": tiny.qwen3,
}
FAMILY = pytest.mark.parametrize("family", sorted(FAMILIES))
PARAMS = SamplingParams(seed=5, max_tokens=16, temperature=0.9, ignore_eos=True)


def folder(path: Path, family: str, *, padding: int, **changes: Any) -> str:
    """A checkpoint whose output is `padding` columns wider than its tokenizer."""
    words = trained("byte-level")
    FAMILIES[family](vocab_size=len(words) + padding, **changes).save_pretrained(path)
    words.save_pretrained(path)
    return str(path)


@FAMILY
def test_widths_may_differ_where_the_vocabulary_is_one(family: str, tmp_path: Path) -> None:
    """As Qwen2.5's sizes do: columns that only pad are no tokens."""
    target = load_target(folder(tmp_path / "big", family, padding=64), threads=1)
    draft_path = folder(tmp_path / "small", family, padding=20, num_hidden_layers=1)
    draft = load_target(draft_path, threads=1)
    one, other = target.model.info, draft.model.info
    assert (
        one.fingerprint == other.fingerprint == load_vocabulary(draft_path).model.info.fingerprint
    )
    assert one.vocab_size == other.vocab_size == target.tokenizer.vocab_size
    assert one.logits_width == other.logits_width + 44 > one.vocab_size + 44


@FAMILY
@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.RATIO])
def test_the_same_text_with_any_draft(family: str, rule: Rule, tmp_path: Path) -> None:
    target = load_target(folder(tmp_path / "big", family, padding=64), threads=1, max_slots=4)
    small = folder(tmp_path / "small", family, padding=20, num_hidden_layers=1)
    prompt = tuple(target.tokenizer.encode("the quick brown fox"))

    def ids(draft: str, k: int) -> tuple[int, ...]:
        made = LocalGenerator(
            target.model, target.tokenizer, load_drafter(draft, target, threads=1)
        )
        request = GenerationRequest(prompt_ids=prompt, params=PARAMS, draft_length=k, rule=rule)
        try:
            return made.generate(request).token_ids
        finally:
            made.close()

    alone = ids("none", 0)
    assert len(alone) == PARAMS.max_tokens
    assert max(alone) < target.tokenizer.vocab_size, "no column that only pads"
    if rule is Rule.COUPLED:
        assert [ids(draft, k) for draft in (small, "lookup") for k in (1, 4, 7)] == [alone] * 6
    else:  # its promise is the law, not the ids; what it must not do is leave the vocabulary
        assert max(ids(small, 4)) < target.tokenizer.vocab_size


@FAMILY
def test_rollback_beyond_what_the_rope_was_trained_for(family: str, tmp_path: Path) -> None:
    loaded = load_target(folder(tmp_path / "big", family, padding=64), threads=1)
    ids = [i * 7 % 60 for i in range(150)]
    slot = loaded.model.open()
    feed(loaded.model, slot, [*ids[:100], 1, 2, 3])
    loaded.model.truncate(slot, 90)
    rows = feed(loaded.model, slot, ids[90:])
    plain = FAMILIES[family](vocab_size=loaded.model.info.logits_width)
    expected = full_rows(plain, ids)[90:, : loaded.model.info.vocab_size]
    np.testing.assert_allclose(rows, expected, rtol=2e-4, atol=2e-4)


def test_gemma_2_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    """Its windows slide, and what has left one cannot be rolled back to."""
    import transformers

    config = transformers.Gemma2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, head_dim=8, sliding_window=16
    )
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="sliding-window"):
        load_target(str(tmp_path), threads=1)
