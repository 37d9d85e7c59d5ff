"""Naive UCB and EXP3: literal histories, the arithmetic done by hand."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from outrider.control.bandits import Exp3, NaiveUcb
from outrider.control.base import ControllerFacts, Decision, Estimates, Observation, Outcome
from outrider.control.costs import PrefixCurve, RowCosts
from outrider.control.registry import make
from outrider.core.tokens import ParameterError

LEARNERS = ("naive-ucb", "exp3", "ucb-specstop", "contextual", "ucb-scaled")


def asked(room: int = 16, state: int = 0) -> Observation:
    believed = Estimates(
        round_trip=0.1, draft=0.01, verify=RowCosts(), curve=PrefixCurve(), delay_state=state
    )
    return Observation(now=0.0, room=room, estimates=believed)


def came(
    length: int, tokens: int, seconds: float, *, drafted: int | None = None, state: int = 0
) -> Outcome:
    return Outcome(
        decision=Decision(length=length),
        drafted=length if drafted is None else drafted,
        accepted=tokens - 1,
        strict=tokens - 1,
        tokens=tokens,
        seconds=seconds,
        delay_state=state,
    )


def made(name: str, arms: int = 3, seed: int = 0, **options: float):
    return make(name, ControllerFacts(max_length=arms, seed=seed, options=options))


@pytest.mark.parametrize("name", ["naive-ucb", "ucb-specstop", "contextual"])
def test_every_arm_once_before_any_twice(name: str):
    controller = made(name, arms=4)
    order = []
    for _ in range(4):
        k = controller.decide(asked()).length
        order.append(k)
        controller.observe(came(k, 1, 0.1), 0.0)
    assert order == [1, 2, 3, 4]


def test_naive_ucb_by_hand():
    """ms a token: arm 1 (100 + 50)/2 = 75, arm 2 76, arm 3 90; t = 4.

    Bonus: arm 1 sqrt(ln 4 / 2) = .83, arms 2 and 3 sqrt(ln 4) = 1.18 times beta.
    """
    history = [came(1, 1, 0.1), came(1, 2, 0.1), came(2, 2, 0.152), came(3, 1, 0.09)]
    for beta, choice in [(0.0, 1), (1.0, 1), (2.0, 1), (3.0, 2), (100.0, 2)]:
        controller = made("naive-ucb", beta=beta)
        for outcome in history:
            controller.observe(outcome, 0.0)
        assert controller.decide(asked()).length == choice, beta


def test_the_mean_of_ratios_is_not_the_ratio_of_means():
    """Arm 1: 80 ms for 1 token, twice. Arm 2: 150 ms for 1 token, and for 3.

    The ratio of sums prefers arm 2 (300/4 = 75 < 80), the mean of ratios arm 1 (80 < 100).
    """
    history = [came(1, 1, 0.08)] * 2 + [came(2, 1, 0.15), came(2, 3, 0.15)]
    naive, sums = made("naive-ucb", arms=2), made("ucb-specstop", arms=2)
    for outcome in history:
        naive.observe(outcome, 0.0)
        sums.observe(outcome, 0.0)
    assert naive.decide(asked()).length == 1
    assert sums.decide(asked()).length == 2


@pytest.mark.parametrize("name", LEARNERS)
def test_no_more_than_there_is_room_for(name: str):
    controller = made(name, arms=8)
    for room in (8, 3, 2, 1) * 8:
        k = controller.decide(asked(room)).length
        assert 1 <= k <= room
        controller.observe(came(k, 1, 0.1 + 0.01 * k), 0.0)
    assert controller.decide(asked(0)).length == 0


@pytest.mark.parametrize("name", LEARNERS)
def test_asking_twice_is_harmless(name: str):
    once, often = made(name, arms=6, seed=5), made(name, arms=6, seed=5)
    for i in range(60):
        often.decide(asked())
        k = often.decide(asked()).length
        assert once.decide(asked()).length == k
        outcome = came(k, 1 + i % k, 0.1 + 0.02 * k)
        once.observe(outcome, float(i))
        often.observe(outcome, float(i))


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize(
    "nonsense",
    [
        came(1, 2, math.nan),
        came(1, 2, math.inf),
        came(1, 2, 0.0),
        came(1, 2, -1.0),
        came(1, 0, 0.1),
        came(0, 1, 0.1),
        came(9, 1, 0.1),
    ],
)
def test_nonsense_is_not_learnt(name: str, nonsense: Outcome):
    wise, fooled = made(name), made(name)
    for i in range(30):
        fooled.observe(nonsense, 0.0)
        k = wise.decide(asked()).length
        assert fooled.decide(asked()).length == k
        for controller in (wise, fooled):
            controller.observe(came(k, 1 + i % k, 0.1 * k), 0.0)


def test_a_block_cut_short_counts_for_the_length_it_had():
    controller = made("ucb-specstop", arms=2)
    controller.observe(came(2, 1, 0.1, drafted=1), 0.0)
    assert controller.decide(asked()).length == 2


def test_no_learner_stops_blocks_early():
    assert all(made(name).stop_rule() is None for name in LEARNERS)


@pytest.mark.parametrize("name", LEARNERS)
def test_options_have_names_and_ranges(name: str):
    with pytest.raises(ParameterError, match="no option 'betta': it has"):
        made(name, betta=1.0)
    known = "gamma" if name == "exp3" else "beta"
    with pytest.raises(ParameterError, match=known):
        made(name, **{known: math.nan})


# ------------------------------------------------------------------------------ EXP3


def exp3(**options: float) -> Exp3:
    return Exp3(ControllerFacts(max_length=2, options=options))


def test_exp3_begins_even_and_mixes():
    assert exp3(gamma=0.2).chances(2) == [0.5, 0.5]
    assert exp3().chances(1) == [1.0]


def test_exp3_by_hand():
    """gamma .5, two arms. Round 1: no range yet, nothing moves. Round 2, arm 1: c = .3/3 = .1,
    loss .1 - 2*.1 = -.1 against 0 before: the best so far, reward 1, chance 1/2, so ln w of
    arm 1 grows by .5/2 * 1/.5 = .5; the arms' weights are 1 and e^-.5."""
    controller = exp3(gamma=0.5)
    controller.observe(came(2, 1, 0.2), 0.0)
    assert controller.chances(2) == [0.5, 0.5]
    controller.observe(came(1, 2, 0.1), 0.0)
    share = 1 / (1 + math.exp(-0.5))
    assert controller.chances(2) == pytest.approx([0.25 + 0.5 * share, 0.75 - 0.5 * share])


def test_exp3_weights_stay_in_range():
    """The best arm's logarithm is 0 whatever was won, or exp would overflow in a long life."""
    controller = exp3(gamma=1.0)
    for _ in range(3000):
        controller.observe(came(1, 3, 0.1), 0.0)
        controller.observe(came(2, 1, 0.3), 0.0)
    assert max(controller._logs) == 0.0
    assert min(controller._logs) < -1000.0


def test_exp3_draws_by_its_chances():
    """1600 addressed draws at 1/2: five standard deviations are 100, one error in 1.7 million."""
    controller = Exp3(ControllerFacts(max_length=2, seed=3, options={"gamma": 1.0}))
    seen: Counter[int] = Counter()
    for _ in range(1600):
        k = controller.decide(asked()).length
        seen[k] += 1
        controller.observe(came(k, 1, 0.1 * k), 0.0)
    assert abs(seen[1] - 800) <= 100


def test_exp3_follows_the_better_arm_and_never_leaves_the_other_for_good():
    controller = exp3(gamma=0.1)
    for _ in range(400):
        k = controller.decide(asked()).length
        controller.observe(came(k, 1, 0.1 * k), 0.0)
    low, high = controller.chances(2)
    assert low > 0.9
    assert high >= 0.05
    assert controller.chances(1) == [1.0]


def test_exp3_with_all_weight_on_an_arm_without_room():
    controller = Exp3(ControllerFacts(max_length=3, options={"gamma": 1e-6}))
    controller._logs = [-5000.0, -5000.0, 0.0]
    assert controller.chances(2) == pytest.approx([0.5, 0.5])
    assert controller.decide(asked(2)).length in (1, 2)


def test_exp3_seeds_differ():
    def path(seed: int) -> list[int]:
        controller = Exp3(ControllerFacts(max_length=4, seed=seed))
        lengths = []
        for _ in range(40):
            lengths.append(controller.decide(asked()).length)
            controller.observe(came(lengths[-1], 1, 0.1), 0.0)
        return lengths

    assert path(1) == path(1)
    assert path(1) != path(2)


def test_naive_ucb_is_registered_under_its_name():
    assert isinstance(make("naive-ucb"), NaiveUcb)
    assert {make(name).name for name in LEARNERS} == set(LEARNERS)
