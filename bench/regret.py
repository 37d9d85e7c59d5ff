"""Controllers against the oracle in rounds of known cost; the published claims beside them.

    python bench/regret.py [--seeds 30] [--rounds 400] [--long 5000] [--only auto,fixed]
                           [--parts loss,claims,regret,cost] [--json]

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
import platform
import time
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from outrider.bench.claims import (
    K_MAX,
    Cell,
    Claim,
    Make,
    best_length_claims,
    comparison_claims,
    contextual_claims,
    critical_delay_claim,
    growth_claims,
    static_gap_claim,
)
from outrider.bench.rounds import Luck, loss, play
from outrider.bench.worlds import (
    ONE_WAY,
    QWEN,
    TESTBEDS,
    Drift,
    Steady,
    Switching,
    Testbed,
    World,
    slow_target,
)
from outrider.control.base import (
    CalibrationError,
    Controller,
    ControllerFacts,
    Decision,
    Observation,
    Outcome,
)
from outrider.control.oracle import Oracle
from outrider.control.registry import CONTROLLERS
from outrider.control.registry import make as make_controller
from outrider.core.draft import StopRule
from outrider.core.tokens import ParameterError


def facts(world: World, seed: int, fixed: int = 4) -> ControllerFacts:
    trips = tuple(2.0 * d + world.overhead for d in world.delays.levels)
    return ControllerFacts(max_length=world.max_length, fixed_length=fixed, seed=seed, delays=trips)


def registered(name: str) -> Make:
    """Where k = 0 is not a choice, a controller that could say so is told to go on always."""

    def made(world: World, _luck: Luck, seed: int) -> Controller:
        told = facts(world, seed)
        if world.plain is None:
            try:
                return make_controller(name, replace(told, options={"always": 1.0}))
            except ParameterError:
                pass
        return make_controller(name, told)

    return made


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


# ------------------------------------------------------------------------------ cost


class Watched:
    """A controller, and the nanoseconds of processor time it took."""

    def __init__(self, controller: Controller) -> None:
        self.name = controller.name
        self._controller = controller
        self.spent = 0

    def decide(self, observation: Observation) -> Decision:
        since = time.thread_time_ns()
        decision = self._controller.decide(observation)
        self.spent += time.thread_time_ns() - since
        return decision

    def observe(self, outcome: Outcome, now: float) -> None:
        since = time.thread_time_ns()
        self._controller.observe(outcome, now)
        self.spent += time.thread_time_ns() - since

    def stop_rule(self) -> StopRule | None:
        return None


def decision_cost(makers: dict[str, Make], rounds: int = 2000) -> dict[str, float]:
    """Microseconds of decide + observe, of this thread's processor time; the best of 3 runs."""
    world = QWEN.world(Steady(0.083), max_length=16)
    luck = Luck.draw(world, rounds, 0)

    costs = {}
    for name, make in makers.items():
        watched = [Watched(make(world, luck, 0)) for _ in range(3)]
        for controller in watched:
            play(controller, world, luck)
        costs[name] = min(controller.spent for controller in watched) / 1e3 / rounds
    return costs


def streaming_worlds(rounds: int) -> list[tuple[World, bool]]:
    """Where k = 0 is a choice: the delay then matters to what is best in a round."""
    steady = [(slow_target(d, max_length=K_MAX), True) for d in (0.005, 0.050, 0.100, 0.150)]
    channel = replace(steady[0][0], delays=Switching((0.005, 0.150)))
    drift = Drift(0.020, 0.150, rounds)
    return [
        *steady,
        (replace(channel, name="slow target 5/150, sensed"), True),
        (replace(channel, name="slow target 5/150, one round late"), False),
        (replace(channel, delays=drift, name="slow target 20->150"), True),
    ]


def loss_part(console: Console, makers: dict[str, Make], rounds: int, seeds: int) -> object:
    groups = {bed.name: worlds_of(bed, rounds) for bed in TESTBEDS}
    groups["a cloud that streams alone at 60 ms a token (k = 0 allowed)"] = streaming_worlds(rounds)
    found = {}
    for group, worlds in groups.items():
        table = losses(makers, worlds, rounds, seeds)
        show_losses(console, f"{group}: loss against the oracle, %", table)
        found[group] = {n: {w: c.as_dict() for w, c in row.items()} for n, row in table.items()}
    return found


def regret_part(
    console: Console, makers: dict[str, Make], rounds: int, seeds: int
) -> tuple[list[Claim], object]:
    claims, found = growth_claims(makers, rounds, seeds)
    shown = Table(title=f"cumulative regret after {rounds} rounds, mean of {seeds} seeds")
    for column in ("world and controller", "seconds", "growth (1 ln T, 1.41 sqrt T, 2 T)"):
        shown.add_column(column)
    for name, figures in found.items():
        shown.add_row(name, f"{1e-3 * figures['regret_ms']:.1f}", f"{figures['growth']:.2f}")
    console.print(shown)
    return claims, found


def show_claims(console: Console, claims: Sequence[Claim]) -> None:
    shown = Table(title="published claims")
    for column in ("claim", "published", "here", "holds"):
        shown.add_column(column, overflow="fold")
    for row in claims:
        shown.add_row(row.what, row.published, row.here, "yes" if row.holds else "NO")
    console.print(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--long", type=int, default=5000, help="rounds of the regret test")
    parser.add_argument("--only", default="", help="controllers, comma-separated")
    parser.add_argument("--parts", default="loss,claims,regret,cost", help="comma-separated")
    parser.add_argument("--json", action="store_true", help="the figures as one JSON object only")
    args = parser.parse_args()
    for name, least in (("seeds", 2), ("rounds", 1), ("long", 20)):
        if getattr(args, name) < least:
            parser.error(f"--{name} must be at least {least}; --parts leaves a part out")
    parts = args.parts.split(",")
    console = Console(quiet=args.json, width=240)
    makers, left = competitors([n for n in args.only.split(",") if n])
    found: dict[str, object] = {
        "cpu": platform.processor() or platform.machine(),
        "seeds": args.seeds,
        "rounds": args.rounds,
        "max_length": K_MAX,
        "left_out": left,
    }
    claims: list[Claim] = []
    if "loss" in parts:
        found["loss_percent"] = loss_part(console, makers, args.rounds, args.seeds)
    if "claims" in parts:
        claims += [*best_length_claims(), critical_delay_claim(), static_gap_claim()]
        claims += comparison_claims(makers, args.seeds)
        claims += contextual_claims(makers, args.seeds)
    if "regret" in parts:
        more, found["regret"] = regret_part(console, makers, args.long, args.seeds)
        claims += more
    if claims:
        found["claims"] = [c.as_dict() for c in claims]
        show_claims(console, claims)
    if "cost" in parts:
        found["decision_us"] = cost = decision_cost(makers)
        console.print("us a decision (decide + observe):", cost)
    console.print("left out:", left)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
