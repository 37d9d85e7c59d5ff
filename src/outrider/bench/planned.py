"""Plans held against the simulator: the same facts through sums and through the machines."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from outrider.plan.choose import Objective, Survey
from outrider.plan.facts import Curve, Facts
from outrider.plan.modes import Estimate
from outrider.session.schedules import DEFAULT_WINDOW, Schedule
from outrider.sim import run, scenario

NEAR = 0.01
"""Relative difference of two simulated times that is luck."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What the simulator says of a way to decode."""

    schedule: Schedule
    planned: float
    """Seconds per token by the plan."""
    seconds: float
    """By the simulator."""
    forwards: float

    @property
    def error(self) -> float:
        """Of the plan, relative."""
        return self.planned / self.seconds - 1.0


def play(facts: Facts, estimate: Estimate, *, requests: int, tokens: int, seed: int) -> Played:
    """Let the machines decode as planned. Every way meets the same luck for the same seed."""
    told = scenario.parse(_text(facts, estimate, requests, tokens, seed))
    arm = next(a for a in told.arms if a.schedule is estimate.schedule)
    row = run.play(told, arm).as_dict(None)
    return Played(
        schedule=estimate.schedule,
        planned=estimate.seconds,
        seconds=row["ms_per_token"] / 1e3,
        forwards=row["forwards_per_token"],
    )


def _text(facts: Facts, estimate: Estimate, requests: int, tokens: int, seed: int) -> str:
    """The scenario of these facts."""
    rows = ", ".join(f'[{n}, "{1e6 * s:.3f}us"]' for n, s in facts.verify)
    curve = facts.curve
    accepts = f"curve = {list(curve.points)}\ntail = {curve.tail}"
    if not curve.points:
        accepts = f"alpha = {curve.tail}"
    rates = [
        f'{way} = "{bps:.0f}bit"'
        for way, bps in (("up", facts.up_bps), ("down", facts.down_bps))
        if not math.isinf(bps)
    ]
    streaming = estimate.schedule in (Schedule.STREAM, Schedule.FREERUN)
    window = estimate.length if streaming else max(DEFAULT_WINDOW, estimate.length)
    return "\n".join(
        (
            f"seed = {seed}",
            "[link]",
            f'rtt = "{1e6 * facts.round_trip:.3f}us"',
            *rates,
            "[edge]",
            f'draft = "{1e6 * facts.draft:.3f}us"',
            "[cloud]",
            f"verify = [{rows}]",
            f'draft = "{1e6 * (facts.cloud_draft or facts.draft):.3f}us"',
            "[acceptance]",
            accepts,
            "[workload]",
            f"requests = {requests}",
            f"max-tokens = {tokens}",
            "[schedule]",
            f'names = ["{estimate.schedule.value}"]',
            f"draft-length = {min(max(1, estimate.length), 64)}",
            f"window = {window}",
        )
    )


def worlds(count: int, seed: int) -> Iterator[Facts]:
    """Random facts: phones to workstations, next door to another continent."""
    source = random.Random(seed)
    for _ in range(count):
        step = math.exp(source.uniform(math.log(0.015), math.log(0.120)))
        draft = step * math.exp(source.uniform(math.log(0.05), math.log(0.8)))
        slope = source.choice((0.0, 0.0, 0.02, 0.1))
        hosted = source.random() < 0.3
        yield Facts(
            draft=draft,
            verify=((1, step), (17, step * (1.0 + 16.0 * slope))),
            curve=Curve.constant(source.uniform(0.3, 0.92)),
            round_trip=source.uniform(0.0, 0.200),
            cloud_draft=draft * source.uniform(0.2, 1.0) if hosted else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One world: what was chosen for latency, and what the simulator would have chosen."""

    facts: Facts
    chosen: Played
    best: Played
    played: tuple[Played, ...]

    @property
    def fastest(self) -> Played:
        """By the plan, without its reluctance to speculate for a hundredth."""
        return min(self.played, key=lambda p: p.planned)

    @property
    def same(self) -> bool:
        return self.chosen.schedule is self.best.schedule

    @property
    def regret(self) -> float:
        """How much slower the choice is than the best, relative."""
        return self.chosen.seconds / self.best.seconds - 1.0

    @property
    def right(self) -> bool:
        """The same, or as good as far as luck can tell."""
        return self.same or self.regret <= NEAR


def compare(facts: Facts, *, requests: int, tokens: int, seed: int) -> Compared:
    """Every schedule at its planned length through the simulator."""
    survey = Survey.of(facts)
    found = [survey.best(Objective.LATENCY, s) for s in Schedule if s is not Schedule.EDGE_ONLY]
    played = tuple(
        play(facts, e, requests=requests, tokens=tokens, seed=seed) for e in found if e is not None
    )
    choice = survey.choose(Objective.LATENCY).best
    return Compared(
        facts=facts,
        chosen=next(p for p in played if p.schedule is choice.schedule),
        best=min(played, key=lambda p: p.seconds),
        played=played,
    )
