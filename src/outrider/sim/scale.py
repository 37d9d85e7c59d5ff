"""Thousands of edges on many verifiers: round by round instead of frame by frame.

What is kept of the fine simulation (sim.run): arrivals, answers, luck, what forwards cost, who
shares one, the row budget, first come first served, the way there and back, the window. What is
left out: the protocol's own frames and connections; an edge's answers draft side by side, not in
turn; acceptance and row costs are known, not learnt. tests/sim/test_scale.py compares both.
This module says what may be asked and what came of it; sim.lockstep does the work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from outrider.core.tokens import Rule
from outrider.session.schedules import Schedule
from outrider.sim.lockstep import SCHEDULES, Lockstep
from outrider.sim.scenario import Arm, Scenario, ScenarioError

MOST_QUESTIONS: Final = 10_000_000
"""Of all edges in the time simulated: each takes some 50 bytes, and somebody has to wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """What became of all answers of one way to decode. Seconds."""

    schedule: Schedule
    asked: int
    answers: int
    """Complete within the time simulated."""
    tokens: int
    """All that were committed."""
    per_token: float | None
    first: tuple[float, float] | None
    """Time to first token, median and 95th percentile, of all that had one."""
    forwards: int
    rows: int
    busy: float
    """Share of the time that a verifier's engine works, mean over verifiers."""
    seconds: float
    fingerprint: str

    @property
    def tokens_each_second(self) -> float:
        return self.tokens / self.seconds

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.schedule.value,
            "asked": self.asked,
            "answers": self.answers,
            "tokens": self.tokens,
            "ms_per_token": None if self.per_token is None else 1e3 * self.per_token,
            "ttft_ms": None if self.first is None else 1e3 * self.first[0],
            "ttft_p95_ms": None if self.first is None else 1e3 * self.first[1],
            "forwards_per_token": self.forwards / self.tokens if self.tokens else None,
            "rows_per_token": self.rows / self.tokens if self.tokens else None,
            "busy": self.busy,
            "tokens_per_second": self.tokens_each_second,
            "event_hash": self.fingerprint,
        }


def check(scenario: Scenario) -> None:
    """Raises ScenarioError for what only the fine simulation knows."""
    conditions = scenario.conditions
    questions = (scenario.workload.rate or 0.0) * scenario.edges * scenario.duration
    reasons = (
        (scenario.workload.rate is None, "workload.rate must say how often an edge asks"),
        (scenario.curve is None, "acceptance must be alpha or a curve"),
        (
            bool(conditions.levels or conditions.outages or scenario.cuts),
            "the link must not change",
        ),
        (
            conditions.link.up_server is not None or conditions.link.down_server is not None,
            "the link must have rates, not traces",
        ),
        (
            questions > MOST_QUESTIONS,
            f"workload.rate x edge.count x scale.duration makes {questions:.3g} questions: at most "
            f"{MOST_QUESTIONS:,}",
        ),
    )
    for holds, reason in reasons:
        if holds:
            raise ScenarioError(f"--scale: {reason}")
    for arm in scenario.arms:
        if arm.asked and not _known(arm):
            known = ", ".join(SCHEDULES)
            raise ScenarioError(
                f"--scale: [schedule] names: {arm.name} needs the fine simulation (leave --scale "
                f"out); known here are {known}, without controller or rule"
            )


def _known(arm: Arm) -> bool:
    plain = arm.controller == "fixed" and arm.rule is Rule.COUPLED
    return plain and arm.schedule in (*SCHEDULES, Schedule.EDGE_ONLY)


def schedules(scenario: Scenario) -> list[Schedule]:
    """Those of the scenario's ways to decode that are known here."""
    wanted = {arm.schedule for arm in scenario.arms if _known(arm)}
    return [schedule for schedule in SCHEDULES if schedule in wanted]


def crowds(
    scenario: Scenario, *, told: Callable[[Schedule, float], None] = lambda _, __: None
) -> list[Crowd]:
    """Every way to decode of the scenario that can be simulated so; `told` hears now and then which
    share of one is done."""
    check(scenario)
    return [
        crowd(scenario, schedule, told=partial(told, schedule)) for schedule in schedules(scenario)
    ]


def crowd(
    scenario: Scenario, schedule: Schedule, *, told: Callable[[float], None] = lambda _: None
) -> Crowd:
    """One way to decode, all verifiers."""
    run = Lockstep(scenario, schedule)
    run.go(told)
    shown = run.done > 0
    firsts = run.first[shown]
    rest = float((run.last - run.asked - run.first)[shown].sum())
    gaps = int((run.done[shown] - 1).sum())
    digest = hashlib.blake2b(digest_size=8)
    for part in (run.done, run.first, run.last):
        digest.update(part.tobytes())
    spans = [float(x) for x in np.percentile(firsts, (50, 95))] if len(firsts) else None
    return Crowd(
        schedule=schedule,
        asked=len(run.done),
        answers=int((run.done == run.length).sum()),
        tokens=int(run.done.sum()),
        per_token=rest / gaps if gaps else None,
        first=(spans[0], spans[1]) if spans else None,
        forwards=run.forwards,
        rows=run.rows,
        busy=float(run.busy.sum()) / (scenario.clouds * scenario.duration),
        seconds=scenario.duration,
        fingerprint=digest.hexdigest(),
    )
