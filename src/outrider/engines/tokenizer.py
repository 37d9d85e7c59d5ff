"""Text to ids and back: chat template, text that streams, fingerprint. No torch here.

Everything that turns ids into text rests on one table, id -> bytes. `decode` joins the bytes
and reads them as UTF-8; a `TextStream` does the same with an incremental decoder. So the
joined pieces of a stream equal the decode of all ids at once by construction, no piece ends
inside a character, and a token costs O(1), whatever the ids.

The fingerprint is a hash of that table and of which ids are special: two tokenizers that
write the same bytes for the same ids speak one vocabulary, whatever they are called.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

from outrider.engines.base import EngineError, IncompatibleModelsError

Message = Mapping[str, str]
"""One chat message: keys 'role' and 'content'."""

_BLANK: Final = "\u2581"
"""SentencePiece writes a blank as this character."""


class TextStream:
    """Text of a growing sequence of ids, given out as soon as no later id can change it."""

    def __init__(
        self, table: Sequence[bytes], *, hidden: frozenset[int], strip_blank: bool
    ) -> None:
        self._table = table
        self._hidden = hidden
        self._strip = strip_blank
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that this id completes; "" while a character is unfinished."""
        if not 0 <= token < len(self._table) or token in self._hidden:
            return ""
        return self._first_cut(self._decoder.decode(self._table[token]))

    def flush(self) -> str:
        """End of the sequence: what is still held. An unfinished character is U+FFFD, as in
        `decode`."""
        return self._first_cut(self._decoder.decode(b"", final=True))

    def _first_cut(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class Tokenizer(Protocol):
    """What the gateway and the sessions need to know of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Largest id + 1."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens: never part of the text."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation up to where the assistant's answer begins."""
        ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes an id stands for; b"" for ids outside the vocabulary. Control tokens
        give the name they are written with."""
        ...

    def text_stream(self) -> TextStream: ...


class TableTokenizer:
    """The half of a tokenizer that follows from its table: ids to text, fingerprint."""

    def __init__(
        self,
        table: Sequence[bytes],
        *,
        special_ids: Collection[int],
        eos_token_ids: Collection[int],
        strip_blank: bool = False,
    ) -> None:
        self._table = tuple(table)
        self._special = frozenset(special_ids)
        self._eos = frozenset(eos_token_ids)
        self._strip_blank = strip_blank
        self._fingerprint = fingerprint(self._table, self._special)

    @property
    def vocab_size(self) -> int:
        return len(self._table)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def token_bytes(self, token: int) -> bytes:
        return self._table[token] if 0 <= token < len(self._table) else b""

    def decode(self, ids: Iterable[int]) -> str:
        stream = self.text_stream()
        return "".join([*map(stream.push, ids), stream.flush()])

    def text_stream(self) -> TextStream:
        return TextStream(self._table, hidden=self._special, strip_blank=self._strip_blank)


class ByteTokenizer(TableTokenizer):
    """Ids 0-255 are bytes, 256 ends the text. For toy models and tests.

    `table` gives further ids, or other bytes to existing ones, so that a test can have tokens
    such as "\\nUs". Text is encoded greedily, longest entry first.
    """

    END: Final = 256

    def __init__(self, table: Mapping[int, bytes] | None = None) -> None:
        entries = {i: bytes([i]) for i in range(256)} | {self.END: b"<end>"} | dict(table or {})
        if self.END in (table or {}):
            raise ValueError(f"id {self.END} is the end token and cannot be renamed")
        rows = [entries.get(i, b"") for i in range(max(entries) + 1)]
        super().__init__(rows, special_ids={self.END}, eos_token_ids={self.END})
        self._ids = {entry: i for i, entry in reversed(entries.items()) if i != self.END}
        self._longest = max(map(len, self._ids))

    def encode(self, text: str) -> list[int]:
        data = text.encode()
        ids: list[int] = []
        at = 0
        while at < len(data):
            piece = next(
                data[at : at + size]
                for size in range(min(self._longest, len(data) - at), 0, -1)
                if data[at : at + size] in self._ids or size == 1
            )
            if piece not in self._ids:
                raise EngineError(f"byte {piece[0]} has no id in this table")
            ids.append(self._ids[piece])
            at += len(piece)
        return ids

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """A fixed, plain template: "role: content" lines, then "assistant: "."""
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join([*lines, "assistant: "]))


class HFTokenizer(TableTokenizer):
    """A transformers tokenizer."""

    def __init__(self, tokenizer: Any, *, eos_token_ids: Collection[int] | None = None) -> None:
        """`tokenizer`: a PreTrainedTokenizerBase. `eos_token_ids`: the model's end ids where
        its generation config names others than the tokenizer."""
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        ends = set(eos_token_ids or ())
        if not ends and tokenizer.eos_token_id is not None:
            ends = {int(tokenizer.eos_token_id)}
        super().__init__(
            _byte_table(tokenizer),
            special_ids={i for i, token in added.items() if token.special},
            eos_token_ids=ends,
            strip_blank=_strips_blank(tokenizer),
        )

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt, with the model's own start token where it has one."""
        return [int(token) for token in self._tokenizer.encode(text)]

    def chat(self, messages: Sequence[Message]) -> list[int]:
        if not self._tokenizer.chat_template:
            raise EngineError(
                "this model has no chat template; send a plain prompt instead of messages"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as error:  # templates are programs of the model's author
            raise EngineError(f"the model's chat template refused the messages: {error}") from error
        # The template writes the start token itself.
        return [int(i) for i in self._tokenizer.encode(text, add_special_tokens=False)]


def fingerprint(table: Sequence[bytes], special_ids: Collection[int]) -> str:
    """sha256 (hex) over the vocabulary: size, bytes of each id, special ids.

    Integers are 4 bytes, little-endian; every byte string is preceded by its length."""
    digest = hashlib.sha256(b"outrider-vocabulary-1")
    digest.update(len(table).to_bytes(4, "little"))
    for entry in table:
        digest.update(len(entry).to_bytes(4, "little"))
        digest.update(entry)
    for token in sorted(special_ids):
        digest.update(token.to_bytes(4, "little"))
    return digest.hexdigest()


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """Raise IncompatibleModelsError, naming the first id that differs."""
    if target.fingerprint == draft.fingerprint:
        return
    for token in range(min(target.vocab_size, draft.vocab_size)):
        ours, theirs = target.token_bytes(token), draft.token_bytes(token)
        if ours != theirs:
            raise IncompatibleModelsError(
                f"draft and target differ at id {token}: the target writes {ours!r}, the draft "
                f"{theirs!r}; use a draft with the target's tokenizer"
            )
    if target.vocab_size != draft.vocab_size:
        raise IncompatibleModelsError(
            f"the target's tokenizer has {target.vocab_size} ids, the draft's "
            f"{draft.vocab_size}; use a draft with the target's tokenizer"
        )
    token = min(target.special_ids ^ draft.special_ids)
    raise IncompatibleModelsError(
        f"draft and target differ at id {token}: a control token for one, text for the other"
    )


def _byte_table(tokenizer: Any) -> list[bytes]:
    """Bytes of every id, by the rules of the tokenizer's own decoder."""
    added = {i: token.content.encode() for i, token in tokenizer.added_tokens_decoder.items()}
    size = max([len(tokenizer), *(i + 1 for i in added)])
    pieces: list[str | None] = list(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
    pieces += [None] * (size - len(pieces))
    kinds = _decoder_kinds(tokenizer)
    if "ByteLevel" in kinds:
        letters = byte_letters()
        plain = [from_letters(piece or "", letters) for piece in pieces]
    elif kinds & {"ByteFallback", "Metaspace", "Replace"}:
        plain = [from_sentencepiece(piece or "") for piece in pieces]
    else:
        plain = _by_asking(tokenizer, size)
    return [added.get(i, entry) for i, entry in enumerate(plain)]


def _decoder_steps(tokenizer: Any) -> list[dict[str, Any]]:
    """The decoder of a fast tokenizer as a list of steps; empty where there is none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    if decoder is None:
        return []
    # The library shows a decoder's settings only in its pickled state, which is JSON.
    state = json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = state.get("decoders") or [state]
    return steps


def _decoder_kinds(tokenizer: Any) -> set[str]:
    return {str(step["type"]) for step in _decoder_steps(tokenizer)}


def _strips_blank(tokenizer: Any) -> bool:
    """Whether the text of a whole sequence loses one leading blank (SentencePiece's dummy
    prefix)."""
    for step in _decoder_steps(tokenizer):
        if step["type"] == "Strip" and step.get("content") == " " and step.get("start"):
            return True
        if step["type"] == "Metaspace" and step.get("prepend_scheme") != "never":
            return True
    return False


def byte_letters() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the rest are moved up."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in shown}
    moved = [byte for byte in range(256) if chr(byte) not in letters]
    return letters | {chr(256 + i): byte for i, byte in enumerate(moved)}


def from_letters(piece: str, letters: Mapping[str, int]) -> bytes:
    try:
        return bytes([letters[letter] for letter in piece])
    except KeyError:  # not written in the alphabet: the decoder takes such a piece as it is
        return piece.encode()


def from_sentencepiece(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(_BLANK, " ").encode()


def _by_asking(tokenizer: Any, size: int) -> list[bytes]:
    """For other decoders: what an id adds to the text of an ordinary one before it."""
    anchor = next((i for i in range(size) if tokenizer.decode([i]).strip()), 0)
    before = tokenizer.decode([anchor])
    return [tokenizer.decode([anchor, i]).removeprefix(before).encode() for i in range(size)]
