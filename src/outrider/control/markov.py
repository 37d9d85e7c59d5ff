"""Draft length as optimal stopping while the delay moves between states (UCB-SpecStop, Thm 4).

Drafting is watched token by token. The delay state s moves by P while a token is drafted; who
stops at n drafts in state s pays N(n, d(s)) and gets B(n). For the long run's seconds per token
lambda (Dinkelbach) the problem is

    g(n, s) = N(n, d(s)) - lambda B(n)
    V(n, s) = min{ g(n, s), sum over s' of P(s'|s) V(n+1, s') },    V(K, s) = g(K, s)

and lambda is the price at which the mean of V(1, s), over the states in which rounds begin, is
0. As printed the recursion counts n c_d and lambda B(n) twice; this is the corrected form
(docs/papers.md, 3, arXiv 2606.20591 Thm 4).

Thresholds k*(s), the first n at which stopping in s is optimal, are said to rise with s where
d rises and P is stochastically monotone. That is not enough [ours]: waiting must also not look
worse from a longer delay, that is, the expected change of the delay, E[d(s')|s] - d(s), must not
rise with s. Then h(n, s) = V(n, s) - d(s) falls in s by induction, whatever N(n, 0) and B(n) are,
and with it what continuing costs beyond stopping. Two-state chains with P(1|0) + P(0|1) <= 1 and
chains that move to a common law satisfy both. `tests/control/test_markov.py` holds the law and
a counter-example.

A delay that cannot change while drafting is paid whatever n is: lambda is common, so all states
then get the same length [ours]. Knowing the delay pays in the long run only as far as it moves
within a round, or where states last for a time and not for a number of rounds: then each state
is its own long run, and the length that is best in it (`specstop` with delay levels) is right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import Final

from outrider.control.base import (
    MAX_LENGTH,
    ControllerFacts,
    Decision,
    Estimates,
    Observation,
    Outcome,
)
from outrider.control.corrections import Corrections
from outrider.control.gate import GATE_OPTIONS, GRACE, Gate
from outrider.control.specstop import (
    BELIEF,
    expected_tokens,
    hoped_tokens,
    link_seconds,
    outlook,
    round_costs,
)
from outrider.core.draft import StopRule

STATES: Final = 8
"""Most delay states: `DelayLevels` learns fewer."""
REFRESH: Final = 8
"""Rounds between two solutions (our default)."""
FIRST_ROUNDS: Final = 4
"""Rounds before the model's error is learnt (our default)."""
TRANSITION_FORGET: Final = 0.995
"""Weight kept a round by counted transitions: about 200 (our default)."""
STAY_PRIOR: Final = 2.0
"""Rounds of staying that a state begins with, and MOVE_PRIOR of moving to each other state."""
MOVE_PRIOR: Final = 0.1
PRECISION: Final = 1e-4
"""Of lambda, relative."""

Matrix = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """The optimal policy."""

    token_seconds: float
    """lambda: seconds per token in the long run."""
    stops: tuple[tuple[bool, ...], ...]
    """[n - 1][s]: whether to stop at n drafts in state s; all true at the last n."""

    @property
    def thresholds(self) -> tuple[int, ...]:
        """k*(s): the first n at which stopping in state s is optimal."""
        states = range(len(self.stops[0]))
        return tuple(1 + next(n for n, row in enumerate(self.stops) if row[s]) for s in states)


def backward(
    costs: Matrix, tokens: Sequence[float], moves: Matrix, price: float
) -> tuple[list[float], list[float], list[tuple[bool, ...]]]:
    """E[N] and E[B] from (1, s) on, by s, and where to stop, at lambda = `price`.

    V(1, s) is E[N] - lambda E[B]. `costs[n - 1][s]` N(n, d(s)) and `tokens[n - 1]` B(n) for
    n = 1 .. K; `moves[s][s']` P(s'|s) while one token is drafted.
    """
    spent, got = list(costs[-1]), [tokens[-1]] * len(moves)
    stops = [(True,) * len(moves)]
    for n in range(len(costs) - 2, -1, -1):
        now, reward = costs[n], tokens[n]
        further = [(sum(map(mul, row, spent)), sum(map(mul, row, got))) for row in moves]
        stop = tuple(
            c - price * reward <= more - price * gain
            for c, (more, gain) in zip(now, further, strict=True)
        )
        spent = [c if x else f[0] for x, c, f in zip(stop, now, further, strict=True)]
        got = [reward if x else f[1] for x, f in zip(stop, further, strict=True)]
        stops.append(stop)
    return spent, got, stops[::-1]


def solve(
    costs: Matrix,
    tokens: Sequence[float],
    moves: Matrix,
    begins: Sequence[float],
    *,
    precision: float = PRECISION,
) -> Stopping:
    """The policy with the least expected N over expected B, rounds beginning by law `begins`.

    Arguments as for `backward`; costs > 0. Dinkelbach's iteration (Management Science 13, 1967):
    the best policy's ratio at the present lambda is the next lambda, which falls to the root that
    the paper bisects for, in a few steps; it ends with a relative change below `precision`.
    """
    price = sum(map(mul, begins, costs[0])) / tokens[0]
    while True:
        spent, got, stops = backward(costs, tokens, moves, price)
        found = sum(map(mul, begins, spent)) / sum(map(mul, begins, got))
        if not found < price * (1.0 - precision):
            return Stopping(token_seconds=price, stops=tuple(stops))
        price = found


class Transitions:
    """P(s'|s) from one round to the next, counted with forgetting and a prior of staying."""

    def __init__(self) -> None:
        self._counts: list[list[float]] = []
        self._last: int | None = None

    def observe(self, state: int) -> None:
        """The state of the next round; out of range counts as the nearest."""
        state = bounded(state)
        self._grow(state + 1)
        if self._last is not None:
            row = self._counts[self._last]
            for s in range(len(row)):
                row[s] = row[s] * TRANSITION_FORGET + (s == state)
        self._last = state

    def _grow(self, states: int) -> None:
        while len(self._counts) < states:
            for row in self._counts:
                row.append(0.0)
            self._counts.append([0.0] * (len(self._counts) + 1))

    def matrix(self, states: int) -> list[list[float]]:
        """Rows sum to 1."""
        self._grow(states)
        rows = []
        for s in range(states):
            prior = [STAY_PRIOR if s == t else MOVE_PRIOR for t in range(states)]
            row = [c + p for c, p in zip(self._counts[s][:states], prior, strict=True)]
            total = sum(row)
            rows.append([x / total for x in row])
        return rows

    def visits(self, states: int) -> list[float]:
        """How often each state was left of late: where rounds begin. Sums to 1."""
        self._grow(states)
        row = [1.0 + sum(self._counts[s]) for s in range(states)]
        return [x / sum(row) for x in row]


def slowed(moves: Matrix, share: float) -> list[list[float]]:
    """(1 - share) I + share P: the chain of rounds in a `share` of a round."""
    return [
        [share * p + (1.0 - share) * (s == t) for t, p in enumerate(row)]
        for s, row in enumerate(moves)
    ]


def bounded(state: int) -> int:
    """The state, in [0, STATES)."""
    return max(0, min(STATES - 1, state))


class Markov:
    """Per-state thresholds k*(s) of Thm 4, P learnt online, solved anew every few rounds.

    The edge sees the state once a round, so k*(s) of the present state is the length. P is
    counted per round; while a token is drafted it acts with share t_d / T_round of that, or
    `pace` (1: P as counted, the printed form). d(s) comes from the delay levels where the
    estimates have several, and what rounds took beyond the model in that state is added.
    Where drafts go out while others are unjudged there is one wait for many rounds and nothing
    to stop for: the answer is then that of `specstop`.

    Options: `refresh` (rounds), `pace`, and those of `gate.Gate`.
    """

    def __init__(self, facts: ControllerFacts) -> None:
        facts.refuse_options("refresh", "pace", *GATE_OPTIONS)
        self.name = "markov"
        self._most = max(1, min(facts.max_length, MAX_LENGTH))
        self._refresh = round(facts.option("refresh", REFRESH, 1, 10_000))
        pace = facts.option("pace", 0.0, 0.0, 1.0)
        self._pace = pace if "pace" in facts.options else None
        self._gate = Gate.from_facts(facts, dwell=0)
        self._moves = Transitions()
        self._corrections = Corrections()
        self._lengths: tuple[int, ...] = ()
        self._solved_for: tuple[int, bool] | None = None
        self._age = 0
        self._predicted: list[float] = []

    def decide(self, observation: Observation) -> Decision:
        room = min(self._most, observation.room)
        if room < 1:
            return Decision(length=0)
        if observation.free:
            return Decision(length=room)
        known = observation.estimates
        if observation.streaming:
            self._predicted = []
            view = outlook(known, room, streaming=True)
            length, worth, excess = view.length, view.worth, view.excess[view.length]
        else:
            length, worth, excess = self._stop(known)
        on = self._gate.speculate(worth=worth, excess=excess)
        return Decision(length=min(length, room) if on else 0)

    def observe(self, outcome: Outcome, now: float) -> None:  # noqa: ARG002
        state = bounded(outcome.delay_state)
        self._moves.observe(state)
        self._age += 1
        self._gate.round_ended(speculated=outcome.drafted > 0)
        if 0 < outcome.drafted < len(self._predicted):
            predicted = self._predicted[outcome.drafted]
            self._corrections.observe(state, predicted=predicted, seconds=outcome.seconds)

    def stop_rule(self) -> StopRule | None:
        return None

    def thresholds(self) -> tuple[int, ...]:
        """k*(s) as last solved; empty before the first question."""
        return self._lengths

    # ------------------------------------------------------------------------------ inside

    def _stop(self, known: Estimates) -> tuple[int, bool, float]:
        """Length in the present state, whether it pays there, and what a probe would cost."""
        state = bounded(known.delay_state)
        states = max(len(known.delay_levels), state + 1)
        # Early facts change fast, and a new state is unknown to the last solution.
        key = (states, known.rounds >= self._refresh)
        if key != self._solved_for or self._age >= self._refresh:
            self._solve(known, min(states, STATES))
            self._solved_for, self._age = key, 0
        length = self._lengths[state]
        costs = round_costs(known, self._most)
        # What is told apart from the model while it rests on defaults is no error of it.
        self._predicted = costs if known.rounds >= FIRST_ROUNDS else []
        tokens = expected_tokens(known.curve.survival(length))
        spent = costs[length] + self._corrections.extra(state)
        excess = max(0.0, spent / max(costs[0], 1e-9) - tokens[length])
        hoped = tokens[length]
        if known.rounds < GRACE:
            # As in `Outlook.worth_going_on`: acceptance is a guess.
            hoped = hoped_tokens(tokens, BELIEF / math.sqrt(known.rounds + 1.0))[length]
        return length, spent < hoped * costs[0], excess

    def _solve(self, known: Estimates, states: int) -> None:
        bare = round_costs(known, self._most, link=0.0)[1:]
        levels = known.delay_levels
        links = [levels[s] if 1 < len(levels) > s else link_seconds(known) for s in range(states)]
        links = [max(0.0, d + self._corrections.extra(s)) for s, d in enumerate(links)]
        costs = [[max(1e-9, n + d) for d in links] for n in bare]
        tokens = expected_tokens(known.curve.survival(self._most))[1:]
        begins = self._moves.visits(states)
        moves = self._moves.matrix(states)
        pace = self._pace
        if pace is None:
            mean = sum(w * c for w, c in zip(begins, costs[-1], strict=True))
            pace = min(1.0, known.draft / mean)
        self._lengths = solve(costs, tokens, slowed(moves, pace), begins).thresholds
