"""Filters against slow obvious references, draws against brute force, laws against counts."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from laws import ALARM, fit
from outrider.core import rng
from outrider.core.rng import Purpose
from outrider.core.sampling import (
    Distribution,
    History,
    RowError,
    SamplingPipeline,
    token_logprob,
)
from outrider.core.tokens import SamplingParams

NOTHING = History([0])


def row(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def log_row(*p: float) -> np.ndarray:
    return np.array([math.log(x) if x else -math.inf for x in p], dtype=np.float32)


def law(params: SamplingParams, logits: np.ndarray, history: History = NOTHING, **more):
    pipeline = SamplingPipeline(params, vocab_size=len(logits), **more)
    return pipeline.distribution(logits, history)


def make(weights: np.ndarray) -> Distribution:
    ids = np.arange(len(weights), dtype=np.int64)
    return Distribution(ids, weights, rng.token_offsets(ids))


# Logits on a coarse grid, so that exact ties are common, and some impossible ids.
GRID = st.integers(-40, 40).map(lambda n: n / 8)
LOGITS = st.lists(st.one_of(GRID, GRID, GRID, st.just(-math.inf)), min_size=1, max_size=200).filter(
    lambda values: max(values) > -math.inf
)


# -- filters, one by one, against the obvious ---------------------------------------------------


def ranked(logits: list[float]) -> list[int]:
    """Ids from likeliest to least likely; among equals the lower id first."""
    return sorted(range(len(logits)), key=lambda i: (-logits[i], i))


def shares(logits: list[float]) -> list[float]:
    total = math.fsum(math.exp(x) for x in logits)
    return [math.exp(x) / total for x in logits]


@given(LOGITS, st.integers(1, 220))
def test_top_k(logits, k):
    kept = law(SamplingParams(top_k=k), row(*logits)).ids.tolist()
    assert kept == sorted(ranked(logits)[:k])


@given(LOGITS, st.floats(0.01, 0.999999))
def test_top_p(logits, top_p):
    p = shares(logits)
    order = ranked(logits)
    reached = np.cumsum([p[i] for i in order])
    assume(np.abs(reached - top_p).min() > 1e-6)  # at the very border float32 may decide
    count = int(np.argmax(reached >= top_p)) + 1
    kept = law(SamplingParams(top_p=top_p), row(*logits)).ids.tolist()
    assert kept == sorted(order[:count])


@pytest.mark.parametrize("shape", ["peaky", "flat", "steps", "huge range", "one", "even"])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.99, 1 - 1e-9, 1 - 2**-53])
def test_top_p_on_wide_rows(shape, top_p):
    """The bisection of wide rows, against a full sort."""
    source = np.random.default_rng(5)
    n = 3000
    logits = {
        "peaky": -1.6 * np.log(source.permutation(n) + 1.0),
        "flat": source.normal(0, 0.01, n),
        "steps": source.integers(0, 3, n) * 2.0,
        "huge range": source.normal(0, 300, n),
        "one": np.where(np.arange(n) == 1234, 50.0, -50.0),
        "even": np.zeros(n),
    }[shape].astype(np.float32)
    kept = law(SamplingParams(top_p=top_p), logits).ids
    wide = logits.astype(float)
    p = np.exp(wide - wide.max())
    p /= p.sum()
    order = np.lexsort((np.arange(n), -wide))
    assert kept.tolist() == sorted(order[: len(kept)].tolist())  # a head of the ranking
    inside, last = p[kept].sum(), p[order[len(kept) - 1]]
    assert inside >= top_p - 1e-6
    assert inside - last < top_p + 1e-6 or len(kept) == 1  # and the smallest one


@given(LOGITS, st.floats(0.0001, 1.0))
def test_min_p(logits, min_p):
    best = max(logits)
    assume(all(abs(x - best - math.log(min_p)) > 1e-9 for x in logits))
    kept = law(SamplingParams(min_p=min_p), row(*logits)).ids.tolist()
    assert kept == [i for i, x in enumerate(logits) if math.exp(x - best) >= min_p]


def test_min_p_one_keeps_the_likeliest_and_its_equals():
    assert law(SamplingParams(min_p=1.0), row(1, 3, 3, 2)).ids.tolist() == [1, 2]


@given(LOGITS, st.floats(0.05, 20))
def test_temperature(logits, t):
    p = law(SamplingParams(temperature=t), row(*logits)).probabilities()
    assert p == pytest.approx(shares([x / t for x in logits]), abs=1e-5)
    assert p.sum() == pytest.approx(1, abs=1e-12)


# -- the whole pipeline against a reference -----------------------------------------------------


def reference(
    params: SamplingParams,
    logits: list[float],
    prompt: list[int],
    output: list[int],
    ends: set[int],
) -> dict[int, float] | None:
    """The documented order, one id at a time. None: a filter decides at its very border."""
    p = params
    x = list(logits)
    for i in range(len(x)):
        if i in prompt or i in output:
            x[i] = x[i] / p.repetition_penalty if x[i] > 0 else x[i] * p.repetition_penalty
        if i in output:
            x[i] -= p.presence_penalty + p.frequency_penalty * output.count(i)
        x[i] += p.logit_bias.get(i, 0.0)
        if len(output) < p.min_tokens and (i in ends or i in p.stop_token_ids):
            x[i] = -math.inf
    if max(x) == -math.inf:
        return None
    order = ranked(x)
    gaps = [a - b for a, b in zip([x[i] for i in order], [x[i] for i in order[1:]], strict=False)]
    if any(0 < gap < 1e-4 for gap in gaps):
        return None  # float32 and float64 may rank them differently
    if p.temperature == 0:
        return {order[0]: 1.0}
    weight = {i: math.exp((x[i] - x[order[0]]) / p.temperature) for i in order}
    if p.top_k:
        order = order[: p.top_k]
    total = math.fsum(weight[i] for i in order)
    reached, kept = 0.0, []
    for i in order:
        if p.top_p < 1 and abs(reached - p.top_p * total) < 1e-4 * total:
            return None
        if p.top_p < 1 and reached >= p.top_p * total:
            break
        kept.append(i)
        reached += weight[i]
    if any(abs(weight[i] - p.min_p) < 1e-4 for i in kept[1:]):
        return None
    kept = [i for i in kept if weight[i] >= p.min_p]
    total = math.fsum(weight[i] for i in kept)
    return {i: weight[i] / total for i in kept}


WIDTH = 12
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 3, 5, 50]),
    top_p=st.sampled_from([1.0, 1.0, 0.35, 0.9]),
    min_p=st.sampled_from([0.0, 0.0, 0.07]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.6, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.45, -0.3]),
    logit_bias=st.dictionaries(st.integers(0, WIDTH - 1), st.floats(-100, 100), max_size=3),
    max_tokens=st.just(100),
    min_tokens=st.sampled_from([0, 3, 50]),
    stop_token_ids=st.frozensets(st.integers(0, WIDTH - 1), max_size=2),
)
IDS = st.lists(st.integers(0, WIDTH - 1), max_size=10)
WHOLE = st.lists(st.floats(-8, 8, width=32), min_size=WIDTH, max_size=WIDTH)


@given(PARAMS, WHOLE, IDS, IDS, st.frozensets(st.integers(0, WIDTH - 1), max_size=2))
def test_pipeline(params, logits, prompt, output, ends):
    expected = reference(params, logits, prompt, output, set(ends))
    assume(expected is not None)
    got = law(params, row(*logits), History(prompt, output), end_ids=ends)
    found = {int(i): p for i, p in zip(got.ids, got.probabilities(), strict=True) if p > 0}
    expected = {i: p for i, p in expected.items() if p > 0}
    assert found == pytest.approx(expected, abs=2e-5)


@given(PARAMS, WHOLE, IDS, IDS, st.frozensets(st.integers(0, WIDTH - 1), min_size=1), IDS)
def test_reduced_support_is_the_dense_row_without_the_others(
    params, logits, prompt, output, support, ends
):
    """A draft with a reduced output draws as if every other id were impossible, and with the
    same noise: the dense row gives the same token for every key."""
    ids = np.array(sorted(support), dtype=np.int64)
    dense = row(*[x if i in support else -math.inf for i, x in enumerate(logits)])
    narrow = dense[ids]
    pushed = np.full(WIDTH, -np.inf, dtype=np.float32)
    pushed[ids] = narrow
    history = History(prompt, output)
    more = {"vocab_size": WIDTH, "end_ids": frozenset(ends)}
    try:
        wide = SamplingPipeline(params, **more).distribution(dense, history)
    except RowError:
        with pytest.raises(RowError):
            SamplingPipeline(params, support=ids, **more).distribution(narrow, history)
        return
    small = SamplingPipeline(params, support=ids, **more).distribution(narrow, history)
    assert small.dense(WIDTH) == pytest.approx(wide.dense(WIDTH), abs=1e-12)
    for position in range(5):
        draw_key = rng.key(1, Purpose.TOKEN, position)
        assert small.draw(draw_key) == wide.draw(draw_key)


def test_order_of_filters():
    """Cases where any two neighbours swapped would give another set."""
    x = log_row(0.4, 0.3, 0.2, 0.1)
    # top-k first: .4/.7 = .571 < .6, so both stay; top-p .6 first would keep two of four too,
    # but .571 is what the second filter must see.
    assert law(SamplingParams(top_k=2, top_p=0.571), x).ids.tolist() == [0]
    assert law(SamplingParams(top_p=0.571), x).ids.tolist() == [0, 1]
    # temperature before top-p: a flatter row needs more ids
    assert law(SamplingParams(temperature=10.0, top_p=0.7), x).ids.tolist() == [0, 1, 2]
    assert law(SamplingParams(temperature=1.0, top_p=0.7 - 1e-6), x).ids.tolist() == [0, 1]
    # temperature before min-p: flattened, .1/.4 = .25 becomes .87
    assert len(law(SamplingParams(temperature=10.0, min_p=0.5), x).ids) == 4
    # penalty before bias: 2/2 + 1 = 2, not (2 + 1)/2
    d = law(SamplingParams(repetition_penalty=2.0, logit_bias={0: 1.0}), row(2, 0), History([0]))
    assert d.weights.tolist() == [2.0, 0.0]
    # repetition before presence and frequency: 2/2 - .5 - 2*.25
    d = law(
        SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25),
        row(2, -3),
        History([1], [0, 0]),
    )
    assert d.weights.tolist() == [0.0, -6.0]


def test_ties_go_to_the_lower_id():
    assert law(SamplingParams(top_k=2), row(1, 1, 1, 0)).ids.tolist() == [0, 1]
    assert law(SamplingParams(top_p=0.5), row(1, 1, 1, 1)).ids.tolist() == [0, 1]
    assert law(SamplingParams(temperature=0), row(0, 1, 1, 0)).ids.tolist() == [1]
    assert make(row(0, 1, 1)).likeliest() == 1


@given(st.lists(st.integers(-40, 40), min_size=1, max_size=40, unique=True), PARAMS)
def test_zero_is_the_limit_of_small_temperatures(logits, params):
    """Without ties, T = 0 is where T -> 0 goes, whatever the filters."""
    params = dataclasses.replace(params, logit_bias={}, min_tokens=0, stop_token_ids=frozenset())
    cold = law(dataclasses.replace(params, temperature=0.0), row(*logits))
    cool = law(dataclasses.replace(params, temperature=0.001), row(*logits))
    assert cold.ids.tolist() == [cool.likeliest()]
    assert cold.prob(int(cold.ids[0])) == 1.0
    assert cool.prob(cool.likeliest()) == pytest.approx(1.0, abs=1e-9)
    for position in range(3):
        key = rng.key(3, Purpose.TOKEN, position)
        assert cold.draw(key) == cool.draw(key)


def test_end_ids_wait_for_min_tokens():
    params = SamplingParams(min_tokens=2, stop_token_ids=frozenset({1, 99}))
    pipeline = SamplingPipeline(params, vocab_size=4, end_ids=frozenset({3}))
    history = History([1, 3])
    for token in (0, 0):
        d = pipeline.distribution(row(0, 9, 0, 9), history)
        assert d.prob(1) == d.prob(3) == 0.0
        history.push(token)
    assert pipeline.distribution(row(0, 9, 0, 9), history).prob(1) > 0.4


def test_the_row_is_never_written_to():
    x = row(1, 2, 3)
    x.flags.writeable = False
    law(
        SamplingParams(
            temperature=0.5, repetition_penalty=2.0, logit_bias={1: 5}, min_tokens=1, top_p=0.9
        ),
        x,
        History([0], []),
        end_ids=frozenset({2}),
    )


# -- rows that cannot be sampled ----------------------------------------------------------------

BROKEN = {
    "nan": row(1, math.nan, 2),
    "all nan": row(math.nan, math.nan, math.nan),
    "plus inf": row(1, math.inf, 2),
    "nothing possible": row(-math.inf, -math.inf, -math.inf),
}
EVERY_WAY = [
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.5),
    SamplingParams(top_k=2),
    SamplingParams(top_p=0.5),
    SamplingParams(min_p=0.5),
    SamplingParams(repetition_penalty=1.5),
]


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("params", EVERY_WAY, ids=range(len(EVERY_WAY)))
def test_a_broken_row_is_one_clear_error(name, params):
    with pytest.raises(RowError, match="cannot be sampled"):
        law(params, BROKEN[name])


@pytest.mark.parametrize("params", EVERY_WAY, ids=range(len(EVERY_WAY)))
def test_minus_inf_entries_are_fine(params):
    d = law(params, row(-math.inf, 1, -math.inf, 2))
    assert {d.draw(rng.key(1, Purpose.TOKEN, n)) for n in range(50)} <= {1, 3}


@pytest.mark.parametrize("support", [[], [3, 1], [1, 1]])
def test_support_must_ascend(support):
    with pytest.raises(ValueError, match="ascending"):
        SamplingPipeline(SamplingParams(), vocab_size=5, support=np.array(support, dtype=np.int64))


def test_ids_outside_the_vocabulary_are_ignored():
    params = SamplingParams(
        logit_bias={7: 5.0, 1: 2.0}, stop_token_ids=frozenset({9}), min_tokens=1
    )
    assert law(params, row(0, 0, 0), History([50])).weights.tolist() == [0, 2, 0]


# -- history ------------------------------------------------------------------------------------


@given(IDS, st.lists(st.one_of(st.integers(0, 400), st.just("pop"), st.just("cut")), max_size=300))
def test_history_equals_one_made_afresh(prompt, actions):
    history = History(prompt)
    output: list[int] = []
    for action in actions:
        if action == "pop":
            if output:
                assert history.pop() == output.pop()
        elif action == "cut":
            del output[len(output) // 2 :]
            history.truncate(len(output))
        else:
            history.push(action)
            output.append(action)
    counts = Counter(output)
    assert history.output == tuple(output)
    assert len(history) == len(output)
    assert dict(zip(history.distinct.tolist(), history.times.tolist(), strict=True)) == counts
    assert sorted(history.seen.tolist()) == sorted({*prompt, *output})


@given(PARAMS, WHOLE, IDS, IDS, IDS)
def test_penalties_after_rollback_equal_recomputed(params, logits, prompt, output, detour):
    """Bit for bit: drafts pushed and taken back leave no trace."""
    travelled = History(prompt, output)
    for token in detour:
        travelled.push(token)
    travelled.truncate(len(output))
    assume(reference(params, logits, prompt, output, set()) is not None)
    a = law(params, row(*logits), travelled)
    b = law(params, row(*logits), History(prompt, output))
    assert a.ids.tolist() == b.ids.tolist()
    assert a.weights.tolist() == b.weights.tolist()


def test_history_grows_past_its_first_room():
    output = [i % 200 for i in range(500)]
    history = History([0, 1], output)
    assert dict(zip(history.distinct.tolist(), history.times.tolist(), strict=True)) == Counter(
        output
    )
    assert sorted(history.seen.tolist()) == list(range(200))
    history.truncate(130)
    assert history.distinct.tolist() == list(range(130))
    assert set(history.times.tolist()) == {1.0}


# -- draw: the float64 argmin over all ids ------------------------------------------------------


def brute_force(d: Distribution, draw_key: int) -> int:
    e = rng.exponentials(rng.integers(draw_key, rng.token_offsets(d.ids)))
    with np.errstate(divide="ignore", over="ignore"):
        scores = e / d.probabilities()
    return int(d.ids[int(scores.argmin())])


def rows_of_all_kinds(count: int):
    source = np.random.default_rng(11)
    for i in range(count):
        n = int(source.choice([1, 2, 3, 17, 64, 65, 66, 200, 1000, 5000]))
        scale = float(source.choice([0.0, 0.1, 1.0, 4.0, 30.0, 1000.0]))
        w = (source.standard_normal(n) * scale + source.choice([0, -500, 500])).astype(np.float32)
        if i % 3 == 0:
            w[source.random(n) < 0.4] = -np.inf
            w[int(source.integers(n))] = 1.0
        if i % 5 == 0:  # exact ties
            w[source.integers(0, n, size=n // 2)] = w.max()
        yield w, int(source.integers(0, 2**63))


def test_draw_is_the_argmin_over_all_ids():
    seen = Counter()
    for w, key in rows_of_all_kinds(4000):
        d = make(w)
        got = d.draw(key)
        assert got == brute_force(d, key)
        assert d.weights[got] > -math.inf
        seen[got == d.likeliest()] += 1
    assert seen[True] > 300
    assert seen[False] > 300


def test_draw_with_lent_memory_is_the_same():
    pipeline = SamplingPipeline(SamplingParams(), vocab_size=5000)
    source = np.random.default_rng(3)
    rows = source.standard_normal((50, 5000)).astype(np.float32) * 3
    dists = [pipeline.distribution(r, NOTHING) for r in rows]
    keys = [rng.key(4, Purpose.TOKEN, i) for i in range(50)]
    drawn = [d.draw(k) for d, k in zip(dists, keys, strict=True)]
    assert drawn == [brute_force(d, k) for d, k in zip(dists, keys, strict=True)]
    assert drawn == [make(r).draw(k) for r, k in zip(rows, keys, strict=True)]


def test_equal_scores_go_to_the_lower_id(monkeypatch):
    monkeypatch.setattr(rng, "exponentials", lambda x: np.ones(len(x)))
    assert make(row(1, 2, 2, 0)).draw(7) == 1


@pytest.mark.parametrize("width", [4, 500])
def test_law_of_draw(width):
    """Narrow rows are decided at once, wide ones after ruling ids out: both have the law."""
    source = np.random.default_rng(1)
    d = make((source.standard_normal(width) * 2).astype(np.float32))
    drawn = [d.draw(rng.key(17, Purpose.TOKEN, n)) for n in range(8_000)]
    assert fit(np.bincount(drawn, minlength=width), d.probabilities()) > ALARM


def test_law_of_filtered_draws():
    params = SamplingParams(temperature=0.7, top_k=4, top_p=0.95, min_p=0.02)
    p = log_row(0.35, 0.25, 0.2, 0.1, 0.06, 0.04)
    d = law(params, p)
    expected = reference(params, p.tolist(), [], [], set())
    drawn = [d.draw(rng.key(2, Purpose.TOKEN, n)) for n in range(8_000)]
    counts = np.bincount(drawn, minlength=6)
    assert fit(counts, [expected.get(i, 0.0) for i in range(6)]) > ALARM


# -- coupling -----------------------------------------------------------------------------------


def match_probability(p: list[Fraction], q: list[Fraction]) -> float:
    """docs/architecture.md: sum over v of 1 / (sum over u of max(p_u/p_v, q_u/q_v))."""
    total = Fraction(0)
    for a, b in zip(p, q, strict=True):
        if a and b:
            total += 1 / sum(max(x / a, y / b) for x, y in zip(p, q, strict=True))
    return float(total)


PAIRS = {
    "near": ((5, 3, 1, 1), (4, 4, 1, 1)),
    "far": ((7, 1, 1, 1), (1, 1, 1, 7)),
    "half": ((4, 3, 2, 1), (1, 2, 3, 4)),
    "missing ids": ((5, 5, 0, 0), (0, 4, 3, 3)),
    "one-hot q": ((4, 3, 2, 1), (0, 10, 0, 0)),
    "same": ((4, 3, 2, 1), (4, 3, 2, 1)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_coupled_draws_match_as_often_as_the_formula_says(name):
    p, q = ([Fraction(n, 10) for n in side] for side in PAIRS[name])
    expected = match_probability(p, q)
    distance = float(sum(max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)))
    assert expected >= (1 - distance) / (1 + distance) - 1e-12
    assert expected <= 1 - distance + 1e-12  # no coupling does better
    target, draft = make(log_row(*map(float, p))), make(log_row(*map(float, q)))
    n = 10_000
    keys = [rng.key(23, Purpose.TOKEN, i) for i in range(n)]
    rate = sum(target.draw(k) == draft.draw(k) for k in keys) / n
    assert rate == pytest.approx(
        expected, abs=3.5 * math.sqrt(expected * (1 - expected) / n) + 1e-12
    )


# -- margins ------------------------------------------------------------------------------------


def test_margin_is_the_gap_of_the_two_best_noisy_scores():
    found = 0
    for w, key in rows_of_all_kinds(1500):
        d = make(w)
        if len(w) == 1:
            assert d.margin(key, 0.5) == math.inf
            continue
        e = rng.exponentials(rng.integers(key, rng.token_offsets(len(w))))
        with np.errstate(divide="ignore"):
            scores = np.sort(np.log(e) - (w.astype(float) - float(w.max())))
        gap = scores[1] - scores[0]
        expected = gap if gap <= 0.5 else math.inf
        assert d.margin(key, 0.5) == pytest.approx(expected, rel=1e-9, abs=1e-12)
        found += gap <= 0.5
    assert found > 100


def test_margin_at_temperature_zero_is_the_logit_gap():
    params = SamplingParams(temperature=0.0)
    d = law(params, row(1, 3, 2.75), watch_ties=True)
    assert d.gap == 0.25
    assert d.margin(1, 0.3) == 0.25
    assert d.margin(1, 0.2) == math.inf
    assert law(params, row(1, 3, 2.75)).gap == math.inf  # not asked for
    assert law(params, row(5), watch_ties=True).gap == math.inf


# -- probabilities of single ids ----------------------------------------------------------------


@given(LOGITS)
def test_prob_is_the_entry_of_the_row(logits):
    d = law(SamplingParams(top_k=20), row(*logits))
    dense = d.dense(len(logits))
    for token in range(-1, len(logits) + 1):
        expected = dense[token] if 0 <= token < len(logits) else 0.0
        assert d.prob(token) == pytest.approx(expected, rel=1e-12)
    assert d.log_total == pytest.approx(math.log(math.fsum(np.exp(d.weights.astype(float)))))


def test_logprobs_are_the_models_own():
    """Field case 26's numbers: raw row, whatever temperature and filters did to the draw."""
    x = log_row(0.5, 0.3, 0.2, 0.0)
    ids = np.arange(4)
    entry = token_logprob(x, ids, 1, 0)
    assert entry.logprob == pytest.approx(-1.203973, abs=1e-5)
    assert entry.top == ()
    entry = token_logprob(x, ids, 2, 20)
    assert entry.logprob == pytest.approx(-1.609438, abs=1e-5)
    assert [t for t, _ in entry.top] == [0, 1, 2]  # id 3 is impossible: no -inf for JSON
    assert [math.exp(v) for _, v in entry.top] == pytest.approx([0.5, 0.3, 0.2], abs=1e-6)
    assert token_logprob(row(1, 1, 1), np.arange(3), 0, 2).top[0][0] == 0
