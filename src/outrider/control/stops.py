"""Two that end a block by what the draft says of itself: `adaedl` and `specdecpp`.

Both decide the greatest length and hand out a stop rule, which the draft engine asks after each
token it draws (`engines.drafters` says why that keeps every acceptance rule exact). A rule is
made anew for each block and carries its numbers with it, so it shares nothing with the
controller, which lives on another thread.

`adaedl` (AdaEDL, arXiv 2410.18351; docs/papers.md, 7) needs no training: 1 - sqrt(c H(q)) estimates
the acceptance from below, and a block ends where that falls under a threshold lambda.

`specdecpp` (SpecDec++, arXiv 2405.19715; docs/papers.md, 7) asks a trained head for each token's
acceptance and ends a block when P(some token falls) = 1 - product is above a threshold. The
published threshold is .3, for two models in one place. Over a network it must hold the round
trip. Ours, derived [I]:

    A round with k drafts takes N(k) = start + k (t_d + b) + R + queue + t_v(k+1) seconds, b being
    the way of one id up the link, and commits 1 + (P_1 + ... + P_k) tokens on average, P_i the
    probability that the first i stand. Rounds repeat, so what counts is the ratio of the means
    (renewal reward), and the policy with the least ratio L is the one that minimises
    E[N] - L E[tokens]: a token is worth L seconds. Behind i drafts, R, queue and start are spent
    whatever happens next; m more drafts cost

        C(i,m) = m (t_d + b) + t_v(i+m+1) - t_v(i+1)

    and bring P_i (a_1 + a_1 a_2 + ... + a_1...a_m) tokens, with a_j the acceptance expected of
    the j-th further token given those before it. So draft on while for some m

        P_i > need(i,m) = C(i,m) / (L (a_1 + ... + a_1...a_m)),

    which is SpecDec++'s form, stop when 1 - P_i > 1 - min_m need(i,m). R enters through L: a
    longer round trip makes a token dearer, the threshold higher, the block longer.

For constant acceptance this is the length with the least N/B exactly, whatever the shape of
t_v (looking ahead by more than one step is what a staircase of row costs needs). For acceptances
that vary independently and constant cost, m = 1 alone is optimal, since P never grows (the
monotone case of optimal stopping). L is not known; the least ratio of a fixed length under the
present estimates stands in for it. That is never less than L, so it stops too late rather than
too early, and in the monotone case the policy it gives is never worse than that fixed length.
tests/control/test_stops.py holds these against enumeration.

In the streaming schedules a block is what one call of the draft engine makes; R is then not paid
a round and these thresholds are not made for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from outrider.control import head
from outrider.control.base import (
    CalibrationError,
    ControllerFacts,
    Decision,
    Estimates,
    Observation,
    Outcome,
)
from outrider.core.draft import DraftSignal, StopRule

COEFFICIENT: Final = 0.2
"""c of AdaEDL."""
TARGET: Final = 0.9
"""Acceptance AdaEDL steers to."""
BETA1: Final = 0.5
BETA2: Final = 0.9
EPSILON: Final = 0.01
THRESHOLD: Final = 0.3
"""SpecDec++'s published threshold, on predictions bent by the class weight."""
PUBLISHED_MIN: Final = 2
"""SpecDec++'s shortest block (with THRESHOLD); it has 20 as the longest."""
ID_BYTES: Final = 4
"""One drafted id on the wire (a DRAFT of 8 ids is under 32 bytes)."""


class EntropyStop:
    """Stop when 1 - sqrt(c H(q)) < threshold, from the token `min_length` on."""

    needs_hidden = False

    def __init__(self, *, coefficient: float, threshold: float, min_length: int = 1) -> None:
        self._coefficient = coefficient
        self._threshold = threshold
        self._min = min_length

    def start(self) -> None:
        """Nothing is carried from token to token."""

    def stop(self, signal: DraftSignal) -> bool:
        estimate = 1.0 - math.sqrt(self._coefficient * max(0.0, signal.entropy))
        return signal.index + 1 >= self._min and estimate < self._threshold


class AdaEdl:
    """`adaedl`: see the module docstring.

    lambda follows the acceptance of rounds. docs/papers.md gives the constants (beta1 .5, beta2 .9,
    epsilon .01, target .9) and that the update is a moving average; the steps are, in our
    reading, those of adaptive draft exiting (Draft & Verify, arXiv 2309.08168), whose constants
    they are:

        r      <- beta1 r + (1 - beta1) accepted / drafted
        lambda <- beta2 lambda + (1 - beta2) (lambda + epsilon)    where r <= target
                  beta2 lambda + (1 - beta2) (lambda - epsilon)    else

    Our defaults where nothing is stated: lambda starts at .5 and stays in [0, 1], r starts at
    the target, every judged block counts (also one of full length), shortest block 1. With these
    constants lambda moves .001 a round, so where it starts matters for hundreds of rounds.
    """

    def __init__(self, facts: ControllerFacts) -> None:
        facts.refuse_options(
            "coefficient", "lambda", "target", "beta1", "beta2", "epsilon", "min_length"
        )
        self.name = "adaedl"
        self._max = facts.max_length
        self._min = int(facts.option("min_length", 1, 1, facts.max_length))
        self._coefficient = facts.option("coefficient", COEFFICIENT, 0.0, 100.0)
        self._target = facts.option("target", TARGET, 0.0, 1.0)
        self._beta1 = facts.option("beta1", BETA1, 0.0, 1.0)
        self._beta2 = facts.option("beta2", BETA2, 0.0, 1.0)
        self._epsilon = facts.option("epsilon", EPSILON, 0.0, 1.0)
        self.threshold = facts.option("lambda", 0.5, 0.0, 1.0)
        """lambda."""
        self.acceptance = self._target
        """r."""

    def decide(self, observation: Observation) -> Decision:
        return Decision(length=max(0, min(self._max, observation.room)))

    def observe(self, outcome: Outcome, now: float) -> None:  # noqa: ARG002
        if outcome.drafted < 1:
            return
        share = outcome.accepted / outcome.drafted
        self.acceptance = self._beta1 * self.acceptance + (1.0 - self._beta1) * share
        step = self._epsilon if self.acceptance <= self._target else -self._epsilon
        moved = self._beta2 * self.threshold + (1.0 - self._beta2) * (self.threshold + step)
        self.threshold = min(1.0, max(0.0, moved))

    def stop_rule(self) -> StopRule | None:
        return EntropyStop(
            coefficient=self._coefficient, threshold=self.threshold, min_length=self._min
        )


class HeadStop:
    """Stop when the predicted P(all tokens so far stand) is below what the next ones need."""

    needs_hidden = True

    def __init__(
        self, stop_head: head.StopHead, need: Sequence[float], *, weighted: bool, min_length: int
    ) -> None:
        """`need[i]`: least P behind i + 1 tokens to draft on; the last entry goes for all beyond.
        `weighted`: take the predictions as the class weight bends them (`control.head`)."""
        self._predict = stop_head.weighted if weighted else stop_head.acceptance
        self._need = tuple(need)
        self._min = min_length
        self._alive = 1.0

    def start(self) -> None:
        self._alive = 1.0

    def stop(self, signal: DraftSignal) -> bool:
        if signal.hidden is None:
            raise CalibrationError("specdecpp: this draft shows no hidden state; use adaedl")
        self._alive *= self._predict(signal.hidden, signal.probability, signal.entropy)
        need = self._need[min(signal.index, len(self._need) - 1)]
        # A prediction that is no number ends the block.
        return signal.index + 1 >= self._min and not self._alive >= need


class SpecDecPlusPlus:
    """`specdecpp`: see the module docstring.

    `calibration`: the draft whose shipped head to use ('large', 'small', 'lookup+large'), a
    calibration folder with a `stop_head.npz`, or such a file; without one the shipped head of
    the draft in use. A head of another draft would predict nonsense and is refused.

    Options: `threshold` (given: that fixed threshold on bent predictions, as published with .3;
    not given: the derived one), `min_length` (1; with `threshold` 2, as published).
    """

    def __init__(self, facts: ControllerFacts) -> None:
        facts.refuse_options("threshold", "min_length")
        where = facts.calibration or facts.draft
        if not where:
            raise CalibrationError(
                "specdecpp needs the stop head of the draft in use: give the draft's spec (large, "
                "small) or a file of bench/train_stop_head.py as calibration"
            )
        self.name = "specdecpp"
        self.head = head.load(where)
        draft = facts.draft.rpartition("+")[2]
        if draft and self.head.draft != draft:
            raise CalibrationError(
                f"the stop head was trained on the draft {self.head.draft!r}, not on {draft!r}: "
                "make one with bench/train_stop_head.py"
            )
        self._published = "threshold" in facts.options
        threshold = facts.option("threshold", THRESHOLD, 0.0, 1.0)
        shortest = PUBLISHED_MIN if self._published else 1
        self._max = facts.max_length
        self._min = int(facts.option("min_length", min(shortest, self._max), 1, self._max))
        self._need: tuple[float, ...] = (1.0 - threshold,)

    def decide(self, observation: Observation) -> Decision:
        length = max(0, min(self._max, observation.room))
        if length and not self._published:
            self._need = tuple(needs(observation.estimates, length))
        return Decision(length=length)

    def observe(self, outcome: Outcome, now: float) -> None:
        """Nothing is learnt here: the estimates carry it."""

    def stop_rule(self) -> StopRule | None:
        """By the costs of the last decision; before the first, the published threshold."""
        return HeadStop(self.head, self._need, weighted=self._published, min_length=self._min)


def needs(estimates: Estimates, length: int) -> list[float]:
    """need_i for i = 1 ... length - 1: least P(the first i all stand) to draft on for, under the
    estimates; [1.0] for length 1. Module docstring."""
    step = draft_step(estimates)
    rows = judging(estimates, length)
    acceptance = [estimates.curve.acceptance(i) for i in range(length)]
    worth = seconds_per_token(estimates, rows)
    return [need(i, worth, step, rows, acceptance[i:]) for i in range(1, length)] or [1.0]


def need(
    drafted: int, worth: float, step: float, rows: Sequence[float], acceptance: Sequence[float]
) -> float:
    """min over m of C(drafted, m) / (worth (a_1 + ... + a_1...a_m)); infinite when nothing more
    can be gained. `worth`: L, seconds a token; `step`: t_d + b, seconds a draft token; `rows`:
    as of `judging`; `acceptance`: a_1, a_2, ... of the tokens that may follow."""
    least, alive, tokens = math.inf, 1.0, 0.0
    for m, a in enumerate(acceptance, start=1):
        alive *= a
        tokens += alive
        cost = m * step + rows[drafted + m] - rows[drafted]
        if worth * tokens > 0.0:
            least = min(least, max(0.0, cost) / (worth * tokens))
    return least


def seconds_per_token(estimates: Estimates, rows: Sequence[float]) -> float:
    """The least N(k)/B(k) over k = 0 ... len(rows) - 1: synchronous rounds, seconds a token."""
    step = draft_step(estimates)
    waiting = estimates.round_trip + estimates.queue
    best, tokens = waiting + rows[0], 1.0
    for k, alive in enumerate(estimates.curve.survival(len(rows) - 1), start=1):
        tokens += alive
        best = min(best, (estimates.draft_start + k * step + waiting + rows[k]) / tokens)
    return best


def draft_step(estimates: Estimates) -> float:
    """t_d + b: seconds one more draft token takes before it is judged."""
    return estimates.draft + ID_BYTES * estimates.byte_up


def judging(estimates: Estimates, length: int) -> list[float]:
    """t_v(k + 1) for k = 0 ... length: seconds of the forward that judges k drafts."""
    return [estimates.verify.seconds(k + 1) for k in range(length + 1)]
