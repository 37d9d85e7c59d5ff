"""What a lossy request has cost, and when that must end (why: core.relaxed, core.residual)."""

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
class Account:
    """A budget of total variation distance and what was charged to it. A value: what charges it
    makes the next one, so a round that is replayed with the account it began with ends the same
    way.

    Raises ParameterError for a budget that is negative or NaN, or a sum above it.
    """

    budget: float = 0.0
    """B: most total variation distance of the answer's law; 0 is exact. Above 1 it bounds no
    law any more, only the sum; inf: no end to it (the published rules)."""
    spent: float = 0.0
    """Sum of the charges, rounded up."""

    def __post_init__(self) -> None:
        within("budget", self.budget, 0.0, math.inf)
        within("budget spent", self.spent, 0.0, self.budget)

    def fits(self, charge: float) -> bool:
        return _sum_up(self.spent, charge) <= self.budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger(Account):
    """What relaxation has cost one request so far."""

    relaxed: int = 0
    """Tokens that stand although the target's own differs."""
    max_jsd: float = 0.0
    """Largest certified JSD (upper bound, nats) of a charged position."""

    def __post_init__(self) -> None:
        Account.__post_init__(self)
        within("max_jsd", self.max_jsd, 0.0, LN2)
        if self.relaxed < 0:
            raise ParameterError("relaxed", f"must not be negative, got {self.relaxed}")

    def charged(self, charge: float, jsd: float) -> Ledger:
        """Raises ParameterError where the charge does not fit."""
        return replace(self, spent=_sum_up(self.spent, charge), max_jsd=max(self.max_jsd, jsd))

    def marked(self) -> Ledger:
        """One more token stands that the target did not choose."""
        return replace(self, relaxed=self.relaxed + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TvLedger(Account):
    """What drawing from truncated residuals has cost one request so far (core.residual)."""

    events: int = 0
    """Tokens that were drawn from one that is not certainly the exact one."""

    @property
    def left(self) -> float:
        """What may still be charged, up to a rounding; `fits` decides."""
        return self.budget - self.spent if math.isfinite(self.budget) else math.inf

    def charged(self, charge: float) -> TvLedger:
        """One more event. A charge of 0 is exact and none. Raises ParameterError where the charge
        does not fit."""
        if not charge:
            return self
        return replace(self, spent=_sum_up(self.spent, charge), events=self.events + 1)


def _sum_up(spent: float, charge: float) -> float:
    return math.nextafter(spent + charge, math.inf) if charge else spent
