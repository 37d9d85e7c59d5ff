"""The default: the model's best length, held steady, tried a little, and none where none pays.

Rules:

1. The length is `specstop`'s: argmin of N(k) / B(k) by the estimates, plus what rounds in this
   delay state were seen to take beyond the model. The first rounds play the fixed length, twice
   and half of it in turn: from one length alone no costs can be told apart. Where link and
   target were measured by the greeting (`Estimates.informed`), the estimates decide at once, and
   the cloud alone until then.
2. It is held, per delay state, until another is better by `margin`, and for `dwell` rounds at
   least; a length that costs `urgent` more than the best is left at once. A signal that hops
   about a threshold so gives at most one switch in `dwell` rounds.
3. A share `epsilon` of rounds tries a neighbouring length: the next longer, the next shorter and
   half as long again in turn. How the drafts behind the last one stand is known from trying
   alone: a longer length is tried while it would be better if they stood as well as may be
   believed of indices judged so seldom. A shorter one is tried while it is new or nearly equal.
   While no plain step was ever measured, the first PLAIN_TRIES of them are plain rounds: else
   t_ar would be read off forwards of many rows, and the cloud alone look dear for ever.
4. "Do not speculate" takes two strikes and lasts `dwell` rounds too; see `gate`. Before GRACE
   verdicts it takes that hope would not pay either.

A link's states last for a time, so each state takes the length that is best in it. Where states
last for a number of rounds instead, one length for all would be (`markov`): on the published
testbeds that costs 0.5 to 1.4 % in rounds that alternate, and saves 0.7 to 1.0 % in time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from outrider.control.base import (
    MAX_LENGTH,
    ControllerFacts,
    Decision,
    Estimates,
    Observation,
    Outcome,
)
from outrider.control.corrections import MAX_STATES, Corrections
from outrider.control.gate import GATE_OPTIONS, Gate
from outrider.control.specstop import BELIEF, TOKEN_BYTES, Outlook, outlook
from outrider.core.draft import StopRule

MARGIN: Final = 0.01
"""Relative gain that is worth a switch (our default)."""
URGENT: Final = 0.10
"""Relative loss that does not wait (our default): a hop about a threshold costs far less."""
DWELL: Final = 8
"""Rounds between switches (field case 17)."""
EPSILON: Final = 0.2
"""Share of rounds that may try a neighbouring length (our default): only promising ones are."""
DEAR: Final = 0.02
"""Relative loss by the model up to which a shorter length counts as nearly equal (our default)."""
KNOWN: Final = 3.0
"""Rounds of a length, fading by SEEN_FORGET a round, that make it known (our defaults)."""
SEEN_FORGET: Final = 0.998
PLAIN_TRIES: Final = 3
"""Plain rounds that are tried for the cost of one row (our default)."""
FIRST_ROUNDS: Final = 6
"""Rounds before the estimates decide (our default)."""


@dataclass(slots=True)
class _Held:
    length: int
    age: int
    """Rounds since it was taken up."""


class Auto:
    """See the module docstring.

    Options: `margin`, `urgent`, `dwell` (rounds), `epsilon`, and those of `gate.Gate`.
    """

    def __init__(self, facts: ControllerFacts) -> None:
        facts.refuse_options("margin", "urgent", "dwell", "epsilon", "token_bytes", *GATE_OPTIONS)
        self.name = "auto"
        self._most = max(1, min(facts.max_length, MAX_LENGTH))
        self._first = max(1, min(facts.fixed_length, self._most))
        self._margin = facts.option("margin", MARGIN, 0.0, 1.0)
        self._urgent = facts.option("urgent", URGENT, 0.0, 10.0)
        self._dwell = round(facts.option("dwell", DWELL, 0, 10_000))
        self._epsilon = facts.option("epsilon", EPSILON, 0.0, 0.5)
        self._token_bytes = facts.option("token_bytes", TOKEN_BYTES, 0.0, 1e6)
        self._gate = Gate.from_facts(facts, dwell=self._dwell)
        self._corrections = Corrections()
        self._held: dict[int, _Held] = {}
        self._untried = 0
        self._tries = 0
        self._seen = [0.0] * (self._most + 1)
        self._judged = [0.0] * self._most
        self._plain_tries = 0 if self._gate.may_stop else PLAIN_TRIES
        self._begun = False
        self._answer: tuple[int, int] | None = None
        self._predicted: tuple[float, ...] = ()

    def decide(self, observation: Observation) -> Decision:
        if observation.room < 1:
            return Decision(length=0)
        if observation.free:
            return Decision(length=min(self._most, observation.room))
        known = observation.estimates
        if observation.opening and known.rounds == 0 and not known.informed:
            return Decision(length=0)  # the link is not known: OPENED tells, and is asked about
        state = max(0, min(MAX_STATES - 1, known.delay_state))
        view = outlook(
            known,
            self._most,
            streaming=observation.streaming,
            token_bytes=self._token_bytes,
            extra=self._corrections.extra(state),
        )
        warm = known.informed or known.rounds >= FIRST_ROUNDS
        length = self._length(view, state) if warm else self._warm_up(known.rounds)
        self._answer = (state, length) if warm else None
        # What is told apart from the model while it rests on defaults is no error of it.
        self._predicted = view.round_seconds if warm and not observation.streaming else ()
        # A short room is no reason to change what is held.
        chosen = min(self._tried(view, length) if warm else length, observation.room)
        worth = view.worth_going_on(known.rounds)
        if known.informed and known.rounds == 0 and not self._begun:
            self._begun = True
            self._gate.begin(on=worth)
        on = self._gate.speculate(worth=worth, excess=view.excess[chosen])
        if (
            on
            and warm
            and self._due()
            and self._plain_tries < PLAIN_TRIES
            and _no_plain_step(known)
        ):
            return Decision(length=0)
        return Decision(length=chosen if on else 0)

    def observe(self, outcome: Outcome, now: float) -> None:  # noqa: ARG002
        drafted = outcome.drafted
        if drafted:
            self._count(min(drafted, self._most), outcome.strict)
        self._gate.round_ended(speculated=drafted > 0)
        if 0 < drafted < len(self._predicted):
            self._corrections.observe(
                outcome.delay_state,
                predicted=self._predicted[drafted],
                seconds=outcome.seconds,
            )
        if self._answer is None:
            return
        state, length = self._answer
        self._answer = None
        held = self._held.get(state)
        if held is None or held.length != length:
            self._held[state] = _Held(length, 1)
        else:
            held.age += 1
        self._count_try(plain=not drafted)

    def stop_rule(self) -> StopRule | None:
        return None

    @property
    def held(self) -> dict[int, int]:
        """Length by delay state, without tries and rounds of little room."""
        return {state: held.length for state, held in self._held.items()}

    # ------------------------------------------------------------------------------ inside

    def _length(self, view: Outlook, state: int) -> int:
        held = self._held.get(state)
        if held is None:
            return view.length
        here, best = view.token_seconds[held.length], view.token_seconds[view.length]
        if here > best * (1.0 + self._urgent):
            return view.length
        rested = held.age >= self._dwell
        return view.length if rested and here > best * (1.0 + self._margin) else held.length

    def _warm_up(self, rounds: int) -> int:
        first = self._first
        return min(self._most, (first, 2 * first, max(1, first // 2))[rounds % 3])

    def _tried(self, view: Outlook, length: int) -> int:
        """The length, or in a share of rounds a neighbour of it."""
        if not self._due():
            return length
        step = (1, -1, 1 + length // 2)[self._tries % 3]
        other = min(length + step, self._most)
        if other < 1:
            return length
        return other if self._promising(view, length, other) else length

    def _promising(self, view: Outlook, length: int, other: int) -> bool:
        here, there = view.token_seconds[length], view.token_seconds[other]
        if other <= length:
            return self._seen[other] < KNOWN or there <= here * (1.0 + DEAR)
        tokens = view.tokens
        hoped, alive = tokens[length], tokens[length] - tokens[length - 1]
        for i in range(length, other):
            stands = (tokens[i + 1] - tokens[i]) / max(tokens[i] - tokens[i - 1], 1e-12)
            alive *= min(1.0, stands + BELIEF / math.sqrt(1.0 + self._judged[i]))
            hoped += alive
        return there * tokens[other] < here * hoped

    def _count(self, drafted: int, stood: int) -> None:
        self._seen = [SEEN_FORGET * n for n in self._seen]
        self._seen[drafted] += 1.0
        judged = min(drafted, stood + 1)
        self._judged = [SEEN_FORGET * n + (i < judged) for i, n in enumerate(self._judged)]

    def _due(self) -> bool:
        """Whether this round tries something."""
        return bool(self._epsilon) and self._untried + 1 >= 1.0 / self._epsilon

    def _count_try(self, *, plain: bool) -> None:
        if not self._due():
            self._untried += 1
            return
        self._untried = 0
        if plain:
            self._plain_tries += 1
        else:
            self._tries += 1


def _no_plain_step(known: Estimates) -> bool:
    points = known.verify.curve()
    return not points or points[0][0] > 1
