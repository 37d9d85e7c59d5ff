"""llama.cpp's C interface, as much of it as an engine and a tokenizer need.

The one file that calls llama-cpp-python, and only its low-level half: the high-level class
keeps one sequence and samples by itself. Three things are made here:

    NativeModel     a GGUF file: its facts and vocabulary, its weights unless told not to
    NativeContext   keys and values of several sequences ("streams") of that model
    Part            rows of one stream in a decode

A stream has cells of its own (`kv_unified` off), so its entries lie in the order of their
positions whatever other streams do. In one buffer for all, the order of the sum over the
cells, and with it the last bits of a row, would hang on who came and went before.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import llama_cpp as api
import numpy as np

from outrider.engines.base import (
    EngineError,
    FloatRow,
    NoMemoryError,
    UnsupportedModelError,
)

CELL_STEP: Final = 256
"""llama.cpp rounds the cells of a stream up to this."""
_F16: Final = 1
_BF16: Final = 30
"""ggml's numbers of these types."""
_WARNING: Final = 3
"""ggml's log level; errors are above it."""
_METADATA_CHARS: Final = 1 << 20
"""Longest metadata text that is read: chat templates have up to some ten thousand."""


class _Log:
    """llama.cpp's complaints, kept for an error message instead of written to stderr."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=20)
        # ctypes does not keep the callback alive, and the library calls it until the end.
        self.callback = api.llama_log_callback(self._hear)

    def _hear(self, level: int, text: bytes, _user_data: object) -> None:
        if level > _WARNING:
            self.lines.append(text.decode("utf-8", "replace").strip())

    def reason(self) -> str:
        """The first complaint since `clear`, without the name of the function it is from."""
        for line in self.lines:
            if line:
                return line.partition(": ")[2] or line
        return "no reason given"


@functools.cache
def _library() -> _Log:
    """Start the library once a process."""
    log = _Log()
    api.llama_log_set(log.callback, ctypes.c_void_p(0))
    api.llama_backend_init()
    return log


class NativeModel:
    """A GGUF file, opened. Freed when nobody holds it any more."""

    def __init__(self, path: Path, *, vocabulary_only: bool = False, gpu: bool = False) -> None:
        """UnsupportedModelError: llama.cpp refuses it, with its reason."""
        log = _library()
        log.lines.clear()
        wish = api.llama_model_default_params()
        wish.vocab_only = vocabulary_only
        wish.n_gpu_layers = -1 if gpu else 0
        self.handle: Any = api.llama_model_load_from_file(str(path).encode(), wish)
        if not self.handle:
            raise UnsupportedModelError(f"llama.cpp cannot load {path}: {log.reason()}")
        weakref.finalize(self, api.llama_model_free, self.handle)
        self.path = path
        self.vocabulary: Any = api.llama_model_get_vocab(self.handle)
        self.width = int(api.llama_vocab_n_tokens(self.vocabulary))

    @property
    def context_length(self) -> int:
        """Tokens it was trained for."""
        if not api.llama_model_n_ctx_train(self.handle):
            stated = self.text(f"{self.text('general.architecture')}.context_length")
            return int(stated or 0)  # with the vocabulary alone llama.cpp does not read it
        return int(api.llama_model_n_ctx_train(self.handle))

    @property
    def parameters(self) -> int:
        return int(api.llama_model_n_params(self.handle))

    @property
    def dtype(self) -> str:
        """What most of its weights are stored as: 'q4_1', 'f16', ..."""
        name: bytes = api.llama_ftype_name(api.llama_model_ftype(self.handle))
        return name.decode().lower().removeprefix("all ").removesuffix(" (guessed)")

    @property
    def reason_against(self) -> str | None:
        """Why it cannot be rolled back after a rejection; None: it can."""
        if api.llama_model_has_encoder(self.handle):
            return "has an encoder; decoder-only is needed"
        if api.llama_model_is_recurrent(self.handle) or api.llama_model_is_hybrid(self.handle):
            return "keeps recurrent state, which cannot be rolled back after a rejection"
        if api.llama_model_is_diffusion(self.handle):
            return "is a diffusion model; it has no next token"
        return None

    def text(self, key: str) -> str | None:
        """A metadata value as text; None where the file has no such key."""
        buffer = ctypes.create_string_buffer(_METADATA_CHARS)
        length = api.llama_model_meta_val_str(self.handle, key.encode(), buffer, len(buffer))
        return None if length < 0 else buffer.value.decode("utf-8", "replace")

    def tokenize(self, text: str, *, add_special: bool) -> list[int]:
        """Ids of a text in which names of control tokens stand for those tokens."""
        data = text.encode("utf-8", "surrogatepass")
        room = len(data) + 8  # a token is at least a byte; start and end tokens come on top
        ids = (api.llama_token * room)()
        count = api.llama_tokenize(
            self.vocabulary,
            data,
            len(data),
            ids,
            room,
            add_special,
            True,
        )
        if count < 0:
            raise EngineError(f"llama.cpp could not tokenize a text of {len(data)} bytes")
        return list(ids[:count])


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Tokens that one decode appends to one stream."""

    stream: int
    position: int
    tokens: tuple[int, ...]
    wanted: tuple[int, ...]
    """Which of the tokens a row of logits is wanted behind: indices, ascending."""


class NativeContext:
    """Keys and values of `streams` sequences of up to `capacity` tokens each."""

    def __init__(
        self,
        model: NativeModel,
        *,
        streams: int,
        capacity: int,
        rows: int,
        threads: int,
    ) -> None:
        """`rows`: most tokens of a decode. NoMemoryError when there is none for it.

        Keys and values are stored in different types. Attention then computes each row by
        itself, over one cell after another, and sums in float32: llama.cpp's CPU kernel has two
        other ways, one for 64 rows and more and one that shares a long context among threads,
        and takes either only if the types are the same; values in float16 it sums in float16."""
        log = _library()
        log.lines.clear()
        wish = api.llama_context_default_params()
        wish.n_ctx = streams * capacity
        wish.n_seq_max = streams
        wish.n_batch = wish.n_ubatch = rows
        wish.n_threads = wish.n_threads_batch = threads
        wish.kv_unified = False
        wish.swa_full = True  # a sliding window whose old cells are gone could not be rolled back
        wish.no_perf = True
        wish.type_k = _F16
        wish.type_v = _BF16
        wish.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._model = model  # must outlive the context
        self._context: Any = api.llama_init_from_model(model.handle, wish)
        if not self._context:
            raise NoMemoryError(
                f"llama.cpp has no room for {streams} x {capacity} tokens of {model.path.name} "
                f"({log.reason()}); use fewer slots or a shorter context"
            )
        self._free = weakref.finalize(self, api.llama_free, self._context)
        self._memory: Any = api.llama_get_memory(self._context)
        self._batch: Any = api.llama_batch_init(rows, 0, 1)
        weakref.finalize(self, api.llama_batch_free, self._batch)

    def close(self) -> None:
        """Give the memory back now; the object is of no use afterwards."""
        self._free()

    def forget(self, stream: int, start: int) -> bool:
        """Drop what a stream holds from position `start` on. False: this model cannot."""
        return bool(api.llama_memory_seq_rm(self._memory, stream, start, -1))

    def save(self, stream: int) -> ctypes.Array[ctypes.c_uint8]:
        """What a stream holds, bit by bit."""
        size = api.llama_state_seq_get_size(self._context, stream)
        state = (ctypes.c_uint8 * size)()
        if api.llama_state_seq_get_data(self._context, state, size, stream) != size:
            raise EngineError(f"llama.cpp could not copy a sequence: {_library().reason()}")
        return state

    def restore(self, stream: int, state: ctypes.Array[ctypes.c_uint8]) -> None:
        """Make a stream hold what was saved."""
        if not api.llama_state_seq_set_data(self._context, state, len(state), stream):
            raise EngineError(f"llama.cpp could not copy a sequence: {_library().reason()}")

    def decode(self, parts: Sequence[Part], columns: int) -> list[FloatRow]:
        """One pass. The wanted rows' first `columns` logits, float32, in order."""
        batch, row, wanted = self._batch, 0, []
        for part in parts:
            for i, token in enumerate(part.tokens):
                batch.token[row] = token
                batch.pos[row] = part.position + i
                batch.n_seq_id[row] = 1
                batch.seq_id[row][0] = part.stream
                batch.logits[row] = i in part.wanted
                if i in part.wanted:
                    wanted.append(row)
                row += 1
        batch.n_tokens = row
        log = _library()
        log.lines.clear()
        status = api.llama_decode(self._context, batch)
        if status:
            raise EngineError(f"llama.cpp failed in a decode ({status}): {log.reason()}")
        return [self._logits(row, columns) for row in wanted]

    def _logits(self, row: int, columns: int) -> FloatRow:
        found = api.llama_get_logits_ith(self._context, row)
        view: FloatRow = np.ctypeslib.as_array(found, (columns,))
        return view.copy()  # the next decode writes over it


def has_gpu() -> bool:
    """Whether this build of llama.cpp can put layers on a GPU."""
    _library()
    return bool(api.llama_supports_gpu_offload())
