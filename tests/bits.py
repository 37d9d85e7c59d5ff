"""Walks through an engine in which every prefix must have the same bits by every way (I9)."""

from __future__ import annotations

import random
from typing import Any

from outrider.engines.base import Block, LanguageModel
from tiny import CONTEXT


class Oracle:
    """Remembers the bits of each prefix's row; complains when they come out otherwise."""

    def __init__(self) -> None:
        self._bits: dict[tuple[int, ...], bytes] = {}
        self.repeats = 0

    def check(self, context: tuple[int, ...], row: Any) -> None:
        bits = row.tobytes()
        self.repeats += context in self._bits
        known = self._bits.setdefault(context, bits)
        assert known == bits, f"other bits after {len(context)} ids"


def wander(
    model: LanguageModel, texts: list[list[int]], oracle: Oracle, *, steps: int, seed: int
) -> None:
    """Random opens, closes, blocks of several sessions, rollbacks, copies and rebuilds over a
    few texts, so that the same prefixes are met again and again by other ways."""
    rng = random.Random(seed)
    slots = {model.open(): rng.choice(texts) for _ in range(3)}
    for _ in range(steps):
        chosen = rng.sample(sorted(slots), rng.randint(1, len(slots)))
        blocks = []
        for slot in chosen:
            start, text = model.length(slot), slots[slot]
            wanted = rng.choice([1, 1, 2, 3, 5, 8, 9, 17, 40])
            tokens = text[start : start + wanted]
            wrong = rng.randint(0, 3) if rng.random() < 0.3 else 0
            tokens += [rng.randrange(60) for _ in range(min(wrong, CONTEXT - start - len(tokens)))]
            if tokens:
                rows = rng.choice([0, 1, len(tokens), len(tokens)])
                block = Block(slot=slot, start=start, tokens=tuple(tokens), rows=min(rows, 99))
                blocks.append(block)
        for block, rows in zip(blocks, model.forward(blocks), strict=True):
            held = model.tokens(block.slot)
            for back, row in enumerate(rows[::-1]):
                oracle.check(held[: len(held) - back], row)
        _shuffle(model, slots, texts, rng)
    for slot in slots:
        model.close(slot)


def _shuffle(
    model: LanguageModel, slots: dict[int, list[int]], texts: list[list[int]], rng: random.Random
) -> None:
    """Back to the text where a slot has left it, sometimes further; now and then a new slot."""
    for slot, text in list(slots.items()):
        held = model.tokens(slot)
        agreed = next(
            (i for i, (a, b) in enumerate(zip(held, text, strict=False)) if a != b),
            min(len(held), len(text)),
        )
        if agreed == len(text) or rng.random() < 0.3:
            agreed = rng.randint(0, agreed)
        model.truncate(slot, agreed)
    if rng.random() < 0.3:
        gone = rng.choice(sorted(slots))
        model.close(gone)
        del slots[gone]
        text = rng.choice(texts)
        fresh = model.open()
        slots[fresh] = text
        for source, other in slots.items():
            if other is text and source != fresh and model.length(source):
                model.copy_prefix(source, fresh, rng.randint(0, model.length(source)))
                break


def texts_of(count: int, length: int = CONTEXT) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(60) for _ in range(length)] for _ in range(count)]
