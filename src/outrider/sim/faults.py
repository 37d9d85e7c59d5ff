"""What can go wrong, drawn from a seed: a case is a few answers and the faults they meet.

Two kinds. *Lawful* faults are what a TCP connection, a process or a user may do: break at any
frame, hold frames up, a verifier that restarts or drains, an edge that dies, a user who cancels, an
edge that reads slowly. *Lawless* ones are what a stream forbids and a broken or hostile peer may do
all the same: a frame lost alone, repeated, overtaken, or an old one once more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from outrider.core.relaxation import Relaxation
from outrider.core.tokens import Rule, SamplingParams
from outrider.session.schedules import Plan, Schedule, plan
from outrider.sim.events import Chance
from outrider.sim.world import Answer, Edge, Pipe, World

QUIET_AFTER: Final = 12.0
"""Seconds after which nothing more goes wrong, so that every case ends."""
SPAN: Final = 2.0
"""Seconds in which planned faults happen: most answers take about as long."""
SLOW: Final = 1.5
"""Longest time, seconds, that an edge does not read."""
KEPT: Final = 4
"""Old frames that a lawless link remembers, a direction."""
RATES: Final = (0.0, 0.0, 0.01, 0.04)
"""Probabilities a frame that a case chooses from, for each fault."""

LAWFUL: Final = ("cut", "cut_after", "late", "restart")
LAWLESS: Final = ("lose", "repeat", "swap", "stale")
FRAME_FAULTS: Final = (*LAWFUL, *LAWLESS)

RULES: Final = (Rule.COUPLED, Rule.RELAXED, Rule.RATIO, Rule.RATIO)
"""Half of it ratio: that rule's law shows in many tokens only."""
LONG_EVERY: Final = 16
LONG: Final = 192
"""One case in so many has an answer of so many tokens: the law behind a rejection shows in many
rejections only, and short answers have few."""
LONG_SCHEDULES: Final = (Schedule.SYNC, Schedule.PEARL, Schedule.PLC, Schedule.STREAM)
SCHEDULES: Final = tuple(s for s in Schedule if s is not Schedule.EDGE_ONLY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One answer that is asked for. Seconds."""

    edge: int
    at: float
    params: SamplingParams
    rule: Rule
    plan: Plan
    schedule: Schedule
    moody: bool
    """A controller of moods says how far to draft."""
    cancel: float | None = None
    """How long behind `at` the user has enough of it."""

    @property
    def relaxation(self) -> Relaxation | None:
        """Without a budget, so it is exact."""
        return Relaxation() if self.rule is Rule.RELAXED else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Everything that a seed decides."""

    seed: int
    questions: tuple[Question, ...]
    rates: dict[str, float]
    edges: int
    share: float
    """Of contexts in which the draft is another model."""
    rtt: float
    jitter: float
    drain: float | None
    """When the verifier drains; an empty one takes its place a little later."""
    death: float | None
    """When edge 0 dies."""
    slow: tuple[tuple[int, float, float], ...]
    """(edge, when, how long) it does not read."""

    @property
    def lawless(self) -> bool:
        return any(self.rates[name] for name in LAWLESS)

    @property
    def faulty(self) -> bool:
        """Anything can go wrong at all."""
        planned = self.drain is not None or self.death is not None
        return planned or any(self.rates.values())


def draw(seed: int) -> Case:
    """The case of a seed."""
    if seed % LONG_EVERY == LONG_EVERY - 1:
        return _long(seed)
    chance = Chance(seed, 1)
    edges = chance.between(1, 2)
    lawless = chance.uniform() < 0.25
    rates = {name: chance.choice(RATES) for name in LAWFUL}
    rates |= {name: chance.choice(RATES) if lawless else 0.0 for name in LAWLESS}
    return Case(
        seed=seed,
        questions=tuple(_question(chance, seed, i, edges) for i in range(chance.between(1, 3))),
        rates=rates,
        edges=edges,
        share=chance.choice((0.0, 0.3, 1.0, 1.0)),
        rtt=chance.choice((0.001, 0.05, 0.2)),
        jitter=chance.choice((0.0, 0.03)),
        drain=_maybe(chance, 0.06),
        death=_maybe(chance, 0.06),
        slow=tuple(
            (chance.below(edges), SPAN * chance.uniform(), SLOW * chance.uniform())
            for _ in range(chance.choice((0, 0, 0, 1, 2)))
        ),
    )


def _long(seed: int) -> Case:
    """A long answer of the ratio rule with a strange draft, so one with many rejections."""
    chance = Chance(seed, 1)
    schedule = chance.choice(LONG_SCHEDULES)
    question = Question(
        edge=0,
        at=0.0,
        params=SamplingParams(temperature=1.0, seed=seed << 2, max_tokens=LONG, ignore_eos=True),
        rule=Rule.RATIO,
        schedule=schedule,
        plan=plan(schedule, draft_length=chance.between(1, 7), window=chance.between(4, 20)),
        moody=False,
    )
    return Case(
        seed=seed,
        questions=(question,),
        rates={name: chance.choice(RATES) if name in LAWFUL else 0.0 for name in FRAME_FAULTS},
        edges=1,
        share=1.0,
        rtt=chance.choice((0.001, 0.05)),
        jitter=0.0,
        drain=None,
        death=None,
        slow=(),
    )


def _maybe(chance: Chance, probability: float, span: float = SPAN) -> float | None:
    happens, when = chance.uniform() < probability, span * chance.uniform()
    return when if happens else None


def _question(chance: Chance, seed: int, index: int, edges: int) -> Question:
    rule = chance.choice(RULES)
    schedule = chance.choice(SCHEDULES)
    # Under the ratio rule the law is what is checked, and it has to be known: no penalties.
    free = rule is not Rule.RATIO
    return Question(
        edge=chance.below(edges),
        at=chance.choice((0.0, 0.5 * chance.uniform())),
        params=SamplingParams(
            temperature=chance.choice((0.0, 1.0, 1.0)),
            seed=(seed << 2) + index,
            max_tokens=chance.between(1, 32),
            frequency_penalty=chance.choice((0.0, 0.3)) if free else 0.0,
            logprobs=chance.choice((None, None, 1)),
            ignore_eos=chance.uniform() < 0.7,
        ),
        rule=rule,
        schedule=schedule,
        plan=plan(schedule, draft_length=chance.between(1, 7), window=chance.between(1, 20)),
        moody=chance.uniform() < 0.3,
        cancel=_maybe(chance, 0.12),
    )


@dataclass(slots=True)
class Mischief:
    """Makes what `case.rates` say of every frame, and what was planned."""

    case: Case
    seen: dict[str, int] = field(default_factory=dict)
    """Faults that happened."""
    _chance: Chance = field(init=False)
    _held: dict[tuple[int, str], bytes] = field(default_factory=dict)
    _old: dict[tuple[int, str], list[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._chance = Chance(self.case.seed, 2)

    def plan(self, world: World) -> None:
        """Put the planned faults into the world's time."""
        case, cloud, heap = self.case, world.clouds[0], world.heap
        if case.drain is not None:
            heap.later(case.drain, lambda: self._do("drain", cloud.drain))
            # Soon enough: whoever waits for a verifier gives up after half a minute.
            heap.later(case.drain + 3.0, lambda: self._do("restart", cloud.restart))
        if case.death is not None:
            heap.later(case.death, lambda: self._do("death", world.edges[0].die))
        for edge, when, length in case.slow:
            heap.later(when, lambda e=edge, n=length: self._slow(world, world.edges[e], n))  # type: ignore[misc]

    def _do(self, name: str, fault: object) -> None:
        self.seen[name] = self.seen.get(name, 0) + 1
        if callable(fault):
            fault()

    def _slow(self, world: World, edge: Edge, seconds: float) -> None:
        pipe = edge.pipe
        if pipe is None:
            return
        self._do("slow", lambda: edge.cloud.block(pipe.number, blocked=True))
        world.heap.later(world.now + seconds, lambda: edge.cloud.block(pipe.number, blocked=False))

    def cancel(self, edge: Edge, answer: Answer) -> None:
        self._do("cancel", lambda: edge.cancel(answer))

    # ---------------------------------------------------------------- frames

    def _hit(self, name: str) -> bool:
        rate = self.case.rates[name]
        hit = rate > 0.0 and self._chance.uniform() < rate
        if hit:
            self.seen[name] = self.seen.get(name, 0) + 1
        return hit

    def frames(self, world: World, pipe: Pipe, way: str, frame: bytes) -> list[tuple[float, bytes]]:
        """See sim.world.Faults."""
        held = self._held.pop((pipe.number, way), None)
        rest = [] if held is None else [(0.0, held)]
        if world.now >= QUIET_AFTER:
            return [(0.0, frame), *rest]
        if self._hit("cut"):
            world.cut(pipe)
            return []
        if self._hit("restart"):
            world.heap.at(world.now, pipe.cloud.restart)
            return []
        if self._hit("cut_after"):
            arrives = pipe.wire.newest(way) + pipe.wire.trip(world.now)
            world.heap.at(arrives, lambda: world.cut(pipe))
        if self.case.lawless:
            return self._lawless(pipe, way, frame, rest)
        return [(self._chance.uniform() if self._hit("late") else 0.0, frame)]

    def _lawless(
        self, pipe: Pipe, way: str, frame: bytes, rest: list[tuple[float, bytes]]
    ) -> list[tuple[float, bytes]]:
        place = (pipe.number, way)
        old = self._old.setdefault(place, [])
        old.append(frame)
        del old[:-KEPT]
        if self._hit("lose"):
            return rest
        if self._hit("repeat"):
            return [(0.0, frame), (0.0, frame), *rest]
        if self._hit("stale"):
            return [(0.0, frame), (0.0, self._chance.choice(old)), *rest]
        if self._hit("swap") and not rest:
            self._held[place] = frame
            return []
        return [(0.0, frame), *rest]
