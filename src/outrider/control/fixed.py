"""The two that learn nothing: always K drafts, and none at all."""

from __future__ import annotations

from outrider.control.base import ControllerFacts, Decision, Observation, Outcome
from outrider.core.draft import StopRule


class Fixed:
    """K drafts, always (SPADE; every plain speculative decoder)."""

    def __init__(self, facts: ControllerFacts) -> None:
        facts.refuse_options()
        self.name = "fixed"
        self._length = facts.fixed_length

    def decide(self, observation: Observation) -> Decision:
        return Decision(length=max(0, min(self._length, observation.room)))

    def observe(self, outcome: Outcome, now: float) -> None:
        """Nothing is learnt."""

    def stop_rule(self) -> StopRule | None:
        return None


class Never:
    """No drafts: the cloud streams alone. "Do nothing" is a policy and not an `if`."""

    def __init__(self, facts: ControllerFacts) -> None:
        facts.refuse_options()
        self.name = "never"

    def decide(self, observation: Observation) -> Decision:  # noqa: ARG002
        return Decision(length=0)

    def observe(self, outcome: Outcome, now: float) -> None:
        """Nothing is learnt."""

    def stop_rule(self) -> StopRule | None:
        return None
