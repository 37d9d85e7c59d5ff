"""Losslessness, by exact enumeration through the real drafter, verifier and rules.

`laws.Tree` runs the code once for every outcome of every draw and adds up exact weights, so
these are proofs for the laws they name, not samples.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laws import ALARM, Tree, fit
from outrider.core import rng, verify
from outrider.core.draft import Draft
from outrider.core.rng import Purpose
from outrider.core.sampling import Distribution
from outrider.core.tokens import Rule, SamplingParams, Verdict
from outrider.engines.base import Block
from outrider.engines.drafters import ModelDrafter
from outrider.engines.toy import ToyModel, table_law
from outrider.session.verifier import Verifier

PROMPT = (0,)
Table = dict[int, tuple[int, ...]]
"""A Markov chain: last token to numerators of the next token's probabilities."""


def chain(table: Table) -> ToyModel:
    width = len(table[0])
    laws = {last: [n / sum(row) for n in row] for last, row in table.items()}
    return ToyModel(table_law(laws, width), vocab_size=width)


def exact(table: Table) -> dict[int, list[Fraction]]:
    return {last: [Fraction(n, sum(row)) for n in row] for last, row in table.items()}


class Pair:
    """Draft and target in the plainest loop: propose, score, judge, commit."""

    def __init__(
        self, p: Table, q: Table | None, params: SamplingParams | None = None, **how
    ) -> None:
        self.params = params or SamplingParams()
        self.target = chain(p)
        self.width = self.target.info.vocab_size
        self.drafter = (
            ModelDrafter("toy", model=chain(q))
            if q is not None
            else ModelDrafter("lookup", lookup=True)
        )
        self.change_draft = how.get("change_draft", lambda draft: draft)

    def answer(self, length: int, block: int, prompt: tuple[int, ...] = PROMPT) -> tuple[int, ...]:
        """At least `length` output tokens, of which the first `length`."""
        session, judge = self._start(prompt)
        committed = list(prompt)
        while len(committed) < len(prompt) + length:
            committed += self._round(session, judge, committed, block)
        session.close()
        return tuple(committed[len(prompt) : len(prompt) + length])

    def block(self, size: int, prompt: tuple[int, ...] = PROMPT) -> tuple[int, ...]:
        """What the first round behind `prompt` commits."""
        session, judge = self._start(prompt)
        tokens = self._round(session, judge, list(prompt), size)
        session.close()
        return tokens

    def _start(self, prompt: tuple[int, ...]):
        judge = Verifier(
            self.params, Rule.RATIO, prompt=prompt, vocab_size=self.width, end_ids=frozenset()
        )
        return self.drafter.session(len(prompt), self.params, Rule.RATIO), judge

    def _round(self, session, judge, committed: list[int], size: int) -> tuple[int, ...]:
        draft = self.change_draft(session.propose(committed, size))
        slot = self.target.open()
        tokens = (*committed, *draft.tokens)
        ask = Block(slot=slot, start=0, tokens=tokens, rows=len(draft) + 1)
        rows = self.target.forward([ask])[0]
        self.target.close(slot)
        verdict = judge.judge(draft, rows, len(committed)).verdict
        return (*draft.tokens[: verdict.accepted], verdict.token)


def expected_law(
    p: dict[int, list], length: int, last: int = PROMPT[-1]
) -> dict[tuple[int, ...], Fraction]:
    """The target's own law of the first `length` tokens."""
    found = {}
    for tokens in itertools.product(range(len(p[0])), repeat=length):
        weight = Fraction(1)
        for before, token in zip((last, *tokens), tokens, strict=False):
            weight *= p[before][token]
        if weight:
            found[tokens] = weight
    return found


def extended(law: dict, following, length: int) -> dict:
    """Law of the first `length` tokens when `following(last)` is the law of what comes next."""
    while any(len(tokens) < length for tokens in law):
        longer: dict = {}
        for tokens, weight in law.items():
            more = following(tokens[-1]) if len(tokens) < length else {(): 1}
            for rest, chance in more.items():
                whole = (*tokens, *rest)[:length]
                longer[whole] = longer.get(whole, 0) + weight * chance
        law = longer
    return {tokens: weight for tokens, weight in law.items() if weight}


def composed(block_law, length: int, last: int = PROMPT[-1]) -> dict:
    """Law of the first `length` tokens of an answer made of such blocks."""
    cut: dict = {}
    for tokens, weight in block_law(last).items():
        cut[tokens[:length]] = cut.get(tokens[:length], 0) + weight
    return extended(cut, block_law, length)


def few_proposals(monkeypatch, count: int = 1, rounds: int = 1) -> None:
    """Short dialogues, so that all three steps of it are walked in few branches."""
    monkeypatch.setattr(verify, "PROPOSAL_BATCHES", (count,) * rounds)


# Numerators are powers of two, so every threshold p/q and (p-q)/p lies on a grid of 8 cells.
EIGHTHS = {
    "crossed": ((4, 2, 2), (2, 4, 2)),
    "skewed": ((4, 4, 0), (2, 2, 4)),
    "four ids": ((4, 2, 1, 1), (1, 1, 2, 4)),
    "equal": ((4, 2, 2), (4, 2, 2)),
    "apart": ((4, 4, 0, 0), (0, 0, 4, 4)),
    "one-hot draft": ((4, 2, 2), (0, 8, 0)),
    "one-hot target": ((0, 8, 0), (2, 2, 4)),
    "both one-hot": ((8, 0, 0), (8, 0, 0)),
}


def everywhere(row: tuple[int, ...]) -> Table:
    return dict.fromkeys(range(len(row)), row)


@pytest.mark.parametrize("name", EIGHTHS)
def test_ratio_of_one_draft_is_exact(monkeypatch, name):
    """Accept, a proposal, the full row: the token's law is p, as Fractions. Every uniform takes
    all midpoints of a grid that holds all thresholds."""
    p, q = (everywhere(row) for row in EIGHTHS[name])
    few_proposals(monkeypatch)
    law = Tree(grid=8).plant(monkeypatch).law(lambda: Pair(p, q).block(1))
    assert composed(lambda last: law, 1) == expected_law(exact(p), 1)


@pytest.mark.parametrize(("count", "rounds"), [(2, 1), (1, 2), (2, 2)])
def test_longer_dialogues_are_exact(monkeypatch, count, rounds):
    p, q = (everywhere(row) for row in ((4, 3, 1), (1, 2, 5)))
    few_proposals(monkeypatch, count, rounds)
    monkeypatch.setattr(verify, "proposal_count", lambda rejection: count)
    law = Tree(rational=True).plant(monkeypatch).law(lambda: Pair(p, q).block(1))
    assert composed(lambda last: law, 1) == expected_law(exact(p), 1)


CHAINS = {
    "crossing": (
        {0: (4, 2, 2), 1: (2, 2, 4), 2: (0, 4, 4)},
        {0: (2, 4, 2), 1: (2, 4, 2), 2: (4, 4, 0)},
    ),
    "half one-hot": (
        {0: (4, 4, 0), 1: (2, 4, 2), 2: (8, 0, 0)},
        {0: (2, 2, 4), 1: (8, 0, 0), 2: (4, 2, 2)},
    ),
}


UGLY = (
    {0: (5, 2, 1), 1: (1, 6, 1), 2: (3, 2, 3)},
    {0: (1, 3, 4), 1: (2, 3, 3), 2: (6, 1, 1)},
)


PAIRS = {"ugly": UGLY, **CHAINS}


@pytest.mark.parametrize("block", [1, 2, 3])
@pytest.mark.parametrize("name", PAIRS)
def test_ratio_of_blocks_is_exact(monkeypatch, name, block):
    """Law of four tokens, as Fractions: rejections at every place, bonuses, the next block.
    Uniforms are decided where they are compared, so the numerators may be anything."""
    p, q = PAIRS[name]
    few_proposals(monkeypatch)
    tree = Tree(rational=True).plant(monkeypatch)
    laws = {last: tree.law(lambda last=last: Pair(p, q).block(block, (last,))) for last in p}
    assert composed(laws.get, 4) == expected_law(exact(p), 4)


def test_rounds_do_not_share_noise(monkeypatch):
    """Two and three rounds in one tree: drafts thrown away unjudged leave their noise behind,
    and what the next block makes of it is still the target's law."""
    p, q = {0: (3, 1), 1: (1, 3)}, {0: (1, 3), 1: (2, 2)}
    few_proposals(monkeypatch, rounds=0)
    for block, length in ((1, 3), (2, 2)):
        tree = Tree(rational=True).plant(monkeypatch)
        law = tree.law(lambda b=block, n=length: Pair(p, q).answer(n, b))
        assert law == expected_law(exact(p), length)


def test_ratio_with_copied_drafts_is_exact(monkeypatch):
    """Prompt lookup is a draft of probability one."""
    p = UGLY[0]
    few_proposals(monkeypatch)
    prompt = (0, 1, 2, 2, 0, 1, 2)  # 0 1 2 was followed by 2
    pair = Pair(p, None)
    drafts = pair.drafter.session(7, pair.params, Rule.RATIO).propose(prompt, 2)
    assert drafts.tokens == (2, 0)
    assert drafts.q == (1.0, 1.0)
    law = Tree(rational=True).plant(monkeypatch).law(lambda: pair.block(2, prompt))
    own = {last: {(i,): w for i, w in enumerate(row)} for last, row in exact(p).items()}
    law = extended(law, own.get, 3)
    assert law == expected_law(exact(p), 3, last=2)


@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("top_k", [0, 2])
@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.0, 1.5])
def test_field_case_04(monkeypatch, temperature, top_k, top_p, block):
    """The accept test uses the q that was drawn from, filters included. The case asks for
    200,000 draws of tokens 1 and 2; this adds up all outcomes instead."""
    row, other = (0.5, 0.3, 0.15, 0.05), (0.1, 0.2, 0.3, 0.4)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    few_proposals(monkeypatch, rounds=1 if block == 1 else 0)
    pair = Pair(everywhere(row), everywhere(other), params)
    law = Tree().plant(monkeypatch).law(lambda: pair.block(block))
    law = composed(lambda last: law, 2)
    one = filtered(row, temperature, top_k, top_p)
    two = {(a, b): one[a] * one[b] for a in one for b in one}
    assert law == pytest.approx(two, abs=2e-6)


def filtered(row, temperature, top_k, top_p) -> dict[int, float]:
    weight = {i: x ** (1 / temperature) for i, x in enumerate(row)}
    order = sorted(weight, key=lambda i: -weight[i])[: top_k or None]
    total, reached, kept = sum(weight[i] for i in order), 0.0, []
    for i in order:
        kept.append(i)
        reached += weight[i] / total
        if reached >= top_p:
            break
    return {i: weight[i] / sum(weight[j] for j in kept) for i in kept}


def test_field_case_04_with_real_noise():
    """The same with the real generator, fewer draws: that the addresses are independent."""
    params = SamplingParams(temperature=0.7, top_p=0.9)
    row, other = (0.5, 0.3, 0.15, 0.05), (0.1, 0.2, 0.3, 0.4)
    one = filtered(row, 0.7, 0, 0.9)
    counts = np.zeros((4, 4))
    for seed in range(400):
        pair = Pair(
            everywhere(row),
            everywhere(other),
            SamplingParams(temperature=params.temperature, top_p=params.top_p, seed=seed),
        )
        counts[pair.answer(2, 3)] += 1
    law = np.array([[one.get(a, 0) * one.get(b, 0) for b in range(4)] for a in range(4)])
    assert fit(counts.ravel(), law.ravel()) > ALARM


# -- planted bugs: the law test must see each ----------


def residual_from_p(monkeypatch):
    monkeypatch.setattr(verify, "choose", lambda ys, q, **at: ys[0].token if ys else None)


def full_row_from_p(monkeypatch):
    monkeypatch.setattr(
        verify,
        "residual_draw",
        lambda p, q, *, seed, position: p.draw(rng.key(seed, Purpose.RESIDUAL, position)),
    )


def one_accept_uniform_a_block(monkeypatch):
    """The offset of the draft in its block is forgotten in the noise."""
    real = verify.judge_ratio

    def judge(drafts, q, at, *, seed, position):
        accepts = verify.accepts
        with monkeypatch.context() as inner:
            inner.setattr(verify, "accepts", lambda p, q, *, seed, position: accepts_at(p, q, seed))

            def accepts_at(p, q, seed):
                return accepts(p, q, seed=seed, position=1)

            return real(drafts, q, at, seed=seed, position=position)

    monkeypatch.setattr("outrider.session.verifier.judge_ratio", judge)


def proposals_judged_by_the_accept_uniform(monkeypatch):
    def choose(ys, q, *, seed, position, start):
        for y in ys:
            if rng.uniform(seed, Purpose.ACCEPT, position) * y.p < y.p - q.prob(y.token):
                return y.token
        return None

    monkeypatch.setattr(verify, "choose", choose)


def bonus_from_the_draft(monkeypatch):
    real = verify.judge_ratio

    def judge(drafts, q, at, **where):
        outcome = real(drafts, q, at, **where)
        if isinstance(outcome, Verdict):
            return Verdict(drafted=len(drafts), accepted=len(drafts), token=drafts[-1])
        return outcome

    monkeypatch.setattr("outrider.session.verifier.judge_ratio", judge)


def always_accept(monkeypatch):
    monkeypatch.setattr(verify, "accepts", lambda p, q, **at: p > 0)


def unfiltered_q(monkeypatch):
    """The q of the accept test is the model's, not the one that was drawn from."""
    real = verify.accepts
    monkeypatch.setattr(verify, "accepts", lambda p, q, **at: real(p, q / 2, **at))


def no_bug(monkeypatch):
    """That the comparison itself is right."""


BUGS = [
    residual_from_p,
    full_row_from_p,
    one_accept_uniform_a_block,
    proposals_judged_by_the_accept_uniform,
    bonus_from_the_draft,
    always_accept,
    unfiltered_q,
]


@pytest.mark.parametrize("bug", [no_bug, *BUGS], ids=lambda bug: bug.__name__)
def test_a_planted_bug_shows_in_the_law(monkeypatch, bug):
    p, q = everywhere((4, 3, 1, 0)), everywhere((1, 2, 4, 1))  # two ids in the residual
    few_proposals(monkeypatch)
    tree = Tree().plant(monkeypatch)
    expected = expected_law(exact(p), 3)
    bug(monkeypatch)
    law = tree.law(lambda: Pair(p, q).block(2))
    bad = composed(lambda last: law, 3)
    distance = max(abs(float(bad.get(k, 0) - expected.get(k, 0))) for k in {*bad, *expected})
    assert distance < 1e-5 if bug is no_bug else distance > 0.005


def test_a_filter_on_the_target_only_shows_in_the_law(monkeypatch):
    """Field case 04's bug itself: the draft draws with top-k 2 but reports the raw q."""
    row, other = (4, 2, 2), (1, 3, 4)
    few_proposals(monkeypatch)

    def raw_q(draft: Draft) -> Draft:
        return Draft(
            tokens=draft.tokens, q=tuple(other[t] / 8 for t in draft.tokens), rows=draft.rows
        )

    def run(change):
        params = SamplingParams(top_k=2)
        pair = Pair(everywhere(row), everywhere(other), params, change_draft=change)
        law = Tree().plant(monkeypatch).law(lambda: pair.block(1))
        return composed(lambda last: law, 1)

    assert run(lambda draft: draft) == pytest.approx({(0,): 2 / 3, (1,): 1 / 3}, abs=2e-6)
    assert abs(float(run(raw_q)[(0,)]) - 2 / 3) > 0.01


# -- the edges of the ratio rule (field case 05) ----------


def dist(*p: float) -> Distribution:
    ids = np.arange(len(p), dtype=np.int64)
    weights = np.array([math.log(x) if x else -math.inf for x in p], dtype=np.float32)
    return Distribution(ids, weights, rng.token_offsets(ids))


def rounded(d: Distribution) -> Distribution:
    return Distribution(
        d.ids, d.weights.astype(np.float16).astype(np.float32), rng.token_offsets(d.ids)
    )


ROW = dist(0.4, 0.3, 0.2, 0.1)
NO_LEFTOVER = {
    "equal": (ROW, ROW),
    "rounded to float16": (ROW, rounded(ROW)),
    "one-hot": (dist(0, 1, 0), dist(0, 1, 0)),
    "all but one impossible": (dist(0, 0, 1, 0), dist(0, 0, 1, 0)),
    "single candidates": (ROW, dist(1.0)),
    "disjoint": (dist(0, 1, 0), dist(1, 0, 0)),
}


@pytest.mark.parametrize("name", NO_LEFTOVER)
def test_field_case_05(name):
    p, q = NO_LEFTOVER[name]
    for position in range(10):
        token = verify.residual_draw(p, q, seed=1, position=position)
        assert p.prob(token) > 0
        for x in range(len(p.ids)):
            rejection = verify.Rejection(position=position, token=x, p=p.prob(x), q=q.prob(x))
            token, _ = verify.resolve_rejection(rejection, p, q, seed=1)
            assert p.prob(token) > 0


def test_nothing_left_means_p(monkeypatch):
    """When p and q coincide, what is drawn after a (numerical) rejection has the law p."""
    law = Tree().plant(monkeypatch).law(lambda: verify.residual_draw(ROW, ROW, seed=1, position=3))
    assert law == pytest.approx(dict(enumerate((0.4, 0.3, 0.2, 0.1))), abs=1e-6)


def test_residual_over_different_supports(monkeypatch):
    """Ids that only one side knows, as filters leave them."""
    ids = np.array([1, 4, 6], dtype=np.int64)
    p = Distribution(ids, np.log([0.5, 0.25, 0.25]).astype(np.float32), rng.token_offsets(ids))
    other = np.array([0, 4, 9], dtype=np.int64)
    q = Distribution(other, np.log([0.25, 0.5, 0.25]).astype(np.float32), rng.token_offsets(other))
    law = Tree().plant(monkeypatch).law(lambda: verify.residual_draw(p, q, seed=1, position=0))
    assert law == pytest.approx({1: 2 / 3, 6: 1 / 3}, abs=1e-6)


@pytest.mark.parametrize("q", [0.0, -0.5, math.nan, math.inf, -math.inf])
def test_an_impossible_q_is_refused_and_the_answer_goes_on(q):
    for position in range(50):
        assert not verify.accepts(0.9, q, seed=1, position=position)
    outcome = verify.judge_ratio([1], [q], lambda i: ROW, seed=1, position=5)
    assert isinstance(outcome, verify.Rejection)
    assert 1 <= verify.proposal_count(outcome) <= verify.PROPOSAL_BATCHES[0]
    token, _ = verify.resolve_rejection(outcome, ROW, dist(0.25, 0.25, 0.25, 0.25), seed=1)
    assert token in range(4)


@given(st.floats(1e-300, 1.0), st.integers(0, 10**6))
def test_accept_limits(x, position):
    assert verify.accepts(x, x, seed=3, position=position)  # p >= q: always
    assert not verify.accepts(0.0, x, seed=3, position=position)  # p = 0: never


@given(st.floats(0, 1), st.floats(0, 1))
def test_proposal_count_keeps_its_promise(p, q):
    rejection = verify.Rejection(position=1, token=0, p=p, q=q)
    count = verify.proposal_count(rejection)
    floor = max(q - p, 0.0)
    most = verify.PROPOSAL_BATCHES[0]
    assert 1 <= count <= most
    if count < most:
        assert (1 - floor) ** count <= verify.PROPOSAL_FAILURE + 1e-12
    if count > 1:
        assert (1 - floor) ** (count - 1) >= verify.PROPOSAL_FAILURE - 1e-12


def test_dialogue_steps_are_reported(monkeypatch):
    p, q = dist(0.5, 0.5, 0.0), dist(0.0, 0.5, 0.5)
    rejection = verify.Rejection(position=9, token=2, p=0.0, q=0.5)
    steps = set()
    few_proposals(monkeypatch, 1, 2)
    for seed in range(60):
        token, step = verify.resolve_rejection(rejection, p, q, seed=seed)
        assert token == 0  # the only id with leftover mass
        steps.add(step)
    assert steps == {"proposals", "more-proposals", "full-row"}


def test_probabilities_must_go_with_the_drafts():
    with pytest.raises(ValueError, match="2 drafts with 1"):
        verify.judge_ratio([1, 2], [0.5], lambda i: ROW, seed=1, position=5)
    with pytest.raises(ValueError):
        Draft(tokens=(1, 2), q=(0.5,), rows=(ROW,))
    with pytest.raises(ValueError):
        Draft(tokens=(1,), q=(0.5, 0.5))


# -- coupled: the target's own text, whatever was drafted ----------


RANDOM = ToyModel(
    table_law(
        {i: np.random.default_rng(i).dirichlet(np.full(5, 0.7)).tolist() for i in range(5)}, 5
    ),
    vocab_size=5,
)


def own_tokens(params: SamplingParams, prompt: list[int], count: int) -> list[int]:
    """The target alone, written with nothing but the noise and the row."""
    ids = list(prompt)
    for _ in range(count):
        slot = RANDOM.open()
        ask = Block(slot=slot, start=0, tokens=tuple(ids), rows=1)
        weights = RANDOM.forward([ask])[0][0].astype(float)
        RANDOM.close(slot)
        e = rng.exponentials(
            rng.integers(rng.key(params.seed, Purpose.TOKEN, len(ids)), rng.token_offsets(5))
        )
        cold = params.temperature == 0
        score = -weights if cold else np.log(e) - weights / params.temperature
        ids.append(int(score.argmin()))
    return ids[len(prompt) :]


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=5),
    st.lists(st.lists(st.integers(0, 4), max_size=5), min_size=1, max_size=6),
    st.integers(0, 2**63 - 1),
    st.sampled_from([0.0, 0.5, 1.0, 2.0]),
)
def test_coupled_text_is_the_targets_own(prompt, blocks, seed, temperature):
    """Arbitrary drafts change how many tokens a block brings, and nothing else."""
    params = SamplingParams(seed=seed, temperature=temperature)
    judge = Verifier(params, Rule.COUPLED, prompt=prompt, vocab_size=5, end_ids=frozenset())
    committed = list(prompt)
    for block in blocks:
        slot = RANDOM.open()
        ask = Block(slot=slot, start=0, tokens=(*committed, *block), rows=len(block) + 1)
        rows = RANDOM.forward([ask])[0]
        RANDOM.close(slot)
        verdict = judge.judge(Draft(tokens=tuple(block)), rows, len(committed)).verdict
        assert verdict.drafted == len(block)
        assert verdict.accepted == len(block) or verdict.token != block[verdict.accepted]
        committed += [*block[: verdict.accepted], verdict.token]
    assert committed[len(prompt) :] == own_tokens(params, prompt, len(committed) - len(prompt))


def test_coupled_draft_equal_to_target_is_always_accepted():
    model = ModelDrafter("same", model=RANDOM)
    params = SamplingParams(seed=5)
    session = model.session(2, params, Rule.COUPLED)
    assert list(session.propose([1, 2], 30).tokens) == own_tokens(params, [1, 2], 30)
    session.close()
