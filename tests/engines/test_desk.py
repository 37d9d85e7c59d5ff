"""The verifier's slots: what a session claims is what its slot holds, and no more is computed."""

from __future__ import annotations

import random

import numpy as np
import pytest

from outrider.core.tokens import SamplingParams
from outrider.engines.base import EngineError
from outrider.engines.desk import DeskJob, SlotDesk
from outrider.engines.drafters import ModelDrafter
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
        expected = 1
    made.release(7)
    assert made.model.open_slots == made.held == 0


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
