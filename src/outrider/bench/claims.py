"""What was published of UCB-SpecStop, beside what rounds of the published costs give.

Numbers are of arXiv 2606.20591 and its authors' repository (docs/papers.md, 3). A reported figure
is one run on a testbed; it holds here when a run of the model may give it: when it lies in the
middle 95 % of the seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Final

import numpy as np

from outrider.bench.rounds import Luck, growth, loss, play, regret
from outrider.bench.worlds import ONE_WAY, TESTBEDS, Steady, Switching, World, simulated
from outrider.control.base import Controller
from outrider.control.oracle import best_fixed, best_lengths

Make = Callable[[World, Luck, int], Controller]
"""A fresh controller for a world, its luck (only an oracle looks) and a seed."""

K_MAX: Final = 10
"""Longest length on the published hardware."""
MARKOV_ROUNDS: Final = 500
COMPARED_ROUNDS: Final = 1000
"""Rounds a cell of the published Markov test and comparison."""
REPORTED_GAPS: Final[dict[str, dict[float, float]]] = {
    "qwen": {0.020: 18.2, 0.055: 13.5, 0.111: 2.4, 0.150: 0.2},
    "llama": {0.020: 8.1, 0.055: 1.5, 0.111: 2.1, 0.150: -1.1},
}
"""Reported gap of UCB-SpecStop to the empirical oracle, %, by one-way delay."""
SIMULATED_BEST: Final = {5: 3, 10: 5, 30: 7, 50: 8, 100: 10, 200: 12, 500: 14}
"""Reported k* of the simulation (alpha = .7) by one-way delay in ms."""


@dataclass(slots=True)
class Cell:
    """A figure over seeds."""

    values: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def error(self) -> float:
        spread = float(np.std(self.values, ddof=1)) if len(self.values) > 1 else math.nan
        return 1.96 * spread / math.sqrt(len(self.values))

    def between(self, value: float) -> bool:
        """Whether a single run might have given this: in the middle 95 % of the seeds."""
        low, high = np.quantile(self.values, [0.025, 0.975])
        return bool(low <= value <= high)

    def spread(self) -> str:
        low, high = np.quantile(self.values, [0.025, 0.975])
        return f"{100 * low:.1f} to {100 * high:.1f} %"

    def show(self, scale: float = 100.0, digits: int = 2) -> str:
        return f"{scale * self.mean:.{digits}f}±{scale * self.error:.{digits}f}"

    def as_dict(self, scale: float = 100.0) -> dict[str, float]:
        return {"mean": scale * self.mean, "error": scale * self.error, "seeds": len(self.values)}


@dataclass(frozen=True, slots=True)
class Claim:
    what: str
    published: str
    here: str
    holds: bool

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def best_length_claims() -> list[Claim]:
    claims: list[Claim] = []
    for bed in TESTBEDS:
        found = []
        for delay in ONE_WAY:
            world = bed.world(Steady(delay), max_length=K_MAX)
            found.append(best_fixed(world.seconds(np.array([delay])), world.tokens())[0])
        same = sum(a == b for a, b in zip(found, bed.best, strict=True))
        claims.append(
            Claim(
                f"best k, {bed.name}, d = " + " ".join(f"{1e3 * d:g}" for d in ONE_WAY),
                " ".join(map(str, bed.best)),
                " ".join(map(str, found)) + f" ({same} of {len(found)} the same)",
                holds=same == len(found),
            )
        )
    here = {}
    for ms in SIMULATED_BEST:
        world = simulated(1e-3 * ms)
        here[ms] = best_fixed(world.seconds(np.array([1e-3 * ms])), world.tokens())[0]
    claims.append(
        Claim(
            "k* of the simulation, alpha = .7, d = " + " ".join(map(str, SIMULATED_BEST)),
            " ".join(map(str, SIMULATED_BEST.values())),
            " ".join(map(str, here.values())),
            holds=here == SIMULATED_BEST,
        )
    )
    return claims


def critical_delay_claim() -> Claim:
    """Thm 5: the delay up to which one draft is best, against a search in the model."""
    alpha, c_d, c_v = 0.7, 1.0, 0.5
    closed = (c_d + c_v) * (1 + alpha) / (2 * alpha**2) - (c_d + 2 * c_v) / 2
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        world = simulated(1e-3 * middle)
        best = best_fixed(world.seconds(np.array([1e-3 * middle])), world.tokens())[0]
        low, high = (middle, high) if best <= 1 else (low, middle)
    return Claim(
        "critical delay d_c of Thm 5 at alpha = .7, c_d = 1, c_v = .5 ms",
        f"{closed:.4f} ms (closed form)",
        f"{low:.4f} ms (search in the model)",
        holds=math.isclose(low, closed, rel_tol=1e-6),
    )


def static_gap_claim() -> Claim:
    gaps = []
    for bed in TESTBEDS:
        near, far = (bed.world(Steady(d), max_length=K_MAX) for d in (0.020, 0.150))
        kept = best_fixed(near.seconds(np.array([0.020])), near.tokens())[0]
        there = near.seconds(np.array([0.150]))
        ratios = there[0] / far.tokens()
        gaps.append(float(ratios[kept] / ratios.min() - 1.0))
    return Claim(
        "gap at d = 150 of keeping the best k of d = 20 (qwen, llama)",
        "14.0-18.7 %",
        ", ".join(f"{100 * gap:.1f} %" for gap in gaps),
        holds=min(gaps) >= 0.135 and max(gaps) <= 0.192,
    )


def comparison_claims(makers: Mapping[str, Make], seeds: int) -> list[Claim]:
    """UCB-SpecStop against oracle, naive UCB and a static k = 6 over whole runs, expected."""
    claims: list[Claim] = []
    names = [n for n in ("ucb-specstop", "naive-ucb") if n in makers]
    if len(names) < 2:
        return claims
    for bed in TESTBEDS:
        for delay, reported in REPORTED_GAPS[bed.name].items():
            world = bed.world(Steady(delay), max_length=K_MAX)
            cells = {name: Cell() for name in names}
            for seed in range(seeds):
                luck = Luck.draw(world, COMPARED_ROUNDS, seed)
                for name in names:
                    played = play(makers[name](world, luck, seed), world, luck)
                    cells[name].values.append(loss(played, world, luck))
            ucb, naive = cells["ucb-specstop"], cells["naive-ucb"]
            claims.append(
                Claim(
                    f"UCB-SpecStop over the oracle, {bed.name} d={1e3 * delay:g}, 1000 rounds",
                    f"{reported:+.1f} %",
                    f"{ucb.show()} %, {ucb.spread()} by seed; naive-ucb {naive.show()} %, "
                    f"{naive.spread()}",
                    holds=ucb.between(reported / 100),
                )
            )
    return claims


def contextual_claims(makers: Mapping[str, Make], seeds: int) -> list[Claim]:
    """Alg 2 against Alg 1, and what knowing the state is worth at most, by both ways to average."""
    claims: list[Claim] = []
    if not {"contextual", "ucb-specstop"} <= set(makers):
        return claims
    for bed in TESTBEDS:
        world = bed.world(Switching(bed.switching), max_length=K_MAX)
        gain, most = Cell(), Cell()
        for seed in range(seeds):
            luck = Luck.draw(world, MARKOV_ROUNDS, seed)
            plain, state = (
                play(makers[n](world, luck, seed), world, luck).expected_ratio()
                for n in ("ucb-specstop", "contextual")
            )
            gain.values.append(1.0 - state / plain)
            seconds = world.seconds(luck.delays)
            blind = best_fixed(seconds, world.tokens())[1]
            most.values.append(1.0 - best_lengths(seconds, world.tokens())[1] / blind)
        ratios = world.seconds(np.array(bed.switching)) / world.tokens()
        averaged = 1.0 - ratios.min(axis=1).mean() / ratios.mean(axis=0).min()
        claims.append(
            Claim(
                f"gain of contextual on the Markov channel, {bed.name}, {MARKOV_ROUNDS} rounds",
                f"{100 * bed.contextual_gain:.2f} %",
                f"{gain.show()} %, {gain.spread()} by seed. No policy can gain more from the "
                f"state than {100 * max(most.values):.2f} % of sum N / sum B, or "
                f"{100 * averaged:.2f} % of the mean of N / B",
                holds=gain.mean - gain.error > 0.0 and gain.between(bed.contextual_gain),
            )
        )
    return claims


def growth_claims(
    makers: Mapping[str, Make], rounds: int, seeds: int
) -> tuple[list[Claim], dict[str, dict[str, float]]]:
    """Regret after `rounds` rounds and the form of its growth, averaged over seeds first."""
    figures: dict[str, dict[str, float]] = {}
    claims: list[Claim] = []
    for bed in TESTBEDS:
        world = bed.world(Steady(0.055), label="d=55", max_length=K_MAX)
        for name, make in makers.items():
            total = np.zeros(rounds)
            for seed in range(seeds):
                luck = Luck.draw(world, rounds, seed)
                played = play(make(world, luck, seed), world, luck)
                total += regret(played, world, luck) / seeds
            form = growth(total)
            figures[f"{world.name} {name}"] = {"regret_ms": 1e3 * total[-1], "growth": form}
            if name == "ucb-specstop":
                claims.append(
                    Claim(
                        f"regret of UCB-SpecStop grows as ln T, {world.name}, T = {rounds}",
                        "growth 1 (logarithmic)",
                        f"growth {form:.2f} (1 logarithmic, 1.41 square root, 2 linear), "
                        f"regret {total[-1]:.1f} s",
                        holds=form <= 1.2,
                    )
                )
    return claims, figures
