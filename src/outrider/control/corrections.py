"""What a round costs beside the model, by delay state: learnt from the rounds' own times.

The model adds up parts that were measured apart. What it leaves out (a hand-over between threads,
a link that is slower in this state than on average) stands in the time of the whole round. Its
mean error, per delay state, is one number more that every length shares.
"""

from __future__ import annotations

import math
from typing import Final

RATE: Final = 0.1
"""Weight of a new round, once there were ten (our default)."""
MAX_STATES: Final = 64
"""Delay states told apart; those above are the last one."""


class Corrections:
    """Seconds that a synchronous round took beyond the model, a forgetting mean by state."""

    __slots__ = ("_counts", "_means")

    def __init__(self) -> None:
        self._means: dict[int, float] = {}
        self._counts: dict[int, int] = {}

    def observe(self, state: int, *, predicted: float, seconds: float) -> None:
        """NaN, infinite and negative times are ignored; an error counts for `predicted` at most,
        so that a round that waited out a cut teaches little."""
        if not (math.isfinite(seconds) and seconds >= 0.0 and math.isfinite(predicted)):
            return
        state = _bounded(state)
        error = max(-predicted, min(predicted, seconds - predicted))
        count = self._counts.get(state, 0) + 1
        self._counts[state] = count
        mean = self._means.get(state, 0.0)
        self._means[state] = mean + max(RATE, 1.0 / count) * (error - mean)

    def extra(self, state: int) -> float:
        """Seconds; 0 in a state not seen yet."""
        return self._means.get(_bounded(state), 0.0)


def _bounded(state: int) -> int:
    return max(0, min(MAX_STATES - 1, state))
