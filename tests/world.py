"""Two machines in memory: an edge, a cloud and the links between them, in virtual time.

`World` is a plain event loop over one heap. It does what the runtime does with sockets, threads
and a clock, and nothing else: frames from `EdgeClient.take` travel over a `Pipe`, frames that
arrive go into `Connection.receive` and `CloudService.receive`, forwards run on a toy target
through `SlotDesk` and end `step_time(rows)` later, drafting jobs run batch by batch on a toy draft,
where a step of n sessions takes `draft_step(n)`. Two laws of drafting hold at every moment of every
world: the engine is never idle while a session would draft, and nobody runs ahead while a confirmed
prefix waits.

A `Pipe` is a TCP connection: order is kept, what was sent before a cut may be lost from any byte
on (a frame that lost a byte is not delivered). What TCP would never do (repeat, reorder, spoil a
frame) a fault may do all the same: the machines have to refuse it cleanly and go on.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from outrider.core.draft import NO_DRAFT, Draft
from outrider.core.grammar import GrammarKind, Grammars
from outrider.core.relaxation import Relaxation
from outrider.core.residual import TopKReply
from outrider.core.tokens import Origin, Rule, SamplingParams
from outrider.engines.base import LanguageModel
from outrider.engines.desk import SlotDesk
from outrider.engines.drafters import DraftSession, ModelDrafter
from outrider.engines.lockstep import Ask, propose_together
from outrider.engines.toy import MAX_SLOTS, Law, ToyModel
from outrider.proto.codec import MAX_FRAME_BYTES
from outrider.proto.connection import Connection, Role
from outrider.proto.errors import LocalError, RemoteError
from outrider.proto.messages import PROTOCOL_VERSION, Hello, Limits
from outrider.runtime.cloudruntime import desk_job
from outrider.session.client import EdgeClient
from outrider.session.edge import DraftJob, EdgeSession
from outrider.session.events import Ended, Event, Failed, Progress
from outrider.session.generation import Generation
from outrider.session.pilot import Pilot
from outrider.session.schedules import Plan, Schedule, plan
from outrider.session.service import CloudService, Done, Outgoing, ServiceConfig
from outrider.session.verifier import Verifier


class Words:
    """A text stream for toy ids: every id is its decimal number and a blank."""

    def push(self, token: int) -> str:
        return f"{token} "

    def flush(self) -> str:
        return ""


def hello(role: Role, *, vocab_size: int, context_length: int = 4096, **changes: object) -> Hello:
    """A greeting of a toy machine."""
    values: dict[str, object] = {
        "versions": (PROTOCOL_VERSION,),
        "role": role.value,
        "agent": "test",
        "fingerprint": f"toy-{vocab_size}",
        "vocab_size": vocab_size,
        "logits_width": vocab_size,
        "context_length": context_length,
        "limits": Limits(
            frame_bytes=MAX_FRAME_BYTES, window=256, sessions=64, prompt_tokens=1_000_000
        ),
        "rules": ("coupled", "ratio", "relaxed"),
        "deterministic": True,
        "grammars": tuple(GrammarKind),
        "drafts": role is Role.CLOUD,
    }
    return Hello(**{**values, **changes})  # type: ignore[arg-type]


def alone(
    law: Law,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    vocab_size: int,
    eos: frozenset[int] = frozenset(),
    context_length: int = 4096,
    rule: Rule = Rule.COUPLED,
    grammars: Grammars | None = None,
) -> tuple[int, ...]:
    """The target decoding by itself: no engine, no draft, no wire. The oracle of I1."""
    generation = Generation(prompt, params, context_length=context_length, eos=eos, text=Words())
    ends = frozenset() if params.ignore_eos else eos
    constraint = grammars.constraint(params.grammar, "") if grammars and params.grammar else None
    verifier = Verifier(
        params, rule, prompt=prompt, vocab_size=vocab_size, end_ids=ends, constraint=constraint
    )
    while generation.finish is None:
        committed = generation.sequence.committed
        rows = law(committed)[None, :]
        judgement = verifier.judge(NO_DRAFT, rows, len(committed))
        generation.apply(NO_DRAFT, judgement)  # type: ignore[arg-type]
    return generation.sequence.output


# ------------------------------------------------------------------------------- faults


class Faults(Protocol):
    """Asked about every frame and told nothing else; may schedule things of its own."""

    def frames(self, world: World, pipe: Pipe, way: str, frame: bytes) -> list[tuple[float, bytes]]:
        """What is put on the wire instead: (extra seconds, frame). May call `world.cut(pipe)`."""
        ...


class NoFaults:
    def frames(self, world: World, pipe: Pipe, way: str, frame: bytes) -> list[tuple[float, bytes]]:
        return [(0.0, frame)]


@dataclass
class RandomFaults:
    """Each frame meets each fault with its own probability, until `quiet_after` seconds."""

    seed: int
    cut: float = 0.0
    """The connection breaks with this frame: it is lost, and all that is in flight."""
    cut_after: float = 0.0
    """The connection breaks once the frame has arrived."""
    restart: float = 0.0
    """The verifier is replaced by an empty one."""
    repeat: float = 0.0
    late: float = 0.0
    """Held up for up to a second, and everything behind it (loss, mended by TCP)."""
    swap: float = 0.0
    """Overtaken by the next frame: TCP never does."""
    lose: float = 0.0
    """Lost without a trace: TCP never does."""
    quiet_after: float = 1e9
    seen: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._held: dict[tuple[int, str], bytes] = {}

    def _hit(self, name: str) -> bool:
        hit = self._random.random() < getattr(self, name)
        if hit:
            self.seen[name] = self.seen.get(name, 0) + 1
        return hit

    def frames(self, world: World, pipe: Pipe, way: str, frame: bytes) -> list[tuple[float, bytes]]:
        held = self._held.pop((pipe.number, way), None)
        rest = [] if held is None else [(0.0, held)]
        if world.now >= self.quiet_after:
            return [(0.0, frame), *rest]
        if self._hit("cut"):
            world.cut(pipe)
            return []
        if self._hit("restart"):
            world.at(world.now, world.restart)
            return []
        if self._hit("lose"):
            return rest
        if self._hit("repeat"):
            return [(0.0, frame), (0.0, frame), *rest]
        if self._hit("late"):
            return [(self._random.random(), frame), *rest]
        if self._hit("swap") and held is None:
            self._held[pipe.number, way] = frame
            return []
        if self._hit("cut_after"):
            world.at(world.now + world.delay(pipe, way) + 1e-6, lambda: world.cut(pipe))
        return [(0.0, frame), *rest]


# ------------------------------------------------------------------------------- the world


@dataclass
class Pipe:
    """One transport connection. `open` False: cut. `dark`: swallows everything, tells nobody."""

    number: int
    edge: Edge
    open: bool = True
    dark: bool = False
    last: dict[str, float] = field(default_factory=lambda: {"up": 0.0, "down": 0.0})


@dataclass
class Answer:
    """What the user of one session has seen."""

    prompt: tuple[int, ...]
    params: SamplingParams
    schedule: Schedule
    rule: Rule
    started: float
    ids: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    text: str = ""
    times: list[float] = field(default_factory=list)
    """When each token was shown."""
    end: Ended | Failed | None = None
    cancelled: bool = False
    counters: object = None


@dataclass
class Batch:
    """Sessions that drafted together."""

    at: float
    jobs: dict[int, int]
    """Ids asked for, by session."""
    ahead: dict[int, bool]
    until: float = 0.0
    """When the last of them was done."""


class Edge:
    """An edge machine: the client, one draft engine, its transport."""

    def __init__(self, world: World, number: int, draft: LanguageModel, **client: object) -> None:
        self.world = world
        self.number = number
        self.drafter = ModelDrafter("draft", model=draft, lookup=world.lookup)
        greeting = client.pop("hello", None) or world.edge_hello
        ids = itertools.count(1)
        self.client = EdgeClient(
            greeting,  # type: ignore[arg-type]
            now=world.now,
            uid=lambda: number.to_bytes(8, "big") + next(ids).to_bytes(8, "big"),
            jitter=lambda: 0.5 + 0.5 * world.random.random(),
            **client,  # type: ignore[arg-type]
        )
        self.tenant = "tenant"
        self.pipe: Pipe | None = None
        self.answers: dict[int, Answer] = {}
        self.events: list[tuple[float, Event]] = []
        self._drafts: dict[int, DraftSession] = {}
        self.machines: dict[int, EdgeSession | None] = {}
        self.batches: list[Batch] = []
        """All that were drafted."""
        self._undone = 0
        self._timer = float("inf")

    def ask(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        schedule: Schedule = Schedule.FREERUN,
        rule: Rule = Rule.COUPLED,
        draft_length: int = 4,
        window: int = 16,
        made: Plan | None = None,
        pilot: Pilot | None = None,
        relaxation: Relaxation | None = None,
        reply: TopKReply | None = None,
    ) -> int:
        world = self.world
        generation = Generation(
            prompt,
            params,
            context_length=world.context_length,
            eos=world.eos,
            text=Words(),
        )
        chosen = made or plan(schedule, draft_length=draft_length, window=window)
        if rule is Rule.RELAXED and relaxation is None:
            relaxation = Relaxation()
        number = self.client.start(
            generation,
            chosen,
            rule=rule,
            relaxation=relaxation,
            reply=reply,
            now=world.now,
            pilot=pilot,
        )
        self.answers[number] = Answer(tuple(prompt), params, schedule, rule, world.now)
        self.answers[number].counters = generation.counters
        sketch = relaxation.sketch if relaxation else 1
        known = world.grammars if params.grammar and world.edge_grammars else None
        constraint = known.constraint(params.grammar, "") if known and params.grammar else None
        self._drafts[number] = self.drafter.session(
            len(prompt), params, rule, sketch=sketch, constraint=constraint
        )
        self.machines[number] = self.client.session(number)
        self.act()
        return number

    def cancel(self, number: int) -> None:
        self.client.cancel(number)
        self.answers[number].cancelled = True
        self._close_draft(number)
        self.act()

    def act(self) -> None:
        """Carry out what the machine wants."""
        world = self.world
        while True:
            out = self.client.take(world.now)
            for event in out.events:
                self._note(event)
            if self.pipe is not None:
                for frame in out.frames:
                    world.transmit(self.pipe, "up", frame)
            if out.hang_up and self.pipe is not None:
                pipe, self.pipe = self.pipe, None
                world.hang_up(pipe)
            if out.dial:
                world.dial(self)
            if out.drafts:
                self._draft(out.drafts)
            if not (out.frames or out.events or out.drafts or out.dial or out.hang_up):
                break
        assert self._undone or not self._ready(), "the draft engine idles"
        self._arm()

    def _ready(self) -> list[int]:
        """Sessions that would draft now."""
        machines = ((n, self.client.session(n)) for n in self.answers)
        return [
            n for n, machine in machines if machine is not None and machine.room(self.world.now)
        ]

    def _arm(self) -> None:
        deadline = self.client.deadline
        if deadline is not None and deadline < self._timer:
            self._timer = deadline
            self.world.at(max(deadline, self.world.now), self._ring)

    def _ring(self) -> None:
        self._timer = float("inf")
        self.client.tick(self.world.now)
        self.act()

    def _note(self, event: Event) -> None:
        self.events.append((self.world.now, event))
        if isinstance(event, Progress):
            answer = self.answers[event.session]
            assert not answer.cancelled, "a cancelled session speaks"
            assert answer.end is None, "tokens behind the end"
            answer.ids += event.step.tokens
            answer.origins += event.step.origins
            answer.text += event.step.text
            answer.times += [self.world.now] * len(event.step.tokens)
        elif isinstance(event, Ended | Failed):
            self.answers[event.session].end = event
            self._close_draft(event.session)

    def _close_draft(self, number: int) -> None:
        session = self._drafts.pop(number, None)
        if session is not None:
            session.close()

    def _draft(self, jobs: Sequence[tuple[int, DraftJob]]) -> None:
        """Sessions go in step; each is told of when it leaves, and pays its part of the steps."""
        assert not self._undone, "a batch before the last one is done"
        ahead = {n: len(job.context) > self._base(n) for n, job in jobs}
        if any(ahead.values()):
            waiting = [n for n in self._ready() if not self.machines[n].ahead]  # type: ignore[union-attr]
            assert not waiting, "ahead, while a confirmed prefix waits"
        asks = {n: Ask(self._drafts[n], job.context, job.count, job.stop) for n, job in jobs}
        drafts = dict(propose_together(list(asks.values())))
        results = {n: drafts[i] for i, n in enumerate(asks)}
        batch = Batch(
            at=self.world.now,
            jobs={n: job.count for n, job in jobs},
            ahead=ahead,
        )
        self.batches.append(batch)
        self._undone = len(jobs)
        lengths = {n: 1 if isinstance(d, Exception) else max(1, len(d)) for n, d in results.items()}
        passed = share = 0.0
        for step in range(1, max(lengths.values()) + 1):
            inside = sum(length >= step for length in lengths.values())
            passed += self.world.draft_step(inside)
            share += self.world.draft_step(inside) / inside
            for number in (n for n, length in lengths.items() if length == step):
                told = partial(self._drafted, number, results[number], share)
                self.world.at(self.world.now + passed, told)
        batch.until = self.world.now + passed

    def _base(self, number: int) -> int:
        machine = self.client.session(number)
        assert machine is not None, "only live sessions draft"
        return machine.generation.sequence.base

    def _drafted(self, number: int, draft: Draft | Exception, seconds: float) -> None:
        self._undone -= 1
        draft = NO_DRAFT if isinstance(draft, Exception) else draft
        self.client.drafted(number, draft, self.world.now, seconds=seconds)
        self.act()


class Whim(Pilot):
    """A controller of moods: now and then another length, 0 (let the cloud stream alone) too."""

    def __init__(self, seed: int, *, lengths: Sequence[int] = (0, 0, 1, 3, 6)) -> None:
        self._random = random.Random(seed)
        self._lengths = lengths
        self._left = 0
        self._length = 0
        self.alone = 0
        """Rounds in which the cloud was to stream alone."""

    def length(self, now: float, room: int) -> int:
        return min(self._length, room)

    def _round(self) -> None:
        if self._left == 0:
            self._left = self._random.randrange(1, 5)
            self._length = self._random.choice(self._lengths)
        self._left -= 1
        self.alone += self._length == 0

    def verdict(self, judged: object, now: float) -> None:
        self._round()

    def streamed(self, tokens: int, load: object, now: float) -> None:
        self._round()


class World:
    """See the module docstring."""

    def __init__(
        self,
        target: Law,
        draft: Law,
        *,
        vocab_size: int,
        rtt: float = 0.05,
        jitter: float = 0.0,
        step_time: Callable[[int], float] = lambda rows: 0.03 + 0.0005 * rows,
        draft_time: float = 0.005,
        draft_step: Callable[[int], float] | None = None,
        seed: int = 0,
        eos: frozenset[int] = frozenset(),
        context_length: int = 4096,
        draft_context: int = 4096,
        faults: Faults | None = None,
        edges: int = 1,
        heartbeat: float = 5.0,
        service: dict[str, object] | None = None,
        client: dict[str, object] | None = None,
        grammars: Grammars | None = None,
        edge_grammars: bool = True,
        lookup: bool = False,
        slots: int = MAX_SLOTS,  # of the target; few make many answers, one by one, cheap
    ) -> None:
        self.now = 0.0
        self.slots = slots
        self.grammars, self.edge_grammars, self.lookup = grammars, edge_grammars, lookup
        self.random = random.Random(seed)
        self.vocab_size, self.context_length, self.eos = vocab_size, context_length, eos
        self.target_law = target
        self.rtt, self.jitter = rtt, jitter
        self.step_time = step_time
        # By default company gains nothing: a step of n takes as long as n alone.
        self.draft_step = draft_step or (lambda n: n * draft_time)
        self.faults: Faults = faults or NoFaults()
        self.heartbeat = heartbeat
        self.edge_hello = hello(Role.EDGE, vocab_size=vocab_size)
        self.cloud_hello = hello(Role.CLOUD, vocab_size=vocab_size, context_length=context_length)
        self.restarts = 0
        self.refusals: list[RemoteError] = []
        self.forwards = 0
        self.target_tokens = 0
        self.wire: dict[str, int] = {"up": 0, "down": 0}
        self.dial_fails = False
        self._draft_model = ToyModel(draft, vocab_size=vocab_size, context_length=draft_context)
        self._service_options = service or {}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._pipes: dict[int, Pipe] = {}
        self._next_pipe = itertools.count(1)
        self._boot()
        self.edges = [
            Edge(self, i, self._draft_model, heartbeat=heartbeat, **(client or {}))
            for i in range(edges)
        ]

    def _boot(self) -> None:
        self.model = ToyModel(
            self.target_law,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            eos_token_ids=self.eos,
            max_slots=self.slots,
        )
        self.desk = SlotDesk(self.model, ModelDrafter("cloud", model=self._draft_model))
        config = {
            "vocab_size": self.vocab_size,
            "context_length": self.context_length,
            "eos": self.eos,
            "deterministic": True,
            **self._service_options,
        }
        self.service = CloudService(
            ServiceConfig(**config),  # type: ignore[arg-type]
            Words,
            grammars=self.grammars,
        )
        self.peers: dict[int, Connection] = {}
        self._life = object()
        self._engine_busy = False

    # ---------------------------------------------------------------- time

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._count), call))

    def run(self, until: float = 1e5, *, idle: bool = True, steps: int = 2_000_000) -> None:
        """Run events; with `idle` stop as soon as no edge has a live session."""
        for _ in range(steps):
            if not self._heap or self._heap[0][0] > until:
                self.now = max(self.now, min(until, self.now if not self._heap else until))
                return
            if idle and self.quiet:
                return
            self.now, _, call = heapq.heappop(self._heap)
            call()
        raise AssertionError("the world does not come to rest")

    @property
    def quiet(self) -> bool:
        return all(e.client.sessions == 0 for e in self.edges) and not self._wishes

    _wishes = 0

    def later(self, when: float, call: Callable[[], None]) -> None:
        """Like `at`, and the world does not count as quiet before it happened."""
        self._wishes += 1

        def wish() -> None:
            self._wishes -= 1
            call()

        self.at(when, wish)

    # ---------------------------------------------------------------- links

    def delay(self, pipe: Pipe, way: str) -> float:
        wanted = self.now + self.rtt / 2 + self.jitter * self.random.random()
        arrival = max(wanted, pipe.last[way])
        pipe.last[way] = arrival
        return arrival - self.now

    def dial(self, edge: Edge) -> None:
        def answer() -> None:
            if self.dial_fails:
                edge.client.disconnected(self.now, "connection refused")
                edge.act()
                return
            pipe = Pipe(next(self._next_pipe), edge)
            self._pipes[pipe.number] = edge.pipe = pipe
            connection = Connection(
                Role.CLOUD, self.cloud_hello, now=self.now, heartbeat=self.heartbeat
            )
            self.peers[pipe.number] = connection
            self.service.connected(pipe.number, edge.tenant)
            self._flush(pipe.number)
            self._watch(pipe.number)
            edge.client.connected(self.now)
            edge.act()

        self.at(self.now + self.rtt, answer)

    def transmit(self, pipe: Pipe, way: str, frame: bytes) -> None:
        if not pipe.open:
            return
        self.wire[way] += len(frame)
        for extra, item in self.faults.frames(self, pipe, way, frame):
            pipe.last[way] = max(pipe.last[way], self.now + extra)
            self.at(self.now + self.delay(pipe, way), lambda x=item: self._arrive(pipe, way, x))

    def _arrive(self, pipe: Pipe, way: str, frame: bytes) -> None:
        if not pipe.open or pipe.dark:
            return
        if way == "up":
            self._cloud_hears(pipe.number, frame)
        elif pipe.edge.pipe is pipe:
            pipe.edge.client.receive(frame, self.now)
            pipe.edge.act()

    def cut(self, pipe: Pipe) -> None:
        """Both ends learn of it half a round trip later; what is in flight is lost."""
        if not pipe.open:
            return
        pipe.open = False
        self.at(self.now + self.rtt / 2, lambda: self._cloud_lost(pipe.number))
        self.at(self.now + self.rtt / 2, lambda: self._edge_lost(pipe))

    def cut_all(self) -> None:
        for pipe in list(self._pipes.values()):
            self.cut(pipe)

    def darken(self) -> None:
        """Black hole: the links stay open and deliver nothing (field case 35)."""
        for pipe in self._pipes.values():
            pipe.dark = True

    def hang_up(self, pipe: Pipe) -> None:
        """The edge closed: what it had sent still arrives."""
        self.at(max(self.now, pipe.last["up"]) + 1e-9, lambda: self._cloud_lost(pipe.number))

    def restart(self) -> None:
        """The verifier is replaced by an empty one; every connection breaks."""
        self.restarts += 1
        for pipe in list(self._pipes.values()):
            if pipe.open:
                pipe.open = False
                self.at(self.now + self.rtt / 2, lambda p=pipe: self._edge_lost(p))
        self._boot()

    def _edge_lost(self, pipe: Pipe) -> None:
        if pipe.edge.pipe is pipe:
            pipe.edge.pipe = None
            pipe.edge.client.disconnected(self.now)
            pipe.edge.act()

    def _cloud_lost(self, number: int) -> None:
        if self.peers.pop(number, None) is not None:
            self._pipes.pop(number, None)
            self.service.disconnected(number, self.now)
            self._free_slots()
            self._arm_service()
            self._run_engine()

    # ---------------------------------------------------------------- the cloud

    def _cloud_hears(self, number: int, frame: bytes) -> None:
        connection = self.peers.get(number)
        if connection is None:
            return
        replies: list[Outgoing] = []
        try:
            message = connection.receive(frame, self.now)
            if message is not None and not isinstance(message, Hello):
                replies = self.service.receive(number, message, self.now)
        except RemoteError as error:
            self.refusals.append(error)
            if error.session is None:
                connection.fail(error)
                self._flush(number)
                pipe = self._pipes[number]
                self.at(
                    max(self.now, pipe.last["down"]) + 1e-9, lambda: self._close_from_cloud(pipe)
                )
                return
            replies = self.service.refuse(number, error)
        self._dispatch(replies)
        self._flush(number)
        self._free_slots()
        self._run_engine()

    def _close_from_cloud(self, pipe: Pipe) -> None:
        pipe.open = False
        self._cloud_lost(pipe.number)
        self._edge_lost(pipe)

    def _dispatch(self, outgoing: Sequence[Outgoing]) -> None:
        for item in outgoing:
            connection = self.peers.get(item.connection)
            if connection is None:
                continue
            try:
                connection.send(item.message)
            except LocalError:
                continue
            self._flush(item.connection)

    def _flush(self, number: int) -> None:
        pipe = self._pipes[number]
        for frame in self.peers[number].take():
            self.transmit(pipe, "down", frame)

    def _watch(self, number: int) -> None:
        connection = self.peers.get(number)
        if connection is None:
            return
        life = self._life

        def ring() -> None:
            if self._life is not life or number not in self.peers:
                return
            try:
                connection.tick(self.now)
            except RemoteError:
                self._pipes[number].open = False
                self._cloud_lost(number)
                return
            self._flush(number)
            self._watch(number)

        if connection.deadline < 1e9:
            self.at(max(connection.deadline, self.now + 1e-6), ring)

    def _arm_service(self) -> None:
        service, deadline = self.service, self.service.deadline
        if deadline is None:
            return

        def ring() -> None:
            if service is self.service:
                service.tick(self.now)
                self._free_slots()
                self._arm_service()  # whoever was lost later is due later

        self.at(deadline + 1e-9, ring)

    def _free_slots(self) -> None:
        keys, self.service.released = self.service.released, []
        for key in keys:
            self.desk.release(key)

    def _run_engine(self) -> None:
        if self._engine_busy:
            return
        work = self.service.batch(self.now)
        if not work:
            return
        self._engine_busy = True
        self.forwards += 1
        results = self.desk.run([desk_job(w) for w in work])
        self.target_tokens += sum(len(r.rows) for r in results)
        names = Done.__dataclass_fields__
        done = [Done(**{n: getattr(r, n) for n in names}) for r in reversed(results)]
        started, life = self.now, self._life

        def finish() -> None:
            if self._life is not life:
                return
            self._engine_busy = False
            self._dispatch(self.service.finished(done, started=started, now=self.now))
            self._free_slots()
            self._run_engine()

        self.at(self.now + self.step_time(sum(len(r.rows) for r in results)), finish)


def grid(**axes: Sequence[object]) -> Iterator[dict[str, object]]:
    """Every combination of the named values."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))
