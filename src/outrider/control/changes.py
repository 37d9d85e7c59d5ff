"""Noticing that the world has changed: a test for jumps, and the levels a delay jumps between.

* `PageHinkley`: a two-sided cumulative-sum test (Page 1954) on standardised samples. It says how
  many samples ago the change began, so that a mean can start again from those.
* `DelayLevels`: which of a few levels the delay is at, given or learnt. These are the states of
  the contextual and Markov controllers (docs/papers.md, 3, Alg 2 and Thm 4).

No paper here states a change detector; all constants are our defaults.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

SLACK: Final = 0.75
"""Drift of the mean, in units of the scale, that is no change."""
LIMIT: Final = 7.0
"""Cumulated excess that is one."""
CLIP: Final = 4.5
"""Most that one sample counts: a single outlier (4.5 - 0.75 < 7) is no change, two in a row are."""

MAX_LEVELS: Final = 4
"""Most delay levels that are learnt: each needs rounds of its own."""
TOLERANCE: Final = 1.25
"""Ratio within which two delays are the same level."""
NEAR: Final = 0.002
"""Seconds within which they are, however short: below this jitter is no level."""
CONFIRM: Final = 3
"""Rounds in a row at an unknown delay that make a level."""
FOLLOW: Final = 0.1
"""Weight of a new delay in its level: levels drift."""
STALE: Final = 200
"""Rounds without a visit after which a learnt level is dropped."""
CROSS: Final = 0.1
"""Share of the gap between two given levels that a delay must pass the middle by to switch."""


class PageHinkley:
    """Told standardised samples (mean 0, scale 1 while nothing changes)."""

    __slots__ = ("_count", "_limit", "_slack", "_sum")

    def __init__(self, *, slack: float = SLACK, limit: float = LIMIT) -> None:
        self._slack = slack
        self._limit = limit
        self._sum = [0.0, 0.0]
        self._count = [0, 0]

    def observe(self, sample: float) -> int | None:
        """How many samples ago (this one counts) a change began, or None: no change."""
        sample = max(-CLIP, min(CLIP, sample))
        for side, x in enumerate((sample, -sample)):
            self._sum[side] = max(0.0, self._sum[side] + x - self._slack)
            self._count[side] = self._count[side] + 1 if self._sum[side] > 0.0 else 0
        for side in (0, 1):
            if self._sum[side] > self._limit:
                since = self._count[side]
                self._sum, self._count = [0.0, 0.0], [0, 0]
                return since
        return None


def _same(a: float, b: float) -> bool:
    low, high = min(a, b), max(a, b)
    return high - low <= NEAR or high <= low * TOLERANCE


class DelayLevels:
    """Levels of the round trip, ascending, and the one the link is at.

    Given levels stay as they are; a delay belongs to the nearest, and must pass the middle
    between two by CROSS of their gap to change it. With none given they are learnt: CONFIRM
    rounds in a row at an unknown delay make a level, a level follows its visits, levels that met
    become one, and one without visits is forgotten. States are numbered by rising delay, so a
    level that comes or goes renumbers those above it.
    """

    def __init__(self, given: Sequence[float] = ()) -> None:
        """`given`: seconds. Raises ValueError unless they are finite, >= 0 and rising."""
        levels = [float(x) for x in given]
        if any(not 0.0 <= x < math.inf for x in levels) or sorted(set(levels)) != levels:
            raise ValueError(f"delay levels must be finite, >= 0 and rising, got {levels}")
        self._given = bool(levels)
        self._levels = levels
        self._visited = [0] * len(levels)
        self._state = 0
        self._now = 0
        self._candidate: list[float] = []

    @property
    def state(self) -> int:
        """Index of the present level; 0 while none is known."""
        return self._state

    @property
    def levels(self) -> tuple[float, ...]:
        """Seconds, ascending."""
        return tuple(self._levels)

    def observe(self, delay: float) -> None:
        """A round trip took `delay` seconds (finite, >= 0)."""
        if self._given:
            self._classify(delay)
            return
        self._now += 1
        near = self._nearest(delay)
        if near is not None and _same(self._levels[near], delay):
            self._levels[near] += FOLLOW * (delay - self._levels[near])
            self._visited[near] = self._now
            self._candidate.clear()
        else:
            self._consider(delay)
        self._tidy()
        self._state = self._nearest(delay) or 0

    def _nearest(self, delay: float) -> int | None:
        if not self._levels:
            return None
        return min(range(len(self._levels)), key=lambda i: abs(self._levels[i] - delay))

    def _classify(self, delay: float) -> None:
        near = self._nearest(delay)
        if near is None or near == self._state:
            return
        here, there = self._levels[self._state], self._levels[near]
        if abs(delay - here) > (0.5 + CROSS) * abs(there - here):
            self._state = near

    def _consider(self, delay: float) -> None:
        if self._candidate and not _same(sum(self._candidate) / len(self._candidate), delay):
            self._candidate.clear()
        self._candidate.append(delay)
        # The very first level needs no confirmation: there is nothing it could be confused with.
        if self._levels and len(self._candidate) < CONFIRM:
            return
        if len(self._levels) == MAX_LEVELS:
            self._drop(min(range(MAX_LEVELS), key=self._visited.__getitem__))
        self._levels.append(sum(self._candidate) / len(self._candidate))
        self._visited.append(self._now)
        self._candidate.clear()

    def _drop(self, index: int) -> None:
        del self._levels[index], self._visited[index]

    def _tidy(self) -> None:
        order = sorted(range(len(self._levels)), key=self._levels.__getitem__)
        self._levels = [self._levels[i] for i in order]
        self._visited = [self._visited[i] for i in order]
        for i in reversed(range(len(self._levels))):
            if self._now - self._visited[i] > STALE:
                self._drop(i)
            elif i and _same(self._levels[i - 1], self._levels[i]):
                # The one visited last knows better where the level is now.
                self._drop(i if self._visited[i] < self._visited[i - 1] else i - 1)
