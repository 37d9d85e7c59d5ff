"""The committed prefix only grows; the tail is judged, goes on, or is dropped with an epoch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.sequence import SpeculativeSequence
from outrider.core.tokens import Verdict


def started(*tail: int) -> SpeculativeSequence:
    sequence = SpeculativeSequence([1, 2, 3])
    sequence.extend(tail)
    return sequence


def test_a_sequence_starts_with_its_prompt():
    sequence = started(7, 8)
    assert sequence.committed == (1, 2, 3)
    assert sequence.tail == (7, 8)
    assert sequence.base == 3
    assert len(sequence) == 5
    assert sequence.output == ()
    assert sequence.output_length == 0
    assert sequence.prompt_length == 3
    with pytest.raises(ValueError):
        SpeculativeSequence([])


def test_rejection_drops_the_tail_and_begins_an_epoch():
    sequence = started(7, 8, 9)
    assert sequence.commit(Verdict(drafted=3, accepted=1, token=5)) == (7, 5)
    assert sequence.committed == (1, 2, 3, 7, 5)
    assert sequence.tail == ()
    assert sequence.epoch == 1


def test_full_acceptance_without_a_tail_is_no_rollback():
    sequence = started(7, 8)
    assert sequence.commit(Verdict(drafted=2, accepted=2, token=5)) == (7, 8, 5)
    assert (sequence.tail, sequence.epoch) == ((), 0)


def test_a_bonus_that_was_drafted_goes_on():
    sequence = started(7, 8, 5, 6)
    sequence.commit(Verdict(drafted=2, accepted=2, token=5))
    assert (sequence.tail, sequence.epoch) == ((6,), 0)
    sequence.commit(Verdict(drafted=1, accepted=1, token=4))
    assert (sequence.output, sequence.tail, sequence.epoch) == ((7, 8, 5, 6, 4), (), 0)


def test_another_bonus_drops_what_lay_behind():
    sequence = started(7, 8, 5, 6)
    sequence.commit(Verdict(drafted=2, accepted=2, token=9))
    assert (sequence.output, sequence.tail, sequence.epoch) == ((7, 8, 9), (), 1)


def test_settle_says_how_much_had_been_drafted():
    sequence = started(7, 8, 9)
    assert sequence.settle([7, 8]) == 2
    assert sequence.tail == (9,)
    assert sequence.settle([4, 9]) == 0  # the tail is gone with the 4
    assert sequence.committed == (1, 2, 3, 7, 8, 4, 9)
    assert sequence.epoch == 1


def test_a_verdict_judges_only_what_is_outstanding():
    with pytest.raises(ValueError, match="3 drafts, 2 outstanding"):
        started(7, 8).commit(Verdict(drafted=3, accepted=0, token=5))


def test_slices_begin_in_the_committed_prefix():
    sequence = started(7)
    assert sequence.slice(1) == (2, 3, 7)
    assert sequence.slice(3) == (7,)
    for start in (-1, 4):
        with pytest.raises(ValueError):
            sequence.slice(start)


def test_rolling_back_nothing_is_no_epoch():
    sequence = started()
    assert sequence.rollback() == 0
    assert sequence.epoch == 0
    sequence.extend([7, 8])
    assert sequence.rollback() == 2
    assert sequence.epoch == 1


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), max_size=5), st.integers(0, 5), st.integers(0, 2)),
        max_size=12,
    )
)
def test_any_history(rounds):
    """Drafts and verdicts in any order: the committed ids are exactly what was fixed (I2), and
    the epoch grows when, and only when, ids were thrown away."""
    sequence = SpeculativeSequence([9])
    model, tail, epoch = [9], [], 0
    for drafts, wanted, token in rounds:
        sequence.extend(drafts)
        tail += drafts
        accepted = min(wanted, len(tail))
        before = sequence.committed
        fixed = sequence.commit(Verdict(drafted=len(tail), accepted=accepted, token=token))
        assert fixed == (*tail[:accepted], token)
        model += fixed
        rest = tail[accepted:]
        goes_on = bool(rest) and rest[0] == token
        tail = rest[1:] if goes_on else []
        epoch += bool(rest) and not goes_on
        assert sequence.committed == tuple(model)
        assert sequence.committed[: len(before)] == before
        assert (sequence.tail, sequence.epoch) == (tuple(tail), epoch)
        assert len(sequence) == len(model) + len(tail)
