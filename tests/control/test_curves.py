"""A prefix curve whose indices lean on the one before, with literal numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.control.costs import FORGET, PrefixCurve
from outrider.control.curves import ChainedCurve


def test_nothing_known():
    assert ChainedCurve().survival(3) == pytest.approx([0.6, 0.36, 0.216])
    assert ChainedCurve(prior=0.9).acceptance(7) == 0.9


def test_each_index_leans_on_the_one_before():
    curve = ChainedCurve()
    curve.observe(drafted=3, accepted=2)
    first = (1.0 + 0.6 * 4) / 5.0
    second = (1.0 + first * 4) / 5.0
    third = (0.0 + second * 4) / 5.0
    assert [curve.acceptance(i) for i in range(5)] == pytest.approx(
        [first, second, third, third, third]
    )
    assert curve.survival(2) == pytest.approx([first, first * second])


def test_a_heavy_head_does_not_spoil_the_tail():
    """The first draft stands at .4, those behind it at .75 to .8: an index never judged is
    taken for that and not for the mean, which the first one dominates."""
    chained, plain = ChainedCurve(), PrefixCurve()
    for i in range(200):
        accepted = 0 if i % 5 < 3 else (3, 3, 3, 1, 2)[(i // 5) % 5]
        for curve in (chained, plain):
            curve.observe(drafted=3, accepted=accepted)
    assert chained.acceptance(0) == pytest.approx(0.4, abs=0.05)
    assert chained.acceptance(1) == pytest.approx(0.8, abs=0.08)
    assert chained.acceptance(9) > 0.7 > 0.65 > plain.acceptance(9)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=60), st.integers(0, 20))
def test_a_curve_falls_within_zero_and_one(rounds, count):
    curve = ChainedCurve()
    for drafted, accepted in rounds:
        curve.observe(drafted=drafted, accepted=min(drafted, accepted))
    alive = curve.survival(count)
    assert len(alive) == count
    assert all(0.0 < b <= a < 1.0 for a, b in zip([0.999999, *alive], alive, strict=False))


def test_it_forgets_as_the_plain_curve():
    curve = ChainedCurve()
    for _ in range(300):
        curve.observe(drafted=1, accepted=1)
    for _ in range(60):
        curve.observe(drafted=1, accepted=0)
    assert curve.acceptance(0) == pytest.approx(FORGET**60, abs=0.05)
