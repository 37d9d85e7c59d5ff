"""Which guesses stand: models of how well a draft knows its target.

Luck has an address (seed, request, place in the answer), so every schedule meets the same luck and
ways to decode are compared in pairs. A guess behind a wrong one is never judged, so a model only
ever speaks of guesses behind the target's own text; for a recorded answer that is exact under the
coupled rule (calibrate.trace).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.core import rng
from outrider.core.survival import Survival
from outrider.sim.events import Chance


class Acceptance(Protocol):
    """A model of acceptance."""

    def stands(self, request: int, place: int, depth: int) -> bool:
        """Is the guess at `place` (0: the answer's first token) the target's own token, when it was
        made behind `depth` guesses not judged yet?"""
        ...


def luck(seed: int, request: int, place: int) -> float:
    """In [0, 1), the same for all who ask."""
    state = rng.mix((seed + (request + 1) * rng.GOLDEN) & rng.MASK)
    return (rng.mix((state + (place + 1) * rng.GOLDEN) & rng.MASK) >> 11) * 2.0**-53


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """Every guess stands with probability alpha, whatever happened before."""

    alpha: float
    seed: int = 0

    def stands(self, request: int, place: int, depth: int) -> bool:  # noqa: ARG002
        return luck(self.seed, request, place) < self.alpha


@dataclass(frozen=True, slots=True, kw_only=True)
class ByDepth:
    """A position curve: a guess behind k others stands with probability S(k+1)/S(k)."""

    curve: Survival
    seed: int = 0

    def stands(self, request: int, place: int, depth: int) -> bool:
        return luck(self.seed, request, place) < self.curve.at(depth)


@dataclass(frozen=True, slots=True, kw_only=True)
class Swinging:
    """Acceptance with memory, the inertia that E2-SCI rests on: each answer swings between
    stretches of alpha + spread and alpha - spread, each `memory` tokens long in the mean."""

    alpha: float
    spread: float
    memory: float
    seed: int = 0
    _answers: dict[int, tuple[Chance, list[bool]]] = field(default_factory=dict, repr=False)

    def stands(self, request: int, place: int, depth: int) -> bool:  # noqa: ARG002
        level = self.alpha + (self.spread if self._easy(request, place) else -self.spread)
        return luck(self.seed, request, place) < level

    def _easy(self, request: int, place: int) -> bool:
        if request not in self._answers:
            chance = Chance(self.seed, request, 1)
            self._answers[request] = (chance, [chance.uniform() < 0.5])
        chance, states = self._answers[request]
        while len(states) <= place:
            states.append(states[-1] != (chance.uniform() * self.memory < 1.0))
        return states[place]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a real draft did on recorded answers. Request i meets answer i, from its beginning; a
    longer answer begins again, and so do requests when all answers were used."""

    answers: Sequence[Sequence[bool]]

    def __post_init__(self) -> None:
        if not self.answers or not all(len(a) for a in self.answers):
            raise ValueError("a record needs at least one answer, and each at least one position")

    def stands(self, request: int, place: int, depth: int) -> bool:  # noqa: ARG002
        answer = self.answers[request % len(self.answers)]
        return bool(answer[place % len(answer)])
