"""Drafting for several sessions at once equals drafting for each alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from outrider.core.draft import Draft, DraftSignal
from outrider.core.tokens import Rule, SamplingParams
from outrider.engines.base import Block, EngineError, FloatRow
from outrider.engines.drafters import DraftSession, ModelDrafter
from outrider.engines.lockstep import Ask, Stepwise, propose_together
from outrider.engines.toy import ToyModel, random_law
from toys import remember

VOCAB = 32
LAW = remember(random_law(3, VOCAB), 2)
PROMPTS = [tuple(1 + (7 * i + j) % 30 for j in range(3 + i)) for i in range(8)]


class Counting(ToyModel):
    """Counts the blocks of its forwards; refuses those of some slots."""

    def __init__(self, **options: object) -> None:
        super().__init__(LAW, vocab_size=VOCAB, **options)  # type: ignore[arg-type]
        self.sizes: list[int] = []
        self.broken: set[int] = set()

    def forward(self, blocks: Sequence[Block]) -> list[FloatRow]:
        self.sizes.append(len(blocks))
        if any(block.slot in self.broken for block in blocks):
            raise EngineError("out of memory")
        return super().forward(blocks)

    def hidden(self, slot: int) -> FloatRow:
        return np.array([len(self.tokens(slot)), self.tokens(slot)[-1]], dtype=np.float32)


class Every:
    """Stops behind `count` tokens; keeps the hidden states it was shown."""

    needs_hidden = True

    def __init__(self, count: int) -> None:
        self._count = count
        self.seen: list[tuple[float, ...]] = []

    def start(self) -> None:
        self.seen.clear()

    def stop(self, signal: DraftSignal) -> bool:
        assert signal.hidden is not None
        self.seen.append(tuple(signal.hidden))
        return signal.index + 1 >= self._count


def sessions(drafter: ModelDrafter, rule: Rule, **params: object) -> list[DraftSession]:
    base = SamplingParams(temperature=0.9, **params)  # type: ignore[arg-type]
    return [
        drafter.session(len(prompt), replace(base, seed=i), rule, sketch=4)
        for i, prompt in enumerate(PROMPTS)
    ]


def told(draft: Draft) -> tuple[object, ...]:
    rows = [(tuple(d.ids), d.weights.tobytes()) for d in draft.rows]
    return draft.tokens, draft.q, rows, draft.sketches


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("lookup", [False, True])
def test_a_batch_drafts_what_each_drafts_alone(rule: Rule, lookup: bool):
    """Ids, q, rows and sketches, over blocks of unequal length and answers of unequal speed."""
    models = Counting(), Counting()
    together, alone = (
        sessions(ModelDrafter("toy", model=model, lookup=lookup), rule) for model in models
    )
    texts = [list(prompt) for prompt in PROMPTS]
    for r in range(12):
        counts = [(5 * i + r) % 6 for i in range(8)]
        asks = [Ask(s, tuple(t), c) for s, t, c in zip(together, texts, counts, strict=True)]
        found = dict(propose_together(asks))
        assert sorted(found) == list(range(8))
        for i, (session, text, count) in enumerate(zip(alone, texts, counts, strict=True)):
            draft = session.propose(tuple(text), count)
            assert told(found[i]) == told(draft)  # type: ignore[arg-type]
            stands = draft.tokens[: (i + r) % (count + 1)]
            text.extend([*stands, (i * r) % VOCAB])
    assert len(models[0].sizes) < 0.4 * len(models[1].sizes), "forwards are shared"


def test_sessions_leave_as_they_end_and_are_told_of_at_once():
    model = Counting()
    asked = sessions(ModelDrafter("toy", model=model), Rule.COUPLED, ignore_eos=True)
    counts = [4, 1, 3, 0, 1, 4, 2, 2]
    asks = [Ask(s, p, c) for s, p, c in zip(asked, PROMPTS, counts, strict=True)]
    order = [(i, len(model.sizes)) for i, _ in propose_together(asks)]
    assert order == [(3, 0), (1, 1), (4, 1), (6, 2), (7, 2), (2, 3), (0, 4), (5, 4)]
    assert model.sizes == [7, 5, 3, 2]


def test_each_rule_sees_its_own_sessions_state():
    model = Counting()
    asked = sessions(ModelDrafter("toy", model=model), Rule.COUPLED)
    rules = [Every(1 + i % 3) for i in range(8)]
    asks = [Ask(s, p, 5, r) for s, p, r in zip(asked, PROMPTS, rules, strict=True)]
    for i, draft in propose_together(asks):
        assert isinstance(draft, Draft)
        assert len(draft) == 1 + i % 3
        lasts = (PROMPTS[i][-1], *draft.tokens)
        places = range(len(PROMPTS[i]), len(PROMPTS[i]) + len(draft))
        assert rules[i].seen == [(at, last) for at, last in zip(places, lasts, strict=False)]


def test_what_fails_fails_alone():
    model = Counting()
    asked = sessions(ModelDrafter("toy", model=model), Rule.COUPLED, ignore_eos=True)
    well = [s.propose(p, 3).tokens for s, p in zip(asked, PROMPTS, strict=True)]
    third = asked[2]
    assert isinstance(third, Stepwise)
    (slot,) = {next(third.steps(PROMPTS[2], 1)).slot}
    model.broken = {slot}
    asks = [Ask(s, p, 3) for s, p in zip(asked, PROMPTS, strict=True)]
    found = dict(propose_together(asks))
    assert isinstance(found.pop(2), EngineError)
    assert {i: d.tokens for i, d in found.items()} == {  # type: ignore[union-attr]
        i: tokens for i, tokens in enumerate(well) if i != 2
    }
    model.broken = set()
    again = dict(propose_together(asks))
    assert {i: d.tokens for i, d in again.items()} == dict(enumerate(well))  # type: ignore[union-attr]


class Plain:
    """A draft session that knows nothing of steps, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def propose(self, committed: Sequence[int], count: int, stop: object = None) -> Draft:
        if self._error is not None:
            raise self._error
        return Draft(tokens=(len(committed),) * count)

    def close(self) -> None: ...


def test_sessions_that_know_no_steps_are_asked_one_by_one():
    inner = sessions(ModelDrafter("toy", model=Counting()), Rule.COUPLED)[0]
    error = ValueError("a bug")
    asks = [Ask(Plain(), (1, 2), 2), Ask(inner, PROMPTS[0], 2), Ask(Plain(error), (1,), 2)]
    found = dict(propose_together(asks))
    assert found[0] == Draft(tokens=(2, 2))
    assert found[2] is error
    assert len(found[1]) == 2  # type: ignore[arg-type]
    assert dict(propose_together([Ask(Plain(error), (1,), 2)])) == {0: error}


def test_a_draft_without_a_model_copies_in_company_too():
    drafter = ModelDrafter("lookup", lookup=True)
    prompt = (1, 2, 3, 4, 5, 1, 2, 3)
    asked = [drafter.session(8, SamplingParams(), Rule.COUPLED) for _ in range(2)]
    found = dict(propose_together([Ask(s, prompt, 2) for s in asked]))
    assert [found[i].tokens for i in (0, 1)] == [(4, 5), (4, 5)]  # type: ignore[union-attr]
