"""Divergences by hand, and bounds held against 60-digit arithmetic."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outrider.core import rng
from outrider.core.divergence import (
    LN2,
    Divergence,
    compare,
    fsd_js,
    jsd,
    jsd_bounds,
    kl,
    probabilities,
    tv,
    tv_bounds,
)
from outrider.core.sampling import Distribution
from outrider.core.sparse import sketched


def distribution(ids, weights) -> Distribution:
    at = np.array(ids, dtype=np.int64)
    return Distribution(at, np.array(weights, dtype=np.float32), rng.token_offsets(at))


def of(p: dict[int, float]) -> Distribution:
    with np.errstate(divide="ignore"):
        return distribution(sorted(p), np.log([p[i] for i in sorted(p)]))


@st.composite
def distributions(draw, low: float = -40.0, high: float = 40.0) -> Distribution:
    ids = draw(st.lists(st.integers(0, 11), min_size=1, max_size=8, unique=True))
    values = st.floats(low, high, width=32)
    return distribution(sorted(ids), draw(st.lists(values, min_size=len(ids), max_size=len(ids))))


def law(d: Distribution) -> dict[int, Decimal]:
    """The softmax of the float32 weights, to 60 digits."""
    weights = [Decimal(float(w)) - Decimal(float(d.top)) for w in d.weights]
    total = sum(w.exp() for w in weights)
    return {int(i): w.exp() / total for i, w in zip(d.ids, weights, strict=True)}


def true_jsd(p: Distribution, q: Distribution) -> Decimal:
    with localcontext() as context:
        context.prec = 60
        a, b = law(p), law(q)
        found = Decimal(0)
        for i in a.keys() | b.keys():
            x, y = a.get(i, Decimal(0)), b.get(i, Decimal(0))
            found += sum(z * (2 * z / (x + y)).ln() / 2 for z in (x, y) if z)
        return found


def true_tv(p: Distribution, q: Distribution) -> Decimal:
    with localcontext() as context:
        context.prec = 60
        a, b = law(p), law(q)
        return sum(abs(a.get(i, Decimal(0)) - b.get(i, Decimal(0))) for i in a.keys() | b) / 2


P, Q = of({0: 0.5, 1: 0.5}), of({0: 0.25, 1: 0.75})


def test_by_hand():
    assert tv(P, Q) == pytest.approx(0.25, rel=1e-7)
    assert kl(P, Q) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), rel=1e-6)
    assert kl(Q, P) == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5), rel=1e-6)
    m = (0.375, 0.625)
    to_m = [x * math.log(x / y) for x, y in zip((0.5, 0.5, 0.25, 0.75), m * 2, strict=True)]
    assert jsd(P, Q) == pytest.approx(sum(to_m) / 2, rel=1e-6)
    from_m = [y * math.log(y / x) for x, y in zip((0.5, 0.5, 0.25, 0.75), m * 2, strict=True)]
    assert fsd_js(P, Q) == pytest.approx(sum(from_m) / 2, rel=1e-6)
    assert fsd_js(P, Q) != pytest.approx(jsd(P, Q), rel=1e-3)


def test_equal_rows():
    for divergence in (jsd, tv, kl, fsd_js):
        assert divergence(P, of({0: 0.5, 1: 0.5})) == 0.0


def test_disjoint_rows():
    other = of({5: 0.3, 6: 0.7})
    assert jsd(P, other) == LN2
    assert tv(P, other) == 1.0
    assert kl(P, other) == math.inf
    assert fsd_js(P, other) == math.inf


def test_a_filter_on_one_side():
    cut = of({0: 1.0})
    assert kl(P, cut) == math.inf
    assert kl(cut, P) == pytest.approx(LN2)
    assert fsd_js(P, cut) == fsd_js(cut, P) == math.inf
    assert tv(P, cut) == tv(cut, P) == 0.5
    banned = of({0: 1.0, 1: 0.0})
    assert kl(P, banned) == fsd_js(P, banned) == math.inf
    assert tv(banned, cut) == jsd(banned, cut) == 0.0


def test_bounds_by_hand():
    """p = .5 .3 .2 and q = .5 .2 + .3 somewhere: with p's .2, or beside it."""
    p = of({0: 0.5, 1: 0.3, 2: 0.2})
    sketch, _ = sketched(of({0: 0.5, 1: 0.2, 4: 0.3}), 1)
    found = tv_bounds(p, sketch)
    assert found.lower == pytest.approx(0.0, abs=3e-4)
    assert found.upper == pytest.approx(0.5, abs=3e-4)
    found = jsd_bounds(p, sketch)
    assert found.lower == pytest.approx(0.0, abs=1e-6)
    assert found.upper == pytest.approx(0.5 * LN2, abs=3e-4)
    with pytest.raises(ValueError, match="tail"):
        compare(p, sketch).value(Divergence.JSD)


def test_published_forms_of_a_sketch_are_infinite_where_they_may_be():
    p, q = of({0: 0.5, 1: 0.3, 2: 0.2}), of({0: 0.5, 1: 0.2, 2: 0.3})
    sketch, drawn = sketched(q, 2)
    open_, whole, closed = compare(p, sketch), compare(p, drawn), compare(p, sketched(q, 3)[0])
    for form in (Divergence.KL, Divergence.FSD_JS):
        assert open_.bounds(form).upper == math.inf
        assert closed.value(form) == pytest.approx(compare(p, q).value(form), abs=3e-3)
        assert 0.0 < open_.bounds(form).lower <= whole.value(form)
    assert compare(of({0: 1.0}), sketched(q, 2)[0]).bounds(Divergence.KL).upper < 1.0


@given(distributions(), distributions(), st.integers(1, 8))
@example(of({0: 1.0}), of({0: 1.0}), 1)
@example(of({0: 1.0}), of({1: 1.0}), 1)
@example(of({0: 0.5, 1: 0.5}), of({0: 0.5, 1: 0.5}), 1)
def test_the_truth_is_inside(p: Distribution, q: Distribution, k: int):
    sketch, drawn = sketched(q, k)
    for bounds, exact, most in (
        (jsd_bounds, true_jsd(p, drawn), LN2),
        (tv_bounds, true_tv(p, drawn), 1.0),
    ):
        for known in (sketch, drawn):
            found = bounds(p, known)
            assert 0.0 <= found.lower <= found.upper <= most
            assert Decimal(found.lower) <= exact + Decimal("1e-50")
            assert exact <= Decimal(found.upper) + Decimal("1e-16")  # ln 2 itself is rounded
        if not sketch.rest:
            found = bounds(p, sketch)
            assert found.upper - found.lower <= 2.1e-12


@given(distributions(-1e6, 1e6), distributions(-1e6, 1e6))
def test_values_are_right_at_any_temperature(p: Distribution, q: Distribution):
    assert jsd(p, q) == pytest.approx(float(true_jsd(p, q)), abs=1e-14)
    assert tv(p, q) == pytest.approx(float(true_tv(p, q)), abs=1e-14)
    assert jsd(p, q) == pytest.approx(jsd(q, p), abs=1e-15)


def test_one_id_is_compared_without_rounding():
    p = distribution([4], [2.0])
    same, other = (
        sketched(distribution([4], [-1.0]), 4)[0],
        sketched(distribution([5], [0.0]), 4)[0],
    )
    assert jsd_bounds(p, same).upper == tv_bounds(p, same).upper == 0.0
    assert jsd_bounds(p, other).lower == LN2
    assert tv_bounds(p, other).lower == 1.0


@given(distributions(), distributions())
def test_the_usual_inequalities(p: Distribution, q: Distribution):
    distance, js = tv(p, q), jsd(p, q)
    assert distance**2 / 2 - 1e-12 <= js <= distance * LN2 + 1e-12
    assert kl(p, q) >= 2 * distance**2 - 1e-12  # Pinsker


def test_probabilities_of_a_wide_row():
    row = np.random.default_rng(0).normal(0, 4, 50_000)
    p = probabilities(distribution(np.arange(50_000), row))
    assert math.fsum(p) == pytest.approx(1.0, abs=1e-14)
