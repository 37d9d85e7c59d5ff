"""One connection: the table walked, greetings, limits, heartbeats."""

from __future__ import annotations

import math

import msgspec
import pytest

from outrider.core.tokens import SamplingParams
from outrider.proto.codec import MAX_FRAME_BYTES, decode, encode
from outrider.proto.connection import (
    RECEIVES,
    SILENT_BEATS,
    Connection,
    Role,
    SilentPeerError,
    State,
)
from outrider.proto.errors import LocalError, RemoteError
from outrider.proto.messages import (
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
from outrider.session.wire import to_wire
from world import hello

BEAT = 5.0


def greet(role: Role, **changes: object) -> Hello:
    return hello(role, vocab_size=100, **changes)


def connection(role: Role, state: State = State.HELLO, **changes: object) -> Connection:
    made = Connection(role, greet(role, **changes), now=0.0, heartbeat=BEAT)
    if state is not State.HELLO:
        made.receive(encode(greet(other(role))), 0.0)
    if state is State.DRAINING and role is Role.CLOUD:
        made.drain()
    if state is State.DRAINING and role is Role.EDGE:
        made.receive(encode(GoAway()), 0.0)
    if state is State.CLOSED:
        made.close()
    made.take()
    assert made.state is state
    return made


def other(role: Role) -> Role:
    return Role.CLOUD if role is Role.EDGE else Role.EDGE


UID, HASH = bytes(16), bytes(16)
EXAMPLES: dict[type, Message] = {
    type(m): m
    for m in (
        Open(
            session=1,
            uid=UID,
            prompt=(1,),
            sampling=to_wire(SamplingParams()),
            rule="coupled",
            step="step",
        ),
        Resume(session=1, uid=UID, base=1, digest=HASH),
        Steer(session=1, step="wait"),
        Pressure(session=1, window=0),
        Marks(session=1, positions=(), spent=0.0, max_jsd=0.0),
        Opened(session=1, base=1),
        Done(session=1, reason="stop", output_tokens=1, digest=HASH),
        Error(code=Code.BUSY, message="", session=1),
        Cancel(session=1),
        GoAway(),
        Ping(stamp=0.0),
        Pong(stamp=0.0),
        Logprobs(session=1, start=0, entries=()),
        Draft(session=1, epoch=0, start=1, tokens=(1,)),
        Verdict(session=1, epoch=0, start=1, drafted=1, accepted=0, token=1),
        Relaxed(
            session=1,
            epoch=0,
            start=1,
            drafted=1,
            accepted=0,
            token=1,
            strict=0,
            marks=(),
            spent=0.0,
            max_jsd=0.0,
        ),
        Tokens(session=1, start=1, tokens=(1,)),
        Proposals(session=1, epoch=0, start=1, drafted=1, accepted=0, first=0, tokens=(), p=()),
        TopK(
            session=1,
            epoch=0,
            start=1,
            drafted=1,
            accepted=0,
            first=0,
            ids=(),
            weights=b"",
            log_total=0.0,
            rest=0.0,
        ),
        Row(session=1, position=1, ids=None, weights=b""),
        Correct(session=1, position=1, token=1),
    )
}


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("kind", [Hello, *EXAMPLES], ids=lambda k: k.__name__)
def test_the_table(role: Role, state: State, kind: type):
    """Every message type in every state of both roles: heard, refused with `state`, or dropped."""
    here = connection(role, state)
    message = greet(other(role)) if kind is Hello else EXAMPLES[kind]
    frame = encode(message)
    if state is State.CLOSED:
        assert here.receive(frame, 1.0) is None
        return
    if kind not in RECEIVES[role][state]:
        with pytest.raises(RemoteError) as refused:
            here.receive(frame, 1.0)
        assert refused.value.code is Code.STATE
        assert refused.value.session is None
        return
    if kind is Open and state is State.DRAINING:
        with pytest.raises(RemoteError) as refused:
            here.receive(frame, 1.0)
        assert (refused.value.code, refused.value.session) == (Code.DRAINING, 1)
        return
    heard = here.receive(frame, 1.0)
    assert heard == (None if kind in (Ping, Pong) else message)
    if kind is Ping:
        assert [decode(f) for f in here.take()] == [Pong(stamp=0.0)]


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("kind", EXAMPLES, ids=lambda k: k.__name__)
def test_nothing_is_sent_that_the_peer_may_not_hear(role: Role, state: State, kind: type):
    here = connection(role, state)
    if kind in RECEIVES[other(role)][state]:
        here.send(EXAMPLES[kind])
        assert [decode(f) for f in here.take()] == [EXAMPLES[kind]]
        assert here.take() == []
    else:
        with pytest.raises(LocalError):
            here.send(EXAMPLES[kind])


def test_the_table_knows_every_message():
    known = {Hello, *EXAMPLES}
    assert set().union(*(kinds for r in RECEIVES.values() for kinds in r.values())) == known


# ------------------------------------------------------------------------------- greetings


def test_greetings_cross():
    edge, cloud = connection(Role.EDGE), connection(Role.CLOUD)
    edge2 = Connection(Role.EDGE, greet(Role.EDGE), now=0.0)
    (frame,) = edge2.take()
    assert cloud.receive(frame, 0.1) == greet(Role.EDGE)
    assert edge.receive(encode(greet(Role.CLOUD)), 0.1) == greet(Role.CLOUD)
    assert cloud.state is edge.state is State.READY
    assert edge2.sent_bytes == cloud.received_bytes == len(frame)


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"versions": (2, 3)}, Code.VERSION, "speaks version 1"),
        ({"versions": ()}, Code.VERSION, "version"),
        ({"fingerprint": "toy-other"}, Code.VOCABULARY, "different tokenizers"),
        ({"vocab_size": 101}, Code.VOCABULARY, "101 ids"),
        ({"role": "cloud"}, Code.STATE, "must be edge"),
        ({"role": "chicken"}, Code.STATE, "must be edge"),
    ],
)
def test_strangers_are_refused(changes: dict[str, object], code: Code, says: str):
    """Field case 12, old versions: before any session, with a reason."""
    cloud = connection(Role.CLOUD)
    frame = encode(msgspec.structs.replace(greet(Role.EDGE), **changes))
    with pytest.raises(RemoteError) as refused:
        cloud.receive(frame, 0.0)
    assert refused.value.code is code
    assert says in refused.value.message
    cloud.fail(refused.value)
    (last,) = cloud.take()
    edge = connection(Role.EDGE)
    told = edge.receive(last, 0.0)
    assert told == Error(code=code, message=refused.value.message)
    assert edge.state is cloud.state is State.CLOSED
    assert edge.deadline == math.inf


def test_wider_logits_are_normal():
    edge = connection(Role.EDGE)
    edge.receive(encode(greet(Role.CLOUD, logits_width=152)), 0.0)
    assert edge.state is State.READY


def test_the_smaller_limit_holds():
    small = Limits(frame_bytes=1000, window=8, sessions=99, prompt_tokens=50)
    edge = connection(Role.EDGE)
    edge.receive(encode(greet(Role.CLOUD, limits=small)), 0.0)
    assert edge.limits == Limits(frame_bytes=1000, window=8, sessions=64, prompt_tokens=50)


def test_long_frames_are_refused_unread_and_never_sent():
    small = Limits(frame_bytes=600, window=8, sessions=8, prompt_tokens=5000)
    cloud = connection(Role.CLOUD, State.READY, limits=small)
    with pytest.raises(RemoteError) as refused:
        cloud.receive(b"\x20" * 601, 0.0)
    assert refused.value.code is Code.TOO_LARGE
    edge = connection(Role.EDGE)
    edge.receive(encode(greet(Role.CLOUD, limits=small)), 0.0)
    with pytest.raises(LocalError, match="takes 600"):
        edge.send(Draft(session=1, epoch=0, start=1, tokens=(2**31,) * 200))
    assert MAX_FRAME_BYTES > 600


def test_an_error_about_a_session_keeps_the_connection():
    edge = connection(Role.EDGE, State.READY)
    edge.receive(encode(Error(code=Code.BUSY, message="", session=3)), 0.0)
    assert edge.state is State.READY
    edge.receive(encode(Error(code=Code.INTERNAL, message="")), 0.0)
    assert edge.state is State.CLOSED


def test_draining_is_said_once():
    cloud = connection(Role.CLOUD, State.READY)
    cloud.drain()
    cloud.drain()
    assert [type(decode(f)) for f in cloud.take()] == [GoAway]


def test_fail_after_close_says_nothing():
    cloud = connection(Role.CLOUD, State.CLOSED)
    cloud.fail(RemoteError(Code.STATE, "late"))
    assert cloud.take() == []


# ------------------------------------------------------------------------------- heartbeats


@pytest.mark.parametrize("start", [0.0, 0.1, 1 / 3, 12345.678, 1e6 + 0.7])
def test_silence(start: float):
    """Field case 35. Waking exactly at the deadline always moves it: no busy loop."""
    here = Connection(Role.EDGE, greet(Role.EDGE), now=start, heartbeat=BEAT)
    here.receive(encode(greet(Role.CLOUD)), start)
    here.take()
    assert here.deadline == start + BEAT
    here.tick(here.deadline)
    assert [type(decode(f)) for f in here.take()] == [Ping]
    assert here.deadline == start + SILENT_BEATS * BEAT
    with pytest.raises(SilentPeerError):
        here.tick(here.deadline)


def test_ticking_early_does_nothing():
    here = connection(Role.EDGE, State.READY)
    here.tick(BEAT - 0.01)
    assert here.take() == []


def test_any_frame_is_a_sign_of_life():
    here = connection(Role.EDGE, State.READY)
    here.tick(BEAT)
    here.receive(encode(EXAMPLES[Tokens]), BEAT + 1.0)
    assert here.deadline == 2 * BEAT + 1.0


def test_silence_before_the_greeting_sends_nothing_and_ends():
    here = connection(Role.CLOUD)
    here.tick(BEAT)
    assert here.take() == []
    with pytest.raises(SilentPeerError):
        here.tick(SILENT_BEATS * BEAT)


def test_round_trip_is_measured():
    edge, cloud = connection(Role.EDGE, State.READY), connection(Role.CLOUD, State.READY)
    edge.ping(10.0)
    (ping,) = edge.take()
    cloud.receive(ping, 10.02)
    (pong,) = cloud.take()
    edge.receive(pong, 10.05)
    assert edge.rtt == pytest.approx(0.05)


@pytest.mark.parametrize("stamp", [math.nan, math.inf, -math.inf, 1e300, 11.0, -1e9])
def test_forged_stamps_change_nothing(stamp: float):
    edge = connection(Role.EDGE, State.READY)
    edge.receive(encode(Pong(stamp=stamp)), 10.0)
    assert edge.rtt is None


def test_no_ping_before_the_greeting():
    edge = connection(Role.EDGE)
    edge.ping(1.0)
    assert edge.take() == []


def test_a_closed_connection_needs_no_tick():
    edge = connection(Role.EDGE, State.CLOSED)
    edge.tick(1e9)
    assert edge.deadline == math.inf
