"""The edge's side of one link, sans I/O: sessions, the connection under them, and reconnecting.

The driver owns a socket, a clock and the draft engine. It tells what happened (`started`,
`connected`, `receive`, `disconnected`, `drafted`, `tick`, ...), and after every call it carries
out `take(now)`: frames to write, drafting jobs to run, events for the caller, whether to dial or
to hang up. Rules:

1. A cut link is a pause. Every session that the cloud may know is RESUMEd by digest on the next
   connection; where the cloud answers `unknown-session` or `digest`, it is OPENed anew with its
   committed tokens (I4). Unjudged drafts are sent again, as they were: same ids, same epoch.
2. Drafts follow OPEN and RESUME at once, without waiting for OPENED: order is kept, and a
   refused OPEN turns them into late frames, which the cloud drops. An OPEN that has drafts to
   judge says so (`held`), so that the rebuilt session judges them and not a token of its own: a
   decision about a draft may be repeated, never be replaced (exactness of the ratio rule).
3. What the peer may not say ends the connection, not the sessions: they resume on the next one.
   After `MAX_FAULTS` such ends in a row without a committed token, they fail. A session that
   nothing is heard of for `STALLED_AFTER` seconds ends the connection in the same way: RESUME
   finds out what is missing on which side.
4. Redialling backs off, with jitter, and starts afresh when a token was committed. A link that
   stays down for `give_up` seconds fails all sessions, and so do `MAX_BARREN` links in a row that
   came up and brought no token.
5. Frames for a session that has ended here are dropped and counted.
6. A complete answer needs no link: DONE only confirms it. Without DONE the end is `confirmed`
   false, never an error.
7. A session whose reader does not keep up is paused (`pause`): it drafts nothing, and STEER has the
   cloud wait for drafts. So what is kept for a reader has a bound, and others get the engines.
8. Who waits for tokens learns within seconds that nothing comes, and why: a cloud that is silent
   meanwhile is asked (PING) after `ASK_BEATS` heartbeats, and what it does not answer is told
   (`LinkQuiet`) after `QUIET_BEATS`, long before the link counts as dead. It is no fault yet.
9. The draft engine's time is handed out here, a batch of jobs at a time (session.turns). The next
   batch waits until the driver has told what became of every job of the last one; that of a
   session which has ended is dropped.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from outrider.core.draft import Draft as CoreDraft
from outrider.core.relaxation import Relaxation
from outrider.core.residual import TopKReply
from outrider.core.tokens import Rule
from outrider.proto.connection import HEARTBEAT, Connection, Role, State
from outrider.proto.errors import LocalError, RemoteError
from outrider.proto.messages import (
    Cancel,
    Code,
    Done,
    Error,
    GoAway,
    Hello,
    Logprobs,
    Marks,
    Message,
    Opened,
    Pressure,
    Proposals,
    Relaxed,
    Row,
    Steer,
    Tokens,
    TopK,
    Verdict,
)
from outrider.session.distrust import largest_id, printable
from outrider.session.edge import RETRY_AFTER, DraftJob, EdgeSession
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
from outrider.session.generation import Generation, Step
from outrider.session.pilot import Pilot
from outrider.session.schedules import Plan
from outrider.session.standing import Phase, Standing
from outrider.session.turns import MAX_DRAFT_BATCH, Ready, choose

REDIAL_FIRST: Final = 0.05
"""Seconds before the first redial (our default): a restarted proxy is back by then, and the user
does not notice."""
REDIAL_FACTOR: Final = 2.0
"""Growth of the pause from one failed attempt to the next."""
REDIAL_MAX: Final = 5.0
"""Longest pause between attempts, in seconds: one heartbeat."""
GIVE_UP_AFTER: Final = 30.0
"""Seconds without a working link after which sessions fail: the cloud's own grace for them."""
MAX_FAULTS: Final = 4
"""Connections in a row that may end by a peer's fault without a token in between."""
MAX_BARREN: Final = 16
"""Links in a row that greeted and broke without a token in between (about a minute of trying)."""
MAX_SESSIONS: Final = 256
"""Most live sessions of one client, those waiting for room on the connection included (I7)."""
ASK_BEATS: Final = 0.3
"""Heartbeats of silence after which a cloud is asked, while somebody waits for tokens: 1.5 s."""
QUIET_BEATS: Final = 0.6
"""Heartbeats of silence after which they are told: 3 s, so that an answer has the time between."""
CONFIRM_WITHIN: Final = RETRY_AFTER
"""Seconds to wait for DONE once the answer is complete here."""

FATAL: Final = frozenset({Code.UNAUTHORIZED, Code.VERSION, Code.VOCABULARY})
"""Connection errors that no redial can cure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What the driver has to do now, in this order."""

    frames: tuple[bytes, ...]
    """For the connection that is up; write them before hanging up."""
    hang_up: bool
    """Close the connection. Deliver nothing from it any more, not even that it closed."""
    dial: bool
    """Connect, then call `connected`, `disconnected` or `refused`."""
    drafts: tuple[tuple[int, DraftJob], ...]
    """(session, job), a batch: draft them together, and call `drafted` for each, whatever became
    of it. No further batch comes before that."""
    events: tuple[Event, ...]


class _Link(enum.Enum):
    DOWN = "down"
    DIALING = "dialing"
    GREETING = "greeting"
    UP = "up"


@dataclass(slots=True)
class Tally:
    """Facts of the client's life, for traces and JSON."""

    dials: int = 0
    reconnects: int = 0
    """Connections that greeted, after the first."""
    resumed: int = 0
    reopened: int = 0
    late_frames: int = 0
    bytes_up: int = 0
    """Frames of all closed connections; see `EdgeClient.bytes_up` for the running sum."""
    bytes_down: int = 0


class EdgeClient:
    """See the module docstring."""

    def __init__(
        self,
        hello: Hello,
        *,
        now: float,
        uid: Callable[[], bytes],
        jitter: Callable[[], float] = lambda: 1.0,
        give_up: float = GIVE_UP_AFTER,
        heartbeat: float = HEARTBEAT,
        retry_after: float = RETRY_AFTER,
        draft_batch: int = MAX_DRAFT_BATCH,
    ) -> None:
        """`uid`: 16 fresh random bytes a call. `jitter`: a factor in (0, 1] for every pause.
        `draft_batch`: most sessions that draft together."""
        self.tally = Tally()
        self.refusal: Failed | None = None
        """Set by an error that no redial can cure, until `forgive`; `session` 0."""
        self._hello = hello
        self._uid = uid
        self._jitter = jitter
        self._give_up = give_up
        self._heartbeat = heartbeat
        self._retry_after = retry_after
        self._live: dict[int, Standing] = {}
        self._next = 1
        self._link = _Link.DOWN
        self._connection: Connection | None = None
        self._down_since = now
        self._redial_at = now
        self._attempts = 0
        # Since the last token: attempts that failed, links that broke, peers that broke a rule.
        self._failures = self._barren = self._faults = 0
        self._greeted = 0
        self._events: list[Event] = []
        self._last_frames: list[bytes] = []
        self._hang_up = False
        self._quiet = False
        """`LinkQuiet` was told of the present connection's silence."""
        self._draft_batch = draft_batch
        self._turn = 0
        self._drafting: set[int] = set()
        """Sessions of the batch that is out, ended ones included."""

    # ---------------------------------------------------------------- the caller's wishes

    def start(
        self,
        generation: Generation,
        plan: Plan,
        *,
        rule: Rule = Rule.COUPLED,
        relaxation: Relaxation | None = None,
        reply: TopKReply | None = None,
        now: float,
        pilot: Pilot | None = None,
        due_ms: int = 0,
    ) -> int:
        """Begin a session; its number. `due_ms`: as OPEN says it. Raises LocalError at the limit of
        sessions, RemoteError when the cloud has refused this edge for good."""
        if self.refusal is not None:
            raise RemoteError(self.refusal.code, self.refusal.message)
        if len(self._live) >= MAX_SESSIONS:
            raise LocalError(f"{MAX_SESSIONS} sessions are running: finish or cancel some")
        number, self._next = self._next, self._next + 1
        session = EdgeSession(
            number,
            generation,
            plan.window,
            now=now,
            rule=rule,
            relaxation=relaxation,
            reply=reply,
            retry_after=self._retry_after,
            pilot=pilot,
        )
        if not self._live:
            # What failed others is over: a newcomer has all the patience there is.
            self._barren = self._faults = 0
            if self._link is _Link.DOWN:
                self._down_since = now  # an idle link that was down has not failed anybody
        self._live[number] = Standing(
            session=session,
            plan=plan,
            rule=rule,
            uid=self._uid(),
            due_ms=due_ms,
            turn=self._turn,
        )
        return number

    def cancel(self, number: int) -> None:
        """Give a session up, in whatever state it is. Unknown and ended numbers are ignored."""
        live = self._live.pop(number, None)
        if live is not None and live.joined:
            self._send(Cancel(session=number))

    def pause(self, number: int) -> None:
        """Nobody takes what a session says: neither side works for it until `resume`. What is under
        way still comes. Unknown and ended numbers are ignored."""
        live = self._live.get(number)
        if live is not None:
            live.session.pause()

    def resume(self, number: int, now: float) -> None:
        """Its tokens are taken again."""
        live = self._live.get(number)
        if live is not None and live.session.paused:
            live.session.resume(now)
            live.heard = now

    def session(self, number: int) -> EdgeSession | None:
        """The machine of a live session, to look at."""
        live = self._live.get(number)
        return live.session if live else None

    @property
    def sessions(self) -> int:
        """Live sessions."""
        return len(self._live)

    @property
    def connection(self) -> Connection | None:
        """The connection in use, to look at."""
        return self._connection

    # ---------------------------------------------------------------- what happened

    def connected(self, now: float) -> None:
        """The dialled transport is up."""
        self._link = _Link.GREETING
        self._connection = Connection(Role.EDGE, self._hello, now=now, heartbeat=self._heartbeat)

    def disconnected(self, now: float, reason: str = "the link was cut") -> None:
        """Dialling failed, or the transport broke. Ignored when the machine knows already."""
        if self._link is not _Link.DOWN:
            self._drop(now, reason, last_words=False)
            self._hang_up = False

    def refused(self, code: Code, message: str) -> None:
        """The transport was refused for good (wrong token, no such path): no redial helps."""
        self._refuse(code, message)
        self._hang_up = False

    def forgive(self) -> None:
        """Let the next session try again: what refused this edge may have been put right since."""
        self.refusal = None

    def close(self) -> None:
        """Cancel everything and hang up; `take` once more for the last frames."""
        for number in list(self._live):
            self.cancel(number)
        self._leave()

    def receive(self, frame: bytes, now: float) -> None:
        """One frame of the connection that is up."""
        connection = self._connection
        if connection is None or self._link not in (_Link.GREETING, _Link.UP):
            self.tally.late_frames += 1
            return
        if self._quiet:
            self._quiet = False
            self._events.append(LinkHeard())
        try:
            message = connection.receive(frame, now)
            if message is not None:
                self._hear(message, now)
        except RemoteError as error:
            self._fault(error, now)

    def drafted(self, number: int, draft: CoreDraft, now: float, *, seconds: float = 0.0) -> None:
        """The result of a drafting job (`NO_DRAFT`: it failed), which took `seconds` of the
        engine's time: in a batch, its share. Dropped for ended sessions."""
        self._drafting.discard(number)
        live = self._live.get(number)
        if live is not None:
            self._say(live, live.session.drafted(draft, now, seconds=seconds))

    def tick(self, now: float) -> None:
        """Time passed."""
        if self._connection is not None:
            try:
                self._connection.tick(now)
            except RemoteError as error:
                self._drop(now, error.message, last_words=False)
        for number, live in list(self._live.items()):
            session = live.session
            if live.complete_at is not None and now >= live.complete_at + CONFIRM_WITHIN:
                self._end(number, confirmed=False)
            elif live.phase is Phase.RUNNING and _due(session.deadline, now):
                self._say(live, session.retry(now))
        if any(x.stalls_at <= now for x in self._live.values()):
            self._drop(now, "nothing is heard of a session")
        self._doubt(now)
        if self._live and self._link is not _Link.UP and now >= self._down_since + self._give_up:
            message = f"no working link to the verifier for {self._give_up:.0f} s"
            for number in list(self._live):
                self._fail(number, Code.UNREACHABLE, message)

    def _doubt(self, now: float) -> None:
        """Ask a cloud that is silent while somebody waits, then tell them."""
        silent, connection = self._silent, self._connection
        if silent is None or connection is None:
            return
        if not connection.asked and now >= silent + ASK_BEATS * self._heartbeat:
            connection.ping(now)
        if not self._quiet and now >= silent + QUIET_BEATS * self._heartbeat:
            self._quiet = True
            self._events.append(LinkQuiet(since=silent, dead_at=connection.deadline))

    @property
    def _silent(self) -> float | None:
        """Since when (seconds) tokens have been awaited without any word from the cloud; None:
        nobody waits for the present connection."""
        connection = self._connection
        if connection is None or self._link is not _Link.UP:
            return None
        joined = [
            live.heard
            for live in self._live.values()
            if live.joined and live.complete_at is None and not live.session.paused
        ]
        return max(connection.heard, min(joined)) if joined else None

    @property
    def deadline(self) -> float | None:
        """When `tick` and `take` are due; None while nothing is awaited."""
        times: list[float] = []
        if self._connection is not None:
            times.append(self._connection.deadline)
            if (silent := self._silent) is not None and not self._quiet:
                beats = QUIET_BEATS if self._connection.asked else ASK_BEATS
                times.append(silent + beats * self._heartbeat)
        if self._live and self._link is not _Link.UP:
            times.append(self._down_since + self._give_up)
        if self._live and self._link is _Link.DOWN:
            times.append(self._redial_at)
        for live in self._live.values():
            times.append(live.stalls_at)
            if live.complete_at is not None:
                times.append(live.complete_at + CONFIRM_WITHIN)
            elif live.phase is Phase.RUNNING and live.session.deadline is not None:
                times.append(live.session.deadline)
            elif self._opens and live.phase is Phase.STALE:
                times.append(live.not_before)
        return min((t for t in times if t < math.inf), default=None)

    @property
    def _opens(self) -> bool:
        """May sessions be opened on the present connection?"""
        connection = self._connection
        up = self._link is _Link.UP and connection is not None
        return up and connection is not None and connection.state is not State.DRAINING

    # ---------------------------------------------------------------- what to do

    def take(self, now: float) -> Output:
        """Everything to do now; nothing is returned twice."""
        if self._link is _Link.UP:
            self._admit(now)
        ready: list[Ready] = []
        for number, live in self._live.items():
            session = live.session
            if live.phase is Phase.RUNNING:
                self._say(live, session.unsent(now))
            if session.room(now):
                waits = Ready(
                    number=number, ahead=session.ahead, turn=live.turn, fresh=not live.drafted
                )
                ready.append(waits)
            if live.phase is Phase.RUNNING and live.steered is not live.step:
                live.steered, live.swayed = live.step, True
                self._send(Steer(session=number, step=live.step.value))
        frames, self._last_frames = self._last_frames, []
        if self._connection is not None:
            frames += self._connection.take()
        events, self._events = self._events, []
        hang_up, self._hang_up = self._hang_up, False
        return Output(
            frames=tuple(frames),
            hang_up=hang_up,
            dial=self._dials(now),
            drafts=self._next_batch(ready, now),
            events=tuple(events),
        )

    def _next_batch(self, ready: list[Ready], now: float) -> tuple[tuple[int, DraftJob], ...]:
        """Drafting jobs for the engine, if it is free."""
        if self._drafting or not ready:
            return ()
        self._turn += 1
        batch: list[tuple[int, DraftJob]] = []
        for number in choose(ready, self._draft_batch):
            live = self._live[number]
            job = live.session.next_draft(now)
            assert job is not None, "a session that is ready drafts"
            live.turn, live.drafted = self._turn, True
            batch.append((number, job))
        self._drafting = {number for number, _ in batch}
        return tuple(batch)

    def _dials(self, now: float) -> bool:
        idle = self._link is not _Link.DOWN or not self._live
        if idle or self.refusal is not None or now < self._redial_at:
            return False
        self._link = _Link.DIALING
        self._attempts += 1
        self.tally.dials += 1
        return True

    @property
    def bytes_up(self) -> int:
        """Bytes of all frames sent, over all connections."""
        return self.tally.bytes_up + (self._connection.sent_bytes if self._connection else 0)

    @property
    def bytes_down(self) -> int:
        received = self._connection.received_bytes if self._connection else 0
        return self.tally.bytes_down + received

    # ---------------------------------------------------------------- opening and resuming

    def _admit(self, now: float) -> None:
        """Tell the cloud about sessions it does not know yet, as far as it has room."""
        connection = self._connection
        assert connection is not None, "the link is up"
        known = sum(x.joined for x in self._live.values())
        for number, live in list(self._live.items()):
            if known >= connection.limits.sessions:
                return
            if live.phase is Phase.LOST:
                self._resume(live, now)
            elif live.phase in (Phase.NEW, Phase.STALE) and now >= live.not_before:
                if connection.state is State.DRAINING:
                    continue
                self._open(number, live, now)
            else:
                continue
            known += 1
        if connection.state is State.DRAINING and self._live and not known:
            # Only newcomers are left here: they are welcome on another verifier.
            self._drop(now, "the verifier drains", last_words=False)

    def _open(self, number: int, live: Standing, now: float) -> None:
        session, connection = live.session, self._connection
        assert connection is not None, "the link is up"
        hindrance = live.hindrance(connection)
        if hindrance is not None:
            self._fail(number, *hindrance)
            return
        if live.phase is Phase.STALE:
            self.tally.reopened += 1
        self._enter(live, "OPEN sent", now)
        session.ask(now)
        try:
            connection.send(live.opening())
        except LocalError as error:
            self._fail(number, Code.TOO_LARGE, str(error))
            return
        live.steered, live.opened_at = live.step, now
        self._say(live, session.retry(now))

    def _resume(self, live: Standing, now: float) -> None:
        session = live.session
        self._enter(live, "RESUME sent", now)
        self.tally.resumed += 1
        if live.swayed:
            live.steered = None  # what was said last may have been lost with the link
        self._send(live.resuming())
        self._say(live, session.retry(now))

    def _enter(self, live: Standing, event: str, now: float) -> None:
        """A session joins the present connection: its window shrinks to what both sides hold."""
        assert self._connection is not None, "the link is up"
        live.shrink(self._connection.limits.window)
        live.move(event)
        live.session.window.limit = None  # another verifier has another load
        live.heard = now

    def _say(self, live: Standing, messages: tuple[Message, ...]) -> None:
        """Send frames of a session, if the present connection carries it; `retry` repeats them
        on the next one otherwise."""
        if live.joined:
            for message in messages:
                self._send(message)

    def _send(self, message: Message) -> None:
        connection = self._connection
        if connection is not None and connection.state in (State.READY, State.DRAINING):
            connection.send(message)

    # ---------------------------------------------------------------- the cloud's words

    def _hear(self, message: Message, now: float) -> None:
        match message:
            case Hello():
                self._greet()
            case GoAway():
                pass  # the connection knows; `_admit` keeps newcomers away
            case Error(session=None):
                self._ended_by_peer(printable(message), now)
            case Error():
                self._session_error(printable(message), now)
            case _:
                number: int = message.session  # type: ignore[union-attr]
                live = self._live.get(number)
                if live is None:
                    self.tally.late_frames += 1
                else:
                    self._session_message(number, live, message, now)

    def _greet(self) -> None:
        self._link = _Link.UP
        self.tally.reconnects += self._greeted > 0
        self._greeted += 1
        self._events.append(LinkUp(attempts=self._attempts))
        self._attempts = 0

    def _session_message(self, number: int, live: Standing, message: Message, now: float) -> None:
        session, live.heard = live.session, now
        if (largest_id(message) or 0) >= self._hello.vocab_size:
            raise RemoteError(Code.MALFORMED, "token id outside the vocabulary", number)
        step: Step | None = None
        replies: tuple[Message, ...] = ()
        match message:
            case Verdict() | Relaxed():
                step = session.on_verdict(message, now)
            case Tokens():
                step = session.on_tokens(message, now)
            case Proposals() | TopK() | Row():
                step, replies = session.on_residual(message, now)
            case Logprobs():
                step = session.on_logprobs(message, now)
            case _:
                self._told(number, live, message, now)
        self._say(live, replies)
        if step is not None:
            self._committed(number, live, step, now)

    def _told(self, number: int, live: Standing, message: Message, now: float) -> None:
        """Words about a session that commit nothing."""
        match message:
            case Opened():
                if live.opened_at is not None and not live.accepted:
                    live.session.greeted(now - live.opened_at, now)
                live.move("OPENED")
                live.accepted = True
            case Marks():
                live.session.on_marks(message)
            case Pressure():
                live.session.window.limit = message.window
            case Done():
                self._done(number, live, message)

    def _committed(self, number: int, live: Standing, step: Step, now: float) -> None:
        live.faults = self._faults = self._barren = self._failures = 0
        if step.finish is not None:
            live.complete_at = now
        self._events.append(Progress(session=number, step=step))

    def _done(self, number: int, live: Standing, message: Done) -> None:
        finished = live.session.generation.finish is not None
        try:
            live.session.on_done(message)
        except RemoteError as error:
            if not finished:
                raise  # frames are missing: the next connection replays them
            # The one thing that must never happen (I10): say it loudly, resume nothing.
            self._fail(number, error.code, error.message)
            return
        self._end(number, confirmed=True)

    def _session_error(self, error: Error, now: float) -> None:
        number = error.session
        assert number is not None, "connection errors go elsewhere"
        live = self._live.get(number)
        if live is None:
            self.tally.late_frames += 1
            return
        if live.session.generation.finish is not None:
            self._end(number, confirmed=False)
            return
        if live.phase is Phase.RESUMING and error.code in (Code.UNKNOWN, Code.DIGEST):
            live.move("refused")
            return
        live.faults += 1
        lost = error.code in (Code.UNKNOWN, Code.DIGEST)
        # Shown text is worth some patience; a new request may as well be told at once, but where a
        # verifier drains: GOAWAY and OPEN have crossed, and another verifier is a handshake away.
        busy = error.code is Code.DRAINING or (live.accepted and error.code is Code.BUSY)
        if not (lost or busy) or live.faults > MAX_FAULTS:
            self._fail(number, error.code, error.message)
            return
        live.move("refused")
        live.not_before = now + self._pause(live.faults) if busy else now

    # ---------------------------------------------------------------- ends

    def _end(self, number: int, *, confirmed: bool) -> None:
        live = self._live.pop(number)
        reason = live.session.generation.finish
        assert reason is not None, "only a complete answer ends"
        self._events.append(Ended(session=number, reason=reason, confirmed=confirmed))

    def _fail(self, number: int, code: Code, message: str) -> None:
        live = self._live.pop(number)
        if live.joined:
            self._send(Cancel(session=number))
        if live.session.generation.finish is not None and code is Code.UNREACHABLE:
            reason = live.session.generation.finish
            self._events.append(Ended(session=number, reason=reason, confirmed=False))
            return
        self._events.append(Failed(session=number, code=code, message=message))

    def _fault(self, error: RemoteError, now: float) -> None:
        """The peer broke a rule: end the connection; its sessions resume on the next one."""
        assert self._connection is not None, "only a connection can be at fault"
        self._connection.fail(error)
        if error.code in FATAL:
            self._refuse(error.code, error.message)
            return
        self._strike(error.code, error.message)
        self._drop(now, str(error))

    def _ended_by_peer(self, error: Error, now: float) -> None:
        if error.code in FATAL:
            self._refuse(error.code, error.message)
            return
        self._strike(error.code, error.message)
        self._drop(now, f"{error.code.value}: {error.message}", last_words=False)

    def _strike(self, code: Code, message: str) -> None:
        self._faults += 1
        if self._faults > MAX_FAULTS:
            self._faults = 0
            for number in list(self._live):
                self._fail(number, code, message)

    def _refuse(self, code: Code, message: str) -> None:
        self.refusal = Failed(session=0, code=code, message=message)
        for number in list(self._live):
            self._fail(number, code, message)
        self._leave()
        self._events.append(LinkDown(reason=message, redial_at=None))

    def _drop(self, now: float, reason: str, *, last_words: bool = True) -> None:
        """The link is gone, or must go. `last_words`: frames still queued are worth writing."""
        if self._link is _Link.UP:
            self._down_since = now
            self._barren += 1
        self._leave(last_words=last_words)
        self._redial_at = now + self._pause(self._failures)
        self._failures += 1
        for number, live in list(self._live.items()):
            live.move("cut")
            if live.complete_at is not None:
                self._end(number, confirmed=False)
            elif self._barren > MAX_BARREN:
                self._fail(
                    number, Code.UNREACHABLE, f"no progress over {MAX_BARREN} links: {reason}"
                )
        redial = self._redial_at if self._live else None
        gives_up = self._down_since + self._give_up if self._live else None
        self._events.append(
            LinkDown(
                reason=reason,
                redial_at=redial,
                attempts=self._attempts,
                gives_up_at=gives_up,
            )
        )

    def _leave(self, *, last_words: bool = True) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            if last_words:
                self._last_frames += connection.take()
            self.tally.bytes_up += connection.sent_bytes
            self.tally.bytes_down += connection.received_bytes
            connection.close()
        self._hang_up = self._hang_up or self._link is not _Link.DOWN
        self._link = _Link.DOWN
        self._quiet = False

    def _pause(self, failures: int) -> float:
        """Seconds before the next attempt after so many failed ones."""
        longest = min(REDIAL_MAX, REDIAL_FIRST * REDIAL_FACTOR ** min(failures, 16))
        return longest * self._jitter()


def _due(deadline: float | None, now: float) -> bool:
    return deadline is not None and now >= deadline
