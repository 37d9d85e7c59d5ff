"""The stop head of SpecDec++ (docs/papers.md, 7): will this draft token stand? In numpy.

Published: residual SiLU blocks (3) on the drafter's last hidden state, trained with a class
weight of 6 on rejections. Two things are ours:

* The published head reads the state *behind* a token, which exists only once the token was fed
  to the draft. Ours reads the state the token was drawn *from*, so the newest token of a block
  counts too; since that state does not say which token it was, log q(x) and H(q) stand beside it.
* The state is projected to a small width first, so that a head is some 100 kB and a call some
  tens of microseconds.

A class weight w bends the prediction: at its best it says a / (a + w (1 - a)) for a true
acceptance a. The published threshold was chosen for bent predictions. A threshold made of costs
needs the true one, which is log w away in the logit: `acceptance` is unbent, `weighted` is not.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from outrider.control.base import CalibrationError

FORMAT: Final = "outrider-stop-head"
VERSION: Final = 1
FILE: Final = "stop_head.npz"
"""Its name in a calibration folder."""
SCALARS: Final = 2
"""Inputs beside the hidden state: log q(x) and H(q), nats."""
MIN_LOG_Q: Final = -20.0
"""log q(x) is cut off here: less likely tokens are all alike."""
MAX_FILE_BYTES: Final = 16 * 2**20
"""Largest head read: forty times the width of those that ship."""
_ARRAYS: Final = ("project", "project_bias", "blocks", "block_biases", "read_out")
_FIX: Final = "train one with bench/train_stop_head.py"

F32: Final = np.float32
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopHead:
    """Weights, float32, and where they come from."""

    project: Floats
    """[size, width + SCALARS]: hidden state, then log q(x), then H(q)."""
    project_bias: Floats
    """[size]."""
    blocks: Floats
    """[count, size, size]: z + silu(W z + b), one after the other."""
    block_biases: Floats
    """[count, size]."""
    read_out: Floats
    """[size + 1]: weights of the logit, then its bias."""
    weight: float
    """Class weight of rejections in training, > 0."""
    about: Mapping[str, Any]
    """Provenance: at least `draft`, the spec of the draft it was trained for."""

    def __post_init__(self) -> None:
        size = self.project.shape[0] if self.project.ndim == 2 else 0
        blocks = self.blocks.shape[0] if self.blocks.ndim == 3 else 0
        wanted = ((size, self.width + SCALARS), (size,), (blocks, size, size), (blocks, size))
        for name, shape in zip(_ARRAYS, (*wanted, (size + 1,)), strict=True):
            array = getattr(self, name)
            if not size or array.shape != shape or array.dtype != np.float32:
                raise CalibrationError(
                    f"stop head: {name} is {array.dtype}{list(array.shape)}, not "
                    f"float32{list(shape)}; {_FIX}"
                )
            if not np.isfinite(array).all():
                raise CalibrationError(
                    f"stop head: {name} holds values that are no numbers; {_FIX}"
                )
        if not 0.0 < self.weight < math.inf:
            raise CalibrationError(f"stop head: class weight {self.weight} is not > 0; {_FIX}")
        if not isinstance(self.about.get("draft"), str):
            raise CalibrationError(f"stop head: it does not say which draft it is for; {_FIX}")

    @property
    def width(self) -> int:
        """Of the draft's hidden state."""
        return int(self.project.shape[-1]) - SCALARS

    @property
    def draft(self) -> str:
        """Spec of the draft it was trained for."""
        return str(self.about["draft"])

    def acceptance(self, hidden: Floats, probability: float, entropy: float) -> float:
        """Predicted P(the token stands | all before it do), in [0, 1].

        `hidden` float32 [width], q(x) and H(q) as in `DraftSignal`. Raises CalibrationError when
        the draft has another width."""
        return _sigmoid(self._logit(hidden, probability, entropy) + math.log(self.weight))

    def weighted(self, hidden: Floats, probability: float, entropy: float) -> float:
        """The same as the class weight bends it: what the published threshold is for."""
        return _sigmoid(self._logit(hidden, probability, entropy))

    def _logit(self, hidden: Floats, probability: float, entropy: float) -> float:
        if hidden.shape != (self.width,):
            raise CalibrationError(
                f"the stop head of draft {self.draft!r} reads states of width {self.width}, this "
                f"draft's are {list(hidden.shape)}; use the head of the draft in use"
            )
        x = np.empty(self.width + SCALARS, F32)
        x[:-SCALARS] = hidden
        x[-2], x[-1] = log_q(probability), entropy
        z = self.project @ x + self.project_bias
        for matrix, bias in zip(self.blocks, self.block_biases, strict=True):
            z = z + _silu(matrix @ z + bias)
        return float(self.read_out[:-1] @ z) + float(self.read_out[-1])

    def to_bytes(self) -> bytes:
        """A .npz of float16 arrays and JSON; reading it runs no code."""
        about = {"format": FORMAT, "version": VERSION, "weight": self.weight, **self.about}
        arrays = {name: getattr(self, name).astype(np.float16) for name in _ARRAYS}
        text = json.dumps(about, sort_keys=True).encode()
        file = io.BytesIO()
        np.savez(file, about=np.frombuffer(text, np.uint8), **arrays)
        return file.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> StopHead:
        """Raises CalibrationError, in one line, for anything that is not such a file."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as file:
                found = {name: file[name] for name in (*_ARRAYS, "about")}
            about = json.loads(found.pop("about").tobytes())
        except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise CalibrationError(f"no stop head: {reason}; {_FIX}") from None
        if not isinstance(about, dict) or about.pop("format", None) != FORMAT:
            raise CalibrationError(f"no stop head: another kind of file; {_FIX}")
        version, weight = about.pop("version", None), about.pop("weight", None)
        if version != VERSION:
            raise CalibrationError(f"stop head of format {version}, this is {VERSION}; {_FIX}")
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise CalibrationError(f"stop head: class weight {weight!r} is no number; {_FIX}")
        if any(array.dtype != np.float16 for array in found.values()):
            raise CalibrationError(f"stop head: its arrays are not float16; {_FIX}")
        arrays = {name: array.astype(F32) for name, array in found.items()}
        return cls(weight=float(weight), about=about, **arrays)


def load(where: str) -> StopHead:
    """The head of a shipped draft by the draft's spec ('large', 'lookup+small'), of a
    calibration folder, or of a file. The one function here that reads a file.

    Raises CalibrationError when there is none, naming the fix."""
    path = _path(where)
    if not path.is_file():
        raise CalibrationError(f"no stop head at {where!r}; {_FIX}")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise CalibrationError(f"{where!r} is too large for a stop head; {_FIX}")
    return StopHead.from_bytes(path.read_bytes())


def _path(where: str) -> Path:
    shipped = where.removeprefix("lookup+")
    if shipped.isalnum():
        inside = Path(str(resources.files("outrider"))) / "data" / "drafts" / f"{shipped}.head.npz"
        if inside.is_file():
            return inside
    path = Path(where).expanduser()
    return path / FILE if path.is_dir() else path


def log_q(probability: float) -> float:
    """log q(x), not below MIN_LOG_Q (there too for NaN)."""
    return math.log(probability) if probability > math.exp(MIN_LOG_Q) else MIN_LOG_Q


def _silu(x: Floats) -> Floats:
    # Written with tanh, which has no overflow: x sigmoid(x) = x (1 + tanh(x / 2)) / 2.
    y: Floats = x * (F32(0.5) + F32(0.5) * np.tanh(F32(0.5) * x))
    return y


def _sigmoid(logit: float) -> float:
    return 0.5 + 0.5 * math.tanh(0.5 * logit)
