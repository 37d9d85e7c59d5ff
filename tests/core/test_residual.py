"""Truncated residuals: what a list certifies, what it costs, and when a longer one is asked for."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laws import ALARM, fit
from outrider.core import residual, rng, verify
from outrider.core.ledger import TvLedger
from outrider.core.residual import Listed, Listing, TopKReply, listed, listing, next_end
from outrider.core.sampling import Distribution
from outrider.core.tokens import ParameterError, Rule
from outrider.core.verify import ResidualStep

WIDTH = 12


def dist(weights: list[float] | np.ndarray) -> Distribution:
    ids = np.arange(len(weights), dtype=np.int64)
    return Distribution(ids, np.array(weights, dtype=np.float32), rng.token_offsets(ids))


def shares(*p: float) -> Distribution:
    return dist([math.log(x) if x else -math.inf for x in p])


def known(p: Distribution, k: int) -> Listed:
    return listed(listing(p, 0, k))


def missed(p: Distribution, q: Distribution, k: int) -> float:
    """TV of the residual cut off at the k likeliest ids of p and the whole one, by definition."""
    left = np.maximum(p.dense(WIDTH) - q.dense(WIDTH), 0.0)
    inside = np.zeros(WIDTH)
    ids = known(p, k).p.ids
    inside[ids] = left[ids]
    return float(np.abs(inside / inside.sum() - left / left.sum()).sum() / 2)


weights = st.lists(st.floats(-9.0, 3.0), min_size=WIDTH, max_size=WIDTH)


@given(weights, weights, st.integers(1, WIDTH))
def test_the_certificate_is_true(a: list[float], b: list[float], k: int):
    p, q = dist(a), dist(b)
    bound = known(p, k).bound(q)
    if bound is None:
        assert known(p, k).mass(q) < 1e-11
    elif known(p, k).mass(q) > 1e-9:
        assert missed(p, q, k) <= bound <= 1.0
        assert (bound == 0.0) is (k == WIDTH)


def test_the_certificate_is_met_where_the_draft_knows_nothing_of_the_rest():
    """It cannot be better: with q = 0 outside the list, exactly t / (m + t) is missed."""
    p, q = shares(0.5, 0.2, 0.2, 0.1), shares(0.1, 0.9)
    assert known(p, 2).bound(q) == pytest.approx(0.3 / (0.4 + 0.3))
    assert known(p, 3).bound(q) == pytest.approx(0.1 / (0.6 + 0.1))
    # Nothing of (p - q)+ inside the list: nothing is certain.
    assert known(shares(0.5, 0.2, 0.2, 0.1), 1).bound(shares(0.6, 0.4)) is None


@pytest.mark.parametrize(
    ("p", "k"),
    [
        (shares(0.5, 0.5, 0.0, 0.0), 2),
        (dist([0.0, 1.0, -900.0, -math.inf]), 2),  # exp(-900) is 0 in float64
        (shares(1.0), 1),
        (shares(0.25, 0.25, 0.25, 0.25), 4),
        (shares(0.25, 0.25, 0.25, 0.25), 99),
    ],
)
def test_a_list_of_all_that_is_possible_is_exact(p: Distribution, k: int):
    q = shares(0.125, 0.125, 0.75)
    whole = known(p, k)
    assert whole.rest == whole.bound(q) == 0.0
    for position in range(40):
        drawn = verify.residual_draw(whole.p, q, seed=1, position=position)
        assert drawn == verify.residual_draw(p, q, seed=1, position=position)


@given(weights, st.integers(1, 4))
def test_lists_grow_by_further_ids_alone(a: list[float], k: int):
    """Rank order, no id twice, and the parts together are the longer list to the bit."""
    p = dist([round(x) for x in a])  # ties: the lower id comes first
    order = sorted(range(WIDTH), key=lambda i: (-p.weights[i], i))
    first, more = listing(p, 0, k), listing(p, k, next_end(k))
    assert sorted(order[:k]) == first.ids.tolist()
    assert sorted(order[k : 4 * k]) == more.ids.tolist()
    together, once = listed(more, listed(first)), known(p, next_end(k))
    assert together.p.ids.tolist() == once.p.ids.tolist()
    assert together.rest == once.rest
    assert (together.p.probabilities() == p.probabilities()[once.p.ids]).all()


def test_the_cut_off_draw_is_the_whole_one_unless_that_falls_outside():
    """The noise is shared: with probability 1 - z/Z the same token."""
    p = shares(0.3, 0.2, 0.15, 0.12, 0.1, 0.08, 0.05)
    q = shares(0.1, 0.3, 0.1, 0.3, 0.05, 0.05, 0.1)
    cut = known(p, 4)
    other = 0
    for position in range(2000):
        exact = verify.residual_draw(p, q, seed=5, position=position)
        drawn = verify.residual_draw(cut.p, q, seed=5, position=position)
        assert drawn == exact or exact not in cut.p.ids
        other += drawn != exact
    assert 0 < other / 2000 < missed(p, q, 4) + 4 * math.sqrt(0.25 / 2000)


# ------------------------------------------------------------------------------- the ledger


def test_the_ledger_counts_what_is_charged_and_never_overdraws():
    ledger = TvLedger(budget=0.3)
    assert ledger.charged(0.0) is ledger, "an exact draw is no event"
    ledger = ledger.charged(0.1).charged(0.1)
    assert ledger.events == 2
    assert 0.2 < ledger.spent < 0.2 + 1e-12
    assert not ledger.fits(0.1), "0.1 three times is more than 0.3 in float64"
    assert ledger.fits(0.0999)
    with pytest.raises(ParameterError):
        ledger.charged(0.2)
    assert TvLedger(budget=math.inf).charged(1.0).left == math.inf


@given(st.floats(0.0, 2.0), st.lists(st.floats(0.0, 1.0), max_size=30))
def test_charges_that_fit_never_sum_above_the_budget(budget: float, charges: list[float]):
    ledger, exact = TvLedger(budget=budget), []
    for charge in charges:
        if ledger.fits(charge):
            ledger = ledger.charged(charge)
            exact.append(charge)
    assert math.fsum(exact) <= ledger.spent <= budget
    assert ledger.events == sum(c > 0.0 for c in exact)


@pytest.mark.parametrize(
    "wrong",
    [
        {"k": -1},
        {"k": residual.MAX_TOP_K + 1},
        {"k": True},
        {"k": 4, "budget": -0.1},
        {"k": 4, "budget": math.nan},
        {"budget": 0.1},
    ],
)
def test_wishes_out_of_range_are_refused(wrong: dict[str, float]):
    with pytest.raises(ParameterError):
        TopKReply(**wrong)  # type: ignore[arg-type]
    for rule in Rule:
        if rule is not Rule.RATIO:
            with pytest.raises(ParameterError, match="ratio"):
                residual.require_ratio(rule, TopKReply(k=1))


# ------------------------------------------------------------------------------- what to ask next


def test_a_longer_list_is_asked_for_only_where_it_may_pay():
    p = dist([0.0] * 400)  # each 1/400
    q = dist([0.0] * 399 + [0.05])  # nearly alike: proposals fail
    sixteen = known(p, 16)
    # 48 further ids hold .12 at most: of a rest of .96 no certificate below .8 can come of them.
    assert sixteen.after(q, TvLedger(budget=0.01)) is ResidualStep.FIRST_PROPOSALS
    assert sixteen.after(q, TvLedger(budget=1.0)) is ResidualStep.LARGER_K
    spent = TvLedger(budget=1.0).charged(0.999999)
    assert sixteen.after(q, spent) is ResidualStep.FIRST_PROPOSALS
    assert sixteen.after(q, TvLedger()) is ResidualStep.FIRST_PROPOSALS


def test_proposals_that_hardly_fail_come_before_a_longer_list():
    p, q = shares(0.4, 0.3, 0.2, 0.1), shares(0.1, 0.0, 0.0, 0.9)
    assert known(p, 1).after(q, TvLedger(budget=0.1)) is ResidualStep.FIRST_PROPOSALS  # Z >= .3
    near = shares(0.39, 0.3, 0.2, 0.11)
    assert known(p, 1).after(near, TvLedger(budget=0.1)) is ResidualStep.LARGER_K  # Z >= .01


def test_the_longest_list_is_not_asked_to_grow():
    p = dist([0.0] * 3000)
    longest = known(p, residual.MAX_TOP_K)
    q = dist([0.0] * 2999 + [0.05])
    assert longest.after(q, TvLedger(budget=9.0)) is ResidualStep.FIRST_PROPOSALS
    assert [next_end(k) for k in (1, 16, 256, 300, 1024)] == [4, 64, 1024, 1024, 1024]


# ------------------------------------------------------------------------------- what is no list


def part(**changes: object) -> Listing:
    values: dict[str, object] = {
        "ids": np.array([1, 4], dtype=np.int64),
        "weights": np.log([0.5, 0.25]).astype(np.float32),
        "log_total": 0.0,
        "rest": 0.25,
        **changes,
    }
    return Listing(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"ids": np.array([4, 1])},
        {"ids": np.array([1, 1])},
        {"ids": np.array([-1, 1])},
        {"ids": np.array([], dtype=np.int64), "weights": np.array([], dtype=np.float32)},
        {"weights": np.array([math.nan, -1.0], dtype=np.float32)},
        {"weights": np.array([math.inf, -1.0], dtype=np.float32)},
        {"weights": np.array([0.0, -math.inf], dtype=np.float32), "rest": 0.0},
        {"weights": np.array([3e38, -1.0], dtype=np.float32)},
        {"log_total": math.nan},
        {"log_total": math.inf},
        {"log_total": -1e308},
        {"log_total": 0.1},
        {"rest": -0.25},
        {"rest": 0.3},
        {"rest": math.nan},
        {"rest": 1.5},
    ],
    ids=str,
)
def test_what_is_no_part_of_a_distribution_is_refused(changes: dict[str, object]):
    assert listed(part()).rest == 0.25
    with pytest.raises(residual.ListError):
        listed(part(**changes))


@pytest.mark.parametrize(
    "changes",
    [{"ids": np.array([4, 5])}, {"log_total": 1e-9}, {}],
    ids=["an id twice", "another total", "the same again"],
)
def test_a_list_goes_on_with_further_ids_of_the_same_row(changes: dict[str, object]):
    more = {"ids": np.array([2, 5]), "weights": np.log([0.125, 0.125]).astype(np.float32)}
    assert len(listed(part(**more, rest=0.0), listed(part()))) == 4
    more = {**more, **changes} if changes else {}
    with pytest.raises(residual.ListError):
        listed(part(**more, rest=0.0), listed(part()))


# ------------------------------------------------------------------------------- many draws at once


def test_draws_in_one_pass_have_the_law():
    """Error rate of the test: 1 in 1000 for a right law; the seed is fixed."""
    p = shares(0.0, 0.4, 0.3, 0.0, 0.2, 0.1, 0.0)
    keys = [rng.key(3, rng.Purpose.PROPOSAL, 7, i) for i in range(20_000)]
    counts = np.bincount(p.draws(keys), minlength=7)
    assert fit(counts, [0.0, 0.4, 0.3, 0.0, 0.2, 0.1, 0.0]) > ALARM
    assert p.draws(keys[:3]) == p.draws(keys)[:3], "each by its own key"


@pytest.mark.parametrize("u", [2.0**-53, 1.0 - 2.0**-53])
def test_the_ends_of_the_interval_draw_what_is_possible(monkeypatch: pytest.MonkeyPatch, u: float):
    monkeypatch.setattr(rng, "token_uniform", lambda key, token: u)
    thirds = dist([-math.inf, 0.0, 0.1, 0.2, -math.inf])
    (token,) = thirds.draws([1])
    assert token == (1 if u < 0.5 else 3)


def test_a_running_sum_must_exceed_the_uniform(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rng, "token_uniform", lambda key, token: 0.5)
    assert dist([0.0, 0.0]).draws([1]) == (1,)
