"""What relaxed acceptance has cost a request, and when it must end (core.relaxed says why)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from outrider.core.divergence import LN2
from outrider.core.tokens import ParameterError


def within(name: str, value: float, low: float, high: float) -> None:
    """Raises ParameterError unless `value` is a number in [low, high]; NaN never is."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ParameterError(name, f"must be a number in [{low:g}, {high:g}], got {value!r:.60}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What relaxation has cost one request so far. A value: judging returns the next one, so a
    round that is replayed with the ledger it began with ends the same way.

    Raises ParameterError for a budget that is negative or NaN, or a sum above it.
    """

    budget: float = 0.0
    """B: most total variation distance of the answer's law; 0 is exact. Above 1 it bounds no
    law any more, only the sum; inf: no end to it (the published rules)."""
    spent: float = 0.0
    """Sum of the charges, rounded up."""
    relaxed: int = 0
    """Tokens that stand although the target's own differs."""
    max_jsd: float = 0.0
    """Largest certified JSD (upper bound, nats) of a charged position."""

    def __post_init__(self) -> None:
        within("budget", self.budget, 0.0, math.inf)
        within("budget spent", self.spent, 0.0, self.budget)
        within("max_jsd", self.max_jsd, 0.0, LN2)
        if self.relaxed < 0:
            raise ParameterError("relaxed", f"must not be negative, got {self.relaxed}")

    def fits(self, charge: float) -> bool:
        return _sum_up(self.spent, charge) <= self.budget

    def charged(self, charge: float, jsd: float) -> Ledger:
        """Raises ParameterError where the charge does not fit."""
        return replace(self, spent=_sum_up(self.spent, charge), max_jsd=max(self.max_jsd, jsd))

    def marked(self) -> Ledger:
        """One more token stands that the target did not choose."""
        return replace(self, relaxed=self.relaxed + 1)


def _sum_up(spent: float, charge: float) -> float:
    return math.nextafter(spent + charge, math.inf) if charge else spent
