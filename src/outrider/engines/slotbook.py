"""Which slots an engine has and which ids each one holds: the same for every engine.

An engine derives from `SlotBook`, says what one of its slots is (`_new`), how what it stores for
a prefix is copied (`_copy`) and what its rows are (`_compute`). `forward` is three steps:

    slots = self._check(blocks)    every refusal, before anything has changed
    rows = self._compute(...)      the engine's own work
    self._extend(slots, blocks)    the ids count from here on

Rules:

* A slot's ids change only when a whole `forward` has succeeded, so a failed one leaves every
  slot at the length it had.
* What an engine stores behind the ids of a slot means nothing. `truncate` therefore touches
  ids only, and the next block writes over what it left.
* Memory that runs out, whoever says so and in whatever words, is a NoMemoryError (`memory`).
* Slot numbers are never given twice: a number kept too long is refused, and cannot reach the
  slot of somebody else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from outrider.engines.base import (
    Block,
    ContextOverflowError,
    EngineError,
    FloatRow,
    ModelInfo,
    SlotError,
)
from outrider.engines.memory import memory_named


@dataclass(slots=True, kw_only=True)
class SlotRecord:
    """One sequence. Engines derive from it and add what they store for the ids."""

    ids: list[int] = field(default_factory=list)


Record = TypeVar("Record", bound=SlotRecord)


class SlotBook(ABC, Generic[Record]):
    """The part of `LanguageModel` that is about slots (`engines.base`, there the contract)."""

    def __init__(self, *, max_slots: int, context_length: int, id_count: int) -> None:
        """`context_length`: most ids of a slot. `id_count`: ids 0 .. id_count - 1 can be fed,
        which may be more than the tokenizer produces. EngineError when `max_slots` < 1."""
        if max_slots < 1:
            raise EngineError(f"max_slots={max_slots} must be at least 1")
        self._max_slots = max_slots
        self._context = context_length
        self._id_count = id_count
        self._slots: dict[int, Record] = {}
        self._opened = 0

    @abstractmethod
    def _new(self) -> Record:
        """An empty slot's record."""

    @abstractmethod
    def _copy(self, source: Record, target: Record, length: int) -> None:
        """Copy what is stored for the first `length` >= 1 ids of `source`, but not the ids;
        `target` has none yet."""

    @abstractmethod
    def _compute(self, blocks: Sequence[Block], slots: Sequence[Record]) -> list[FloatRow]:
        """What `forward` returns, once everything has been checked: slots[i] is that of
        blocks[i], and holds the ids it held before."""

    @property
    @abstractmethod
    def info(self) -> ModelInfo: ...

    @property
    def open_slots(self) -> int:
        """Slots in use."""
        return len(self._slots)

    def open(self) -> int:
        if len(self._slots) >= self._max_slots:
            raise EngineError(
                f"all {self._max_slots} slots are taken; close one or raise max_slots"
            )
        self._opened += 1
        self._slots[self._opened] = self._new()
        return self._opened

    def close(self, slot: int) -> None:
        self._slot(slot)
        del self._slots[slot]

    def tokens(self, slot: int) -> tuple[int, ...]:
        return tuple(self._slot(slot).ids)

    def length(self, slot: int) -> int:
        return len(self._slot(slot).ids)

    def truncate(self, slot: int, length: int) -> None:
        ids = self._slot(slot).ids
        if not 0 <= length <= len(ids):
            raise SlotError(f"cannot truncate slot {slot} of {len(ids)} ids to {length}")
        del ids[length:]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        old, new = self._slot(source), self._slot(target)
        if new.ids:
            raise SlotError(f"slot {target} is not empty")
        if not 0 <= length <= len(old.ids):
            raise SlotError(f"slot {source} holds {len(old.ids)} ids, not {length}")
        if length:
            with memory_named(self.info.name):
                self._copy(old, new, length)
        new.ids.extend(old.ids[:length])

    def forward(self, blocks: Sequence[Block]) -> list[FloatRow]:
        slots = self._check(blocks)
        with memory_named(self.info.name):
            rows = self._compute(blocks, slots)
        self._extend(slots, blocks)
        return rows

    def _check(self, blocks: Sequence[Block]) -> list[Record]:
        """The blocks' slots, after every check that a forward has to pass.

        SlotError (unknown slot, slot twice, start != length, id out of range) comes before
        ContextOverflowError: the caller's fault first."""
        slots = [self._slot(block.slot) for block in blocks]
        if len({block.slot for block in blocks}) != len(blocks):
            raise SlotError("a slot may occur in one block of a forward only")
        for block, slot in zip(blocks, slots, strict=True):
            if block.start != len(slot.ids):
                raise SlotError(
                    f"block starts at {block.start}, but slot {block.slot} holds "
                    f"{len(slot.ids)} ids"
                )
            if min(block.tokens) < 0 or max(block.tokens) >= self._id_count:
                raise SlotError(f"token ids must be in 0..{self._id_count - 1}")
        for block in blocks:
            end = block.start + len(block.tokens)
            if end > self._context:
                raise ContextOverflowError(f"{end} tokens exceed the context of {self._context}")
        return slots

    def _extend(self, slots: Sequence[Record], blocks: Sequence[Block]) -> None:
        """Count the tokens of blocks[i] as held by slots[i]: a forward has succeeded."""
        for slot, block in zip(slots, blocks, strict=True):
            slot.ids.extend(block.tokens)

    def _slot(self, number: int) -> Record:
        slot = self._slots.get(number)
        if slot is None:
            raise SlotError(f"no open slot {number}")
        return slot
