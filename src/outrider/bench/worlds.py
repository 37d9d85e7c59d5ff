"""Worlds of `bench.rounds`: the true cost, acceptance and delay of a round, and the published ones.

Two testbeds of UCB-SpecStop (arXiv 2606.20591; docs/papers.md, 3) and its simulation stand here by
name. What is printed there: draft time per token and verification time per token at k = 1 and
k = 10, P(L >= k) for k = 1..10 with a fitted tail, and a bare round trip of "about 9-10 ms". What
is ours: the time of k drafts, and of a verification, is linear in k through those two points.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from outrider.core.survival import Survival

F64Array = npt.NDArray[np.float64]

NOISE: Final = 0.05
"""Standard deviation of a round's time relative to its mean (our default)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Seconds by length, linear through two measured points and beyond."""

    first: tuple[int, float]
    last: tuple[int, float]

    def __call__(self, length: int) -> float:
        (k0, t0), (k1, t1) = self.first, self.last
        return t0 + (t1 - t0) * (length - k0) / (k1 - k0)


class Delays(Protocol):
    """One-way delays of a run of rounds."""

    @property
    def levels(self) -> tuple[float, ...]:
        """Seconds, one way, ascending, where there are a few; empty: no states."""
        ...

    def draw(self, rounds: int, source: np.random.Generator) -> F64Array:
        """Seconds, one way, float64[rounds]."""
        ...


@dataclass(frozen=True, slots=True)
class Steady:
    """The same delay always."""

    delay: float
    levels: tuple[float, ...] = ()

    def draw(self, rounds: int, source: np.random.Generator) -> F64Array:  # noqa: ARG002
        return np.full(rounds, self.delay)


@dataclass(frozen=True, slots=True)
class Switching:
    """A Markov chain over two levels that leaves its level with probability `p` each round.

    p = .1 in the paper; begins in either with probability 1/2 (the stationary law).
    """

    levels: tuple[float, ...]
    p: float = 0.1

    def draw(self, rounds: int, source: np.random.Generator) -> F64Array:
        leaves = source.random(rounds) < np.where(np.arange(rounds) == 0, 0.5, self.p)
        return np.asarray(np.array(self.levels)[np.cumsum(leaves) % 2])


@dataclass(frozen=True, slots=True)
class Drift:
    """From `start` to `end` in equal steps over `length` rounds; then it stays there."""

    start: float
    end: float
    length: int
    levels: tuple[float, ...] = ()

    def draw(self, rounds: int, source: np.random.Generator) -> F64Array:  # noqa: ARG002
        share = np.minimum(np.arange(rounds) / max(self.length - 1, 1), 1.0)
        return np.asarray(self.start + (self.end - self.start) * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The true law of a round. Seconds."""

    name: str
    draft: Callable[[int], float]
    """Time to draft k tokens, k >= 1 (none for k = 0)."""
    verify: Callable[[int], float]
    """Time of the forward that judges k drafts, k >= 0."""
    acceptance: Survival
    delays: Delays
    overhead: float = 0.0
    """What a round trip takes beside the delays."""
    plain: float | None = None
    """Seconds a token when the cloud streams alone, which is what k = 0 then means. None: it
    cannot, and k = 0 is not a choice (the published systems)."""
    noise: float = NOISE
    max_length: int = 16
    source: str = ""
    """Where the figures come from."""

    def work(self, length: int) -> float:
        """N(length, 0) without the link: what a round takes at both ends."""
        return (self.draft(length) if length else 0.0) + self.verify(length)

    def seconds(self, delays: F64Array) -> F64Array:
        """E[N], float64[rounds, 1 + max_length]; inf where k = 0 is not a choice."""
        work = np.array([self.work(k) for k in range(self.max_length + 1)])
        grid = work + (2.0 * delays + self.overhead)[:, None]
        grid[:, 0] = np.inf if self.plain is None else self.plain
        return grid

    def tokens(self) -> F64Array:
        """B(k), float64[1 + max_length]."""
        alive = self.acceptance.survival(self.max_length)
        return 1.0 + np.concatenate([[0.0], np.cumsum(alive)])

    def state(self, delay: float) -> int:
        """Which delay level this is; 0 where there are none."""
        levels = self.delays.levels
        return int(np.argmin(np.abs(np.array(levels) - delay))) if levels else 0


# ------------------------------------------------------------------------ published testbeds

ONE_WAY: Final = (0.0, 0.005, 0.020, 0.040, 0.055, 0.083, 0.111, 0.150)
"""One-way delays of the published sweep, seconds."""
BARE_ROUND_TRIP: Final = 0.0095
"""Of the testbed without netem: "about 9-10 ms"."""
SOURCE: Final = "arXiv 2606.20591, authors' repository: raw tables (docs/papers.md, 3)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Testbed:
    """A published pair: what it costs, what it accepts, and what was reported of it."""

    __test__ = False

    name: str
    draft: Line
    verify: Line
    acceptance: Survival
    switching: tuple[float, float]
    """Levels of its Markov channel, seconds one way."""
    best: tuple[int, ...]
    """Reported best fixed k at ONE_WAY."""
    contextual_gain: float
    """Reported gain of Alg 2 over Alg 1 on the Markov channel, relative."""

    def world(self, delays: Delays, *, label: str = "", max_length: int = 16) -> World:
        return World(
            name=f"{self.name} {label}".strip(),
            draft=self.draft,
            verify=self.verify,
            acceptance=self.acceptance,
            delays=delays,
            overhead=BARE_ROUND_TRIP,
            max_length=max_length,
            source=SOURCE,
        )


QWEN: Final = Testbed(
    name="qwen",
    draft=Line(first=(1, 0.10625), last=(10, 0.7370)),
    verify=Line(first=(1, 0.01656), last=(10, 0.0306)),
    acceptance=Survival(
        points=(0.462, 0.328, 0.256, 0.214, 0.188, 0.166, 0.144, 0.110, 0.088, 0.082), tail=0.828
    ),
    switching=(0.037, 0.111),
    best=(1, 1, 1, 1, 1, 2, 3, 4),
    contextual_gain=0.0302,
)
"""Qwen2.5-0.5B drafting for 7B-Instruct: Jetson Orin Nano Super to RTX 3090, fp16."""
LLAMA: Final = Testbed(
    name="llama",
    draft=Line(first=(1, 0.0904), last=(10, 0.5259)),
    verify=Line(first=(1, 0.01718), last=(10, 0.0312)),
    acceptance=Survival(
        points=(0.382, 0.288, 0.226, 0.196, 0.170, 0.140, 0.124, 0.116, 0.102, 0.082), tail=0.845
    ),
    switching=(0.027, 0.083),
    best=(1, 1, 1, 1, 1, 1, 4, 7),
    contextual_gain=0.0681,
)
"""Llama-3.2-1B drafting for 3.1-8B, the same machines."""
TESTBEDS: Final = (QWEN, LLAMA)


def simulated(delay: float, *, alpha: float = 0.7, max_length: int = 20) -> World:
    """The paper's simulation: c_d = 1 ms a draft, c_v = .5 ms a row, acceptance geometric."""
    return World(
        name=f"simulated alpha={alpha:g}",
        draft=Line(first=(0, 0.0), last=(1, 0.001)),
        verify=Line(first=(0, 0.0005), last=(1, 0.001)),
        acceptance=Survival(points=(), tail=alpha),
        delays=Steady(delay),
        max_length=max_length,
        source=SOURCE,
    )


def slow_target(delay: float, *, max_length: int = 16) -> World:
    """A cloud that streams alone at 60 ms a token, drafts at 5 ms, acceptance .8 (ours).

    Here k = 0 is a choice: with a long enough link nothing synchronous beats streaming.
    """
    return World(
        name=f"slow target d={1e3 * delay:g}",
        draft=Line(first=(0, 0.0), last=(1, 0.005)),
        verify=Line(first=(0, 0.060), last=(1, 0.060)),
        acceptance=Survival(points=(), tail=0.8),
        delays=Steady(delay),
        plain=0.060,
        max_length=max_length,
        source="ours: the small event simulation",
    )
