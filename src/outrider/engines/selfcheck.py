"""Does an engine keep its promise on this machine? Two ways to the same rows, bit by bit.

`deterministic` rests on how the kernels of a processor sum, which no document promises. So a
target is asked when it is loaded: rows of one position computed in one block of the whole text,
alone behind a text that came in pieces, and after a rollback beside another slot, must be the same
bits (I9). It costs a handful of forwards.
"""

from __future__ import annotations

from typing import Final

from outrider.engines.base import Block, EngineError, FloatRow, LanguageModel

IDS: Final = 40
"""Ids of the text it is tried on: BLAS libraries take over from 32 rows on."""
_TAIL: Final = 5
_PIECE: Final = 7
_STRIDE: Final = 7919


def keeps_bits(model: LanguageModel) -> bool:
    """Compare the rows behind the last _TAIL of IDS ids, computed in three ways."""
    vocab = model.info.vocab_size
    count = min(IDS, model.info.context_length)
    ids = tuple(i * _STRIDE % vocab for i in range(count))
    tail = min(_TAIL, count - 1)
    expected = _bits(_at_once(model, ids, tail))
    return all(_bits(rows) == expected for rows in _one_by_one(model, ids, tail))


def _bits(rows: list[FloatRow]) -> list[bytes]:
    return [row.tobytes() for row in rows]


def _at_once(model: LanguageModel, ids: tuple[int, ...], tail: int) -> list[FloatRow]:
    slot = model.open()
    try:
        return list(model.forward([Block(slot=slot, start=0, tokens=ids, rows=tail)])[0])
    finally:
        model.close(slot)


def _one_by_one(model: LanguageModel, ids: tuple[int, ...], tail: int) -> list[list[FloatRow]]:
    """The rows of single forwards: alone in their pass and, with a second slot, in company."""
    start = len(ids) - tail
    slot, beside = model.open(), _second(model)
    try:
        for at in range(0, start, _PIECE):
            piece = ids[at : min(at + _PIECE, start)]
            model.forward([Block(slot=slot, start=at, tokens=piece, rows=0)])
        ways = [_singles(model, ids, slot, start, None)]
        model.truncate(slot, start)
        if beside is not None:
            ways.append(_singles(model, ids, slot, start, beside))
        return ways
    finally:
        model.close(slot)
        if beside is not None:
            model.close(beside)


def _singles(
    model: LanguageModel, ids: tuple[int, ...], slot: int, start: int, beside: int | None
) -> list[FloatRow]:
    rows: list[FloatRow] = []
    for i, at in enumerate(range(start, len(ids))):
        blocks = [Block(slot=slot, start=at, tokens=ids[at : at + 1], rows=1)]
        if beside is not None:
            blocks.append(Block(slot=beside, start=i, tokens=ids[i : i + 1], rows=1))
        rows.append(model.forward(blocks)[0][0])
    return rows


def _second(model: LanguageModel) -> int | None:
    """A slot for company, where the engine has more than one."""
    try:
        return model.open()
    except EngineError:
        return None


def require_bits(model: LanguageModel) -> None:
    """Raises EngineError, naming what to do, when a deterministic engine is not."""
    if model.info.deterministic and not keeps_bits(model):
        raise EngineError(
            f"{model.info.name} in {model.info.dtype} does not compute the same bits twice on this "
            "machine, so the same seed may not give the same text: use --threads 1, another "
            "--dtype (of GGUF files one in whole numbers, such as Q8_0 or Q4_1), or "
            "--no-deterministic, which counts near-ties instead"
        )
