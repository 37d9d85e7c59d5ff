"""The engine for GGUF files on llama.cpp: quantised models on a CPU, without torch.

One slot is one *stream* of a llama.cpp context (`llama_native.py`). Which rows share a pass is
`passes.plan_even`'s: llama.cpp itself would cut a batch of unequal streams into several passes
without saying so.

* Bits: with integer-quantised weights a row's bits do not depend on how many rows are in a pass,
  so no fixed shapes are needed. With float weights they do: a lone row takes another kernel
  than two. Which it is for a file on this machine is tried at loading (`selfcheck.py`); see also
  `NativeContext`.
* Room: all streams of a context are of one length, so room is kept for `max_slots` texts as long as
  the longest so far. It starts small and doubles; llama.cpp cannot enlarge a context, so growing
  means making a new one and copying what the slots hold: no forward, and the same bits.
* A failed `forward` leaves cells behind the ids; the next block of the slot drops them first.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from outrider.engines.base import (
    Block,
    EngineError,
    FloatRow,
    IdArray,
    ModelInfo,
    UnsupportedModelError,
)
from outrider.engines.llama_native import CELL_STEP, NativeContext, NativeModel, Part
from outrider.engines.passes import Pass, plan_even, wanted_rows
from outrider.engines.slotbook import SlotBook, SlotRecord

DEFAULT_SLOTS: Final = 16
PASS_ROWS: Final = 128
"""Most rows of a pass. llama.cpp reserves logits for all of them: 25 MB at 49152 ids."""


@dataclass(slots=True, kw_only=True)
class StreamSlot(SlotRecord):
    """One sequence and the stream it lives in."""

    stream: int


class LlamaCppModel(SlotBook[StreamSlot]):
    """A GGUF file behind the LanguageModel protocol."""

    def __init__(
        self,
        model: NativeModel,
        *,
        name: str,
        fingerprint: str = "",
        vocab_size: int | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        deterministic: bool = True,
        threads: int | None = None,
        device: str = "cpu",
        max_slots: int = DEFAULT_SLOTS,
        context_length: int | None = None,
    ) -> None:
        """`vocab_size`: ids the tokenizer can produce; None: the model's whole width.
        `deterministic`: what `info` says; nothing is computed otherwise. `threads`: None: half
        of the processors this process may use. `context_length`: less than the model's own.
        UnsupportedModelError when the model cannot be rolled back."""
        reason = model.reason_against
        if reason is not None:
            raise UnsupportedModelError(f"{name} {reason}")
        if threads is not None and threads < 1:
            raise EngineError(f"threads must be at least 1, got {threads}")
        context = usable_context(model, context_length)
        super().__init__(max_slots=max_slots, context_length=context, id_count=model.width)
        self._model = model
        self._threads = threads or default_threads()
        self._passes = 0
        self._info = ModelInfo(
            name=name,
            vocab_size=vocab_size or model.width,
            logits_width=model.width,
            context_length=context,
            fingerprint=fingerprint,
            dtype=model.dtype,
            device=device,
            deterministic=deterministic,
            eos_token_ids=eos_token_ids,
            parameters=model.parameters,
        )
        self._capacity = min(CELL_STEP, self._context)
        self._cells = self._make(self._capacity)
        if not self._cells.forget(0, 0):
            raise UnsupportedModelError(f"{name} cannot be rolled back after a rejection")

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def support(self) -> IdArray | None:
        return None

    @property
    def passes(self) -> int:
        return self._passes

    def close(self, slot: int) -> None:
        stream = self._slot(slot).stream
        super().close(slot)
        self._cells.forget(stream, 0)

    def _compute(self, blocks: Sequence[Block], slots: Sequence[StreamSlot]) -> list[FloatRow]:
        longest = max((block.start + len(block.tokens) for block in blocks), default=0)
        self._reserve(longest)
        for slot, block in zip(slots, blocks, strict=True):
            self._cells.forget(slot.stream, block.start)
        out = [np.empty((block.rows, self._info.vocab_size), np.float32) for block in blocks]
        for each in plan_even(blocks, lanes=[slot.stream for slot in slots], rows=PASS_ROWS):
            self._run(each, blocks, slots, out)
        return out

    def _run(
        self,
        each: Pass,
        blocks: Sequence[Block],
        slots: Sequence[StreamSlot],
        out: list[FloatRow],
    ) -> None:
        """One pass; wanted rows of logits are written into `out`."""
        parts = [
            Part(
                stream=slots[segment.block].stream,
                position=segment.position,
                tokens=segment.tokens(blocks),
                wanted=_wanted(blocks[segment.block], segment.offset, segment.count),
            )
            for segment in each.segments
        ]
        self._passes += 1
        rows = self._cells.decode(parts, self._info.vocab_size)
        for row, (_, block, target) in zip(rows, wanted_rows(each, blocks), strict=True):
            # NaN and +inf survive max, and -inf there means that no id is possible at all.
            if not np.isfinite(row.max()):
                raise EngineError(
                    f"{self._info.name} returned logits that are not numbers; damaged weights?"
                )
            out[block][target] = row

    def _new(self) -> StreamSlot:
        taken = {slot.stream for slot in self._slots.values()}
        # The lowest free one: only neighbouring streams share a pass.
        return StreamSlot(stream=next(i for i in range(self._max_slots) if i not in taken))

    def _copy(self, source: StreamSlot, target: StreamSlot, length: int) -> None:
        # Through the host, and only what is held: between streams llama.cpp's own seq_cp
        # copies every cell there is room for.
        self._cells.forget(source.stream, len(source.ids))
        self._cells.restore(target.stream, self._cells.save(source.stream))
        self._cells.forget(target.stream, length)

    def _reserve(self, length: int) -> None:
        """Room for slots of `length` ids. NoMemoryError, with everything as it was, where there is
        none."""
        capacity = self._capacity
        while capacity < length:
            capacity = min(2 * capacity, self._context)
        if capacity == self._capacity:
            return
        grown = self._make(capacity)  # before the old one goes: it may fail
        for slot in self._slots.values():
            if slot.ids:
                self._cells.forget(slot.stream, len(slot.ids))
                grown.restore(slot.stream, self._cells.save(slot.stream))
        self._cells.close()
        self._cells, self._capacity = grown, capacity

    def _make(self, capacity: int) -> NativeContext:
        return NativeContext(
            self._model,
            streams=self._max_slots,
            capacity=capacity,
            rows=max(PASS_ROWS, self._max_slots),
            threads=self._threads,
        )


def _wanted(block: Block, offset: int, count: int) -> tuple[int, ...]:
    """Of `count` tokens of a block from `offset` on, those whose rows are asked for."""
    first = max(0, len(block.tokens) - block.rows - offset)
    return tuple(range(first, count))


def usable_context(model: NativeModel, wanted: int | None) -> int:
    """Context length in tokens: the model's own, or less where `wanted` says so."""
    known = [limit for limit in (model.context_length, wanted or 0) if limit > 0]
    if not known:
        raise EngineError("the file states no context length; give one (context_length=...)")
    return min(known)


def default_threads() -> int:
    """Half of the processors this process may use (a container often has fewer than the machine).

    llama.cpp's threads wait for each other by spinning: one that has to share its processor, with
    a hyperthread or another process, holds up all."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (here or 1) // 2)
