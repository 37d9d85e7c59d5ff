"""One edge session, message by message."""

from __future__ import annotations

import pytest

from outrider.core.draft import NO_DRAFT
from outrider.core.draft import Draft as Guess
from outrider.core.tokens import Origin, SamplingParams
from outrider.proto.digest import of_prefix
from outrider.proto.errors import RemoteError
from outrider.proto.messages import Code, Done, Draft, Logprobs, Tokens, Verdict
from outrider.session.edge import RETRY_AFTER, EdgeSession
from outrider.session.generation import Generation
from outrider.session.window import WindowPolicy
from world import Words

EOS = 0


def session(window: int = 8, chunk: int = 1, *, limit: int = 20, **policy: bool) -> EdgeSession:
    generation = Generation(
        (1, 2),
        SamplingParams(max_tokens=limit),
        context_length=100,
        eos=frozenset({EOS}),
        text=Words(),
    )
    return EdgeSession(1, generation, WindowPolicy(window=window, chunk=chunk, **policy), now=0.0)


def drafts(s: EdgeSession, *tokens: int, now: float = 0.0) -> tuple[Draft, ...]:
    assert s.next_draft(0.0) is not None
    return s.drafted(Guess(tokens=tokens), now)  # type: ignore[return-value]


def verdict(start: int, drafted: int, accepted: int, token: int, epoch: int = 0) -> Verdict:
    return Verdict(
        session=1, epoch=epoch, start=start, drafted=drafted, accepted=accepted, token=token
    )


def test_chunks_follow_one_another_until_the_window_is_full():
    s = session(window=3)
    assert drafts(s, 5) == (Draft(session=1, epoch=0, start=2, tokens=(5,)),)
    assert drafts(s, 6) == (Draft(session=1, epoch=0, start=3, tokens=(6,)),)
    assert drafts(s, 7) == (Draft(session=1, epoch=0, start=4, tokens=(7,)),)
    assert s.next_draft(0.0) is None
    step = s.on_verdict(verdict(2, 2, 2, 7), 1.0)
    assert step is not None
    assert step.tokens == (5, 6, 7)
    assert step.origins == (Origin.DRAFT, Origin.DRAFT, Origin.BONUS)
    assert s.generation.sequence.epoch == 0, "a bonus that was drafted ends no chain"


def test_a_rejection_begins_a_new_epoch_and_late_drafts_are_dropped():
    s = session()
    drafts(s, 5)
    job = s.next_draft(0.0)
    assert job is not None
    assert job.context == (1, 2, 5)
    s.on_verdict(verdict(2, 1, 0, 9), 1.0)
    assert s.drafted(Guess(tokens=(6,)), 1.0) == ()
    assert s.wasted == 1
    assert drafts(s, 4) == (Draft(session=1, epoch=1, start=3, tokens=(4,)),)


def test_a_draft_that_was_overtaken_still_counts_where_it_agrees():
    s = session(chunk=3)
    assert s.next_draft(0.0) is not None
    s.on_tokens(Tokens(session=1, start=2, tokens=(5,)), 0.5)
    assert s.drafted(Guess(tokens=(5, 6, 7)), 1.0) == (
        Draft(session=1, epoch=0, start=3, tokens=(6, 7)),
    )
    assert s.on_tokens(Tokens(session=1, start=3, tokens=(6,)), 1.5) is not None
    assert s.rejoined == 1


def test_an_empty_guess_is_final_for_its_own_position_only():
    s = session()
    assert s.next_draft(0.0) is not None
    (ask,) = s.drafted(NO_DRAFT, 0.0)
    assert ask == Draft(session=1, epoch=0, start=2, tokens=())
    assert s.next_draft(0.0) is None
    s.on_tokens(Tokens(session=1, start=2, tokens=(5,)), 1.0)
    assert s.next_draft(0.0) is not None
    # The answer to a question about a place that is already taken says nothing about this one.
    s.on_tokens(Tokens(session=1, start=3, tokens=(6,)), 2.0)
    assert s.drafted(NO_DRAFT, 2.0) == ()
    assert s.next_draft(0.0) is not None


def test_nothing_is_drafted_behind_a_guessed_end():
    s = session()
    drafts(s, EOS)
    assert s.next_draft(0.0) is None
    s.on_verdict(verdict(2, 1, 0, 7), 1.0)
    assert s.next_draft(0.0) is not None


def test_the_last_place_is_the_targets():
    s = session(chunk=8, limit=3)
    job = s.next_draft(0.0)
    assert job is not None
    assert job.count == 2


@pytest.mark.parametrize(
    "frame",
    [
        verdict(9, 1, 0, 1),
        verdict(2, 5, 5, 1),
        verdict(2, 1, 1, 1, epoch=3),
        Tokens(session=1, start=9, tokens=(1,)),
        Tokens(session=1, start=1, tokens=(7,)),
    ],
    ids=repr,
)
def test_contradictions_are_the_clouds_fault(frame: Verdict | Tokens):
    s = session()
    drafts(s, 5)
    hear = s.on_verdict if isinstance(frame, Verdict) else s.on_tokens
    with pytest.raises(RemoteError) as refused:
        hear(frame, 1.0)  # type: ignore[arg-type]
    assert refused.value.code is Code.STATE
    assert s.generation.sequence.output == ()
    assert s.generation.sequence.tail == (5,)


def test_repetitions_change_nothing():
    s = session()
    drafts(s, 5)
    assert s.on_verdict(verdict(2, 1, 1, 6), 1.0) is not None
    assert s.on_verdict(verdict(2, 1, 1, 6), 1.0) is None
    assert s.on_tokens(Tokens(session=1, start=1, tokens=(2, 5, 6)), 1.0) is None
    assert s.on_tokens(Tokens(session=1, start=3, tokens=(6, 7)), 1.0) is not None
    assert s.generation.sequence.output == (5, 6, 7)


def test_retransmission_repeats_what_is_unanswered():
    s = session(chunk=2)
    (first,) = drafts(s, 5, 6)
    assert s.deadline == RETRY_AFTER
    assert s.retry(RETRY_AFTER) == (first,)
    assert s.deadline == 2 * RETRY_AFTER
    s.on_verdict(verdict(2, 2, 2, 7), 11.0)
    assert s.deadline is None


def test_done_must_agree():
    s = session(limit=1)
    s.on_tokens(Tokens(session=1, start=2, tokens=(5,)), 1.0)
    done = Done(session=1, reason="length", output_tokens=1, digest=of_prefix((1, 2, 5)))
    s.on_done(done)
    with pytest.raises(RemoteError):
        s.on_done(Done(session=1, reason="length", output_tokens=1, digest=of_prefix((1, 2, 6))))
    assert s.deadline is None
    assert s.next_draft(0.0) is None
    assert s.unsent(2.0) == ()


def test_log_probabilities_are_held_for_their_tokens_and_no_others():
    s = session()
    s.on_logprobs(Logprobs(session=1, start=1, entries=((2, -1.0, ()), (5, -2.0, ()))), 0.0)
    step = s.on_tokens(Tokens(session=1, start=2, tokens=(5,)), 1.0)
    assert step is not None
    assert [e.logprob for e in step.logprobs] == [-2.0]
    with pytest.raises(RemoteError):
        s.on_logprobs(Logprobs(session=1, start=2_000_000, entries=((2, -1.0, ()),)), 0.0)


@pytest.mark.parametrize(("window", "chunk"), [(-1, 1), (1, 0)])
def test_bad_policies(window: int, chunk: int):
    with pytest.raises(ValueError, match="window="):
        WindowPolicy(window=window, chunk=chunk)
