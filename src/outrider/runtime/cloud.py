"""The verifier as a WebSocket server: bytes to `CloudService` and back, forwards on a thread.

Everything that decides is in `session.service`; this file owns sockets, the clock and tasks.
Deny by default (field case 36): what is not in `ROUTES` is not there, and a route that asks for a
login gets a bearer token whenever tokens are configured, before a byte of a body is read.

A forward that fails is run again in halves, so one session's fault ends that session alone, and
more sessions than the engine has slots are several forwards and no error.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from outrider.core.grammar import GrammarKind
from outrider.core.tokens import GrammarError
from outrider.engines.base import EngineError
from outrider.engines.desk import DeskJob, DeskResult, SlotDesk
from outrider.engines.grammar import GrammarReader, available
from outrider.engines.tokenizer import Tokenizer
from outrider.proto.codec import MAX_FRAME_BYTES
from outrider.proto.connection import HEARTBEAT, Connection, Role, SilentPeerError
from outrider.proto.errors import LocalError, RemoteError
from outrider.proto.messages import PROTOCOL_VERSION, Code, Hello, Limits, Open
from outrider.runtime.access import ConfigurationError, Logins, login_of, require_safe
from outrider.runtime.discreet import discreet, outline
from outrider.runtime.events import note, note_message
from outrider.runtime.exposition import exposition
from outrider.runtime.listening import MAX_CONNECTIONS, OPEN_TIMEOUT_S, Guest, tls_context
from outrider.runtime.worker import EngineThread, Timed
from outrider.session.quotas import NO_LIMITS, TenantLimits
from outrider.session.service import CloudService, Done, Outgoing, ServiceConfig, Work
from outrider.session.wire import from_wire

log = logging.getLogger("outrider.cloud")

PATH: Final = "/v1/outrider"
"""The one path that speaks the protocol."""
HEALTH_PATH: Final = "/health"
STATUS_PATH: Final = "/status"
METRICS_PATH: Final = "/metrics"
PROBE_PATH: Final = "/probe"
"""Filler, by which an edge tells how fast the link down is."""
PROBE_BYTES: Final = 256 * 1024
"""20 ms at 100 Mbit/s, 4 s at 500 kbit/s."""
STATUS_OF: Final = (http.HTTPStatus.OK, http.HTTPStatus.SERVICE_UNAVAILABLE)
"""Of a verifier that serves, and of one that drains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What a path answers, and to whom."""

    login: bool
    """It asks for a bearer token whenever tokens are configured."""
    status: Callable[[CloudServer], http.HTTPStatus] = lambda _: http.HTTPStatus.OK
    body: Callable[[CloudServer], str] | None = None
    """Makes the whole answer to a GET; None: the path speaks the protocol."""


ROUTES: Final[Mapping[str, Route]] = MappingProxyType(
    {
        PATH: Route(login=True),
        HEALTH_PATH: Route(
            login=False,
            status=lambda server: STATUS_OF[server.draining],
            body=lambda server: "draining\n" if server.draining else "ok\n",
        ),
        METRICS_PATH: Route(login=True, body=lambda server: exposition(server.status())),
        PROBE_PATH: Route(login=True, body=lambda _: "." * PROBE_BYTES),
        STATUS_PATH: Route(login=True, body=lambda server: json.dumps(server.status()) + "\n"),
    }
)
"""Every path there is; any other is refused."""
ANYBODY: Final = "default"
"""The tenant of every connection where there is no login."""
MAX_UNSENT_BYTES: Final = 256 * 1024
"""Bytes queued for a reader before its sessions pause (field case 31)."""
DROP_UNSENT_BYTES: Final = 4 * MAX_UNSENT_BYTES
"""Bytes queued for a reader before its connection is closed."""
READERS: Final = 2
"""Threads that read grammars: one that takes long does not hold up the next."""
DRAIN_CHECK_S: Final = 0.02
FINISH_S: Final = 1.0
"""How long the last frames may take to leave, and then a peer to say goodbye."""
HURRY_S: Final = 0.3
"""The same once there is no time left to drain: Ctrl-C ends within a second, whoever sleeps."""
DETACHED_S: Final = 3.0
"""How long a drain waits for a session that no connection carries: its edge resumes elsewhere."""

CLOSE_NORMAL: Final = 1000
CLOSE_PROTOCOL_ERROR: Final = 1002
CLOSE_POLICY: Final = 1008
CLOSE_CODES: Final = {
    Code.MALFORMED: 1007,
    Code.TOO_LARGE: 1009,
    Code.VOCABULARY: CLOSE_POLICY,
    Code.VERSION: CLOSE_POLICY,
}
"""WebSocket close codes (RFC 6455, 7.4.1) by our own; anything else is 1002. For people who look
at a capture: the ERROR frame before it says more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudConfig:
    """How to listen and whom to let in."""

    host: str = "127.0.0.1"
    port: int = 8765
    tokens: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 (hex) of a bearer token to the tenant's name; empty: no login."""
    limits: Mapping[str, TenantLimits] = field(default_factory=dict)
    """Of tenants that have their own."""
    certificate: Path | None = None
    private_key: Path | None = None
    insecure: bool = False
    """Allow listening off loopback without tokens or TLS."""
    pace: float = 0.0
    """Seconds added to every forward, standing for a larger target."""
    heartbeat: float = HEARTBEAT
    """Seconds of silence before a PING; after two such pauses a link is dead."""
    tenant_connections: int = MAX_CONNECTIONS
    """Most connections of one login."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.pace < math.inf:
            raise ConfigurationError(f"the pace is a number of seconds from 0, got {self.pace}")
        if (self.certificate is None) != (self.private_key is None):
            raise ConfigurationError("TLS needs both --tls-cert and --tls-key")
        require_safe(
            self.host,
            tokens=self.tokens,
            encrypted=self.certificate is not None,
            insecure=self.insecure,
        )


class CloudServer:
    """One target engine behind a WebSocket. `async with` it, or start() and stop()."""

    def __init__(
        self,
        desk: SlotDesk,
        tokenizer: Tokenizer,
        config: CloudConfig | None = None,
        *,
        service: ServiceConfig | None = None,
    ) -> None:
        info = desk.model.info
        self.config = config or CloudConfig()
        self.desk = desk
        self._grammars = GrammarReader(tokenizer) if available() else None
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="outrider-grammars")
        self.service = CloudService(
            service
            or ServiceConfig(
                vocab_size=info.vocab_size,
                context_length=info.context_length,
                eos=info.eos_token_ids,
                deterministic=info.deterministic,
                rules=info.rules,
                known_ids=info.known_ids,
            ),
            tokenizer.text_stream,
            grammars=self._grammars,
        )
        self.logins = Logins(tokens=self.config.tokens, limits=self.config.limits)
        """In force."""
        self.service.tenant_limits = self.logins.limits
        self._engine = EngineThread("target", pace=self.config.pace)
        self._forwarding: list[Work] | None = None
        """The batch that is on the engine's thread."""
        self._halves: deque[list[Work]] = deque()
        """Parts of a batch that failed as a whole, to be run by themselves."""
        self._kick_due = False
        self._grace: asyncio.TimerHandle | None = None
        self._stopped = False
        self._peers: dict[int, _PeerSocket] = {}
        self._next = 0
        self._server: Server | None = None
        self._guests: set[ServerConnection] = set()
        """Every open socket, upgraded or not."""
        self._stop_by: float | None = None
        self._closing: asyncio.Task[None] | None = None

    # ---------------------------------------------------------------- life

    async def start(self) -> None:
        """Listen. Raises OSError when the address is taken, ConfigurationError for certificates
        that cannot be used."""
        config = self.config
        self._server = await serve(
            self._serve_peer,
            config.host,
            config.port,
            ssl=tls_context(config.certificate, config.private_key),
            compression=None,
            max_size=MAX_FRAME_BYTES,
            process_request=self._admit,
            ping_interval=None,  # the protocol has its own heartbeat, both ways
            write_limit=MAX_UNSENT_BYTES,
            open_timeout=OPEN_TIMEOUT_S,
            close_timeout=FINISH_S,
            create_connection=partial(Guest, self._guests),  # type: ignore[arg-type]
            server_header=None,
            logger=discreet("outrider.cloud.socket"),
        )

    def admit(self, logins: Logins) -> None:
        """From now on let these in. A connection whose token is not among them is told so and
        ends; what it had under way goes with it. Limits hold for what comes from now on."""
        assert logins.tokens or not self.logins.tokens, "a file without tokens opens no door"
        self.logins = logins
        self.service.tenant_limits = logins.limits
        for peer in self._peers.values():
            if logins.tokens.get(peer.login) != peer.tenant:
                note("token withdrawn", connection=peer.number, tenant=peer.tenant)
                peer.dismiss(RemoteError(Code.UNAUTHORIZED, "this token is no longer valid"))

    def status(self) -> dict[str, object]:
        """Facts for an operator, as JSON values; no prompt, no id, no token."""
        return {
            "model": self.desk.model.info.name,
            "connections": len(self._peers),
            **self.service.status(time.monotonic()),
            "slots": self.desk.held,
            "parked_slots": self.desk.parked,
            "evictions": self.desk.evictions,
            "shared_ids": self.desk.shared_ids,
        }

    @property
    def draining(self) -> bool:
        """It stops: whoever sends edges here should send them elsewhere."""
        return self._stop_by is not None

    @property
    def port(self) -> int:
        """The port really bound (useful with port 0)."""
        assert self._server is not None, "not started"
        return int(next(iter(self._server.sockets)).getsockname()[1])

    async def stop(self, *, drain: float = 0.0) -> None:
        """Stop: no new sessions, up to `drain` seconds for running ones, then close. Safe to call
        twice; a second call meanwhile with less patience shortens the first."""
        until = time.monotonic() + drain
        self._stop_by = until if self._stop_by is None else min(self._stop_by, until)
        self.service.drain()
        for peer in self._peers.values():
            peer.connection.drain()
            peer.flush()
        while self.service.unfinished and time.monotonic() < self._stop_by:
            self._forget_lost()
            await asyncio.sleep(DRAIN_CHECK_S)
        patience = FINISH_S if time.monotonic() < self._stop_by else HURRY_S
        await asyncio.gather(*(peer.finish(patience) for peer in list(self._peers.values())))
        if self._server is not None:
            self._server.close()
            closed = asyncio.ensure_future(self._server.wait_closed())
            await asyncio.wait({closed}, timeout=patience)
            for guest in list(self._guests):  # they do not say goodbye
                guest.transport.abort()
            await closed
        if self._closing is None:
            self._closing = asyncio.create_task(self._close_engine(), name="outrider-close-engine")
        await asyncio.shield(self._closing)

    def _forget_lost(self) -> None:
        """While draining: sessions without a connection for DETACHED_S count as over."""
        grace = self.service.config.grace
        self.service.tick(time.monotonic() + grace - min(grace, DETACHED_S))

    async def _close_engine(self) -> None:
        self._stopped = True
        if self._grace is not None:
            self._grace.cancel()
        self.service.stop()
        await self._engine.chore(self.desk.close)
        await asyncio.to_thread(self._engine.close)
        self._readers.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> CloudServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # ---------------------------------------------------------------- admission

    def _admit(self, socket: ServerConnection, request: Request) -> Response | None:
        """Before the upgrade: path, login, room. None lets the handshake go on."""
        route = ROUTES.get(request.path.split("?", 1)[0])
        if route is None:
            return socket.respond(http.HTTPStatus.NOT_FOUND, "no such path\n")
        tokens = self.logins.tokens
        login = login_of(request.headers.get_all("Authorization"), tokens)
        if route.login and tokens and login is None:
            return socket.respond(http.HTTPStatus.UNAUTHORIZED, "a valid bearer token is needed\n")
        if route.body is not None:
            return socket.respond(route.status(self), route.body(self))
        tenant = ANYBODY if login is None else tokens[login]
        mine = sum(peer.tenant == tenant for peer in self._peers.values())
        if len(self._peers) >= MAX_CONNECTIONS or mine >= self._connections_of(tenant):
            return socket.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, "too many connections\n")
        socket.login, socket.tenant = login or "", tenant  # type: ignore[attr-defined]
        return None

    def _connections_of(self, tenant: str) -> int:
        own = self.logins.limits.get(tenant, NO_LIMITS).connections
        return self.config.tenant_connections if own is None else own

    # ---------------------------------------------------------------- one peer

    async def _serve_peer(self, socket: ServerConnection) -> None:
        self._next += 1
        number = self._next
        peer = _PeerSocket(
            socket,
            Connection(
                Role.CLOUD, self._hello(), now=time.monotonic(), heartbeat=self.config.heartbeat
            ),
            number,
            self._unblocked,
        )
        self._peers[number] = peer
        self.service.connected(number, peer.tenant)
        note("connected", connection=number, tenant=peer.tenant)
        peer.flush()
        writer = asyncio.create_task(peer.write(), name=f"outrider-writer-{number}")
        watch = asyncio.create_task(self._watch(peer), name=f"outrider-watch-{number}")
        code = CLOSE_NORMAL
        try:
            await self._read(peer)
        except ConnectionClosed:
            pass
        except RemoteError as error:
            note("connection refused", connection=number, code=error.code.value)
            code = CLOSE_CODES.get(error.code, CLOSE_PROTOCOL_ERROR)
            peer.connection.fail(error)
            peer.flush()
            await peer.finish()
        finally:
            # Whatever happens, the tables first: they must not depend on a socket's goodwill.
            del self._peers[number]
            self.service.disconnected(number, time.monotonic())
            note("disconnected", connection=number, tenant=peer.tenant)
            self._kick_soon()  # frees slots, and notes when the sessions' grace ends
            writer.cancel()
            watch.cancel()
            await asyncio.gather(writer, watch, return_exceptions=True)
            await socket.close(code)

    async def _read(self, peer: _PeerSocket) -> None:
        async for frame in peer.socket:
            if isinstance(frame, str):
                frame = frame.encode()  # text frames are not ours: the codec refuses them
            now = time.monotonic()
            try:
                message = peer.connection.receive(frame, now)
                if isinstance(message, Open) and message.sampling.grammar is not None:
                    await self._read_grammar(peer.tenant, message)
                    now = time.monotonic()
                replies = [] if message is None else self._handle(peer, message, now)
            except RemoteError as error:
                if error.session is None:
                    raise
                replies = self.service.refuse(peer.number, error)
            self._dispatch(replies)
            peer.flush()
            self._kick_soon()

    async def _read_grammar(self, tenant: str, message: Open) -> None:
        """Have it ready before its session opens: nobody but this peer waits for that."""
        grammar = from_wire(message.sampling, message.session).grammar
        if self._grammars is None or grammar is None:
            return
        loop = asyncio.get_running_loop()
        with contextlib.suppress(GrammarError):  # kept as well, and told by the service
            await loop.run_in_executor(self._readers, self._grammars.constraint, grammar, tenant)

    def _handle(self, peer: _PeerSocket, message: object, now: float) -> list[Outgoing]:
        if isinstance(message, Hello):
            return []
        return self.service.receive(peer.number, message, now)  # type: ignore[arg-type]

    async def _watch(self, peer: _PeerSocket) -> None:
        """Heartbeats of one connection; closes it when the peer has gone silent."""
        while True:
            now = time.monotonic()
            await asyncio.sleep(max(0.01, peer.connection.deadline - now))
            try:
                peer.connection.tick(time.monotonic())
            except SilentPeerError:
                peer.socket.transport.abort()
                return
            peer.flush()

    def _hello(self) -> Hello:
        info = self.desk.model.info
        limits = self.service.config
        return Hello(
            versions=(PROTOCOL_VERSION,),
            role=Role.CLOUD.value,
            agent="outrider",
            fingerprint=info.fingerprint,
            vocab_size=info.vocab_size,
            logits_width=info.logits_width,
            context_length=info.context_length,
            limits=Limits(
                frame_bytes=MAX_FRAME_BYTES,
                window=limits.max_window,
                sessions=limits.max_sessions_per_connection,
                prompt_tokens=limits.max_prompt_tokens,
            ),
            rules=tuple(sorted(r.value for r in limits.rules)),
            deterministic=info.deterministic,
            model=info.name,
            pace_ms=self.config.pace * 1e3,
            row_ms=tuple((rows, 1e3 * seconds) for rows, seconds in self.service.costs.curve()),
            grammars=() if self._grammars is None else tuple(GrammarKind),
            drafts=self.desk.drafts,
        )

    def _dispatch(self, outgoing: Sequence[Outgoing]) -> None:
        touched: set[int] = set()
        for item in outgoing:
            peer = self._peers.get(item.connection)
            if peer is None:
                continue
            try:
                peer.connection.send(item.message)
            except LocalError:
                continue  # the connection closed in between
            note_message(item.connection, peer.tenant, item.message)
            touched.add(item.connection)
        for number in touched:
            peer = self._peers[number]
            peer.flush()
            if peer.blocked:
                self.service.block(number, blocked=True)

    def _unblocked(self, number: int) -> None:
        """A slow reader has caught up: its sessions may run again."""
        self.service.block(number, blocked=False)
        self._kick_soon()

    # ---------------------------------------------------------------- the engine

    def _kick_soon(self) -> None:
        """Start a forward once every frame that is here already has been read: they share it."""
        if not self._kick_due:
            self._kick_due = True
            asyncio.get_running_loop().call_soon(self._kick)

    def _kick(self) -> None:
        """Start the next forward, unless one is running; it kicks again when it is done."""
        self._kick_due = False
        if self._stopped:
            return
        self.service.tick(time.monotonic())
        self._free_slots()
        if self._forwarding is None:
            now = time.monotonic()
            work = self._halves.popleft() if self._halves else self.service.batch(now)
            if work:
                self._forward(work)
        self._set_grace()

    def _set_grace(self) -> None:
        """Come back when detached sessions have waited long enough."""
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        due = self.service.deadline
        if due is not None:
            loop = asyncio.get_running_loop()
            self._grace = loop.call_later(max(0.0, due - time.monotonic()), self._kick_soon)

    def _forward(self, work: list[Work]) -> None:
        self._forwarding = work
        jobs = [_desk_job(item) for item in work]
        self._engine.submit(lambda: self.desk.run(jobs), self._forwarded)

    def _forwarded(self, outcome: Timed[list[DeskResult]] | BaseException) -> None:
        """A forward is done: answer, and start the next one."""
        work, self._forwarding = self._forwarding, None
        assert work is not None, "a forward that nobody started"
        if self._stopped:
            self.service.failed(work, "the verifier stops")  # nobody is told: they are all gone
            return
        if isinstance(outcome, Timed):
            results = [
                Done(key=r.key, rows=r.rows, fed=r.fed, draft=r.draft) for r in outcome.value
            ]
            self._dispatch(
                self.service.finished(results, started=outcome.started, now=outcome.ended)
            )
        else:
            self._forward_failed(work, outcome)
        self._kick()

    def _forward_failed(self, work: list[Work], error: BaseException) -> None:
        if len(work) > 1:
            middle = len(work) // 2
            self._halves += (work[:middle], work[middle:])
            return
        known = isinstance(error, EngineError)
        reason = str(error) if known else f"the engine failed: {type(error).__name__}"
        log.warning("forward failed: %s%s", reason, "" if known else f"\n{outline(error)}")
        self._dispatch(self.service.failed(work, reason))

    def _free_slots(self) -> None:
        """Give engine slots of ended sessions back, on the engine's own thread."""
        keys, self.service.released = self.service.released, []
        if not keys:
            return

        def release() -> None:
            for key in keys:
                self.desk.release(key)

        self._engine.submit(release, _released, forward=False)


def _released(outcome: Timed[None] | BaseException) -> None:
    if isinstance(outcome, BaseException):
        log.error("a slot could not be freed", exc_info=outcome)


class _PeerSocket:
    """A connection's socket with a queue in front: nobody waits for a slow reader."""

    def __init__(
        self,
        socket: ServerConnection,
        connection: Connection,
        number: int,
        unblocked: Callable[[int], None],
    ) -> None:
        """`unblocked`: told the number when a reader that had fallen behind has caught up."""
        self.socket = socket
        self.connection = connection
        self.number = number
        self.tenant: str = socket.tenant  # type: ignore[attr-defined]
        self.login: str = socket.login  # type: ignore[attr-defined]
        """Hash of the token it came with; empty without one."""
        self._dismissed = False
        self.unsent = 0
        self.blocked = False
        """More is unsent than a session may add to."""
        self._unblocked = unblocked
        self._frames: asyncio.Queue[bytes] = asyncio.Queue()

    def flush(self) -> None:
        """Hand what the connection wants to send to the writer."""
        for frame in self.connection.take():
            self.unsent += len(frame)
            self._frames.put_nowait(frame)
        self.blocked = self.blocked or self.unsent > MAX_UNSENT_BYTES
        if self.unsent > DROP_UNSENT_BYTES:
            note("slow reader dropped", connection=self.number)
            self.socket.transport.abort()

    def dismiss(self, error: RemoteError) -> None:
        """Say why and close; whoever does not read that is cut off."""
        self.connection.fail(error)
        self.flush()
        self._dismissed = True
        asyncio.get_running_loop().call_later(FINISH_S, self.socket.transport.abort)

    async def write(self) -> None:
        while True:
            frame = await self._frames.get()
            try:
                await self.socket.send(frame)
            except ConnectionClosed:
                return
            finally:
                self.unsent -= len(frame)
                self._frames.task_done()
            if self.blocked and self.unsent <= MAX_UNSENT_BYTES // 2:
                self.blocked = False
                self._unblocked(self.number)
            if self._dismissed and self._frames.empty():
                await self.socket.close(CLOSE_POLICY)
                return

    async def finish(self, patience: float = FINISH_S) -> None:
        """Let the last frames out, for `patience` seconds at most."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._frames.join(), patience)


def _desk_job(item: Work) -> DeskJob:
    return DeskJob(
        key=item.key,
        committed=item.job.committed,
        drafts=item.job.drafts,
        own_draft=item.cloud_draft,
        room=item.room,
        tenant=item.tenant,
        prompt_length=item.prompt_length,
        params=item.params,
        rule=item.rule,
        constraint=item.constraint,
    )
