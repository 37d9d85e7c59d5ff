"""Edges, verifiers and the links between them in virtual time, around the very machines that run
live: `EdgeClient`, `Connection` and `CloudService` do here what they do over sockets.

A `World` does what the runtime does with sockets, threads and a clock, and nothing else: frames
from `EdgeClient.take` travel over a `Pipe`, frames that arrive go into `Connection.receive` and
`CloudService.receive`, forwards run through `SlotDesk` on an engine whose answers cost nothing and
end when the device model says so, and so do the batches of drafting jobs of an edge.

A `Pipe` is a TCP connection: order is kept, and what was sent before a cut is lost. What TCP would
never do (repeat, reorder, lose one frame alone) a fault may do all the same: the machines have to
refuse it cleanly and go on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from outrider.control.costs import RowCosts
from outrider.core.draft import NO_DRAFT
from outrider.core.draft import Draft as CoreDraft
from outrider.core.relaxation import Relaxation
from outrider.core.tokens import Origin, Rule, SamplingParams
from outrider.engines.base import LanguageModel
from outrider.engines.desk import DeskJob, DeskResult, SlotDesk
from outrider.engines.drafters import Drafter, DraftSession
from outrider.engines.lockstep import Ask, propose_together
from outrider.proto.codec import MAX_FRAME_BYTES, decode
from outrider.proto.connection import HEARTBEAT, Connection, Role
from outrider.proto.errors import LocalError, RemoteError
from outrider.proto.messages import (
    PROTOCOL_VERSION,
    Correct,
    Draft,
    Hello,
    Limits,
    Message,
    Open,
    Proposals,
    Relaxed,
    Tokens,
    Verdict,
)
from outrider.session.client import EdgeClient
from outrider.session.edge import DraftJob, EdgeSession
from outrider.session.events import Ended, Event, Failed, Progress
from outrider.session.generation import Counters, Generation, Step
from outrider.session.pilot import Pilot
from outrider.session.schedules import MAX_WINDOW, Plan
from outrider.session.service import CloudService, Done, Outgoing, ServiceConfig, Work
from outrider.sim.devices import EdgeTimes, Load, ScriptedDrafts
from outrider.sim.events import MAX_STEPS, Chance, Heap
from outrider.sim.links import WAYS, Conditions, Levels, Wire

DIAL_TRIPS: Final = 2.0
"""Round trips before the first frame: TCP and the WebSocket's upgrade; TLS not counted."""
A_MOMENT: Final = 1e-9
"""Seconds: behind everything that happens at the same time."""


class Words:
    """A text stream for ids without a tokenizer: every id is its decimal number and a blank."""

    def push(self, token: int) -> str:
        return f"{token} "

    def flush(self) -> str:
        return ""


def greeting(role: Role, *, vocab_size: int, context_length: int, **changes: object) -> Hello:
    """HELLO of a simulated machine."""
    values: dict[str, Any] = {
        "versions": (PROTOCOL_VERSION,),
        "role": role.value,
        "agent": "simulated",
        "fingerprint": f"toy-{vocab_size}",
        "vocab_size": vocab_size,
        "logits_width": vocab_size,
        "context_length": context_length,
        "limits": Limits(
            frame_bytes=MAX_FRAME_BYTES, window=MAX_WINDOW, sessions=64, prompt_tokens=1_000_000
        ),
        "rules": tuple(rule.value for rule in Rule),
        "deterministic": True,
        "drafts": role is Role.CLOUD,
    }
    return Hello(**{**values, **changes})


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a world is made of. Times in seconds."""

    target: Callable[[], LanguageModel]
    """A fresh engine for a verifier that starts."""
    drafter: Drafter
    """Of every edge."""
    cloud_drafter: Callable[[], Drafter] | None = None
    """A fresh one for a verifier that starts, for co-located speculation."""
    vocab_size: int
    context_length: int = 4096
    eos: frozenset[int] = frozenset()
    conditions: Conditions = field(default_factory=Conditions)
    forward: Callable[[Load], float]
    handover: float = 0.0
    """Between a forward's choice and its beginning: event loop, frames, the engine's thread."""
    drafting: EdgeTimes
    row_ms: tuple[tuple[int, float], ...] = ()
    """The target's row costs in milliseconds: what HELLO says, and what the verifier begins with,
    which measures them as it starts."""
    id_bytes: int = 1
    """Bytes of an id on the wire. The ids here are small and take one; a size is counted as if they
    were those of a real vocabulary."""
    heartbeat: float = HEARTBEAT
    service: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ServiceConfig other than their defaults."""
    client: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of EdgeClient other than their defaults."""


class Faults(Protocol):
    """Asked about every frame; may plan things of its own."""

    def frames(self, world: World, pipe: Pipe, way: str, frame: bytes) -> list[tuple[float, bytes]]:
        """What is put on the wire instead: (extra seconds, frame). May call `world.cut(pipe)`."""
        ...


@dataclass(slots=True)
class Pipe:
    """One transport connection. `open` False: cut."""

    number: int
    edge: Edge
    cloud: Cloud
    wire: Wire
    open: bool = True


@dataclass(slots=True)
class Answer:
    """What the user of one session has seen."""

    edge: int
    number: int
    prompt: tuple[int, ...]
    params: SamplingParams
    rule: Rule
    asked: float
    """Seconds."""
    counters: Counters
    machine: EdgeSession | None
    ids: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """When each token was shown."""
    steps: list[tuple[float, Step]] = field(default_factory=list)
    """When each block was shown."""
    queued: float = 0.0
    """Seconds that its rounds waited for the target's engine, all together."""
    end: Ended | Failed | None = None
    cancelled: bool = False
    abandoned: bool = False
    """The edge died."""

    @property
    def over(self) -> bool:
        return self.end is not None or self.cancelled or self.abandoned


class UserError(AssertionError):
    """A user was shown what must not be shown."""


class Edge:
    """An edge machine: the client, one draft engine, its transport."""

    def __init__(self, world: World, number: int, cloud: Cloud) -> None:
        self.world = world
        self.number = number
        self.cloud = cloud
        self.tenant = f"tenant-{number}"
        self.answers: dict[int, Answer] = {}
        """By session, of the client that runs now."""
        self.told: list[Callable[[Answer], None]] = []
        """Called when an answer is over."""
        self.events: list[tuple[float, Event]] = []
        self.bytes: dict[str, int] = dict.fromkeys(WAYS, 0)
        """On the wire, without headers."""
        self.drafting_time = 0.0
        self._lives = itertools.count(1)
        self._chance = Chance(world.seed, number, 1)
        self._levels = Levels(world.setup.conditions, Chance(world.seed, number, 2))
        self.pipe: Pipe | None = None
        self.start()

    def start(self) -> None:
        """A fresh process: nothing is remembered."""
        life, ids = next(self._lives), itertools.count(1)
        machine, chance = self.number, self._chance
        setup = self.world.setup
        self.client = EdgeClient(
            self.world.edge_hello,
            now=self.world.now,
            uid=lambda: b"".join(n.to_bytes(4, "big") for n in (machine, life, next(ids), 0)),
            jitter=lambda: 0.5 + 0.5 * chance.uniform(),
            heartbeat=setup.heartbeat,
            **setup.client,
        )
        self._drafts: dict[int, DraftSession] = {}
        self._read: set[int] = set()
        self._life = object()
        self._timer = float("inf")

    def wire(self) -> Wire:
        """For a new connection."""
        return Wire(self.world.setup.conditions, self._levels, self._chance)

    # ---------------------------------------------------------------- the user's wishes

    def ask(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        plan: Plan,
        *,
        rule: Rule = Rule.COUPLED,
        pilot: Pilot | None = None,
        relaxation: Relaxation | None = None,
    ) -> Answer:
        """Begin an answer."""
        world, setup = self.world, self.world.setup
        generation = Generation(
            prompt, params, context_length=setup.context_length, eos=setup.eos, text=Words()
        )
        number = self.client.start(
            generation, plan, rule=rule, relaxation=relaxation, now=world.now, pilot=pilot
        )
        sketch = relaxation.sketch if relaxation else 1
        self._drafts[number] = setup.drafter.session(len(prompt), params, rule, sketch=sketch)
        answer = self.answers[number] = Answer(
            edge=self.number,
            number=number,
            prompt=tuple(prompt),
            params=params,
            rule=rule,
            asked=world.now,
            counters=generation.counters,
            machine=self.client.session(number),
        )
        world.heap.note(b"ask", bytes([self.number & 0xFF]))
        self.act()
        return answer

    def cancel(self, answer: Answer) -> None:
        """The user has enough of it. Ignored when it is over."""
        if answer.over:
            return
        self.client.cancel(answer.number)
        answer.cancelled = True
        self._over(answer)
        self.act()

    def die(self) -> None:
        """The process ends and starts again; its answers are lost."""
        for answer in list(self.answers.values()):
            if not answer.over:
                answer.abandoned = True
                self._over(answer)
        self.answers.clear()
        pipe, self.pipe = self.pipe, None
        if pipe is not None:
            self.world.hang_up(pipe)
        self.start()

    def _over(self, answer: Answer) -> None:
        session = self._drafts.pop(answer.number, None)
        if session is not None:
            session.close()
        for tell in self.told:
            tell(answer)

    # ---------------------------------------------------------------- what the machine wants

    def act(self) -> None:
        """Carry it out."""
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
        self._arm()

    def _arm(self) -> None:
        deadline = self.client.deadline
        if deadline is not None and deadline < self._timer:
            self._timer = deadline
            life = self._life

            def ring() -> None:
                if life is self._life:
                    self._timer = float("inf")
                    self.client.tick(self.world.now)
                    self.act()

            self.world.heap.at(deadline, ring)

    def _note(self, event: Event) -> None:
        now = self.world.now
        if isinstance(event, Progress):
            answer = self.answers[event.session]
            if answer.over:
                raise UserError("tokens behind the end of an answer")
            answer.ids += event.step.tokens
            answer.origins += event.step.origins
            answer.times += [now] * len(event.step.tokens)
            answer.steps.append((now, event.step))
            if event.step.round is not None:
                answer.queued += event.step.round.queue_s
            self.world.heap.note(b"shown", bytes(t & 0xFF for t in event.step.tokens))
            return
        self.events.append((now, event))
        if isinstance(event, Ended | Failed):
            answer = self.answers[event.session]
            answer.end = event
            self._over(answer)

    def _draft(self, jobs: Sequence[tuple[int, DraftJob]]) -> None:
        """A batch: its sessions go in step, each is told of when it leaves, and pays its part."""
        times = self.world.setup.drafting
        known = [(number, job) for number, job in jobs if number in self._drafts]
        asks = [self._ask_for(number, job) for number, job in known]
        found = dict(propose_together(asks))
        drafts = {number: found[i] for i, (number, _) in enumerate(known)}
        fresh = sum(len(self.answers[n].prompt) for n in drafts.keys() - self._read)
        self._read |= drafts.keys()
        passed = times.start + times.prefill * fresh
        share = passed / max(1, len(jobs))
        lengths = {n: max(1, len(_draft(drafts.get(n)))) for n, _ in jobs}
        for step in range(1, max(lengths.values()) + 1):
            inside = sum(length >= step for length in lengths.values())
            passed += times.step(inside)
            share += times.step(inside) / inside
            for number in (n for n, length in lengths.items() if length == step):
                self._finish_job(number, _draft(drafts.get(number)), passed, share)
        self.drafting_time += passed

    def _ask_for(self, number: int, job: DraftJob) -> Ask:
        session, machine = self._drafts[number], self.answers[number].machine
        if isinstance(session, ScriptedDrafts) and machine is not None:
            session.depth = len(job.context) - machine.generation.sequence.base
        return Ask(session, job.context, job.count, job.stop)

    def _finish_job(self, number: int, draft: CoreDraft, passed: float, seconds: float) -> None:
        life = self._life

        def finish() -> None:
            if life is self._life:
                self.client.drafted(number, draft, self.world.now, seconds=seconds)
                self.act()

        self.world.heap.at(self.world.now + passed, finish)


def _draft(found: CoreDraft | Exception | None) -> CoreDraft:
    """What a job made; nothing where its session is gone. Raises what a toy engine raised."""
    if isinstance(found, Exception):
        raise found
    return found or NO_DRAFT


class Cloud:
    """A verifier: the service, the engine under it, and its side of every connection."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.forwards = 0
        self.rows = 0
        self.busy = 0.0
        """Seconds in forwards."""
        self.restarts = 0
        self.refusals: list[RemoteError] = []
        self._boot()

    def _boot(self) -> None:
        setup = self.world.setup
        self.model = setup.target()
        own = setup.cloud_drafter
        self.desk = SlotDesk(self.model, own and own())
        self.service = CloudService(
            ServiceConfig(
                vocab_size=setup.vocab_size,
                context_length=setup.context_length,
                eos=setup.eos,
                deterministic=True,
                **setup.service,
            ),
            Words,
            costs=RowCosts([(rows, ms / 1e3) for rows, ms in setup.row_ms]),
        )
        self.peers: dict[int, Connection] = {}
        self._life = object()
        self._running = False

    # ---------------------------------------------------------------- connections

    def accept(self, pipe: Pipe) -> None:
        now = self.world.now
        heartbeat = self.world.setup.heartbeat
        hello = self.world.cloud_hello
        self.peers[pipe.number] = Connection(Role.CLOUD, hello, now=now, heartbeat=heartbeat)
        self.service.connected(pipe.number, pipe.edge.tenant)
        self._flush(pipe.number)
        self._watch(pipe.number)

    def hears(self, number: int, frame: bytes) -> None:
        connection = self.peers.get(number)
        if connection is None:
            return
        now = self.world.now
        replies: list[Outgoing] = []
        try:
            message = connection.receive(frame, now)
            if message is not None and not isinstance(message, Hello):
                replies = self.service.receive(number, message, now)
        except RemoteError as error:
            self.refusals.append(error)
            if error.session is None:
                connection.fail(error)
                self._flush(number)
                pipe = self.world.pipes[number]
                behind = pipe.wire.newest("down") + A_MOMENT
                self.world.heap.at(behind, lambda: self.world.close(pipe))
                return
            replies = self.service.refuse(number, error)
        self._dispatch(replies)
        self._flush(number)
        self._go_on()

    def lost(self, number: int) -> None:
        """A connection is gone."""
        if self.peers.pop(number, None) is not None:
            self.world.pipes.pop(number, None)
            self.service.disconnected(number, self.world.now)
            self._arm()
            self._go_on()

    def block(self, number: int, *, blocked: bool) -> None:
        """An edge reads slowly: the runtime says so to the service."""
        if number in self.peers:
            self.service.block(number, blocked=blocked)
            self._go_on()

    def drain(self) -> None:
        """No new sessions; what runs goes on."""
        self.service.drain()
        for number, connection in self.peers.items():
            connection.drain()
            self._flush(number)

    def restart(self) -> None:
        """An empty verifier takes this one's place; every connection breaks."""
        self.restarts += 1
        for pipe in [p for p in self.world.pipes.values() if p.cloud is self and p.open]:
            self.world.pipes.pop(pipe.number)
            self.world.break_off(pipe)
        self._boot()

    def _dispatch(self, outgoing: Sequence[Outgoing]) -> None:
        for item in outgoing:
            connection = self.peers.get(item.connection)
            if connection is None:
                continue
            try:
                connection.send(item.message)
            except LocalError:  # it closed meanwhile
                continue
            self._flush(item.connection)

    def _flush(self, number: int) -> None:
        pipe = self.world.pipes[number]
        for frame in self.peers[number].take():
            self.world.transmit(pipe, "down", frame)

    # ---------------------------------------------------------------- time

    def _watch(self, number: int) -> None:
        connection = self.peers.get(number)
        if connection is None:
            return

        def ring() -> None:
            if self.peers.get(number) is not connection:
                return
            try:
                connection.tick(self.world.now)
            except RemoteError:
                self.world.pipes[number].open = False
                self.lost(number)
                return
            self._flush(number)
            self._watch(number)

        if connection.deadline < float("inf"):
            self.world.heap.at(connection.deadline, ring)

    def _arm(self) -> None:
        service, deadline = self.service, self.service.deadline
        if deadline is None:
            return

        def ring() -> None:
            if service is self.service:
                service.tick(self.world.now)
                self._free()
                self._arm()  # others were lost later

        self.world.heap.at(deadline + A_MOMENT, ring)

    # ---------------------------------------------------------------- the engine

    def _go_on(self) -> None:
        self._free()
        self._run()

    def _free(self) -> None:
        keys, self.service.released = self.service.released, []
        for key in keys:
            self.desk.release(key)

    def _run(self) -> None:
        if self._running:
            return
        work = self.service.batch(self.world.now)
        if not work:
            return
        self._running = True
        results = self.desk.run([_desk_job(w) for w in work])
        if self.world.watch is not None:
            self.world.watch(self, work, results)
        load = _load(work, results)
        spent = self.world.setup.forward(load)
        self.forwards += 1
        self.rows += load.rows
        self.busy += spent
        self._finish([_done(r) for r in results], spent)

    def _finish(self, done: Sequence[Done], spent: float) -> None:
        started, life = self.world.now + self.world.setup.handover, self._life

        def finish() -> None:
            if self._life is life:
                self._running = False
                self._dispatch(self.service.finished(done, started=started, now=self.world.now))
                self._go_on()

        self.world.heap.at(started + spent, finish)


def _desk_job(item: Work) -> DeskJob:
    return DeskJob(
        key=item.key,
        committed=item.job.committed,
        drafts=item.job.drafts,
        own_draft=item.cloud_draft,
        prompt_length=item.prompt_length,
        params=item.params,
        rule=item.rule,
    )


def _done(result: DeskResult) -> Done:
    return Done(key=result.key, rows=result.rows, fed=result.fed, draft=result.draft)


def _load(work: Sequence[Work], results: Sequence[DeskResult]) -> Load:
    rows = sum(len(r.rows) for r in results)
    return Load(
        rows=rows,
        sessions=sum(r.fed > 0 for r in results),
        context=sum(len(w.job.committed) for w in work),
        # The newest committed token of a session is fed for the first of its rows.
        taken_in=max(0, sum(r.fed for r in results) - rows),
        drafted=max((len(r.draft) for r in results if r.draft is not None), default=0),
    )


Watch = Callable[[Cloud, Sequence[Work], Sequence[DeskResult]], None]


class World:
    """See the module docstring."""

    def __init__(
        self,
        setup: Setup,
        *,
        edges: int = 1,
        clouds: int = 1,
        seed: int = 0,
        faults: Faults | None = None,
    ) -> None:
        """Edge i belongs to verifier i mod `clouds`."""
        self.setup = setup
        self.seed = seed
        self.faults = faults
        self.heap = Heap()
        self.watch: Watch | None = None
        """Looks at every forward."""
        self.pipes: dict[int, Pipe] = {}
        self.dial_fails = False
        self._numbers = itertools.count(1)
        size, context = setup.vocab_size, setup.context_length
        self.edge_hello = greeting(Role.EDGE, vocab_size=size, context_length=context)
        self.cloud_hello = greeting(
            Role.CLOUD,
            vocab_size=size,
            context_length=context,
            row_ms=setup.row_ms,
            drafts=setup.cloud_drafter is not None,
        )
        self.clouds = [Cloud(self, i) for i in range(clouds)]
        self.edges = [Edge(self, i, self.clouds[i % clouds]) for i in range(edges)]

    @property
    def now(self) -> float:
        """Seconds since the world began."""
        return self.heap.now

    def run(self, until: float = float("inf"), *, steps: int = MAX_STEPS) -> None:
        """Run until every answer is over and nothing is planned, or until a time (seconds)."""
        self.heap.run(until, rest=lambda: self.quiet, steps=steps)

    @property
    def quiet(self) -> bool:
        """No answer is running and nothing is planned with `heap.later`."""
        return not self.heap.wishes and not any(e.client.sessions for e in self.edges)

    # ---------------------------------------------------------------- links

    def dial(self, edge: Edge) -> None:
        """Connect an edge to its verifier."""
        client = edge.client

        def answer() -> None:
            if client is not edge.client:
                return
            if self.dial_fails:
                client.disconnected(self.now, "connection refused")
                edge.act()
                return
            pipe = Pipe(next(self._numbers), edge, edge.cloud, edge.wire())
            self.pipes[pipe.number] = edge.pipe = pipe
            edge.cloud.accept(pipe)
            client.connected(self.now)
            edge.act()

        conditions = self.setup.conditions
        trip = edge.wire().trip(self.now)
        self.heap.at(conditions.held(self.now + DIAL_TRIPS * trip), answer)

    def transmit(self, pipe: Pipe, way: str, frame: bytes) -> None:
        """Put a frame on the wire, or what faults make of it."""
        if not pipe.open:
            return
        self.heap.note(way.encode(), frame)
        size = len(frame)
        if self.setup.id_bytes > 1:
            size += (self.setup.id_bytes - 1) * ids_in(decode(frame))
        pipe.edge.bytes[way] += size
        items = self.faults.frames(self, pipe, way, frame) if self.faults else [(0.0, frame)]
        for extra, item in items:
            arrives = pipe.wire.arrival(way, size, self.now, extra)
            self.heap.at(arrives, lambda x=item: self._arrive(pipe, way, x))  # type: ignore[misc]

    def _arrive(self, pipe: Pipe, way: str, frame: bytes) -> None:
        if not pipe.open:
            return
        if way == "up":
            pipe.cloud.hears(pipe.number, frame)
        elif pipe.edge.pipe is pipe:
            pipe.edge.client.receive(frame, self.now)
            pipe.edge.act()

    def cut(self, pipe: Pipe) -> None:
        """Both ends learn of it half a round trip later; what is on the way is lost."""
        if pipe.open:
            self.break_off(pipe)
            notice = self.now + pipe.wire.trip(self.now) / 2
            self.heap.at(notice, lambda: pipe.cloud.lost(pipe.number))

    def break_off(self, pipe: Pipe) -> None:
        """The verifier's end is gone: the edge learns of it half a round trip later."""
        pipe.open = False
        notice = self.now + pipe.wire.trip(self.now) / 2
        self.heap.at(notice, lambda: self._edge_lost(pipe))

    def hang_up(self, pipe: Pipe) -> None:
        """The edge closed: what it had sent still arrives."""
        behind = pipe.wire.newest("up") + A_MOMENT
        self.heap.at(behind, lambda: pipe.cloud.lost(pipe.number))

    def close(self, pipe: Pipe) -> None:
        """The verifier closed."""
        pipe.open = False
        pipe.cloud.lost(pipe.number)
        self._edge_lost(pipe)

    def _edge_lost(self, pipe: Pipe) -> None:
        if pipe.edge.pipe is pipe:
            pipe.edge.pipe = None
            pipe.edge.client.disconnected(self.now)
            pipe.edge.act()


def ids_in(message: Message) -> int:
    """Token ids that a message carries, those of sketches not counted."""
    match message:
        case Draft() | Tokens() | Proposals():
            return len(message.tokens)
        case Verdict() | Relaxed():
            return 1
        case Correct():
            return int(message.token is not None)
        case Open():
            return len(message.prompt) + len(message.committed)
        case _:
            return 0
