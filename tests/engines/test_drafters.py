"""Stop rules inside the draft engine: what they see, when they are asked, and that the law holds.

`laws.Tree` runs a whole round once for every outcome of its draws, so the law is an exact sum.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import pytest

from laws import Tree
from outrider.core import rng, verify
from outrider.core.draft import Draft, DraftSignal
from outrider.core.sampling import Distribution
from outrider.core.tokens import Rule, SamplingParams
from outrider.engines.base import Block, EngineError, FloatRow
from outrider.engines.drafters import ModelDrafter, entropy
from outrider.engines.toy import ToyModel
from outrider.session.verifier import Verifier

EIGHTH = np.log(np.array([0.5, 0.25, 0.125, 0.125], dtype=np.float32))


class Rulebook:
    """A stop rule made of one function; keeps what it was shown."""

    def __init__(
        self,
        ends: Callable[[DraftSignal], bool] = lambda signal: False,
        *,
        needs_hidden: bool = False,
    ) -> None:
        self.ends = ends
        self.needs_hidden = needs_hidden
        self.starts = 0
        self.seen: list[DraftSignal] = []

    def start(self) -> None:
        self.starts += 1

    def stop(self, signal: DraftSignal) -> bool:
        self.seen.append(signal)
        return self.ends(signal)


class Showing(ToyModel):
    """A toy whose hidden state is the length of its slot and the last id."""

    def hidden(self, slot: int) -> FloatRow:
        ids = self.tokens(slot)
        return np.array([len(ids), ids[-1]], dtype=np.float32)


def table(rows: dict[int, Sequence[int]]) -> Callable[[tuple[int, ...]], FloatRow]:
    """The law given the last id, in eighths."""
    with np.errstate(divide="ignore"):
        logs = {k: np.log(np.array(row, dtype=np.float32) / 8) for k, row in rows.items()}
    return lambda context: logs[context[-1]]


def flat(row: FloatRow) -> Callable[[tuple[int, ...]], FloatRow]:
    return lambda context: row


def said(draft: Draft) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return draft.tokens, draft.q


def test_entropy_of_known_laws():
    ids = np.arange(4)
    for weights, nats in (
        (EIGHTH, 1.75 * math.log(2)),
        (EIGHTH + 30, 1.75 * math.log(2)),
        (np.zeros(4, np.float32), math.log(4)),
        (np.array([0, -np.inf, -np.inf, -np.inf], np.float32), 0.0),
        (np.array([0, -2000, 0, -np.inf], np.float32), math.log(2)),
    ):
        q = Distribution(ids, weights, rng.token_offsets(ids))
        assert entropy(q) == pytest.approx(nats, abs=1e-6)


@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.RATIO])
def test_a_rule_sees_each_token_and_may_end_the_block(rule):
    drafter = ModelDrafter("toy", model=ToyModel(flat(EIGHTH), vocab_size=4))
    session = drafter.session(1, SamplingParams(seed=5), rule)
    whole = session.propose([0], 6)
    watching = Rulebook()
    assert said(session.propose([0], 6, watching)) == said(whole)
    assert [s.index for s in watching.seen] == [0, 1, 2, 3, 4, 5]
    expected = [[0.5, 0.25, 0.125, 0.125][token] for token in whole.tokens]
    assert [s.probability for s in watching.seen] == pytest.approx(expected)
    assert [s.entropy for s in watching.seen] == pytest.approx([1.75 * math.log(2)] * 6)
    assert all(s.hidden is None for s in watching.seen)
    cutting = Rulebook(lambda signal: signal.index == 2)
    cut = session.propose([0], 6, cutting)
    assert cut.tokens == whole.tokens[:3]
    assert cut.q == whole.q[:3]
    assert (cutting.starts, len(cutting.seen)) == (1, 3)
    assert said(session.propose([0], 6)) == said(whole)  # nothing of it stays in the session


def test_at_temperature_zero_the_signal_is_that_of_temperature_one():
    """q itself would say probability 1, entropy 0 for every guess."""
    drafter = ModelDrafter("toy", model=ToyModel(flat(EIGHTH), vocab_size=4))
    for top_k, probability, nats in ((0, 0.5, 1.75 * math.log(2)), (1, 1.0, 0.0)):
        rule = Rulebook()
        params = SamplingParams(temperature=0.0, top_k=top_k)
        assert drafter.session(1, params, Rule.COUPLED).propose([3], 2, rule).tokens == (0, 0)
        assert [s.probability for s in rule.seen] == pytest.approx([probability] * 2)
        assert [s.entropy for s in rule.seen] == pytest.approx([nats] * 2, abs=1e-6)


def test_the_hidden_state_is_the_one_the_token_was_drawn_from():
    drafter = ModelDrafter("toy", model=Showing(flat(EIGHTH), vocab_size=4))
    assert drafter.shows_hidden
    rule = Rulebook(needs_hidden=True)
    tokens = drafter.session(1, SamplingParams(), Rule.COUPLED).propose([2, 3], 3, rule).tokens
    assert [s.hidden.tolist() for s in rule.seen] == [[2, 3], [3, tokens[0]], [4, tokens[1]]]
    unasked = Rulebook()
    drafter.session(1, SamplingParams(), Rule.COUPLED).propose([2, 3], 3, unasked)
    assert all(s.hidden is None for s in unasked.seen)


def test_a_draft_without_hidden_states_says_so():
    drafter = ModelDrafter("toy", model=ToyModel(flat(EIGHTH), vocab_size=4, name="blind"))
    assert not drafter.shows_hidden
    session = drafter.session(1, SamplingParams(), Rule.COUPLED)
    with pytest.raises(EngineError, match="draft blind shows no hidden state"):
        session.propose([0], 2, Rulebook(needs_hidden=True))
    assert len(session.propose([0], 2)) == 2


def test_copied_guesses_are_never_a_reason_to_stop():
    prompt = [0, 1, 2, 3, 1, 0, 1, 2]  # 0 1 2 was followed by 3, 1 2 3 by 1, ...
    never = Rulebook(lambda signal: True, needs_hidden=True)
    copying = ModelDrafter("lookup", lookup=True).session(8, SamplingParams(), Rule.RATIO)
    draft = copying.propose(prompt, 4, never)
    assert draft.tokens == (3, 1, 0, 1)
    assert draft.q == (1.0, 1.0, 1.0, 1.0)
    assert (never.starts, never.seen) == (1, [])


def test_copies_between_two_guesses_count_in_the_index():
    prompt = [0, 1, 2, 3, 2, 0, 1]
    twos = np.array([-50, -50, 0, -50], dtype=np.float32)
    both = ModelDrafter("both", model=ToyModel(flat(twos), vocab_size=4), lookup=True)
    rule = Rulebook(lambda signal: signal.index > 0)
    draft = both.session(7, SamplingParams(), Rule.COUPLED).propose(prompt, 12, rule)
    # The model says 2; behind 0 1 2 stood 3 2 0 1; behind 2 0 1 nothing: the model again.
    assert draft.tokens == (2, 3, 2, 0, 1, 2)
    assert [s.index for s in rule.seen] == [0, 5]


def test_an_end_id_ends_the_block_before_the_rule_is_asked():
    row = np.array([0, -50, -50, -50], dtype=np.float32)
    model = ToyModel(flat(row), vocab_size=4, eos_token_ids=frozenset({0}))
    rule = Rulebook()
    session = ModelDrafter("toy", model=model).session(1, SamplingParams(), Rule.COUPLED)
    assert session.propose([1], 4, rule).tokens == (0,)
    assert rule.seen == []


# ----------------------------------------------------------------------------- the law


Table = dict[int, Sequence[int]]
PAIRS: dict[str, tuple[Table, Table]] = {
    "ugly": (
        {0: (5, 2, 1), 1: (1, 6, 1), 2: (3, 2, 3)},
        {0: (1, 3, 4), 1: (2, 3, 3), 2: (6, 1, 1)},
    ),
    "crossing": (
        {0: (4, 2, 2), 1: (2, 2, 4), 2: (0, 4, 4)},
        {0: (2, 4, 2), 1: (2, 4, 2), 2: (4, 4, 0)},
    ),
}
STOPS: dict[str, Callable[[DraftSignal], bool]] = {
    "unlikely token": lambda s: s.probability < 0.3,
    "likely token": lambda s: s.probability > 0.3,
    "flat law": lambda s: s.entropy > 0.95,
    "likely token of a flat law": lambda s: s.entropy > 0.8 and s.probability > 0.3,
}
Keep = Callable[[Draft], Draft]


def block_law(tree: Tree, pair: tuple[Table, Table], stop, last: int, keep: Keep) -> dict:
    """What one round behind `last` commits, with its exact probability."""
    params = SamplingParams()

    def run() -> tuple[int, ...]:
        target, model = (ToyModel(table(rows), vocab_size=3) for rows in pair)
        session = ModelDrafter("toy", model=model).session(1, params, Rule.RATIO)
        draft = keep(session.propose([last], 3, Rulebook(stop)))
        judge = Verifier(params, Rule.RATIO, prompt=(last,), vocab_size=3, end_ids=frozenset())
        block = Block(
            slot=target.open(), start=0, tokens=(last, *draft.tokens), rows=len(draft) + 1
        )
        verdict = judge.judge(draft, target.forward([block])[0], 1).verdict
        return (*draft.tokens[: verdict.accepted], verdict.token)

    return tree.law(run)


def answer_law(laws: dict[int, dict], last: int, length: int) -> dict:
    """Law of the first `length` tokens of an answer made of such rounds."""
    law: dict[tuple[int, ...], Fraction] = {(): Fraction(1)}
    while any(len(tokens) < length for tokens in law):
        longer: dict[tuple[int, ...], Fraction] = {}
        for tokens, weight in law.items():
            more = laws[(last, *tokens)[-1]] if len(tokens) < length else {(): 1}
            for rest, chance in more.items():
                whole = (*tokens, *rest)[:length]
                longer[whole] = longer.get(whole, Fraction(0)) + weight * chance
        law = longer
    return {tokens: weight for tokens, weight in law.items() if weight}


def own_law(p: Table, last: int, length: int) -> dict:
    """The target's own law of its first `length` tokens."""
    law = {}
    for tokens in itertools.product(range(3), repeat=length):
        weight = Fraction(1)
        for before, token in zip((last, *tokens), tokens, strict=False):
            weight *= Fraction(p[before][token], 8)
        if weight:
            law[tokens] = weight
    return law


def laws_of(monkeypatch, pair, stop, keep: Keep = lambda draft: draft) -> dict[int, dict]:
    monkeypatch.setattr(verify, "PROPOSAL_BATCHES", (1,))
    tree = Tree(rational=True).plant(monkeypatch)
    return {last: block_law(tree, pair, stop, last, keep) for last in range(3)}


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("name", PAIRS)
def test_a_stop_that_looks_at_the_drawn_token_keeps_the_law(monkeypatch, name, stop):
    """Ratio rule, blocks of up to three, law of four tokens as Fractions."""
    laws = laws_of(monkeypatch, PAIRS[name], STOPS[stop])
    assert len({len(tokens) for law in laws.values() for tokens in law}) > 1  # it did cut
    assert answer_law(laws, 0, 4) == own_law(PAIRS[name][0], 0, 4)


def test_a_token_withdrawn_by_its_probability_would_bend_the_law(monkeypatch):
    """Why the token stays in the block, and that the test above can fail."""

    def withdraw(draft: Draft) -> Draft:
        if not draft.q or draft.q[-1] >= 0.3:
            return draft
        parts = {f.name: getattr(draft, f.name)[:-1] for f in dataclasses.fields(draft)}
        return Draft(**parts)

    laws = laws_of(monkeypatch, PAIRS["ugly"], STOPS["unlikely token"], withdraw)
    assert answer_law(laws, 0, 4) != own_law(PAIRS["ugly"][0], 0, 4)
