"""The verifier behind its sockets: frames to `CloudService` and back, forwards on a thread.

Everything that decides is in `session.service`; this file owns the clock, the tasks and the engine.
Who hosts the sockets is another's business: `runtime.cloud` (its own server) and `runtime.asgi`
(anybody's) hand in what a handshake asks for (`door`) and then the open socket (`serve`).

A forward that fails is run again in halves, so one session's fault ends that session alone, and
more sessions than the engine has slots are several forwards and no error.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import logging
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from outrider.core.grammar import GrammarKind
from outrider.core.tokens import GrammarError
from outrider.engines.base import EngineError, ModelInfo
from outrider.engines.desk import DeskJob, DeskResult, SlotDesk
from outrider.engines.grammar import GrammarReader, available
from outrider.engines.tokenizer import Tokenizer
from outrider.proto.codec import MAX_FRAME_BYTES
from outrider.proto.connection import HEARTBEAT, Connection, Role, SilentPeerError
from outrider.proto.errors import LocalError, RemoteError
from outrider.proto.messages import PROTOCOL_VERSION, Code, Hello, Limits, Open
from outrider.runtime.access import ConfigurationError, Logins, login_of, require_safe
from outrider.runtime.discreet import outline, without_addresses
from outrider.runtime.events import note, note_message
from outrider.runtime.listening import MAX_CONNECTIONS
from outrider.runtime.peers import (
    CLOSE_CODES,
    CLOSE_GOING_AWAY,
    CLOSE_NORMAL,
    CLOSE_PROTOCOL_ERROR,
    FINISH_S,
    Peer,
    PeerSocket,
    SocketClosedError,
    Visitor,
)
from outrider.runtime.readers import Readers
from outrider.runtime.routes import ROUTES, Reply
from outrider.runtime.worker import EngineThread, Timed
from outrider.session.quotas import NO_LIMITS, TenantLimits
from outrider.session.service import CloudService, Done, Judging, Outgoing, ServiceConfig, Work
from outrider.session.wire import from_wire

log = logging.getLogger("outrider.cloud")

ANYBODY: Final = "default"
"""The tenant of every connection where there is no login."""
OPERATOR: Final = "operator"
"""The login that may see the others' counts; each other one sees its own."""
DRAIN_CHECK_S: Final = 0.02
HURRY_S: Final = 0.3
"""Of FINISH_S once there is no time left to drain: Ctrl-C ends within a second, whoever sleeps."""
DETACHED_S: Final = 3.0
"""How long a drain waits for a session that no connection carries: its edge resumes elsewhere."""


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


class CloudRuntime:
    """One target engine and the edges that talk to it. Made and used in one event loop."""

    def __init__(
        self,
        desk: SlotDesk,
        tokenizer: Tokenizer,
        config: CloudConfig | None = None,
        *,
        service: ServiceConfig | None = None,
    ) -> None:
        self.config = config or CloudConfig()
        self.desk = desk
        self._grammars = GrammarReader(tokenizer) if available() else None
        self._readers = Readers()
        self.service = CloudService(
            service or service_config(desk.model.info),
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
        self._peers: dict[int, Peer] = {}
        self._next = 0
        self._stop_by: float | None = None
        self._closing: asyncio.Task[None] | None = None

    # ---------------------------------------------------------------- life

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

    def status(self, who: str | None = None) -> dict[str, object]:
        """Facts for an operator, as JSON values; no prompt, no id, no token. `who`: the login that
        asks, which is told of no other one, unless it is OPERATOR; None: there are no logins."""
        facts = self.service.status(time.monotonic())
        tenants = facts["tenants"]
        assert isinstance(tenants, dict), "counts by tenant"
        if who not in (None, OPERATOR):
            facts["tenants"] = {name: told for name, told in tenants.items() if name == who}
        return {
            "model": self.desk.model.info.name,
            "connections": len(self._peers),
            **facts,
            "slots": self.desk.held,
            "parked_slots": self.desk.parked,
            "evictions": self.desk.evictions,
            "shared_ids": self.desk.shared_ids,
        }

    @property
    def draining(self) -> bool:
        """It stops: whoever sends edges here should send them elsewhere."""
        return self._stop_by is not None

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
        await self._hang_up(patience)
        if self._closing is None:
            self._closing = asyncio.create_task(self._close_engine(), name="outrider-close-engine")
        await asyncio.shield(self._closing)

    async def _hang_up(self, patience: float) -> None:
        """Close every socket, within `patience` seconds."""
        peers = list(self._peers.values())
        if peers:
            closing = [asyncio.ensure_future(p.socket.close(CLOSE_GOING_AWAY)) for p in peers]
            _, late = await asyncio.wait(closing, timeout=patience)
            for task in late:  # they do not say goodbye
                task.cancel()
            await asyncio.gather(*closing, return_exceptions=True)
        for peer in peers:
            peer.socket.abort()

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
        self._readers.close()

    # ---------------------------------------------------------------- admission

    def door(self, path: str, authorization: Sequence[str]) -> Reply | Visitor:
        """What a GET, or a handshake, is answered: path, login, room. A Visitor: the path speaks
        the protocol, and a WebSocket may be opened for it. `path` without its query;
        `authorization`: every such header."""
        route = ROUTES.get(path)
        if route is None:
            return Reply(status=http.HTTPStatus.NOT_FOUND, body="no such path\n")
        tokens = self.logins.tokens
        login = login_of(authorization, tokens)
        if route.login and tokens and login is None:
            unknown = "a valid bearer token is needed\n"
            return Reply(status=http.HTTPStatus.UNAUTHORIZED, body=unknown)
        if route.body is not None:
            who = None if login is None else tokens[login]
            return Reply(status=route.status(self), body=route.body(self, who))
        tenant = ANYBODY if login is None else tokens[login]
        mine = sum(peer.tenant == tenant for peer in self._peers.values())
        if len(self._peers) >= MAX_CONNECTIONS or mine >= self._connections_of(tenant):
            return Reply(status=http.HTTPStatus.SERVICE_UNAVAILABLE, body="too many connections\n")
        if self.draining and not self._awaited:
            return Reply(status=http.HTTPStatus.SERVICE_UNAVAILABLE, body="draining\n")
        return Visitor(tenant=tenant, login=login or "")

    @property
    def _awaited(self) -> bool:
        """A session waits for its edge to come back."""
        return self.service.deadline is not None

    def _connections_of(self, tenant: str) -> int:
        own = self.logins.limits.get(tenant, NO_LIMITS).connections
        return self.config.tenant_connections if own is None else own

    # ---------------------------------------------------------------- one peer

    async def serve(self, socket: PeerSocket, visitor: Visitor) -> None:
        """Speak with one edge until its socket is closed."""
        self._next += 1
        number = self._next
        connection = Connection(
            Role.CLOUD, self._hello(), now=time.monotonic(), heartbeat=self.config.heartbeat
        )
        peer = Peer(socket, connection, number, visitor, self._unblocked)
        self._peers[number] = peer
        self.service.connected(number, peer.tenant)
        note("connected", connection=number, tenant=peer.tenant)
        peer.flush()
        writer = asyncio.create_task(peer.write(), name=f"outrider-writer-{number}")
        watch = asyncio.create_task(self._watch(peer), name=f"outrider-watch-{number}")
        code = CLOSE_NORMAL
        try:
            await self._read(peer)
        except SocketClosedError:
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

    async def _read(self, peer: Peer) -> None:
        while True:
            frame = await peer.socket.receive()  # a text is not ours: the codec refuses it
            now = time.monotonic()
            try:
                message = peer.connection.receive(frame, now)
                peer.heard()
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
        read = partial(self._grammars.constraint, grammar, tenant)
        with contextlib.suppress(GrammarError):  # kept as well, and told by the service
            await self._readers.run(tenant, read)

    def _handle(self, peer: Peer, message: object, now: float) -> list[Outgoing]:
        if isinstance(message, Hello):
            if self.draining:  # it came back for its sessions; new ones go elsewhere
                peer.connection.drain()
            return []
        return self.service.receive(peer.number, message, now)  # type: ignore[arg-type]

    async def _watch(self, peer: Peer) -> None:
        """Heartbeats of one connection; closes it when the peer has gone silent."""
        while True:
            now = time.monotonic()
            await asyncio.sleep(max(0.01, peer.connection.deadline - now))
            try:
                peer.connection.tick(time.monotonic())
            except SilentPeerError:
                peer.socket.abort()
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
        jobs = [desk_job(item) for item in work]
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
                self.service.finished(
                    results, started=outcome.started, now=outcome.ended, apart=True
                )
            )
            self._judge()
        else:
            self._forward_failed(work, outcome)
        self._kick()

    def _judge(self) -> None:
        """Have judged what a grammar holds, beside the next forward (session.service)."""
        labours, self.service.judging = self.service.judging, []
        for labour in labours:
            self._readers.submit(labour.tenant, labour.run, partial(self._judged, labour))

    def _judged(self, labour: Judging, outcome: BaseException | None) -> None:
        if outcome is not None:
            log.error("judging failed: %s", outline(outcome))
        self._dispatch(self.service.judged(labour, time.monotonic()))
        self._kick_soon()

    def _forward_failed(self, work: list[Work], error: BaseException) -> None:
        if len(work) > 1:
            middle = len(work) // 2
            self._halves += (work[:middle], work[middle:])
            return
        known = isinstance(error, EngineError)
        reason = str(error) if known else f"the engine failed: {type(error).__name__}"
        log.warning("forward failed: %s%s", reason, "" if known else f"\n{outline(error)}")
        self._dispatch(self.service.failed(work, without_addresses(reason)))

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


def service_config(info: ModelInfo, **limits: Any) -> ServiceConfig:
    """What a session is told of the model, and `limits` of ServiceConfig."""
    return ServiceConfig(
        vocab_size=info.vocab_size,
        context_length=info.context_length,
        eos=info.eos_token_ids,
        deterministic=info.deterministic,
        rules=info.rules,
        known_ids=info.known_ids,
        **limits,
    )


def desk_job(item: Work) -> DeskJob:
    """What the engine is to do for a piece of work."""
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
