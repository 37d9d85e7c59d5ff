"""The edge: drives `session.client.EdgeClient` over a WebSocket and a draft engine.

Everything runs on one event loop; only drafting has a thread of its own. There is no loop task:
each thing that happens calls the machine and then `_pump`, which carries out what it asks for
and sets the one timer. So there is one place where frames are written, drafts are started and
steps are handed out, and nothing to leak when the caller goes away.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from websockets.asyncio.client import connect
from websockets.exceptions import (
    InvalidMessage,
    InvalidStatus,
    InvalidURI,
    WebSocketException,
)
from websockets.uri import parse_uri

from outrider.control.base import CalibrationError, Controller, ControllerFacts
from outrider.control.calibration import Calibration, ModelFacts
from outrider.control.estimators import Estimators
from outrider.control.registry import make as make_controller
from outrider.core.draft import NO_DRAFT, Draft
from outrider.core.grammar import Constraint, GrammarKind
from outrider.core.link import Link
from outrider.core.relaxation import DEFAULT_SKETCH, Relaxation, require_relaxation
from outrider.core.residual import TopKReply, require_ratio
from outrider.core.tokens import Origin, ParameterError, Rule, SamplingParams
from outrider.engines.base import EngineError, ModelInfo, UnrecordedError
from outrider.engines.drafters import Drafter, DraftSession, GivenDrafter
from outrider.engines.grammar import GrammarReader, available
from outrider.engines.lockstep import Ask, propose_together
from outrider.engines.tokenizer import Tokenizer
from outrider.proto.codec import MAX_FRAME_BYTES
from outrider.proto.connection import HEARTBEAT, usable
from outrider.proto.errors import LocalError, RemoteError
from outrider.proto.messages import PROTOCOL_VERSION, Code, Hello, Limits
from outrider.runtime.access import is_loopback, sendable
from outrider.runtime.discreet import discreet, without_secrets
from outrider.runtime.local import MAX_DRAFT_LENGTH, GenerationResult, Timing
from outrider.runtime.routes import AFFINITY_HEADER
from outrider.runtime.socket import FrameSocket
from outrider.runtime.worker import EngineThread, Timed
from outrider.session.client import (
    GIVE_UP_AFTER,
    EdgeClient,
    Ended,
    Event,
    Failed,
    LinkDown,
    LinkUp,
    Progress,
)
from outrider.session.edge import MAX_GROWTH, DraftJob
from outrider.session.generation import Generation, Step
from outrider.session.pilot import ControlledPilot, Pilot
from outrider.session.schedules import (
    DEFAULT_GROWTH,
    DEFAULT_WINDOW,
    MAX_WINDOW,
    STREAMING,
    Plan,
    Schedule,
    plan,
)

log = logging.getLogger("outrider.edge")

DIAL_TIMEOUT: Final = 10.0
"""Seconds for TCP, TLS and the WebSocket handshake together."""
WS_HEADER_UP: Final = 6
"""Bytes WebSocket adds to a short client frame: two of header, four of mask."""
WS_HEADER_DOWN: Final = 2
MAX_DUE_MS: Final = 3_600_000
"""An hour: whoever can wait longer says nothing."""
MAX_CONTROLLERS: Final = 32
"""Most controllers an edge keeps; the oldest goes first and begins anew when it is asked for."""
PAUSE_UNREAD: Final = 64
"""Steps that wait for their reader before an answer pauses on both sides (field case 31): seconds
of text, and more than a round trip brings."""
RESUME_UNREAD: Final = 16
"""Steps that still wait when it goes on: so many that the reader need not wait for the cloud."""
MIN_TIMER_S: Final = 0.001
"""The machine is not asked more often than this, whatever deadline it names."""
_LONG_FRAME: Final = 126
"""From this payload size the WebSocket header is two bytes longer."""


class CloudError(Exception):
    """The cloud could not serve the request; `code` is the protocol's error code."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(f"{message} ({code.value})")
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeConfig:
    """Where the cloud is and how to reach it."""

    url: str
    """ws://host:port or wss://host:port; the protocol's path is added when there is none."""
    token: str | None = field(default=None, repr=False)
    """Bearer token; never logged."""
    ca_file: str | None = None
    """Trust this certificate authority instead of the system's."""
    link: Link | None = None
    """Shape the link in user space."""
    link_seed: int = 0
    give_up: float = GIVE_UP_AFTER
    """Seconds without a working link before an answer fails."""
    heartbeat: float = HEARTBEAT
    """Seconds of silence before a PING; after two such pauses a link is dead."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    insecure: bool = False
    """Send a login unencrypted to other hosts than this one."""

    def __post_init__(self) -> None:
        """Raises ParameterError, LinkError."""
        try:
            uri = parse_uri(self.url)
            uri.host.encode("idna")  # labels that are empty or too long
            if urlsplit(self.url).port == 0:
                raise ValueError("port 0")
        except (InvalidURI, ValueError):
            seen = without_secrets(self.url)
            raise ParameterError(
                "cloud", f"must be ws://HOST:PORT or wss://HOST:PORT, got {seen!r}"
            ) from None
        # Said without the value: it is a secret.
        if self.token and not sendable(self.token):
            raise ParameterError("token", "must be visible ASCII characters without blanks")
        if any(not (text.isascii() and text.isprintable()) for text in self.headers.values()):
            raise ParameterError("headers", "must be printable ASCII")
        if self.ca_file is not None and not uri.secure:
            raise ParameterError("ca_file", "is for wss:// only, and the cloud's address is ws://")
        login = self.token or uri.username or any(map(_is_login, self.headers))
        if login and not (uri.secure or self.insecure or is_loopback(uri.host)):
            raise ParameterError(
                "cloud",
                f"is ws://, which would send the login unencrypted to {uri.host}: use wss://, or "
                "--insecure on a network you trust",
            )
        if self.link is not None:
            usable(self.link, self.heartbeat)


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeRequest:
    """One answer to make with the cloud's help."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    rule: Rule = Rule.COUPLED
    schedule: Schedule = Schedule.FREERUN
    draft_length: int = 4
    """K of `sync`, `multiplex`, `hybrid`, `pearl` and `colocated`, the first window of `plc`."""
    window: int = DEFAULT_WINDOW
    """Run-ahead of the streaming schedules; with a controller the most it may ask for."""
    growth: float = DEFAULT_GROWTH
    """eta of `plc`."""
    controller: str = "fixed"
    """Who says how many drafts (`control.registry`); `fixed` is K and W as they stand here."""
    controller_options: Mapping[str, float] = field(default_factory=dict)
    relaxation: Relaxation | None = None
    """For the relaxed rule, which needs it; no other rule may have it."""
    reply: TopKReply = field(default_factory=TopKReply)
    """Ratio rule: how rejections may be answered."""
    due_ms: int = 0
    """Milliseconds within which the next token is wanted: of one login's answers the earliest goes
    first. 0: nothing said."""
    calibration: str | None = None
    """Folder of `outrider calibrate`, for the controllers that use one."""

    def __post_init__(self) -> None:
        if not 1 <= self.draft_length <= MAX_DRAFT_LENGTH:
            raise ParameterError("draft_length", f"must be in [1, {MAX_DRAFT_LENGTH}]")
        if not 1 <= self.window <= MAX_WINDOW:
            raise ParameterError("window", f"must be in [1, {MAX_WINDOW}]")
        require_relaxation(self.rule, self.relaxation)
        require_ratio(self.rule, self.reply)
        if self.controller == "fixed" and self.controller_options:
            raise ParameterError("controller", "fixed has no options: K and W are its own")
        if not 0 <= self.due_ms <= MAX_DUE_MS:
            raise ParameterError("due_ms", f"must be in [0, {MAX_DUE_MS}]")
        if not 0.0 <= self.growth <= MAX_GROWTH:
            raise ParameterError("growth", f"must be in [0, {MAX_GROWTH}]")

    def plan(self) -> Plan:
        """The schedule made concrete. A controller chooses within `window`."""
        # The block of `hybrid` is K under a controller too, which says how far ahead of it to go.
        fixed = self.controller == "fixed" or self.schedule is Schedule.HYBRID
        length = self.draft_length if fixed else self.longest
        return plan(self.schedule, draft_length=length, window=self.window, growth=self.growth)

    @property
    def longest(self) -> int:
        """Most drafts that a controller may ask for."""
        return min(self.window, MAX_DRAFT_LENGTH)

    def facts(self) -> ControllerFacts:
        """What its controller is made with."""
        streaming = self.schedule in (Schedule.STREAM, Schedule.HYBRID, Schedule.FREERUN)
        return ControllerFacts(
            max_length=self.longest,
            fixed_length=min(self.longest if streaming else self.draft_length, self.longest),
            seed=self.params.seed,
            options=dict(self.controller_options),
            calibration=self.calibration,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """What went over this edge's link while the answer ran. Answers that run at the same time share
    the link, and each counts all of it."""

    payload_up: int
    """Bytes of protocol frames."""
    payload_down: int
    bytes_up: int
    """With WebSocket headers; TCP/IP and TLS not counted."""
    bytes_down: int
    reconnects: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeResult:
    """A finished answer and its account."""

    generation: GenerationResult
    schedule: Schedule
    link: LinkUse
    origins: tuple[Origin, ...]
    wasted: int
    """Drafted tokens dropped unjudged: the price of running ahead."""
    confirmed: bool
    """The cloud's digest of the whole answer agreed with ours."""

    def as_dict(self) -> dict[str, object]:
        """The JSON object of `outrider generate --cloud --json`."""
        facts = self.generation.as_dict()
        facts.update(
            schedule=self.schedule.value,
            payload_up=self.link.payload_up,
            payload_down=self.link.payload_down,
            bytes_up=self.link.bytes_up,
            bytes_down=self.link.bytes_down,
            reconnects=self.link.reconnects,
            wasted=self.wasted,
            confirmed=self.confirmed,
            origins=[o.value for o in self.origins],
        )
        return facts


@dataclass(slots=True)
class Learnt:
    """What an edge has learnt of link, engines and acceptance, and its controllers with it."""

    estimators: Estimators = field(default_factory=Estimators)
    controllers: dict[tuple[object, ...], Controller] = field(default_factory=dict)


@dataclass(slots=True)
class _Use:
    payload_up: int = 0
    payload_down: int = 0
    frames_up: int = 0
    bytes_up: int = 0
    bytes_down: int = 0

    def sent(self, size: int) -> None:
        self.payload_up += size
        self.bytes_up += size + WS_HEADER_UP + (2 if size >= _LONG_FRAME else 0)

    def received(self, size: int) -> None:
        self.payload_down += size
        self.bytes_down += size + WS_HEADER_DOWN + (2 if size >= _LONG_FRAME else 0)


@dataclass(slots=True)
class _Running:
    """One session's place in the runtime."""

    request: EdgeRequest
    steps: asyncio.Queue[Step | Ended | Failed | EngineError]
    drafts: DraftSession | None = None
    paused_at: float | None = None
    """Seconds: since when it waits for its reader; None: it does not."""


class _Batch:
    """Sessions that draft together, and what of the engine's time is whose: of every stretch of
    it, one part for each session that was still in the batch."""

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self._left = dict(enumerate(numbers))
        self._until: float | None = None
        self._share = 0.0

    def done(self, place: int, told: Timed[Any]) -> tuple[int, float]:
        """The session whose job is done, and its seconds."""
        since = told.started if self._until is None else self._until
        self._share += (told.ended - since) / len(self._left)
        self._until = told.ended
        return self._left.pop(place), self._share

    def rest(self) -> list[int]:
        """Sessions of which nothing will be told any more."""
        left, self._left = self._left, {}
        return list(left.values())


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
        self._grammars = GrammarReader(tokenizer) if available() else None
        self.peer: Hello | None = None
        self.last_break = ""
        """Why the link last went down; empty if it never did."""
        self.draft_seconds = 0.0
        self.timed: Callable[[int, float], None] | None = None
        """Told the tokens and seconds of each drafting job, for whoever measures."""
        self._context = context_length
        self._use = _Use()
        self._engine = EngineThread("draft", pace=draft_pace)
        jitter = random.Random(config.link_seed)
        self._client = EdgeClient(
            self._hello(),
            now=time.monotonic(),
            uid=lambda: secrets.token_bytes(16),
            jitter=lambda: 0.5 + 0.5 * jitter.random(),
            give_up=config.give_up,
            heartbeat=config.heartbeat,
        )
        self._tls = _tls(config)
        self._closed = False
        self._open_drafts: set[DraftSession] = set()
        """Every draft session that holds a slot."""
        self._running: dict[int, _Running] = {}
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
        await asyncio.to_thread(self._engine.close)
        for drafts in self._open_drafts:  # the engine's thread is gone: nobody else uses them
            drafts.close()
        self._open_drafts.clear()

    def _hello(self) -> Hello:
        return greeting(self.tokenizer, self._context)

    # ---------------------------------------------------------------- requests

    @property
    def link_use(self) -> LinkUse:
        """What went over the link since this edge began."""
        use = self._use
        return LinkUse(
            payload_up=use.payload_up,
            payload_down=use.payload_down,
            bytes_up=use.bytes_up,
            bytes_down=use.bytes_down,
            reconnects=self._client.tally.reconnects,
        )

    def forgive(self) -> None:
        """Where the cloud refused this edge for good, let the next answer find out whether it still
        does: for an edge that lives longer than a mistake in somebody's configuration."""
        self._client.forgive()

    async def stream(self, request: EdgeRequest) -> EdgeStream:
        """Start an answer; iterate the stream for steps, then read its `result`. Raises
        ParameterError, CloudError, and UnrecordedError for a replayed draft."""
        schedule = request.plan()
        pilot = self._pilot(request) if schedule.window.window else None
        constraint = await self._constraint(request)
        drafts = await self._open_draft(request, constraint) if schedule.window.window else None
        try:
            return self._start(request, schedule, drafts, pilot)
        except BaseException:
            self._let_go(drafts)
            raise

    def _start(
        self,
        request: EdgeRequest,
        schedule: Plan,
        drafts: DraftSession | None,
        pilot: Pilot | None,
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
        running = _Running(request=request, steps=asyncio.Queue(), drafts=drafts)
        self._running[number] = running
        stream = EdgeStream(self, number, running, generation)
        self._pump()
        return stream

    def _pilot(self, request: EdgeRequest) -> Pilot | None:
        """The controller's seat. Requests with the same wishes share one controller: it goes on
        learning from answer to answer. Raises ParameterError for an unknown one."""
        if request.controller == "fixed":
            return None
        name = self.drafter.name if self.drafter else ""
        facts = replace(request.facts(), draft=name.rpartition("+")[2])
        key = (
            request.controller,
            request.schedule,
            facts.max_length,
            facts.fixed_length,
            tuple(sorted(facts.options.items())),
            facts.calibration,
        )
        kept = self.learnt.controllers
        controller = kept.get(key)
        if controller is None:
            if len(kept) >= MAX_CONTROLLERS:
                kept.pop(next(iter(kept)))
            try:
                controller = make_controller(request.controller, facts)
            except CalibrationError as error:
                raise ParameterError("calibration", str(error)) from None
            kept[key] = controller
        self._check_calibration(controller)
        return ControlledPilot(
            controller,
            self.learnt.estimators,
            streaming=request.schedule in STREAMING,
            free=request.schedule is Schedule.FREERUN,
            now=time.monotonic(),
        )

    def _check_calibration(self, controller: Controller) -> None:
        """What was measured on another pair of models says nothing about this one."""
        calibration = getattr(controller, "calibration", None)
        if not isinstance(calibration, Calibration):
            return
        model = getattr(self.drafter, "model", None)
        draft = None
        if model is not None:
            draft = _model_facts(model.info)
        target = None
        if self.peer is None and self._target is not None:
            # The first answer begins before the cloud has said its name.
            target = _model_facts(self._target)
        if self.peer is not None:
            target = ModelFacts(
                name=self.peer.model, vocabulary=self.peer.fingerprint, dtype="", parameters=0
            )
        try:
            calibration.require(target=target, draft=draft)
        except CalibrationError as error:
            raise ParameterError("calibration", str(error)) from None

    async def _constraint(self, request: EdgeRequest) -> Constraint | None:
        """Of the request's grammar, for its drafts. None where grammars cannot be read: drafts then
        break it, and fall in the cloud, which costs speed. Raises GrammarError."""
        grammar = request.params.grammar
        if grammar is None:
            return None
        if self._grammars is None:
            log.warning("drafts know of no grammar: install outrider[grammar] here, too")
            return None
        return await asyncio.to_thread(self._grammars.constraint, grammar)

    async def _open_draft(
        self, request: EdgeRequest, constraint: Constraint | None
    ) -> DraftSession | None:
        """A draft session, or None where there is no draft engine or it has no room."""
        drafter = GivenDrafter() if request.params.given else self.drafter
        if drafter is None or self._closed:
            return None

        def make() -> DraftSession:
            sketch = request.relaxation.sketch if request.relaxation else DEFAULT_SKETCH
            session = drafter.session(
                len(request.prompt_ids),
                request.params,
                request.rule,
                sketch=sketch,
                constraint=constraint,
            )
            self._open_drafts.add(session)
            made.append(session)
            return session

        made: list[DraftSession] = []
        try:
            return await self._engine.chore(make)
        except asyncio.CancelledError:
            if not self._closed:  # the call may be running: what it makes is freed behind it
                self._spawn(self._engine.chore(lambda: self._close_all(made)), "close-drafts")
            raise
        except UnrecordedError:
            raise
        except Exception as error:  # noqa: BLE001 - a broken draft costs speed, never the answer
            log.warning("no draft for this answer: %s", _reason(error))
            return None

    def _close_all(self, drafts: Sequence[DraftSession]) -> None:
        """On the engine's thread: free slots."""
        for session in drafts:
            session.close()
            self._open_drafts.discard(session)

    def _let_go(self, drafts: DraftSession | None) -> None:
        """Free a draft session, behind whatever the engine does with it now."""
        if drafts is not None and not self._closed:
            self._spawn(self._engine.chore(lambda: self._close_all([drafts])), "close-drafts")

    @property
    def connected(self) -> bool:
        """The cloud has greeted on the link in use."""
        return self._socket is not None and self.peer is not None

    @property
    def link(self) -> LinkUse:
        """What went over the link since this edge began."""
        return self._use_since(_Use(), 0)

    def _use_since(self, before: _Use, reconnects: int) -> LinkUse:
        use = self._use
        return LinkUse(
            payload_up=use.payload_up - before.payload_up,
            payload_down=use.payload_down - before.payload_down,
            bytes_up=use.bytes_up - before.bytes_up,
            bytes_down=use.bytes_down - before.bytes_down,
            reconnects=self._client.tally.reconnects - reconnects,
        )

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

    def _end(self, number: int) -> None:
        """Free what a session holds here; safe to call twice."""
        running = self._running.pop(number, None)
        if running is None:
            return
        self._client.cancel(number)
        self._let_go(running.drafts)
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
                self._use.sent(len(frame))
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
            case LinkDown():
                self.last_break = event.reason

    def _pace(self, number: int, running: _Running) -> None:
        """Pause an answer whose reader is behind; the pump that follows says so to the cloud."""
        if running.paused_at is None and running.steps.qsize() > PAUSE_UNREAD:
            running.paused_at = time.monotonic()
            self._client.pause(number)
            asyncio.get_running_loop().call_soon(self._pump)

    def _taken(self, number: int, running: _Running) -> None:
        """A reader took a step: go on once it has nearly caught up."""
        if running.paused_at is not None and running.steps.qsize() <= RESUME_UNREAD:
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
            batch = list(asks.values())
            self._engine.submit_each(
                lambda: propose_together(batch), partial(self._proposed, _Batch(tuple(asks)))
            )

    def _proposed(
        self, batch: _Batch, outcome: Timed[tuple[int, Draft | Exception]] | BaseException
    ) -> None:
        if isinstance(outcome, Timed):
            place, draft = outcome.value
            number, seconds = batch.done(place, outcome)
            self.draft_seconds += seconds
            if isinstance(draft, Draft):
                if self.timed is not None:
                    self.timed(len(draft), seconds)
                self._drafted(number, draft, seconds)
                return
            if isinstance(draft, UnrecordedError):
                self._abandon(number, draft)
            else:  # a broken draft costs speed, never the answer
                log.warning("drafting failed: %s", _reason(draft))
            self._drafted(number, NO_DRAFT)
        elif not self._closed:
            log.warning("drafting failed: %s", _reason(outcome))
            for number in batch.rest():
                self._drafted(number, NO_DRAFT)

    def _abandon(self, number: int, error: EngineError) -> None:
        """Fail an answer whose draft cannot be replaced by none."""
        running = self._running.get(number)
        if running is not None:
            running.steps.put_nowait(error)
            self._end(number)

    def _drafted(self, number: int, draft: Draft, seconds: float = 0.0) -> None:
        self._client.drafted(number, draft, time.monotonic(), seconds=seconds)
        self._pump()

    # ---------------------------------------------------------------- the socket

    async def _dial(self) -> None:
        headers = {AFFINITY_HEADER: self._affinity, **self.config.headers}
        if self.config.token:
            headers["Authorization"] = f"Bearer {self.config.token}"
        url = self._url()
        try:
            raw = await connect(
                url,
                additional_headers=headers,
                compression=None,
                max_size=MAX_FRAME_BYTES,
                open_timeout=DIAL_TIMEOUT,
                close_timeout=1.0,
                ping_interval=None,
                ssl=self._tls,
                user_agent_header=None,
                proxy=None,
                logger=discreet("outrider.edge.socket"),
            )
        except InvalidStatus as error:
            self._refused(error.response.status_code)
            return
        except ssl.SSLCertVerificationError as error:
            self._client.refused(Code.UNREACHABLE, _distrust(self.config, error))
            self._pump()
            self.last_break = ""  # the refusal has said why
            return
        except (OSError, TimeoutError, WebSocketException, UnicodeError) as error:
            reason = f"cannot reach {self._shown}: {_reason(error)}{_other_scheme(url, error)}"
            self._client.disconnected(time.monotonic(), reason)
            self._pump()
            return
        socket = FrameSocket(raw, self.config.link, seed=self._seed.randrange(2**32))
        self._socket = socket
        self._sockets.add(socket)
        self._client.connected(time.monotonic())
        self._pump()
        await self._read(socket)

    def _refused(self, status: int) -> None:
        if status in (401, 403):
            why = (
                "the verifier refuses this token: check --token-file or OUTRIDER_TOKEN"
                if self.config.token
                else "the verifier wants a token: give --token-file or set OUTRIDER_TOKEN"
            )
            self._client.refused(Code.UNAUTHORIZED, why)
        elif status == 404:
            self._client.refused(Code.VERSION, "no Outrider verifier at this address and path")
        else:
            self._client.disconnected(time.monotonic(), f"the verifier answered HTTP {status}")
        self._pump()

    async def _read(self, socket: FrameSocket) -> None:
        try:
            while (frame := await socket.receive()) is not None:
                if socket is not self._socket:
                    return
                self._use.received(len(frame))
                self._client.receive(frame, time.monotonic())
                self._pump()
            reason = "the verifier closed the link"
        except (OSError, WebSocketException) as error:
            reason = _reason(error)
        if socket is self._socket:
            self._socket = None
            self._client.disconnected(time.monotonic(), reason)
            self._pump()
        await self._discard(socket)

    async def _discard(self, socket: FrameSocket) -> None:
        await socket.close()
        self._sockets.discard(socket)

    def _url(self) -> str:
        parts = urlsplit(self.config.url)
        return urlunsplit(parts._replace(path=parts.path.rstrip("/") or "/v1/outrider"))

    @property
    def _shown(self) -> str:
        """The cloud's address as messages may show it."""
        return without_secrets(self.config.url)


class EdgeStream:
    """Iterate for `Step`s. Leaving early and calling `close` cancels on both sides."""

    def __init__(
        self, runtime: EdgeRuntime, number: int, running: _Running, generation: Generation
    ) -> None:
        self._runtime = runtime
        self._number = number
        self._running = running
        self._generation = generation
        self._started = time.monotonic()
        self._marks: list[tuple[float, int]] = []
        self._texts: list[str] = []
        self._origins: list[Origin] = []
        self._logprobs: list = []  # type: ignore[type-arg]
        self._before = _Use(**{f: getattr(runtime._use, f) for f in _Use.__slots__})
        self._reconnects = runtime._client.tally.reconnects
        self._draft_s = runtime.draft_seconds
        machine = runtime._client.session(number)
        assert machine is not None, "a session that was just started lives"
        self._machine = machine
        self._result: EdgeResult | None = None

    async def __aiter__(self) -> AsyncIterator[Step]:
        try:
            while True:
                item = await self._running.steps.get()
                self._runtime._taken(self._number, self._running)
                if isinstance(item, Failed):
                    raise self._runtime.failure(item)
                if isinstance(item, EngineError):
                    raise item
                if isinstance(item, Ended):
                    self._result = self._summary(confirmed=item.confirmed)
                    return
                self._note(item)
                yield item
        finally:
            self.close()

    def close(self) -> None:
        """Stop now; `result` then covers what was committed."""
        if self._result is None:
            self._result = self._summary(confirmed=False)
        self._runtime._end(self._number)

    @property
    def result(self) -> EdgeResult:
        if self._result is None:
            raise RuntimeError("the answer is still running: iterate it or close it first")
        return self._result

    @property
    def unread(self) -> int:
        """Steps that wait to be taken."""
        return self._running.steps.qsize()

    @property
    def behind_s(self) -> float:
        """Seconds for which the answer has been paused for its reader; 0: it is not."""
        since = self._running.paused_at
        return 0.0 if since is None else time.monotonic() - since

    @property
    def link(self) -> LinkUse:
        """What went over the link since this answer began."""
        return self._runtime._use_since(self._before, self._reconnects)

    @property
    def draft_seconds(self) -> float:
        """Seconds of this edge's drafting since this answer began, for whichever answers."""
        return self._runtime.draft_seconds - self._draft_s

    def _note(self, step: Step) -> None:
        self._marks.append((time.monotonic(), len(step.tokens)))
        self._texts.append(step.text)
        self._origins.extend(step.origins)
        self._logprobs.extend(step.logprobs)

    def _summary(self, *, confirmed: bool) -> EdgeResult:
        runtime, request = self._runtime, self._running.request
        sequence = self._generation.sequence
        peer = runtime.peer
        result = GenerationResult(
            text="".join(self._texts),
            token_ids=sequence.output,
            prompt_tokens=sequence.prompt_length,
            finish_reason=self._generation.finish,
            seed=request.params.seed,
            target_forwards=self._generation.counters.rounds,
            counters=self._generation.counters,
            timing=self._timing(),
            target=peer.model if peer else "",
            draft=runtime.drafter.name if runtime.drafter else "none",
            verify=request.rule,
            logprobs=tuple(self._logprobs),
            relaxed=self._machine.ledger if request.relaxation else None,
            tv=self._machine.tv if request.reply.k else None,
        )
        return EdgeResult(
            generation=result,
            schedule=request.schedule,
            link=self.link,
            origins=tuple(self._origins),
            wasted=self._machine.wasted,
            confirmed=confirmed,
        )

    def _timing(self) -> Timing:
        now = time.monotonic()
        first = self._marks[0][0] if self._marks else now
        later = sum(count for _, count in self._marks[1:])
        return Timing(
            ttft_s=first - self._started,
            tpot_s=(self._marks[-1][0] - first) / later if later else None,
            total_s=(self._marks[-1][0] if self._marks else now) - self._started,
            draft_s=self.draft_seconds,
            target_s=None,
        )


def greeting(tokenizer: Tokenizer, context_length: int) -> Hello:
    """An edge's HELLO."""
    return Hello(
        versions=(PROTOCOL_VERSION,),
        role="edge",
        agent="outrider",
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        logits_width=tokenizer.vocab_size,
        context_length=min(context_length, 2**31 - 1),
        limits=Limits(
            frame_bytes=MAX_FRAME_BYTES,
            window=MAX_WINDOW,
            sessions=256,
            prompt_tokens=1_000_000,
        ),
        rules=tuple(sorted(r.value for r in Rule)),
        grammars=tuple(GrammarKind) if available() else (),
    )


def _model_facts(info: ModelInfo) -> ModelFacts:
    return ModelFacts(
        name=info.name,
        vocabulary=info.fingerprint,
        dtype=info.dtype,
        parameters=info.parameters,
    )


def _tls(config: EdgeConfig) -> ssl.SSLContext | None:
    if not parse_uri(config.url).secure:
        return None
    try:
        return ssl.create_default_context(cafile=config.ca_file)
    except OSError as error:  # ssl.SSLError included, whose text names no file
        raise OSError(f"cannot use the certificates of {config.ca_file}: {error}") from None


def _is_login(header: str) -> bool:
    return header.lower() in ("authorization", "proxy-authorization", "cookie")


def _distrust(config: EdgeConfig, error: ssl.SSLCertVerificationError) -> str:
    by = f"by {config.ca_file} (--ca-file)" if config.ca_file else "(--ca-file FILE trusts another)"
    shown = without_secrets(config.url)
    return f"the certificate of {shown} is not trusted {by}: {error.verify_message}"


def _other_scheme(url: str, error: BaseException) -> str:
    """A hint where the peer seems to speak TLS and we do not, or the other way round."""
    if parse_uri(url).secure:
        plain = isinstance(error, (ssl.SSLError, ConnectionResetError))
        return "; perhaps it speaks no TLS: try ws://" if plain else ""
    return "; perhaps it wants TLS: try wss://" if isinstance(error, InvalidMessage) else ""


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
