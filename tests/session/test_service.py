"""The cloud's service against an edge that is wrong, hostile, or merely many (I4, I5, I7)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from outrider.control.costs import RowCosts
from outrider.core.tokens import Rule, SamplingParams
from outrider.proto.codec import encode
from outrider.proto.connection import Role
from outrider.proto.digest import of_prefix
from outrider.proto.errors import RemoteError
from outrider.proto.messages import (
    Cancel,
    Code,
    Correct,
    Done,
    Draft,
    Error,
    Load,
    Message,
    Open,
    Opened,
    Proposals,
    Resume,
    Row,
    Tokens,
    Verdict,
)
from outrider.session.cloud import StepPolicy
from outrider.session.events import Ended, Failed
from outrider.session.schedules import Schedule
from outrider.session.service import (
    BUSY_S,
    OPENS_PER_S,
    CloudService,
    ServiceConfig,
    Work,
)
from outrider.session.service import Done as Result
from outrider.session.wire import from_wire, to_wire
from toys import TARGET, VOCAB, draft
from world import Words, World, alone, hello

PROMPT = (1, 2, 3)
PARAMS = SamplingParams(temperature=0.0, max_tokens=20)
GREEDY = alone(TARGET, PROMPT, PARAMS, vocab_size=VOCAB)
WRONG = tuple((t + 1) % VOCAB for t in GREEDY)


def uid(n: int) -> bytes:
    return n.to_bytes(16, "big")


def opening(session: int = 1, **changes: object) -> Open:
    values: dict[str, object] = {
        "session": session,
        "uid": uid(session),
        "prompt": PROMPT,
        "sampling": to_wire(PARAMS),
        "rule": "coupled",
        "step": "wait",
        **changes,
    }
    return Open(**values)  # type: ignore[arg-type]


class Bench:
    """A service with two tenants' connections (1 and 2, then 3), and an engine run by hand."""

    def __init__(self, **config: object) -> None:
        values = {
            "vocab_size": VOCAB,
            "context_length": 64,
            "eos": frozenset(),
            "deterministic": True,
            **config,
        }
        self.service = CloudService(ServiceConfig(**values), Words)  # type: ignore[arg-type]
        self.service.connected(1, "ann")
        self.service.connected(2, "ann")
        self.service.connected(3, "bob")
        self.now = 0.0

    def say(self, message: Message, connection: int = 1) -> list[Message]:
        out = self.service.receive(connection, message, self.now)
        assert all(o.connection == connection for o in out)
        return [o.message for o in out]

    def step(self) -> list[Message]:
        """One batch; everything that is said, in order."""
        work = self.service.batch(self.now)
        results = self.results(work)
        self.now += 0.03
        done = self.service.finished(results, started=self.now - 0.03, now=self.now) if work else []
        return [o.message for o in done]

    def results(self, work: Sequence[Work]) -> list[Result]:
        """What an engine says to a batch, in its order."""
        found = []
        for item in work:
            contexts = [
                (*item.job.committed, *item.job.drafts[:i]) for i in range(len(item.job.drafts) + 1)
            ]
            rows = np.stack([TARGET(context) for context in contexts])
            found.append(Result(key=item.key, rows=rows, fed=len(rows)))
        return found

    def code(self, message: Message, connection: int = 1) -> Code:
        (reply,) = self.say(message, connection)
        assert isinstance(reply, Error)
        assert reply.message
        return reply.code


def opened(**config: object) -> Bench:
    """Session 1 is open and holds its first token."""
    b = Bench(**config)
    assert b.say(opening()) == [Opened(session=1, base=3)]
    (first,) = b.step()
    assert isinstance(first, Tokens)
    assert (first.start, first.tokens) == (3, GREEDY[:1])
    return b


def frame(start: int, tokens: tuple[int, ...], epoch: int = 0, session: int = 1) -> Draft:
    return Draft(session=session, epoch=epoch, start=start, tokens=tokens)


# ------------------------------------------------------------------------------- chains, epochs


def test_a_block_is_judged_and_answered():
    b = opened()
    assert b.say(frame(4, (*GREEDY[1:4], WRONG[4], 7))) == []
    (verdict,) = b.step()
    assert verdict == Verdict(
        session=1, epoch=0, start=4, drafted=5, accepted=3, token=GREEDY[4], load=verdict.load
    )
    assert b.step() == [], "wait: no forward without drafts"


def test_dead_chains_stay_dead():
    """Field case 16: late, repeated and unordered frames of an old epoch are dropped whole."""
    b = opened()
    session = b.service._entries[1].session
    b.say(frame(4, (WRONG[1], 5, 6)))
    b.say(frame(7, (7, 8)))
    b.step()
    assert session.pending == 0
    for late in (frame(7, (7, 8)), frame(4, (WRONG[1], 5, 6)), frame(9, (1,))):
        assert b.say(late) == []
    assert session.dropped.stale == 6
    assert b.step() == []
    b.say(frame(5, GREEDY[2:4], epoch=1))
    b.say(frame(5, GREEDY[2:4], epoch=1))  # repeated: harmless
    b.say(frame(5, (9, 9), epoch=0))
    assert session.dropped.duplicate == 2
    assert session.dropped.stale == 8
    (verdict,) = b.step()
    assert isinstance(verdict, Verdict)
    assert (verdict.epoch, verdict.accepted, verdict.token) == (1, 2, GREEDY[4])


def test_gaps_and_overflow_are_dropped_and_counted():
    b = opened(max_window=4)
    session = b.service._entries[1].session
    b.say(frame(9, (1, 2)))  # a new chain whose head was lost
    assert session.dropped.gap == 2
    b.say(frame(4, GREEDY[1:3]))
    b.say(frame(8, (5,)))
    assert session.dropped.gap == 3
    b.say(frame(6, (*GREEDY[3:5], 1, 2, 3)))
    assert session.pending == 4
    assert session.dropped.overflow == 3


def test_drafts_beyond_the_targets_window_are_not_judged():
    """Field case 13 and I5: an honest edge never sends so many; the target's context is 8."""
    b = opened(context_length=8)
    b.say(frame(4, GREEDY[1:20]))
    (work,) = b.service.batch(b.now)
    assert work.job.drafts == GREEDY[1:4]
    out = b.service.finished(b.results([work]), started=1.0, now=1.03)
    verdict, done = (o.message for o in out)
    assert isinstance(verdict, Verdict)
    assert (verdict.drafted, verdict.accepted, verdict.token) == (3, 3, GREEDY[4])
    assert isinstance(done, Done)
    assert done.reason == "length"


def test_a_draft_that_equals_a_free_token_goes_on():
    b = Bench()
    b.say(opening(step="step"))
    work = b.service.batch(b.now)
    assert [w.job.drafts for w in work] == [()]
    b.say(frame(3, GREEDY[:3]))  # arrives during the forward
    rows = TARGET(PROMPT)[None, :]
    names = Result.__dataclass_fields__
    values = {"key": work[0].key, "rows": rows, "fed": 1}
    done = Result(**{k: v for k, v in values.items() if k in names})
    b.service.finished([done], started=0.0, now=0.03)
    assert b.service._entries[1].session.pending == 2
    (verdict,) = b.step()
    assert isinstance(verdict, Verdict)
    assert (verdict.start, verdict.accepted, verdict.token) == (4, 2, GREEDY[3])


def test_an_empty_draft_asks_for_one_step():
    b = opened()
    assert b.step() == []
    b.say(frame(4, ()))
    (tokens,) = b.step()
    assert isinstance(tokens, Tokens)
    assert tokens.tokens == GREEDY[1:2]
    b.say(frame(4, ()))  # late: the position is taken
    assert b.step() == []


def test_a_held_session_waits_for_its_drafts():
    b = Bench()
    b.say(opening(step="step", committed=GREEDY[:2], held=True))
    assert b.step() == []
    b.say(frame(5, GREEDY[2:4]))
    (verdict,) = b.step()
    assert isinstance(verdict, Verdict)
    assert (verdict.start, verdict.accepted) == (5, 2)
    b = Bench()
    b.say(opening(step="wait", committed=GREEDY[:2], held=True))
    b.say(frame(5, ()))
    assert [type(m) for m in b.step()] == [Tokens]


def test_an_open_with_committed_tokens_goes_on_behind_them():
    for policy in StepPolicy:
        b = Bench()
        assert b.say(opening(committed=GREEDY[:5], step=policy.value)) == [
            Opened(session=1, base=8)
        ]
        (tokens,) = b.step()  # the prefill never waits
        assert isinstance(tokens, Tokens)
        assert (tokens.start, tokens.tokens) == (8, GREEDY[5:6])


def test_an_open_whose_answer_is_complete_is_answered_at_once():
    b = Bench()
    first, done = b.say(opening(committed=GREEDY))
    assert first == Opened(session=1, base=23)
    assert isinstance(done, Done)
    assert (done.reason, done.output_tokens) == ("length", 20)
    assert done.digest == of_prefix((*PROMPT, *GREEDY))
    assert b.service.sessions == 0


# ------------------------------------------------------------------------------- I5


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"uid": b"short"}, Code.MALFORMED),
        ({"prompt": (1, VOCAB)}, Code.MALFORMED),
        ({"committed": (VOCAB,)}, Code.MALFORMED),
        ({"prompt": ()}, Code.CONTEXT),
        ({"prompt": (1,) * 64}, Code.CONTEXT),
        ({"prompt": (1,) * 2000}, Code.TOO_LARGE),
        ({"rule": "trust-me"}, Code.PARAMETER),
        ({"step": "run"}, Code.PARAMETER),
        ({"take": "some"}, Code.PARAMETER),
        ({"cloud_draft": 10_000}, Code.PARAMETER),
        ({"sampling": {"temperature": math.nan}}, Code.PARAMETER),
        ({"sampling": {"temperature": -1.0}}, Code.PARAMETER),
        ({"sampling": {"top_p": 0.0}}, Code.PARAMETER),
        ({"sampling": {"max_tokens": 0}}, Code.PARAMETER),
        ({"sampling": {"max_tokens": 10**12}}, Code.PARAMETER),
        ({"sampling": {"seed": -1}}, Code.PARAMETER),
        ({"sampling": {"stop": ("",)}}, Code.PARAMETER),
        ({"sampling": {"logprobs": 1000}}, Code.PARAMETER),
        ({"sampling": {"logit_bias": {1: math.inf}}}, Code.PARAMETER),
        ({"sampling": {"logit_bias": {VOCAB: 1.0}}}, Code.PARAMETER),
        ({"sampling": {"stop_token_ids": (VOCAB,)}}, Code.PARAMETER),
    ],
    ids=str,
)
def test_openings_are_checked_before_anything_is_held(changes: dict[str, object], code: Code):
    b = Bench(max_prompt_tokens=1000)
    if isinstance(changes.get("sampling"), dict):
        sampling = msgspec.structs.replace(to_wire(PARAMS), **changes["sampling"])  # type: ignore[arg-type]
        changes = {"sampling": sampling}
    assert b.code(opening(**changes)) is code
    assert b.service.sessions == 0
    assert b.say(opening()) == [Opened(session=1, base=3)]


@pytest.mark.parametrize(
    "message",
    [
        frame(4, (VOCAB,)),
        frame(4, (2**32 - 1,)),
        frame(0, (1,)),
        frame(2, ()),
        Correct(session=1, position=4, token=VOCAB),
    ],
    ids=repr,
)
def test_frames_no_honest_edge_sends_end_their_session_only(message: Message):
    b = opened()
    b.say(opening(2, step="step"), 2)
    replies = b.say(message)
    if isinstance(message, Correct):
        assert replies == [], "no rejection is open: a late frame"
    else:
        assert [(r.code, r.session) for r in replies if isinstance(r, Error)] == [
            (Code.MALFORMED, 1)
        ]
        assert b.service.sessions == 1
    (tokens,) = b.step()
    assert isinstance(tokens, Tokens)
    assert tokens.session == 2


@pytest.mark.parametrize(
    "q", [(), (0.5,), (0.0, 0.5), (-0.1, 0.5), (math.nan, 0.5), (math.inf, 1.0), (1.5, 0.5)]
)
def test_impossible_probabilities(q: tuple[float, ...]):
    b = Bench()
    b.say(opening(rule="ratio"))
    b.step()
    message = Draft(session=1, epoch=0, start=4, tokens=(1, 2), q=q)
    assert b.code(message) is Code.MALFORMED
    assert b.service.sessions == 0


def test_hot_frames_of_unknown_sessions_are_dropped():
    b = opened()
    for message in (frame(4, (1,), session=9), Correct(session=9, position=1, token=1)):
        assert b.say(message) == []
    assert b.say(Cancel(session=9)) == []
    assert b.service.late_frames == 2
    assert b.service.sessions == 1


def test_another_tenants_session_cannot_be_reached():
    """By number or by uid; what a stranger learns is what he learns about nothing."""
    b = opened()
    b.say(frame(4, WRONG[1:3], session=1), 3)
    b.say(Cancel(session=1), 3)
    assert b.service.sessions == 1
    theft = Resume(session=5, uid=uid(1), base=4, digest=of_prefix((*PROMPT, GREEDY[0])))
    assert b.code(theft, 3) is Code.UNKNOWN
    assert b.say(opening(7, uid=uid(1)), 3) == [Opened(session=7, base=3)]
    assert b.service.sessions == 2
    b.say(Cancel(session=7), 3)
    b.say(frame(4, GREEDY[1:3]))
    (verdict,) = b.step()
    assert isinstance(verdict, Verdict)
    assert verdict.accepted == 2


def test_one_number_names_one_session():
    b = opened()
    assert b.code(opening(1, uid=uid(77))) is Code.DUPLICATE
    assert b.code(Resume(session=1, uid=uid(77), base=4, digest=bytes(16))) is Code.DUPLICATE
    assert b.service.sessions == 1
    # The same OPEN again is a repetition, not a second session.
    assert b.say(opening(1)) == [Opened(session=1, base=4)]
    assert b.service.sessions == 1
    b.say(frame(4, GREEDY[1:2]))
    assert [type(m) for m in b.step()] == [Verdict]
    # The same number on another connection is another session.
    assert b.say(opening(1, uid=uid(3)), 2) == [Opened(session=1, base=3)]
    assert b.service.sessions == 2


# ------------------------------------------------------------------------------- resume


def resume(base: int, *, session: int = 4, n: int = 1) -> Resume:
    digest = of_prefix((*PROMPT, *GREEDY[: base - 3]))
    return Resume(session=session, uid=uid(n), base=base, digest=digest)


def test_resume_replays_what_was_missed():
    b = opened()
    b.say(frame(4, GREEDY[1:4]))
    b.step()
    b.service.disconnected(1, 1.0)
    replies = b.say(resume(4), 2)
    assert replies == [
        Opened(session=4, base=8),
        Tokens(session=4, start=4, tokens=GREEDY[1:5]),
    ]
    assert b.say(resume(4), 2) == replies, "a repeated RESUME is answered alike"
    b.say(frame(8, GREEDY[5:6], epoch=1, session=4), 2)
    (verdict,) = b.step()
    assert isinstance(verdict, Verdict)
    assert (verdict.session, verdict.start) == (4, 8)


def test_the_newest_connection_wins():
    """A half-dead connection may still hold the session."""
    b = opened()
    assert b.say(resume(4), 2)[0] == Opened(session=4, base=4)
    b.say(Cancel(session=1), 1)  # no longer there
    assert b.service.sessions == 1
    b.service.disconnected(1, 1.0)
    b.say(frame(4, GREEDY[1:2], session=4), 2)
    assert [m.session for m in b.step()] == [4]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "message",
    [
        Resume(session=4, uid=uid(1), base=4, digest=bytes(16)),
        Resume(session=4, uid=uid(1), base=2, digest=of_prefix(PROMPT[:2])),
        Resume(session=4, uid=uid(1), base=5, digest=of_prefix((*PROMPT, *GREEDY[:2]))),
        Resume(session=4, uid=uid(1), base=2**32 - 1, digest=bytes(16)),
        Resume(session=4, uid=uid(1), base=4, digest=b""),
    ],
    ids=repr,
)
def test_another_prefix_is_not_resumed(message: Resume):
    b = opened()
    b.service.disconnected(1, 1.0)
    assert b.code(message, 2) is Code.DIGEST
    assert b.service.sessions == 0
    assert b.code(message, 2) is Code.UNKNOWN


def test_resume_in_the_middle_of_a_forward():
    b = opened()
    b.say(frame(4, GREEDY[1:4]))
    work = b.service.batch(b.now)
    b.service.disconnected(1, 1.0)
    assert b.say(resume(4), 2) == [Opened(session=4, base=4)]
    rows = np.stack([TARGET((*PROMPT, *GREEDY[: 1 + i])) for i in range(4)])
    names = Result.__dataclass_fields__
    values = {"key": work[0].key, "rows": rows, "fed": 4}
    out = b.service.finished(
        [Result(**{k: v for k, v in values.items() if k in names})], started=1.0, now=1.03
    )
    assert [(o.connection, type(o.message)) for o in out] == [(2, Verdict)]


# ------------------------------------------------------------------------------- I7


def test_session_limits():
    b = Bench(max_sessions=3, max_sessions_per_connection=2)
    assert isinstance(b.say(opening(1))[0], Opened)
    assert isinstance(b.say(opening(2))[0], Opened)
    assert b.code(opening(3)) is Code.BUSY
    assert isinstance(b.say(opening(3), 2)[0], Opened)
    assert b.code(opening(4), 2) is Code.BUSY
    assert b.code(opening(4), 3) is Code.BUSY
    b.service.disconnected(2, 0.0)
    assert b.code(resume(3, session=9, n=3), 1) is Code.BUSY, "RESUME has the same limit"
    b.say(Cancel(session=1))
    assert isinstance(b.say(resume(3, session=9, n=3), 1)[0], Opened)
    assert b.service.sessions == 2


def test_detached_sessions_do_not_run_and_go():
    b = Bench(grace=30.0)
    b.say(opening(step="step"))
    b.step()
    b.service.disconnected(1, 5.0)
    assert b.service.batch(b.now) == []
    assert b.service.deadline == 35.0
    b.service.tick(34.9)
    assert b.service.sessions == 1
    b.service.tick(35.0)
    assert b.service.sessions == 0
    assert b.service.deadline is None
    assert b.service.released == [1]


def test_a_slot_in_use_is_released_after_its_forward():
    b = Bench()
    b.say(opening(step="step"))
    work = b.service.batch(b.now)
    b.say(Cancel(session=1))
    assert b.service.sessions == 0
    assert b.service.released == []
    out = b.service.failed(work, "gone")
    assert out == []
    assert b.service.released == [1]


def test_a_failed_forward_ends_its_sessions_only():
    b = Bench()
    b.say(opening(1, step="step"))
    work = b.service.batch(b.now)
    b.say(opening(2, step="step"))
    (out,) = b.service.failed(work, "out of memory")
    assert out.message == Error(code=Code.ENGINE, message="out of memory", session=1)
    assert [m.session for m in b.step()] == [2]  # type: ignore[union-attr]


def test_a_reader_that_does_not_read_stops_its_own_sessions():
    """Field case 31."""
    b = Bench()
    b.say(opening(1, step="step"), 1)
    b.say(opening(2, step="step"), 2)
    b.service.block(1, blocked=True)
    assert [m.session for m in b.step()] == [2]  # type: ignore[union-attr]
    b.service.block(1, blocked=False)
    assert {m.session for m in b.step()} == {1, 2}  # type: ignore[union-attr]


def test_draining_refuses_new_sessions_and_resumes_old_ones():
    b = opened()
    b.service.drain()
    assert b.code(opening(2)) is Code.DRAINING
    b.service.disconnected(1, 0.0)
    assert isinstance(b.say(resume(4), 2)[0], Opened)


def test_memory_is_bounded_under_a_flood_of_drafts():
    b = opened(max_window=16)
    session = b.service._entries[1].session
    for i in range(2000):
        b.say(frame(4 + i % 64, tuple((i + j) % VOCAB for j in range(32)), epoch=i))
    assert session.pending <= 16
    assert b.service.sessions == 1


def test_results_are_matched_by_key_in_whatever_order_they_come():
    """Field case 11: two sessions in one forward, blocks of different length, results reversed."""
    b = Bench()
    other = (2, 3, 1)
    expected = alone(TARGET, other, PARAMS, vocab_size=VOCAB)
    b.say(opening(1, step="step"), 1)
    b.say(opening(2, step="step", prompt=other), 2)
    b.step()
    b.say(frame(4, GREEDY[1:4], session=1), 1)
    work = b.service.batch(b.now)
    assert [(w.key, len(w.job.drafts)) for w in work] == [(1, 3), (2, 0)]
    out = b.service.finished(b.results(work)[::-1], started=1.0, now=1.03)
    said = {o.connection: o.message for o in out}
    assert isinstance(said[1], Verdict)
    assert (said[1].session, said[1].accepted, said[1].token) == (1, 3, GREEDY[4])
    assert isinstance(said[2], Tokens)
    assert (said[2].session, said[2].tokens) == (2, expected[1:2])


def test_a_prompt_partly_in_waits_behind_the_others_and_says_nothing():
    """Field case 33: no rows, no token; it is run again, in its turn."""
    b = Bench(max_batch_rows=2)
    for n in (1, 2, 3):
        b.now = float(n)
        b.say(opening(n, step="step"))
    first = b.service.batch(b.now)
    assert [w.key for w in first] == [1, 2]
    piece = Result(key=1, rows=np.empty((0, VOCAB), dtype=np.float32), fed=2)
    out = b.service.finished([piece, *b.results(first[1:])], started=4.0, now=4.5)
    assert [o.message.session for o in out] == [2]  # type: ignore[union-attr]
    second = b.service.batch(b.now)
    assert [w.key for w in second] == [3, 1]
    assert second[1].job == first[0].job
    assert not b.service.costs, "nothing of this was a step"


def test_who_got_no_piece_is_first_at_the_next():
    """Two prompts to take in, one forward full of the first: they take turns, also when one of
    them chooses how many drafts are judged."""
    b = Bench()
    for n, take in ((1, "best"), (2, "all")):
        b.now = float(n)
        b.say(opening(n, step="step", take=take))
    for turn in range(6):
        keys = [w.key for w in b.service.batch(b.now)]
        assert keys == [[1, 2], [2, 1]][turn % 2]
        empty = np.empty((0, VOCAB), dtype=np.float32)
        done = [Result(key=k, rows=empty, fed=2 * (k == keys[0])) for k in keys]
        assert b.service.finished(done, started=3.0 + turn, now=3.5 + turn) == []


def test_a_session_between_two_pieces_of_its_prompt_is_freed_at_once():
    b = Bench()
    b.say(opening(step="step"))
    b.service.batch(b.now)
    piece = Result(key=1, rows=np.empty((0, VOCAB), dtype=np.float32), fed=2)
    b.service.finished([piece], started=0.0, now=0.5)
    b.say(Cancel(session=1))
    assert b.service.released == [1]
    assert b.service.batch(b.now) == []


def test_batches_are_fair_and_bounded():
    b = Bench(max_batch_rows=4)
    for n in range(1, 9):
        b.now = float(n)
        b.say(opening(n, step="step"))
    first = b.service.batch(b.now)
    assert [w.key for w in first] == [1, 2, 3, 4]
    assert [w.key for w in b.service.batch(b.now)] == [5, 6, 7, 8], "nobody is in two batches"
    assert b.service.batch(b.now) == []


# ------------------------------------------------------------------------------- ratio dialogue


def dialogue() -> tuple[Bench, Proposals]:
    b = Bench()
    params = SamplingParams(seed=1, max_tokens=20)
    b.say(opening(rule="ratio", sampling=to_wire(params)))
    (first,) = b.step()
    assert isinstance(first, Tokens)
    row = TARGET((*PROMPT, *first.tokens))
    unlikely = int(row.argmin())
    b.say(Draft(session=1, epoch=0, start=4, tokens=(unlikely,), q=(1.0,)))
    (proposals,) = b.step()
    assert isinstance(proposals, Proposals)
    assert (proposals.start, proposals.drafted, proposals.accepted) == (4, 1, 0)
    assert proposals.first == 0
    assert 1 <= len(proposals.tokens) <= 16
    return b, proposals


def test_a_rejection_waits_for_the_edge_and_repeats_itself():
    b, proposals = dialogue()
    assert b.step() == []
    have = len(proposals.tokens)
    (more,) = b.say(Correct(session=1, position=4, have=have))
    assert isinstance(more, Proposals)
    assert b.say(Correct(session=1, position=4, have=have)) == [more], "replayed, not redrawn"
    assert (more.first, len(more.tokens)) == (16, 64)
    for have, count in ((80, 256), (336, 1024)):
        (last,) = b.say(Correct(session=1, position=4, have=have))
        assert isinstance(last, Proposals)
        assert (last.first, len(last.tokens)) == (have, count)
    (row,) = b.say(Correct(session=1, position=4, have=1360))
    assert isinstance(row, Row)
    assert row.ids is None, "every id is possible: none needs to be named"
    assert len(row.weights) == 4 * VOCAB
    assert b.say(Correct(session=1, position=5, have=1)) == [], "another position: late"
    assert b.say(Correct(session=1, position=4, have=2**32 - 1)) == [row]
    assert b.say(Correct(session=1, position=4, token=7)) == []
    assert b.say(Correct(session=1, position=4, token=8)) == [], "the first one counts"
    session = b.service._entries[1].session
    assert session.generation.sequence.output[-1] == 7
    assert session.generation.counters.residual == {"full-row": 1}


def test_resume_in_the_middle_of_a_rejection():
    b, proposals = dialogue()
    b.say(Correct(session=1, position=4, have=len(proposals.tokens)))
    session = b.service._entries[1].session
    committed = session.generation.sequence.committed
    b.service.disconnected(1, 1.0)
    again = b.say(Resume(session=6, uid=uid(1), base=4, digest=of_prefix(committed)), 2)
    assert again == [
        Opened(session=6, base=4),
        msgspec.structs.replace(proposals, session=6),
    ]


def test_a_correction_outside_the_vocabulary_ends_the_session():
    b, _ = dialogue()
    assert b.code(Correct(session=1, position=4, token=VOCAB)) is Code.MALFORMED
    assert b.service.sessions == 0


# ------------------------------------------------------------------------------- a hostile edge


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\x00",
        b"\x20\xff\xff\xff\xff\xff\xff",
        b"\x20\x01\x00\x07\x00\x90\x4e" + b"\x01" * 10_000,  # a 10,000-token draft
        b"\x10\xdf\xff\xff\xff\xff",
        b"\x80\x04\x95" + b"pickle" * 9,
        encode(hello(Role.EDGE, vocab_size=VOCAB)),
        encode(Opened(session=1, base=1)),
    ],
    ids=lambda g: g[:6].hex(),
)
def test_garbage_ends_the_connection_and_no_session(garbage: bytes):
    """Field cases 29, 30: the bystander's and the sender's own sessions both go on to the end."""
    w = World(TARGET, draft(0.3), vocab_size=VOCAB, edges=2)
    params = SamplingParams(seed=3, max_tokens=40)
    numbers = [edge.ask(PROMPT, params) for edge in w.edges]

    def inject() -> None:
        pipe = w.edges[0].pipe
        assert pipe is not None
        w.transmit(pipe, "up", garbage)

    w.later(0.4, inject)
    w.run()
    expected = alone(TARGET, PROMPT, params, vocab_size=VOCAB)
    for edge, number in zip(w.edges, numbers, strict=True):
        assert tuple(edge.answers[number].ids) == expected
        assert isinstance(edge.answers[number].end, Ended)
    assert [e.session for e in w.refusals] == [None]
    assert w.edges[0].client.tally.reconnects == 1
    assert w.edges[1].client.tally.reconnects == 0


@pytest.mark.parametrize(
    "lie",
    [
        Tokens(session=1, start=0, tokens=(1, 2, 9)),
        Tokens(session=1, start=50, tokens=(1,)),
        Tokens(session=1, start=3, tokens=(VOCAB,)),
        Verdict(session=1, epoch=9, start=10, drafted=200, accepted=200, token=1),
        Verdict(session=1, epoch=0, start=2000, drafted=1, accepted=0, token=1),
        Done(session=1, reason="stop", output_tokens=1, digest=bytes(16)),
        Row(session=1, position=0, ids=None, weights=b""),
        Proposals(session=1, epoch=7, start=900, drafted=1, accepted=0, first=0, tokens=(), p=()),
    ],
    ids=lambda m: type(m).__name__,
)
def test_a_lying_cloud_changes_no_shown_token(lie: Message):
    """I2 from the other side: what contradicts the committed prefix ends the connection."""
    w = World(TARGET, draft(0.3), vocab_size=VOCAB)
    edge = w.edges[0]
    params = SamplingParams(seed=3, max_tokens=40)
    number = edge.ask(PROMPT, params)

    def inject() -> None:
        assert edge.pipe is not None
        w.transmit(edge.pipe, "down", encode(lie))

    w.later(0.4, inject)
    w.run()
    end = edge.answers[number].end
    assert isinstance(end, Ended | Failed)
    expected = alone(TARGET, PROMPT, params, vocab_size=VOCAB)
    assert tuple(edge.answers[number].ids) == expected[: len(edge.answers[number].ids)]
    if isinstance(end, Ended):
        assert tuple(edge.answers[number].ids) == expected


@pytest.mark.parametrize("schedule", [Schedule.SYNC, Schedule.FREERUN])
def test_in_coupled_mode_an_edge_cannot_change_the_answer(schedule: Schedule):
    """I5: any draft at all, only the speed differs."""
    params = SamplingParams(seed=8, max_tokens=40)
    expected = alone(TARGET, PROMPT, params, vocab_size=VOCAB)
    for share in (0.0, 1.0):
        w = World(TARGET, draft(share), vocab_size=VOCAB)
        number = w.edges[0].ask(PROMPT, params, schedule=schedule)
        w.run()
        assert tuple(w.edges[0].answers[number].ids) == expected


# ------------------------------------------------------------------------------- wire values


def test_parameters_survive_the_wire():
    params = SamplingParams(
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={5: -100.0},
        max_tokens=9,
        min_tokens=2,
        stop=("a", "b"),
        stop_token_ids=frozenset({3, 4}),
        ignore_eos=True,
        logprobs=3,
        seed=2**63 - 1,
    )
    assert from_wire(to_wire(params), 1) == params


def test_a_bad_parameter_names_its_field():
    wire = msgspec.structs.replace(to_wire(SamplingParams()), top_p=2.0)
    with pytest.raises(RemoteError, match="top_p") as refused:
        from_wire(wire, 5)
    assert (refused.value.code, refused.value.session) == (Code.PARAMETER, 5)


def test_defaults_used_above():
    assert Load() == Load(queue_us=0, step_us=0)
    assert set(Rule) == {Rule.COUPLED, Rule.RATIO, Rule.RELAXED}


# ------------------------------------------------------------------------------- load


def test_a_login_has_its_own_limit_of_sessions():
    b = Bench(max_sessions_per_tenant=2)
    b.say(opening(1))
    b.say(opening(2), 2)
    assert b.code(opening(3), 1) is Code.BUSY
    assert isinstance(b.say(opening(3), 3)[0], Opened), "another login is not meant"
    b.say(Cancel(session=1))
    b.now += 1.0
    assert isinstance(b.say(opening(3), 1)[0], Opened)


def test_opening_and_dropping_is_slowed_down():
    b = Bench(max_sessions_per_tenant=8)
    for n in range(8):
        assert isinstance(b.say(opening(n + 1))[0], Opened)
        b.say(Cancel(session=n + 1))
    assert b.code(opening(9)) is Code.BUSY
    assert isinstance(b.say(opening(9), 3)[0], Opened)
    b.now += 1.5 / OPENS_PER_S
    assert isinstance(b.say(opening(10))[0], Opened)
    assert b.code(opening(11)) is Code.BUSY
    again = opening(10, held=False)
    assert isinstance(b.say(again)[0], Opened), "a repeated OPEN opens nothing"


def test_no_newcomer_where_tokens_take_too_long_already():
    b = Bench(max_token_s=0.05, max_batch_rows=4)
    b.service.costs = RowCosts([(1, 0.02), (4, 0.04)])
    for n in range(1, 5):
        b.say(opening(n))
    b.step()
    assert b.code(opening(5)) is Code.BUSY, "five are two forwards"
    b.now += BUSY_S + 0.1
    assert isinstance(b.say(opening(5))[0], Opened), "nothing is under way"


def test_whoever_comes_first_is_let_in_whatever_a_token_takes():
    """A first forward that was slow would otherwise close the verifier for ever."""
    b = Bench(max_token_s=0.001)
    b.service.costs = RowCosts([(1, 0.02)])
    assert isinstance(b.say(opening(1))[0], Opened)
    assert b.code(opening(2)) is Code.BUSY


def test_a_prompt_that_goes_in_piece_by_piece_is_at_work():
    b = Bench(max_under_way=1)
    b.say(opening(1, step="step"))
    for _ in range(4):
        (work,) = b.service.batch(b.now)
        b.now += 0.9 * BUSY_S
        piece = Result(key=work.key, rows=np.empty((0, VOCAB), dtype=np.float32), fed=1)
        b.service.finished([piece], started=b.now, now=b.now)
        assert b.code(opening(2)) is Code.BUSY


def test_no_more_at_work_than_there_are_caches():
    b = Bench(max_under_way=2)
    for n in (1, 2):
        b.say(opening(n))
    b.step()
    assert b.code(opening(3)) is Code.BUSY
    assert isinstance(b.say(opening(1))[0], Opened), "a repeated OPEN is no newcomer"
    b.now += BUSY_S + 0.1
    b.say(opening(3))
    b.say(opening(4))
    for n in (1, 2):
        b.say(frame(4, (9,), session=n))
    assert len(b.service.batch(b.now)) == 2


def test_whoever_waits_for_a_forward_is_at_work_however_long_it_takes():
    """A verifier so loaded that nobody's turn comes within BUSY_S would take in more and more."""
    b = Bench(max_under_way=2, max_batch_rows=1)
    for n in (1, 2):
        b.say(opening(n, step="step"))
    for _ in range(3):
        (work,) = b.service.batch(b.now)
        b.now += 2 * BUSY_S
        assert b.code(opening(3)) is Code.BUSY
        b.service.finished(b.results([work]), started=b.now, now=b.now)
        assert b.code(opening(3)) is Code.BUSY
    b.service.disconnected(1, b.now)
    b.now += BUSY_S + 0.1
    assert isinstance(b.say(opening(3), 2)[0], Opened), "of an edge that is gone nothing can run"


def test_the_session_that_is_due_first_goes_first():
    b = Bench(max_batch_rows=1)
    b.say(opening(1, step="step"))
    b.say(opening(2, step="step", due_ms=50))
    assert [w.key for w in b.service.batch(b.now)] == [2]


def test_the_status_shows_load_and_no_secret():
    b = opened()
    b.say(opening(7, step="step"), 3)
    b.step()
    status = json.loads(json.dumps(b.service.status(b.now)))
    assert (status["sessions"], status["forwards"], status["rows"]) == (2, 2, 2)
    assert status["tenants"] == {
        "ann": {"sessions": 1, "rows": 1.0},
        "bob": {"sessions": 1, "rows": 2.0},
    }
    assert status["step_ms"] == pytest.approx(30.0)
