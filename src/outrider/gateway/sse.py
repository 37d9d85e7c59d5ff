"""Rounds of an answer to server-sent events, or to one object.

A chunk is one token, so that who counts chunks counts tokens; with details it is one round, which
says of each token who wrote it (docs/api.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import msgspec

from outrider.core.tokens import FinishReason, TokenLogprob
from outrider.engines.tokenizer import Tokenizer
from outrider.gateway.answers import Choice
from outrider.gateway.shapes import Head, Shape, TextShape, usage
from outrider.gateway.wishes import Wishes
from outrider.runtime.contact import COMMENT
from outrider.session.generation import Step

DONE: Final = b"data: [DONE]\n\n"
_LINE_ENDS: Final = tuple(
    (mark.encode(), f"\\u{ord(mark):04x}".encode()) for mark in ("\x85", "\u2028", "\u2029")
)
"""What `str.splitlines` takes for the end of a line although JSON leaves it as it is."""
_SUMMARY_LEAVES_OUT: Final = frozenset({"text", "logprobs", "token_ids", "origins"})
"""Of an account: what the stream itself has said."""


def event(value: object) -> bytes:
    """One server-sent event. JSON writes line ends as \\n, so a value is always one line, also to
    clients that take other characters for line ends, as httpx does in `iter_lines`."""
    data = msgspec.json.encode(value)
    if not data.isascii():
        for raw, escaped in _LINE_ENDS:
            data = data.replace(raw, escaped)
    return b"data: " + data + b"\n\n"


def comment(facts: Mapping[str, object]) -> bytes:
    """A line that clients pass over unless they look for it."""
    return COMMENT.encode() + msgspec.json.encode(facts) + b"\n\n"


@dataclass(slots=True)
class _Progress:
    """How far a choice has come."""

    tokens: int = 0
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


class Teller:
    """Tells the answers of one request, in the words of its endpoint."""

    def __init__(
        self,
        shape: Shape,
        head: Head,
        wishes: Wishes,
        tokenizer: Tokenizer,
        choices: Sequence[Choice],
        prompts: Sequence[Sequence[int]],
    ) -> None:
        self._shape = shape
        self._head = head
        self._wishes = wishes
        self._tokenizer = tokenizer
        self._choices = choices
        self._prompts = prompts
        self._progress = {choice.index: _Progress() for choice in choices}
        self.scores: Sequence[Sequence[TokenLogprob]] = ()
        """Of each prompt's ids behind the first, for the echo; empty: not asked for."""

    # ---------------------------------------------------------------- a stream

    def open(self) -> bytes:
        """Before the first round."""
        chunks = []
        for choice in self._choices:
            opening = self._shape.opening(choice.index)
            if opening is not None:
                chunks.append(self._chunk([opening]))
            if self._wishes.echo:
                delta = self._shape.delta(choice.index, self._echo(choice), self._scored(choice))
                chunks.append(self._chunk([delta]))
        return b"".join(chunks)

    def _echo(self, choice: Choice) -> str:
        return self._tokenizer.decode(choice.request.prompt_ids)

    def _scored(self, choice: Choice) -> Any:
        """Log-probabilities of the echo."""
        if not self.scores:
            return None
        assert isinstance(self._shape, TextShape), "a chat has no echo"
        entries = self.scores[choice.index // self._wishes.n]
        return self._shape.prompt_logprobs(choice.index, choice.request.prompt_ids[0], entries)

    def at_once(self) -> bytes:
        """The whole stream, where nothing is said behind the echo."""
        closing = [
            self._chunk([self._shape.closing(choice.index, _reason(choice))])
            for choice in self._choices
        ]
        return self.open() + b"".join(closing) + self.end()

    def step(self, choice: Choice, step: Step) -> bytes:
        """The chunks of one round."""
        if self._wishes.details:
            return self._round(choice, step)
        progress, before = self._progress[choice.index], self._progress[choice.index].tokens
        parts = []
        for place, text, logprobs in self._tokens(choice, step):
            progress.tokens = before + place + 1
            parts.append(self._chunk([self._shape.delta(choice.index, text, logprobs)]))
        progress.tokens = before + len(step.tokens)
        return b"".join(parts)

    def close(self, choice: Choice) -> bytes:
        """The chunk that ends a choice."""
        chunk = self._shape.closing(choice.index, _reason(choice))
        if not self._wishes.details:
            return self._chunk([chunk])
        facts = {k: v for k, v in account(choice).items() if k not in _SUMMARY_LEAVES_OUT}
        return self._chunk([chunk], outrider={"choice": choice.index, "summary": facts})

    def end(self) -> bytes:
        """Behind the last choice."""
        if not self._wishes.include_usage:
            return DONE
        return self._chunk([], usage=self.usage()) + DONE

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        if self._wishes.include_usage:  # then every chunk has the key, and only the last a value
            so_far = self._so_far() if self._wishes.continuous_usage else None
            more.setdefault("usage", so_far)
        return event(self._object(self._shape.chunk_object, choices) | more)

    def _round(self, choice: Choice, step: Step) -> bytes:
        assert choice.stream is not None, "it has answered"
        progress = self._progress[choice.index]
        tokens = []
        for i, (token, origin, piece) in enumerate(
            zip(step.tokens, step.origins, step.pieces, strict=True)
        ):
            fact = {
                "id": token,
                "text": piece,
                "origin": origin.value,
                "position": len(choice.request.prompt_ids) + progress.tokens + i,
            }
            if step.logprobs:
                fact["logprob"] = max(step.logprobs[i].logprob, -9999.0)
            tokens.append(fact)
        progress.tokens += len(step.tokens)
        link = choice.stream.link
        facts = asdict(step.round) if step.round else {}
        facts |= {
            "bytes_up": link.bytes_up,
            "bytes_down": link.bytes_down,
            "draft_s": choice.stream.draft_seconds,
        }
        entries = self._shown(step)
        logprobs = self._shape.logprobs(choice.index, entries) if entries else None
        delta = self._shape.delta(choice.index, step.text, logprobs)
        told = {"choice": choice.index, "tokens": tokens, "round": facts}
        return self._chunk([delta], outrider=told)

    def _tokens(self, choice: Choice, step: Step) -> Iterator[tuple[int, str, Any]]:
        """Place, text and log-probabilities of each token; what shows nothing yet is left out."""
        shown = self._shown(step)
        for i, piece in enumerate(step.pieces):
            entries = shown[i : i + 1]
            if piece or entries:
                yield i, piece, (self._shape.logprobs(choice.index, entries) if entries else None)

    def _shown(self, step: Step) -> Sequence[TokenLogprob]:
        """Log-probabilities of a round; a chat's are without the token that only ends the text."""
        if self._shape.scores_end:
            return step.logprobs
        ended = step.finish is FinishReason.STOP and step.logprobs
        if not ended or not self._is_end(step.tokens[-1]):
            return step.logprobs
        return step.logprobs[: len(step.tokens) - 1]

    def _is_end(self, token: int) -> bool:
        params = self._wishes.request.params
        own = token in self._tokenizer.eos_token_ids and not params.ignore_eos
        return own or token in params.stop_token_ids

    # ---------------------------------------------------------------- one object

    def note(self, choice: Choice, step: Step) -> None:
        """Keep a round for `whole`."""
        progress = self._progress[choice.index]
        progress.text.append(step.text)
        progress.logprobs += self._shown(step)

    def whole(self) -> bytes:
        body = self._object(self._shape.whole_object, [self._whole(c) for c in self._choices])
        body["usage"] = self.usage()
        if self._wishes.details:
            made = [c for c in self._choices if c.stream is not None]
            body["outrider"] = {
                "choices": [{"choice": c.index, "summary": _without_text(c)} for c in made]
            }
        return msgspec.json.encode(body)

    def _whole(self, choice: Choice) -> dict[str, Any]:
        progress = self._progress[choice.index]
        text = "".join(progress.text)
        scored = self._scored(choice)
        if self._wishes.echo:
            text = self._echo(choice) + text
        asked = choice.request.params.logprobs is not None
        logprobs = self._shape.logprobs(choice.index, progress.logprobs) if asked else None
        if scored is not None:
            logprobs = {name: scored[name] + more for name, more in logprobs.items()}
        return self._shape.whole(choice.index, text, logprobs, _reason(choice))

    # ---------------------------------------------------------------- both

    def _so_far(self) -> dict[str, int]:
        """Usage in the middle of a stream: the tokens alone."""
        prompt = sum(map(len, self._prompts))
        made = sum(progress.tokens for progress in self._progress.values())
        return {
            "prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made
        }  # fmt: skip

    def usage(self) -> dict[str, Any]:
        made = (c.result for c in self._choices if c.stream is not None)
        return usage(sum(map(len, self._prompts)), made)

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "object": kind,
            "created": self._head.created,
            "model": self._head.model,
            "system_fingerprint": self._head.fingerprint,
            "choices": choices,
        }


def account(choice: Choice) -> dict[str, object]:
    """Everything known of how an answer was made: the JSON of `outrider generate --cloud`, and how
    long the lists were that answered rejections."""
    facts = choice.result.as_dict()
    tv = facts.get("tv")
    if isinstance(tv, dict):
        facts["tv"] = tv | {"k": choice.request.reply.k}
    return facts


def _without_text(choice: Choice) -> dict[str, object]:
    return {k: v for k, v in account(choice).items() if k not in ("text", "logprobs")}


def _reason(choice: Choice) -> str:
    if choice.stream is None:  # no token was wanted
        return FinishReason.LENGTH.value
    reason = choice.result.generation.finish_reason
    assert reason is not None, "a complete answer has a reason to end"
    return reason.value
