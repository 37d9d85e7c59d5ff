"""What an answer looks like on the wire of either endpoint: chunks of a stream, or one object.

Rules of a stream (field cases 20, 21):

* One `id`, `created` and `model` in all chunks of a request.
* Of each choice: one chunk that opens it, its deltas, one chunk with its only `finish_reason`;
  until then that is null.
* A usage chunk, with no choices in it, only where it was asked for, last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from outrider.core.tokens import TokenLogprob
from outrider.engines.tokenizer import Tokenizer
from outrider.gateway.calls import CallReader
from outrider.runtime.edgestream import EdgeResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What all chunks of a response have in common."""

    id: str
    created: int
    """Unix seconds."""
    model: str
    fingerprint: str


class Shape(Protocol):
    """An endpoint's own parts; dictionaries as they are sent."""

    prefix: str
    """Of response ids."""
    whole_object: str
    chunk_object: str
    scores_end: bool
    """The token that ends the text has a log-probability like any other: who sums those of a text
    by their places counts on it."""

    def opening(self, index: int, /) -> dict[str, Any] | None:
        """The choice of its first chunk; None: it has none of its own."""
        ...

    def delta(self, index: int, text: str, logprobs: Any) -> dict[str, Any]: ...

    def closing(self, index: int, reason: str) -> dict[str, Any]: ...

    def whole(self, index: int, text: str, logprobs: Any, reason: str) -> dict[str, Any]: ...

    def logprobs(self, index: int, entries: Sequence[TokenLogprob], /) -> Any:
        """Further entries of a choice."""
        ...


def _name(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.token_bytes(token).decode("utf-8", errors="replace")


@dataclass(slots=True)
class ChatShape:
    """/v1/chat/completions"""

    tokenizer: Tokenizer
    calls: str | None = None
    """The answers may call tools; the calls' ids begin like this."""
    prefix: str = "chatcmpl-"
    whole_object: str = "chat.completion"
    chunk_object: str = "chat.completion.chunk"
    scores_end: bool = False
    _readers: dict[int, CallReader] = field(default_factory=dict)
    """By choice."""

    def opening(self, index: int) -> dict[str, Any] | None:
        content = "" if self.calls is None else None
        return _choice(index, delta={"role": "assistant", "content": content})

    def delta(self, index: int, text: str, logprobs: Any) -> dict[str, Any]:
        reader = self._reader(index)
        delta = {"content": text} if reader is None else reader.push(text)
        return _choice(index, delta=delta, logprobs=logprobs)

    def closing(self, index: int, reason: str) -> dict[str, Any]:
        reader = self._reader(index)
        return _choice(index, delta={}, finish_reason=reader.reason(reason) if reader else reason)

    def _reader(self, index: int) -> CallReader | None:
        if self.calls is None:
            return None
        return self._readers.setdefault(index, CallReader(f"{self.calls}{index}_"))

    def whole(self, index: int, text: str, logprobs: Any, reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
        reader = self._reader(index)
        if reader is not None:
            reader.push(text)
            message |= reader.message()
            reason = reader.reason(reason)
        return _choice(index, message=message, logprobs=logprobs, finish_reason=reason)

    def logprobs(self, _index: int, entries: Sequence[TokenLogprob]) -> Any:
        content = [
            {
                **self._entry(entry.token, entry.logprob),
                "top_logprobs": [self._entry(*pair) for pair in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": _name(self.tokenizer, token),
            "logprob": _finite(logprob),
            "bytes": list(self.tokenizer.token_bytes(token)),
        }


@dataclass(slots=True)
class TextShape:
    """/v1/completions"""

    tokenizer: Tokenizer
    prefix: str = "cmpl-"
    whole_object: str = "text_completion"
    chunk_object: str = "text_completion"
    scores_end: bool = True
    _offsets: dict[int, int] = field(default_factory=dict)
    """Characters of the tokens reported so far, by choice."""

    def opening(self, _index: int) -> dict[str, Any] | None:
        return None

    def delta(self, index: int, text: str, logprobs: Any) -> dict[str, Any]:
        return _choice(index, text=text, logprobs=logprobs)

    def closing(self, index: int, reason: str) -> dict[str, Any]:
        return _choice(index, text="", finish_reason=reason)

    def whole(self, index: int, text: str, logprobs: Any, reason: str) -> dict[str, Any]:
        return _choice(index, text=text, logprobs=logprobs, finish_reason=reason)

    def logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> Any:
        names = [_name(self.tokenizer, entry.token) for entry in entries]
        at = self._offsets.get(index, 0)
        offsets = []
        for name in names:
            offsets.append(at)
            at += len(name)
        self._offsets[index] = at
        return {
            "tokens": names,
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def prompt_logprobs(self, index: int, first: int, entries: Sequence[TokenLogprob]) -> Any:
        """Of an echo: nothing comes before its first id, which has no probability."""
        name = _name(self.tokenizer, first)
        self._offsets[index] = len(name)
        rest = self.logprobs(index, entries)
        head = {"tokens": name, "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
        return {key: [value, *rest[key]] for key, value in head.items()}

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens, and the chosen one among them or besides."""
        found: dict[str, float] = {}
        for token, logprob in (
            *entry.top,
            (entry.token, entry.logprob),
        ):  # two ids may be written alike: the likelier one stands
            found.setdefault(_name(self.tokenizer, token), _finite(logprob))
        return found


def _finite(logprob: float) -> float:
    """JSON has no -inf; OpenAI writes -9999 for what is very unlikely."""
    return max(logprob, -9999.0)


def _choice(index: int, **parts: Any) -> dict[str, Any]:
    return {"index": index, **parts} | {
        name: parts.get(name) for name in ("logprobs", "finish_reason")
    }


def usage(prompt_tokens: int, results: Iterable[EdgeResult]) -> dict[str, Any]:
    """Tokens of all choices. Predictions are the draft's: accepted ones stand in the text,
    rejected ones were judged and do not."""
    made = accepted = drafted = 0
    for result in results:
        made += result.generation.completion_tokens
        accepted += result.generation.counters.accepted
        drafted += result.generation.counters.drafted
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": made,
        "total_tokens": prompt_tokens + made,
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }
