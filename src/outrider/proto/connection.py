"""One connection, sans I/O: frames in, messages out, messages in, frames out.

Rules:

1. Both sides speak first: HELLO crosses HELLO. Nothing else is legal before the peer's HELLO.
2. What may be received is a table of (role, state). A message outside it ends the connection
   with `state`; a peer never learns more from an error than the table says.
3. Vocabularies are compared by content. A mismatch ends the connection before any session.
4. Time is an argument, a deadline a result. A side that heard nothing for `heartbeat` sends
   PING; after `SILENT_BEATS` heartbeats of silence the link is dead (field case 35).

    state       edge receives                          cloud receives
    HELLO       Hello, Error                           Hello
    READY       Opened Verdict Relaxed Marks Tokens    Open Resume Steer Draft Correct
                Proposals TopK Row Logprobs Pressure   Cancel Ping Pong Error
                Done Error GoAway Ping Pong
    DRAINING    as READY                               as READY, but Open is refused (draining)
    CLOSED      -                                      -

5. CLOSED hears nothing: frames that crossed the end on the wire are dropped. An ERROR without a
   session closes the side that receives it as well.
6. A frame longer than this side's own `frame_bytes` is refused before it is looked at; a longer
   one than the peer's is never sent.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Final

from outrider.core.link import Link, LinkError
from outrider.proto.codec import decode, encode
from outrider.proto.errors import LocalError, RemoteError
from outrider.proto.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Code,
    Correct,
    Done,
    Draft,
    Error,
    GoAway,
    Hello,
    Limits,
    Logprobs,
    Marks,
    Message,
    Open,
    Opened,
    Ping,
    Pong,
    Pressure,
    Proposals,
    Relaxed,
    Resume,
    Row,
    Steer,
    Tokens,
    TopK,
    Verdict,
)

HEARTBEAT: Final = 5.0
"""Seconds of silence before a PING (our default; field case 35)."""
SILENT_BEATS: Final = 2
"""Heartbeats of silence after which the link counts as dead: the edge must react within two."""
HELLO_BYTES: Final = 400
"""About what a HELLO frame has (tests/runtime/test_shaping.py compares)."""


class Role(StrEnum):
    EDGE = "edge"
    CLOUD = "cloud"


class State(StrEnum):
    HELLO = "hello"
    READY = "ready"
    DRAINING = "draining"
    CLOSED = "closed"


_EDGE_HEARS: Final = frozenset(
    {
        Opened,
        Verdict,
        Relaxed,
        Marks,
        Tokens,
        Proposals,
        TopK,
        Row,
        Logprobs,
        Pressure,
        Done,
        Error,
        GoAway,
        Ping,
        Pong,
    }
)
_CLOUD_HEARS: Final = frozenset({Open, Resume, Steer, Draft, Correct, Cancel, Ping, Pong, Error})

RECEIVES: Final[dict[Role, dict[State, frozenset[type]]]] = {
    Role.EDGE: {
        State.HELLO: frozenset({Hello, Error}),
        State.READY: _EDGE_HEARS,
        State.DRAINING: _EDGE_HEARS,
        State.CLOSED: frozenset(),
    },
    Role.CLOUD: {
        State.HELLO: frozenset({Hello}),
        State.READY: _CLOUD_HEARS,
        State.DRAINING: _CLOUD_HEARS,
        State.CLOSED: frozenset(),
    },
}
"""Message types a role may receive in a state. The tests walk it; the docs are drawn from it."""


TRANSITIONS: Final[dict[State, dict[str, State]]] = {
    State.HELLO: {"greeted": State.READY, "ended": State.CLOSED},
    State.READY: {"goaway": State.DRAINING, "ended": State.CLOSED},
    State.DRAINING: {"goaway": State.DRAINING, "ended": State.CLOSED},
    State.CLOSED: {"ended": State.CLOSED},
}
"""What changes a state, the same for both roles. greeted: the peer's HELLO was accepted. goaway:
GOAWAY was sent or received. ended: ERROR without a session sent or received, a broken rule, two
silent heartbeats, or the transport closed."""


class SilentPeerError(RemoteError):
    """Nothing was heard for too long."""

    def __init__(self, seconds: float) -> None:
        super().__init__(Code.STATE, f"nothing heard for {seconds:.1f} s: the link is dead")


def usable(link: Link, heartbeat: float = HEARTBEAT) -> None:
    """Raise LinkError for a link over which no connection can live: where greeting and being
    greeted take as long as the silence after which a peer counts as dead (seconds between two
    heartbeats: `heartbeat`)."""
    limit = SILENT_BEATS * heartbeat
    takes = link.round_trip(HELLO_BYTES)
    if takes >= limit:
        raise LinkError(
            f"a greeting up and one down take {takes:.3g} s over {link.text or 'this link'}, but "
            f"a peer is given up after {limit:g} s of silence: no connection can live"
        )


class Connection:
    """See the module docstring."""

    def __init__(
        self, role: Role, hello: Hello, *, now: float, heartbeat: float = HEARTBEAT
    ) -> None:
        self.role = role
        self.state = State.HELLO
        self.peer: Hello | None = None
        self.rtt: float | None = None
        """Seconds of the last PING's round trip."""
        self.ponged: float | None = None
        """Stamp of the last PONG, as the peer says it: of a PING of ours, if it is honest."""
        self.sent_bytes = 0
        self.received_bytes = 0
        self._hello = hello
        self._heartbeat = heartbeat
        self._out: list[bytes] = []
        self._heard = now
        self._pinged: float | None = None
        self._queue(hello)

    # ---------------------------------------------------------------- out

    def send(self, message: Message) -> None:
        """Queue a message for the peer. Raises LocalError when the peer may not hear it now."""
        hears = RECEIVES[_other(self.role)][self.state]
        if type(message) not in hears:
            raise LocalError(f"{type(message).__name__} cannot be sent in state {self.state}")
        self._queue(message)

    def take(self) -> list[bytes]:
        """Frames to put on the wire, in order; they are not returned again."""
        frames, self._out = self._out, []
        return frames

    def _queue(self, message: Message) -> None:
        frame = encode(message)
        if len(frame) > self.limits.frame_bytes:
            raise LocalError(
                f"a frame of {len(frame)} bytes, the peer takes {self.limits.frame_bytes}"
            )
        self.sent_bytes += len(frame)
        self._out.append(frame)

    def fail(self, error: RemoteError) -> None:
        """Tell the peer what was wrong and close: nothing more is received."""
        if self.state is not State.CLOSED:
            self._queue(Error(code=error.code, message=error.message))
            self._move("ended")

    def close(self) -> None:
        self._move("ended")

    def _move(self, event: str) -> None:
        self.state = TRANSITIONS[self.state][event]

    def drain(self) -> None:
        """Cloud: no new sessions from now on."""
        if self.state is State.READY:
            self.send(GoAway(message="this verifier is draining: open new sessions elsewhere"))
            self._move("goaway")

    # ---------------------------------------------------------------- in

    def receive(self, frame: bytes, now: float) -> Message | None:
        """One frame to one message; None when the connection dealt with it itself.

        Raises RemoteError: with a session number the connection goes on, without it must end.
        """
        if self.state is State.CLOSED:
            return None
        self._heard = now
        self._pinged = None
        self.received_bytes += len(frame)
        if len(frame) > self._hello.limits.frame_bytes:
            raise RemoteError(Code.TOO_LARGE, f"frame of {len(frame)} bytes")
        message = decode(frame)
        if type(message) not in RECEIVES[self.role][self.state]:
            raise RemoteError(
                Code.STATE, f"{type(message).__name__} is not allowed in state {self.state}"
            )
        match message:
            case Hello():
                self._greet(message)
                return message
            case Ping():
                self._queue(Pong(stamp=message.stamp))
                return None
            case Pong():
                self._note_pong(message, now)
                return None
            case GoAway():
                self._move("goaway")
                return message
            case Error(session=None):
                self._move("ended")
                return message
            case Open() if self.state is State.DRAINING:
                raise RemoteError(Code.DRAINING, "no new sessions here", message.session)
            case _:
                return message

    def _greet(self, hello: Hello) -> None:
        own = self._hello
        if PROTOCOL_VERSION not in hello.versions:
            raise RemoteError(
                Code.VERSION, f"this side speaks version {PROTOCOL_VERSION}, not {hello.versions}"
            )
        if hello.role != _other(self.role):
            raise RemoteError(Code.STATE, f"the peer's role must be {_other(self.role)}")
        if hello.fingerprint != own.fingerprint or hello.vocab_size != own.vocab_size:
            raise RemoteError(
                Code.VOCABULARY,
                "draft and target have different tokenizers "
                f"({hello.vocab_size} ids, {hello.fingerprint[:12]} against {own.vocab_size} ids, "
                f"{own.fingerprint[:12]}): use a draft made for this target",
            )
        self.peer = hello
        self._move("greeted")

    @property
    def limits(self) -> Limits:
        """The smaller of both sides' limits."""
        if self.peer is None:
            return self._hello.limits
        a, b = self._hello.limits, self.peer.limits
        return Limits(
            frame_bytes=min(a.frame_bytes, b.frame_bytes),
            window=min(a.window, b.window),
            sessions=min(a.sessions, b.sessions),
            prompt_tokens=min(a.prompt_tokens, b.prompt_tokens),
        )

    # ---------------------------------------------------------------- time

    def _note_pong(self, pong: Pong, now: float) -> None:
        # The stamp is our own clock; a forged one can only spoil this edge's own estimate.
        if 0.0 <= now - pong.stamp < 3600.0:
            self.rtt = now - pong.stamp
        self._pinged = None
        self.ponged = pong.stamp

    def ping(self, now: float) -> None:
        """Measure the round trip now."""
        if self.state in (State.READY, State.DRAINING):
            self._queue(Ping(stamp=now))
            self._pinged = now

    @property
    def heard(self) -> float:
        """Seconds: when the peer last said anything, or the connection began."""
        return self._heard

    @property
    def asked(self) -> bool:
        """A PING is out and nothing has been heard since."""
        return self._pinged is not None

    @property
    def deadline(self) -> float:
        """When `tick` is due; infinity once closed."""
        if self.state is State.CLOSED:
            return math.inf
        if self._pinged is not None:
            return self._heard + SILENT_BEATS * self._heartbeat
        return self._heard + self._heartbeat

    def tick(self, now: float) -> None:
        """Time passed: send a PING, or raise SilentPeerError when the peer has gone."""
        if self.state is State.CLOSED:
            return
        # Compared as `deadline` computes them: a difference may round to just below.
        if now >= self._heard + SILENT_BEATS * self._heartbeat:
            raise SilentPeerError(now - self._heard)
        if now >= self._heard + self._heartbeat and self._pinged is None:
            if self.state is not State.HELLO:
                self._queue(Ping(stamp=now))
            self._pinged = now


def _other(role: Role) -> Role:
    return Role.CLOUD if role is Role.EDGE else Role.EDGE
