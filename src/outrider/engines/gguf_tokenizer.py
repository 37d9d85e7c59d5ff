"""The tokenizer inside a GGUF file: no torch, no transformers.

Text to ids is llama.cpp's, which has the splitting rules of each family. Ids to text, control
tokens and fingerprint follow from the file's token list by the rules of `tokenizer.py`, so a GGUF
and the checkpoint it was made from speak one vocabulary (tests/engines/test_gguf_tokenizer.py).
Rows that only pad the output (marked unused at the end of the list) are no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import llama_cpp as api

from outrider.engines.base import EngineError, UnsupportedModelError
from outrider.engines.llama_native import NativeModel
from outrider.engines.tokenizer import (
    Message,
    TableTokenizer,
    byte_letters,
    from_letters,
    from_sentencepiece,
)

_END_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
_STYLES: Final = ("gpt2", "llama")
"""Byte-level and SentencePiece; the others (`tokenizer.ggml.model`) belong to encoders."""
_CONTROL: Final = api.LLAMA_TOKEN_ATTR_CONTROL | api.LLAMA_TOKEN_ATTR_UNKNOWN
_WHOLE: Final = _CONTROL | api.LLAMA_TOKEN_ATTR_USER_DEFINED
"""Stored as they are written, not in the alphabet of the others."""


class GGUFTokenizer(TableTokenizer):
    """A tokenizer out of a file that llama.cpp has opened."""

    def __init__(self, model: NativeModel) -> None:
        """UnsupportedModelError: a kind of tokenizer that no decoder-only model has."""
        self._model = model
        style = model.text("tokenizer.ggml.model")
        if style not in _STYLES:
            raise UnsupportedModelError(f"{model.path}: tokenizer {style!r} is not supported")
        attributes = [api.llama_vocab_get_attr(model.vocabulary, i) for i in range(model.width)]
        while attributes and attributes[-1] & api.LLAMA_TOKEN_ATTR_UNUSED:
            attributes.pop()
        blank = model.text("tokenizer.ggml.add_space_prefix")
        super().__init__(
            _table(model, attributes, style),
            special_ids={i for i, attribute in enumerate(attributes) if attribute & _CONTROL},
            eos_token_ids=_ends(model),
            strip_blank=style == "llama" and blank != "false",
        )
        self._template = model.text("tokenizer.chat_template")

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt, with the model's own start token where it has one."""
        return self._model.tokenize(text, add_special=True)

    def chat(self, messages: Sequence[Message]) -> list[int]:
        if not self._template:
            raise EngineError(
                "this model has no chat template; send a plain prompt instead of messages"
            )
        text = _render(self._template, messages, self._names())
        # The template writes the start token itself.
        return self._model.tokenize(text, add_special=False)

    def _names(self) -> dict[str, str]:
        """What templates call bos_token and eos_token."""
        found = {}
        for name in ("bos", "eos"):
            token = self._model.text(f"tokenizer.ggml.{name}_token_id")
            if token is not None:
                found[f"{name}_token"] = self.token_bytes(int(token)).decode("utf-8", "replace")
        return found


def _table(model: NativeModel, attributes: Sequence[int], style: str) -> list[bytes]:
    """Bytes of every id."""
    letters = byte_letters()
    table = []
    for token, attribute in enumerate(attributes):
        piece = api.llama_vocab_get_text(model.vocabulary, token).decode("utf-8", "replace")
        if attribute & api.LLAMA_TOKEN_ATTR_UNUSED:
            table.append(b"")
        elif attribute & _WHOLE:
            table.append(piece.encode())
        elif style == "llama":
            table.append(from_sentencepiece(piece))
        else:
            table.append(from_letters(piece, letters))
    return table


def _ends(model: NativeModel) -> set[int]:
    """Ids that end a text, as the file lists them.

    llama.cpp itself also takes tokens that look like an end; checkpoints do not, and edge and
    cloud must end an answer at the same token."""
    found = [model.text(f"tokenizer.ggml.{key}") for key in _END_KEYS]
    return {int(token) for token in found if token is not None}


def _render(template: str, messages: Sequence[Message], names: dict[str, str]) -> str:
    """The conversation as text, in the dialect that chat templates are written in."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(reason: str) -> None:
        raise TemplateError(reason)

    world = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    world.globals["raise_exception"] = refuse
    given: dict[str, Any] = {
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": True,
        **names,
    }
    try:
        return world.from_string(template).render(given)
    except Exception as error:  # templates are programs of the model's author
        raise EngineError(f"the model's chat template refused the messages: {error}") from error
