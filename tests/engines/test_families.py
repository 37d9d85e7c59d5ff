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
from outrider.engines.base import IncompatibleModelsError, UnsupportedModelError
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
    "r1-distill-qwen": functools.partial(tiny.qwen2, tie_word_embeddings=False),
    "r1-distill-llama": functools.partial(tiny.llama, rope_parameters=ROPE_OF_LLAMA_3),
}
FAMILY = pytest.mark.parametrize("family", sorted(FAMILIES))
PARAMS = SamplingParams(seed=5, max_tokens=16, temperature=0.9, ignore_eos=True)


R1_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ m['content'] }}"
    "{% elif m['role'] == 'user' %}<｜User｜>{{ m['content'] }}"
    "{% else %}<｜Assistant｜>{{ m['content'].split('</think>')[-1] }}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"
)
"""As DeepSeek-R1-Distill has it: the start token is the template's, what was thought in earlier
turns is left out, and the answer begins inside a thought."""


def r1_words() -> Any:
    """A tokenizer with the marks of DeepSeek-R1-Distill: written as text, none is a control token
    but those that begin and end."""
    from tokenizers import AddedToken

    words = trained("byte-level")
    words.add_tokens(
        [
            AddedToken(mark, special=False, normalized=False)
            for mark in ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")
        ]
    )
    words.chat_template = R1_TEMPLATE
    return words


def folder(path: Path, family: str, *, padding: int, **changes: Any) -> str:
    """A checkpoint whose output is `padding` columns wider than its tokenizer."""
    words = r1_words() if family.startswith("r1") else trained("byte-level")
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


@pytest.mark.parametrize("family", ["r1-distill-qwen", "r1-distill-llama"])
def test_an_answer_of_r1_begins_inside_a_thought(family: str, tmp_path: Path) -> None:
    path = folder(tmp_path, family, padding=64)
    tokenizer = load_vocabulary(path).tokenizer

    def id_of(mark: str) -> int:
        (found,) = [
            i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == mark.encode()
        ]
        return found

    think, over, start = id_of("<think>"), id_of("</think>"), id_of("<s>")
    asked = [
        {"role": "user", "content": "the dog"},
        {"role": "assistant", "content": "<think>\nquick</think>the fox"},
        {"role": "user", "content": "lazy"},
    ]
    ids = tokenizer.chat(asked)
    assert ids.count(start) == 1, "the template writes it, nobody adds a second"
    assert ids[0] == start
    assert (ids.count(think), ids.count(over)) == (1, 0), "earlier thoughts are left out"
    assert ids[ids.index(think) - 1] == id_of("<｜Assistant｜>")
    assert tokenizer.decode(ids[ids.index(think) :]) == "<think>\n", "the prompt ends with it"
    assert "quick" not in tokenizer.decode(ids)
    # The end of the thought is text of the answer: who reads it needs the mark.
    answer = [*tokenizer.encode("fox")[-1:], over, *tokenizer.encode("dog")[-1:]]
    stream = tokenizer.text_stream()
    shown = "".join([*map(stream.push, answer), stream.flush()])
    assert shown == tokenizer.decode(answer)
    assert "</think>" in shown
    assert not {think, over} & tokenizer.special_ids


def test_r1_distill_and_the_family_it_came_from_differ(tmp_path: Path) -> None:
    """One kind of model, other tokens: a draft of the plain family is refused, by the first id."""
    target = load_target(folder(tmp_path / "r1", "r1-distill-qwen", padding=64), threads=1)
    plain = folder(tmp_path / "plain", "qwen-2", padding=64)
    with pytest.raises(IncompatibleModelsError, match="use a draft with the target's tokenizer"):
        load_drafter(plain, target, threads=1)


def test_gemma_2_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    """Its windows slide, and what has left one cannot be rolled back to."""
    import transformers

    config = transformers.Gemma2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, head_dim=8, sliding_window=16
    )
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"sliding-window.*GGUF.*full attention"):
        load_target(str(tmp_path), threads=1)
