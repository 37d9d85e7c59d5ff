"""The edge: drives `session.client.EdgeClient` over a WebSocket and a draft engine.

Everything runs on one event loop; only drafting has a thread of its own. There is no loop task:
each thing that happens calls the machine and then `_pump`, which carries out what it asks for
and sets the one timer. So there is one place where frames are written, drafts are started and
steps are handed out, and nothing to leak when the caller goes away.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Final

from websockets.exceptions import WebSocketException

from outrider.core.draft import NO_DRAFT, Draft
from outrider.engines.base import ModelInfo, UnrecordedError
from outrider.engines.drafters import Drafter, DraftSession
from outrider.engines.lockstep import Ask
from outrider.engines.tokenizer import Tokenizer
from outrider.proto.errors import LocalError, RemoteError
from outrider.proto.messages import Code, Hello
from outrider.runtime.contact import Contact, Link, after
from outrider.runtime.dialling import RefusedError, UnreachableError, dial, greeting, reason_of
from outrider.runtime.drafting import Drafting
from outrider.runtime.edgeconfig import EdgeConfig
from outrider.runtime.edgerequest import EdgeRequest
from outrider.runtime.edgestream import EdgeStream, Running
from outrider.runtime.failures import CloudError
from outrider.runtime.learnt import Learnt, target_facts
from outrider.runtime.linkuse import LinkMeter, LinkUse
from outrider.runtime.routes import AFFINITY_HEADER
from outrider.runtime.socket import FrameSocket
from outrider.session.client import EdgeClient
from outrider.session.edge import DraftJob
from outrider.session.events import (
    Ended,
    Event,
    Failed,
    LinkDown,
    LinkHeard,
    LinkQuiet,
    LinkUp,
    Progress,
)
from outrider.session.generation import Generation
from outrider.session.pilot import Pilot
from outrider.session.schedules import Plan

PAUSE_UNREAD: Final = 64
"""Steps that wait for their reader before an answer pauses on both sides (field case 31): seconds
of text, and more than a round trip brings."""
RESUME_UNREAD: Final = 16
"""Steps that still wait when it goes on: so many that the reader need not wait for the cloud."""
MIN_TIMER_S: Final = 0.001
"""The machine is not asked more often than this, whatever deadline it names."""


class EdgeRuntime:
    """A connection to one verifier and a draft engine, answering any number of requests."""

    def __init__(
        self,
        config: EdgeConfig,
        tokenizer: Tokenizer,
        drafter: Drafter | None = None,
        *,
        context_length: int = 1_000_000,
        draft_pace: float = 0.0,
        learnt: Learnt | None = None,
        target: ModelInfo | None = None,
    ) -> None:
        """`context_length`: most ids of a request; the cloud's own limit holds as well. `learnt`:
        of an earlier edge with the same draft and target, to go on from. `target`: what the cloud
        is believed to serve, for calibrations, until it has said so itself. Raises
        OSError when `ca_file` cannot be read."""
        self.config = config
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.drafting = Drafting(tokenizer, drafter, self._drafted, pace=draft_pace)
        self.peer: Hello | None = None
        self.last_break = ""
        """Why the link last went down; empty if it never did."""
        self.contact = Contact(link=Link.UP, since=time.monotonic())
        """How it stands with the cloud while answers are awaited."""
        self.told: Callable[[Contact], None] | None = None
        """Told each change of it, for whoever keeps a log."""
        self._context = context_length
        self._meter = LinkMeter()
        jitter = random.Random(config.link_seed)
        self._client = EdgeClient(
            greeting(tokenizer, context_length),
            now=time.monotonic(),
            uid=lambda: secrets.token_bytes(16),
            jitter=lambda: 0.5 + 0.5 * jitter.random(),
            give_up=config.give_up,
            heartbeat=config.heartbeat,
        )
        self._tls = config.tls()
        self._closed = False
        self._running: dict[int, Running] = {}
        self._target = target
        self.learnt = learnt or Learnt()
        """Over all its answers."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket: FrameSocket | None = None
        self._sockets: set[FrameSocket] = set()
        """Every socket that is not closed yet, the one in use included."""
        self._seed = random.Random(config.link_seed + 1)
        self._affinity = secrets.token_hex(8)

    async def __aenter__(self) -> EdgeRuntime:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel everything and free both sides; answers still running fail. Safe to call twice."""
        if self._closed:
            return
        self._client.close()
        self._pump()
        self._closed = True
        over = Failed(session=0, code=Code.UNREACHABLE, message="this edge was closed")
        for running in self._running.values():
            running.steps.put_nowait(over)
        self._running.clear()
        await asyncio.gather(*(socket.close() for socket in list(self._sockets)))
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.drafting.close()

    # ---------------------------------------------------------------- requests

    @property
    def link_use(self) -> LinkUse:
        """What went over the link since this edge began."""
        return self._meter.use(self._client.tally.reconnects)

    def forgive(self) -> None:
        """Where the cloud refused this edge for good, let the next answer find out whether it still
        does: for an edge that lives longer than a mistake in somebody's configuration."""
        self._client.forgive()

    async def stream(self, request: EdgeRequest) -> EdgeStream:
        """Start an answer; iterate the stream for steps, then read its `result`. Raises
        ParameterError, CloudError, and UnrecordedError for a replayed draft."""
        schedule = request.plan()
        if not schedule.window.window:
            return self._start(request, schedule)
        target = target_facts(self.peer, self._target)
        pilot = self.learnt.pilot(request, self.drafter, target)
        drafts = await self.drafting.session(request)
        try:
            return self._start(request, schedule, drafts, pilot)
        except BaseException:
            self.drafting.let_go(drafts)
            raise

    def _start(
        self,
        request: EdgeRequest,
        schedule: Plan,
        drafts: DraftSession | None = None,
        pilot: Pilot | None = None,
    ) -> EdgeStream:
        """Register a session on all tables at once, or on none (field case 32)."""
        if self._closed:
            raise CloudError(Code.UNREACHABLE, "this edge was closed")
        generation = Generation(
            request.prompt_ids,
            request.params,
            context_length=self.context_length,
            eos=self.tokenizer.eos_token_ids,
            text=self.tokenizer.text_stream(),
        )
        now = time.monotonic()
        try:
            number = self._client.start(
                generation,
                schedule,
                rule=request.rule,
                relaxation=request.relaxation,
                reply=request.reply,
                now=now,
                pilot=pilot,
                due_ms=request.due_ms,
            )
        except RemoteError as error:
            raise CloudError(error.code, error.message) from None
        except LocalError as error:
            raise CloudError(Code.BUSY, str(error)) from None
        running = Running(request=request, steps=asyncio.Queue(), drafts=drafts)
        self._running[number] = running
        if self.contact.link is Link.QUIET:
            running.inform(self.contact)
        machine = self._client.session(number)
        assert machine is not None, "a session that was just started lives"
        stream = EdgeStream(self, running, machine)
        self._pump()
        return stream

    @property
    def connected(self) -> bool:
        """The cloud has greeted on the link in use."""
        return self._socket is not None and self.peer is not None

    @property
    def context_length(self) -> int:
        """Most ids of a request, prompt and answer together, as far as is known."""
        return min(self._context, self.peer.context_length) if self.peer else self._context

    def failure(self, failed: Failed) -> CloudError:
        """A session's failure as the caller sees it, with why the link is down if it is."""
        message = failed.message
        if failed.code is Code.UNREACHABLE and self.last_break:
            message = f"{message}: {self.last_break}"
        return CloudError(failed.code, message)

    def end(self, number: int) -> None:
        """Free what a session holds here; safe to call twice."""
        running = self._running.pop(number, None)
        if running is None:
            return
        self._client.cancel(number)
        self.drafting.let_go(running.drafts)
        self._pump()

    # ---------------------------------------------------------------- the pump

    def _pump(self) -> None:
        """Carry out what the machine asks for, and set the timer."""
        if self._closed:
            return
        now = time.monotonic()
        output = self._client.take(now)
        for frame in output.frames:
            if self._socket is not None:
                self._meter.sent(len(frame))
                self._socket.send(frame)
        if output.hang_up and self._socket is not None:
            socket, self._socket = self._socket, None
            self._spawn(self._discard(socket), "hang-up")
        if output.dial:
            self._spawn(self._dial(), "dial")
        if output.drafts:
            self._draft(output.drafts)
        for event in output.events:
            self._route(event)
        self._set_timer(now)

    def _set_timer(self, now: float) -> None:
        """A timer that is due too early is left alone: deadlines move on with every frame, and
        a tick that comes for nothing sets the next one."""
        deadline = self._client.deadline
        if deadline is None or (self._timer is not None and self._timer_at <= deadline):
            return
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(MIN_TIMER_S, deadline - now), self._tick)
        self._timer_at = deadline

    def _tick(self) -> None:
        self._timer = None
        self._client.tick(time.monotonic())
        self._pump()

    def _route(self, event: Event) -> None:
        match event:
            case Progress() | Ended() | Failed():
                running = self._running.get(event.session)
                if running is not None:
                    item = event.step if isinstance(event, Progress) else event
                    running.steps.put_nowait(item)
                    self._pace(event.session, running)
            case LinkUp():
                connection = self._client.connection
                self.peer = connection.peer if connection else None
                if self.peer is not None:
                    self.learnt.estimators.target([(n, ms / 1e3) for n, ms in self.peer.row_ms])
                self._hear(event)
            case LinkDown():
                self.last_break = event.reason
                self._hear(event)
            case LinkQuiet() | LinkHeard():
                self._hear(event)

    def _hear(self, event: LinkUp | LinkQuiet | LinkHeard | LinkDown) -> None:
        """Tell those that wait what has become of the link."""
        contact = after(self.contact, event, time.monotonic())
        if contact is self.contact:
            return
        self.contact = contact
        for running in self._running.values():
            running.inform(contact)
        if self.told is not None:
            self.told(contact)

    def _pace(self, number: int, running: Running) -> None:
        """Pause an answer whose reader is behind; the pump that follows says so to the cloud."""
        if running.paused_at is None and running.steps.qsize() > PAUSE_UNREAD:
            running.paused_at = time.monotonic()
            self._client.pause(number)
            asyncio.get_running_loop().call_soon(self._pump)

    def taken(self, number: int) -> None:
        """A reader took a step: go on once it has nearly caught up."""
        running = self._running.get(number)
        if running is None or running.paused_at is None:
            return
        if running.steps.qsize() <= RESUME_UNREAD:
            running.paused_at = None
            self._client.resume(number, time.monotonic())
            self._pump()

    def _spawn(self, work, name: str) -> None:  # type: ignore[no-untyped-def]
        task = asyncio.get_running_loop().create_task(work, name=f"outrider-{name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---------------------------------------------------------------- drafting

    def _draft(self, jobs: Sequence[tuple[int, DraftJob]]) -> None:
        """Draft a batch. Whatever becomes of a job, the machine is told."""
        asks: dict[int, Ask] = {}
        for number, job in jobs:
            running = self._running.get(number)
            drafts = running.drafts if running is not None else None
            if drafts is None:
                asyncio.get_running_loop().call_soon(self._drafted, number, NO_DRAFT)
            else:
                asks[number] = Ask(drafts, job.context, job.count, job.stop)
        if asks:
            self.drafting.propose(asks)

    def _drafted(self, number: int, draft: Draft | UnrecordedError, seconds: float = 0.0) -> None:
        if isinstance(draft, UnrecordedError):
            running = self._running.get(number)
            if running is not None:
                running.steps.put_nowait(draft)
                self.end(number)
            draft = NO_DRAFT
        self._client.drafted(number, draft, time.monotonic(), seconds=seconds)
        self._pump()

    # ---------------------------------------------------------------- the socket

    async def _dial(self) -> None:
        try:
            raw = await dial(self.config, self._tls, {AFFINITY_HEADER: self._affinity})
        except RefusedError as error:
            self._client.refused(error.code, str(error))
            self._pump()
            self.last_break = ""  # the refusal has said why
            return
        except UnreachableError as error:
            self._client.disconnected(time.monotonic(), str(error))
            self._pump()
            return
        socket = FrameSocket(raw, self.config.link, seed=self._seed.randrange(2**32))
        self._socket = socket
        self._sockets.add(socket)
        self._client.connected(time.monotonic())
        self._pump()
        await self._read(socket)

    async def _read(self, socket: FrameSocket) -> None:
        try:
            while (frame := await socket.receive()) is not None:
                if socket is not self._socket:
                    return
                self._meter.received(len(frame))
                self._client.receive(frame, time.monotonic())
                self._pump()
            reason = "the verifier closed the link"
        except (OSError, WebSocketException) as error:
            reason = reason_of(error)
        if socket is self._socket:
            self._socket = None
            self._client.disconnected(time.monotonic(), reason)
            self._pump()
        await self._discard(socket)

    async def _discard(self, socket: FrameSocket) -> None:
        await socket.close()
        self._sockets.discard(socket)
