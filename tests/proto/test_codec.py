"""Frames: golden bytes, round trips, and what a decoder may do with anything else."""

from __future__ import annotations

import math
import pickle
import struct

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outrider.core.sparse import Sketch
from outrider.proto.codec import MAX_BLOCK, MAX_FRAME_BYTES, decode, encode
from outrider.proto.errors import LocalError, RemoteError
from outrider.proto.messages import (
    MAX_VALUE,
    Cancel,
    Code,
    Correct,
    Done,
    Draft,
    Error,
    GoAway,
    Hello,
    Limits,
    Load,
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
    Sampling,
    Steer,
    Tokens,
    TopK,
    Verdict,
)

HALF = "000000000000e03f"
QUARTER = "000000000000d03f"

GOLDEN: list[tuple[Message, str]] = [
    (
        Draft(session=1, epoch=2, start=300, tokens=(5, 128, 151935)),
        "20 01 02 ac02 00 03 05 8001 ffa209",
    ),
    (Draft(session=1, epoch=0, start=7, tokens=()), "20 01 00 07 00 00"),
    (
        Draft(session=1, epoch=0, start=7, tokens=(3, 4), q=(0.5, 0.25)),
        f"20 01 00 07 01 02 03 04 {HALF} {QUARTER}",
    ),
    (
        Verdict(
            session=1,
            epoch=2,
            start=300,
            drafted=4,
            accepted=3,
            token=9,
            load=Load(queue_us=127, step_us=60000),
        ),
        "21 01 02 ac02 04 03 09 7f e0d403",
    ),
    (
        Tokens(session=2, start=10, tokens=(1, 2), load=Load(queue_us=1, step_us=2)),
        "22 02 0a 01 02 02 01 02",
    ),
    (
        Proposals(
            session=1,
            epoch=3,
            start=8,
            drafted=4,
            accepted=1,
            first=0,
            tokens=(7, 300),
            p=(0.5, 0.25),
        ),
        f"23 01 03 08 04 01 00 00 00 02 07 ac02 {HALF} {QUARTER}",
    ),
    (
        Draft(
            session=1,
            epoch=3,
            start=8,
            tokens=(7,),
            sketches=(Sketch(ids=(7, 300), codes=(1420, 1420)),),
            threshold=0.25,
        ),
        f"20 01 03 08 06 01 07 02 07 a402 8c058c05 {QUARTER}",
    ),
    (
        Relaxed(
            session=1,
            epoch=3,
            start=8,
            drafted=4,
            accepted=3,
            token=9,
            strict=1,
            marks=(1, 2),
            spent=0.5,
            max_jsd=0.25,
            load=Load(queue_us=1, step_us=2),
        ),
        f"26 01 03 08 04 03 09 01 02 01 02 01 02 {HALF} {QUARTER}",
    ),
    (Correct(session=1, position=9, token=42), "24 01 09 00 2a"),
    (Correct(session=1, position=9, have=16), "24 01 09 01 10"),
    (Correct(session=1, position=9, listed=64), "24 01 09 03 40"),
    (Correct(session=1, position=9, token=42, left=0.25), f"24 01 09 02 2a {QUARTER}"),
    (
        TopK(
            session=1,
            epoch=3,
            start=8,
            drafted=4,
            accepted=1,
            first=16,
            ids=(7, 8, 300),
            weights=struct.pack("<3f", -1.0, 0.5, -1.0),
            log_total=0.5,
            rest=0.25,
            load=Load(queue_us=1, step_us=2),
        ),
        f"27 01 03 08 04 01 10 01 02 03 07 00 a302 000080bf 0000003f 000080bf {HALF} {QUARTER}",
    ),
    (
        Row(session=1, position=9, ids=(3, 5), weights=struct.pack("<2f", -1.0, 0.5)),
        "25 01 09 01 02 03 01 000080bf 0000003f",
    ),
    (
        Row(session=1, position=9, ids=None, weights=struct.pack("<2f", -1.0, 0.5)),
        "25 01 09 00 02 000080bf 0000003f",
    ),
    (
        Steer(session=5, step="wait"),
        "10 83 a474797065 a57374656572 a773657373696f6e 05 a473746570 a477616974",
    ),
    (
        Pressure(session=5, window=2),
        "10 83 a474797065 a87072657373757265 a773657373696f6e 05 a677696e646f77 02",
    ),
    (Cancel(session=5), "10 82 a474797065 a663616e63656c a773657373696f6e 05"),
    (Ping(stamp=0.5), "10 82 a474797065 a470696e67 a57374616d70 cb3fe0000000000000"),
]


@pytest.mark.parametrize(
    ("message", "octets"), GOLDEN, ids=lambda v: type(v).__name__ if not isinstance(v, str) else ""
)
def test_golden_bytes(message: Message, octets: str):
    """A second implementation must produce and accept exactly these (docs/protocol.md)."""
    assert encode(message) == bytes.fromhex(octets)
    assert decode(bytes.fromhex(octets)) == message


def test_sizes_promised():
    """Issue 3: 8 drafts under 32 bytes, 3 bytes an id, 6 bytes of a coupled verdict's own."""
    draft = Draft(session=1, epoch=9, start=2000, tokens=tuple(range(151_928, 151_936)))
    assert len(encode(draft)) < 32
    assert len(encode(draft)) - len(encode(Draft(session=1, epoch=9, start=2000, tokens=()))) == 24
    plain = Verdict(session=1, epoch=9, start=2000, drafted=8, accepted=8, token=151_935)
    assert len(encode(plain)) <= 8 + 6


count = st.integers(0, MAX_VALUE)
ids = st.lists(count, max_size=20).map(tuple)
unit = st.floats(0.0, 1.0)
load = st.builds(Load, queue_us=count, step_us=count)


@st.composite
def with_numbers(draw: st.DrawFn, build, **fields):  # type: ignore[no-untyped-def]
    name = fields.pop("name")
    tokens = draw(ids)
    numbers = tuple(draw(unit) for _ in tokens)
    return build(tokens=tokens, **{name: numbers}, **{k: draw(v) for k, v in fields.items()})


@st.composite
def verdicts(draw: st.DrawFn) -> Verdict:
    drafted = draw(count)
    return Verdict(
        session=draw(count),
        epoch=draw(count),
        start=draw(count),
        drafted=drafted,
        accepted=draw(st.integers(0, drafted)),
        token=draw(count),
        load=draw(load),
    )


@st.composite
def relaxed(draw: st.DrawFn) -> Relaxed:
    plain = draw(verdicts())
    marks = draw(st.sets(st.integers(0, plain.accepted - 1), max_size=9)) if plain.accepted else ()
    return Relaxed(
        session=plain.session,
        epoch=plain.epoch,
        start=plain.start,
        drafted=plain.drafted,
        accepted=plain.accepted,
        token=plain.token,
        strict=draw(st.integers(0, min(plain.accepted + 1, plain.drafted))),
        marks=tuple(sorted(marks)),
        spent=draw(unit),
        max_jsd=draw(unit),
        load=plain.load,
    )


@st.composite
def sketched_drafts(draw: st.DrawFn) -> Draft:
    tokens = draw(ids)
    even = Sketch(ids=(3, 900), codes=(1420, 1420))  # 1420 steps of 2**-11 nats: about a half
    part = Sketch(ids=(5,), codes=(1420,), rest=0.5)
    return Draft(
        session=draw(count),
        epoch=draw(count),
        start=draw(count),
        tokens=tokens,
        sketches=tuple(draw(st.sampled_from((even, part))) for _ in tokens),
        threshold=draw(st.none() | unit) if tokens else None,
    )


ascending = st.sets(count, max_size=20).map(lambda found: tuple(sorted(found)))


def weights_of(n: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=4 * n, max_size=4 * n)


@st.composite
def lists(draw: st.DrawFn) -> TopK:
    listed = draw(ascending)
    plain = draw(verdicts())
    return TopK(
        session=plain.session,
        epoch=plain.epoch,
        start=plain.start,
        drafted=plain.drafted,
        accepted=plain.accepted,
        first=draw(count),
        ids=listed,
        weights=draw(weights_of(len(listed))),
        log_total=draw(st.floats(allow_nan=False)),
        rest=draw(unit),
        load=plain.load,
    )


@st.composite
def rows(draw: st.DrawFn) -> Row:
    listed = draw(st.none() | ascending)
    n = draw(st.integers(0, 20)) if listed is None else len(listed)
    return Row(session=draw(count), position=draw(count), ids=listed, weights=draw(weights_of(n)))


short = st.text(max_size=20)
number = st.floats(allow_nan=False)
sampling = st.builds(
    Sampling,
    temperature=number,
    top_k=st.integers(-(2**40), 2**40),
    top_p=number,
    min_p=number,
    repetition_penalty=number,
    presence_penalty=number,
    frequency_penalty=number,
    logit_bias=st.dictionaries(st.integers(-5, 2**40), number, max_size=4),
    max_tokens=st.integers(-5, 2**40),
    min_tokens=st.integers(-5, 2**40),
    stop=st.lists(short, max_size=3).map(tuple),
    stop_token_ids=st.lists(st.integers(-5, 2**40), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(-3, 30),
    given=st.tuples(count, count),
    seed=st.integers(-5, 2**63),
)
MESSAGES = st.one_of(
    with_numbers(Draft, name="q", session=count, epoch=count, start=count),
    st.builds(Draft, session=count, epoch=count, start=count, tokens=ids),
    sketched_drafts(),
    verdicts(),
    relaxed(),
    st.builds(Tokens, session=count, start=count, tokens=ids, load=load),
    with_numbers(
        Proposals,
        name="p",
        session=count,
        epoch=count,
        start=count,
        drafted=count,
        accepted=count,
        first=count,
        load=load,
    ),
    lists(),
    rows(),
    st.builds(Correct, session=count, position=count, token=count, left=st.none() | unit),
    st.builds(Correct, session=count, position=count, listed=count),
    st.builds(Correct, session=count, position=count, have=count),
    st.builds(
        Hello,
        versions=st.lists(count, max_size=3).map(tuple),
        role=short,
        agent=short,
        fingerprint=short,
        vocab_size=count,
        logits_width=count,
        context_length=count,
        limits=st.builds(
            Limits, frame_bytes=count, window=count, sessions=count, prompt_tokens=count
        ),
        rules=st.lists(short, max_size=3).map(tuple),
        deterministic=st.booleans(),
        model=short,
    ),
    st.builds(
        Open,
        session=count,
        uid=st.binary(max_size=20),
        prompt=ids,
        committed=ids,
        sampling=sampling,
        rule=short,
        step=short,
        take=short,
        cloud_draft=count,
        held=st.booleans(),
        top_k_reply=count,
        tv_left=st.floats(allow_nan=False),
        due_ms=count,
    ),
    st.builds(
        Resume, session=count, uid=st.binary(max_size=20), base=count, digest=st.binary(max_size=20)
    ),
    st.builds(Steer, session=count, step=short),
    st.builds(Pressure, session=count, window=st.none() | count),
    st.builds(Marks, session=count, positions=ids, spent=number, max_jsd=number),
    st.builds(Opened, session=count, base=count),
    st.builds(
        Done, session=count, reason=short, output_tokens=count, digest=st.binary(max_size=20)
    ),
    st.builds(Error, code=st.sampled_from(Code), message=short, session=st.none() | count),
    st.builds(Cancel, session=count),
    st.builds(GoAway, message=short),
    st.builds(Ping, stamp=number),
    st.builds(Pong, stamp=number),
    st.builds(
        Logprobs,
        session=count,
        start=count,
        entries=st.lists(
            st.tuples(count, number, st.lists(st.tuples(count, number), max_size=2).map(tuple)),
            max_size=3,
        ).map(tuple),
    ),
)


@given(MESSAGES)
@settings(max_examples=300)
def test_round_trip(message: Message):
    assert decode(encode(message)) == message


@given(MESSAGES, st.data())
@settings(max_examples=200)
def test_a_prefix_or_a_tail_is_refused(message: Message, data: st.DataObject):
    frame = encode(message)
    with pytest.raises(RemoteError):
        decode(frame + b"\x00")
    cut = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(RemoteError):
        decode(frame[:cut])


@given(st.binary(max_size=200))
@example(b"")
@example(b"\x10")
@settings(max_examples=400)
def test_random_bytes_raise_nothing_but_remote_errors(frame: bytes):
    refused: list[RemoteError] = []
    for kind in (b"", b"\x10", b"\x20", b"\x21", b"\x22", b"\x23", b"\x24", b"\x25", b"\x27"):
        try:
            decode(kind + frame)
        except RemoteError as error:
            refused.append(error)
    assert all(e.session is None and len(e.message) < 500 for e in refused)


@given(MESSAGES, st.data())
@settings(max_examples=300)
def test_a_flipped_byte_raises_nothing_but_remote_errors(message: Message, data: st.DataObject):
    frame = bytearray(encode(message))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    try:
        decode(bytes(frame))
    except RemoteError:
        return


@pytest.mark.parametrize(
    ("octets", "code", "says"),
    [
        ("", Code.MALFORMED, "empty"),
        ("7f", Code.MALFORMED, "unknown kind 0x7f"),
        ("00", Code.MALFORMED, "unknown kind"),
        ("20 01", Code.MALFORMED, "inside a number"),
        ("20 ff ff ff ff 1f", Code.MALFORMED, "above 2**32"),  # would be negative as int32
        ("20 80 80 80 80 80 01", Code.MALFORMED, "more than five bytes"),
        ("20 01 00 07 08 00", Code.MALFORMED, "flags"),
        ("20 01 00 07 04 00" + HALF, Code.MALFORMED, "flags"),  # a threshold without sketches
        ("20 01 00 07 02 01 05 41", Code.MALFORMED, "entries announced"),
        ("20 01 00 07 02 01 05 00 00 00 00 00", Code.MALFORMED, "sketch of 0 ids"),
        ("26 01 00 07 01 01 05 00 00 01 01 01" + HALF + HALF, Code.MALFORMED, "marks"),
        ("26 01 00 07 01 00 05 00 00 02 00" + HALF + HALF, Code.MALFORMED, "more drafts"),
        ("20 01 00 07 00 ff ff ff ff 0f", Code.TOO_LARGE, "4294967295 entries"),  # field case 30
        ("20 01 00 07 00 90 4e" + "01" * 10_000, Code.TOO_LARGE, "10000 entries"),
        ("20 01 00 07 00 03 01 02", Code.MALFORMED, "3 entries announced"),
        ("20 01 00 07 01 02 03 04" + HALF, Code.MALFORMED, "2 entries announced"),
        ("21 01 00 07 02 03 05 00 00", Code.MALFORMED, "more drafts accepted"),
        ("24 01 09 02 2a", Code.MALFORMED, "bytes announced"),
        ("24 01 09 03 00", Code.MALFORMED, "no ids listed"),
        ("24 01 09 04 2a", Code.MALFORMED, "correction tag"),
        ("25 01 09 00 ff ff ff ff 0f", Code.MALFORMED, "entries announced"),
        ("25 01 09 02 00", Code.MALFORMED, "form"),
        ("25 01 09 01 02 03 ff ff ff ff 0f 00000000 00000000", Code.MALFORMED, "above 2**32"),
        ("27 01 00 07 01 00 00 00 00 81 08", Code.TOO_LARGE, "1025 entries"),
        ("27 01 00 07 01 00 00 00 00 02 01 01 00000000", Code.MALFORMED, "entries announced"),
        ("10 80", Code.MALFORMED, "control message"),
        ("10 dd ff ff ff ff", Code.MALFORMED, "control message"),
        ("10 82 a474797065 a663616e63656c a773657373696f6e ff", Code.MALFORMED, "control"),  # -1
        ("10 81 a474797065 a663616e63656c", Code.MALFORMED, "session"),  # a field is missing
        ("10 81 a474797065 a461626364", Code.MALFORMED, "control message"),  # unknown message
    ],
)
def test_refusals(octets: str, code: Code, says: str):
    with pytest.raises(RemoteError) as refused:
        decode(bytes.fromhex(octets))
    assert refused.value.code is code
    assert says in refused.value.message


def test_unknown_fields_are_refused():
    frame = b"\x10" + msgspec.msgpack.encode({"type": "cancel", "session": 1, "extra": 1})
    with pytest.raises(RemoteError):
        decode(frame)


def test_frames_have_a_largest_size():
    with pytest.raises(RemoteError) as refused:
        decode(bytes(MAX_FRAME_BYTES + 1))
    assert refused.value.code is Code.TOO_LARGE


def test_a_pickle_is_only_bytes():
    """Field case 29: nothing that arrives is ever run."""

    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return pytest.fail, ("ran code from the wire",)

    for kind in (b"", b"\x10", b"\x20"):
        with pytest.raises(RemoteError):
            decode(kind + pickle.dumps(Trap()))


def test_deep_nesting_is_refused():
    with pytest.raises(RemoteError):
        decode(b"\x10" + b"\x91" * 200_000)


@pytest.mark.parametrize(
    "message",
    [
        Draft(session=-1, epoch=0, start=0, tokens=()),
        Draft(session=2**32, epoch=0, start=0, tokens=()),
        Draft(session=1, epoch=0, start=0, tokens=(1, 2), q=(0.5,)),
        Row(session=1, position=0, ids=(1,), weights=b""),
        Row(session=1, position=0, ids=None, weights=b"123"),
        Row(session=1, position=0, ids=(2, 1), weights=bytes(8)),
        Row(session=1, position=0, ids=(1, 1), weights=bytes(8)),
        TopK(
            session=1,
            epoch=0,
            start=0,
            drafted=1,
            accepted=0,
            first=0,
            ids=(1, 2),
            weights=bytes(4),
            log_total=0.0,
            rest=0.0,
        ),
    ],
)
def test_our_own_mistakes_are_local_errors(message: Message):
    with pytest.raises(LocalError):
        encode(message)


def test_loads_beyond_an_hour_are_capped():
    sent = Tokens(session=1, start=0, tokens=(), load=Load(queue_us=2**40, step_us=1))
    received = decode(encode(sent))
    assert isinstance(received, Tokens)
    assert received.load == Load(queue_us=MAX_VALUE, step_us=1)


def test_largest_block_fits():
    message = Tokens(session=1, start=0, tokens=tuple(range(MAX_BLOCK)))
    assert decode(encode(message)) == message


def test_probabilities_travel_to_the_bit():
    values = (0.1, math.nextafter(0.3, 1.0), 5e-324, 1.0)
    message = Draft(session=1, epoch=0, start=0, tokens=(1, 2, 3, 4), q=values)
    received = decode(encode(message))
    assert isinstance(received, Draft)
    assert received.q == values
