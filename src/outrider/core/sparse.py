"""Sketches: what the cloud is told of a draft's distribution q (docs/architecture.md, Acceptance).

A sketch names the K likeliest ids of q with their weights, and the weight of all other ids
together. The edge draws its draft from the very distribution the sketch tells of: `sketched`
puts the listed weights on a grid first (16-bit codes, STEP nats apart) and measures the rest
after rounding it to float32. So both sides know the same numbers, up to the last bits of
float64; nothing is lost between sampling and judging, only before sampling.

Bytes, little-endian; K = 16 takes 73 where the gaps between ids are of two bytes (128 to
16,511), a single certain id at most 8:

    1       number of ids n (1 to 64); bit 7 set when a rest follows
    1-5     the first id, then the n - 1 gaps less one: LEB128, shortest form
    2 n     codes, uint16
    8       the weight of the rest, float64, when there is one
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Final

import numpy as np

from outrider.core import rng
from outrider.core.sampling import Distribution, F64Array, FloatRow, IdArray, likeliest
from outrider.core.tokens import ParameterError

STEP: Final = 2.0**-11
"""Nats between two codes: a listed probability moves by at most a factor exp(+-STEP/2), one
part in 4,096. A power of two, so that every weight -code * STEP is exact in float32."""
MAX_CODE: Final = 2**16 - 1
"""Codes reach down to exp(-32) = 1.3e-14; a less likely id is never listed but part of the rest."""
MAX_SKETCH: Final = 64
"""Most ids of a sketch: about 270 bytes, and 64 drafts of them fit a frame."""
MAX_ID: Final = 2**31 - 1

_REST: Final = 0x80
_SLACK: Final = STEP
"""How far the log of a sketch's total may be from 0. Quantising moves it by STEP/2 at most."""


class SketchError(ValueError):
    """Bytes or numbers that are no sketch of any distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """The likeliest ids of a distribution with their weights, and the weight of the rest.

    The probability of ids[i] is exp(-codes[i] * STEP) / total, that of all ids not listed
    rest / total. Raises SketchError unless there are 1 to 64 ids, strictly ascending in
    [0, 2**31), with codes in [0, 65535], a finite rest >= 0, and a total within STEP nats of 1.
    """

    ids: tuple[int, ...]
    codes: tuple[int, ...]
    rest: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= len(self.ids) <= MAX_SKETCH or len(self.codes) != len(self.ids):
            raise SketchError(
                f"{len(self.ids)} ids with {len(self.codes)} codes; there must be as many codes "
                f"as ids, 1 to {MAX_SKETCH}"
            )
        if any(b <= a for a, b in zip((-1, *self.ids), self.ids, strict=False)):
            raise SketchError("ids must be strictly ascending, from 0")
        if self.ids[-1] > MAX_ID:
            raise SketchError(f"id {self.ids[-1]} is above {MAX_ID}")
        if not 0 <= min(self.codes) <= max(self.codes) <= MAX_CODE:
            raise SketchError(f"codes must be in [0, {MAX_CODE}]")
        if not (self.rest >= 0.0 and math.isfinite(self.rest)):
            raise SketchError(f"the weight of the rest is {self.rest}")
        if abs(math.log(self.total)) > _SLACK:
            raise SketchError(f"probabilities sum to {self.total:.6g} instead of 1")

    @property
    def total(self) -> float:
        """What the weights sum to: 1 up to the quantising. It cancels out of every probability."""
        return float(_weights(self.codes).sum()) + self.rest

    @property
    def tail(self) -> float:
        """Probability of all ids that are not listed."""
        return self.rest / self.total

    def probabilities(self) -> F64Array:
        """Of the listed ids: float64 [n], aligned with `ids`; sums to 1 - tail."""
        weights = _weights(self.codes)
        p: F64Array = weights / (float(weights.sum()) + self.rest)
        return p

    def may_draw(self, token: int) -> bool:
        """False when `token` cannot have come from this distribution."""
        return self.rest > 0.0 or token in self.ids

    def to_bytes(self) -> bytes:
        """See the module docstring."""
        out = bytearray([len(self.ids) | (_REST if self.rest else 0)])
        for before, token in zip((-1, *self.ids), self.ids, strict=False):
            _put_varint(out, token - before - 1)
        out += struct.pack(f"<{len(self.codes)}H", *self.codes)
        if self.rest:
            out += struct.pack("<d", self.rest)
        return bytes(out)

    @staticmethod
    def from_bytes(data: bytes) -> Sketch:
        """Exactly one sketch. Raises SketchError for anything else."""
        sketch, end = read_sketch(data, 0)
        if end != len(data):
            raise SketchError(f"{len(data) - end} bytes too many behind a sketch")
        return sketch


def read_sketch(data: bytes, start: int) -> tuple[Sketch, int]:
    """The sketch that begins at `start`, and where it ends. Raises SketchError."""
    if not 0 <= start < len(data):
        raise SketchError("a sketch is cut short")
    count, has_rest = data[start] & ~_REST, bool(data[start] & _REST)
    if not 1 <= count <= MAX_SKETCH:
        raise SketchError(f"a sketch of {count} ids; there are 1 to {MAX_SKETCH}")
    ids: list[int] = []
    at, last = start + 1, -1
    for _ in range(count):
        gap, at = _take_varint(data, at)
        last += gap + 1
        ids.append(last)
    end = at + 2 * count + (8 if has_rest else 0)
    if end > len(data):
        raise SketchError("a sketch is cut short")
    codes = struct.unpack_from(f"<{count}H", data, at)
    rest = struct.unpack_from("<d", data, end - 8)[0] if has_rest else 0.0
    if has_rest and rest == 0.0:
        raise SketchError("a rest of weight 0 must be left out")
    return Sketch(ids=tuple(ids), codes=codes, rest=rest), end


def sketched(q: Distribution, k: int) -> tuple[Sketch, Distribution]:
    """The sketch of `q` with its k likeliest ids, and the distribution to draw the draft from.

    Ties go to the lower id. The listed ids have exactly the sketch's probabilities there; each
    other id keeps its own up to float32's rounding and the common total, and those of total
    weight 0 are gone. Fewer than k ids are listed where q has fewer, or where they are below
    exp(-32). Raises ParameterError unless 1 <= k <= 64.
    """
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MAX_SKETCH:
        raise ParameterError("sketch", f"must list 1 to {MAX_SKETCH} ids, got {k!r}")
    logs = q.weights.astype(np.float64) - q.log_total
    best = likeliest(q.weights, k)
    best = best[logs[best] >= -STEP * MAX_CODE]
    codes = np.maximum(np.rint(logs[best] / -STEP), 0.0).astype(np.int64)
    weights: FloatRow = logs.astype(np.float32)
    others = np.exp(weights.astype(np.float64))
    others[best] = 0.0
    rest = float(others.sum())
    sketch = Sketch(ids=tuple(q.ids[best].tolist()), codes=tuple(codes.tolist()), rest=rest)
    weights[best] = codes * -STEP
    ids: IdArray = q.ids
    if not rest:
        ids, weights = ids[best], weights[best]
    return sketch, Distribution(ids, weights, rng.token_offsets(ids), gap=q.gap)


def _weights(codes: tuple[int, ...]) -> F64Array:
    weights: F64Array = np.exp(np.array(codes, dtype=np.float64) * -STEP)
    return weights


def _put_varint(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _take_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data):
            raise SketchError("a sketch is cut short")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
        if shift > 28:
            raise SketchError("an id of more than 5 bytes")
    if byte == 0 and shift:
        raise SketchError("an id is not in its shortest form")
    return value, at
