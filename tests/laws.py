"""Statistics and exact sums for proofs of law. No scipy: two short formulas are enough."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from outrider.core import rng, verify
from outrider.core.rng import Purpose
from outrider.core.sampling import Distribution
from outrider.sim.laws import fit

__all__ = ["ALARM", "Tree", "fit", "normal_tail"]

ALARM = 1e-3
"""Smallest p-value a right implementation is allowed. Seeds are fixed, so a passing test passes
always; a wrong law gives p-values far below this."""


def normal_tail(z: float) -> float:
    """P(|standard normal| > |z|)."""
    return math.erfc(abs(z) / math.sqrt(2))


class Tree:
    """Runs a function once for every possible outcome of its draws, with exact weights.

    Inside, `uniform`, `draw` and `draw_from` stand in for core.rng's randomness (`plant` puts
    them there). The same address gives the same uniform twice, as real noise does, so a wrongly
    shared address shows in the law. A draw's address may serve again only if nobody looked at
    the first outcome: a draft that was thrown away before it was judged.
    """

    def __init__(self, grid: int | None = None, *, rational: bool = False) -> None:
        """`grid`: every uniform takes all midpoints of that many cells. None: a uniform is
        decided when it is compared, with the probability of that comparison. `rational`: all
        laws have small denominators, so float32's rounding can be undone and sums are exact."""
        self._grid = grid
        self._rational = rational
        self._script: list[int] = []
        self._depth = 0
        self._sizes: list[int] = []
        self.weight: Fraction | float = Fraction(1)
        self._uniforms: dict[tuple[int, ...], object] = {}
        self._drawn: set[tuple[int, ...]] = set()

    def pick(self, outcomes: list[tuple[Any, Any]]) -> Any:
        outcomes = [(value, weight) for value, weight in outcomes if weight]
        if self._depth == len(self._script):
            self._script.append(0)
            self._sizes.append(len(outcomes))
        value, weight = outcomes[self._script[self._depth]]
        self._depth += 1
        self.weight *= weight
        return value

    def law(self, run: Callable[[], Any]) -> dict[Any, Any]:
        """Every result of `run` with its probability."""
        found: dict[Any, Any] = {}
        while True:
            self._depth, self.weight = 0, Fraction(1)
            self._uniforms, self._drawn = {}, set()
            result = run()
            found[result] = found.get(result, 0) + self.weight
            while self._script and self._script[-1] == self._sizes[-1] - 1:
                self._script.pop()
                self._sizes.pop()
            if not self._script:
                return found
            self._script[-1] += 1

    # -- what stands in for the randomness

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> Tree:
        monkeypatch.setattr(rng, "key", lambda seed, purpose, at, index=0: (purpose, at, index))
        monkeypatch.setattr(rng, "uniform", self.uniform)
        monkeypatch.setattr(Distribution, "draw", lambda d, key: self.draw(d, key))
        monkeypatch.setattr(
            Distribution, "draws", lambda d, keys: tuple(self.draw(d, key) for key in keys)
        )
        monkeypatch.setattr(verify, "draw_from", self.draw_from)
        return self

    def uniform(self, seed: int, purpose: Purpose, at: int, index: int = 0) -> object:
        address = (purpose, at, index)
        if address not in self._uniforms:
            self._uniforms[address] = self._fresh()
        return self._uniforms[address]

    def _fresh(self) -> object:
        if self._grid is None:
            return Undecided(self)
        cell = Fraction(1, self._grid)
        return self.pick([((i + 0.5) / self._grid, cell) for i in range(self._grid)])

    def draw(self, d: Distribution, key: tuple[int, ...]) -> int:
        return self.draw_from(d.ids, d.probabilities(), key)

    def draw_from(self, ids: np.ndarray, p: np.ndarray, key: tuple[int, ...]) -> int:
        looked_at = (Purpose.ACCEPT, *key[1:]) in self._uniforms
        assert key not in self._drawn or (key[0] == Purpose.DRAFT and not looked_at), key
        self._drawn.add(key)
        p = p / p.sum()
        weights = [self.number(float(x)) for x in p]
        assert not self.exact or sum(weights) == 1
        return self.pick(list(zip(ids.tolist(), weights, strict=True)))

    @property
    def exact(self) -> bool:
        return self._rational or self._grid is not None

    def number(self, x: float) -> Fraction | float:
        return Fraction(x).limit_denominator(500) if self.exact else x


class Undecided:
    """A uniform known only to lie in [low, high]; comparing it branches the tree."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._low, self._high = tree.number(0.0), tree.number(1.0)

    def __mul__(self, factor: float) -> Scaled:
        return Scaled(self, factor)

    def below(self, x: float) -> bool:
        inside = min(max(self._tree.number(x), self._low), self._high)
        chance = (inside - self._low) / (self._high - self._low)
        answer: bool = self._tree.pick([(True, chance), (False, 1 - chance)])
        self._low, self._high = (self._low, inside) if answer else (inside, self._high)
        return answer


class Scaled:
    def __init__(self, u: Undecided, factor: float) -> None:
        self._u, self._factor = u, factor

    def __lt__(self, x: float) -> bool:
        return self._u.below(x / self._factor)
