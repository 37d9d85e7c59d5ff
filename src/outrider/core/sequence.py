"""One request's ids: a committed prefix that only grows, and a speculative tail behind it.

    position:  0 ............ base | base .............. len
               committed (I2)      | drafted, not yet judged

`commit` takes a verdict about the head of the tail: accepted drafts become committed, the
target's token follows, and the tail survives only if that token is the one that was drafted
there (a bonus that equals the next draft simply goes on; docs/architecture.md, Acceptance).
Whenever a tail is thrown away the epoch grows, so that frames about the old tail can be recognised.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outrider.core.tokens import Verdict


class SpeculativeSequence:
    """Committed ids plus drafted ids. Positions are absolute; the prompt counts."""

    __slots__ = ("_committed", "_tail", "epoch", "prompt_length")

    def __init__(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise ValueError("a sequence starts with at least one token")
        self._committed = list(prompt)
        self._tail: list[int] = []
        self.prompt_length = len(prompt)
        self.epoch = 0

    @property
    def base(self) -> int:
        """Position of the first token that is not committed."""
        return len(self._committed)

    def __len__(self) -> int:
        return len(self._committed) + len(self._tail)

    @property
    def committed(self) -> tuple[int, ...]:
        return tuple(self._committed)

    @property
    def output(self) -> tuple[int, ...]:
        """Committed ids behind the prompt."""
        return tuple(self._committed[self.prompt_length :])

    @property
    def output_length(self) -> int:
        return len(self._committed) - self.prompt_length

    @property
    def tail(self) -> tuple[int, ...]:
        return tuple(self._tail)

    def slice(self, start: int) -> tuple[int, ...]:
        """Committed ids from position `start` on, then the tail."""
        if not 0 <= start <= self.base:
            raise ValueError(f"start={start} outside the committed prefix of {self.base}")
        return (*self._committed[start:], *self._tail)

    def extend(self, drafts: Iterable[int]) -> None:
        self._tail.extend(drafts)

    def commit(self, verdict: Verdict) -> tuple[int, ...]:
        """Apply a verdict on the first `verdict.drafted` ids of the tail; the newly fixed ids."""
        if verdict.drafted > len(self._tail):
            raise ValueError(f"verdict on {verdict.drafted} drafts, {len(self._tail)} outstanding")
        fixed = (*self._tail[: verdict.accepted], verdict.token)
        self.settle(fixed)
        return fixed

    def settle(self, tokens: Iterable[int]) -> int:
        """Commit `tokens` at `base`; how many of them the tail had drafted.

        The tail goes on behind tokens that it drafted, and is dropped at the first other one.
        """
        matched = 0
        for token in tokens:
            if self._tail and self._tail[0] == token:
                del self._tail[0]
                matched += 1
            else:
                self.rollback()
            self._committed.append(token)
        return matched

    def rollback(self) -> int:
        """Drop the tail; how many ids were dropped. A new epoch begins if there were any."""
        dropped = len(self._tail)
        self._tail = []
        if dropped:
            self.epoch += 1
        return dropped
