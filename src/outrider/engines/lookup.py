"""Prompt lookup: draft by copying what followed the same few tokens before.

Costs no model. It pays where text repeats its context (code, summaries, quotations); MODELS.md
measured .80 precision at T=0 when a suffix of three or more tokens matches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MIN_SUFFIX: Final = 3
"""Shortest suffix that may fire; 1 and 2 fire more often and are right too seldom."""
MAX_SUFFIX: Final = 4
"""Longest suffix tried, first."""


class NgramIndex:
    """The latest continuation of every n-gram of a growing sequence."""

    __slots__ = ("_after", "_ids", "_sizes")

    def __init__(self, *, min_suffix: int = MIN_SUFFIX, max_suffix: int = MAX_SUFFIX) -> None:
        if not 1 <= min_suffix <= max_suffix:
            raise ValueError(f"need 1 <= min_suffix <= max_suffix, got {min_suffix}, {max_suffix}")
        self._sizes = range(max_suffix, min_suffix - 1, -1)
        self._ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def update(self, committed: Sequence[int]) -> None:
        """Follow the committed ids; anything but growth starts the index afresh."""
        known = len(self._ids)
        if len(committed) < known or list(committed[:known]) != self._ids:
            self._ids = []
            self._after = {}
            known = 0
        for token in committed[known:]:
            self._append(token)

    def _append(self, token: int) -> None:
        for size in self._sizes:
            if size <= len(self._ids):
                self._after[tuple(self._ids[-size:])] = token
        self._ids.append(token)

    def guess(self, tail: Sequence[int] = ()) -> int | None:
        """What followed the longest known suffix of committed ids + `tail`; None if unknown."""
        longest = self._sizes[0]
        context = (*self._ids[-longest:], *tail)[-longest:]
        for size in self._sizes:
            if size <= len(context):
                token = self._after.get(tuple(context[-size:]))
                if token is not None:
                    return token
        return None
