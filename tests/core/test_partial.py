"""Targets that name only their likeliest ids: what is exact, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.core.partial import require_known
from outrider.core.sampling import History, SamplingPipeline
from outrider.core.tokens import ParameterError, SamplingParams
from outrider.engines.toy import random_law

WIDTH = 300


@pytest.mark.parametrize(
    "facts",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "top_p": 0.5, "min_p": 0.1},
        {"temperature": 1.3, "top_k": 20},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.8, "min_p": 0.02},
    ],
)
def test_what_passes_has_the_very_distribution_of_the_whole_row(facts: dict[str, Any]):
    params = SamplingParams(**facts)
    require_known(params, 20)
    pipeline = SamplingPipeline(params, vocab_size=WIDTH)
    for context in ((1, 2), (7, 7), (200, 3)):
        whole = random_law(3, WIDTH)(context)
        known = whole.copy()
        known[whole < sorted(whole)[-20]] = float("-inf")
        ours = pipeline.distribution(known, History(())).dense(WIDTH)
        assert (ours == pipeline.distribution(whole, History(())).dense(WIDTH)).all()


@pytest.mark.parametrize(
    ("facts", "field"),
    [
        ({"temperature": 1.0}, "temperature"),
        ({"temperature": 1.0, "top_k": 21}, "temperature"),
        ({"temperature": 0.0, "logit_bias": {3: 1.0}}, "logit_bias"),
        ({"temperature": 0.0, "presence_penalty": 0.5}, "presence_penalty"),
        ({"temperature": 0.0, "frequency_penalty": -0.5}, "frequency_penalty"),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, "repetition_penalty"),
        ({"temperature": 0.0, "min_tokens": 1}, "min_tokens"),
        ({"temperature": 0.0, "logprobs": 0}, "logprobs"),
    ],
)
def test_what_needs_more_is_refused_by_name(facts: dict[str, Any], field: str):
    with pytest.raises(ParameterError) as refused:
        require_known(SamplingParams(**facts), 20)
    assert refused.value.field == field
    require_known(SamplingParams(**facts), None)


def test_one_known_id_is_temperature_zero():
    require_known(SamplingParams(temperature=0.0), 1)
    require_known(SamplingParams(temperature=0.5, top_k=1), 1)  # the same by another name
    with pytest.raises(ParameterError, match=r"use 0$"):
        require_known(SamplingParams(temperature=0.5, top_k=2), 1)
