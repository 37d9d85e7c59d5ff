"""A controller against recorded text: the real object, asked and told as it would be live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.calibrate.costs import SegmentCosts
from outrider.calibrate.trace import Answer, leading
from outrider.control.base import Controller, Estimates, Observation, Outcome
from outrider.control.costs import PrefixCurve


@dataclass(slots=True)
class Replayed:
    """Sums over segments. Exact for T = 0; above, recorded text stands in (`calibrate.trace`)."""

    seconds: float = 0.0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    strict: int = 0
    """Leading drafts by the strict rule."""
    right: int = 0
    """Accepted drafts, leading or not, that are the target's own token."""
    distance: float = 0.0
    """Summed total variation of p and q over the accepted drafts that are not."""
    rounds: int = 0

    def as_dict(self) -> dict[str, float]:
        """Per token or per accepted draft; NaN-free."""
        accepted = max(1, self.accepted)
        return {
            "ms_per_token": 1e3 * self.seconds / max(1, self.tokens),
            "tokens": self.tokens,
            "tokens_per_round": self.tokens / max(1, self.rounds),
            "window": self.drafted / max(1, self.rounds),
            "acceptance": self.accepted / max(1, self.drafted),
            "quality": self.strict / accepted if self.accepted else 1.0,
            "right": self.right / accepted if self.accepted else 1.0,
            "relaxed_per_token": (self.accepted - self.right) / max(1, self.tokens),
            "tv_per_token": self.distance / max(1, self.tokens),
        }


def replay(
    answers: Sequence[Answer], controller: Controller, costs: SegmentCosts, *, relaxed: bool
) -> Replayed:
    """Run `controller` through all answers; `relaxed`: its threshold is obeyed, else T = 0."""
    known = Estimates(
        round_trip=costs.round_trip, draft=costs.draft, verify=costs.verify, curve=PrefixCurve()
    )
    total = Replayed()
    for answer in answers:
        _one(answer, controller, costs, known, total, relaxed=relaxed)
    return total


def _one(
    answer: Answer,
    controller: Controller,
    costs: SegmentCosts,
    known: Estimates,
    total: Replayed,
    *,
    relaxed: bool,
) -> None:
    strict, jsd, tv = answer.strict, np.array(answer.jsd), np.array(answer.tv)
    start = 0
    while start < len(answer):
        # The target's own token behind the drafts must be on record too.
        asked = Observation(now=total.seconds, room=len(answer) - 1 - start, estimates=known)
        decision = controller.decide(asked)
        part = slice(start, start + decision.length)
        limit = (decision.threshold or 0.0) if relaxed else 0.0
        accepted = leading(strict[part] | (jsd[part] <= limit))
        whole = accepted == decision.length > 0
        seconds = costs.seconds(decision.length, float(whole))
        tokens = round(costs.tokens(accepted, float(whole)))
        outcome = Outcome(
            decision=decision,
            drafted=decision.length,
            accepted=accepted,
            strict=leading(strict[part]),
            tokens=tokens,
            seconds=seconds,
        )
        total.seconds += seconds
        total.tokens += tokens
        total.rounds += 1
        total.drafted += decision.length
        total.accepted += accepted
        total.strict += outcome.strict
        stood = slice(start, start + accepted)
        total.right += int(strict[stood].sum())
        total.distance += float(tv[stood][~strict[stood]].sum())
        controller.observe(outcome, total.seconds)
        start += tokens
