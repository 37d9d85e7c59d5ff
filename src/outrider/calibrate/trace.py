"""Recorded text: at every position of the target's own answer, what a draft would have guessed.

The coupled rule makes this a complete record. A draft is judged against the target's own token
of the same position under the same noise, and while drafts stand the context is the target's
text; so the strict verdict of *any* block, of any length, at any start can be read off
(`runs`). Under a relaxed threshold the text would go another way behind the first token that the
strict rule refuses; there the record stands in for text that was not made. That is an
approximation, and every figure for T > 0 that rests on it says so.

A file is JSON lines: one header, then one line an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from outrider.control.base import CalibrationError
from outrider.control.calibration import ModelFacts

FORMAT: Final = "outrider-traces"
VERSION: Final = 1

BoolArray = npt.NDArray[np.bool_]
F64Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the records of a file have in common. Times in seconds."""

    format: str = FORMAT
    version: int = VERSION
    outrider: str
    """Version of the package that wrote it."""
    target: ModelFacts
    draft: ModelFacts
    temperature: float
    seed: int
    """Answer number i was drawn with seed + i."""
    max_tokens: int
    data: dict[str, int]
    """Prompts by task."""
    data_digest: str
    """sha256 (hex) of all prompts."""
    draft_seconds: float
    """t_d, measured: one draft token behind 128 ids."""
    verify_seconds: list[tuple[int, float]]
    """t_v by rows, measured likewise."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One answer of n positions; all lists have n entries."""

    task: str
    tokens: list[int]
    """y: the target's own."""
    drafts: list[int]
    """x: what the draft says behind the same text, under the same noise."""
    jsd: list[float]
    """Jensen-Shannon divergence of p and q, nats."""
    tv: list[float]
    """Total variation of p and q."""
    p: list[float]
    """p(x)."""
    q: list[float]
    """q(x)."""

    def __post_init__(self) -> None:
        lengths = {len(part) for part in (self.tokens, self.drafts, self.jsd, self.tv)}
        lengths |= {len(self.p), len(self.q)}
        if len(lengths) != 1:
            raise ValueError(f"lists of {sorted(lengths)} entries in one answer")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def strict(self) -> BoolArray:
        """bool [n]: the draft is the target's own token."""
        same: BoolArray = np.array(self.tokens) == np.array(self.drafts)
        return same


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """A file in memory."""

    header: TraceHeader
    answers: tuple[Answer, ...]

    @property
    def positions(self) -> int:
        return sum(map(len, self.answers))


def runs(stands: BoolArray) -> IntArray:
    """int64 [n]: how many positions in a row stand, from each position on."""
    lengths = np.zeros(len(stands), dtype=np.int64)
    run = 0
    for i in range(len(stands) - 1, -1, -1):
        run = run + 1 if stands[i] else 0
        lengths[i] = run
    return lengths


def leading(stands: BoolArray) -> int:
    """How many entries stand before the first that does not."""
    return len(stands) if stands.all() else int(stands.argmin())


def write(path: Path, header: TraceHeader, answers: Sequence[Answer]) -> None:
    """The whole file or none of it: written beside `path`, then renamed."""
    encode = msgspec.json.Encoder().encode
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            for row in (header, *answers):
                file.write(encode(row) + b"\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read(path: Path) -> Traces:
    """Raises CalibrationError, naming file and line, for anything that is no trace file."""
    lines = _lines(path)
    try:
        header = msgspec.json.decode(next(lines)[1], type=TraceHeader)
    except (StopIteration, msgspec.DecodeError) as error:
        raise CalibrationError(f"{path.name} is no trace file ({error}); record one") from None
    if (header.format, header.version) != (FORMAT, VERSION):
        raise CalibrationError(
            f"{path.name} is {header.format} version {header.version}; this Outrider reads "
            f"{FORMAT} version {VERSION}: record it anew"
        )
    decoder = msgspec.json.Decoder(Answer)
    answers = []
    for number, line in lines:
        try:
            answers.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise CalibrationError(f"{path.name}, line {number}: {error}") from None
    return Traces(header=header, answers=tuple(answers))


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            yield number, line
