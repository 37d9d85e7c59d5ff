"""The verifier's slots: what a session claims is what its slot holds, and no more is computed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from outrider.core.tokens import SamplingParams
from outrider.engines.base import Block, EngineError, FloatRow, NoMemoryError
from outrider.engines.desk import DeskJob, SlotDesk
from outrider.engines.drafters import ModelDrafter
from outrider.engines.slotbook import SlotRecord
from outrider.engines.toy import ToyModel
from toys import TARGET, VOCAB, draft


def desk(slots: int = 8, drafter: ModelDrafter | None = None) -> SlotDesk:
    return SlotDesk(ToyModel(TARGET, vocab_size=VOCAB, max_slots=slots), drafter)


def held(made: SlotDesk, key: int) -> tuple[int, ...]:
    return made.model.tokens(made._slots[key])


def test_nothing_is_computed_twice_and_nothing_wrong_is_kept():
    """Field case 10 at the verifier: cutting a little too far fails nothing, it only costs."""
    made, source = desk(), random.Random(1)
    committed, expected = [1, 2, 3], 3
    for _ in range(100):
        drafts = tuple(source.randrange(VOCAB) for _ in range(source.randint(0, 5)))
        (result,) = made.run([DeskJob(key=7, committed=tuple(committed), drafts=drafts)])
        assert result.fed == expected + len(drafts)
        assert held(made, 7) == (*committed, *drafts)
        rows = [TARGET((*committed, *drafts[:i])) for i in range(len(drafts) + 1)]
        np.testing.assert_array_equal(result.rows, rows)
        accepted = source.randint(0, len(drafts))
        # The target's token: another than the next draft, whose place it takes.
        follows = drafts[accepted] + 1 if accepted < len(drafts) else 0
        committed += [*drafts[:accepted], follows % VOCAB]
        # What other forwards and replays committed behind it: a slot that is trusted by its length
        # alone holds wrong ids below them.
        behind = [source.randrange(VOCAB) for _ in range(source.choice((0, 2, 3, 4)))]
        committed += behind
        expected = 1 + len(behind)
    made.release(7)
    assert made.held == 0
    assert made.model.open_slots == made.parked == 1


def test_sessions_share_a_forward_and_nothing_else():
    """Field case 11: ragged jobs in any order; each row is that of its own ids."""
    made, source = desk(), random.Random(2)
    texts = {key: [key, key] for key in range(6)}
    for _ in range(20):
        keys = source.sample(sorted(texts), source.randint(1, 6))
        jobs = [
            DeskJob(
                key=key,
                committed=tuple(texts[key]),
                drafts=tuple(source.randrange(VOCAB) for _ in range(source.randint(0, 4))),
            )
            for key in keys
        ]
        before = made.model.passes
        for job, result in zip(jobs, made.run(jobs), strict=True):
            assert result.key == job.key
            np.testing.assert_array_equal(result.rows[-1], TARGET((*job.committed, *job.drafts)))
            texts[job.key].append(source.randrange(VOCAB))
        assert made.model.passes == before + 1


def test_the_longest_unused_slot_is_given_up_and_its_session_rebuilt():
    made = desk(slots=2)
    for key in (1, 2, 1, 3):
        made.run([DeskJob(key=key, committed=(key, 5, 6))])
    assert (set(made._slots), made.evictions) == ({1, 3}, 1)
    (back,) = made.run([DeskJob(key=2, committed=(2, 5, 6, 7))])
    assert back.fed == 4
    assert (set(made._slots), made.evictions) == ({3, 2}, 2)
    with pytest.raises(EngineError, match="slots are taken"):
        made.run([DeskJob(key=key, committed=(1,)) for key in (2, 3, 4)])
    made.close()
    assert made.model.open_slots == 0


def test_a_long_prompt_goes_in_piece_by_piece_beside_a_running_answer():
    """Field case 33: each forward takes in at most a chunk, in the order of the jobs, and gives
    the running answer its row; no row comes before all ids are in, and it is the right one."""
    made = SlotDesk(ToyModel(TARGET, vocab_size=VOCAB), chunk=16)
    source = random.Random(5)
    long, other = (tuple(source.randrange(VOCAB) for _ in range(n)) for n in (50, 40))
    answer = [1, 2]
    made.run([DeskJob(key=1, committed=tuple(answer))])
    fed = []
    for _ in range(8):
        answer.append(source.randrange(VOCAB))
        jobs = [
            DeskJob(key=1, committed=tuple(answer)),
            DeskJob(key=2, committed=long, drafts=(3, 4)),
            DeskJob(key=3, committed=other),
        ]
        passes = made.model.passes
        first, *rest = made.run(jobs)
        assert made.model.passes == passes + 1
        assert first.fed == 1
        np.testing.assert_array_equal(first.rows, [TARGET(tuple(answer))])
        fed.append(tuple(result.fed for result in rest))
        assert [len(result.rows) for result in rest] == [3 * (len(fed) > 3), len(fed) > 5]
        if len(fed) == 4:
            contexts = [long, (*long, 3), (*long, 3, 4)]
            np.testing.assert_array_equal(rest[0].rows, [TARGET(c) for c in contexts])
    # 49 and 39 ids without a row of their own: 16 + 16 + 16 + 1, and 15 + 16 + 8.
    assert fed[:6] == [(16, 0), (16, 0), (16, 0), (4, 15), (3, 16), (3, 9)]
    np.testing.assert_array_equal(rest[1].rows, [TARGET(other)])


def test_no_draft_is_made_for_a_prompt_that_is_not_in():
    drafting = ToyModel(draft(0.0), vocab_size=VOCAB)
    made = SlotDesk(
        ToyModel(TARGET, vocab_size=VOCAB), ModelDrafter("toy", model=drafting), chunk=4
    )
    job = DeskJob(key=1, committed=(1,) * 10, own_draft=3, prompt_length=10)
    results = [made.run([job])[0] for _ in range(3)]
    assert [r.draft is not None for r in results] == [False, False, True]
    assert [r.fed for r in results] == [4, 4, 2 + 3]


def test_two_long_prompts_on_one_slot_both_get_in():
    """Each takes the slot from the other: who lost a part of its prompt is fed in one piece."""
    made = SlotDesk(ToyModel(TARGET, vocab_size=VOCAB, max_slots=1), chunk=4)
    jobs = {key: DeskJob(key=key, committed=(key,) * 20) for key in (1, 2)}
    rows = dict.fromkeys(jobs, 0)
    for turn in range(8):
        key = 1 + turn % 2
        (result,) = made.run([jobs[key]])
        rows[key] += len(result.rows)
    assert min(rows.values()) > 0
    made.release(1)
    made.release(2)
    assert not made._filling
    assert not made._whole


def test_a_chunk_of_nothing_is_refused():
    with pytest.raises(ValueError, match="chunk"):
        SlotDesk(ToyModel(TARGET, vocab_size=VOCAB), chunk=0)


def test_its_own_draft_is_judged_in_the_same_forward():
    drafting = ToyModel(draft(0.0), vocab_size=VOCAB, max_slots=1)
    made = desk(drafter=ModelDrafter("toy", model=drafting))
    params = SamplingParams(temperature=0.0)
    jobs = [
        DeskJob(key=key, committed=(key, 2), own_draft=3, prompt_length=2, params=params)
        for key in (1, 2)
    ]
    first, second = made.run(jobs)
    assert first.draft is not None
    best = first.rows.argmax(axis=1).tolist()
    assert list(first.draft.tokens) == best[:3], "draft = target: every guess is right"
    assert second.draft is None, "the draft has one slot: without it the answer goes on"
    assert len(second.rows) == 1
    made.release(1)
    made.release(1)
    assert drafting.open_slots == 0
    (again,) = made.run([jobs[1]])
    assert again.draft is not None
    made.close()
    assert drafting.open_slots == made.model.open_slots == 0


def head(n: int, *tail: int) -> tuple[int, ...]:
    """A prompt of n ids that others begin with as well, and what follows."""
    return (*(i % VOCAB for i in range(n)), *tail)


def fed(made: SlotDesk, key: int, ids: tuple[int, ...], tenant: str = "ann") -> int:
    (result,) = made.run([DeskJob(key=key, committed=ids, tenant=tenant)])
    np.testing.assert_array_equal(result.rows[-1], TARGET(ids))
    return result.fed


def test_the_next_turn_takes_over_what_the_last_one_computed():
    """Field case 14: what was drafted and fell is not part of it."""
    made = desk()
    first = head(30)
    made.run([DeskJob(key=1, committed=first, drafts=(9, 9, 9), tenant="ann")])
    made.release(1)
    assert (made.held, made.parked) == (0, 1)
    assert fed(made, 2, (*first, 5, 6)) == 2
    assert (made.held, made.parked, made.shared_ids) == (1, 0, 30)
    assert fed(made, 3, first) == 1, "the very same prompt still needs its last row"


def test_prompts_with_one_head_share_it_while_both_run():
    made = desk()
    fed(made, 1, head(40, 1))
    assert fed(made, 2, head(40, 2, 3)) == 2
    assert fed(made, 1, head(40, 1, 7)) == 1, "the other one's slot is untouched"
    assert fed(made, 3, head(10, 1, 2)) == 12, "a few ids are not worth it"


def test_a_short_prompt_and_its_answer_are_shared_with_the_next_turn():
    made = desk()
    fed(made, 1, head(10))
    fed(made, 1, head(25))
    assert fed(made, 2, head(25, 1)) == 1, "while it runs"
    made.release(1)
    assert fed(made, 3, head(25, 2)) == 1, "and when it is over"


def test_only_slots_that_begin_alike_are_looked_at(monkeypatch: pytest.MonkeyPatch):
    """Most of many parked slots hold something else: reading them all is slower than the
    forward."""
    made = desk(slots=40)
    for key in range(30):
        fed(made, key, (key % VOCAB, key // VOCAB, *head(20)))
        made.release(key)
    fed(made, 50, head(30))
    read: list[int] = []
    tokens = made.model.tokens
    monkeypatch.setattr(made.model, "tokens", lambda slot: read.append(slot) or tokens(slot))
    fed(made, 60, head(30, 1))
    assert set(read) == {made._slots[50], made._slots[60]}


def test_nothing_is_shared_across_tenants():
    made = desk()
    fed(made, 1, head(40))
    made.release(1)
    assert fed(made, 2, head(40), tenant="bob") == 40
    assert fed(made, 3, head(40), tenant="ann") == 1


def test_a_short_head_of_a_long_parked_slot_is_copied_not_taken():
    made = desk()
    fed(made, 1, head(100))
    made.release(1)
    assert fed(made, 2, head(20, 1)) == 1
    assert made.parked == 1
    assert fed(made, 3, head(100)) == 1


def test_parked_slots_make_room_before_living_ones():
    made = desk(slots=3)
    fed(made, 1, head(20))
    for key in (2, 3):
        fed(made, key, (key, 5, 6))
        made.release(key)
    fed(made, 4, (4, 5), tenant="bob")
    assert (made.held, made.parked, made.evictions) == (2, 1, 0)
    fed(made, 5, (5, 6), tenant="bob")
    assert (made.held, made.parked, made.evictions) == (3, 0, 0)
    fed(made, 6, (6, 7))
    assert made.evictions == 1


def test_a_tenant_that_drops_sessions_loses_its_own_parked_slots():
    made = desk(slots=4)
    fed(made, 1, head(20), tenant="ann")
    made.release(1)
    for key in range(2, 12):
        fed(made, key, (key, 5, 6), tenant="greedy")
        made.release(key)
    assert fed(made, 20, head(20, 1), tenant="ann") == 1


def test_a_job_takes_in_no_more_than_its_room():
    made = desk()
    jobs = [
        DeskJob(key=1, committed=head(30), room=4),
        DeskJob(key=2, committed=head(30), room=100),
    ]
    first, second = made.run(jobs)
    assert (first.fed, len(first.rows)) == (4, 0)
    assert (second.fed, len(second.rows)) == (30, 1)


def test_the_only_slot_that_could_make_room_is_taken_and_not_copied():
    """Prompts with one head on few slots: what is to be copied is also what has to go."""
    made = desk(slots=1)
    fed(made, 1, head(20, *[1] * 40))
    made.release(1)
    assert fed(made, 2, head(20, *[2] * 40)) == 40, "of a session that is over"
    assert fed(made, 3, head(20, *[3] * 40)) == 40, "of one that lives and waits"
    assert (set(made._slots), made.parked, made.evictions) == ({3}, 0, 1)
    made = desk(slots=2)
    fed(made, 1, head(20, *[1] * 40))
    made.release(1)
    fed(made, 2, (3, 4))
    jobs = [
        DeskJob(key=2, committed=(3, 4, 5), tenant="ann"),
        DeskJob(key=3, committed=head(20, *[2] * 40), tenant="ann"),
    ]
    assert [result.fed for result in made.run(jobs)] == [1, 40], "as many jobs as slots"
    with pytest.raises(EngineError, match="slots are taken"):
        made.run([*jobs, DeskJob(key=4, committed=head(20, *[2] * 30), tenant="ann")])


class Tight(ToyModel):
    """A toy with memory for so many ids, those of all slots together, parked or not."""

    def __init__(self, room: int) -> None:
        super().__init__(TARGET, vocab_size=VOCAB, max_slots=8)
        self._room = room

    def _fit(self, more: int) -> None:
        if sum(len(slot.ids) for slot in self._slots.values()) + more > self._room:
            raise MemoryError

    def _compute(self, blocks: Sequence[Block], slots: Sequence[SlotRecord]) -> list[FloatRow]:
        self._fit(sum(len(block.tokens) for block in blocks))
        return super()._compute(blocks, slots)

    def _copy(self, source: SlotRecord, target: SlotRecord, length: int) -> None:
        self._fit(length)


def test_where_memory_runs_out_parked_slots_go_before_an_answer_fails():
    made = SlotDesk(Tight(100))
    for key in (1, 2):
        made.run([DeskJob(key=key, committed=(key,) * 40, tenant="a")])
        made.release(key)
    assert made.parked == 2
    (result,) = made.run([DeskJob(key=3, committed=(3,) * 60, tenant="b")])
    np.testing.assert_array_equal(result.rows[-1], TARGET((3,) * 60))
    assert (made.parked, made.evictions) == (0, 0)


def test_without_parked_slots_the_error_is_the_jobs_and_the_slots_are_as_they_were():
    made = SlotDesk(Tight(100))
    made.run([DeskJob(key=1, committed=(1,) * 80)])
    with pytest.raises(NoMemoryError):
        made.run([DeskJob(key=2, committed=(2,) * 30)])
    assert held(made, 1) == (1,) * 80
    made.release(2)
    (result,) = made.run([DeskJob(key=1, committed=(1,) * 81)])
    assert result.fed == 1


def test_a_head_that_cannot_be_copied_is_computed():
    made = SlotDesk(Tight(70))
    made.run([DeskJob(key=1, committed=(5,) * 40)])
    with pytest.raises(NoMemoryError):  # neither the copy fits nor the forward
        made.run([DeskJob(key=2, committed=(5,) * 40)])
    assert (made.held, made.model.open_slots, made.shared_ids) == (2, 2, 0)
    made.release(1)
    (result,) = made.run([DeskJob(key=2, committed=(5,) * 40)])
    assert result.fed == 40
    assert made.model.open_slots == 1
