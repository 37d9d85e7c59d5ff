"""What an engine is: something that runs one model, synchronously, ids in, logits out.

An engine keeps *slots*. A slot is the key/value cache of one token sequence; the engine
knows which ids each slot holds, so a slot can be compared with what a session claims
(invariant I10). One engine call, `forward`, appends blocks to any number of slots and
returns raw logits; sampling filters, noise and acceptance live in `outrider.core`, never
here. The same protocol serves drafts and targets: a target is asked for several rows, a
draft mostly for one.

Rules every engine obeys (tests/engines hold them for each implementation):

* `forward` appends a block's tokens to its slot and returns one row of logits for each of
  the last `block.rows` tokens: row j is the next-token distribution *after* token j.
* Slots are independent: what else is in a call never changes which ids are right, and with
  `info.deterministic` not a single bit of a row (docs/architecture.md, Numerics, I9).
* `truncate` then `forward` gives what a fresh slot would give for the same ids.
* Engines are not thread-safe. One thread owns an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from outrider.core.tokens import Rule

FloatRow = npt.NDArray[np.float32]
IdArray = npt.NDArray[np.int64]


class EngineError(Exception):
    """Base of everything an engine may raise; the message names the cause and the fix.

    EngineError
    +-- ModelNotFoundError   the spec names nothing that can be loaded
    +-- MissingExtraError    an optional dependency is not installed
    +-- UnsupportedModelError  the model cannot be used exactly (cache cannot roll back, ...)
    +-- IncompatibleModelsError  draft and target do not speak the same vocabulary
    +-- ContextOverflowError a block would not fit in the context window
    +-- SlotError            unknown slot, or a position that does not match: caller's fault
    +-- NoMemoryError        no memory is left for a forward; the slots are as they were before it
    +-- ServerError          a server that runs the model is gone, changed, or says too little
    +-- UnrecordedError      a replayed draft was asked for what was not recorded. No draft may
                             stand in for it: the answer fails, where a broken draft costs speed
    """


class ModelNotFoundError(EngineError):
    pass


class MissingExtraError(EngineError):
    pass


class UnsupportedModelError(EngineError):
    pass


class IncompatibleModelsError(EngineError):
    pass


class ContextOverflowError(EngineError):
    pass


class SlotError(EngineError):
    pass


class NoMemoryError(EngineError):
    pass


class ServerError(EngineError):
    pass


class UnrecordedError(EngineError):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts of a loaded model that never change."""

    name: str
    """The spec it was loaded from, as the user wrote it (resolved default included)."""
    vocab_size: int
    """Number of token ids the tokenizer can produce. Rows are cut to this width."""
    logits_width: int
    """Width of the model's own output (>= vocab_size: some families pad it)."""
    context_length: int
    """Most tokens a slot may hold."""
    fingerprint: str
    """Content hash of the tokenizer (`engines.tokenizer.fingerprint`), hex."""
    dtype: str
    """'bfloat16', 'float32', 'int8', ... as computed, not as stored."""
    device: str = "cpu"
    deterministic: bool = False
    """True: the bits of a row depend on the slot's ids only, never on blocks or batch."""
    eos_token_ids: frozenset[int] = frozenset()
    parameters: int = 0
    """Number of weights, for display."""
    known_ids: int | None = None
    """None: rows are whole. A number: only so many likeliest ids of a row are known, the others
    are -inf in it (core.partial says what is still exact)."""
    stepwise: bool = False
    """A forward takes a step of the model for each draft that stands: guesses save it nothing."""
    rules: frozenset[Rule] = frozenset(Rule)
    """Acceptance rules that its rows are enough for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Tokens to append to one slot in a forward."""

    slot: int
    start: int
    """Absolute position of the first token; must equal the slot's length."""
    tokens: tuple[int, ...]
    """At least one id."""
    rows: int
    """How many rows of logits are wanted, counted from the end (0: only fill the cache)."""

    def __post_init__(self) -> None:
        if not self.tokens:
            raise SlotError("a block needs at least one token")
        if not 0 <= self.rows <= len(self.tokens):
            raise SlotError(f"rows={self.rows} of a block of {len(self.tokens)} tokens")


@runtime_checkable
class LanguageModel(Protocol):
    """A model with slots. See the module docstring for the rules."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def support(self) -> IdArray | None:
        """Ids (sorted, int64) that the columns of a row stand for; None: column = id.

        A draft with a reduced output vocabulary returns rows of len(support) columns;
        every other id has probability 0.
        """
        ...

    @property
    def passes(self) -> int:
        """Passes through the network since loading: one `forward` may need several (long
        prefill, fixed row count), and an honest forwards-per-token figure counts each."""
        ...

    def open(self) -> int:
        """A new empty slot. Raises EngineError when all slots are taken."""
        ...

    def close(self, slot: int) -> None:
        """Free a slot; closing twice is a SlotError."""
        ...

    def tokens(self, slot: int) -> tuple[int, ...]:
        """The ids whose keys and values the slot holds."""
        ...

    def length(self, slot: int) -> int: ...

    def truncate(self, slot: int, length: int) -> None:
        """Forget everything from position `length` on (0 <= length <= current length)."""
        ...

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Make the empty slot `target` hold the first `length` positions of `source`."""
        ...

    def forward(self, blocks: Sequence[Block]) -> list[FloatRow]:
        """Run all blocks in as few passes as the engine can.

        Returns one float32 array [block.rows, width] for each block, in the order given,
        where width is len(support) or info.vocab_size. At most one block a slot.
        Raises SlotError (unknown slot, start != length, slot twice), ContextOverflowError
        (nothing is changed then).
        """
        ...


def plan_prefix(cached: Sequence[int], wanted: Sequence[int]) -> int:
    """Length of the common prefix of two id sequences (how much of a slot can be kept)."""
    if len(cached) <= len(wanted) and tuple(cached) == tuple(wanted[: len(cached)]):
        return len(cached)  # the common case, compared in C
    n = 0
    for a, b in zip(cached, wanted, strict=False):
        if a != b:
            break
        n += 1
    return n


def keep_prefix(model: LanguageModel, slot: int, ids: Sequence[int]) -> int:
    """Cut a slot to what it shares with `ids`, short of the last; how much it then holds.

    The last id always stays to be fed: its row of logits is the one that is needed next.
    """
    kept = min(plan_prefix(model.tokens(slot), ids), len(ids) - 1)
    model.truncate(slot, kept)
    return kept
