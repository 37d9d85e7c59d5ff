"""The verifier's own promises: history, logprobs, near-ties, open rejections, failed blocks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.draft import Draft
from outrider.core.relaxed import Policy
from outrider.core.rng import token_offsets
from outrider.core.sampling import Distribution, RowError
from outrider.core.tokens import Rule, SamplingParams, Verdict
from outrider.core.verify import ResidualStep, resolve_rejection
from outrider.session.verifier import Judgement, OpenRejection, Verifier

WIDTH = 6


def verifier(rule: Rule = Rule.COUPLED, *, ties: bool = False, **params) -> Verifier:
    return Verifier(
        SamplingParams(**params),
        rule,
        prompt=(0, 1),
        vocab_size=WIDTH,
        end_ids=frozenset(),
        watch_ties=ties,
        policy=Policy() if rule is Rule.RELAXED else None,
    )


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, WIDTH)).astype(np.float32) * 2


def even(*ids: int) -> Distribution:
    array = np.array(sorted(ids), dtype=np.int64)
    return Distribution(array, np.zeros(len(ids), dtype=np.float32), token_offsets(array))


@given(
    st.lists(st.lists(st.integers(0, WIDTH - 1), max_size=4), min_size=1, max_size=5),
    st.integers(0, 99),
)
def test_history_is_the_committed_output(blocks, seed):
    judge = verifier(seed=seed, frequency_penalty=0.5)
    committed = []
    for i, block in enumerate(blocks):
        judgement = judge.judge(Draft(tokens=tuple(block)), rows(len(block) + 1, i), 2)
        verdict = judgement.verdict
        committed += [*block[: verdict.accepted], verdict.token]
        assert judge.history.output == tuple(committed)


@given(st.lists(st.integers(0, WIDTH - 1), max_size=5), st.integers(0, 10**6))
def test_a_block_equals_its_tokens_one_by_one(block, seed):
    """Chunking of rounds changes nothing, with penalties that look at every token before."""
    params = {"seed": seed, "frequency_penalty": 0.7, "repetition_penalty": 1.3}
    table = rows(len(block) + 1, seed)
    whole, single = verifier(**params), verifier(**params)
    verdict = whole.judge(Draft(tokens=tuple(block)), table, 2).verdict
    fixed = [*block[: verdict.accepted], verdict.token]
    for i, token in enumerate(fixed):
        assert single.judge(Draft(), table[i : i + 1], 2 + i).verdict.token == token


def test_penalties_see_the_drafts_before_them():
    """Field case 07 at this level: the second h costs h its lead."""
    judge = verifier(temperature=0.0, frequency_penalty=0.4)
    row = np.array([2.0, 1.5, 0, 0, 0, 0], dtype=np.float32)
    verdict = judge.judge(Draft(tokens=(0, 0, 0)), np.tile(row, (4, 1)), 2).verdict
    assert verdict == Verdict(drafted=3, accepted=2, token=1)


def test_rows_must_fit_the_block():
    with pytest.raises(ValueError, match="2 rows for a block of 2 drafts"):
        verifier().judge(Draft(tokens=(1, 2)), rows(2), 2)


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_failed_block_leaves_no_trace(rule, bad):
    """The same block judged again after a broken row gives what it would have given (I4)."""
    one = even(0)
    draft = Draft(tokens=(0, 0), q=(1.0, 1.0), rows=(one, one))
    good = np.zeros((3, WIDTH), dtype=np.float32)
    good[:, 0] = 30.0
    broken = good.copy()
    broken[bad, 3] = math.nan
    judge = verifier(rule)
    judge.judge(Draft(), good[:1], 2)
    with pytest.raises(RowError):
        judge.judge(draft, broken, 3)
    assert judge.history.output == (0,)
    with pytest.raises(ValueError, match="no block"):
        judge.settle(Verdict(drafted=2, accepted=0, token=1))
    found = judge.judge(draft, good, 3).verdict
    assert (found.drafted, found.accepted, found.token) == (2, 2, 0)
    assert judge.history.output == (0, 0, 0, 0)


def test_a_rejection_without_q_stays_open_until_settled():
    impossible = np.full((2, WIDTH), -np.inf, dtype=np.float32)
    impossible[:, :2] = 0.0  # p: half 0, half 1
    q = even(1, 2)
    judge = verifier(Rule.RATIO)
    opened = judge.judge(Draft(tokens=(2,), q=(0.5,)), impossible, 2)
    assert isinstance(opened, OpenRejection)
    assert (opened.drafted, opened.accepted, opened.rejection.token) == (1, 0, 2)
    token, step = resolve_rejection(opened.rejection, opened.p, q, seed=0)
    settled = judge.settle(Verdict(drafted=1, accepted=0, token=token), step)
    at_once = verifier(Rule.RATIO).judge(Draft(tokens=(2,), q=(0.5,), rows=(q,)), impossible, 2)
    assert settled == at_once
    assert settled.verdict.token == 0  # all the leftover mass
    assert settled.residual in set(ResidualStep)
    assert judge.history.output == (0,)


def test_logprobs_for_accepted_corrected_and_bonus():
    table = np.log(np.array([[0.5, 0.3, 0.2, 0, 0, 0]] * 3) + 1e-30).astype(np.float32)
    judge = verifier(temperature=0.0, logprobs=2)
    accepted = judge.judge(Draft(tokens=(0, 1)), table, 2)
    assert accepted.verdict == Verdict(drafted=2, accepted=1, token=0)
    assert [e.token for e in accepted.logprobs] == [0, 0]
    assert [e.logprob for e in accepted.logprobs] == pytest.approx([math.log(0.5)] * 2, abs=1e-6)
    assert [t for t, _ in accepted.logprobs[0].top] == [0, 1]
    assert verifier().judge(Draft(), table[:1], 2).logprobs == ()
    # Field case 26's numbers, a row of its own for each: two accepted, then the bonus.
    table = np.full((3, WIDTH), -30.0, dtype=np.float32)
    for row, (p, others) in zip(table, ((0.5, 1), (0.3, 2), (0.2, 4)), strict=True):
        row[3] = np.log(p)
        row[[0, 1, 2, 4][:others]] = np.log((1 - p) / others)
    forced = verifier(temperature=0.0, logprobs=0, logit_bias={3: 50.0})
    judged = forced.judge(Draft(tokens=(3, 3)), table, 2)
    assert judged.verdict == Verdict(drafted=2, accepted=2, token=3)
    found = [e.logprob for e in judged.logprobs]
    assert found == pytest.approx([-0.693147, -1.203973, -1.609438], abs=1e-5)


# -- near-ties ----------


def close(*gaps: float) -> np.ndarray:
    table = np.zeros((len(gaps), WIDTH), dtype=np.float32)
    table[:, 1] = 5.0
    table[:, 2] = 5.0 - np.array(gaps)
    return table


def test_near_ties_are_told_for_each_token():
    judge = verifier(temperature=0.0, ties=True)
    judgement = judge.judge(Draft(tokens=(1, 1)), close(0.05, 3.0, 0.02), 2)
    assert judgement.near_ties == (True, False, True)
    judgement = judge.judge(Draft(tokens=(3, 1)), close(0.05, 0.05, 0.05), 2)
    assert judgement.near_ties == (True,)  # rows behind the rejection were never used


def test_near_ties_are_watched_where_a_token_is_promised():
    assert verifier(temperature=0.0).judge(Draft(), close(0.0), 2).near_ties == ()
    ratio = verifier(Rule.RATIO, temperature=0.0, ties=True)
    assert ratio.judge(Draft(), close(0.0), 2).near_ties == ()


def test_near_ties_at_a_temperature_come_as_often_as_they_should():
    """Two even ids: the gap of their log-scores is logistic, P(|gap| < .1) = tanh(.05)."""
    row = np.full((1, WIDTH), -np.inf, dtype=np.float32)
    row[:, :2] = 0.0
    judge = verifier(ties=True, seed=3)
    n = 4000
    found = sum(judge.judge(Draft(), row, 2 + i).near_ties[0] for i in range(n))
    expected = math.tanh(0.05)
    assert found / n == pytest.approx(expected, abs=3.3 * math.sqrt(expected / n))


def test_judgements_are_values():
    assert isinstance(verifier().judge(Draft(), rows(1), 2), Judgement)
    assert verifier(seed=1).judge(Draft(), rows(1), 2) == verifier(seed=1).judge(
        Draft(), rows(1), 2
    )
