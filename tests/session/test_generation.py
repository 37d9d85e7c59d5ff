"""Commit, cut, count: what a block adds to an answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.draft import Draft
from outrider.core.tokens import (
    FinishReason,
    Origin,
    ParameterError,
    SamplingParams,
    TokenLogprob,
    Verdict,
)
from outrider.core.verify import ResidualStep
from outrider.session.generation import Counters, Generation
from outrider.session.verifier import Judgement
from pair import HalfCharacters, Pieces

PIECES = Pieces(["a", "b", "<END>", "c", "<E", "ND>", "x\ny", "z"])
END = 7


def generation(*, room: int = 100, late: bool = False, **params) -> Generation:
    text = HalfCharacters(PIECES.pieces) if late else PIECES.text_stream()
    return Generation(
        (1, 2),
        SamplingParams(**{"max_tokens": 50, **params}),
        context_length=2 + room,
        eos=frozenset({END}),
        text=text,
    )


def judged(accepted: int, token: int, drafted: int, **more) -> Judgement:
    return Judgement(verdict=Verdict(drafted=drafted, accepted=accepted, token=token), **more)


def apply(made: Generation, drafts: tuple[int, ...], accepted: int, token: int, **more):
    return made.apply(Draft(tokens=drafts), judged(accepted, token, len(drafts), **more))


def test_one_block():
    made = generation()
    step = apply(made, (0, 1, 3), 2, 0)
    assert step.tokens == (0, 1, 0)
    assert step.origins == (Origin.DRAFT, Origin.DRAFT, Origin.CORRECTION)
    assert (step.text, step.finish) == ("aba", None)
    assert made.sequence.output == (0, 1, 0)
    assert made.tokens_left == 47
    assert (made.counters.rounds, made.counters.drafted, made.counters.accepted) == (1, 3, 2)


def test_a_correction_equal_to_the_rejected_draft_begins_a_new_block():
    """When nothing was left over, the correction may be the very id that was rejected. The
    drafts behind it were not judged; the next block starts behind the committed ids."""
    made = generation()
    apply(made, (0, 1, 3), 1, 1)
    assert made.sequence.output == (0, 1)
    assert made.sequence.tail == ()
    assert made.sequence.slice(3) == (1,)
    apply(made, (0,), 1, 3)
    assert made.sequence.output == (0, 1, 0, 3)


@pytest.mark.parametrize(
    ("drafts", "accepted", "token", "kept", "counted"),
    [
        ((0, 1, END, 3, 3), 5, 0, 3, (3, 3)),  # field case 37
        ((END, 1), 2, 0, 1, (1, 1)),
        ((0, 1), 2, END, 3, (2, 2)),  # as the bonus
        ((0, 1, 3), 1, END, 2, (2, 1)),  # as the correction
        ((), 0, END, 1, (0, 0)),
    ],
)
def test_an_end_token_cuts_everything(drafts, accepted, token, kept, counted):
    made = generation()
    entries = tuple(TokenLogprob(token=0, logprob=-1.0) for _ in range(accepted + 1))
    step = apply(made, drafts, accepted, token, logprobs=entries)
    whole = (*drafts[:accepted], token)
    assert step.tokens == made.sequence.output == whole[:kept]
    assert step.finish is made.finish is FinishReason.STOP
    assert len(step.origins) == len(step.logprobs) == kept
    assert step.text == PIECES.decode(list(whole[: kept - 1]))
    assert (made.counters.drafted, made.counters.accepted) == counted
    assert made.tokens_left == 0
    with pytest.raises(ValueError, match="has ended"):
        apply(made, (), 0, 0)


def test_counters_forget_what_lies_behind_the_end():
    """Field case 37, for near-ties and for the dialogue of a rejection that no longer counts."""
    made = generation()
    ties = (True, False, True)
    apply(made, (0, END), 2, 3, near_ties=ties, residual=None)
    assert made.counters.near_ties == 1
    made = generation()
    apply(made, (END, 1, 1), 1, 3, near_ties=ties, residual=ResidualStep.FULL_ROW)
    assert made.counters.residual == {}
    assert made.counters.near_ties == 1
    made = generation()
    apply(made, (0, 1, 1), 1, 3, residual=ResidualStep.FULL_ROW)
    apply(made, (0, 1, 1), 1, 3, residual=ResidualStep.FULL_ROW)
    assert made.counters.residual == {"full-row": 2}


def test_counters_by_place_in_the_block():
    made = generation()
    apply(made, (0, 1, 3), 2, 0)
    apply(made, (0,), 0, 1)
    apply(made, (), 0, 1)
    apply(made, (0, 0), 2, 1)
    assert made.counters.drafted_at == [3, 2, 1]
    assert made.counters.accepted_at == [2, 2, 0]
    assert made.counters.acceptance == pytest.approx(4 / 6)
    assert Counters().acceptance is None


# -- text and ends ----------


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("tokens", "limit", "text", "reason", "count"),
    [
        ((0, 1, 2, 3, 0, 0), 6, "ab", "stop", 3),  # field case 02
        ((0, 1, 2, 3, 0, 0), 3, "ab", "stop", 3),
        ((0, 1, 2, 3, 0, 0), 2, "ab", "length", 2),
        ((0, 4, 5, 3), 4, "a", "stop", 3),  # over two tokens
        ((0, 4, 1, 4), 4, "a<Eb<E", "length", 4),  # held, and released at the end
        ((0, 4, END), 9, "a<E", "stop", 3),
    ],
)
def test_text_and_reason(tokens, limit, text, reason, count, late):
    """Whatever the blocks. `late`: text that comes out one token later, as within a character;
    then a stop may complete only in what the end of the text releases."""
    for size in (1, 2, 3, 6):
        made = generation(max_tokens=limit, stop=("<END>",), late=late)
        shown = ""
        for i in range(0, len(tokens), size):
            block = tokens[i : i + size]
            step = apply(made, block[:-1], len(block) - 1, block[-1])
            shown += step.text
            if made.finish:
                break
        assert shown == text
        assert made.finish == reason
        ends_late = late and reason == "stop" and tokens[count - 1] != END and limit > count
        assert made.sequence.output_length == count + ends_late


@given(
    st.lists(st.integers(0, len(PIECES.pieces) - 1), min_size=1, max_size=20),
    st.lists(st.integers(1, 5), min_size=20, max_size=20),
    st.integers(1, 20),
)
def test_chunks_change_nothing(tokens, sizes, limit):
    def run(sizes):
        made = generation(max_tokens=limit, stop=("<END>", "b<E", "y"))
        shown, left = "", list(tokens)
        for size in sizes:
            block, left = left[:size], left[size:]
            if not block or made.finish:
                break
            step = apply(made, tuple(block[:-1]), len(block) - 1, block[-1])
            shown += step.text
        return shown, made.finish, made.sequence.output, made.counters.accepted >= 0

    assert run(sizes) == run([1] * 20) == run([20])


# -- room ----------


def test_drafts_are_lowered_to_what_is_left():
    made = generation(max_tokens=4)
    assert made.draft_room(8) == 3  # the target's own token takes the last place
    apply(made, (0, 0), 2, 0)
    assert made.draft_room(8) == 0
    apply(made, (), 0, 0)
    assert made.finish is FinishReason.LENGTH
    assert made.draft_room(8) == 0


def test_the_context_is_a_limit_too():
    made = generation(room=3)
    assert made.draft_room(10) == 2
    step = apply(made, (0, 0), 2, 0)
    assert step.finish is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("prompt", "word"), [((), "empty"), ((1,) * 9, "8 tokens"), ((1,) * 8, "at most 7")]
)
def test_prompts_that_cannot_be(prompt, word):
    with pytest.raises(ParameterError) as caught:
        Generation(
            prompt,
            SamplingParams(),
            context_length=8,
            eos=frozenset(),
            text=PIECES.text_stream(),
        )
    assert caught.value.field == "prompt"
    assert word in str(caught.value) or word == "8 tokens"


def test_ending_at_once_leaves_no_tail():
    made = generation()
    made.sequence.extend([0, END, 3, 3])
    made.commit((0, END), (Origin.DRAFT, Origin.DRAFT))
    assert made.sequence.tail == ()
    assert made.sequence.committed == (1, 2, 0, END)
