"""Relaxed acceptance: exact laws over three ids, and the ledger on every path.

The joint law of a coupled pair of draws is known in closed form (`coupled`), so `law_of` runs
the real rules once for every outcome of drafts and targets and adds up exact weights.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laws import ALARM, fit
from outrider.core import rng
from outrider.core.divergence import LN2, Divergence, compare, jsd, jsd_bounds, tv, tv_bounds
from outrider.core.ledger import Ledger
from outrider.core.relaxed import (
    Fate,
    Policy,
    RelaxedRule,
    RelaxedVerdict,
    e2sci,
    fsd,
    relaxed,
    rule_on,
    typical,
    typical_floor,
    verify_relaxed,
)
from outrider.core.rng import Purpose
from outrider.core.sampling import Distribution
from outrider.core.sparse import Sketch, sketched
from outrider.core.tokens import ParameterError, Verdict
from outrider.core.verify import target_token, verify_coupled

Law = dict[tuple[int, ...], float]
Rows = Callable[[tuple[int, ...]], Distribution]
FREE = Ledger(budget=math.inf)


def of(*p: float) -> Distribution:
    ids = np.arange(len(p))
    with np.errstate(divide="ignore"):
        return Distribution(ids, np.log(np.array(p)).astype(np.float32), rng.token_offsets(ids))


# -- exact laws


def coupled(p: Distribution, q: Distribution) -> Iterator[tuple[int, int, float]]:
    """(x, y, P(x, y)) for x = argmin E/q, y = argmin E/p with the same exponentials E.

    x = i, y = j != i, E_i = s, E_j = s t: the other E_u exceed s max(q_u/q_i, p_u t/p_j). With
    C(t) = 1 + t + sum of these, the integral over s leaves that of C(t)**-2 over
    q_j/q_i < t < p_j/p_i, and C is linear between the points where a maximum changes sides.
    """
    a, b = p.dense(3), q.dense(3)
    for v in range(3):
        yield v, v, 1.0 / sum(max(a[u] / a[v], b[u] / b[v]) for u in range(3))
    for i, j in itertools.permutations(range(3), 2):
        low, high = b[j] / b[i], a[j] / a[i]
        (u,) = {0, 1, 2} - {i, j}
        turn = b[u] * a[j] / (b[i] * a[u])
        cuts = [low, *([turn] if low < turn < high else []), high]
        chance = 0.0
        for left, right in itertools.pairwise(cuts) if low < high else ():
            by_q = turn > (left + right) / 2
            base = 1.0 + (b[u] / b[i] if by_q else 0.0)
            slope = 1.0 + (0.0 if by_q else a[u] / a[j])
            chance += (1 / (base + slope * left) - 1 / (base + slope * right)) / slope
        yield i, j, chance


P_TABLE = {0: (0.5, 0.3, 0.2), 1: (0.2, 0.5, 0.3), 2: (0.3, 0.3, 0.4)}
Q_TABLE = {0: (0.45, 0.35, 0.2), 1: (0.6, 0.2, 0.2), 2: (0.32, 0.33, 0.35)}
"""After 1 the draft is far off (JSD .091), else near (JSD < .002)."""


P_ROWS = {last: of(*row) for last, row in P_TABLE.items()}


def target(context: tuple[int, ...]) -> Distribution:
    return P_ROWS[context[-1]]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch):
    """Runs one block with given own tokens of the target through the real code."""
    own: list[int] = []

    def draw(_: Distribution, key: tuple[Purpose, int]) -> int:
        assert key[0] is Purpose.TOKEN
        return own[key[1]]

    monkeypatch.setattr(rng, "key", lambda seed, purpose, position: (purpose, position))
    monkeypatch.setattr(Distribution, "draw", draw)

    def run(context, drafts, tokens, sketches, policy: Policy, ledger: Ledger) -> RelaxedVerdict:
        own[:] = tokens
        return verify_relaxed(
            drafts,
            sketches,
            lambda i: target((*context, *drafts[:i])),
            seed=0,
            position=0,
            policy=policy,
            ledger=ledger,
        )

    return run


class Exact:
    """The law of blocks and answers under a policy, with drafts from k-id sketches of Q."""

    def __init__(self, play, policy: Policy, *, k: int = 2, size: int = 2) -> None:
        self.play, self.policy, self.size = play, policy, size
        self.rows = {last: sketched(of(*row), k) for last, row in Q_TABLE.items()}
        self.pairs = {
            last: list(coupled(of(*P_TABLE[last]), drawn)) for last, (_, drawn) in self.rows.items()
        }

    def chains(self, context: tuple[int, ...]) -> Iterator[tuple]:
        """(drafts, own tokens, weight): all outcomes of a block, the bonus included."""
        found: list[tuple] = [((), (), 1.0)]
        for _ in range(self.size):
            found = [
                ((*xs, x), (*ys, y), w * chance)
                for xs, ys, w in found
                for x, y, chance in self.pairs[(*context, *xs)[-1]]
            ]
        for xs, ys, w in found:
            for y, chance in enumerate(P_TABLE[(*context, *xs)[-1]]):
                yield xs, (*ys, y), w * chance

    def block(self, context: tuple[int, ...], ledger: Ledger) -> dict:
        """(committed tokens, ledger behind them) to probability."""
        law: dict = defaultdict(float)
        for drafts, own, weight in self.chains(context):
            sketches = [self.rows[(*context, *drafts[:i])[-1]][0] for i in range(self.size)]
            verdict = self.play(context, drafts, own, sketches, self.policy, ledger)
            assert ledger.spent <= verdict.ledger.spent <= verdict.ledger.budget
            committed = (*drafts[: verdict.accepted], verdict.token)
            law[committed, replace(verdict.ledger, relaxed=0)] += weight
        return law

    def answer(self, length: int, budget: float) -> tuple[Law, dict[Ledger, float]]:
        """The law of the first `length` tokens after id 0, and that of the ledger's end."""
        ends: dict[Ledger, float] = defaultdict(float)
        law: Law = defaultdict(float)
        states = {((0,), Ledger(budget=budget)): 1.0}
        while states:
            longer: dict = defaultdict(float)
            for (context, ledger), weight in states.items():
                for (tokens, after), chance in self.block(context, ledger).items():
                    whole = (*context, *tokens)[: length + 1]
                    if len(whole) <= length:
                        longer[whole, after] += weight * chance
                    else:
                        law[whole[1:]] += weight * chance
                        ends[after] += weight * chance
            states = longer
        return law, ends


def own_law(length: int) -> Law:
    """The target's own law of `length` tokens after id 0."""
    law = {}
    for tokens in itertools.product(range(3), repeat=length):
        steps = zip((0, *tokens), tokens, strict=False)
        law[tokens] = math.prod(P_TABLE[a][b] for a, b in steps)
    return law


def distance(a: Law, b: Law) -> float:
    return sum(abs(a.get(t, 0.0) - b.get(t, 0.0)) for t in a.keys() | b) / 2


@given(
    st.lists(st.integers(1, 50), min_size=3, max_size=3),
    st.lists(st.integers(1, 50), min_size=3, max_size=3),
)
def test_the_joint_law_of_a_coupled_pair(a: list[int], b: list[int]):
    """Its margins are p and q, and it parts with a chance of at most 2 TV/(1 + TV)."""
    p, q = of(*np.divide(a, sum(a))), of(*np.divide(b, sum(b)))
    found = list(coupled(p, q))
    for v in range(3):
        assert sum(w for x, _, w in found if x == v) == pytest.approx(q.prob(v), abs=1e-12)
        assert sum(w for _, y, w in found if y == v) == pytest.approx(p.prob(v), abs=1e-12)
    parted = sum(w for x, y, w in found if x != y)
    assert tv(p, q) - 1e-12 <= parted <= 2 * tv(p, q) / (1 + tv(p, q)) + 1e-12


def test_the_joint_law_is_that_of_the_real_noise():
    p, q = of(0.3, 0.4, 0.3), of(0.5, 0.2, 0.3)
    pairs = {(x, y): w for x, y, w in coupled(p, q)}
    counts = dict.fromkeys(pairs, 0)
    for seed in range(3000):
        counts[target_token(q, seed, 7), target_token(p, seed, 7)] += 1
    assert fit(list(counts.values()), list(pairs.values())) > ALARM


@pytest.mark.parametrize("rule", [RelaxedRule.FSD, RelaxedRule.RELAXED, RelaxedRule.TYPICAL])
@pytest.mark.parametrize(("k", "budget"), [(2, 0.0), (2, 0.26), (3, 0.06), (3, 0.11), (3, 2.0)])
def test_the_law_of_an_answer_stays_within_the_budget(
    play, rule: RelaxedRule, k: int, budget: float
):
    exact = Exact(play, Policy(rule=rule, threshold=0.2), k=k)
    law, ends = exact.answer(3, budget)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    assert all(ledger.spent <= budget for ledger in ends)
    far = distance(law, own_law(3))
    assert far <= sum(w * ledger.spent for ledger, w in ends.items()) + 1e-7
    if budget == 0.0:
        assert far < 1e-7  # float32 weights of the tables
    if budget == 2.0:
        assert far > 0.05, "a rule that never relaxes proves nothing"


def test_equal_tokens_must_be_charged_too(play):
    """Charged for unequal tokens alone, two positions of TV .05 would pass a budget of .06."""
    sketch, drawn = sketched(of(0.45, 0.35, 0.2), 3)
    p = of(0.5, 0.3, 0.2)
    here = tv(p, drawn)
    unequal = sum(w for x, y, w in coupled(p, drawn) if x != y)
    assert here <= 0.06 < 2 * here
    # Both positions take x unless the first pair differed and was charged.
    law: Law = defaultdict(float)
    for x, y, w in coupled(p, drawn):
        for v in range(3):
            law[x, v] += w * (drawn.prob(v) if x == y else p.prob(v))
    plain = {(a, b): p.prob(a) * p.prob(b) for a in range(3) for b in range(3)}
    assert unequal < 0.1
    assert distance(law, plain) > 0.06
    # As it is: the second position no longer fits, whatever happened at the first.
    for x, y, _ in coupled(p, drawn):
        ledger = Ledger(budget=0.06)
        first = relaxed(p, sketch, x, threshold=0.2, ledger=ledger)
        assert first.fate is Fate.STANDS
        assert relaxed(p, sketch, y, threshold=0.2, ledger=first.ledger).fate is Fate.STRICT


LENGTHS = {
    (2, 0.0): {1},
    (2, 0.05): {1},
    (2, 0.2): {2, 3},
    (2, LN2): {3},
    (3, 0.0): {1},
    (3, 0.05): {2, 3},
    (3, 0.2): {3},
    (3, LN2): {3},
}
"""Committed tokens of a block of 2 by (k, T)."""


@pytest.mark.parametrize(("k", "threshold"), list(LENGTHS))
def test_fsd_is_what_was_published(play, k: int, threshold: float):
    """Accept x ~ q while the divergence is <= T; at the first failure, or behind the block, one
    draw of p. No word of coupling in it."""
    exact = Exact(play, Policy(rule=RelaxedRule.FSD, threshold=threshold), k=k)

    def published(context: tuple[int, ...], left: int) -> Law:
        p = target(context).dense(3)
        sketch, drawn = exact.rows[context[-1]]
        if left == 0 or not jsd_bounds(target(context), sketch).upper <= threshold:
            return {(v,): float(p[v]) for v in range(3)}
        law: Law = {}
        for x, chance in enumerate(drawn.dense(3)):
            for rest, w in published((*context, x), left - 1).items():
                law[x, *rest] = law.get((x, *rest), 0.0) + float(chance) * w
        return law

    found: Law = defaultdict(float)
    for (tokens, _), weight in exact.block((0,), FREE).items():
        found[tokens] += weight
    assert distance(found, published((0,), 2)) < 1e-7
    assert {len(tokens) for tokens in found} == LENGTHS[k, threshold]


def test_typical_takes_what_medusa_takes():
    p = of(0.6, 0.3, 0.06, 0.04)
    entropy = -sum(x * math.log(x) for x in (0.6, 0.3, 0.06, 0.04))
    assert typical_floor(p) == pytest.approx(min(0.09, 0.3 * math.exp(-entropy)), rel=1e-6)
    assert typical_floor(p, epsilon=0.05) == 0.05
    q = of(0.25, 0.25, 0.25, 0.25)
    fates = [typical(p, q, x, ledger=FREE).fate for x in range(4)]
    assert fates == [Fate.STANDS, Fate.STANDS, Fate.FALLS, Fate.FALLS]
    loose = [typical(p, q, x, ledger=FREE, epsilon=0.05).fate for x in range(4)]
    assert loose == [Fate.STANDS, Fate.STANDS, Fate.STANDS, Fate.FALLS]
    far = tv(p, q)
    for x in range(4):  # kept or not
        spent = typical(p, q, x, ledger=FREE).ledger.spent
        assert spent == pytest.approx(2 * far / (1 + far), abs=1e-9)


# -- with the real noise


@st.composite
def rounds(draw):
    """Tables of p and q over 6 ids with drafts made as an edge makes them: coupled, from k ids."""
    seed, k = draw(st.integers(0, 2**32)), draw(st.integers(1, 6))
    source = np.random.default_rng(draw(st.integers(0, 2**32)))
    nearness = draw(st.sampled_from([0.05, 0.5, 2.0]))
    p_rows = source.normal(0, 2, (7, 6))
    q_rows = p_rows + source.normal(0, nearness, (7, 6))
    size = draw(st.integers(0, 6))
    return seed, [of(*softmax(r)) for r in p_rows], [of(*softmax(r)) for r in q_rows[:size]], k


def softmax(row: np.ndarray) -> np.ndarray:
    e = np.exp(row - row.max())
    return e / e.sum()


def drafted(seed: int, q_rows, k: int, position: int = 5):
    pairs = [sketched(q, k) for q in q_rows]
    tokens = [target_token(drawn, seed, position + i) for i, (_, drawn) in enumerate(pairs)]
    return tokens, [sketch for sketch, _ in pairs]


def judge(made, policy: Policy, ledger: Ledger) -> tuple[RelaxedVerdict, Verdict]:
    seed, p_rows, q_rows, k = made
    tokens, sketches = drafted(seed, q_rows, k)
    how = {"seed": seed, "position": 5}
    found = verify_relaxed(
        tokens, sketches, p_rows.__getitem__, policy=policy, ledger=ledger, **how
    )
    return found, verify_coupled(tokens, p_rows.__getitem__, **how)


@given(rounds(), st.sampled_from([(0.0, math.inf), (LN2, 0.0), (0.0, 0.0)]))
def test_without_threshold_or_budget_it_is_the_coupled_rule(made, setting):
    threshold, budget = setting
    found, plain = judge(made, Policy(threshold=threshold), Ledger(budget=budget))
    assert (found.accepted, found.token) == (plain.accepted, plain.token)
    assert found.strict == plain.accepted
    assert found.relaxed == ()
    assert found.ledger == Ledger(budget=budget)


@given(rounds(), st.sampled_from(list(RelaxedRule)))
def test_without_budget_no_rule_changes_the_text(made, rule: RelaxedRule):
    found, plain = judge(made, Policy(rule=rule, threshold=0.3), Ledger())
    seed, _, q_rows, k = made
    tokens, _ = drafted(seed, q_rows, k)
    text = (*tokens[: found.accepted], found.token)
    assert text == (*tokens[: plain.accepted], plain.token)[: len(text)]
    assert found.ledger == Ledger()


@given(rounds(), st.floats(0, 0.6), st.floats(0, 2), st.sampled_from(list(RelaxedRule)))
def test_a_replayed_round_ends_the_same_way(made, threshold, budget, rule):
    policy = Policy(rule=rule, threshold=threshold)
    before = Ledger(budget=budget, spent=budget / 3, relaxed=2, max_jsd=0.01)
    first, _ = judge(made, policy, before)
    restored = Ledger(
        budget=before.budget, spent=before.spent, relaxed=before.relaxed, max_jsd=before.max_jsd
    )
    assert judge(made, policy, restored)[0] == first
    assert first.ledger.relaxed == 2 + len(first.relaxed)
    assert first.ledger.spent <= budget


@given(rounds(), st.floats(0.01, 0.6), st.floats(0, 1.5))
def test_marks_and_charges(made, threshold: float, budget: float):
    """Each mark is a certified position with another token; the charges are those of all
    certified positions that were reached, until one does not fit."""
    seed, p_rows, q_rows, k = made
    tokens, sketches = drafted(seed, q_rows, k)
    found, _ = judge(made, Policy(threshold=threshold), Ledger(budget=budget))
    own = [target_token(p, seed, 5 + i) for i, p in enumerate(p_rows)]
    spent, marks, worst, strict = 0.0, [], 0.0, 0
    for i in range(len(tokens)):
        charge, js = tv_bounds(p_rows[i], sketches[i]).upper, jsd_bounds(p_rows[i], sketches[i])
        same = tokens[i] == own[i]
        strict += same and strict == i
        if js.upper <= threshold and spent + charge < budget:
            spent, worst = spent + charge, max(worst, js.upper)
            if not same:
                marks.append(i)
        elif not same:
            assert found.accepted == i
            break
    assert found.relaxed == tuple(marks)
    assert found.ledger.spent == pytest.approx(spent, abs=1e-12)
    assert found.ledger.max_jsd == worst
    assert found.strict == strict


@given(rounds(), st.floats(0, 0.6))
def test_the_strict_test_changes_no_token_of_a_block(made, threshold: float):
    """With the same T and no end to the budget, what `fsd` commits begins what `relaxed` does."""
    tokens, _ = drafted(made[0], made[2], made[3])
    texts = []
    for rule in (RelaxedRule.FSD, RelaxedRule.RELAXED):
        found, _ = judge(made, Policy(rule=rule, threshold=threshold), FREE)
        texts.append((*tokens[: found.accepted], found.token))
    assert texts[0] == texts[1][: len(texts[0])]


# -- single rulings


P, Q = of(0.5, 0.3, 0.2), of(0.4, 0.4, 0.2)


def test_the_divergence_of_fsd_can_be_chosen():
    for divergence in Divergence:
        value = compare(P, Q).value(divergence)
        for threshold, fate in ((value * 1.01, Fate.STANDS), (value * 0.99, Fate.FALLS)):
            ruling = fsd(P, Q, 0, threshold=threshold, divergence=divergence, ledger=FREE)
            assert ruling.fate is fate
    assert fsd(P, P, 0, threshold=0.0, ledger=FREE).fate is Fate.STANDS, "published: <= T"


def test_e2sci_takes_the_threshold_of_the_block():
    middle = jsd(P, Q)
    policy = Policy(rule=RelaxedRule.E2SCI, threshold=0.5)
    for factor, fate in ((1.01, Fate.STANDS), (0.99, Fate.FALLS)):
        now = policy.with_threshold(middle * factor)
        assert rule_on(P, Q, 0, policy=now, ledger=FREE).fate is fate
        assert e2sci(P, Q, 0, threshold=middle * factor, ledger=FREE).fate is fate


@pytest.mark.parametrize("q", [of(0.5, 0.5), sketched(of(0.5, 0.5), 2)[0]])
def test_a_draft_that_q_cannot_have_made_is_judged_strictly(q: Distribution | Sketch):
    p = of(0.5, 0.4, 0.1)
    for ruling in (
        fsd(p, q, 2, threshold=LN2, ledger=FREE),
        relaxed(p, q, 2, threshold=LN2, ledger=FREE),
        typical(p, q, 2, ledger=FREE),
    ):
        assert (ruling.fate, ruling.ledger) == (Fate.STRICT, FREE)
    assert relaxed(p, q, 1, threshold=LN2, ledger=FREE).fate is Fate.STANDS
    assert relaxed(p, of(1.0, 0.0, 0.0), 1, threshold=LN2, ledger=FREE).fate is Fate.STRICT


def test_a_budget_just_reached():
    charge = tv_bounds(P, Q).upper
    enough = math.nextafter(charge, 1.0)
    full = relaxed(P, Q, 0, threshold=0.3, ledger=Ledger(budget=enough))
    assert full.fate is Fate.STANDS
    assert full.ledger.spent == enough
    assert full.ledger.max_jsd == jsd_bounds(P, Q).upper
    assert relaxed(P, Q, 0, threshold=0.3, ledger=full.ledger).fate is Fate.STRICT
    assert fsd(P, Q, 0, threshold=0.3, ledger=full.ledger).fate is Fate.STRICT
    assert typical(P, Q, 0, ledger=full.ledger).fate is Fate.STRICT
    assert relaxed(P, Q, 0, threshold=0.3, ledger=Ledger(budget=charge)).fate is Fate.STRICT
    with pytest.raises(ParameterError, match="spent"):
        full.ledger.charged(charge, 0.1)


def test_certain_rows_cost_nothing():
    sure = of(1.0)
    ruling = fsd(sure, sketched(sure, 4)[0], 0, threshold=0.0, ledger=Ledger())
    assert (ruling.fate, ruling.ledger) == (Fate.STANDS, Ledger())


def test_strict_counts_equal_tokens_that_fsd_drops():
    found = verify_relaxed(
        [0],
        [of(1.0, 0.0)],
        lambda i: of(1.0, 1e-30) if i == 0 else of(1.0),
        seed=1,
        position=0,
        policy=Policy(rule=RelaxedRule.TYPICAL, epsilon=1.0, delta=1.0),
        ledger=FREE,
    )
    assert (found.accepted, found.strict, found.token) == (0, 1, 0)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Policy(threshold=-0.1), "threshold"),
        (lambda: Policy(threshold=math.nan), "threshold"),
        (lambda: Policy(threshold=0.7), r"threshold: must be a number in \[0, 0.693147\]"),
        (lambda: Policy(threshold=True), "threshold"),
        (lambda: Policy(threshold="0.1"), "threshold"),
        (lambda: Policy().with_threshold(math.inf), "threshold"),
        (lambda: Policy(rule=RelaxedRule.FSD, divergence=Divergence.TV, threshold=1.1), "thres"),
        (lambda: Policy(divergence=Divergence.TV), "divergence: of relaxed is jsd, got tv"),
        (lambda: Policy(rule="greedy"), "rule: must be one of fsd, e2sci, relaxed, typical; got"),
        (lambda: Policy(divergence="js"), "divergence: must be one of jsd"),
        (lambda: Policy(epsilon=-1.0), "epsilon"),
        (lambda: Policy(delta=math.nan), "delta"),
        (lambda: Ledger(budget=-1.0), "budget"),
        (lambda: Ledger(budget=math.nan), "budget"),
        (lambda: Ledger(budget=0.1, spent=0.2), "budget spent"),
        (lambda: Ledger(budget=0.1, spent=-0.1), "budget spent"),
        (lambda: Ledger(relaxed=-1), "relaxed"),
        (lambda: Ledger(max_jsd=1.0), "max_jsd"),
    ],
)
def test_numbers_that_are_refused(make, why: str):
    with pytest.raises(ParameterError, match=why):
        make()


def test_verdicts_that_cannot_be():
    with pytest.raises(ValueError, match="strict=3"):
        RelaxedVerdict(drafted=4, accepted=1, token=0, strict=3, ledger=FREE)
    with pytest.raises(ValueError, match="accepted=5"):
        RelaxedVerdict(drafted=4, accepted=5, token=0, strict=0, ledger=FREE)
    with pytest.raises(ValueError, match="1 drafts with 0 sketches"):
        verify_relaxed([0], [], lambda _: P, seed=0, position=0, policy=Policy(), ledger=FREE)
