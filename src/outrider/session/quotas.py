"""How much one login may ask for: limits of its own, and a rate that fills up again.

Pure values and arithmetic; verifier and gateway use the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """Limits of one login; None: as everybody's."""

    sessions: int | None = None
    """Answers at once."""
    rate: float | None = None
    """Answers that may begin in a second, for ever."""
    connections: int | None = None
    """Links to a verifier."""


NO_LIMITS = TenantLimits()
"""Of its own."""


@dataclass(slots=True)
class Bucket:
    """Takes that are left; they come back with time."""

    left: float
    filled: float
    """Seconds: when `left` was brought up to date."""

    def take(self, count: float, *, rate: float, burst: float, now: float) -> float:
        """Take `count`, where `rate` come back a second up to `burst`. 0: taken. Otherwise nothing
        is taken, and it may be asked again so many seconds later; inf: never."""
        self.left = min(burst, self.left + rate * (now - self.filled))
        self.filled = now
        if self.left >= count:
            self.left -= count
            return 0.0
        return (count - self.left) / rate if rate > 0 and count <= burst else math.inf
