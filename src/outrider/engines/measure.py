"""What a forward costs by its number of rows, measured on the engine itself.

The row-cost curve decides how many guesses are worth judging (control.costs), so a verifier
measures it before it serves: learnt only on the way, the first answers would pay for the lesson.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

from outrider.engines.base import Block, LanguageModel

ROWS: Final = (1, 2, 4, 8, 9, 16, 17)
"""Powers of two, and the row behind 8 and 16: a kernel or a pass of fixed shape ends there, and
the cost jumps. Between 8 and 16 measured alone, nine rows would look like a little more than
eight and cost twice as much."""
CONTEXT: Final = 128
"""Tokens behind which the rows stand: a short conversation."""
REPEATS: Final = 3
STEPS: Final = 9
"""Of a model that takes one step a token: the first feeds the prompt, the others are measured."""
_STRIDE: Final = 7919
"""Spreads made-up ids over the vocabulary; what they say does not matter to the time."""


def row_seconds(
    model: LanguageModel,
    rows: int,
    *,
    context: int = CONTEXT,
    repeats: int = REPEATS,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Seconds of `repeats` forwards over `rows` rows behind `context` ids, one slot."""
    vocab = model.info.vocab_size
    ids = tuple(i * _STRIDE % vocab for i in range(context + rows))
    slot = model.open()
    spent = []
    try:
        model.forward([Block(slot=slot, start=0, tokens=ids[:context], rows=0)])
        for _ in range(repeats):
            began = clock()
            model.forward([Block(slot=slot, start=context, tokens=ids[context:], rows=rows)])
            spent.append(clock() - began)
            model.truncate(slot, context)
    finally:
        model.close(slot)
    return spent


def step_seconds(
    model: LanguageModel, *, steps: int = STEPS, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Seconds of `steps` single steps along the model's own answer, one slot."""
    vocab, count = model.info.vocab_size, max(1, min(CONTEXT, model.info.context_length - steps))
    slot = model.open()
    spent = []
    try:
        tokens, start = tuple(i * _STRIDE % vocab for i in range(count)), 0
        for _ in range(steps):
            began = clock()
            rows = model.forward([Block(slot=slot, start=start, tokens=tokens, rows=1)])[0]
            spent.append(clock() - began)
            tokens, start = (int(rows[0].argmax()),), start + len(tokens)
    finally:
        model.close(slot)
    return spent[1:]  # the first one read the prompt


def row_costs(
    model: LanguageModel, rows: Sequence[int] = ROWS, *, added: float = 0.0
) -> list[tuple[int, float]]:
    """(rows, median seconds + `added`) for each row count that fits the model's window. Of a
    stepwise model (`ModelInfo`) the steps that so many tokens take."""
    if model.info.stepwise:  # made-up guesses would be wrong at once, and look free
        step = statistics.median(step_seconds(model))
        return [(n, n * step + added) for n in rows]
    context = min(CONTEXT, max(1, model.info.context_length - max(rows)))
    fitting = [n for n in rows if context + n <= model.info.context_length]
    return [(n, statistics.median(row_seconds(model, n, context=context)) + added) for n in fitting]
