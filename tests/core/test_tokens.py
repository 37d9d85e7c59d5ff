"""Parameters are checked at construction, and every refusal names its field (field case 25)."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.tokens import (
    MAX_SEED,
    Origin,
    ParameterError,
    SamplingParams,
    TokenLogprob,
    Verdict,
)

HUGE = 10**400  # JSON may bring an integer that no float can hold
REFUSED = {
    "temperature": [-1, 1e9, "hot", True, None, math.nan, math.inf, -math.inf, HUGE, -HUGE, [1]],
    "top_k": [-1, 1.5, "4", True, None, 2**31, HUGE],
    "top_p": [-1, 0, 1.5, "x", False, math.nan, HUGE],
    "min_p": [-0.1, 1.1, math.nan, None],
    "repetition_penalty": [0, -1, 1e-40, 101, math.inf, "1"],
    "presence_penalty": [-2.1, 2.1, math.nan, "x"],
    "frequency_penalty": [-2.1, 2.1, math.nan, HUGE],
    "max_tokens": [0, -1, 1.5, 1e12, 10**12, "5", True, None, HUGE],
    "min_tokens": [-1, 257, 1.0, None],
    "seed": [-1, 2**63, 1.5, "1", True, None, HUGE],
    "logprobs": [-1, 21, 1.0, True, "all"],
    "ignore_eos": [1, 0, "no", None],
    "logit_bias": [
        {"abc": 1},
        {"5": 1},
        {-1: 1},
        {2**31: 1},
        {1: "x"},
        {1: math.nan},
        {1: 100.5},
        {True: 1},
        dict.fromkeys(range(1025), 1),
        [1],
        None,
        "1=2",
        5,
    ],
    "stop": [("",), ("a",) * 1000, ("x" * 257,), (1,), "END", None, 5, {"a": 1}, (None,)],
    "given": [(-1,), ("a",), (1.0,), (2**31,), (0,) * 257, 5, None, "12"],
    "stop_token_ids": [
        frozenset({-1}),
        frozenset({"a"}),
        frozenset({1.0}),
        frozenset({2**31}),
        frozenset(range(1025)),
        5,
        None,
        "12",
    ],
}
CASES = [(name, value) for name, values in REFUSED.items() for value in values]


@pytest.mark.parametrize(("name", "value"), CASES, ids=[f"{n}={str(v)[:20]}" for n, v in CASES])
def test_refused_by_name(name, value):
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == name
    message = str(caught.value)
    assert message.startswith(f"{name}: ")
    assert len(message) < 200
    assert "\n" not in message


def test_no_value_makes_a_long_message():
    for value in ("x" * 10**6, 10**5000, [0] * 10**5):
        with pytest.raises(ParameterError) as caught:
            SamplingParams(temperature=value)
        assert len(str(caught.value)) < 200


ALLOWED = {
    "temperature": [0, 0.0, 1e-30, 1, 100.0],
    "top_k": [0, 1, 2**31 - 1],
    "top_p": [1e-9, 0.5, 1, 1.0],
    "min_p": [0, 1],
    "repetition_penalty": [0.01, 1, 100],
    "presence_penalty": [-2, 2],
    "max_tokens": [1, 1_000_000],
    "min_tokens": [0, 256],
    "seed": [0, MAX_SEED],
    "logprobs": [None, 0, 20],
    "ignore_eos": [True, False],
    "logit_bias": [{}, {0: -100, 2**31 - 1: 100.0}],
    "stop": [(), ("a",), ["a", "b"], ("x" * 256,) * 16],
    "stop_token_ids": [frozenset(), {1, 2}, [0, 2**31 - 1]],
}


@pytest.mark.parametrize("name", ALLOWED)
def test_the_limits_themselves_are_allowed(name):
    for value in ALLOWED[name]:
        SamplingParams(**{name: value})


@settings(max_examples=40)  # dear: it makes a strategy for each type anew
@given(st.dictionaries(st.sampled_from(list(REFUSED)), st.from_type(type).flatmap(st.from_type)))
def test_any_value_is_taken_or_refused_by_name(fields):
    """Whatever a client sends, there is no other exception."""
    refused = None
    try:
        SamplingParams(**fields)
    except ParameterError as error:
        refused = error.field
    assert refused is None or refused in fields or refused == "min_tokens"


def test_values_are_frozen_copies():
    bias, stops, ids = {1: 2.0}, ["a"], {5}
    params = SamplingParams(logit_bias=bias, stop=stops, stop_token_ids=ids)
    bias[2], ids2 = 3.0, ids.add(6)
    stops.append("b")
    assert dict(params.logit_bias) == {1: 2.0}
    assert params.stop == ("a",)
    assert params.stop_token_ids == frozenset({5})
    assert ids2 is None
    with pytest.raises(TypeError):
        params.logit_bias[1] = 5.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 4
    assert dataclasses.replace(params, seed=4).logit_bias == params.logit_bias


def test_questions():
    assert not SamplingParams().uses_history
    assert not SamplingParams().filters
    for name, value in (
        ("repetition_penalty", 1.1),
        ("presence_penalty", 0.1),
        ("frequency_penalty", -0.1),
    ):
        assert SamplingParams(**{name: value}).uses_history
    for name, value in (("top_k", 1), ("top_p", 0.9), ("min_p", 0.1)):
        assert SamplingParams(**{name: value}).filters


@pytest.mark.parametrize(
    ("drafted", "accepted", "origin"),
    [(0, 0, Origin.TARGET), (3, 3, Origin.BONUS), (3, 0, Origin.CORRECTION)],
)
def test_origin_of_the_verdicts_token(drafted, accepted, origin):
    assert Verdict(drafted=drafted, accepted=accepted, token=1).origin is origin


@pytest.mark.parametrize(("drafted", "accepted"), [(1, 2), (2, -1), (-1, -1)])
def test_impossible_verdicts(drafted, accepted):
    with pytest.raises(ValueError):
        Verdict(drafted=drafted, accepted=accepted, token=1)


def test_logprob_entries_are_plain_values():
    assert TokenLogprob(token=1, logprob=-0.5).top == ()
