"""What a forward costs and what it brings: the two curves every decision here rests on.

* `RowCosts`: t_v(rows), seconds of one target forward by its number of rows, measured online.
* `PrefixCurve`: S(i) = P(the first i drafts of a block all stand), learnt from verdicts; one
  rejection at index i tells about every shorter prefix too (docs/papers.md, 3).

`share_rows` puts them together: judge the m drafts that maximise
(1 + S(1) + ... + S(m)) / t_v(m + 1), never assuming that rows are free (docs/architecture.md,
Free-run), and counting all sessions that share a forward: what pays alone may not pay for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

FORGET: Final = 0.98
"""Weight kept a round by old observations: about the last 50 rounds count (our default)."""
PRIOR_ACCEPTANCE: Final = 0.6
"""Acceptance of a draft token assumed before anything was seen (our default)."""
PRIOR_WEIGHT: Final = 4.0
"""Observations that the prior is worth."""

SHARING_RATE: Final = 0.1
"""Weight of a new forward in what sharing costs: about ten forwards count (our default)."""
SHARING_DRIFT: Final = 0.005
"""How fast an unused factor of sharing is forgotten, a forward (our default)."""

SEED_WEIGHT: Final = 50
"""Observations that a row count measured before is worth: from there on it is only followed."""


class PrefixCurve:
    """Conditional acceptance by index in the block, with forgetting and a prior."""

    __slots__ = ("_hits", "_prior", "_tries")

    def __init__(self, *, prior: float = PRIOR_ACCEPTANCE) -> None:
        if not 0.0 < prior < 1.0:
            raise ValueError(f"prior must be in (0, 1), got {prior}")
        self._prior = prior
        self._hits: list[float] = []
        self._tries: list[float] = []

    def observe(self, *, drafted: int, accepted: int) -> None:
        """A block's verdict: indices 0..accepted-1 stood, index `accepted` fell (if drafted)."""
        judged = min(drafted, accepted + 1)
        while len(self._tries) < judged:
            self._hits.append(0.0)
            self._tries.append(0.0)
        for i in range(judged):
            self._hits[i] = self._hits[i] * FORGET + (i < accepted)
            self._tries[i] = self._tries[i] * FORGET + 1.0

    def acceptance(self, index: int) -> float:
        """P(draft number `index` stands | the ones before it stand)."""
        known = range(len(self._tries))
        total = sum(self._tries)
        mean = (sum(self._hits) + self._prior * PRIOR_WEIGHT) / (total + PRIOR_WEIGHT)
        if index not in known:
            return mean
        return (self._hits[index] + mean * PRIOR_WEIGHT) / (self._tries[index] + PRIOR_WEIGHT)

    def survival(self, count: int) -> list[float]:
        """S(1), ..., S(count)."""
        values, alive = [], 1.0
        for i in range(count):
            alive *= self.acceptance(i)
            values.append(alive)
        return values


class RowCosts:
    """Seconds of a forward by rows: running means, made monotone, linear in between.

    `seed` gives a curve measured before (rows, seconds); observations take over from it.
    """

    __slots__ = ("_counts", "_means", "_seeded")

    def __init__(self, seed: Sequence[tuple[int, float]] = ()) -> None:
        self._means = {rows: seconds for rows, seconds in seed if rows > 0 and seconds > 0.0}
        self._seeded = bool(self._means)
        self._counts = dict.fromkeys(self._means, SEED_WEIGHT)

    def observe(self, rows: int, seconds: float) -> None:
        """One forward over `rows` rows took `seconds`."""
        if rows < 1 or not seconds > 0.0:
            return
        count = self._counts.get(rows, 0)
        self._counts[rows] = count + 1
        known = self._means.get(rows)
        if known is None and not self._seeded:
            self._means[rows] = seconds
            return
        # On a measured curve a new row count starts from what its neighbours say: taken as it
        # is, one slow forward would lift the whole (monotone) curve behind it and make many
        # rows look free.
        if known is None:
            known = self.seconds(rows)
        rate = max(1.0 - FORGET, 1.0 / (count + 3)) if self._seeded else 1.0 - FORGET
        self._means[rows] = known + rate * (seconds - known)

    def __bool__(self) -> bool:
        return bool(self._means)

    def curve(self) -> list[tuple[int, float]]:
        """Measured points, rows ascending, seconds never falling."""
        points, high = [], 0.0
        for rows in sorted(self._means):
            high = max(high, self._means[rows])
            points.append((rows, high))
        return points

    def seconds(self, rows: int) -> float:
        """t_v(rows); a single known point counts as flat, nothing known as 1 second."""
        points = self.curve()
        if not points:
            return 1.0
        below = [p for p in points if p[0] <= rows]
        above = [p for p in points if p[0] >= rows]
        if not below:
            return above[0][1]
        if not above:
            return self._beyond(points, rows)
        (r0, t0), (r1, t1) = below[-1], above[0]
        return t0 if r0 == r1 else t0 + (t1 - t0) * (rows - r0) / (r1 - r0)

    @staticmethod
    def _beyond(points: list[tuple[int, float]], rows: int) -> float:
        """Past the largest measured row count: go on with the mean slope of the curve."""
        (r0, t0), (r1, t1) = points[0], points[-1]
        slope = (t1 - t0) / (r1 - r0) if r1 > r0 else 0.0
        return t1 + slope * (rows - r1)


class Costs(Protocol):
    """t_v(rows): what a forward over so many rows takes."""

    def seconds(self, rows: int) -> float: ...


class SharedCosts:
    """t_v(rows, sessions): the curve of one session, times what sharing a forward costs.

    Rows of several sessions are not rows of one: their caches have other lengths, and an engine
    may need a pass for each. The factor is learnt by octave of sessions and of rows; where none
    was measured it is taken for 1, so that it is tried. A factor that is not used drifts back to
    that of fewer rows, so that one slow forward is not believed for ever.
    """

    __slots__ = ("_factors",)

    def __init__(self) -> None:
        self._factors: dict[tuple[int, int], float] = {}

    def observe(self, rows: int, sessions: int, seconds: float, base: RowCosts) -> None:
        """A forward over `rows` rows of `sessions` sessions took `seconds`."""
        if sessions < 2 or rows < sessions or not seconds > 0.0:
            return
        octave, here = (rows - 1).bit_length(), sessions.bit_length()
        factor = seconds / base.seconds(rows)
        known = self._factors.get((here, octave))
        self._factors[here, octave] = (
            factor if known is None else known + SHARING_RATE * (factor - known)
        )
        for (group, other), value in list(self._factors.items()):
            if group == here and other > octave:
                below = self._factors[here, octave]
                self._factors[group, other] = value + SHARING_DRIFT * (min(below, value) - value)

    def of(self, sessions: int, base: RowCosts) -> Costs:
        """The curve of a forward that `sessions` sessions share."""
        return base if sessions < 2 else _Shared(base, self._factors, sessions.bit_length())


class _Shared:
    __slots__ = ("_base", "_factors", "_sessions")

    def __init__(
        self, base: RowCosts, factors: Mapping[tuple[int, int], float], sessions: int
    ) -> None:
        self._base = base
        self._factors = factors
        self._sessions = sessions

    def seconds(self, rows: int) -> float:
        factor = self._factors.get((self._sessions, (rows - 1).bit_length()), 1.0)
        return self._base.seconds(rows) * factor


def share_rows(
    survivals: Sequence[Sequence[float]], costs: Costs, *, rows: int = 0, tokens: float = 0.0
) -> list[int]:
    """How many drafts of each session to judge in one forward that all share.

    `survivals[i]`: S(1), S(2), ... of session i's pending drafts, never rising. Each session has
    one row of its own besides, and `rows` and `tokens` are what others bring that have no
    choice. The likeliest drafts come first; of all numbers of drafts, the one with the most
    tokens a second is taken (rows come in steps, so the first decline need not be the last).
    """
    order = sorted(
        ((s, -place, -i) for i, alive in enumerate(survivals) for place, s in enumerate(alive)),
        reverse=True,
    )
    base, gained = rows + len(survivals), tokens + len(survivals)
    best, most = 0, gained / costs.seconds(base) if base else 0.0
    for count, (alive_so_far, _, _) in enumerate(order, start=1):
        gained += alive_so_far
        rate = gained / costs.seconds(base + count)
        if rate > most:
            best, most = count, rate
    taken = [0] * len(survivals)
    for _, _, i in order[:best]:
        taken[-i] += 1
    return taken
