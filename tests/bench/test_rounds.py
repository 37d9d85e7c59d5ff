"""The model of rounds: its law by hand, its luck by its law, the oracle by brute force."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from outrider.bench.rounds import (
    Edge,
    Luck,
    Play,
    growth,
    loss,
    play,
    regret,
)
from outrider.bench.worlds import (
    LLAMA,
    ONE_WAY,
    QWEN,
    Drift,
    Steady,
    Switching,
    World,
    simulated,
    slow_target,
)
from outrider.control.base import ControllerFacts, Decision, Estimates, Observation, Outcome
from outrider.control.oracle import Oracle, best_fixed, best_lengths
from outrider.control.registry import make


def at(world: World, delay: float) -> np.ndarray:
    """Seconds per token by length at one delay."""
    return world.seconds(np.array([delay]))[0] / world.tokens()


def fixed(length: int, world: World):
    return make("fixed", ControllerFacts(max_length=world.max_length, fixed_length=length))


# ------------------------------------------------------------------------------ the law


def test_a_published_round_by_hand():
    """Qwen, k = 1 at 20 ms: 106.25 + 16.56 + 40 + 9.5 = 172.31 ms for 1.462 tokens; k = 10 at 0:
    737 + 30.6 + 9.5 ms for 1 + the sum of the printed S."""
    world = QWEN.world(Steady(0.02))
    assert at(world, 0.02)[1] == pytest.approx(0.17231 / 1.462)
    assert world.seconds(np.array([0.0]))[0, 10] == pytest.approx(0.7771)
    assert world.tokens()[10] == pytest.approx(3.038)
    assert np.isinf(world.seconds(np.array([0.02]))[0, 0])


def test_acceptance_goes_on_with_its_tail():
    alive = LLAMA.acceptance.survival(12)
    assert [alive[0], alive[9]] == pytest.approx([0.382, 0.082])
    assert alive[10:] == pytest.approx([0.082 * 0.845, 0.082 * 0.845**2])


def test_published_best_lengths_of_the_simulation():
    """alpha = .7, c_d = 1, c_v = .5 ms, one-way delays in ms (docs/papers.md, 3)."""
    for ms, best in {5: 3, 10: 5, 30: 7, 50: 8, 100: 10, 200: 12, 500: 14}.items():
        assert int(np.argmin(at(simulated(1e-3 * ms), 1e-3 * ms))) == best


def test_published_best_lengths_of_the_testbeds_and_where_they_differ():
    """Costs printed at k = 1 and 10 only, linear between: same up to 55 ms, then the model's
    optimum is up to three drafts away. The reported best fixed k were 2 3 4 and 1 4 7 there."""
    found = {
        bed.name: [int(np.argmin(at(bed.world(Steady(d)), d))) for d in ONE_WAY]
        for bed in (QWEN, LLAMA)
    }
    assert found == {"qwen": [1, 1, 1, 1, 1, 1, 2, 3], "llama": [1, 1, 1, 1, 1, 2, 3, 4]}
    assert QWEN.best[:5] == LLAMA.best[:5] == (1, 1, 1, 1, 1)


def test_streaming_is_a_choice_where_the_cloud_can():
    assert [int(np.argmin(at(slow_target(d), d))) for d in (0.005, 0.15)] == [7, 0]
    assert at(slow_target(0.15), 0.15)[0] == 0.060


# ------------------------------------------------------------------------------ luck


def test_accepted_lengths_follow_the_curve():
    """20,000 rounds; 4.5 standard deviations of 10 frequencies: one false alarm in 15,000."""
    luck = Luck.draw(QWEN.world(Steady(0.02)), 20_000, seed=1)
    for k, share in enumerate(QWEN.acceptance.survival(10), start=1):
        seen = float((luck.stands >= k).mean())
        assert abs(seen - share) <= 4.5 * math.sqrt(share * (1 - share) / 20_000)


def test_the_channel_leaves_its_level_one_round_in_ten():
    """20,000 rounds, 4.5 standard deviations; and half of them at either level (correlated
    rounds: the deviation is three times that of independent ones)."""
    world = QWEN.world(Switching((0.037, 0.111)))
    delays = Luck.draw(world, 20_000, seed=2).delays
    assert set(delays) == {0.037, 0.111}
    left = float((delays[1:] != delays[:-1]).mean())
    assert abs(left - 0.1) <= 4.5 * math.sqrt(0.09 / 20_000)
    assert abs(float((delays == 0.037).mean()) - 0.5) <= 4.5 * 3 * 0.5 / math.sqrt(20_000)
    assert [world.state(d) for d in (0.037, 0.111)] == [0, 1]
    first = {Luck.draw(world, 1, seed=s).delays[0] for s in range(20)}
    assert first == {0.037, 0.111}


def test_drift_goes_from_end_to_end_and_stays():
    delays = Luck.draw(QWEN.world(Drift(0.02, 0.15, 14)), 20, seed=0).delays
    assert delays[:3] == pytest.approx([0.02, 0.03, 0.04])
    assert delays[13:] == pytest.approx([0.15] * 7)
    assert QWEN.world(Drift(0.02, 0.15, 14)).state(0.1) == 0


def test_luck_is_its_seed():
    world = LLAMA.world(Switching((0.027, 0.083)))
    one, same, other = (Luck.draw(world, 50, seed=s) for s in (4, 4, 5))
    assert (one.stands == same.stands).all()
    assert (one.delays == same.delays).all()
    assert (one.factors == same.factors).all()
    assert (one.stands != other.stands).any()


def test_times_stay_positive_whatever_the_noise():
    world = replace(QWEN.world(Steady(0.02)), noise=5.0)
    assert Luck.draw(world, 500, seed=0).factors.min() == 0.2


# ------------------------------------------------------------------------------ play


def test_a_play_by_hand():
    """Always 2 drafts at 1 + .5 ms and 10 ms one way, no noise: 22.5 ms a round... twice 10, two
    drafts of 1, three rows of .5: 23.5 ms."""
    world = replace(simulated(0.01), noise=0.0)
    luck = replace(
        Luck.draw(world, 3, seed=0),
        stands=np.array([0, 1, 9]),
    )
    played = play(fixed(2, world), world, luck)
    assert list(played.lengths) == [2, 2, 2]
    assert played.seconds == pytest.approx([0.0235] * 3)
    assert list(played.tokens) == [1, 2, 3]
    assert played.ratio() == pytest.approx(0.0235 * 3 / 6)
    assert played.expected_ratio() == pytest.approx(0.0235 / 2.19)


def test_no_drafts_without_streaming_is_a_round_trip_a_token():
    world = replace(QWEN.world(Steady(0.02)), noise=0.0)
    played = play(make("never"), world, Luck.draw(world, 2, seed=0))
    assert played.seconds == pytest.approx([0.04 + 0.0095 + world.verify(0)] * 2)
    streaming = replace(world, plain=0.015)
    played = play(make("never"), streaming, Luck.draw(world, 2, seed=0))
    assert played.seconds == pytest.approx([0.015] * 2)


class Watching:
    """Plays 1 always and notes what it was told."""

    name = "watching"

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []
        self.before = 0

    def decide(self, observation: Observation) -> Decision:
        self.before = observation.estimates.delay_state
        return Decision(length=1)

    def observe(self, outcome: Outcome, now: float) -> None:
        self.told.append((self.before, outcome.delay_state))

    def stop_rule(self) -> None:
        return None


@pytest.mark.parametrize("sensed", [True, False])
def test_the_state_is_the_present_one_or_the_last(sensed: bool):
    world = QWEN.world(Switching((0.037, 0.111)))
    luck = Luck.draw(world, 40, seed=3)
    states = [world.state(d) for d in luck.delays]
    watching = Watching()
    play(watching, world, luck, sensed=sensed)
    want = states if sensed else [0, *states[:-1]]
    assert watching.told == [(s, s) for s in want]


# ------------------------------------------------------------------------------ the oracle


def test_best_lengths_by_brute_force():
    """All 5^4 ways to play four rounds at different delays, where the cloud may stream."""
    delays = np.array([0.0, 0.4, 0.02, 0.15])
    world = replace(LLAMA.world(Steady(0.0), max_length=4), plain=0.15)
    seconds, tokens = world.seconds(delays), world.tokens()
    lengths, ratio = best_lengths(seconds, tokens)
    ways = {
        way: sum(seconds[i, k] for i, k in enumerate(way)) / sum(tokens[k] for k in way)
        for way in itertools.product(range(5), repeat=4)
    }
    assert ratio == pytest.approx(min(ways.values()))
    assert ways[tuple(lengths)] == pytest.approx(ratio)
    assert sorted(set(lengths)) == [0, 1]
    alike = {k: ways[(k,) * 4] for k in range(5)}
    best, found = best_fixed(seconds, tokens)
    assert (best, found) == (min(alike, key=alike.__getitem__), pytest.approx(min(alike.values())))


def test_the_search_goes_on_while_the_ratio_falls_at_all():
    """From the least seconds a round (ratio 1) by way of .98, whose N - B is least, to .95."""
    seconds, tokens = np.array([[1.0, 9.8, 1.9]]), np.array([1.0, 10.0, 2.0])
    lengths, ratio = best_lengths(seconds, tokens)
    assert (list(lengths), ratio) == ([2], pytest.approx(0.95))


@pytest.mark.parametrize("bed", [QWEN, LLAMA])
def test_without_streaming_the_present_delay_is_worth_nothing(bed):
    """A round's delay adds to N and to nothing else, so the k that minimises N(k) - c*B(k) is the
    same in every round: seconds per token over many rounds gain nothing from knowing the delay.
    Thm 6's value of information is that of an average of ratios, which no user waits for."""
    world = bed.world(Switching((0.005, 0.3)))
    delays = Luck.draw(world, 400, seed=6).delays
    lengths, ratio = best_lengths(world.seconds(delays), world.tokens())
    assert len(set(lengths)) == 1
    assert ratio == pytest.approx(best_fixed(world.seconds(delays), world.tokens())[1])
    alone = [int(np.argmin(at(world, d))) for d in (0.005, 0.3)]
    assert alone[0] < lengths[0] < alone[1]


def test_the_oracle_loses_nothing_and_nobody_beats_it():
    world = replace(slow_target(0.0, max_length=10), delays=Switching((0.005, 0.15)))
    luck = Luck.draw(world, 300, seed=6)
    seconds, tokens = world.seconds(luck.delays), world.tokens()
    oracle = play(Oracle.foresight(seconds, tokens), world, luck)
    assert loss(oracle, world, luck) == pytest.approx(0.0, abs=1e-12)
    assert regret(oracle, world, luck)[-1] == pytest.approx(0.0, abs=1e-9)
    near = luck.delays == 0.005
    assert set(oracle.lengths[near]) == {8}
    assert set(oracle.lengths[~near]) == {0}
    blind = play(Oracle.blind(seconds, tokens), world, luck)
    assert len(set(blind.lengths)) == 1
    assert loss(blind, world, luck) > 0.1
    for name in ("naive-ucb", "exp3", "ucb-specstop", "ucb-scaled", "contextual"):
        learner = make(name, ControllerFacts(max_length=10))
        assert loss(play(learner, world, luck), world, luck) > 0.0


def test_an_oracle_needs_something_to_foresee():
    with pytest.raises(ValueError, match="one round at least"):
        Oracle(np.array([], dtype=np.int64))
    with pytest.raises(ValueError, match="may be played"):
        best_lengths(np.full((1, 2), np.inf), np.array([1.0, 2.0]))
    with pytest.raises(ValueError, match="may be played"):
        best_lengths(np.zeros((0, 2)), np.array([1.0, 2.0]))


def test_an_oracle_has_no_more_room_than_others_and_stays_at_its_last():
    world = simulated(0.01)
    believed = Edge(world).believes(0.0, None)
    oracle = Oracle(np.array([5, 7]))
    narrow, wide = (Observation(now=0.0, room=r, estimates=believed) for r in (3, 16))
    assert oracle.decide(narrow).length == 3
    played = play(oracle, world, Luck.draw(world, 4, seed=0))
    assert list(played.lengths) == [5, 7, 7, 7]
    assert oracle.decide(wide).length == 7
    assert oracle.stop_rule() is None


# ------------------------------------------------------------------------------ figures


@pytest.mark.parametrize(
    ("form", "value"), [(np.log, 1.0), (np.sqrt, math.sqrt(2)), (lambda n: 3.0 * n, 2.0)]
)
def test_growth_tells_the_form(form, value: float):
    assert growth(form(np.arange(1, 4097, dtype=float))) == pytest.approx(value)


def test_growth_of_no_regret_at_all():
    assert growth([0.0] * 8) == 0.0
    assert growth([1e-15 * n for n in range(8)]) == 0.0


def test_loss_counts_only_the_rounds_asked_for():
    world = replace(simulated(0.01), noise=0.0)
    best = int(np.argmin(at(world, 0.01)))
    luck = Luck.draw(world, 4, seed=0)
    late = play(Oracle(np.array([1, 1, best, best])), world, luck)
    assert loss(late, world, luck, 2) == pytest.approx(0.0)
    ratios = at(world, 0.01)
    assert loss(late, world, luck, 0, 2) == pytest.approx(ratios[1] / ratios[best] - 1)
    assert isinstance(late, Play)


def test_an_edge_believes_what_it_measured():
    """Blocks of 2 and 6 at 5 ms a draft, 60 ms a forward, 20 ms of round trip, all twice that."""
    edge = Edge(slow_target(0.01))
    for k in (2, 6) * 40:
        edge.measures(drafted=k, accepted=k, factor=2.0, delay=0.01, now=1.0)
    believed = edge.believes(1.0, None)
    assert isinstance(believed, Estimates)
    assert believed.draft == pytest.approx(0.01)
    assert believed.draft_start == pytest.approx(0.0, abs=1e-9)
    assert believed.round_trip == pytest.approx(0.04)
    assert believed.verify.seconds(3) == pytest.approx(0.12)
    assert believed.curve.acceptance(5) > 0.9
    assert (believed.delay_state, edge.believes(1.0, 3).delay_state) == (0, 3)


def test_a_plain_token_teaches_its_step_and_no_round_trip():
    edge = Edge(slow_target(0.01))
    before = edge.believes(0.0, None)
    edge.measures(drafted=0, accepted=0, factor=1.0, delay=0.3, now=1.0)
    after = edge.believes(1.0, None)
    assert after.verify.seconds(1) == pytest.approx(0.06)
    assert (after.round_trip, after.rounds) == (before.round_trip, before.rounds)


def test_where_the_cloud_cannot_stream_no_drafts_have_no_sane_price():
    edge = Edge(QWEN.world(Steady(0.02)))
    edge.measures(drafted=1, accepted=0, factor=1.0, delay=0.02, now=1.0)
    verify = edge.believes(1.0, None).verify
    assert verify.seconds(2) == pytest.approx(0.01656)
    assert verify.seconds(1) == 3600.0
