"""How one request is to be relaxed: what a user asks for, checked once (core.relaxed)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from outrider.core.ledger import Ledger
from outrider.core.relaxed import Policy, RelaxedRule
from outrider.core.sparse import MAX_SKETCH
from outrider.core.tokens import ParameterError, Rule

DEFAULT_SKETCH: Final = 16
"""K: ids a sketch lists (our default; 73 bytes a draft at most common gaps)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """Rule, budget and sketch size of a request. Without a budget nothing is relaxed."""

    policy: Policy = field(default_factory=Policy)
    budget: float = 0.0
    """Most total variation distance of the answer's law (core.ledger); inf: the published rules,
    which know no budget."""
    sketch: int = DEFAULT_SKETCH

    def __post_init__(self) -> None:
        if not (self.budget >= 0.0):  # NaN as well
            raise ParameterError("budget", f"must not be negative, got {self.budget}")
        if isinstance(self.sketch, bool) or not 1 <= self.sketch <= MAX_SKETCH:
            raise ParameterError("sketch", f"must be in [1, {MAX_SKETCH}], got {self.sketch!r}")

    @property
    def ledger(self) -> Ledger:
        """Before the first block."""
        return Ledger(budget=self.budget)

    @property
    def exact(self) -> bool:
        """Nothing can be relaxed: the text is the coupled one. The published rules reject drafts
        that the strict rule would keep, which changes no token either."""
        nothing = self.policy.rule is RelaxedRule.RELAXED and self.policy.threshold == 0.0
        return self.budget == 0.0 or nothing

    @property
    def unbounded(self) -> bool:
        return math.isinf(self.budget)


def require_relaxation(rule: Rule, relaxation: Relaxation | None) -> None:
    """Raises ParameterError unless the relaxed rule, and no other, comes with a relaxation."""
    if (relaxation is not None) != (rule == Rule.RELAXED):
        raise ParameterError("verify", "relaxed, and no other rule, takes a relaxation")
