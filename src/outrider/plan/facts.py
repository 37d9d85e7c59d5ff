"""What a plan starts from: times, acceptance, link, prices. Values alone; seconds, bytes, bits/s.

Nothing here is measured and nothing is guessed: what the caller does not know has a default that
says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Self

from outrider.control.base import MAX_LENGTH
from outrider.control.costs import RowCosts
from outrider.control.specstop import DOWN_BYTES, TOKEN_BYTES, UP_BYTES, row_seconds
from outrider.core.survival import Survival
from outrider.core.tokens import Rule
from outrider.session.outbox import Q_BYTES

MAX_ALPHA: Final = 0.999
"""Acceptance above which a chain of drafts has no end worth computing."""
MOST_ROWS: Final = 257
"""Rows of the largest block there is: a full window and the target's own (session.schedules)."""
MAX_SECONDS: Final = 60.0
"""Longest step or round trip that is taken for meant."""
PROPOSALS_BYTES: Final = 16 * 7
"""What a rejection takes downwards under the ratio rule: 16 proposals of id and probability
(docs/papers.md, 0, byte budgets)."""
CORRECT_BYTES: Final = 12
"""What the answer to them takes upwards (docs/protocol.md)."""


class PlanError(ValueError):
    """Facts that mean nothing; the message names the fix."""


@dataclass(frozen=True, slots=True)
class Curve(Survival):
    """Acceptance that a plan can be made from: chains of drafts end. Raises PlanError."""

    def __post_init__(self) -> None:
        try:
            Survival.__post_init__(self)
        except ValueError as error:
            raise PlanError(str(error)) from None
        if self.tail > MAX_ALPHA:
            raise PlanError(f"acceptance must be in [0, {MAX_ALPHA}], got {self.tail:g}")

    @classmethod
    def of(cls, points: Sequence[float], most: float = MAX_ALPHA) -> Self:
        if not points:
            raise PlanError("S needs at least one point")
        return super(Curve, cls).of(points, most)

    @property
    def alpha(self) -> float:
        """The constant acceptance with the same mean run of drafts: run / (run + 1)."""
        last = self.points[-1] if self.points else 1.0
        run = sum(self.points) + last * self.tail / (1.0 - self.tail)
        return run / (run + 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What things cost, in one currency; 0: nobody pays for it, or nobody said."""

    cloud_second: float = 0.0
    """A second of the verifier's engine."""
    cloud_forward: float = 0.0
    cloud_token: float = 0.0
    """A committed token that the cloud had a hand in."""
    megabyte: float = 0.0
    """On the link, either way."""
    edge_watts: float = 0.0
    """While it drafts."""
    cloud_watts: float = 0.0
    """While its engine works."""

    @property
    def money(self) -> bool:
        """Whether anything has a price."""
        return any((self.cloud_second, self.cloud_forward, self.cloud_token, self.megabyte))

    @property
    def power(self) -> bool:
        return any((self.edge_watts, self.cloud_watts))


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One edge, one verifier, and the link between them. Seconds."""

    draft: float
    """t_d: the edge drafts a token."""
    verify: tuple[tuple[int, float], ...]
    """t_v: (rows, seconds) of a forward, linear in between; one point counts as flat."""
    curve: Curve
    round_trip: float
    """R, without the time that bytes take."""
    plain: float | None = None
    """t_ar: one plain step of the target; None: t_v(1)."""
    cloud_draft: float | None = None
    """t_d': the cloud drafts a token; None: it cannot."""
    up_bps: float = math.inf
    down_bps: float = math.inf
    rule: Rule = Rule.COUPLED
    requests: int = 1
    """Answers at a time at each edge."""
    edges: int = 1
    """Edges that share the verifier."""
    own_text: bool = False
    """The draft's own text would do as well."""
    prices: Prices = field(default_factory=Prices)

    def __post_init__(self) -> None:
        times = [("t_d", self.draft), *(("t_v", s) for _, s in self.verify)]
        times += [("t_ar", self.plain)] if self.plain is not None else []
        times += [("t_d'", self.cloud_draft)] if self.cloud_draft is not None else []
        for name, value in times:
            if not 0.0 < value <= MAX_SECONDS:
                raise PlanError(f"{name} must be above 0 and at most {MAX_SECONDS:g} s")
        if not self.verify or any(rows < 1 for rows, _ in self.verify):
            raise PlanError("t_v needs at least one point, and every point at least one row")
        if not 0.0 <= self.round_trip <= MAX_SECONDS:
            raise PlanError(f"the round trip must be in [0, {MAX_SECONDS:g}] s")
        if self.rule is Rule.RELAXED:
            raise PlanError("plan for coupled or ratio: what relaxing accepts hangs on the text")

    @cached_property
    def rows(self) -> tuple[float, ...]:
        """t_v(1), ..., t_v(MOST_ROWS); one row is the plain step where that is known."""
        measured = row_seconds(RowCosts(self.verify), MOST_ROWS)
        return (self.step, *(max(self.step, s) for s in measured[1:]))

    @cached_property
    def step(self) -> float:
        """t_ar."""
        return RowCosts(self.verify).seconds(1) if self.plain is None else self.plain

    def seconds(self, rows: int) -> float:
        """t_v(rows) (control.costs.Costs)."""
        return self.rows[rows - 1]

    def up_bytes(self, drafts: int) -> float:
        """Payload of a frame with so many drafts."""
        each = TOKEN_BYTES + (Q_BYTES if self.rule is Rule.RATIO else 0)
        return UP_BYTES + drafts * each

    @property
    def rejection_bytes(self) -> tuple[float, float]:
        """What a rejection adds to the payload, up and down: the residual dialogue."""
        if self.rule is not Rule.RATIO:
            return 0.0, 0.0
        return float(CORRECT_BYTES), float(PROPOSALS_BYTES)


def longest(facts: Facts) -> int:
    """Most drafts of a block that is worth asking about: behind, hardly any stands."""
    alive = facts.curve.survival(MAX_LENGTH)
    return max(1, sum(s > 1e-6 for s in alive))


VERDICT_BYTES: Final = float(DOWN_BYTES)
"""Payload of a VERDICT or of a TOKENS frame with one id."""
