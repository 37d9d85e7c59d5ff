"""Plays a scenario: every way to decode, on the same requests, with the same luck.

Each edge first asks for one token, which is not measured: the link is then up, and the cost of a
connection is nobody's time to first token. What is measured begins when all edges have it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from outrider.control.base import Controller, ControllerFacts
from outrider.control.estimators import Estimators
from outrider.control.registry import make as make_controller
from outrider.core.tokens import FinishReason, SamplingParams
from outrider.session.events import Ended
from outrider.session.generation import Step
from outrider.session.pilot import ControlledPilot, Pilot
from outrider.session.schedules import STREAMING, Plan, Schedule, plan
from outrider.sim.devices import VOCABULARY, ScriptedDrafter, ScriptedTarget, scripted
from outrider.sim.events import Chance
from outrider.sim.scenario import Arm, Scenario
from outrider.sim.world import Answer, Edge, Setup, World

ID_BYTES: Final = 3
"""Bytes of an id on the wire: what a varint takes from id 16384 on (any real vocabulary)."""
WARM: Final = 1 << 40
"""Numbers of the requests that are not measured begin here."""
NAME: Final = 4
"""Ids of a prompt that tell requests apart."""
ARRIVALS, LENGTHS = 3, 4
"""Addresses of chance, besides the edge's own (sim.world)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer. Seconds."""

    number: int
    """Which question: the same in every arm."""
    tokens: int
    first: float
    """From asking to the first token."""
    rest: float
    """From the first token to the last."""
    finish: str
    queued: float
    drafted: int
    accepted: int
    wasted: int
    forwards: int = 0
    """Of the target, for this answer: the prefill included."""
    steps: tuple[tuple[float, Step], ...] = ()
    """When each block was shown, since the question."""


@dataclass(slots=True, kw_only=True)
class Measured:
    """What an arm came to, over all answers of all its runs."""

    arm: Arm
    samples: list[Sample] = field(default_factory=list)
    forwards: int = 0
    rows: int = 0
    busy: float = 0.0
    """Seconds that the verifiers' engines worked."""
    seconds: float = 0.0
    """Of measured time, from the first question to the last token."""
    bytes_up: int = 0
    bytes_down: int = 0
    reconnects: int = 0
    unfinished: int = 0
    """Answers that failed."""
    events: int = 0
    fingerprints: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(s.tokens for s in self.samples)

    @property
    def per_token(self) -> float | None:
        """Seconds from token to token; None where no answer had two."""
        gaps = sum(s.tokens - 1 for s in self.samples)
        return sum(s.rest for s in self.samples) / gaps if gaps else None

    def as_dict(self, baseline: float | None) -> dict[str, Any]:
        """The JSON object of a row; `baseline`: cloud-only's seconds a token."""
        tokens, per_token = self.tokens, self.per_token
        firsts = sorted(s.first for s in self.samples)
        drafted = sum(s.drafted for s in self.samples)
        return {
            "name": self.arm.name,
            "schedule": self.arm.schedule.value,
            "controller": self.arm.controller,
            "rule": self.arm.rule.value,
            "same_text": self.arm.schedule is not Schedule.EDGE_ONLY,
            "answers": len(self.samples),
            "unfinished": self.unfinished,
            "tokens": tokens,
            "ms_per_token": _ms(per_token),
            "speedup": baseline / per_token if baseline and per_token else None,
            "ttft_ms": _ms(statistics.median(firsts)) if firsts else None,
            "ttft_p95_ms": _ms(firsts[int(0.95 * (len(firsts) - 1))]) if firsts else None,
            "forwards_per_token": _each(self.forwards, tokens),
            "rows_per_token": _each(self.rows, tokens),
            "cloud_ms_per_token": _ms(_each(self.busy, tokens)),
            "queue_ms_per_token": _ms(_each(sum(s.queued for s in self.samples), tokens)),
            "acceptance": _each(sum(s.accepted for s in self.samples), drafted),
            "wasted_per_token": _each(sum(s.wasted for s in self.samples), tokens),
            "bytes_up_per_token": _each(self.bytes_up, tokens),
            "bytes_down_per_token": _each(self.bytes_down, tokens),
            "tokens_per_second": tokens / self.seconds if self.seconds else None,
            "reconnects": self.reconnects,
            "events": self.events,
            "event_hashes": self.fingerprints,
        }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _each(total: float, count: int) -> float | None:
    return total / count if count else None


def play(scenario: Scenario, arm: Arm, *, told: Callable[[], None] = lambda: None) -> Measured:
    """All runs of one arm; `told` after each."""
    measured = Measured(arm=arm)
    for i in range(scenario.seeds):
        if arm.schedule is Schedule.EDGE_ONLY:
            _edge_only(scenario, scenario.seed + i, measured)
        else:
            _Run(scenario, arm, scenario.seed + i, measured).go()
        told()
    return measured


def compare(scenario: Scenario, *, told: Callable[[], None] = lambda: None) -> list[Measured]:
    """Every arm of a scenario, cloud-only first."""
    return [play(scenario, arm, told=told) for arm in scenario.arms]


def request_lengths(scenario: Scenario, seed: int, edge: int) -> list[int]:
    """Tokens of each answer that an edge asks for."""
    chance = Chance(seed, edge, LENGTHS)
    low, high = scenario.workload.max_tokens
    return [chance.between(low, high) for _ in range(scenario.workload.requests)]


def arrivals(scenario: Scenario, seed: int, edge: int) -> list[float] | None:
    """Seconds at which an edge asks, from the beginning; None: each when the one before ended."""
    rate = scenario.workload.rate
    if rate is None:
        return None
    chance, now, times = Chance(seed, edge, ARRIVALS), 0.0, []
    for _ in range(scenario.workload.requests):
        now += chance.exponential(1.0 / rate)
        times.append(now)
    return times


def prompt_of(number: int, length: int) -> tuple[int, ...]:
    """A prompt of its own for every request, or a verifier would know it from the one before."""
    name = tuple((number >> 6 * i) % VOCABULARY for i in range(min(length, NAME)))
    return (*name, *(scripted(i) for i in range(len(name), length)))


class _Run:
    """One arm, one seed."""

    def __init__(self, scenario: Scenario, arm: Arm, seed: int, measured: Measured) -> None:
        self.scenario, self.arm, self.seed, self.measured = scenario, arm, seed, measured
        drafter = ScriptedDrafter(scenario.acceptance(seed))
        longest = scenario.workload.prompt + scenario.workload.max_tokens[1] + 1
        points = scenario.cloud.verify
        setup = Setup(
            target=lambda: ScriptedTarget(context_length=longest),
            drafter=drafter,
            cloud_drafter=lambda: drafter,
            vocab_size=VOCABULARY,
            context_length=longest,
            conditions=scenario.conditions,
            forward=scenario.cloud.seconds,
            handover=scenario.cloud.start,
            drafting=scenario.edge,
            row_ms=tuple((rows, 1e3 * scenario.cloud.rows(rows)) for rows, _ in points),
            id_bytes=ID_BYTES,
            service={
                "max_batch_rows": scenario.batch_rows,
                "max_sessions": max(256, scenario.edges * scenario.workload.requests),
            },
        )
        self.world = World(setup, edges=scenario.edges, clouds=scenario.clouds, seed=seed)
        self.plan = _plan(scenario, arm)
        self.users = [_User(self, edge) for edge in self.world.edges]
        self.began = 0.0

    def go(self) -> None:
        world, measured = self.world, self.measured
        for user in self.users:
            user.warm()
        world.run()
        self.began = world.now
        before = self._counted()
        for user in self.users:
            user.begin(self.began)
        for when in self.scenario.cuts:
            world.heap.at(self.began + when, self._cut)
        world.run()
        spent = [now - then for now, then in zip(self._counted(), before, strict=True)]
        measured.forwards += int(spent[0])
        measured.rows += int(spent[1])
        measured.busy += spent[2]
        measured.bytes_up += int(spent[3])
        measured.bytes_down += int(spent[4])
        measured.reconnects += sum(e.client.tally.reconnects for e in world.edges)
        measured.seconds += world.now - self.began
        measured.events += world.heap.events
        measured.fingerprints.append(world.heap.fingerprint)

    def _counted(self) -> tuple[float, ...]:
        clouds, edges = self.world.clouds, self.world.edges
        return (
            sum(c.forwards for c in clouds),
            sum(c.rows for c in clouds),
            sum(c.busy for c in clouds),
            sum(e.bytes["up"] for e in edges),
            sum(e.bytes["down"] for e in edges),
        )

    def _cut(self) -> None:
        for pipe in list(self.world.pipes.values()):
            self.world.cut(pipe)


class _User:
    """Who asks at one edge, and the controller that learns from answer to answer."""

    def __init__(self, run: _Run, edge: Edge) -> None:
        self._run = run
        self._edge = edge
        self._lengths = request_lengths(run.scenario, run.seed, edge.number)
        self._next = 0
        self._estimators = Estimators()
        self._estimators.target([(n, ms / 1e3) for n, ms in run.world.setup.row_ms])
        self._controller = _controller(run.scenario, run.arm, run.seed)
        edge.told.append(self._over)

    def warm(self) -> None:
        self._ask(WARM + self._edge.number, 1)

    def begin(self, now: float) -> None:
        times = arrivals(self._run.scenario, self._run.seed, self._edge.number)
        if times is None:
            self._ask_next()
            return
        for at in times:
            self._run.world.heap.later(now + at, self._ask_next)

    def _ask_next(self) -> None:
        number = self._edge.number * len(self._lengths) + self._next
        self._next += 1
        self._ask(number, self._lengths[self._next - 1])

    def _ask(self, number: int, length: int) -> None:
        params = SamplingParams(temperature=0.0, seed=number, max_tokens=length, ignore_eos=True)
        run = self._run
        prompt = prompt_of(number, run.scenario.workload.prompt)
        self._edge.ask(prompt, params, run.plan, rule=run.arm.rule, pilot=self._pilot())

    def _pilot(self) -> Pilot | None:
        if self._controller is None:
            return None
        schedule = self._run.arm.schedule
        return ControlledPilot(
            self._controller,
            self._estimators,
            streaming=schedule in STREAMING,
            free=schedule is Schedule.FREERUN,
            now=self._run.world.now,
        )

    def _over(self, answer: Answer) -> None:
        if answer.params.seed >= WARM:
            return
        self._run.measured.unfinished += not isinstance(answer.end, Ended)
        if isinstance(answer.end, Ended):
            self._run.measured.samples.append(_sample(answer, answer.end))
        if self._run.scenario.workload.rate is None and self._next < len(self._lengths):
            # Behind what the machine still says about the one that ended.
            self._run.world.heap.later(self._run.world.now, self._ask_next)


def _sample(answer: Answer, end: Ended) -> Sample:
    counters, machine = answer.counters, answer.machine
    return Sample(
        number=answer.params.seed,
        tokens=len(answer.ids),
        first=answer.times[0] - answer.asked,
        rest=answer.times[-1] - answer.times[0],
        finish=end.reason.value,
        queued=answer.queued,
        drafted=counters.drafted,
        accepted=counters.accepted,
        wasted=machine.wasted if machine else 0,
        forwards=counters.rounds,
        steps=tuple((at - answer.asked, step) for at, step in answer.steps),
    )


def _longest(scenario: Scenario) -> int:
    """Most drafts that a controller may ask for."""
    return min(scenario.window, 64)


def _plan(scenario: Scenario, arm: Arm) -> Plan:
    # The block of `hybrid` is K under a controller too, as live.
    controlled = arm.controller != "fixed" and arm.schedule is not Schedule.HYBRID
    length = _longest(scenario) if controlled else scenario.draft_length
    return plan(arm.schedule, draft_length=length, window=scenario.window, growth=scenario.growth)


def _controller(scenario: Scenario, arm: Arm, seed: int) -> Controller | None:
    if arm.controller == "fixed":
        return None
    ahead = arm.schedule in (Schedule.STREAM, Schedule.HYBRID, Schedule.FREERUN)
    longest = _longest(scenario)
    facts = ControllerFacts(
        max_length=longest,
        fixed_length=longest if ahead else min(scenario.draft_length, longest),
        seed=seed,
        options=dict(arm.options),
    )
    return make_controller(arm.controller, facts)


def _edge_only(scenario: Scenario, seed: int, measured: Measured) -> None:
    """The draft by itself, one answer after the other: no link, no target, another text."""
    times = scenario.edge
    last = 0.0
    for edge in range(scenario.edges):
        asked = arrivals(scenario, seed, edge)
        free = 0.0
        for i, length in enumerate(request_lengths(scenario, seed, edge)):
            came = free if asked is None else asked[i]
            begin = max(came, free)
            first = begin + times.seconds(1, scenario.workload.prompt)
            rest = (length - 1) * times.draft
            free = first + rest
            measured.samples.append(
                Sample(
                    number=edge * scenario.workload.requests + i,
                    tokens=length,
                    first=first - came,
                    rest=rest,
                    finish=FinishReason.LENGTH.value,
                    queued=begin - came,
                    drafted=0,
                    accepted=0,
                    wasted=0,
                )
            )
        last = max(last, free)
    measured.seconds += last


def rows_of(results: Sequence[Measured]) -> list[dict[str, Any]]:
    """JSON rows of a comparison, with cloud-only's time as the measure of speed."""
    base = next((m.per_token for m in results if m.arm.schedule is Schedule.CLOUD_ONLY), None)
    return [m.as_dict(base) for m in results]
