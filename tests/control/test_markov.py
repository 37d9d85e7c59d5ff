"""Optimal stopping on a Markov delay: against all policies by enumeration, and its law."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from outrider.control.base import ControllerFacts, Decision, Estimates, Observation, Outcome
from outrider.control.costs import PrefixCurve, RowCosts
from outrider.control.markov import (
    MOVE_PRIOR,
    STATES,
    STAY_PRIOR,
    TRANSITION_FORGET,
    Transitions,
    slowed,
    solve,
)
from outrider.control.registry import make
from outrider.control.specstop import best_length, expected_tokens, geometric, linear_costs
from outrider.core.tokens import ParameterError

FINE = 1e-9
share = st.floats(0.0, 1.0)


def grid(delays: list[float], alpha: float, longest: int, draft: float, verify: float):
    """N(n, d(s)) and B(n), n = 1 .. longest, of the published model."""
    bare = linear_costs(draft, verify, 0.0, longest)
    costs = [[n + 2.0 * d for d in delays] for n in bare[1:]]
    return costs, expected_tokens(geometric(alpha, longest))[1:]


def ratio(policy, costs, tokens, moves, begins) -> float:
    """E[N] / E[B] of "stop at n in s iff policy[n - 1][s]", by following every path's weight."""
    weights, spent, got = list(begins), 0.0, 0.0
    for n, stops in enumerate(policy):
        for s, stop in enumerate(stops):
            if stop:
                spent += weights[s] * costs[n][s]
                got += weights[s] * tokens[n]
        going = [0.0 if stop else w for w, stop in zip(weights, stops, strict=True)]
        weights = [
            sum(w * row[t] for w, row in zip(going, moves, strict=True)) for t in range(len(moves))
        ]
    return spent / got


@given(
    st.floats(0.1, 0.95), st.floats(0.1, 5.0), st.floats(0.01, 5.0), st.floats(0.0, 20.0),
    st.floats(0.0, 50.0), share, share, share,
)  # fmt: skip
def test_no_policy_is_better(alpha, draft, verify, near, gap, leave, back, begin):
    """All 2**4 stopping policies of two states and three lengths."""
    costs, tokens = grid([near, near + gap], alpha, 3, draft, verify)
    moves = [[1.0 - leave, leave], [back, 1.0 - back]]
    begins = [begin, 1.0 - begin]
    found = solve(costs, tokens, moves, begins, precision=FINE)
    choices = itertools.product([False, True], repeat=4)
    policies = [[c[:2], c[2:], (True, True)] for c in choices]
    best = min(ratio(p, costs, tokens, moves, begins) for p in policies)
    assert found.token_seconds == pytest.approx(best, rel=1e-6)
    assert ratio(found.stops, costs, tokens, moves, begins) == pytest.approx(best, rel=1e-6)


def test_one_state_is_the_plain_problem():
    for delay, k in ((5, 3), (10, 5), (30, 7), (50, 8), (100, 10)):
        costs, tokens = grid([delay], 0.7, 40, 1.0, 0.5)
        found = solve(costs, tokens, [[1.0]], [1.0], precision=FINE)
        assert found.thresholds == (k,)
        plain = linear_costs(1.0, 0.5, delay, 40)
        at = best_length(plain, expected_tokens(geometric(0.7, 40)))
        assert found.token_seconds == pytest.approx(plain[at] / tokens[at - 1], rel=1e-6)


def test_a_delay_that_cannot_change_is_paid_anyway():
    """Frozen states share lambda, so they get one length: neither's own best (5 and 10)."""
    costs, tokens = grid([10.0, 100.0], 0.7, 12, 1.0, 0.5)
    frozen, begins = [[1.0, 0.0], [0.0, 1.0]], [0.5, 0.5]
    found = solve(costs, tokens, frozen, begins, precision=FINE)
    assert found.thresholds == (9, 9)

    def per_token(near: int, far: int) -> float:
        return ratio([(n >= near, n >= far) for n in range(1, 13)], costs, tokens, frozen, begins)

    every = itertools.product(range(1, 13), repeat=2)
    assert min(per_token(*k) for k in every) == pytest.approx(found.token_seconds)
    assert per_token(5, 10) > 1.02 * found.token_seconds


def test_thresholds_differ_where_waiting_may_help():
    """A bad state that is left quickly: draft on there, the delay may fall meanwhile."""
    costs, tokens = grid([2.0, 60.0], 0.8, 30, 1.0, 0.5)
    moves = [[0.9, 0.1], [0.3, 0.7]]
    found = solve(costs, tokens, moves, [0.75, 0.25], precision=FINE)
    near, far = found.thresholds
    assert near < far
    still = solve(costs, tokens, [[1.0, 0.0], [0.0, 1.0]], [0.75, 0.25], precision=FINE)
    assert found.token_seconds < still.token_seconds


def monotone(moves) -> bool:
    """Stochastically: P(s' >= t | s) rises with s for every t."""
    tails = [[sum(row[t:]) for t in range(len(row))] for row in moves]
    return all(
        a <= b + 1e-12
        for low, high in itertools.pairwise(tails)
        for a, b in zip(low, high, strict=True)
    )


def change(moves, delays) -> list[float]:
    """E[d(s')|s] - d(s)."""
    return [
        sum(p * d for p, d in zip(row, delays, strict=True)) - delays[s]
        for s, row in enumerate(moves)
    ]


@st.composite
def chains(draw):
    """Three delays and a monotone chain: rows are mixtures that lean further out with s."""
    steps = draw(st.lists(st.floats(0.01, 40.0), min_size=3, max_size=3))
    delays = list(itertools.accumulate(steps))
    cuts = sorted(draw(st.lists(share, min_size=3, max_size=3)), reverse=True)
    more = sorted(draw(st.lists(share, min_size=3, max_size=3)))
    # P(s' >= 1 | s) = 1 - cuts[s], P(s' = 2 | s) = (1 - cuts[s]) * more[s]: both rise with s
    moves = [[c, (1.0 - c) * (1.0 - m), (1.0 - c) * m] for c, m in zip(cuts, more, strict=True)]
    return delays, moves


model = (st.floats(0.2, 0.95), st.floats(0.1, 5.0), st.floats(0.01, 5.0))


@given(chains(), *model)
def test_thresholds_rise_with_the_state(chain, alpha, draft, verify):
    """Monotone chain and a change that does not rise with s: the condition of the docstring."""
    delays, moves = chain
    assert monotone(moves)
    changes = change(moves, delays)
    assume(all(a >= b for a, b in itertools.pairwise(changes)))
    costs, tokens = grid(delays, alpha, 12, draft, verify)
    k = solve(costs, tokens, moves, [1 / 3] * 3, precision=FINE).thresholds
    assert list(k) == sorted(k)


@given(
    st.lists(st.floats(0.01, 40.0), min_size=4, max_size=4),
    st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4),
    share,
    st.lists(st.floats(0.001, 3.0), min_size=12, max_size=12),
    st.lists(st.floats(0.05, 1.0), min_size=12, max_size=12),
)
def test_also_for_any_costs_and_any_curve(steps, law, pace, dearer, ratios):
    """Four states that move to a common law, any rising N(n, 0), any S."""
    delays = list(itertools.accumulate(steps))
    common = [[x / sum(law) for x in law]] * 4
    bare = list(itertools.accumulate(dearer))
    survival = list(itertools.accumulate(ratios, lambda a, b: a * b))
    costs = [[n + 2.0 * d for d in delays] for n in bare]
    tokens = expected_tokens(survival)[1:]
    k = solve(costs, tokens, slowed(common, pace), [0.25] * 4, precision=FINE).thresholds
    assert list(k) == sorted(k)


def test_monotone_alone_is_not_enough():
    """Thm 4 as printed asks for d rising and P stochastically monotone. Here both hold, and the
    thresholds fall: the middle state is about to get far worse, so it stops at once."""
    delays = [0.0, 0.1, 100.0]
    moves = [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]
    assert monotone(moves)
    assert change(moves, delays) == pytest.approx([0.0, 99.9, 0.0])
    costs, tokens = grid(delays, 0.9, 20, 1.0, 0.5)
    k = solve(costs, tokens, moves, [0.4, 0.4, 0.2], precision=FINE).thresholds
    assert k[1] == 1 < k[0]


# ------------------------------------------------------------------------------ the chain, learnt


def test_transitions_begin_with_staying():
    moves = Transitions()
    total = STAY_PRIOR + MOVE_PRIOR
    assert moves.matrix(2) == [
        pytest.approx([STAY_PRIOR / total, MOVE_PRIOR / total]),
        pytest.approx([MOVE_PRIOR / total, STAY_PRIOR / total]),
    ]
    assert moves.visits(2) == [0.5, 0.5]


def test_transitions_are_counted():
    moves = Transitions()
    for state in (0, 0, 1):
        moves.observe(state)
    stay, leave = TRANSITION_FORGET, 1.0
    total = stay + leave + STAY_PRIOR + MOVE_PRIOR
    assert moves.matrix(2)[0] == pytest.approx(
        [(stay + STAY_PRIOR) / total, (leave + MOVE_PRIOR) / total]
    )
    assert moves.visits(2) == pytest.approx([(2.995) / 3.995, 1.0 / 3.995])


def test_a_switching_chain_is_learnt():
    moves = Transitions()
    for i in range(2000):
        moves.observe((i // 10) % 2)
    assert moves.matrix(2)[0] == pytest.approx([0.9, 0.1], abs=0.02)


def test_states_out_of_range():
    moves = Transitions()
    for state in (-3, 10**6):
        moves.observe(state)
    rows = moves.matrix(STATES)
    assert rows[0][STATES - 1] > MOVE_PRIOR
    assert all(sum(row) == pytest.approx(1.0) for row in rows)


def test_a_share_of_a_round():
    assert slowed([[0.9, 0.1], [0.2, 0.8]], 0.5) == [
        pytest.approx([0.95, 0.05]),
        pytest.approx([0.1, 0.9]),
    ]


# ------------------------------------------------------------------------------ the controller


class Geometric(PrefixCurve):
    def acceptance(self, index: int) -> float:
        return 0.8


def estimates(state: int = 0, *, levels: tuple[float, ...] = (0.004, 0.120)) -> Estimates:
    """Simulated costs as in the paper, ten times: a draft 10 ms, a row 5 ms; t_ar 200 ms."""
    return Estimates(
        round_trip=0.05,
        draft=0.010,
        verify=RowCosts([(1, 0.2), (2, 0.2), (20, 0.29)]),
        curve=Geometric(),
        delay_state=state,
        delay_levels=levels,
        rounds=100,
    )


def ask(controller, known: Estimates, room: int = 64, *, streaming: bool = False) -> int:
    question = Observation(now=0.0, room=room, estimates=known, streaming=streaming)
    answer = controller.decide(question)
    assert controller.decide(question) == answer, "asking twice is harmless"
    return answer.length


def done(controller, length: int, *, state: int = 0, seconds: float = float("nan")) -> None:
    controller.observe(
        Outcome(
            decision=Decision(length=length), drafted=length, accepted=0, strict=0, tokens=1,
            seconds=seconds, delay_state=state,
        ),
        0.0,
    )  # fmt: skip


FACTS = ControllerFacts(max_length=20)


def restless(controller, rounds: int = 300):
    """The link changed its state every third round."""
    for i in range(rounds):
        done(controller, 0, state=(i // 3) % 2)
    return controller


def test_it_follows_the_state():
    controller = restless(make("markov", replace(FACTS, options={"pace": 1.0})))
    assert controller.thresholds() == ()
    near, far = ask(controller, estimates(0)), ask(controller, estimates(1))
    assert (near, far) == controller.thresholds()
    assert near < far
    assert ask(controller, estimates(1), room=2) == 2
    assert ask(controller, estimates(1), room=0) == 0
    assert controller.stop_rule() is None


def test_pace_is_the_paper_s_form():
    fast = make("markov", replace(FACTS, options={"pace": 1.0}))
    slow = make("markov", replace(FACTS, options={"pace": 0.0}))
    for controller in (fast, slow):
        restless(controller)
    k = [(ask(c, estimates(0)), ask(c, estimates(1))) for c in (fast, slow)]
    # a chain that moves while drafting makes waiting in the far state worth more
    assert k[0][1] - k[0][0] > k[1][1] - k[1][0]


def test_it_is_solved_anew_every_few_rounds():
    controller = make("markov", replace(FACTS, options={"refresh": 4}))
    before = ask(controller, estimates(0))
    longer = replace(estimates(0), verify=RowCosts([(1, 0.9), (20, 0.9)]))
    for _ in range(3):
        assert ask(controller, longer) == before
        done(controller, before)
    assert ask(controller, longer) == before
    done(controller, before)
    assert ask(controller, longer) > before


def test_a_new_state_is_solved_at_once():
    controller = make("markov", FACTS)
    ask(controller, estimates(0, levels=()))
    assert len(controller.thresholds()) == 1
    ask(controller, estimates(2, levels=()))
    assert len(controller.thresholds()) == 3
    ask(controller, estimates(STATES + 5, levels=()))
    assert len(controller.thresholds()) == STATES


def test_states_without_levels_learn_their_delay():
    controller = make("markov", replace(FACTS, options={"refresh": 1, "pace": 1.0}))
    for i in range(100):
        state = (i // 5) % 2
        length = ask(controller, estimates(state, levels=()))
        predicted = controller._predicted[length]
        done(controller, length, state=state, seconds=predicted + (-0.045, 0.07)[state])
    near, far = ask(controller, estimates(0, levels=())), ask(controller, estimates(1, levels=()))
    assert near < far


def test_it_stops_where_the_cloud_alone_is_faster():
    controller = make("markov", replace(FACTS, options={"probe": 0.0}))
    hopeless = replace(estimates(1), verify=RowCosts([(1, 0.03)]))
    lengths = []
    for _ in range(4):
        lengths.append(ask(controller, hopeless))
        done(controller, lengths[-1])
    assert [x > 0 for x in lengths] == [True, False, False, False]


def test_streaming_is_left_to_specstop():
    known = estimates(1)
    got = ask(make("markov", FACTS), known, streaming=True)
    assert got == ask(make("specstop", FACTS), known, streaming=True) > 0


@pytest.mark.parametrize("options", [{"refresh": 0}, {"pace": 2.0}, {"strikes": 0}])
def test_options_out_of_range(options):
    with pytest.raises(ParameterError, match="must be in"):
        make("markov", ControllerFacts(options=options))
