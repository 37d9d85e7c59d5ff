"""Learners without a model: a draft length is an arm, its cost is seconds per token.

Two of the baselines of UCB-SpecStop (arXiv 2606.20591; docs/papers.md, 3), as they are told there,
and what all learners over lengths share. Arms are the lengths 1..max_length; "do not speculate" is
not an arm. None of these forgets: they are baselines (`ucb-scaled` forgets).

The bonus terms of the paper are added to costs in milliseconds, without a unit of their own:
whoever fed them seconds would explore a thousand times as much. So costs are milliseconds here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from outrider.control.base import ControllerFacts, Decision, Observation, Outcome
from outrider.core import rng
from outrider.core.draft import StopRule

MS: Final = 1e3
"""Milliseconds a second."""
BETA: Final = 1.0
"""Weight of the bonus (published; flat from 0.5 to 2 there)."""
GAMMA: Final = 0.1
"""Share of EXP3's rounds played evenly over all arms (not stated there; our default)."""


def arm_played(outcome: Outcome, arms: int) -> int | None:
    """The arm an outcome tells about; None: nothing was drafted, or its figures are nonsense.

    It is the number of drafts judged, not the number asked for: the end of an answer cuts
    blocks short, and time and tokens are those of the short block.
    """
    usable = 0.0 < outcome.seconds < math.inf and outcome.tokens >= 1
    return outcome.drafted if usable and 1 <= outcome.drafted <= arms else None


def lowest(low: int, high: int, score: Callable[[int], float]) -> int:
    """The arm in low..high with the lowest score, the shortest among equals."""
    return min(range(low, high + 1), key=score)


class NaiveUcb:
    """Lower confidence bound on the mean of the per-round ratios N/A (docs/papers.md, 3).

    k_t = argmin mean(N/A) - beta * sqrt(ln t / T_k), after every arm was played once. The mean of
    ratios is not the ratio of means: what it settles on need not have the fewest seconds a token.
    Options: `beta` (1.0, published).
    """

    def __init__(self, facts: ControllerFacts) -> None:
        facts.refuse_options("beta")
        self.name = "naive-ucb"
        self._beta = facts.option("beta", BETA, 0.0, 1e6)
        self._arms = facts.max_length
        self._rounds = 0
        self._plays = [0] * (self._arms + 1)
        self._ratios = [0.0] * (self._arms + 1)

    def decide(self, observation: Observation) -> Decision:
        high = min(self._arms, observation.room)
        return Decision(length=lowest(1, high, self._bound) if high >= 1 else 0)

    def _bound(self, arm: int) -> float:
        plays = self._plays[arm]
        if not plays:
            return -math.inf
        return self._ratios[arm] / plays - self._beta * math.sqrt(math.log(self._rounds) / plays)

    def observe(self, outcome: Outcome, now: float) -> None:  # noqa: ARG002
        arm = arm_played(outcome, self._arms)
        if arm is not None:
            self._rounds += 1
            self._plays[arm] += 1
            self._ratios[arm] += MS * outcome.seconds / outcome.tokens

    def stop_rule(self) -> StopRule | None:
        return None


class Exp3:
    """Exponential weights for adversarial rewards (Auer et al., SIAM J. Comput. 32, 2002).

    The paper has an "EXP3-ratio" among its baselines and does not say how the ratio enters. Ours:
    the loss of a round is N - c*A with c the seconds a token so far (Dinkelbach's form, whose
    minimum over arms is the best ratio), mapped to a reward in [0, 1] by the range seen so far.
    An outcome is weighed by the arm's probability when it arrives; with several requests in
    flight that may differ a little from the one it was drawn with. Options: `gamma` (0.1).

    The draw has an address (seed, rounds observed) and no state: asking twice gives the same arm.
    """

    def __init__(self, facts: ControllerFacts) -> None:
        facts.refuse_options("gamma")
        self.name = "exp3"
        self._gamma = facts.option("gamma", GAMMA, 1e-6, 1.0)
        self._arms = facts.max_length
        self._seed = facts.seed
        self._rounds = 0
        self._logs = [0.0] * self._arms
        """Logarithm of each arm's weight, the largest 0: weights themselves would overflow."""
        self._seconds, self._tokens = 0.0, 0
        self._low, self._high = math.inf, -math.inf

    def decide(self, observation: Observation) -> Decision:
        high = min(self._arms, observation.room)
        if high < 1:
            return Decision(length=0)
        point = rng.token_uniform(rng.mix((self._seed + self._rounds * rng.GOLDEN) & rng.MASK), 0)
        for arm, chance in enumerate(self.chances(high)[:-1], start=1):
            point -= chance
            if point < 0.0:
                return Decision(length=arm)
        return Decision(length=high)

    def chances(self, arms: int) -> list[float]:
        """Probabilities of the arms 1..arms when no others may be played."""
        weights = [math.exp(log) for log in self._logs[:arms]]
        scale = (1.0 - self._gamma) / max(sum(weights), 1e-300)
        mixed = [weight * scale + self._gamma / arms for weight in weights]
        whole = sum(mixed)  # below 1 when all weight lies on arms that may not be played
        return [chance / whole for chance in mixed]

    def observe(self, outcome: Outcome, now: float) -> None:  # noqa: ARG002
        arm = arm_played(outcome, self._arms)
        if arm is None:
            return
        self._rounds += 1
        self._seconds += outcome.seconds
        self._tokens += outcome.tokens
        loss = outcome.seconds - self._seconds / self._tokens * outcome.tokens
        self._low, self._high = min(self._low, loss), max(self._high, loss)
        if self._high > self._low:
            reward = (self._high - loss) / (self._high - self._low)
            step = self._gamma / self._arms * reward / self.chances(self._arms)[arm - 1]
            self._logs[arm - 1] += step
            top = max(self._logs)
            self._logs = [log - top for log in self._logs]

    def stop_rule(self) -> StopRule | None:
        return None
