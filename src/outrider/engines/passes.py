"""Which rows share a model pass: pure arithmetic, no torch.

A *row* is one token at one position of one slot. A *segment* is a run of consecutive rows of
one block. A *pass* is what the model sees at once. Rules:

* The rows of a block enter passes in order; the rows of one pass may belong to many blocks.
* With buckets, every row of a pass has the same *span*: the number of key/value places it
  attends to, a function of its own position only. A block is cut where the span changes.
* A pass never holds more than `rows` rows.

Why a span at all: the sum over keys is evaluated in an order that hangs on how many keys
there are, masked ones included, so a row keeps its bits only if the span does not depend on
what else is in the slot or the pass (docs/architecture.md, Numerics).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from outrider.engines.base import Block

FIRST_BUCKET: Final = 64
"""Smallest span. Below it attention costs next to nothing beside the linear layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive rows of one block in one pass."""

    block: int
    """Index of the block in the forward call."""
    offset: int
    """Index of the first row inside the block."""
    position: int
    """Absolute position of the first row."""
    count: int

    def tokens(self, blocks: Sequence[Block]) -> tuple[int, ...]:
        """The ids of its rows."""
        return blocks[self.block].tokens[self.offset : self.offset + self.count]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Segments that go through the model together, in row order."""

    segments: tuple[Segment, ...]
    span: int | None
    """Places every row attends to; None: each segment up to its own last position."""

    @property
    def rows(self) -> int:
        return sum(segment.count for segment in self.segments)


def bucket(position: int, context: int) -> int:
    """The span of a row: smallest of 64, 128, 256, ... beyond `position`, at most `context`."""
    size = FIRST_BUCKET
    while size <= position:
        size *= 2
    return min(size, context)


def wanted_rows(each: Pass, blocks: Sequence[Block]) -> Iterator[tuple[int, int, int]]:
    """(row of the pass, block, row of the block's output) of every row somebody asked for."""
    row = 0
    for segment in each.segments:
        block = blocks[segment.block]
        skipped = len(block.tokens) - block.rows
        for i in range(segment.offset, segment.offset + segment.count):
            if i >= skipped:
                yield row, segment.block, i - skipped
            row += 1


def plan_bucketed(blocks: Sequence[Block], *, rows: int, context: int) -> list[Pass]:
    """Passes of at most `rows` rows in which all rows have one span.

    Greedy: the span with most rows waiting goes first, so full passes come before ragged
    ones; ties go to the shorter span. Blocks share a pass in call order.
    """
    done = [0] * len(blocks)
    passes: list[Pass] = []
    while True:
        waiting = _waiting(blocks, done, context)
        if not waiting:
            return passes
        totals: dict[int, int] = {}
        for segment, span in waiting:
            totals[span] = totals.get(span, 0) + segment.count
        best = min(totals, key=lambda span: (-totals[span], span))
        taken = _take([segment for segment, span in waiting if span == best], rows)
        for segment in taken:
            done[segment.block] += segment.count
        passes.append(Pass(segments=tuple(taken), span=best))


def plan_plain(blocks: Sequence[Block], *, rows: int) -> list[Pass]:
    """Passes of at most `rows` rows, spans as they come."""
    todo = [
        Segment(block=i, offset=0, position=block.start, count=len(block.tokens))
        for i, block in enumerate(blocks)
    ]
    passes: list[Pass] = []
    while todo:
        taken = _take(todo, rows)
        passes.append(Pass(segments=tuple(taken), span=None))
        last, whole = taken[-1], todo[len(taken) - 1]
        todo = todo[len(taken) :]
        if last.count < whole.count:
            todo.insert(0, _drop(whole, last.count))
    return passes


def plan_even(blocks: Sequence[Block], *, lanes: Sequence[int], rows: int) -> list[Pass]:
    """Passes of at most `rows` rows in which every block has as many rows as the others.

    `lanes[i]` is where block i lives; the blocks of a pass are in neighbouring lanes, ascending.
    For engines that hold the cache as one array over lanes and rows.
    """
    left = [len(block.tokens) for block in blocks]
    order = sorted(range(len(blocks)), key=lambda i: lanes[i])
    passes: list[Pass] = []
    while waiting := [i for i in order if left[i]]:
        run = waiting[:1]
        for i in waiting[1:rows]:
            if lanes[i] != lanes[run[-1]] + 1:
                break
            run.append(i)
        count = min(rows // len(run), *(left[i] for i in run))
        passes.append(
            Pass(segments=tuple(_next(blocks, i, left[i], count) for i in run), span=None)
        )
        for i in run:
            left[i] -= count
    return passes


def _next(blocks: Sequence[Block], index: int, left: int, count: int) -> Segment:
    """The next `count` rows of a block of which `left` are still to come."""
    offset = len(blocks[index].tokens) - left
    position = blocks[index].start + offset
    return Segment(block=index, offset=offset, position=position, count=count)


def _waiting(
    blocks: Sequence[Block], done: Sequence[int], context: int
) -> list[tuple[Segment, int]]:
    """Per unfinished block, its next rows up to the next bucket border, with their span."""
    found: list[tuple[Segment, int]] = []
    for i, (block, offset) in enumerate(zip(blocks, done, strict=True)):
        left = len(block.tokens) - offset
        if left:
            position = block.start + offset
            span = bucket(position, context)
            count = min(left, span - position)
            segment = Segment(block=i, offset=offset, position=position, count=count)
            found.append((segment, span))
    return found


def _take(segments: Sequence[Segment], rows: int) -> list[Segment]:
    """The first `rows` rows of the segments, the last segment cut if need be."""
    taken: list[Segment] = []
    for segment in segments:
        count = min(segment.count, rows)
        if not count:
            break
        rows -= count
        taken.append(
            Segment(
                block=segment.block, offset=segment.offset, position=segment.position, count=count
            )
        )
    return taken


def _drop(segment: Segment, count: int) -> Segment:
    """What is left of a segment after its first `count` rows."""
    return Segment(
        block=segment.block,
        offset=segment.offset + count,
        position=segment.position + count,
        count=segment.count - count,
    )
