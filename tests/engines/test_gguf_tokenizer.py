"""A GGUF's own tokenizer against the one of the checkpoint it was made from."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

import tiny
import tinygguf
from outrider.engines import builtin
from outrider.engines.base import EngineError, UnsupportedModelError
from outrider.engines.gguf_tokenizer import GGUFTokenizer
from outrider.engines.llama_native import NativeModel
from outrider.engines.tokenizer import HFTokenizer, check_same_vocabulary
from words import trained

KINDS = pytest.mark.parametrize("style", ["byte-level", "sentencepiece"])
TEXTS = [
    "the quick brown fox",
    "héllo 😀👩‍👩‍👧 歪 — end",
    " leading and trailing ",
    "tabs\tand\nlines\r\n",
    "    four spaces",
    "def f(x):\n    return x ** 2",
    "a\0b",
    "",
]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if message.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}\n"
    "{{ message.role }}: {{ message.content }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def both(tmp_path: Path, style: str, **changes: Any) -> tuple[GGUFTokenizer, HFTokenizer]:
    words = trained(style)
    model = tiny.llama(**tinygguf.WIDE, vocab_size=len(words) + 20)
    path = tinygguf.write(tmp_path / "words.gguf", model, words=words, **changes)
    if changes:
        words.chat_template = TEMPLATE
    return GGUFTokenizer(NativeModel(path, vocabulary_only=True)), HFTokenizer(words)


@KINDS
def test_one_vocabulary_with_the_checkpoint(style: str, tmp_path: Path) -> None:
    """Ids to bytes, control tokens, ends: of the same fingerprint; rows that only pad are none."""
    ours, theirs = both(tmp_path, style)
    check_same_vocabulary(theirs, ours)
    assert ours.fingerprint == theirs.fingerprint
    assert ours.vocab_size == theirs.vocab_size
    assert ours.special_ids == theirs.special_ids == {0, 1, 2}
    assert ours.eos_token_ids == theirs.eos_token_ids == {1}


@KINDS
@pytest.mark.parametrize("text", TEXTS)
def test_texts_come_back(style: str, text: str, tmp_path: Path) -> None:
    ours, theirs = both(tmp_path, style)
    ids = ours.encode(text)
    if style == "byte-level":
        assert ids == theirs.encode(text)
    assert theirs.decode(ids) == ours.decode(ids) == text


@KINDS
def test_chat_templates(style: str, tmp_path: Path) -> None:
    template = {"tokenizer__chat_template": ("add_string", TEMPLATE)}
    ours, theirs = both(tmp_path, style, **template)
    messages = [{"role": "user", "content": "the fox </s> {{ 7 }}"}]
    ids = ours.chat(messages)
    assert ours.token_bytes(ids[0]) == b"<s>"
    assert ids.count(0) == 1, "the template writes the start token, nobody adds a second one"
    if style == "byte-level":
        assert ids == theirs.chat(messages)
    with pytest.raises(EngineError, match="chat template refused the messages: no such role"):
        ours.chat([{"role": "bad", "content": "x"}])


def test_a_template_cannot_reach_python(tmp_path: Path) -> None:
    """It comes with a file from anywhere."""
    reach = "{{ messages.__class__.__mro__ }}"
    ours, _ = both(tmp_path, "byte-level", tokenizer__chat_template=("add_string", reach))
    with pytest.raises(EngineError, match="unsafe"):
        ours.chat([])


def test_no_template_is_said(tmp_path: Path) -> None:
    ours, _ = both(tmp_path, "byte-level")
    with pytest.raises(EngineError, match="no chat template"):
        ours.chat([{"role": "user", "content": "x"}])


def test_other_kinds_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tinygguf.write(tmp_path / "words.gguf", tiny.llama(**tinygguf.WIDE))
    model = NativeModel(path, vocabulary_only=True)
    said = model.text
    monkeypatch.setattr(
        model, "text", lambda key: "t5" if key == "tokenizer.ggml.model" else said(key)
    )
    with pytest.raises(UnsupportedModelError, match="tokenizer 't5' is not supported"):
        GGUFTokenizer(model)


# --- the built-in target -----------------------------------------------------------------


@functools.cache
def pair() -> tuple[GGUFTokenizer, HFTokenizer]:
    path = builtin.find_gguf()
    if path is None:
        pytest.skip("the built-in weights are not here: outrider pull")
    return GGUFTokenizer(NativeModel(path, vocabulary_only=True)), builtin.load_tokenizer()


@pytest.mark.model
def test_the_built_in_target_has_one_fingerprint_on_both_engines() -> None:
    ours, theirs = pair()
    assert ours.fingerprint == theirs.fingerprint
    assert ours.eos_token_ids == theirs.eos_token_ids
    assert ours.special_ids == theirs.special_ids


@pytest.mark.model
@pytest.mark.parametrize(
    "text",
    [
        *TEXTS,
        "Hello 123 wörld — 日本語\n\n  x=1234567",
        "in the     2018 and 3.14159",  # blanks before a digit: single digits since training
        "<|im_start|>user\nhi<|im_end|>\n",
        "I'm you'RE __init__ e\u0301",
    ],
)
def test_the_built_in_target_has_one_encoding(text: str) -> None:
    ours, theirs = pair()
    assert ours.encode(text) == theirs.encode(text)
    messages = [{"role": "user", "content": text}]
    assert ours.chat(messages) == theirs.chat(messages)
