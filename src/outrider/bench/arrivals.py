"""When requests come: a closed loop, or a Poisson process. Pure; the seed is an argument."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Final

from outrider.core.tokens import ParameterError

CLOSED: Final = "closed"
POISSON: Final = "poisson"
MAX_RATE: Final = 10_000.0
"""Requests a second; no verifier here comes near."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """An arrival process over all edges together."""

    rate: float | None = None
    """Requests a second; None: closed, the next comes when one is done."""

    def times(self, count: int, seed: int) -> tuple[float | None, ...]:
        """Seconds from the start at which each of `count` requests is due; None: at once."""
        if self.rate is None:
            return (None,) * count
        draw = random.Random(seed)
        now, found = 0.0, []
        for _ in range(count):
            now += draw.expovariate(self.rate)
            found.append(now)
        return tuple(found)

    def __str__(self) -> str:
        return CLOSED if self.rate is None else f"{POISSON}:{self.rate:g}"


def parse_arrivals(text: str) -> Arrivals:
    """`closed` or `poisson:RATE`. Raises ParameterError."""
    if text == CLOSED:
        return Arrivals()
    name, _, value = text.partition(":")
    try:
        rate = float(value) if name == POISSON else math.nan
    except ValueError:
        rate = math.nan
    if not 0.0 < rate <= MAX_RATE:
        raise ParameterError(
            "arrivals",
            f"must be closed, or poisson:RATE with requests a second up to {MAX_RATE:g}, over all "
            f"edges together; got {text!r}",
        )
    return Arrivals(rate=rate)
