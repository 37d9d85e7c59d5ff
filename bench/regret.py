"""Controllers against the oracle in rounds of known cost; the published claims beside them.

    python bench/regret.py [--seeds 30] [--rounds 400] [--long 5000] [--only auto,fixed] [--json]

Worlds are the published testbeds (outrider.bench.worlds), one-way delays 0..150 ms, steady,
switching (p = .1) and drifting 20 -> 150 ms; plus one where the cloud can stream alone. Loss is
the expected seconds per token of what was decided in the second half of the rounds, over those
of the oracle that knows every delay; +- is 1.96 standard errors over seeds. All controllers meet
the same luck. What a controller needs the draft engine's signals for (a stop rule) or calibration
is left out and named. The decision time includes `observe`, on whatever this machine is doing.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from rich.console import Console
from rich.table import Table

from outrider.bench.rounds import Luck, Play, growth, loss, play, regret
from outrider.bench.worlds import (
    ONE_WAY,
    QWEN,
    TESTBEDS,
    Drift,
    Steady,
    Switching,
    Testbed,
    World,
    simulated,
    slow_target,
)
from outrider.control.base import CalibrationError, Controller, ControllerFacts
from outrider.control.oracle import Oracle, best_fixed, best_lengths
from outrider.control.registry import CONTROLLERS
from outrider.control.registry import make as make_controller
from outrider.core.tokens import ParameterError

Make = Callable[[World, Luck, int], Controller]

K_MAX = 10
"""Longest length on the published hardware."""
MARKOV_ROUNDS = 500
COMPARED_ROUNDS = 1000
"""Rounds a cell of the published Markov test and comparison."""
REPORTED_GAPS = {
    "qwen": {0.020: 18.2, 0.055: 13.5, 0.111: 2.4, 0.150: 0.2},
    "llama": {0.020: 8.1, 0.055: 1.5, 0.111: 2.1, 0.150: -1.1},
}
"""Reported gap of UCB-SpecStop to the empirical oracle, %, by one-way delay."""
SIMULATED_BEST = {5: 3, 10: 5, 30: 7, 50: 8, 100: 10, 200: 12, 500: 14}
"""Reported k* of the simulation (alpha = .7) by one-way delay in ms."""


@dataclass
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

    def show(self, scale: float = 100.0, digits: int = 2) -> str:
        return f"{scale * self.mean:.{digits}f}±{scale * self.error:.{digits}f}"

    def as_dict(self, scale: float = 100.0) -> dict[str, float]:
        return {"mean": scale * self.mean, "error": scale * self.error, "seeds": len(self.values)}


def facts(world: World, seed: int, fixed: int = 4) -> ControllerFacts:
    trips = tuple(2.0 * d + world.overhead for d in world.delays.levels)
    return ControllerFacts(max_length=world.max_length, fixed_length=fixed, seed=seed, delays=trips)


def registered(name: str) -> Make:
    return lambda world, _luck, seed: make_controller(name, facts(world, seed))


def competitors(only: Sequence[str]) -> tuple[dict[str, Make], dict[str, str]]:
    """Controllers by name, and those left out with the reason."""
    world = QWEN.world(Steady(0.02), max_length=K_MAX)
    found: dict[str, Make] = {}
    left: dict[str, str] = {}
    for name in CONTROLLERS:
        if only and name not in only:
            continue
        try:
            made = make_controller(name, facts(world, 0))
        except (CalibrationError, ParameterError) as problem:
            left[name] = str(problem)
            continue
        if made.stop_rule() is not None:
            left[name] = "stops blocks by signals of the draft engine, which rounds do not have"
            continue
        found[name] = registered(name)
    found["oracle-fixed"] = lambda world, luck, _seed: Oracle.blind(
        world.seconds(luck.delays), world.tokens()
    )
    return found, left


def run(make: Make, world: World, rounds: int, seed: int, *, sensed: bool = True) -> Play:
    luck = Luck.draw(world, rounds, seed)
    return play(make(world, luck, seed), world, luck, sensed=sensed)


# ------------------------------------------------------------------------------ loss


def worlds_of(bed: Testbed, rounds: int) -> list[tuple[World, bool]]:
    """(world, is the coming round's delay state known)."""

    def made(delays: Steady | Switching | Drift, label: str) -> World:
        return bed.world(delays, label=label, max_length=K_MAX)

    steady = [(made(Steady(d), f"d={1e3 * d:g}"), True) for d in ONE_WAY]
    low, high = (f"{1e3 * d:g}" for d in bed.switching)
    return [
        *steady,
        (made(Switching(bed.switching), f"{low}/{high}, sensed"), True),
        (made(Switching(bed.switching), f"{low}/{high}, one round late"), False),
        (made(Drift(0.020, 0.150, rounds), "20->150"), True),
    ]


def losses(
    makers: dict[str, Make], worlds: Sequence[tuple[World, bool]], rounds: int, seeds: int
) -> dict[str, dict[str, Cell]]:
    table: dict[str, dict[str, Cell]] = {name: {} for name in makers}
    for world, sensed in worlds:
        for name, make in makers.items():
            cell = table[name].setdefault(world.name, Cell())
            for seed in range(seeds):
                luck = Luck.draw(world, rounds, seed)
                played = play(make(world, luck, seed), world, luck, sensed=sensed)
                cell.values.append(loss(played, world, luck, rounds // 2))
    return table


def show_losses(console: Console, title: str, table: dict[str, dict[str, Cell]]) -> None:
    shown = Table(title=title)
    shown.add_column("world")
    for name in table:
        shown.add_column(name, justify="right")
    for world in next(iter(table.values())):
        shown.add_row(world, *(cells[world].show() for cells in table.values()))
    console.print(shown)


# ------------------------------------------------------------------------------ published claims


def claim(what: str, published: str, here: str, *, holds: bool) -> dict[str, object]:
    return {"claim": what, "published": published, "here": here, "holds": holds}


def best_length_claims() -> list[dict[str, object]]:
    claims = []
    for bed in TESTBEDS:
        found = []
        for delay in ONE_WAY:
            world = bed.world(Steady(delay), max_length=K_MAX)
            found.append(best_fixed(world.seconds(np.array([delay])), world.tokens())[0])
        same = sum(a == b for a, b in zip(found, bed.best, strict=True))
        claims.append(
            claim(
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
        claim(
            "k* of the simulation, alpha = .7, d = " + " ".join(map(str, SIMULATED_BEST)),
            " ".join(map(str, SIMULATED_BEST.values())),
            " ".join(map(str, here.values())),
            holds=here == SIMULATED_BEST,
        )
    )
    return claims


def critical_delay_claim() -> dict[str, object]:
    """Thm 5: the delay up to which one draft is best, against a search in the model."""
    alpha, c_d, c_v = 0.7, 1.0, 0.5
    closed = (c_d + c_v) * (1 + alpha) / (2 * alpha**2) - (c_d + 2 * c_v) / 2
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        world = simulated(1e-3 * middle)
        best = best_fixed(world.seconds(np.array([1e-3 * middle])), world.tokens())[0]
        low, high = (middle, high) if best <= 1 else (low, middle)
    return claim(
        "critical delay d_c of Thm 5 at alpha = .7, c_d = 1, c_v = .5 ms",
        f"{closed:.4f} ms (closed form)",
        f"{low:.4f} ms (search in the model)",
        holds=math.isclose(low, closed, rel_tol=1e-6),
    )


def static_gap_claim() -> dict[str, object]:
    gaps = []
    for bed in TESTBEDS:
        near, far = (bed.world(Steady(d), max_length=K_MAX) for d in (0.020, 0.150))
        kept = best_fixed(near.seconds(np.array([0.020])), near.tokens())[0]
        there = near.seconds(np.array([0.150]))
        ratios = there[0] / far.tokens()
        gaps.append(float(ratios[kept] / ratios.min() - 1.0))
    return claim(
        "gap at d = 150 of keeping the best k of d = 20 (qwen, llama)",
        "14.0-18.7 %",
        ", ".join(f"{100 * gap:.1f} %" for gap in gaps),
        holds=min(gaps) >= 0.135 and max(gaps) <= 0.192,
    )


def comparison_claims(makers: dict[str, Make], seeds: int) -> list[dict[str, object]]:
    """UCB-SpecStop against oracle, naive UCB and a static k = 6 over whole runs, expected."""
    claims = []
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
                claim(
                    f"UCB-SpecStop over the oracle, {bed.name} d={1e3 * delay:g}, 1000 rounds",
                    f"{reported:+.1f} %",
                    f"{ucb.show()} % (naive-ucb {naive.show()} %)",
                    holds=abs(100 * ucb.mean - reported) <= 100 * ucb.error,
                )
            )
    return claims


def contextual_claims(makers: dict[str, Make], seeds: int) -> list[dict[str, object]]:
    claims = []
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
        claims.append(
            claim(
                f"gain of contextual on the Markov channel, {bed.name}, {MARKOV_ROUNDS} rounds",
                f"{100 * bed.contextual_gain:.2f} %",
                f"{gain.show()} %; from knowing the state no policy can gain more than "
                f"{most.show()} %",
                holds=abs(gain.mean - bed.contextual_gain) <= gain.error,
            )
        )
    return claims


def growth_claims(
    makers: dict[str, Make], rounds: int, seeds: int
) -> tuple[list[dict[str, object]], dict[str, dict[str, float]]]:
    """Regret after `rounds` rounds and the form of its growth, averaged over seeds first."""
    figures: dict[str, dict[str, float]] = {}
    claims = []
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
                    claim(
                        f"regret of UCB-SpecStop grows as ln T, {world.name}, T = {rounds}",
                        "growth 1 (logarithmic)",
                        f"growth {form:.2f} (1 logarithmic, 1.41 square root, 2 linear), "
                        f"regret {total[-1]:.1f} s",
                        holds=form <= 1.2,
                    )
                )
    return claims, figures


# ------------------------------------------------------------------------------ cost


def decision_cost(makers: dict[str, Make], rounds: int = 2000) -> dict[str, float]:
    """Microseconds of decide + observe, less what the model of the rounds itself takes."""
    world = QWEN.world(Steady(0.083), max_length=16)

    def spent(make: Make) -> float:
        best = math.inf
        for _ in range(3):
            started = time.perf_counter()
            run(make, world, rounds, 0)
            best = min(best, time.perf_counter() - started)
        return 1e6 * best / rounds

    idle = spent(lambda _world, _luck, _seed: Oracle(np.array([4])))
    return {name: max(0.0, spent(make) - idle) for name, make in makers.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--long", type=int, default=5000, help="rounds of the regret test; 0: none")
    parser.add_argument("--only", default="", help="controllers, comma-separated")
    parser.add_argument("--json", action="store_true", help="the figures as one JSON object only")
    args = parser.parse_args()
    console = Console(quiet=args.json, width=240)
    makers, left = competitors([n for n in args.only.split(",") if n])

    found: dict[str, object] = {
        "machine": {"cpu": platform.processor() or platform.machine()},
        "seeds": args.seeds,
        "rounds": args.rounds,
        "max_length": K_MAX,
        "left_out": left,
    }
    tables = {}
    for bed in TESTBEDS:
        table = losses(makers, worlds_of(bed, args.rounds), args.rounds, args.seeds)
        show_losses(console, f"{bed.name}: loss against the oracle, %", table)
        tables[bed.name] = table
    streaming = [(slow_target(d, max_length=K_MAX), True) for d in (0.005, 0.050, 0.100, 0.150)]
    table = losses(makers, streaming, args.rounds, args.seeds)
    show_losses(console, "a cloud that streams alone at 60 ms a token (k = 0 allowed)", table)
    tables["streaming"] = table
    found["loss_percent"] = {
        group: {n: {w: c.as_dict() for w, c in cells.items()} for n, cells in table.items()}
        for group, table in tables.items()
    }

    claims = [*best_length_claims(), critical_delay_claim(), static_gap_claim()]
    claims += comparison_claims(makers, args.seeds)
    claims += contextual_claims(makers, args.seeds)
    if args.long:
        more, found["regret"] = growth_claims(makers, args.long, args.seeds)
        claims += more
        shown = Table(title=f"cumulative regret after {args.long} rounds")
        for column in ("world and controller", "seconds", "growth (1 ln T, 1.41 sqrt T, 2 T)"):
            shown.add_column(column)
        for name, figures in found["regret"].items():  # type: ignore[attr-defined]
            shown.add_row(name, f"{1e-3 * figures['regret_ms']:.1f}", f"{figures['growth']:.2f}")
        console.print(shown)
    found["claims"] = claims
    shown = Table(title="published claims")
    for column in ("claim", "published", "here", "holds"):
        shown.add_column(column, overflow="fold")
    for row in claims:
        holds = "yes" if row["holds"] else "NO"
        shown.add_row(str(row["claim"]), str(row["published"]), str(row["here"]), holds)
    console.print(shown)

    found["decision_us"] = cost = decision_cost(makers)
    console.print("us a decision (decide + observe): ", cost)
    console.print("left out: ", left)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
