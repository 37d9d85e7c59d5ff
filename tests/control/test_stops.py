"""AdaEDL by literal numbers; SpecDec++'s derived threshold against enumeration."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.control.base import (
    CalibrationError,
    ControllerFacts,
    Decision,
    Estimates,
    Observation,
    Outcome,
)
from outrider.control.costs import PrefixCurve, RowCosts
from outrider.control.head import StopHead
from outrider.control.registry import make
from outrider.control.stops import (
    EntropyStop,
    HeadStop,
    judging,
    need,
    needs,
    seconds_per_token,
)
from outrider.core.draft import DraftSignal
from outrider.core.tokens import ParameterError

F = np.float32


class Constant(PrefixCurve):
    """A curve that is known."""

    __slots__ = ("_values",)

    def __init__(self, *values: float) -> None:
        super().__init__()
        self._values = values

    def acceptance(self, index: int) -> float:
        return self._values[min(index, len(self._values) - 1)]


def estimates(
    curve: PrefixCurve | None = None,
    *,
    verify: Sequence[tuple[int, float]] = ((1, 0.050), (9, 0.058)),
    draft: float = 0.010,
    round_trip: float = 0.040,
    **more: float,
) -> Estimates:
    return Estimates(
        round_trip=round_trip,
        draft=draft,
        verify=RowCosts(verify),
        curve=curve or Constant(0.8),
        **more,  # type: ignore[arg-type]
    )


def ask(room: int = 100, **known: object) -> Observation:
    return Observation(now=0.0, room=room, estimates=known.get("estimates") or estimates())  # type: ignore[arg-type]


def round_of(drafted: int, accepted: int) -> Outcome:
    return Outcome(
        decision=Decision(length=16),
        drafted=drafted,
        accepted=accepted,
        strict=accepted,
        tokens=accepted + 1,
        seconds=0.1,
    )


def signal(index: int = 0, *, entropy: float = 0.0, p: float = 0.5, hidden=None) -> DraftSignal:
    return DraftSignal(index=index, probability=p, entropy=entropy, hidden=hidden)


# ----------------------------------------------------------------------------- adaedl


@pytest.mark.parametrize(
    ("entropy", "threshold", "stops"),
    [
        (0.0, 1.0, False),  # 1 - 0 is not below 1
        (0.45, 0.7, False),  # 1 - sqrt(.09) = .7
        (0.46, 0.7, True),
        (1.24, 0.5, False),  # 1 - sqrt(.25) = .5 at 1.25 nats
        (1.26, 0.5, True),
        (5.01, 0.0, True),  # 1 - sqrt(1) = 0 at 5 nats
    ],
)
def test_the_entropy_bound_by_numbers(entropy, threshold, stops):
    rule = EntropyStop(coefficient=0.2, threshold=threshold)
    rule.start()
    assert rule.stop(signal(entropy=entropy)) is stops
    late = EntropyStop(coefficient=0.2, threshold=threshold, min_length=3)
    assert late.stop(signal(1, entropy=entropy)) is False
    assert late.stop(signal(2, entropy=entropy)) is stops


def test_lambda_follows_acceptance_by_the_published_constants():
    made = make("adaedl")
    assert (made.threshold, made.acceptance) == (0.5, 0.9)
    made.observe(round_of(4, 1), 1.0)  # r = .45 + .125; below .9, so lambda + .1 * .01
    assert made.acceptance == pytest.approx(0.575)
    assert made.threshold == pytest.approx(0.501)
    made.observe(round_of(0, 0), 2.0)  # nothing was judged
    assert made.threshold == pytest.approx(0.501)
    for accepted, r, threshold in ((2, 0.7875, 0.502), (2, 0.89375, 0.503), (2, 0.946875, 0.502)):
        made.observe(round_of(2, accepted), 3.0)
        assert made.acceptance == pytest.approx(r)
        assert made.threshold == pytest.approx(threshold)


def test_acceptance_at_the_target_still_raises_lambda():
    made = make("adaedl", ControllerFacts(options={"target": 1.0}))
    made.observe(round_of(3, 3), 1.0)
    assert (made.acceptance, made.threshold) == (1.0, pytest.approx(0.501))


def test_adaedl_hands_out_rules_of_its_present_threshold():
    made = make("adaedl", ControllerFacts(max_length=8, options={"lambda": 0.7, "epsilon": 1.0}))
    assert made.decide(ask()) == Decision(length=8)
    assert made.decide(ask(3)) == Decision(length=3)
    assert made.decide(ask(0)) == Decision(length=0)
    before = made.stop_rule()
    for _ in range(5):
        made.observe(round_of(4, 0), 1.0)
    assert made.threshold == 1.0  # .7 + 5 * .1, and no further than 1
    after = made.stop_rule()
    assert [rule.stop(signal(entropy=0.4)) for rule in (before, after)] == [False, True]
    assert not before.needs_hidden


@pytest.mark.parametrize("options", [{"lambda": 1.5}, {"beta1": math.nan}, {"lamda": 0.5}])
def test_adaedl_refuses_bad_options(options):
    with pytest.raises(ParameterError, match="controller"):
        make("adaedl", ControllerFacts(options=options))


# ----------------------------------------------------------------------------- the threshold


def blocks_by_rule(known: Estimates, longest: int, predicted: float) -> int:
    """Length at which the derived rule stops when every token's acceptance is the same."""
    needed = needs(known, longest)
    alive = 1.0
    for i in range(1, longest):
        alive *= predicted
        if not alive >= needed[i - 1]:
            return i
    return longest


def best_length(known: Estimates, longest: int, acceptance: float, step: float) -> int:
    """By trying all."""

    def cost(k: int) -> float:
        seconds = known.draft_start + k * step + known.round_trip + known.queue
        tokens = sum(acceptance**i for i in range(k + 1))
        return (seconds + known.verify.seconds(k + 1)) / tokens

    return min(range(1, longest + 1), key=cost)


@given(
    acceptance=st.floats(0.2, 0.97),
    draft=st.floats(0.002, 0.03),
    round_trip=st.floats(0.0, 0.4),
    slopes=st.lists(st.floats(0.0, 0.02), min_size=16, max_size=16),
    byte_up=st.floats(0.0, 1e-4),
)
def test_constant_acceptance_gives_the_best_fixed_length(
    acceptance, draft, round_trip, slopes, byte_up
):
    """Any monotone row costs, staircases included."""
    verify = list(enumerate(itertools.accumulate([0.05, *slopes]), start=1))
    known = estimates(
        Constant(acceptance),
        verify=verify,
        draft=draft,
        round_trip=round_trip,
        queue=0.003,
        draft_start=0.001,
        byte_up=byte_up,
    )
    best = best_length(known, 16, acceptance, draft + 4 * byte_up)
    found = blocks_by_rule(known, 16, acceptance)
    assert found == best or _equal_cost(known, found, best, acceptance, draft + 4 * byte_up)


def _equal_cost(known: Estimates, a: int, b: int, acceptance: float, step: float) -> bool:
    """A tie up to rounding, or so bad that not drafting at all is better than either."""

    def cost(k: int) -> float:
        seconds = (known.draft_start + k * step) * (k > 0) + known.round_trip + known.queue
        tokens = sum(acceptance**i for i in range(k + 1))
        return (seconds + known.verify.seconds(k + 1)) / tokens

    return cost(a) == pytest.approx(cost(b), rel=1e-9) or cost(0) < cost(b)


def test_a_staircase_needs_more_than_one_step_ahead():
    """Nine rows cost 30 ms more than eight, ten to sixteen nothing more."""
    stairs = [(1, 0.05), (8, 0.05), (9, 0.08), (16, 0.08)]
    known = estimates(Constant(0.97), verify=stairs, draft=0.002, round_trip=0.3)
    assert best_length(known, 15, 0.97, 0.002) == 15
    assert blocks_by_rule(known, 15, 0.97) == 15
    rows = judging(known, 15)
    worth = seconds_per_token(known, rows)
    one_step = need(7, worth, 0.002, rows, [0.97])
    assert one_step > 0.97**7  # a look at the next token alone would stop here


def test_the_round_trip_raises_the_threshold():
    stops = []
    for round_trip in (0.0, 0.05, 0.2, 0.8):
        known = estimates(Constant(0.8), round_trip=round_trip)
        stops.append(1.0 - needs(known, 16)[3])
    assert stops == sorted(stops)
    # By hand at R = .2: best k and L by all N/B, then 1 - 11 ms / (.8 L).
    ratios = [
        (k * 0.01 * (k > 0) + 0.2 + 0.05 + 0.001 * k) / sum(0.8**i for i in range(k + 1))
        for k in range(17)
    ]
    assert stops[2] == pytest.approx(1 - 0.011 / (0.8 * min(ratios)))


def test_lengths_without_anything_beyond():
    assert needs(estimates(), 1) == [1.0]
    assert need(1, 0.1, 0.01, [0.05] * 4, [0.0, 0.5]) == math.inf
    assert need(1, 0.1, 0.01, [0.05] * 4, []) == math.inf


# Acceptances that vary: each token's is one of these, alike likely, independent of the others.
CHOICES = ((0.95, 0.35), (0.99, 0.6), (0.8, 0.1))
Policy = Callable[[int, float], bool]


def play(
    policy: Policy, choices: Sequence[float], longest: int, known: Estimates
) -> tuple[float, float]:
    """(E seconds, E tokens) of a round under `policy(drafted, P)`: True drafts on. Exact."""

    def behind(drafted: int, alive: float) -> tuple[float, float]:
        if drafted == longest or (drafted and not policy(drafted, alive)):
            rows = known.verify.seconds(drafted + 1)
            return drafted * known.draft + known.round_trip + rows, 0.0
        parts = [(behind(drafted + 1, alive * p), alive * p) for p in choices]
        seconds = sum(s for (s, _), _ in parts) / len(parts)
        tokens = sum(t + gained for (_, t), gained in parts) / len(parts)
        return seconds, tokens

    seconds, tokens = behind(0, 1.0)
    return seconds, tokens + 1.0


def optimal(choices: Sequence[float], longest: int, known: Estimates) -> tuple[float, Policy]:
    """Least seconds a token and a policy that has it, by dynamic programming (Dinkelbach)."""
    worth = 1.0
    for _ in range(60):

        def value(drafted: int, alive: float, worth: float = worth) -> float:
            """Least E[rest of N] - worth E[rest of tokens]."""
            ending = known.verify.seconds(drafted + 1)
            if drafted == longest:
                return ending
            return (
                min(ending, further(drafted, alive, worth)) if drafted else further(0, 1.0, worth)
            )

        def further(drafted: int, alive: float, worth: float) -> float:
            each = [value(drafted + 1, alive * p, worth) - worth * alive * p for p in choices]
            return known.draft + sum(each) / len(each)

        def policy(drafted: int, alive: float, worth: float = worth, further=further) -> bool:
            return further(drafted, alive, worth) < known.verify.seconds(drafted + 1)

        seconds, tokens = play(policy, choices, longest, known)
        if abs(seconds / tokens - worth) < 1e-12:
            break
        worth = seconds / tokens
    return worth, policy


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize("round_trip", [0.0, 0.03, 0.1, 0.5])
def test_varying_acceptance_against_dynamic_programming(choices, round_trip):
    """With L of the best policy the rule is that policy; with L of the best fixed length it is
    at least as good as that length, and on average better."""
    mean, longest = sum(choices) / 2, 7
    known = estimates(Constant(mean), round_trip=round_trip)
    rows = judging(known, longest)
    least, best = optimal(choices, longest, known)

    def rule(worth: float) -> Policy:
        def drafts_on(drafted: int, alive: float) -> bool:
            ahead = [mean] * (longest - drafted)
            return alive >= need(drafted, worth, known.draft, rows, ahead)

        return drafts_on

    derived = play(rule(least), choices, longest, known)
    assert derived[0] / derived[1] == pytest.approx(least, rel=1e-9)
    for length in range(1, longest):
        for picked in itertools.product(choices, repeat=length):
            alive = math.prod(picked)
            assert rule(least)(length, alive) == best(length, alive)
    fixed = seconds_per_token(known, rows)
    seconds, tokens = play(rule(fixed), choices, longest, known)
    by_length = min(
        (play(lambda d, _, k=k: d < k, choices, longest, known) for k in range(1, longest + 1)),
        key=lambda found: found[0] / found[1],
    )
    assert least <= seconds / tokens * (1 + 1e-12)
    assert seconds / tokens <= by_length[0] / by_length[1] * (1 + 1e-12)


def test_stopping_by_prediction_beats_every_fixed_length():
    """The size of it in one case: .95 or .35 at even odds, R = 100 ms."""
    known = estimates(Constant(0.65), round_trip=0.1)
    lengths = [play(lambda d, _, k=k: d < k, (0.95, 0.35), 7, known) for k in range(1, 8)]
    fixed = min(seconds / tokens for seconds, tokens in lengths)
    least, _ = optimal((0.95, 0.35), 7, known)
    assert least < 0.97 * fixed


# ----------------------------------------------------------------------------- specdecpp


def spoken(logit: float) -> StopHead:
    """A head of width 2 that says sigmoid(h0 + logit), before the weight is taken out."""
    return StopHead(
        project=np.array([[1, 0, 0, 0]], F),
        project_bias=np.zeros(1, F),
        blocks=np.zeros((0, 1, 1), F),
        block_biases=np.zeros((0, 1), F),
        read_out=np.array([1, logit], F),
        weight=3.0,
        about={"draft": "toy"},
    )


def shown(index: int, h0: float = 0.0) -> DraftSignal:
    return signal(index, hidden=np.array([h0, 0], F))


def test_the_product_is_compared_with_the_need():
    """Weighted prediction 1/2; unbent 3/4: .75, .5625, .42."""
    early = HeadStop(spoken(0.0), (0.8, 0.5), weighted=False, min_length=1)
    assert early.stop(shown(0)) is True  # .75 < .8
    late = HeadStop(spoken(0.0), (0.7, 0.5, 0.43), weighted=False, min_length=1)
    late.start()
    assert [late.stop(shown(i)) for i in range(3)] == [False, False, True]
    bent = HeadStop(spoken(0.0), (0.7,), weighted=True, min_length=2)
    bent.start()
    assert [bent.stop(shown(i)) for i in range(2)] == [False, True]  # 1 - 1/2 > .3, from two on
    bent.start()
    assert bent.stop(shown(1, 10.0)) is False  # a fresh product
    assert bent.stop(shown(9, 10.0)) is False  # the last need goes for all beyond
    assert bent.stop(shown(10, math.nan)) is True
    with pytest.raises(CalibrationError, match="shows no hidden state"):
        bent.stop(signal())


def facts(path: Path, **options: float) -> ControllerFacts:
    path.joinpath("stop_head.npz").write_bytes(spoken(0.0).to_bytes())
    return ControllerFacts(calibration=str(path), max_length=8, options=options)


def test_specdecpp_takes_its_threshold_from_the_estimates(tmp_path):
    made = make("specdecpp", facts(tmp_path))
    assert made.decide(ask()) == Decision(length=8)
    assert made.decide(ask(5)) == Decision(length=5)
    lengths = []
    for round_trip in (0.0, 0.08, 2.0):
        made.decide(ask(estimates=estimates(Constant(0.75), round_trip=round_trip)))
        rule = made.stop_rule()
        assert rule.needs_hidden
        rule.start()
        drafted = next((i for i in range(8) if rule.stop(shown(i))), 7) + 1
        lengths.append(drafted)
        known = estimates(Constant(0.75), round_trip=round_trip)
        assert drafted == blocks_by_rule(known, 8, 0.75)
    # N/B without R: 34.9 31.1 30.4 30.8 ms; with 80 ms: ... 57.0 56.3 56.5 ...
    assert lengths == [3, 5, 8]
    made.observe(round_of(4, 2), 1.0)
    assert made.decide(ask(0)) == Decision(length=0)


def test_specdecpp_as_published(tmp_path):
    made = make("specdecpp", facts(tmp_path, threshold=0.3))
    made.decide(ask(estimates=estimates(round_trip=5.0)))  # costs do not count then
    rule = made.stop_rule()
    rule.start()
    assert [rule.stop(shown(i, 2.0)) for i in range(3)] == [False, False, True]  # .88 .78 .68
    rule.start()
    assert [rule.stop(shown(i, -5.0)) for i in range(2)] == [False, True]  # never fewer than 2


def test_specdecpp_says_what_it_lacks(tmp_path):
    with pytest.raises(CalibrationError, match="needs the stop head of the draft in use"):
        make("specdecpp")
    with pytest.raises(CalibrationError, match="no stop head at"):
        make("specdecpp", ControllerFacts(calibration=str(tmp_path / "nothing")))
    with pytest.raises(ParameterError, match="threshold must be in"):
        make("specdecpp", facts(tmp_path, threshold=1.5))
