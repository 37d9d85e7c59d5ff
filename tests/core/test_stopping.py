"""Stop strings over any chunking, and which end event wins."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from outrider.core.stopping import StopRules, StopText
from outrider.core.tokens import FinishReason, SamplingParams

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def run(stops, chunks):
    """All that is shown for these chunks and then the end, and whether a stop was found."""
    text, shown = StopText(stops), []
    for chunk in chunks:
        out, stopped = text.push(chunk)
        shown.append(out)
        if stopped:
            return "".join(shown), True
    return "".join(shown) + text.flush(), False


def slow(stops, whole):
    """The definition, one character at a time: cut before the first stop that is complete."""
    for end in range(1, len(whole) + 1):
        hits = [s for s in stops if whole[:end].endswith(s)]
        if hits:
            return whole[: end - max(map(len, hits))], True
    return whole, False


TEXT = st.text(alphabet="ab\né", max_size=30)
STOPS = st.lists(st.text(alphabet="ab\né", min_size=1, max_size=5), max_size=4)


@given(STOPS, st.lists(TEXT, max_size=8))
def test_the_answer_does_not_depend_on_chunks(stops, chunks):
    assert run(stops, chunks) == slow(stops, "".join(chunks))


@given(STOPS, TEXT)
def test_one_character_at_a_time(stops, whole):
    assert run(stops, list(whole)) == slow(stops, whole)


@given(STOPS, st.lists(TEXT, min_size=1, max_size=8))
def test_only_what_may_become_a_stop_is_held(stops, chunks):
    text, shown, given_so_far = StopText(stops), "", ""
    for chunk in chunks:
        given_so_far += chunk
        out, stopped = text.push(chunk)
        assume(not stopped)
        shown += out
        held = given_so_far[len(shown) :]
        assert given_so_far == shown + held
        assert not held or any(s.startswith(held) and s != held for s in stops)
        longer = [given_so_far[i:] for i in range(len(shown))]
        assert not any(s.startswith(piece) for piece in longer for s in stops)


@pytest.mark.parametrize(
    ("stops", "chunks", "shown", "stopped"),
    [
        (["\nUser:"], ["Hi", "\nUs", "er", ":", " more"], "Hi", True),  # field case 19
        (["\nUser:"], ["Hi", "\nUs", "ual"], "Hi\nUsual", False),
        (["\n\n"], ["x", "\n", "\n", "y"], "x", True),
        (["<END>"], ["A", "B", "<END>", "C"], "AB", True),  # field case 02
        (["aab"], ["aa", "ab"], "a", True),  # a failed start is a start again
        (["bc", "abcd"], ["abcd"], "a", True),  # first completed wins
        (["abcd", "cd"], ["abcd"], "", True),  # then the longest
        ([], ["a", "b"], "ab", False),
        (["x"], [], "", False),
    ],
)
def test_literal_cases(stops, chunks, shown, stopped):
    assert run(stops, chunks) == (shown, stopped)
    assert run(stops, ["".join(chunks)]) == (shown, stopped)


def test_held_text_comes_out_late_but_whole():
    text = StopText(["<END>"])
    assert text.push("a<E") == ("a", False)
    assert text.push("N") == ("", False)
    assert text.push("!") == ("<EN!", False)
    assert text.push("<") == ("", False)
    assert text.flush() == "<"
    assert text.flush() == ""


# -- which end event wins ----------


def rules(**params) -> StopRules:
    return StopRules.of(SamplingParams(**params), eos=frozenset({7, 8}), room=100)


def test_end_ids_come_from_model_and_request():
    assert rules().end_ids == {7, 8}
    assert rules(stop_token_ids=frozenset({3})).end_ids == {3, 7, 8}
    assert rules(ignore_eos=True, stop_token_ids=frozenset({3})).end_ids == {3}


def test_the_limit_is_the_lesser_of_request_and_room():
    assert rules(max_tokens=5).limit == 5
    assert StopRules.of(SamplingParams(max_tokens=50), eos=frozenset(), room=9).limit == 9


@pytest.mark.parametrize(
    ("token", "count", "stop_text", "reason"),
    [
        (1, 4, False, None),
        (1, 5, False, LENGTH),
        (1, 6, False, LENGTH),
        (7, 1, False, STOP),
        (8, 5, False, STOP),  # an end id on the last allowed token is a stop
        (1, 5, True, STOP),  # and so is a stop string completed by it
        (1, 1, True, STOP),
    ],
)
def test_reason(token, count, stop_text, reason):
    assert rules(max_tokens=5).reason(token, count, stop_text=stop_text) is reason
