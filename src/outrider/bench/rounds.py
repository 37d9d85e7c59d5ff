"""Rounds of the synchronous loop with known costs: for comparing controllers, not systems.

A round drafts k tokens, crosses the link twice, judges k+1 rows and commits L+1 tokens, L the
leading drafts that stand:

    N(k, d) = draft(k) + 2d + overhead + verify(k)        B(k) = 1 + S(1) + ... + S(k)

Everything is pure and seeded. The luck of a round (delay, acceptance, noise of its time) is drawn
before anything is played, from (seed, round), so that all controllers meet the same luck and can
be compared in pairs. Losses come from the expected N and B of what was decided, not from what was
sampled: what is left to chance is what a controller learnt.

Model assumptions that no paper states: rounds are independent given the delay, the delay changes
between rounds and not within one, and the noise of a round's time is a factor with mean 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from outrider.bench.worlds import World
from outrider.control.base import MAX_LENGTH, Controller, Estimates, Observation, Outcome
from outrider.control.costs import RowCosts
from outrider.control.estimators import Estimators
from outrider.control.oracle import best_lengths

F64Array = npt.NDArray[np.float64]
I64Array = npt.NDArray[np.int64]

ROUNDING: Final = 1e-9
"""Seconds of regret that sums of floats may leave."""
FLOOR: Final = 0.2
"""Least a noisy round takes relative to its mean: times stay positive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Luck:
    """What chance brings, drawn before anything is played. Arrays over rounds."""

    delays: F64Array
    """Seconds, one way."""
    stands: I64Array
    """How many leading drafts would stand if MAX_LENGTH were drafted."""
    factors: F64Array
    """Noise of the round's time."""

    @classmethod
    def draw(cls, world: World, rounds: int, seed: int) -> Luck:
        sources = np.random.default_rng(seed).spawn(3)
        alive = np.array(world.acceptance.survival(MAX_LENGTH))
        uniform = sources[1].random(rounds)
        return cls(
            delays=world.delays.draw(rounds, sources[0]),
            stands=(uniform[:, None] < alive).sum(axis=1),
            factors=np.maximum(FLOOR, 1.0 + world.noise * sources[2].standard_normal(rounds)),
        )


class NoStreaming(RowCosts):
    """Row costs where the cloud cannot stream alone, as in the published systems.

    Controllers that weigh "do not speculate" read `seconds(1)` as the price of a token without
    drafts. That is not a choice here, so it has a price nobody pays.
    """

    __slots__ = ()
    PRICE: ClassVar[float] = 3600.0

    def seconds(self, rows: int) -> float:
        return self.PRICE if rows <= 1 else super().seconds(rows)


class Edge:
    """What an edge in this world measures and believes: the estimators of a live one."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.estimators = Estimators(
            delays=tuple(2.0 * d + world.overhead for d in world.delays.levels),
            verify=NoStreaming() if world.plain is None else RowCosts(),
        )

    def believes(self, now: float, state: int | None) -> Estimates:
        """`state`: the coming round's delay state where it is known."""
        believed = self.estimators.snapshot(now)
        return believed if state is None else replace(believed, delay_state=state)

    def measures(
        self, *, drafted: int, accepted: int, factor: float, delay: float, now: float
    ) -> None:
        """A round ended at `now`: its parts took `factor` of their mean, its delay was `delay`."""
        world, told = self._world, self.estimators
        told.step(drafted + 1, world.verify(drafted) * factor)
        if drafted:
            told.draft(drafted, world.draft(drafted) * factor)
            told.verdict(drafted=drafted, accepted=accepted)
        if drafted or world.plain is None:
            told.round_trip(network=(2.0 * delay + world.overhead) * factor, now=now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """What a controller did. Arrays over rounds."""

    lengths: I64Array
    seconds: F64Array
    """Sampled N."""
    tokens: I64Array
    """Sampled A."""
    expected_seconds: F64Array
    """E[N] of the length decided, at that round's delay."""
    expected_tokens: F64Array

    def ratio(self, first: int = 0, last: int | None = None) -> float:
        """Sampled seconds per token, sum N / sum A."""
        return float(self.seconds[first:last].sum() / self.tokens[first:last].sum())

    def expected_ratio(self, first: int = 0, last: int | None = None) -> float:
        """Expected seconds per token of what was decided, sum N / sum B."""
        spent = self.expected_seconds[first:last].sum()
        return float(spent / self.expected_tokens[first:last].sum())


def play(controller: Controller, world: World, luck: Luck, *, sensed: bool = True) -> Play:
    """Let `controller` decide the rounds of `luck` in `world`.

    `sensed`: the edge knows the delay state of the coming round (Alg 2: "observe s_t first");
    else it believes in the one its last round trip was nearest to.
    """
    rounds = len(luck.delays)
    expected, tokens = world.seconds(luck.delays), world.tokens()
    if world.plain is None:
        # `never` plays it all the same: a plain token for a whole round trip.
        expected[:, 0] = world.work(0) + 2.0 * luck.delays + world.overhead
    edge = Edge(world)
    lengths = np.zeros(rounds, dtype=np.int64)
    got = np.zeros(rounds, dtype=np.int64)
    spent = np.zeros(rounds)
    now = 0.0
    for i in range(rounds):
        delay, factor = float(luck.delays[i]), float(luck.factors[i])
        believed = edge.believes(now, world.state(delay) if sensed else None)
        decision = controller.decide(
            Observation(now=now, room=world.max_length, estimates=believed)
        )
        k = decision.length
        accepted = min(k, int(luck.stands[i]))
        lengths[i], got[i] = k, accepted + 1
        spent[i] = expected[i, k] * factor
        now += float(spent[i])
        edge.measures(drafted=k, accepted=accepted, factor=factor, delay=delay, now=now)
        controller.observe(
            Outcome(
                decision=decision,
                drafted=k,
                accepted=accepted,
                strict=accepted,
                tokens=accepted + 1,
                seconds=float(spent[i]),
                delay_state=believed.delay_state,
            ),
            now,
        )
    return Play(
        lengths=lengths,
        seconds=spent,
        tokens=got,
        expected_seconds=expected[np.arange(rounds), lengths],
        expected_tokens=tokens[lengths],
    )


def loss(played: Play, world: World, luck: Luck, first: int = 0, last: int | None = None) -> float:
    """Expected seconds per token of rounds first..last over the least possible there, less 1.

    The least is the oracle's that knows every round's delay (`control.oracle.best_lengths`).
    """
    seconds = world.seconds(luck.delays[first:last])
    return played.expected_ratio(first, last) / best_lengths(seconds, world.tokens())[1] - 1.0


def regret(played: Play, world: World, luck: Luck) -> F64Array:
    """Cumulative expected regret in seconds: sum of N - c*B over rounds, c the oracle's ratio."""
    best = best_lengths(world.seconds(luck.delays), world.tokens())[1]
    return np.asarray(np.cumsum(played.expected_seconds - best * played.expected_tokens))


def growth(total: Sequence[float] | F64Array) -> float:
    """How cumulative regret grows at its end: the last doubling's share over the one before.

    (R(n) - R(n/2)) / (R(n/2) - R(n/4)): 1 where R grows as ln n, 2 where it grows as n, 1.41 as
    sqrt(n); 0 where the one before is nothing but rounding.
    """
    n = len(total)
    whole, half, quarter = total[n - 1], total[n // 2 - 1], total[n // 4 - 1]
    return float((whole - half) / (half - quarter)) if abs(half - quarter) > ROUNDING else 0.0
