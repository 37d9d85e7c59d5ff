"""Closed forms, published tables and laws of `plan.modes` and `plan.inequalities`."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.control.specstop import expected_tokens
from outrider.core.tokens import Rule
from outrider.plan.facts import Curve, Facts, Prices
from outrider.plan.inequalities import (
    capacity_gain,
    critical_delay_of,
    inequalities,
    pearl_seconds,
    stream_seconds,
    tokens_a_round,
)
from outrider.plan.modes import (
    EDGE_CLOUD,
    ahead,
    ceiling,
    cloud_only,
    colocated,
    edge_only,
    estimates,
    fastest,
    saturation,
    shared,
    sync,
)
from outrider.session.schedules import Schedule

TABLE = {
    # (t_ar, t_d): RTT ceilings of the best synchronous block (docs/papers.md, 0), ms
    (20, 10): (4, 9, 14, 24, 55),
    (30, 10): (16, 31, 46, 76, 166),
    (50, 10): (49, 88, 128, 207, 446),
    (50, 20): (20, 38, 58, 96, 213),
    (100, 10): (146, 257, 368, 592, 1256),
}
ALONE = tuple(s for s in EDGE_CLOUD if s is not Schedule.MULTIPLEX)
"""Schedules of a single answer."""
ALPHAS = (0.7, 0.8, 0.85, 0.9, 0.95)


def facts(*, step=60.0, draft=5.0, alpha=0.8, trip=100.0, **others) -> Facts:
    """Times in ms."""
    return Facts(
        draft=draft / 1e3,
        verify=others.pop("verify", ((1, step / 1e3),)),
        curve=Curve.constant(alpha),
        round_trip=trip / 1e3,
        **others,
    )


@pytest.mark.parametrize("times", TABLE)
def test_the_table_of_round_trips_up_to_which_sync_pays(times):
    step, draft = times
    for alpha, expected in zip(ALPHAS, TABLE[times], strict=True):
        found = ceiling(facts(step=step, draft=draft, alpha=alpha), Schedule.SYNC)
        # The table's blocks end at 40 drafts, which the last cell would go beyond.
        assert 1e3 * found == pytest.approx(expected, abs=0.6, rel=0.005)


def test_a_draft_as_slow_as_its_target_never_pays():
    for alpha in ALPHAS:
        assert ceiling(facts(step=20, draft=20, alpha=alpha), Schedule.SYNC) is None


@pytest.mark.parametrize(
    ("step", "ceilings"),
    [
        (100, (47, 144, 265, 319)),
        (50, (None, 47, 108, 134)),
        (30, (None, 8, 45, 61)),
        (20, (None, None, 13, 24)),
    ],
)
def test_table_iii_of_speculation_at_a_distance(step, ceilings):
    """Blocks of 5 at 10 ms a draft: the right side of the first inequality."""
    for alpha, expected in zip((0.5, 0.7, 0.85, 0.9), ceilings, strict=True):
        block = facts(step=step, draft=10, alpha=alpha, trip=0)
        room = cloud_only(block).seconds / sync(block, 5).seconds
        most = expected_tokens(block.curve.survival(5))[-1] * step - step - 50
        assert (room > 1.0) == (expected is not None)
        if expected is not None:
            assert most == pytest.approx(expected, abs=0.6)
            here, there = (replace(block, round_trip=(most + d) / 1e3) for d in (-0.01, 0.01))
            assert sync(here, 5).seconds < step / 1e3 < sync(there, 5).seconds


def test_one_verifier_serves_twice_the_edges_that_draft_themselves():
    """Prop 9: blocks of 5, 10 ms a draft, 50 ms a forward."""
    assert capacity_gain(facts(step=50, draft=10, cloud_draft=0.010), 5) == pytest.approx(2.0)
    assert capacity_gain(facts(), 5) is None
    both = facts(step=50, draft=10, cloud_draft=0.010)
    gain = sync(both, 5).capacity / colocated(both, 5).capacity
    assert gain == pytest.approx(2.0)


def test_the_pipeline_figure_against_the_best_co_located_block():
    """alpha .95, 10 ms a draft on both sides, 50 ms a forward, R = 60: 16.6 against 17.4 ms."""
    assert 1e3 * stream_seconds(0.95, 5, 0.010, 0.050, 0.060) == pytest.approx(16.6, abs=0.05)
    best = fastest(facts(step=50, draft=10, alpha=0.95, cloud_draft=0.010), Schedule.COLOCATED)
    assert 1e3 * best.seconds == pytest.approx(17.4, abs=0.05)


def test_critical_delay_is_the_published_formula():
    """Thm 5: (c_d + c_v)(1 + a) / (2 a^2) - (c_d + 2 c_v) / 2, c_v a row."""
    rows = tuple((n, 0.0005 * n) for n in (1, 2, 3, 70))
    steep = facts(draft=1.0, alpha=0.7, trip=0, verify=rows)
    assert 1e3 * critical_delay_of(steep) == pytest.approx(1.5 * 1.7 / (2 * 0.49) - (1.0 + 1.0) / 2)


# ------------------------------------------------------------------------------ inequalities


def holds(at: Facts) -> dict[str, bool]:
    return {found.number: found.holds for found in inequalities(at)}


def random_facts(seed: int) -> Facts:
    source = random.Random(seed)
    draft = source.uniform(1, 40)
    return facts(
        step=source.uniform(10, 120),
        draft=draft,
        alpha=source.uniform(0.2, 0.95),
        trip=source.uniform(0, 250),
        cloud_draft=source.choice((draft, draft / 3)) / 1e3,
    )


@pytest.mark.parametrize("seed", range(0, 400, 20))
def test_each_inequality_says_what_the_formulas_say(seed):
    for at in map(random_facts, range(seed, seed + 20)):
        block = fastest(at, Schedule.SYNC)
        k, alpha, trip, step = block.length, at.curve.alpha, at.round_trip, at.step
        said = holds(at)
        g = max(1, math.ceil(step / at.draft))
        one = pearl_seconds(alpha, k, at.draft, step, trip)
        plain_sync = (k * at.draft + trip + step) / tokens_a_round(alpha, k)
        chunks = stream_seconds(alpha, g, at.draft, step, trip)
        sync_g = (g * at.draft + trip + step) / tokens_a_round(alpha, g)
        assert said["1"] == (block.seconds < step)
        assert said["2"] == (fastest(at, Schedule.COLOCATED).seconds < block.seconds)
        assert said["4"] == (one < plain_sync)
        if abs(chunks - sync_g) > 1e-12:  # a^g is nothing beside 1: the same to the last bit
            assert said["5"] == (chunks < sync_g)
        assert said["6"] == (chunks < step)
        if at.cloud_draft == at.draft and not said["3"]:  # Prop 13, contrapositive
            assert one >= colocated(at, k).seconds
        assert said["7"]


def test_prop_1_a_draft_beside_the_target_is_never_slower_than_sync():
    for seed in range(200):
        at = random_facts(seed)
        same = replace(at, cloud_draft=at.draft)
        assert fastest(same, Schedule.COLOCATED).seconds <= fastest(same, Schedule.SYNC).seconds


def test_the_numbers_are_put_in():
    shown = {i.number: i.numbers for i in inequalities(facts(cloud_draft=0.005))}
    assert shown["1"] == "100 < 4.46 x 60 - 60 - 9 x 5 = 162.8"
    assert shown["3"] == "100 < 9 x 5 = 45"
    thin = inequalities(facts(up_bps=1e5))[0]
    assert thin.number == "1"
    assert thin.numbers.startswith("100 < 4.46 x 60 - 60 - 9 x 5 - 7.4")


# ------------------------------------------------------------------------------ laws

WORLDS = st.builds(
    facts,
    step=st.floats(10, 120),
    draft=st.floats(0.5, 60),
    alpha=st.floats(0.05, 0.95),
    trip=st.floats(0, 300),
)


@settings(max_examples=40, deadline=None)
@given(WORLDS, st.floats(0.001, 0.1))
def test_a_longer_link_is_never_faster(at, more):
    longer = replace(at, round_trip=at.round_trip + more)
    for schedule in ALONE:
        before, after = fastest(at, schedule).seconds, fastest(longer, schedule).seconds
        assert after >= before * (1 - 1e-9)


@settings(max_examples=40, deadline=None)
@given(WORLDS, st.floats(1.05, 2.0))
def test_a_slower_target_or_draft_is_never_faster_in_sync(at, factor):
    base = fastest(at, Schedule.SYNC).seconds
    slow_draft = replace(at, draft=at.draft * factor)
    slow_target = replace(at, verify=((1, at.step * factor),))
    assert fastest(slow_draft, Schedule.SYNC).seconds > base
    assert fastest(slow_target, Schedule.SYNC).seconds > base


@settings(max_examples=40, deadline=None)
@given(WORLDS, st.floats(0.01, 0.3))
def test_a_better_draft_is_never_slower(at, share):
    alpha = at.curve.tail + share * (0.95 - at.curve.tail)
    better = replace(at, curve=Curve.constant(max(alpha, at.curve.tail)))
    for schedule in (Schedule.SYNC, Schedule.PEARL, Schedule.STREAM):
        assert fastest(better, schedule).seconds <= fastest(at, schedule).seconds * (1 + 1e-6)


@settings(max_examples=60, deadline=None)
@given(WORLDS, st.sampled_from([0.0, 0.05, 0.5]))
def test_free_run_is_never_slower_than_the_cloud_alone(at, slope):
    steep = replace(at, verify=((1, at.step), (17, at.step * (1 + 16 * slope))))
    # A forward takes the drafts that pay for itself; what they do to the next one is no part of
    # that choice, and costs next to nothing.
    assert fastest(steep, Schedule.FREERUN).seconds <= at.step * 1.001


# ------------------------------------------------------------------------------ the rest


def test_rows_that_cost_make_blocks_short():
    steep = facts(verify=((1, 0.060), (9, 0.300)))
    assert fastest(steep, Schedule.SYNC).length < fastest(facts(), Schedule.SYNC).length


def test_the_plain_step_may_be_another_than_a_forward_of_one_row():
    at = facts(plain=0.050)
    assert cloud_only(at).seconds == 0.050
    assert sync(at, 4).cloud_seconds * expected_tokens(at.curve.survival(4))[-1] == (
        pytest.approx(0.060)
    )


def test_a_thin_downlink_slows_streaming_down():
    assert cloud_only(facts(down_bps=1000.0)).seconds == pytest.approx(8 * 70 / 1000)


def test_the_ratio_rule_sends_q_and_answers_rejections():
    coupled, ratio = (sync(facts(rule=rule), 4) for rule in (Rule.COUPLED, Rule.RATIO))
    assert ratio.up > coupled.up + 4 * 8 * coupled.forwards - 1e-9
    assert ratio.down > coupled.down
    ahead_of = [ahead(facts(rule=rule), Schedule.STREAM, 16) for rule in (Rule.COUPLED, Rule.RATIO)]
    assert ahead_of[1].up > ahead_of[0].up
    assert ahead_of[1].down > ahead_of[0].down
    assert ahead_of[1].seconds == pytest.approx(ahead_of[0].seconds)


def test_no_draft_in_the_cloud_no_co_location():
    assert estimates(facts(), Schedule.COLOCATED) == []
    with pytest.raises(ValueError, match="no draft"):
        colocated(facts(), 4)


def test_the_edge_alone_takes_its_drafts_time():
    assert edge_only(facts()).seconds == 0.005
    assert edge_only(facts()).capacity == math.inf
    assert edge_only(facts()).own_text


def test_sharing_is_bounded_by_the_busiest_engine():
    alone = sync(facts(), 9)
    assert shared(facts(), alone) == alone.seconds
    many = facts(requests=2, edges=50)
    assert shared(many, alone) == pytest.approx(100 * alone.cloud_seconds)
    slow = facts(draft=50, requests=40)
    block = sync(slow, 2)
    assert shared(slow, block) == pytest.approx(40 * block.edge_seconds)


def test_how_many_answers_fill_an_edge():
    """(k t_d + R + t_v) / max(k t_d, t_v)."""
    assert saturation(facts(), sync(facts(), 9)) == pytest.approx((45 + 100 + 60) / 60)
    assert saturation(facts(), sync(facts(), 20)) == pytest.approx((100 + 100 + 60) / 100)


def test_multiplex_is_sync_by_turns():
    assert estimates(facts(), Schedule.MULTIPLEX) == []
    both = facts(requests=4)
    found = {e.length: e for e in estimates(both, Schedule.MULTIPLEX)}
    assert found[8].seconds == pytest.approx(sync(both, 8).seconds, rel=1e-3)
    assert found[8].forwards == pytest.approx(sync(both, 8).forwards, rel=1e-3)


def test_free_run_fades_and_never_turns():
    late = ceiling(facts(), Schedule.FREERUN)
    assert late > ceiling(facts(), Schedule.SYNC)
    at = facts(trip=1e3 * late)
    assert fastest(at, Schedule.FREERUN).seconds == pytest.approx(0.99 * at.step, rel=2e-3)


def test_a_ceiling_may_lie_beyond_every_link():
    assert ceiling(facts(step=50_000, draft=1), Schedule.SYNC) == math.inf


def test_prices_that_nobody_gave():
    assert not Prices().money
    assert not Prices().power
    assert Prices(megabyte=1.0).money
    assert Prices(edge_watts=5.0).power
