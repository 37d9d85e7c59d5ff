"""How far a block of drafts stands: S(k), the probability that its first k drafts all do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self


@dataclass(frozen=True, slots=True)
class Survival:
    """S(1), S(2), ...: points from k = 1, then a geometric tail."""

    points: tuple[float, ...]
    tail: float
    """S(k+1) / S(k) beyond the points."""

    def __post_init__(self) -> None:
        steps = (1.0, *self.points)
        fall = all(0.0 <= after <= before for before, after in pairwise(steps))
        if not (fall and 0.0 <= self.tail <= 1.0):
            raise ValueError("S must fall from 1 and stay in [0, 1]")

    @classmethod
    def constant(cls, alpha: float) -> Self:
        """Each draft stands with the same probability, whatever came before."""
        return cls((), alpha)

    @classmethod
    def of(cls, points: Sequence[float], most: float = 1.0) -> Self:
        """Measured points; the tail goes on as the last two of them did, and is `most` at most."""
        if not points:
            raise ValueError("S needs at least one point")
        before = points[-2] if len(points) > 1 else 1.0
        tail = points[-1] / before if before > 0.0 else 0.0
        return cls(tuple(points), min(tail, most))

    def at(self, depth: int) -> float:
        """P(draft number `depth`, from 0, stands | those before it stand)."""
        if depth >= len(self.points):
            return self.tail
        before = self.points[depth - 1] if depth else 1.0
        return self.points[depth] / before if before > 0.0 else 0.0

    def survival(self, count: int) -> list[float]:
        """S(1), ..., S(count)."""
        values = list(self.points[:count])
        while len(values) < count:
            values.append((values[-1] if values else 1.0) * self.tail)
        return values
