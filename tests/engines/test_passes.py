"""Pass planning: every row once, in order, in passes that obey the rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.engines.base import Block
from outrider.engines.passes import Pass, bucket, plan_bucketed, plan_even, plan_plain

CONTEXT = 300

lengths = st.lists(st.tuples(st.integers(0, 250), st.integers(1, 50)), min_size=1, max_size=6)


def blocks_of(shapes: list[tuple[int, int]]) -> list[Block]:
    return [
        Block(slot=i, start=start, tokens=tuple(range(count)), rows=count)
        for i, (start, count) in enumerate(shapes)
    ]


def rows_of(passes: list[Pass], block: int) -> list[tuple[int, int]]:
    """(offset, position) of a block's rows in the order they run."""
    return [
        (s.offset + i, s.position + i)
        for each in passes
        for s in each.segments
        if s.block == block
        for i in range(s.count)
    ]


@pytest.mark.parametrize(
    ("position", "span"), [(0, 64), (63, 64), (64, 128), (127, 128), (128, 256), (256, 300)]
)
def test_bucket_is_the_smallest_that_holds_the_position(position: int, span: int) -> None:
    assert bucket(position, CONTEXT) == span


def test_bucket_of_a_context_below_the_first() -> None:
    assert bucket(5, 40) == 40


@given(lengths, st.integers(1, 16))
def test_bucketed_passes(shapes: list[tuple[int, int]], rows: int) -> None:
    blocks = blocks_of(shapes)
    passes = plan_bucketed(blocks, rows=rows, context=CONTEXT)
    for i, block in enumerate(blocks):
        expected = [(j, block.start + j) for j in range(len(block.tokens))]
        assert rows_of(passes, i) == expected
    for each in passes:
        assert 0 < each.rows <= rows
        for segment in each.segments:
            first, last = segment.position, segment.position + segment.count - 1
            assert bucket(first, CONTEXT) == bucket(last, CONTEXT) == each.span


@given(lengths, st.integers(1, 64))
def test_plain_passes(shapes: list[tuple[int, int]], rows: int) -> None:
    blocks = blocks_of(shapes)
    passes = plan_plain(blocks, rows=rows)
    for i, block in enumerate(blocks):
        expected = [(j, block.start + j) for j in range(len(block.tokens))]
        assert rows_of(passes, i) == expected
    total = sum(len(block.tokens) for block in blocks)
    assert len(passes) == -(-total // rows)
    assert all(each.rows <= rows and each.span is None for each in passes)


def test_sessions_of_one_bucket_share_a_pass() -> None:
    passes = plan_bucketed(blocks_of([(10, 3), (20, 2), (30, 3)]), rows=8, context=CONTEXT)
    assert [each.rows for each in passes] == [8]


def test_a_block_is_cut_at_a_bucket_border() -> None:
    passes = plan_bucketed(blocks_of([(62, 4)]), rows=8, context=CONTEXT)
    assert [(each.span, each.rows) for each in passes] == [(64, 2), (128, 2)]


# --- even passes -------------------------------------------------------------------------


@given(lengths, st.integers(6, 40), st.randoms(use_true_random=False))
def test_even_passes_are_rectangles_over_neighbouring_lanes(shapes, rows, chance) -> None:
    blocks = blocks_of(shapes)
    lanes = chance.sample(range(9), len(blocks))
    passes = plan_even(blocks, lanes=lanes, rows=rows)
    for each in passes:
        assert each.rows <= rows
        assert len({segment.count for segment in each.segments}) == 1
        taken = [lanes[segment.block] for segment in each.segments]
        assert taken == list(range(taken[0], taken[0] + len(taken)))
    for i, block in enumerate(blocks):
        count = len(block.tokens)
        assert rows_of(passes, i) == [(at, block.start + at) for at in range(count)]


def test_even_passes_share_what_they_can() -> None:
    blocks = blocks_of([(0, 5), (10, 2), (20, 2)])
    shared = plan_even(blocks, lanes=[1, 0, 2], rows=64)
    assert [(len(each.segments), each.rows) for each in shared] == [(3, 6), (1, 3)]
    apart = plan_even(blocks, lanes=[0, 2, 4], rows=64)
    assert [each.rows for each in apart] == [5, 2, 2]
    assert [each.rows for each in plan_even(blocks[:1], lanes=[0], rows=2)] == [2, 2, 1]
