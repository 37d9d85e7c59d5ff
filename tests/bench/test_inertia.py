"""Inertia statistics: literal windows, and laws with and without inertia."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.bench.inertia import (
    NAMES,
    POOLED,
    Cut,
    Inertia,
    Question,
    Series,
    measure,
    window_rates,
)

QUICK = Question(shuffles=200, resamples=400)


def bits(text: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.array([c == "1" for c in text])


def run(series: list[Series], question: Question = QUICK, seed: int = 0) -> list[Inertia]:
    return measure(series, question, np.random.default_rng(seed))


# -- windows ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "window", "rounds", "tiles"),
    [
        # 11 and the target's token, 0 and the target's in its place, 10
        ("111010", 2, (1.0, 0.0, 0.5), (1.0, 0.5, 0.5)),
        ("000", 2, (0.0, 0.0), (0.0,)),
        ("1101011", 3, (2 / 3, 1 / 3), (2 / 3, 2 / 3)),
        ("1", 2, (), ()),
        ("", 1, (), ()),
    ],
)
def test_windows_by_hand(
    text: str, window: int, rounds: tuple[float, ...], tiles: tuple[float, ...]
) -> None:
    assert window_rates(bits(text), window, Cut.ROUNDS) == pytest.approx(rounds)
    assert window_rates(bits(text), window, Cut.TILES) == pytest.approx(tiles)


# -- figures by hand ----------------------------------------------------------------------------


def test_correlation_and_its_control_by_hand() -> None:
    """0 0 1 1: pairs (0,0) (0,1) (1,1), r = 1/2. All orders of two zeros and two ones: the
    product of neighbours is 1 in a sixth of the pairs, so cov = 1/6 - 1/4, r = -1/3."""
    (found,) = run([Series(task="t", rates=(0.0, 0.0, 1.0, 1.0))], Question(shuffles=20_000))
    figure = found.figures["correlation"]
    assert figure.value == pytest.approx(0.5)
    assert figure.control == pytest.approx(-1 / 3, abs=0.03)
    assert figure.excess == pytest.approx(0.5 + 1 / 3, abs=0.03)
    # As large in 0011 and 1100 of the six orders.
    assert figure.p == pytest.approx(1 / 3, abs=0.02)
    assert figure.interval is figure.excess_interval is None, "one answer is no sample"


def test_after_a_high_and_a_low_history_by_hand() -> None:
    rates = (1.0, 1.0, 0.5, 0.0, 0.0, 0.25)
    question = Question(history=2, tau_high=0.75, tau_low=0.25, shuffles=10)
    (found,) = run([Series(task="t", rates=rates)], question)
    # Histories before windows 2..5: 1, .75, .25, 0; only the first and the last are beyond.
    assert (found.after_high, found.after_low) == (1, 1)
    assert found.figures["high"].value == 0.5
    assert found.figures["low"].value == 0.25
    assert found.figures["gap"].value == 0.25


def test_a_history_never_reaches_into_another_answer() -> None:
    one, two = Series(task="t", rates=(1.0,) * 5), Series(task="t", rates=(0.0, 1.0))
    (found,) = run([one, two])
    assert found.after_high == 0
    assert found.windows == 7


def test_nothing_to_correlate() -> None:
    (found,) = run([Series(task="t", rates=(0.5, 0.5, 0.5))] * 6)
    assert found.figures["correlation"].value is None
    assert found.figures["correlation"].p is None
    assert found.figures["high"].value is None
    with pytest.raises(ValueError, match="no answer has two windows"):
        run([Series(task="t", rates=(1.0,))])


def test_groups() -> None:
    a, b = Series(task="a", rates=(0.0, 1.0)), Series(task="b", rates=(1.0, 1.0))
    assert [g.group for g in run([b, a, b])] == [POOLED, "a", "b"]
    assert [g.group for g in run([b, b])] == ["b"], "one task is its own pool"
    assert set(run([a])[0].figures) == set(NAMES)


# -- laws ---------------------------------------------------------------------------------------


def independent(rates: np.ndarray, windows: int, seed: int) -> list[Series]:
    """Answers of fixed acceptance: windows of 4 independent tokens."""
    random = np.random.default_rng(seed)
    return [
        Series(task="t", rates=tuple(random.binomial(4, rate, size=windows) / 4)) for rate in rates
    ]


def persistent(answers: int, windows: int, seed: int) -> list[Series]:
    """Acceptance .2 or .9 that changes every ten windows on average, the same in all answers."""
    random = np.random.default_rng(seed)
    made = []
    for _ in range(answers):
        flips = random.random(windows) < 0.1
        rate = np.where((np.cumsum(flips) + random.integers(2)) % 2, 0.2, 0.9)
        made.append(Series(task="t", rates=tuple(random.binomial(4, rate) / 4)))
    return made


def test_a_mix_of_prompts_is_not_inertia() -> None:
    """Easy prompts and hard ones: neighbours correlate, the shuffle within a prompt takes it
    all, the shuffle over all prompts takes nothing of it."""
    (found,) = run(independent(np.tile([0.2, 0.5, 0.9], 14), 30, seed=3))
    figure = found.figures["correlation"]
    assert figure.value is not None
    assert figure.value > 0.4
    assert figure.global_control == pytest.approx(0.0, abs=0.02)
    assert figure.control == pytest.approx(figure.value, abs=0.06)
    assert figure.excess_interval is not None
    assert figure.excess_interval[0] < 0 < figure.excess_interval[1]
    gap = found.figures["gap"]
    assert gap.value is not None
    assert gap.value > 0.4
    assert gap.excess == pytest.approx(0.0, abs=0.1)


def test_inertia_within_prompts_is_found() -> None:
    (found,) = run(persistent(30, 40, seed=4))
    for name in ("correlation", "gap"):
        figure = found.figures[name]
        assert figure.excess_interval is not None
        assert figure.excess_interval[0] > 0.1
        assert figure.p == pytest.approx(1 / 201), "none of 200 shuffles reaches it"
    low = found.figures["low"]
    assert low.excess is not None
    assert low.excess < -0.1
    assert low.p == pytest.approx(1 / 201)


def test_false_alarms_are_as_rare_as_promised() -> None:
    """200 worlds without inertia: p <= .05 in about 10 of them. More than 22 happen with
    probability below 1e-3, and the seed is fixed."""
    question = Question(shuffles=99, resamples=1)
    alarms = 0
    for seed in range(200):
        (found,) = run(independent(np.array([0.3, 0.5, 0.7, 0.9]), 15, seed), question, seed)
        p = found.figures["correlation"].p
        assert p is not None
        alarms += p <= 0.05
    assert 1 <= alarms <= 22


def test_the_same_seed_gives_the_same_figures() -> None:
    series = persistent(6, 12, seed=5)
    assert run(series, seed=1) == run(series, seed=1) != run(series, seed=2)
