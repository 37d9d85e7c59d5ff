"""The default controller: warm-up, holding, trying, stopping; field case 17; and a whole loop."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from outrider.control.auto import FIRST_ROUNDS, PLAIN_TRIES, Auto
from outrider.control.base import ControllerFacts, Decision, Estimates, Observation, Outcome
from outrider.control.costs import PrefixCurve, RowCosts
from outrider.control.estimators import Estimators
from outrider.control.registry import make
from outrider.control.specstop import best_length, expected_tokens, outlook
from outrider.core.tokens import ParameterError

QUIET = {"epsilon": 0.0, "probe": 0.0}
"""No tries, no probes: every change of the length is a switch."""


class Constant(PrefixCurve):
    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha

    def acceptance(self, index: int) -> float:
        return self.alpha


def estimates(**changes: object) -> Estimates:
    """t_ar 50 ms, one more row 1 ms, t_d 10 ms, R 50 ms, acceptance .8: best length 6."""
    known = Estimates(
        round_trip=0.050,
        draft=0.010,
        verify=RowCosts([(1, 0.050), (11, 0.060)]),
        curve=Constant(0.8),
        rounds=100,
    )
    return replace(known, **changes)  # type: ignore[arg-type]


def controller(**options: float) -> Auto:
    made = make("auto", ControllerFacts(max_length=16, options=options))
    assert isinstance(made, Auto)
    return made


def ask(auto: Auto, known: Estimates, room: int = 64, *, streaming: bool = False) -> int:
    question = Observation(now=0.0, room=room, estimates=known, streaming=streaming)
    answer = auto.decide(question)
    assert auto.decide(question) == answer, "asking twice is harmless"
    return answer.length


def done(
    auto: Auto, length: int, *, state: int = 0, seconds: float = math.nan, stood: int = 0
) -> None:
    auto.observe(
        Outcome(
            decision=Decision(length=length), drafted=length, accepted=stood, strict=stood,
            tokens=1 + stood, seconds=seconds, delay_state=state,
        ),
        0.0,
    )  # fmt: skip


def play(auto: Auto, *signal: Estimates) -> list[int]:
    lengths = []
    for known in signal:
        lengths.append(ask(auto, known))
        done(auto, lengths[-1], state=known.delay_state)
    return lengths


def switches(lengths: list[int]) -> list[int]:
    return [i for i, (a, b) in enumerate(pairwise(lengths), start=1) if a != b]


# ------------------------------------------------------------------------------ the length


def test_it_takes_the_best():
    auto = controller()
    assert ask(auto, estimates()) == outlook(estimates(), 16).length == 6
    assert ask(auto, estimates(), room=2) == 2
    assert ask(auto, estimates(), room=0) == 0
    assert auto.stop_rule() is None


def test_a_short_room_changes_nothing_held():
    auto = controller(**QUIET)
    play(auto, *[estimates()] * 3)
    for _ in range(20):
        done(auto, ask(auto, estimates(), room=1))
    assert auto.held == {0: 6}


def test_the_first_rounds_spread():
    auto = controller()
    assert play(auto, *[estimates(rounds=i) for i in range(FIRST_ROUNDS)]) == [4, 8, 2, 4, 8, 2]
    assert auto.held == {}
    assert play(auto, estimates(rounds=FIRST_ROUNDS)) == [6]
    short = make("auto", ControllerFacts(max_length=3, fixed_length=1))
    assert [ask(short, estimates(rounds=i)) for i in range(3)] == [1, 2, 1]


def gain(known: Estimates, length: int) -> float:
    """By how much the best is better than `length`."""
    view = outlook(known, 16)
    return view.token_seconds[length] / view.token_seconds[view.length] - 1.0


SLIGHT = estimates(round_trip=0.1)
"""Best length 7, and 6 costs 0.2 % more."""
BETTER = estimates(round_trip=0.07, curve=Constant(0.9))
"""Best length 10, and 6 costs 6.4 % more."""
MUCH = estimates(curve=Constant(0.3))
"""Best length 1, and 6 costs 36 % more."""


def test_signals_are_what_they_say():
    assert [outlook(x, 16).length for x in (SLIGHT, BETTER, MUCH)] == [7, 10, 1]
    gains = [gain(x, 6) for x in (SLIGHT, BETTER, MUCH)]
    assert gains == pytest.approx([0.002, 0.0637, 0.361], abs=5e-4)


def test_a_better_length_waits_for_its_time():
    assert play(controller(**QUIET, always=1), estimates(), *[SLIGHT] * 20) == [6] * 21
    auto = controller(**QUIET, always=1)
    assert play(auto, estimates(), *[BETTER] * 10) == [6] * 8 + [10] * 3


def test_a_much_better_one_does_not():
    auto = controller(**QUIET, always=1)
    assert play(auto, estimates(), MUCH, MUCH) == [6, 1, 1]


def test_options_of_holding():
    options = {**QUIET, "always": 1}
    assert play(controller(**options, margin=0.0, dwell=0), estimates(), SLIGHT) == [6, 7]
    assert play(controller(**options, dwell=0), estimates(), SLIGHT, BETTER) == [6, 6, 10]
    assert play(controller(**options, urgent=0.0), estimates(), SLIGHT) == [6, 7]


def test_each_delay_state_has_its_own():
    levels = (0.020, 0.150)
    near = estimates(delay_levels=levels, delay_state=0)
    far = estimates(delay_levels=levels, delay_state=1)
    auto = controller(**QUIET, always=1)
    k = outlook(near, 16).length, outlook(far, 16).length
    assert k[0] < k[1]
    assert play(auto, near, far, near, near, far) == [k[0], k[1], k[0], k[0], k[1]]
    assert auto.held == {0: k[0], 1: k[1]}


def test_a_window_where_drafts_stream():
    known = estimates()
    assert ask(controller(), known, streaming=True) == outlook(known, 16, streaming=True).length
    auto = controller(**QUIET)
    for _ in range(30):
        length = ask(auto, known, streaming=True)
        done(auto, length, seconds=5.0)
    assert length == outlook(known, 16, streaming=True).length, "rounds overlap: no correction"


# ------------------------------------------------------------------------------ field case 17


def hopping(low: Estimates, high: Estimates) -> list[Estimates]:
    rng = np.random.default_rng(17)
    return [low, high] * 60 + [(low, high)[int(x)] for x in rng.integers(0, 2, 400)]


def test_field_case_17_a_signal_hopping_about_the_ceiling():
    """0 against K: at R just below and above where the cloud alone is faster."""
    view = outlook(estimates(round_trip=0.0), 16)
    ceiling = max(
        b * view.token_seconds[0] - n
        for n, b in zip(view.round_seconds[1:], view.tokens[1:], strict=True)
    )
    low, high = (estimates(round_trip=ceiling * x) for x in (0.99, 1.01))
    assert outlook(low, 16).worth
    assert not outlook(high, 16).worth
    lengths = play(controller(**QUIET), *hopping(low, high))
    found = switches([min(x, 1) for x in lengths])
    assert found, "runs of one side do switch"
    assert all(b - a >= 8 for a, b in pairwise(found))
    # and with a wide signal, however large
    low, high = estimates(round_trip=ceiling * 0.7), estimates(round_trip=ceiling * 1.5)
    lengths = play(controller(**QUIET), *hopping(low, high))
    assert all(b - a >= 8 for a, b in pairwise(switches([min(x, 1) for x in lengths])))


def test_field_case_17_a_signal_hopping_between_two_lengths():
    low = estimates(round_trip=0.05, curve=Constant(0.75))
    high = estimates(round_trip=0.05, curve=Constant(0.85))
    best = outlook(low, 16).length, outlook(high, 16).length
    assert best[0] < best[1]
    signal = hopping(low, high)
    raw = [outlook(x, 16).length for x in signal]
    assert len(switches(raw)) > 200
    lengths = play(controller(**QUIET, always=1), *signal)
    found = switches(lengths)
    assert found
    assert all(b - a >= 8 for a, b in pairwise(found))


def test_case_17_with_tries_and_probes_the_held_length_is_as_steady():
    auto, held = controller(always=1), []
    low, high = (estimates(curve=Constant(a)) for a in (0.75, 0.85))
    for known in hopping(low, high):
        done(auto, ask(auto, known), stood=1)
        held.append(auto.held[0])
    assert all(b - a >= 8 for a, b in pairwise(switches(held)))


# ------------------------------------------------------------------------------ tries


def test_neighbours_are_tried_in_a_share_of_rounds():
    lengths = play(controller(epsilon=0.1), *[estimates()] * 60)
    tried = [(i, x) for i, x in enumerate(lengths) if x != 6]
    assert [i for i, _ in tried] == [9, 19, 29, 39, 49, 59]
    # longer, shorter, half as long again
    assert [x for _, x in tried] == [7, 5, 10, 7, 5, 10]
    assert play(controller(epsilon=0.0), *[estimates()] * 60) == [6] * 60


def one_draft(draft: float) -> Estimates:
    """Forwards of a second, acceptance .4, no link: one draft is best."""
    known = estimates(draft=draft, round_trip=0.0, curve=Constant(0.4), verify=RowCosts([(1, 1.0)]))
    assert outlook(known, 16).length == 1
    return known


def test_a_longer_one_is_not_tried_where_no_acceptance_could_pay():
    """A second draft costs 1 s: 3.0 / 1.8 if it always stood, and 2.0 / 1.4 without it."""
    assert set(play(controller(always=1), *[one_draft(1.0)] * 100)) == {1}


def test_hope_fades_with_what_was_judged():
    """At 0.3 s it would pay if it stood at .81; it stands at .4. Once that was seen a few times
    it is left alone, but for a rare look."""
    known = one_draft(0.3)
    auto, tries = controller(always=1), []
    for i in range(2000):
        length = ask(auto, known)
        done(auto, length, stood=length - 1)
        tries += [i] * (length > 1)
    early, late = sum(i < 100 for i in tries), sum(i >= 1000 for i in tries) / 10
    assert early > 2 * late > 0


def test_a_shorter_one_is_tried_while_it_is_new_or_nearly_as_good():
    """From one draft too many: 5 costs 1.6 % less than 6 in the one world, 36 % less in the
    other, where it is soon known and 2 is no neighbour."""
    lengths = play(controller(epsilon=0.5), *[estimates()] * 200)
    assert lengths.count(5) > 20
    steep = estimates(draft=0.001, round_trip=0.2, curve=Constant(0.97))
    view = outlook(steep, 4)
    assert view.length == 4
    assert view.token_seconds[3] > 1.02 * view.token_seconds[4]
    auto = make("auto", ControllerFacts(max_length=4, options={"epsilon": 0.5, "always": 1}))
    assert 3 <= play(auto, *[steep] * 200).count(3) <= 5


def test_plain_rounds_are_tried_while_none_was_measured():
    unseen = estimates(verify=RowCosts([(5, 0.050), (11, 0.060)]))
    lengths = play(controller(epsilon=0.1), *[unseen] * 100)
    assert [i for i, x in enumerate(lengths) if x == 0] == [9, 19, 29]
    assert len([x for x in lengths if x == 0]) == PLAIN_TRIES
    assert 0 not in play(controller(epsilon=0.1), *[estimates()] * 100)
    assert 0 not in play(controller(epsilon=0.1, always=1), *[unseen] * 100)


# ------------------------------------------------------------------------------ stopping


FAR = {"round_trip": 0.2}
"""The ceiling is at 80 ms."""


def test_two_strikes_and_eight_rounds():
    far, near = estimates(**FAR), estimates()
    auto = controller(**QUIET)
    assert [x > 0 for x in play(auto, near, far, *[near] * 3, far, far, *[near] * 10)] == (
        [True] * 6 + [False] * 8 + [True] * 3
    )


def test_acceptance_is_no_reason_before_it_was_seen():
    early = estimates(rounds=2, curve=Constant(0.3))
    assert not outlook(early, 16).worth
    auto = controller(**QUIET)
    assert all(play(auto, *[early] * 4))
    # but a link is: not even 17 tokens for one round would pay
    hopeless = estimates(rounds=2, round_trip=3.0)
    assert play(controller(**QUIET), *[hopeless] * 4)[1:] == [0, 0, 0]


def test_probes_while_it_is_off():
    far = estimates(round_trip=0.12)
    lengths = play(controller(probe=0.1, burden=1.0), *[far] * 61)
    assert [i for i, x in enumerate(lengths) if x > 0] == [0, 10, 20, 30, 40, 50, 60]


# ------------------------------------------------------------------------------ corrections


def test_what_the_model_leaves_out_is_learnt():
    """Each round takes 150 ms more than its parts: longer drafts; and past the ceiling, none."""
    auto = controller(**QUIET, always=1)
    for _ in range(40):
        length = ask(auto, estimates())
        done(auto, length, seconds=outlook(estimates(), 16).round_seconds[length] + 0.15)
    assert ask(auto, estimates()) == outlook(estimates(), 16, extra=0.15).length == 8
    stopping = controller(**QUIET)
    for _ in range(40):
        length = ask(stopping, estimates())
        done(stopping, length, seconds=outlook(estimates(), 16).round_seconds[length] + 0.15)
    assert ask(stopping, estimates()) == 0


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_bad_round_times(seconds: float):
    auto = controller(**QUIET)
    for _ in range(20):
        done(auto, ask(auto, estimates()), seconds=seconds)
    assert ask(auto, estimates()) == 6


def test_an_outcome_before_any_question():
    auto = controller()
    done(auto, 4, seconds=0.1)
    assert ask(auto, estimates()) == 6


@pytest.mark.parametrize("state", [-5, 10**9])
def test_impossible_states(state: int):
    auto = controller(**QUIET)
    assert play(auto, *[estimates(delay_state=state)] * 3) == [6] * 3


@pytest.mark.parametrize(
    "options",
    [{"margin": -1.0}, {"urgent": math.nan}, {"dwell": -1}, {"epsilon": 0.9}, {"strikes": 0}],
)
def test_options_out_of_range(options: dict[str, float]):
    with pytest.raises(ParameterError, match="must be in"):
        controller(**options)


def test_unknown_options():
    with pytest.raises(ParameterError, match="no option 'beta'"):
        controller(beta=1.0)


# ------------------------------------------------------------------------------ a whole loop


def loop(auto: Auto, *, alpha: float, link: float, plain: float, rounds: int, seed: int):
    """Synchronous rounds of t_d 10 ms and forwards of `plain` + 1 ms a draft, 5 % noise."""
    rng, known, lengths, now = np.random.default_rng(seed), Estimators(), [], 0.0
    for _ in range(rounds):
        k = ask(auto, known.snapshot(now), room=16)
        noise = max(0.5, 1.0 + 0.05 * rng.standard_normal())
        stands = rng.random(k) < alpha
        stood = k if stands.all() else int(np.argmin(stands))
        draft, step, trip = 0.010 * k * noise, (plain + 0.001 * k) * noise, link * noise
        seconds = draft + step + trip if k else step
        now += seconds
        known.step(k + 1, step)
        if k:
            known.draft(k, draft)
            known.round_trip(network=trip, now=now)
            known.verdict(drafted=k, accepted=stood)
        done(auto, k, seconds=seconds, stood=stood)
        lengths.append(k)
    return lengths


def true_seconds(k: int, *, alpha: float, link: float, plain: float) -> float:
    if k == 0:
        return plain
    tokens = (1.0 - alpha ** (k + 1)) / (1.0 - alpha)
    return (0.011 * k + plain + link) / tokens


@pytest.mark.parametrize(
    ("alpha", "link", "plain"), [(0.8, 0.05, 0.06), (0.6, 0.01, 0.2), (0.9, 0.15, 0.1)]
)
def test_it_finds_a_length_within_three_percent(alpha, link, plain):
    """Twenty seeds, rounds 100 to 200: the mean loss over the best length, and the median. The
    mean holds a run that had bad luck early, stopped speculating and came back late."""
    world = {"alpha": alpha, "link": link, "plain": plain}
    best = min(true_seconds(k, **world) for k in range(17))
    losses = []
    for seed in range(20):
        played = loop(controller(), **world, rounds=200, seed=seed)[100:]
        losses.append(np.mean([true_seconds(k, **world) for k in played]) / best - 1.0)
    assert np.mean(losses) < 0.03
    assert np.median(losses) < 0.015


def test_it_stops_where_nothing_pays():
    """R = 300 ms, t_ar 30 ms, acceptance .6: a round costs ten plain steps more than it brings,
    so after the first rounds there is one probe in a thousand."""
    world = {"alpha": 0.6, "link": 0.3, "plain": 0.03}
    assert min(range(17), key=lambda k: true_seconds(k, **world)) == 0
    for seed in range(10):
        played = loop(controller(), **world, rounds=300, seed=seed)
        assert not any(played[30:])


def between_ends(first: float, last: float, k: int) -> float:
    return first + (last - first) * (k - 1) / 9


@pytest.mark.parametrize(
    ("draft", "verify", "survival", "levels", "by_rounds", "by_time"),
    [
        pytest.param(
            (106.25, 737.0), (16.56, 30.6),
            (0.462, 0.328, 0.256, 0.214, 0.188, 0.166, 0.144, 0.110, 0.088, 0.082),
            (37, 111), 0.0140, 0.0068, id="qwen",
        ),
        pytest.param(
            (90.40, 525.9), (17.18, 31.2),
            (0.382, 0.288, 0.226, 0.196, 0.170, 0.140, 0.124, 0.116, 0.102, 0.082),
            (27, 83), 0.0052, 0.0102, id="llama",
        ),
    ],
)  # fmt: skip
def test_what_a_length_per_state_costs_and_saves(
    draft, verify, survival, levels, by_rounds, by_time
):
    """The module docstring's figures, from the printed costs and curves of both testbeds with a
    bare round trip of 9.5 ms (docs/papers.md, 3). Half of the rounds at each level: one length for
    both is best, and each state's own costs more. Half of the time: the other way round."""
    tokens = expected_tokens(survival)

    def costs(delay: float) -> list[float]:
        both = [between_ends(*draft, k) + between_ends(*verify, k) for k in range(11)]
        return [n + 2 * delay + 9.5 for n in both]

    near, far = (costs(d) for d in levels)
    own = best_length(near, tokens), best_length(far, tokens)

    def in_rounds(a: int, b: int) -> float:
        return (near[a] + far[b]) / (tokens[a] + tokens[b])

    def in_time(a: int, b: int) -> float:
        return 2.0 / (tokens[a] / near[a] + tokens[b] / far[b])

    common = min(range(1, 11), key=lambda k: in_rounds(k, k))
    assert in_rounds(*own) / in_rounds(common, common) - 1.0 == pytest.approx(by_rounds, abs=5e-5)
    assert in_time(common, common) / in_time(*own) - 1.0 == pytest.approx(by_time, abs=5e-5)
