"""A run on disk: JSON lines, the first says what is run, each further one is a finished cell.

A cell is (point, data, item, arm, seed): the smallest piece that is measured at once. Lines are
only appended, so what ends a run early takes at most the line that was being written. A file that
is deleted or emptied while it is written is made anew, with all that was in it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

FORMAT: Final = 1
TAKEN: Final = "{0} exists: go on with it (--resume {0}) or name another with -o"
MAX_MARKS: Final = 400
"""Blocks of one answer that are kept for its timeline."""


class JournalError(ValueError):
    """A file that is no run, or not the one meant; the message names the fix."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Key:
    """Which cell."""

    point: str
    data: str
    item: str
    """The question; empty where a cell is a whole simulated run."""
    arm: str
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A block of an answer, for its timeline. Seconds since the question."""

    at: float
    """When it was shown."""
    tokens: int
    drafted: int
    """0: the cloud went on alone."""
    accepted: int
    queue: float
    step: float
    network: float | None
    """Both ways; None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One measured answer. Seconds."""

    tokens: int
    first: float
    rest: float
    """From the first block to the last."""
    later: int
    """Tokens behind the first block."""
    finish: str
    drafted: int
    accepted: int
    relaxed: int = 0
    digest: str = ""
    """Of its ids: equal digests are equal texts. Empty where the text is no real one."""
    score: float | None = None

    @property
    def per_token(self) -> float | None:
        return self.rest / self.later if self.later else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """A live answer as the simulator plays it (bench.validation). Seconds."""

    first: float
    rest: float
    later: int
    own_rest: float
    """With what the live answer's own forwards and drafts took."""
    own_later: int
    forwards: int
    drafted: int
    accepted: int
    marks: tuple[Mark, ...]
    costs: dict[str, Any]
    """What the simulator was told of the machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What a cell came to."""

    key: Key
    answers: tuple[Answer, ...]
    forwards: int
    busy: float | None
    """Seconds that the target's engine worked; None: not known."""
    seconds: float
    bytes_up: int
    bytes_down: int
    unfinished: int = 0
    warm_up: int = 0
    marks: tuple[Mark, ...] = field(default=())
    """Of its first answer."""
    twin: Twin | None = None
    """In a validation."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, row: dict[str, Any]) -> Cell:
        found = row.get("twin")
        values = {
            **row,
            "key": Key(**row["key"]),
            "answers": tuple(Answer(**a) for a in row["answers"]),
            "marks": tuple(Mark(**m) for m in row["marks"]),
            "twin": found and Twin(**{**found, "marks": tuple(Mark(**m) for m in found["marks"])}),
        }
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a run is of: enough to go on with it, and to say what its figures are of."""

    name: str
    """Of the scenario's file."""
    text: str
    folder: str
    """Where files are that the scenario names."""
    overrides: tuple[str, ...]
    quick: bool
    machine: dict[str, Any]
    run_code: bool = False
    pins: dict[str, str] = field(default_factory=dict)
    """Data sets that came from the hub, and the commit of each."""
    format: int = FORMAT


@dataclass(frozen=True, slots=True)
class Run:
    """A run as read."""

    header: Header
    cells: tuple[Cell, ...]


class Journal:
    """A run's file while the run goes on."""

    def __init__(self, path: Path, run: Run) -> None:
        """`run`: what is in the file."""
        self.path = path
        self.header = run.header
        self._cells = list(run.cells)

    @classmethod
    def begin(cls, path: Path, header: Header) -> Journal:
        """Make the file. Raises JournalError where there is one."""
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(_header_line(header))
        except FileExistsError:
            raise JournalError(TAKEN.format(path)) from None
        return cls(path, Run(header, ()))

    @classmethod
    def resume(cls, path: Path) -> Journal:
        """Go on with a file, without a last line that was cut. Raises JournalError."""
        found = read(path)
        mend(path)
        return cls(path, found)

    @property
    def cells(self) -> tuple[Cell, ...]:
        """All that are finished."""
        return tuple(self._cells)

    def append(self, cell: Cell) -> None:
        self._cells.append(cell)
        if not self.keep():
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_cell_line(cell))

    def keep(self) -> bool:
        """Write the file anew if it is gone; False: it is there."""
        with contextlib.suppress(FileNotFoundError):
            if self.path.stat().st_size:
                return False
        self.path.write_text(
            "".join((_header_line(self.header), *map(_cell_line, self._cells))), encoding="utf-8"
        )
        return True


def _header_line(header: Header) -> str:
    return json.dumps({"run": asdict(header)}) + "\n"


def _cell_line(cell: Cell) -> str:
    return json.dumps({"cell": cell.as_dict()}) + "\n"


def read(path: Path) -> Run:
    """A run, without a last line that was cut. Raises JournalError."""
    lines = _lines(path)
    try:
        header = Header(**{**(found := next(lines)["run"]), "overrides": tuple(found["overrides"])})
        cells = tuple(Cell.of(row["cell"]) for row in lines)
    except (StopIteration, KeyError, TypeError):
        raise JournalError(f"{path} is no run of outrider bench") from None
    if header.format != FORMAT:
        raise JournalError(f"{path} was written by another version of outrider bench")
    return Run(header, cells)


def mend(path: Path) -> None:
    """Take off a last line that was cut, so that more can be appended."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        path.write_bytes(whole)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise JournalError(f"{path} is no run of outrider bench") from None
    lines = content.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not line.endswith("\n"):
            return
        try:
            row = json.loads(line)
        except ValueError:
            if number == 1:
                raise JournalError(f"{path} is no run of outrider bench") from None
            raise JournalError(f"{path}, line {number}: no JSON: take the line out") from None
        if not isinstance(row, dict):
            raise JournalError(f"{path} is no run of outrider bench")
        yield row
