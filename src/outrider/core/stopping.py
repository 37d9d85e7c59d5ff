"""When an answer ends, and how much of its text may be shown.

Rules (I3; field cases 01, 02, 03, 19):

1. Tokens are looked at one at a time, in order. The earliest end event wins, whatever block it
   falls in and whatever order the checks are written in.
2. At one token the order is: end id, stop string, token limit. A stop string completed by the
   very last allowed token is a "stop".
3. An end id is part of the ids and of the count, never of the text.
4. A stop string is matched on text, across token borders; it is not part of the text. Only the
   tail that can still begin a stop string is held back, and it is released when it cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.tokens import FinishReason, SamplingParams


class StopText:
    """Finds stop strings in a growing text and holds back what may become one."""

    __slots__ = ("_held", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, delta: str) -> tuple[str, bool]:
        """Text that may be shown now, and whether a stop string was completed."""
        if not self._stops:
            return delta, False
        text = self._held + delta
        # First completed wins (then the longest): the same answer however the text is chunked.
        hits = [(text.find(s) + len(s), text.find(s)) for s in self._stops if s in text]
        if hits:
            self._held = ""
            return text[: min(hits)[1]], True
        keep = max(_overlap(text, s) for s in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What was held back; the text is over, so nothing can become a stop any more."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    for n in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """The token side of ending: end ids and limits of one request."""

    end_ids: frozenset[int]
    """Ids that end the text."""
    limit: int
    """Most output tokens: max_tokens, or what the context leaves, whichever is less."""

    @classmethod
    def of(cls, params: SamplingParams, *, eos: frozenset[int], room: int) -> StopRules:
        """Rules of a request on a model with these end ids and `room` tokens of context left."""
        ends = params.stop_token_ids | (frozenset() if params.ignore_eos else eos)
        return cls(end_ids=ends, limit=min(params.max_tokens, room))

    def is_end(self, token: int) -> bool:
        return token in self.end_ids

    def reason(self, token: int, count: int, *, stop_text: bool) -> FinishReason | None:
        """Does the answer end with this token, the count-th (from 1) of the output?"""
        if self.is_end(token) or stop_text:
            return FinishReason.STOP
        return FinishReason.LENGTH if count >= self.limit else None
