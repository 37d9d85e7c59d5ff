"""The two curves and the decision between them, with literal numbers."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.control.costs import (
    FORGET,
    PRIOR_WEIGHT,
    PrefixCurve,
    RowCosts,
    SharedCosts,
    share_rows,
)


def worth_judging(pending: int, curve: PrefixCurve, costs: RowCosts) -> int:
    """Of one session that has a forward to itself."""
    (count,) = share_rows([curve.survival(pending)], costs)
    return count


def test_nothing_known():
    costs = RowCosts()
    assert not costs
    assert costs.seconds(7) == 1.0
    assert PrefixCurve().survival(2) == pytest.approx([0.6, 0.36])
    assert worth_judging(5, PrefixCurve(), costs) == 5, "rows are taken for free until measured"
    assert worth_judging(0, PrefixCurve(), costs) == 0


@pytest.mark.parametrize("prior", [0.0, 1.0, -1.0, 2.0, math.nan])
def test_priors_are_probabilities(prior: float):
    with pytest.raises(ValueError, match="prior"):
        PrefixCurve(prior=prior)


def test_row_costs_interpolate_and_go_on():
    costs = RowCosts([(1, 0.010), (5, 0.018)])
    assert costs
    assert costs.seconds(1) == 0.010
    assert costs.seconds(3) == pytest.approx(0.014)
    assert costs.seconds(9) == pytest.approx(0.026)
    assert RowCosts([(4, 0.02)]).seconds(1) == 0.02
    assert RowCosts([(4, 0.02)]).seconds(40) == pytest.approx(0.02)


def test_row_costs_never_fall():
    costs = RowCosts([(1, 0.03), (4, 0.01), (8, 0.05)])
    assert costs.curve() == [(1, 0.03), (4, 0.03), (8, 0.05)]


def test_row_costs_follow_the_machine():
    costs = RowCosts([(1, 0.01)])
    for _ in range(400):
        costs.observe(1, 0.03)
    assert costs.seconds(1) == pytest.approx(0.03, rel=0.01)
    assert costs.seconds(1) == pytest.approx(0.03 - 0.02 * FORGET**400)


@pytest.mark.parametrize(
    ("rows", "seconds"), [(0, 1.0), (-1, 1.0), (1, 0.0), (1, -1.0), (1, math.nan)]
)
def test_nonsense_is_not_learnt(rows: int, seconds: float):
    costs = RowCosts()
    costs.observe(rows, seconds)
    assert not costs


def test_prefix_curve_learns_by_index():
    curve = PrefixCurve(prior=0.5)
    for _ in range(2000):
        curve.observe(
            drafted=3, accepted=1
        )  # the first stands, the second falls, the third: unseen
    full = 1 / (1 - FORGET)
    mean = (full + 0.5 * PRIOR_WEIGHT) / (2 * full + PRIOR_WEIGHT)
    assert curve.acceptance(0) == pytest.approx(
        (full + mean * PRIOR_WEIGHT) / (full + PRIOR_WEIGHT)
    )
    assert curve.acceptance(1) == pytest.approx(mean * PRIOR_WEIGHT / (full + PRIOR_WEIGHT))
    assert curve.acceptance(2) == pytest.approx(mean)


def test_prefix_curve_forgets():
    curve = PrefixCurve()
    for _ in range(300):
        curve.observe(drafted=1, accepted=1)
    high = curve.acceptance(0)
    for _ in range(300):
        curve.observe(drafted=1, accepted=0)
    assert curve.acceptance(0) < 0.1 < 0.9 < high


def test_a_block_without_drafts_teaches_nothing():
    curve = PrefixCurve()
    curve.observe(drafted=0, accepted=0)
    assert curve.acceptance(0) == 0.6


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=60),
    st.integers(0, 12),
    st.lists(st.tuples(st.integers(1, 20), st.floats(1e-6, 10.0)), max_size=20),
)
def test_curves_are_curves_whatever_is_observed(blocks, pending, forwards):  # type: ignore[no-untyped-def]
    curve, costs = PrefixCurve(), RowCosts()
    for drafted, accepted in blocks:
        curve.observe(drafted=drafted, accepted=min(drafted, accepted))
    for rows, seconds in forwards:
        costs.observe(rows, seconds)
    alive = curve.survival(pending)
    assert all(0.0 < s < 1.0 for s in alive)
    assert all(b <= a for a, b in itertools.pairwise(alive))
    times = [costs.seconds(r) for r in range(1, 25)]
    assert all(0.0 < a <= b + 1e-12 for a, b in itertools.pairwise(times))
    assert 0 <= worth_judging(pending, curve, costs) <= pending


@pytest.mark.parametrize(
    ("acceptance", "slope", "best"),
    [
        (0.9, 0.0, 8),  # rows are free: judge everything
        (0.5, 0.0, 8),
        (0.3, 0.7, 0),  # a row costs 0.7 of a step and brings 0.3 tokens
        (0.8, 0.7, 1),  # 1.8/1.7 beats 2.44/2.4 and 1/1
        (0.95, 0.1, 8),
        (0.6, 0.2, 2),  # 1/1, 1.6/1.2, 1.96/1.4, 2.176/1.6
    ],
)
def test_how_many_drafts_pay(acceptance: float, slope: float, best: int):
    """The m that maximises (1 + S(1) + ... + S(m)) / t_v(m+1), by hand."""

    class Known(PrefixCurve):
        def acceptance(self, index: int) -> float:
            return acceptance

    costs = RowCosts([(r, 0.03 * (1 + slope * (r - 1))) for r in range(1, 10)])
    assert worth_judging(8, Known(), costs) == best


def test_one_slow_forward_of_a_new_row_count_does_not_make_many_rows_look_free():
    costs = RowCosts([(1, 0.069), (2, 0.072), (4, 0.075), (8, 0.076), (16, 0.147)])
    costs.observe(3, 0.140)  # a block cut at a bucket border took two passes
    assert costs.seconds(3) < 0.1
    for _ in range(12):
        costs.observe(3, 0.074)
    assert costs.seconds(3) < 0.082
    assert costs.seconds(16) / costs.seconds(8) > 1.7


def test_what_pays_alone_may_not_pay_for_all():
    """Eight rows a pass: alone, four likely drafts ride free; of eight sessions each has its row
    already, and a second pass for what may fall would slow all of them down."""
    costs = RowCosts([(1, 1.0), (8, 1.0), (9, 2.0), (16, 2.0), (17, 3.0), (24, 3.0), (25, 4.0)])
    alive = [0.5, 0.25, 0.125, 0.06]
    assert share_rows([alive], costs) == [4]
    assert share_rows([alive] * 2, costs) == [3, 3]
    assert share_rows([alive] * 8, costs) == [0] * 8
    # Sure drafts are worth the second pass: 8 + 8 tokens in 2 beat 8 in 1 only if all stand.
    assert share_rows([[0.99]] * 8, costs) == [0] * 8
    assert share_rows([[0.99, 0.98, 0.97]] * 4, costs) == [1] * 4, "7.96 in 1 beat 15.76 in 2"
    cheap = RowCosts([(1, 1.0), (8, 1.0), (9, 1.3), (16, 1.3), (17, 9.0)])
    assert share_rows([[0.9, 0.8, 0.7]] * 4, cheap) == [3] * 4, "a decline is not the end"
    assert share_rows([[0.9, 0.8], [0.2, 0.1]], costs, rows=4, tokens=4.0) == [2, 0]
    assert share_rows([], costs) == []


@given(
    st.lists(st.lists(st.floats(0.01, 1.0), max_size=4), max_size=3),
    st.integers(0, 6),
    st.lists(st.tuples(st.integers(1, 24), st.floats(1e-3, 5.0)), min_size=1, max_size=8),
)
def test_shares_are_the_best_of_all_shares(chances, rows, points):  # type: ignore[no-untyped-def]
    """Against every other way to share: none brings more tokens a second."""
    survivals = [list(itertools.accumulate(c, lambda a, b: a * b)) for c in chances]
    costs = RowCosts(points)

    def rate(counts):  # type: ignore[no-untyped-def]
        base = rows + len(survivals)
        if not base:
            return 0.0
        gained = sum(sum(s[:n]) for s, n in zip(survivals, counts, strict=True))
        return (base + gained) / costs.seconds(base + sum(counts))

    taken = share_rows(survivals, costs, rows=rows, tokens=float(rows))
    best = max(rate(c) for c in itertools.product(*(range(len(s) + 1) for s in survivals)))
    assert rate(taken) >= best * (1 - 1e-9)


def test_rows_of_several_sessions_cost_what_they_cost_together():
    base = RowCosts([(1, 1.0), (8, 1.0), (9, 2.0), (16, 2.0)])
    shared = SharedCosts()
    assert shared.of(1, base) is base
    assert shared.of(8, base).seconds(12) == 2.0, "not measured: tried"
    for _ in range(60):
        shared.observe(8, 8, 1.6, base)
        shared.observe(12, 8, 5.0, base)
    together = shared.of(8, base)
    assert together.seconds(8) == pytest.approx(1.6)
    assert together.seconds(12) == pytest.approx(5.0, rel=0.05)
    assert shared.of(2, base).seconds(8) == 1.0, "two sessions are another octave"
    assert share_rows([[0.4]] * 8, together) == [0] * 8
    for _ in range(600):  # not used any more: what one bad hour taught is forgotten
        shared.observe(8, 8, 1.6, base)
    assert together.seconds(12) == pytest.approx(2.0 * 1.6, rel=0.1)


def test_nonsense_teaches_nothing_about_sharing():
    base = RowCosts([(1, 1.0)])
    shared = SharedCosts()
    for rows, sessions, seconds in ((4, 1, 9.0), (1, 2, 9.0), (4, 2, 0.0), (4, 2, float("nan"))):
        shared.observe(rows, sessions, seconds, base)
    assert shared.of(2, base).seconds(4) == 1.0
