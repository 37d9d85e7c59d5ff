"""A calibration of the `credit` controller: what `outrider calibrate` stores, what a run reads.

One JSON file, `calibration.json`, in a folder: table, predictor and provenance are always of one
run, and a rename puts all of it in place at once. Reading it runs no code.

The table gives T* and W* for each bin of the credit r (E2-SCI; docs/papers.md, 1, Predictor). The
predictor, trained on the same sweep, gives (omega, W) from r and its change. `ThresholdLaw` is
the published rule that turns omega into a threshold; omega means nothing without its constants,
so they are stored with the predictor.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from pathlib import Path
from typing import Final

import msgspec

from outrider.control.base import MAX_LENGTH, CalibrationError

FILE: Final = "calibration.json"
FORMAT: Final = "outrider-calibration"
VERSION: Final = 1
LN2: Final = math.log(2.0)
"""Largest Jensen-Shannon divergence, in nats."""


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of everything in the file: unknown or missing fields are errors."""


class ModelFacts(_Stored, frozen=True, kw_only=True):
    """Which model it was."""

    name: str
    vocabulary: str
    """Content hash of the tokenizer, hex."""
    dtype: str
    parameters: int
    """Number of weights; 0: not known."""


class ThresholdLaw(_Stored, frozen=True, kw_only=True):
    """T = clip(T_base + alpha * omega * (r - tau_credit), T_min, T_max), nats of JSD
    (E2-SCI; docs/papers.md, 1, Threshold rule). The paper states none of the constants."""

    t_base: float = 0.1
    """Our default."""
    alpha: float = 0.4
    """Our default: with omega = 1 the whole range of r moves T by 0.4."""
    tau_credit: float = 0.5
    """Credit at which T = T_base (our default)."""
    t_min: float = 0.0
    """Also the conservative value. 0: the strict rule (our default)."""
    t_max: float = 0.3
    """Our default; JSD never exceeds ln 2 = 0.693."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.t_min <= self.t_base <= self.t_max <= LN2:
            raise ValueError(
                f"thresholds out of order: 0 <= t_min={self.t_min} <= t_base={self.t_base} <= "
                f"t_max={self.t_max} <= ln 2 must hold"
            )
        if not (0.0 <= self.alpha < math.inf and 0.0 <= self.tau_credit <= 1.0):
            raise ValueError("alpha must be finite and >= 0, tau_credit in [0, 1]")

    def threshold(self, omega: float, credit: float) -> float:
        """T(t), nats; `omega` > 0, `credit` in [0, 1]."""
        return self.clip(self.t_base + self.alpha * omega * (credit - self.tau_credit))

    def clip(self, threshold: float) -> float:
        return min(max(threshold, self.t_min), self.t_max)


class Layer(_Stored, frozen=True, kw_only=True):
    """One dense layer: y = weights x + bias."""

    weights: list[list[float]]
    """[outputs, inputs], float32 values."""
    bias: list[float]
    """[outputs]."""


class PredictorWeights(_Stored, frozen=True, kw_only=True):
    """What `control.predictor.Predictor` runs."""

    layers: list[Layer]
    window_min: int
    window_max: int


class Table(_Stored, frozen=True, kw_only=True):
    """Labels by bin of the credit, and the sweep they come from. B bins, N thresholds, M windows.

    The sweep replays recorded text, which is exact for threshold 0 and an approximation above
    (`calibrate.trace`).
    """

    edges: list[float]
    """[B - 1], ascending: bin b holds edges[b-1] <= r < edges[b]."""
    thresholds: list[float]
    """[N], nats, ascending, the first 0: {theta_j}."""
    windows: list[int]
    """[M], ascending."""
    visits: list[int]
    """[B]: windows of the sweep that began with such a credit."""
    best_threshold: list[float]
    """[B]: T*."""
    best_window: list[int]
    """[B]: W*."""
    seconds: list[list[list[float]]]
    """[B, N, M]: E[T_seg | r]."""
    tokens: list[list[list[float]]]
    """[B, N, M]: expected tokens committed, the target's own included."""
    quality: list[list[list[float]]]
    """[B, N, M]: Acc = strictly accepted share of the accepted drafts."""

    def __post_init__(self) -> None:
        bins = len(self.edges) + 1
        if sorted(self.edges) != self.edges or not self.thresholds or not self.windows:
            raise ValueError("a table needs ascending edges, thresholds and windows")
        if {len(self.visits), len(self.best_threshold), len(self.best_window)} != {bins}:
            raise ValueError(f"a table of {bins} bins needs one label a bin")
        if not all(0.0 <= t <= LN2 for t in (*self.thresholds, *self.best_threshold)):
            raise ValueError("thresholds must be in [0, ln 2]")
        if not all(1 <= w <= MAX_LENGTH for w in (*self.windows, *self.best_window)):
            raise ValueError(f"windows must be in [1, {MAX_LENGTH}]")
        for name in ("seconds", "tokens", "quality"):
            cube = getattr(self, name)
            shape = {(len(cube), len(plane), len(row)) for plane in cube for row in plane}
            if shape != {(bins, len(self.thresholds), len(self.windows))}:
                raise ValueError(f"{name} does not fit the table's axes")

    def bin(self, credit: float) -> int:
        return bisect_right(self.edges, credit)

    def lookup(self, credit: float) -> tuple[float, int]:
        """(T*, W*) at a credit."""
        at = self.bin(credit)
        return self.best_threshold[at], self.best_window[at]


class Provenance(_Stored, frozen=True, kw_only=True):
    """Where a calibration comes from. Times in seconds."""

    outrider: str
    """Version of the package that made it."""
    target: ModelFacts
    draft: ModelFacts
    temperature: float
    data: dict[str, int]
    """Answers by task."""
    data_digest: str
    """sha256 (hex) of the prompts."""
    positions: int
    """Positions of text it rests on."""
    seed: int
    schedule: str
    """Whose T_seg was minimised: sync or plc."""
    round_trip: float
    draft_seconds: float
    verify_seconds: list[tuple[int, float]]
    """t_v by rows."""
    gamma: float
    """Seconds that a token is worth in the label's objective."""
    delta: float
    """Least Acc(T) of a label."""
    k: int
    """Windows in the history."""
    beta: float


class Calibration(_Stored, frozen=True, kw_only=True):
    """The whole file."""

    format: str = FORMAT
    version: int = VERSION
    provenance: Provenance
    law: ThresholdLaw
    table: Table
    predictor: PredictorWeights | None = None

    def require(self, *, target: ModelFacts | None = None, draft: ModelFacts | None = None) -> None:
        """Raises CalibrationError when it was made for another target or draft than these."""
        made = self.provenance
        for role, here, there in (
            ("target", target, made.target),
            ("draft", draft, made.draft),
        ):
            if here is not None and not _same(here, there):
                raise CalibrationError(
                    f"the calibration was made for the {role} {there.name} "
                    f"({there.parameters} weights, vocabulary {there.vocabulary[:8]}), not for "
                    f"{here.name} ({here.parameters}, {here.vocabulary[:8]}): run "
                    "`outrider calibrate` for this pair"
                )


def _same(a: ModelFacts, b: ModelFacts) -> bool:
    """The number format is not compared: it moves acceptance less than the sweep can see."""
    counts = {a.parameters, b.parameters} - {0}
    return a.name == b.name and a.vocabulary == b.vocabulary and len(counts) <= 1


class _Head(msgspec.Struct):
    """Read first, so that a file of another version is called that and not malformed."""

    format: str = ""
    version: int = 0


MAX_FILE_BYTES = 4 * 1024 * 1024
"""Largest calibration file read: those of `outrider calibrate` have about 100 kB."""


def encode(calibration: Calibration) -> bytes:
    """The file's content."""
    return msgspec.json.encode(calibration) + b"\n"


def decode(content: bytes, name: str = FILE) -> Calibration:
    """Raises CalibrationError naming the fix for anything but a calibration of this version."""
    try:
        head = msgspec.json.decode(content, type=_Head)
        if (head.format, head.version) == (FORMAT, VERSION):
            return msgspec.json.decode(content, type=Calibration)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CalibrationError(
            f"{name} is damaged or no calibration ({error}): run `outrider calibrate` again"
        ) from None
    raise CalibrationError(
        f"{name} is {head.format or 'of no known format'}, version {head.version}; this Outrider "
        f"reads {FORMAT} version {VERSION}: run `outrider calibrate` again"
    )


def load(folder: str | Path) -> Calibration:
    """Read a calibration folder (or the file itself). Raises CalibrationError."""
    path = Path(folder)
    path = path / FILE if path.is_dir() else path
    try:
        if path.exists() and not path.is_file():  # a device or a pipe has no end
            raise CalibrationError(f"{folder} is no calibration file or folder")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise CalibrationError(f"{folder} is too large for a calibration")
    except OSError as error:
        raise CalibrationError(
            f"no calibration at {folder} ({error.strerror}): make one with `outrider calibrate`"
        ) from None
    return decode(content, path.name)
