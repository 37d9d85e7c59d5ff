"""Does an engine keep its promise on this machine? Two ways to the same rows, bit by bit.

`deterministic` rests on how the kernels of a processor sum, which no document promises. So a
target is asked when it is loaded: rows of one position computed alone, in a block, and after a
rollback must be the same bits (I9). It costs a handful of forwards.
"""

from __future__ import annotations

from typing import Final

from outrider.engines.base import Block, EngineError, FloatRow, LanguageModel

IDS: Final = 24
"""Ids of the text it is tried on: a prefill of three passes at eight rows."""
_STRIDE: Final = 7919


def keeps_bits(model: LanguageModel) -> bool:
    """Compare the rows behind the last five of IDS ids, computed one by one and as one block."""
    vocab = model.info.vocab_size
    count = min(IDS, model.info.context_length)
    ids = tuple(i * _STRIDE % vocab for i in range(count))
    tail = min(5, count - 1)
    slot = model.open()
    try:
        start = count - tail
        model.forward([Block(slot=slot, start=0, tokens=ids[:start], rows=0)])
        block = model.forward([Block(slot=slot, start=start, tokens=ids[start:], rows=tail)])[0]
        alone: list[FloatRow] = []
        model.truncate(slot, start)
        for at in range(start, count):
            one = Block(slot=slot, start=at, tokens=ids[at : at + 1], rows=1)
            alone.append(model.forward([one])[0][0])
    finally:
        model.close(slot)
    return all(a.tobytes() == b.tobytes() for a, b in zip(alone, block, strict=True))


def require_bits(model: LanguageModel) -> None:
    """Raises EngineError, naming what to do, when a deterministic engine is not."""
    if model.info.deterministic and not keeps_bits(model):
        raise EngineError(
            f"{model.info.name} in {model.info.dtype} does not compute the same bits twice on this "
            "machine, so the same seed may not give the same text: use --threads 1, another "
            "--dtype, or --no-deterministic, which counts near-ties instead"
        )
