"""UCB-SpecStop: the draft length as a bandit over ratios of sums (docs/papers.md, 3).

* `ucb-specstop`: Alg 1 as published.
* `contextual`: Alg 2 as published, the same tables for each delay state.
* `ucb-scaled`: ours. As published, the bonus has no unit: with costs of hundreds of milliseconds
  it is about 1 % of a cost after one play and .1 % after a hundred, so that the policy is nearly
  greedy after its first sweep (docs/papers.md, 3, "Scale problem"); and it never forgets.

Arms are the lengths 1..max_length; "do not speculate" is not an arm.
"""

from __future__ import annotations

import math
from typing import Final

from outrider.control.bandits import BETA, MS, arm_played, lowest
from outrider.control.base import ControllerFacts, Decision, Estimates, Observation, Outcome
from outrider.core.draft import StopRule

MAX_STATES: Final = 16
"""Delay states with tables of their own; later ones share the last (memory is bounded, I7)."""
SCALED_BETA: Final = 0.25
"""Weight of the scaled bonus (our default). Of .15, .25 and .5 it had the least mean loss over the
worlds of bench/regret.py (1.25, .68, .92 %; 20 seeds): a smaller one stays too short where
neighbours are close, a larger one tries too much where a short length is plainly best."""
TIME_WINDOW: Final = 20.0
"""Rounds that the mean time rests on (our default): a delay drifts within seconds."""
TEXT_WINDOW: Final = 300.0
"""Rounds that acceptance rests on (our default): it changes with the text, not with the link."""


class RatioTable:
    """S_N, S_A and T of every arm, and Alg 1's choice from them. Costs are milliseconds."""

    __slots__ = ("_arms", "_beta", "_plays", "_rounds", "_time", "_tokens")

    def __init__(self, arms: int, beta: float) -> None:
        self._arms, self._beta = arms, beta
        self._rounds = 0
        self._plays = [0] * (arms + 1)
        self._time = [0.0] * (arms + 1)
        self._tokens = [0] * (arms + 1)

    def bound(self, arm: int) -> float:
        """S_N/S_A - beta*sqrt(T ln t)/S_A; an arm that was never played comes first."""
        plays, tokens = self._plays[arm], self._tokens[arm]
        if not plays:
            return -math.inf
        return (self._time[arm] - self._beta * math.sqrt(plays * math.log(self._rounds))) / tokens

    def choose(self, room: int) -> int:
        high = min(self._arms, room)
        return lowest(1, high, self.bound) if high >= 1 else 0

    def add(self, outcome: Outcome) -> None:
        arm = arm_played(outcome, self._arms)
        if arm is not None:
            self._rounds += 1
            self._plays[arm] += 1
            self._time[arm] += MS * outcome.seconds
            self._tokens[arm] += outcome.tokens


class UcbSpecStop:
    """Alg 1: every arm once, then argmin S_N/S_A - beta*sqrt(T ln t)/S_A.

    N_t is the round's time in milliseconds, A_t the tokens it committed. Options: `beta` (1.0,
    published).
    """

    def __init__(self, facts: ControllerFacts) -> None:
        facts.refuse_options("beta")
        self.name = "ucb-specstop"
        self._table = RatioTable(facts.max_length, facts.option("beta", BETA, 0.0, 1e6))

    def decide(self, observation: Observation) -> Decision:
        return Decision(length=self._table.choose(observation.room))

    def observe(self, outcome: Outcome, now: float) -> None:  # noqa: ARG002
        self._table.add(outcome)

    def stop_rule(self) -> StopRule | None:
        return None


class Contextual:
    """Alg 2: Alg 1 within the delay state that is observed first; t counts the state's rounds.

    The state is `Estimates.delay_state`. Options: `beta` (1.0, published).
    """

    def __init__(self, facts: ControllerFacts) -> None:
        facts.refuse_options("beta")
        self.name = "contextual"
        self._arms = facts.max_length
        self._beta = facts.option("beta", BETA, 0.0, 1e6)
        self._tables: dict[int, RatioTable] = {}

    def _table(self, state: int) -> RatioTable:
        state = max(0, min(state, MAX_STATES - 1))
        return self._tables.setdefault(state, RatioTable(self._arms, self._beta))

    def decide(self, observation: Observation) -> Decision:
        table = self._table(observation.estimates.delay_state)
        return Decision(length=table.choose(observation.room))

    def observe(self, outcome: Outcome, now: float) -> None:  # noqa: ARG002
        self._table(outcome.delay_state).add(outcome)

    def stop_rule(self) -> StopRule | None:
        return None


class UcbScaled:
    """Alg 1 with a bonus in the unit of the costs, statistics that forget, and shared rounds.

    1. *Shared rounds.* A block of k drafts of which a stood tells what every shorter block would
       have brought, so B(k) = 1 + sum of P(L >= i), i <= k, each from all rounds that drafted i.
       Lengths differ in time by what drafting and judging their rows costs, which the edge has
       measured (`Estimates`); so every round tells the time of every length.
    2. *Forgetting.* Old rounds fade: time within `time_window` rounds, acceptance within `window`.
    3. *Scaled bonus.* beta * range * sqrt(ln t / T) / B, which is Alg 1's with S_A = T*B, times
       the range of a round's cost. Neighbours differ by at most one token a round, so it is what
       a token costs now, the least N/B. T, t: faded rounds that drafted k, and all.
    4. *Neighbours only.* N/B has one minimum where S falls geometrically (Thm 1), so the
       candidates are the best length so far and its two neighbours. With a heavy head there may
       be a second minimum further up, which this does not look for.

    Begins at `fixed_length`. Options: `beta` (0.25), `window` (300), `time_window` (20).
    """

    def __init__(self, facts: ControllerFacts) -> None:
        facts.refuse_options("beta", "window", "time_window")
        self.name = "ucb-scaled"
        self._arms = facts.max_length
        self._lengths = range(1, self._arms + 1)
        self._first = max(1, min(facts.fixed_length, self._arms))
        self._beta = facts.option("beta", SCALED_BETA, 0.0, 1e6)
        self._keep = 1.0 - 1.0 / facts.option("window", TEXT_WINDOW, 1.0, 1e9)
        self._keep_time = 1.0 - 1.0 / facts.option("time_window", TIME_WINDOW, 1.0, 1e9)
        self._alive = [0.0] * (self._arms + 1)
        """Faded rounds in which at least i drafts stood."""
        self._tries = [0.0] * (self._arms + 1)
        """Faded rounds in which at least i were drafted; of index 0 all rounds."""
        self._seconds = [0.0] * (self._arms + 1)
        """Faded sum of round times by length drafted, and the faded rounds behind it."""
        self._plays = [0.0] * (self._arms + 1)

    def decide(self, observation: Observation) -> Decision:
        high = min(self._arms, observation.room)
        if high < 1:
            return Decision(length=0)
        if not self._tries[0]:
            return Decision(length=min(self._first, high))
        costs, tokens = self._costs(observation.estimates, high)
        known = [k for k in range(1, high + 1) if self._tries[k] > 0.0]
        leader = min(known, key=lambda k: costs[k] / tokens[k])
        best = costs[leader] / tokens[leader]

        def bound(arm: int) -> float:
            if self._tries[arm] <= 0.0:
                return -math.inf
            t = max(self._tries[0], 1.0)
            bonus = self._beta * best * math.sqrt(math.log(t) / self._tries[arm])
            return (costs[arm] - bonus) / tokens[arm]

        return Decision(length=lowest(max(1, leader - 1), min(leader + 1, high), bound))

    def _costs(self, estimates: Estimates, high: int) -> tuple[list[float], list[float]]:
        """N(k) in seconds and B(k), k = 0..high."""
        own = [0.0] + [k * estimates.draft + estimates.verify.seconds(k + 1) for k in self._lengths]
        shared = sum(s - p * c for s, p, c in zip(self._seconds, self._plays, own, strict=True))
        shared /= sum(self._plays)
        tokens, whole = [1.0], 1.0
        for k in range(1, high + 1):
            whole += self._alive[k] / self._tries[k] if self._tries[k] > 0.0 else 0.0
            tokens.append(whole)
        return [shared + own[k] for k in range(high + 1)], tokens

    def observe(self, outcome: Outcome, now: float) -> None:  # noqa: ARG002
        arm = arm_played(outcome, self._arms)
        if arm is None:
            return
        for k in range(self._arms + 1):
            self._alive[k] *= self._keep
            self._tries[k] *= self._keep
            self._seconds[k] *= self._keep_time
            self._plays[k] *= self._keep_time
        for k in range(arm + 1):
            self._tries[k] += 1.0
            self._alive[k] += k <= outcome.accepted
        self._seconds[arm] += outcome.seconds
        self._plays[arm] += 1.0

    def stop_rule(self) -> StopRule | None:
        return None
