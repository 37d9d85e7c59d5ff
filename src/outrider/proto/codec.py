"""Messages to frames and back. One WebSocket binary message is one frame.

The first byte is the kind. Cold kinds are followed by a MessagePack map; hot kinds are packed:

    varint   unsigned LEB128: 7 bits a byte, low bits first, high bit = more follows
    DRAFT    kind session epoch start flags count id*          (+ count float64 if flags & 1,
             + count sketches if flags & 2, + float64 threshold if flags & 4)
    VERDICT  kind session epoch start drafted accepted id queue step
    RELAXED  kind session epoch start drafted accepted id queue step strict count mark*
             spent max_jsd                                     (float64 each)
    TOKENS   kind session start queue step count id*
    PROPOSALS kind session epoch start drafted accepted first queue step count id* float64*
             (all ids, then all p(id))
    TOPK     kind session epoch start drafted accepted first queue step count gap* float32*
             log_total rest                                    (float64 each)
    CORRECT  kind session position tag value (+ float64 left if tag = 2)
             tag 0, 2: value = token; 1: value = have; 3: value = listed
    ROW      kind session position form count (+ count gaps if form = 1) float32*
             form 0: the ids are 0, 1, 2, ...

gaps: the first of ascending ids, then each less the one before less 1: ids that do not ascend
cannot be written. session, epoch, start, ... are varints; floats are IEEE 754 little-endian.
queue and step are microseconds. A decoder checks every count against the bytes that are really
there before it allocates, and every id against the limits (I5, I7; field cases 29, 30).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Final, NoReturn, get_args

import msgspec

from outrider.core.sparse import Sketch, SketchError, read_sketch
from outrider.proto.errors import LocalError, RemoteError
from outrider.proto.messages import (
    MAX_VALUE,
    Code,
    Cold,
    Correct,
    Draft,
    Load,
    Logprobs,
    Message,
    Proposals,
    Relaxed,
    Row,
    Tokens,
    TopK,
    Verdict,
)

MAX_FRAME_BYTES: Final = 4 * 1024 * 1024
"""Largest frame: a full row of a 262,144-id vocabulary is 2 MiB, a million-id prompt 4 MiB."""
MAX_VARINT_BYTES: Final = 5
"""Varints hold at most 35 bits; ids, positions and microseconds need 32."""
MAX_BLOCK: Final = 1024
"""Most ids in one hot frame: far above any window, small enough to refuse nonsense."""

K_COLD: Final = 0x10
K_DRAFT: Final = 0x20
K_VERDICT: Final = 0x21
K_TOKENS: Final = 0x22
K_PROPOSALS: Final = 0x23
K_CORRECT: Final = 0x24
K_ROW: Final = 0x25
K_RELAXED: Final = 0x26
K_TOPK: Final = 0x27
_ROW_DENSE: Final = 0
_ROW_LISTED: Final = 1
_TAG_TOKEN: Final = 0
_TAG_HAVE: Final = 1
_TAG_CHARGED: Final = 2
_TAG_LISTED: Final = 3
_HAS_Q: Final = 1
_HAS_SKETCHES: Final = 2
_HAS_THRESHOLD: Final = 4
_DRAFT_FLAGS: Final = (
    0,
    _HAS_Q,
    _HAS_SKETCHES,
    _HAS_SKETCHES | _HAS_THRESHOLD,
)
"""Combinations that mean something: a threshold is of the relaxed rule, like sketches."""
_LEAST_SKETCH: Final = 4
"""Bytes of the shortest sketch: a count, an id, a code."""
_MAX_LOAD_US: Final = MAX_VALUE

_COLD: Final = msgspec.msgpack.Decoder(Cold)
_COLD_TYPES: Final = get_args(Cold)


def _malformed(what: str) -> NoReturn:
    raise RemoteError(Code.MALFORMED, what)


class _Writer:
    __slots__ = ("data",)

    def __init__(self, kind: int) -> None:
        self.data = bytearray((kind,))

    def varint(self, *values: int) -> None:
        for value in values:
            if not 0 <= value <= MAX_VALUE:
                raise LocalError(f"{value} does not fit a varint")
            rest = value
            while rest > 0x7F:
                self.data.append(rest & 0x7F | 0x80)
                rest >>= 7
            self.data.append(rest)

    def doubles(self, values: tuple[float, ...]) -> None:
        self.data += struct.pack(f"<{len(values)}d", *values)

    def gaps(self, ids: Sequence[int]) -> None:
        """Strictly ascending ids."""
        self.varint(*(b - a - 1 for a, b in pairwise((-1, *ids))))

    def load(self, load: Load) -> None:
        self.varint(min(load.queue_us, _MAX_LOAD_US), min(load.step_us, _MAX_LOAD_US))


class _Reader:
    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 1

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def varint(self) -> int:
        value = shift = 0
        for _ in range(MAX_VARINT_BYTES):
            if self._at >= len(self._data):
                _malformed("the frame ends inside a number")
            byte = self._data[self._at]
            self._at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if value > MAX_VALUE:
                    _malformed("a number above 2**32")
                return value
            shift += 7
        _malformed("a number of more than five bytes")

    def count(self, each: int) -> int:
        """A count of things of at least `each` bytes, checked against what is left."""
        count = self.varint()
        if count > MAX_BLOCK:
            raise RemoteError(Code.TOO_LARGE, f"{count} entries in one frame, at most {MAX_BLOCK}")
        if count * each > self.left:
            _malformed(f"{count} entries announced, {self.left} bytes left")
        return count

    def ids(self, count: int) -> tuple[int, ...]:
        return tuple(self.varint() for _ in range(count))

    def gaps(self, count: int) -> tuple[int, ...]:
        """So many strictly ascending ids."""
        ids = tuple(accumulate((self.varint() + 1 for _ in range(count)), initial=-1))[1:]
        if ids and ids[-1] > MAX_VALUE:
            _malformed("an id above 2**32")
        return ids

    def doubles(self, count: int) -> tuple[float, ...]:
        raw = self.take(8 * count)
        return struct.unpack(f"<{count}d", raw)

    def take(self, size: int) -> bytes:
        if size > self.left:
            _malformed(f"{size} bytes announced, {self.left} left")
        raw = self._data[self._at : self._at + size]
        self._at += size
        return raw

    def sketch(self) -> Sketch:
        try:
            sketch, self._at = read_sketch(self._data, self._at)
        except SketchError as error:
            _malformed(str(error))
        return sketch

    def load(self) -> Load:
        return Load(queue_us=self.varint(), step_us=self.varint())

    def end(self) -> None:
        if self.left:
            _malformed(f"{self.left} bytes behind the end of the message")


def encode(message: Message) -> bytes:
    """One message as one frame."""
    if isinstance(message, _COLD_TYPES):
        return bytes((K_COLD,)) + msgspec.msgpack.encode(message)
    writer = _PACKERS[type(message)](message)
    return bytes(writer.data)


def decode(frame: bytes) -> Message:
    """One frame as one message. Raises RemoteError (MALFORMED, TOO_LARGE), nothing else."""
    if len(frame) > MAX_FRAME_BYTES:
        raise RemoteError(Code.TOO_LARGE, f"frame of {len(frame)} bytes")
    if not frame:
        _malformed("empty frame")
    if frame[0] == K_COLD:
        return _decode_cold(frame)
    unpack = _UNPACKERS.get(frame[0])
    if unpack is None:
        _malformed(f"unknown kind 0x{frame[0]:02x}")
    reader = _Reader(frame)
    message = unpack(reader)
    reader.end()
    return message


def _decode_cold(frame: bytes) -> Message:
    try:
        message = _COLD.decode(memoryview(frame)[1:])
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        # The library's text names fields and types, never the values a user sent.
        raise RemoteError(Code.MALFORMED, f"control message: {error}") from None
    if isinstance(message, Logprobs):
        values = (x for _, own, top in message.entries for x in (own, *(p for _, p in top)))
        if any(math.isnan(x) for x in values):
            _malformed("a log-probability that is no number")
    return message


def _pack_draft(m: Draft) -> _Writer:
    if any(part and len(part) != len(m.tokens) for part in (m.q, m.sketches)):
        raise LocalError("as many probabilities, or sketches, as drafts")
    flags = _HAS_Q * bool(m.q) | _HAS_SKETCHES * bool(m.sketches)
    if m.threshold is not None:
        flags |= _HAS_THRESHOLD
    if flags not in _DRAFT_FLAGS:
        raise LocalError("sketches go without q, a threshold with sketches")
    w = _Writer(K_DRAFT)
    w.varint(m.session, m.epoch, m.start, flags, len(m.tokens), *m.tokens)
    w.doubles(m.q)
    for sketch in m.sketches:
        w.data += sketch.to_bytes()
    if m.threshold is not None:
        w.doubles((m.threshold,))
    return w


def _unpack_draft(r: _Reader) -> Draft:
    session, epoch, start, flags = r.varint(), r.varint(), r.varint(), r.varint()
    if flags not in _DRAFT_FLAGS:
        _malformed(f"unknown draft flags {flags}")
    least = 1 + 8 * bool(flags & _HAS_Q) + _LEAST_SKETCH * bool(flags & _HAS_SKETCHES)
    count = r.count(least)
    return Draft(
        session=session,
        epoch=epoch,
        start=start,
        tokens=r.ids(count),
        q=r.doubles(count) if flags & _HAS_Q else (),
        sketches=tuple(r.sketch() for _ in range(count)) if flags & _HAS_SKETCHES else (),
        threshold=r.doubles(1)[0] if flags & _HAS_THRESHOLD else None,
    )


def _pack_verdict(m: Verdict) -> _Writer:
    w = _Writer(K_VERDICT)
    w.varint(m.session, m.epoch, m.start, m.drafted, m.accepted, m.token)
    w.load(m.load)
    return w


def _unpack_verdict(r: _Reader) -> Verdict:
    session, epoch, start, drafted, accepted, token = (r.varint() for _ in range(6))
    if accepted > drafted:
        _malformed("more drafts accepted than judged")
    return Verdict(
        session=session,
        epoch=epoch,
        start=start,
        drafted=drafted,
        accepted=accepted,
        token=token,
        load=r.load(),
    )


def _pack_relaxed(m: Relaxed) -> _Writer:
    w = _Writer(K_RELAXED)
    w.varint(m.session, m.epoch, m.start, m.drafted, m.accepted, m.token)
    w.load(m.load)
    w.varint(m.strict, len(m.marks), *m.marks)
    w.doubles((m.spent, m.max_jsd))
    return w


def _unpack_relaxed(r: _Reader) -> Relaxed:
    session, epoch, start, drafted, accepted, token = (r.varint() for _ in range(6))
    load, strict = r.load(), r.varint()
    marks = r.ids(r.count(1))
    if accepted > drafted or strict > min(accepted + 1, drafted):
        _malformed("more drafts accepted than judged")
    if any(b <= a for a, b in pairwise((-1, *marks))) or (marks and marks[-1] >= accepted):
        _malformed("marks must be ascending indices of accepted drafts")
    spent, max_jsd = r.doubles(2)
    return Relaxed(
        session=session,
        epoch=epoch,
        start=start,
        drafted=drafted,
        accepted=accepted,
        token=token,
        strict=strict,
        marks=marks,
        spent=spent,
        max_jsd=max_jsd,
        load=load,
    )


def _pack_tokens(m: Tokens) -> _Writer:
    w = _Writer(K_TOKENS)
    w.varint(m.session, m.start)
    w.load(m.load)
    w.varint(len(m.tokens), *m.tokens)
    return w


def _unpack_tokens(r: _Reader) -> Tokens:
    session, start = r.varint(), r.varint()
    load = r.load()
    return Tokens(session=session, start=start, load=load, tokens=r.ids(r.count(1)))


def _pack_proposals(m: Proposals) -> _Writer:
    w = _Writer(K_PROPOSALS)
    w.varint(m.session, m.epoch, m.start, m.drafted, m.accepted, m.first)
    w.load(m.load)
    w.varint(len(m.tokens), *m.tokens)
    w.doubles(m.p)
    return w


def _unpack_proposals(r: _Reader) -> Proposals:
    session, epoch, start, drafted, accepted, first = (r.varint() for _ in range(6))
    load = r.load()
    count = r.count(9)
    tokens = r.ids(count)
    return Proposals(
        session=session,
        epoch=epoch,
        start=start,
        drafted=drafted,
        accepted=accepted,
        first=first,
        load=load,
        tokens=tokens,
        p=r.doubles(count),
    )


def _pack_top_k(m: TopK) -> _Writer:
    if len(m.weights) != 4 * len(m.ids):
        raise LocalError("one float32 for each id")
    w = _Writer(K_TOPK)
    w.varint(m.session, m.epoch, m.start, m.drafted, m.accepted, m.first)
    w.load(m.load)
    w.varint(len(m.ids))
    w.gaps(m.ids)
    w.data += m.weights
    w.doubles((m.log_total, m.rest))
    return w


def _unpack_top_k(r: _Reader) -> TopK:
    session, epoch, start, drafted, accepted, first = (r.varint() for _ in range(6))
    load = r.load()
    count = r.count(5)
    ids, weights = r.gaps(count), r.take(4 * count)
    log_total, rest = r.doubles(2)
    return TopK(
        session=session,
        epoch=epoch,
        start=start,
        drafted=drafted,
        accepted=accepted,
        first=first,
        ids=ids,
        weights=weights,
        log_total=log_total,
        rest=rest,
        load=load,
    )


def _pack_correct(m: Correct) -> _Writer:
    w = _Writer(K_CORRECT)
    if m.token is not None:
        tag, value = _TAG_TOKEN if m.left is None else _TAG_CHARGED, m.token
    else:
        tag, value = (_TAG_LISTED, m.listed) if m.listed else (_TAG_HAVE, m.have)
    w.varint(m.session, m.position, tag, value)
    if tag == _TAG_CHARGED and m.left is not None:
        w.doubles((m.left,))
    return w


def _unpack_correct(r: _Reader) -> Correct:
    session, position, tag, value = (r.varint() for _ in range(4))
    if tag == _TAG_TOKEN:
        return Correct(session=session, position=position, token=value)
    if tag == _TAG_HAVE:
        return Correct(session=session, position=position, have=value)
    if tag == _TAG_CHARGED:
        return Correct(session=session, position=position, token=value, left=r.doubles(1)[0])
    if tag == _TAG_LISTED and value:
        return Correct(session=session, position=position, listed=value)
    _malformed(f"unknown correction tag {tag}, or no ids listed")


def _pack_row(m: Row) -> _Writer:
    if len(m.weights) % 4 or (m.ids is not None and len(m.weights) != 4 * len(m.ids)):
        raise LocalError("one float32 for each id")
    w = _Writer(K_ROW)
    form = _ROW_DENSE if m.ids is None else _ROW_LISTED
    w.varint(m.session, m.position, form, len(m.weights) // 4)
    w.gaps(m.ids or ())
    w.data += m.weights
    return w


def _unpack_row(r: _Reader) -> Row:
    session, position, form, count = (r.varint() for _ in range(4))
    if form not in (_ROW_DENSE, _ROW_LISTED):
        _malformed(f"unknown form of a row {form}")
    if count * (4 + form) > r.left:  # before anything is allocated for so many
        _malformed(f"{count} entries announced, {r.left} bytes left")
    ids = r.gaps(count) if form == _ROW_LISTED else None
    return Row(session=session, position=position, ids=ids, weights=r.take(4 * count))


_PACKERS: Final[dict[type, Callable[..., _Writer]]] = {
    Draft: _pack_draft,
    Verdict: _pack_verdict,
    Relaxed: _pack_relaxed,
    Tokens: _pack_tokens,
    Proposals: _pack_proposals,
    TopK: _pack_top_k,
    Correct: _pack_correct,
    Row: _pack_row,
}
_UNPACKERS: Final[dict[int, Callable[[_Reader], Message]]] = {
    K_DRAFT: _unpack_draft,
    K_VERDICT: _unpack_verdict,
    K_RELAXED: _unpack_relaxed,
    K_TOKENS: _unpack_tokens,
    K_PROPOSALS: _unpack_proposals,
    K_TOPK: _unpack_top_k,
    K_CORRECT: _unpack_correct,
    K_ROW: _unpack_row,
}
