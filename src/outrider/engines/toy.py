"""Models of known law, numpy only: for proofs, tests, demos of failures, and the simulator.

A law is a pure function from context to a row of logits. `ToyModel` gives a law the slots of a
real engine, so everything above the engine runs unchanged on it. Its rows depend on the ids
alone, hence it is deterministic by construction.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from outrider.core import rng
from outrider.engines.base import Block, FloatRow, IdArray, ModelInfo
from outrider.engines.slotbook import SlotBook, SlotRecord

Law = Callable[[tuple[int, ...]], FloatRow]
"""Context (all ids so far, at least one) to logits, float32 [vocab_size]."""

MAX_SLOTS: Final = 1024
"""Most slots of a toy model; bounded like every engine (I7)."""


def table_law(probabilities: Sequence[float] | Mapping[int, Sequence[float]], width: int) -> Law:
    """The same distribution everywhere, or one for each last token (a Markov chain)."""
    if isinstance(probabilities, Mapping):
        rows = {k: _log_row(v, width) for k, v in probabilities.items()}
        return lambda context: rows[context[-1]]
    row = _log_row(probabilities, width)
    return lambda _context: row


def _log_row(probabilities: Sequence[float], width: int) -> FloatRow:
    row = np.full(width, -np.inf, dtype=np.float32)
    for token, p in enumerate(probabilities):
        if p > 0:
            row[token] = math.log(p)
    return row


def logits_law(logits: Sequence[float]) -> Law:
    """The same logits at every position."""
    row = np.array(logits, dtype=np.float32)
    return lambda _context: row


def scripted_law(script: Sequence[int], *, start: int, width: int, filler: int = 0) -> Law:
    """Certain of `script[i]` at position start+i, of `filler` elsewhere (start: prompt length)."""

    def law(context: tuple[int, ...]) -> FloatRow:
        i = len(context) - start
        row = np.full(width, -30.0, dtype=np.float32)
        row[script[i] if 0 <= i < len(script) else filler] = 30.0
        return row

    return law


def random_law(seed: int, width: int, *, order: int = 2, sharpness: float = 2.0) -> Law:
    """Laplace logits (scale `sharpness`) drawn from a hash of the last `order` >= 1 ids."""
    offsets = rng.token_offsets(width)

    def law(context: tuple[int, ...]) -> FloatRow:
        state = seed
        for token in context[-order:]:
            state = rng.mix((state + (token + 1) * rng.GOLDEN) & rng.MASK)
        a = rng.exponentials(rng.integers(state, offsets))
        b = rng.exponentials(rng.integers(rng.mix(state), offsets))
        # Difference of two exponentials: symmetric, heavy-tailed, cheap. Enough for a toy.
        row: FloatRow = (sharpness * (a - b)).astype(np.float32)
        return row

    return law


def blend_law(first: Law, second: Law, share: float, seed: int) -> Law:
    """`second` at a `share` of contexts (chosen by a hash of the context), `first` elsewhere.

    `seed` must be another than `random_law`'s of either, or the text itself chooses its contexts.
    """

    def law(context: tuple[int, ...]) -> FloatRow:
        state = seed
        for token in context[-3:]:
            state = rng.mix((state + (token + 1) * rng.GOLDEN) & rng.MASK)
        pick = second if (state >> 11) * 2.0**-53 < share else first
        return pick(context)

    return law


def remember(law: Law, order: int) -> Law:
    """The same law, which must depend on the last `order` ids alone, with its rows kept: for small
    vocabularies, where most of a run's time would go into them."""
    rows: dict[tuple[int, ...], FloatRow] = {}

    def known(context: tuple[int, ...]) -> FloatRow:
        key = context[-order:]
        row = rows.get(key)
        if row is None:
            row = rows[key] = law(context)
        return row

    return known


class ToyModel(SlotBook[SlotRecord]):
    """A `LanguageModel` whose distribution is known."""

    def __init__(
        self,
        law: Law,
        *,
        vocab_size: int,
        name: str = "toy",
        context_length: int = 4096,
        eos_token_ids: frozenset[int] = frozenset(),
        fingerprint: str | None = None,
        support: IdArray | None = None,
        max_slots: int = MAX_SLOTS,
    ) -> None:
        super().__init__(max_slots=max_slots, context_length=context_length, id_count=vocab_size)
        self._law = law
        self._support = support
        self._passes = 0
        mark = fingerprint or hashlib.sha256(f"toy-{vocab_size}".encode()).hexdigest()
        self._info = ModelInfo(
            name=name,
            vocab_size=vocab_size,
            logits_width=vocab_size,
            context_length=context_length,
            fingerprint=mark,
            dtype="float32",
            deterministic=True,
            eos_token_ids=eos_token_ids,
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def support(self) -> IdArray | None:
        return self._support

    @property
    def passes(self) -> int:
        return self._passes

    def _compute(self, blocks: Sequence[Block], slots: Sequence[SlotRecord]) -> list[FloatRow]:
        self._passes += 1
        return [self._rows(slot, block) for slot, block in zip(slots, blocks, strict=True)]

    def _new(self) -> SlotRecord:
        return SlotRecord()

    def _copy(self, source: SlotRecord, target: SlotRecord, length: int) -> None:
        """The ids are all there is."""

    def _rows(self, slot: SlotRecord, block: Block) -> FloatRow:
        """Rows [block.rows, width] behind the last tokens of the block."""
        ids = (*slot.ids, *block.tokens)
        width = self._info.vocab_size if self._support is None else len(self._support)
        rows = np.empty((block.rows, width), dtype=np.float32)
        first = len(ids) - block.rows
        for i in range(block.rows):
            row = self._law(ids[: first + i + 1])
            rows[i] = row if self._support is None else row[self._support]
        return rows
