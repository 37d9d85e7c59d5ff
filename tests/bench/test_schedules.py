"""Figures that do not flatter: tokens and not frames are counted, the first answers are not."""

from __future__ import annotations

import asyncio

import pytest

from outrider.bench.live import in_process, sample
from outrider.bench.onlink import answer_of
from outrider.bench.schedules import Arm, Sample, compare
from outrider.core.tokens import SamplingParams
from outrider.engines.toy import ToyModel, scripted_law
from outrider.runtime.local import GenerationRequest, LocalGenerator
from pair import Saying, letters

PARAMS = SamplingParams(temperature=0.0, max_tokens=40)


def test_a_chunk_of_four_is_four_tokens():
    """Field case 38: 40 tokens as 10 chunks of 4, 100 ms apart, the first after 500 ms."""
    now = 0.0
    model = ToyModel(scripted_law([1] * 50, start=1, width=4), vocab_size=4)
    real = model.forward

    def forward(blocks):
        nonlocal now
        now += 0.1 if now else 0.5
        return real(blocks)

    model.forward = forward
    right = Saying(lambda committed, count: [1] * count)
    made = LocalGenerator(model, letters(4), right, clock=lambda: now)
    result = made.generate(GenerationRequest(prompt_ids=(0,), params=PARAMS, draft_length=3))
    assert (result.completion_tokens, result.counters.rounds) == (40, 10)
    found = sample(result, forwards=result.counters.rounds)
    assert found.ttft_s == pytest.approx(0.5)
    assert 1 / found.seconds_per_token == pytest.approx(40)
    arm = Arm(name="x", schedule=None, answer=in_process(made, 3), samples=[found])
    assert (arm.tokens, arm.forwards_per_token) == (40, 0.25)
    kept = answer_of(result)
    assert (kept.tokens, kept.later) == (40, 36)
    assert kept.first == pytest.approx(0.5)
    assert kept.per_token == pytest.approx(1 / 40)


def slow_at_first(answers: int, *, seconds: float = 0.03) -> Arm:
    """An arm whose first answers take three times as long."""
    made = 0

    async def answer(prompt: tuple[int, ...], params: SamplingParams) -> Sample:
        nonlocal made
        made += 1
        pace = seconds * (3 if made <= answers else 1)
        return Sample(
            seconds_per_token=pace,
            ttft_s=pace,
            tokens=params.max_tokens,
            forwards=params.max_tokens,
            drafted=0,
            accepted=0,
            payload_up=0,
            payload_down=0,
            ids=prompt,
        )

    return Arm(name="slow at first", schedule=None, answer=answer)


def run(arms: list[Arm], **options: int) -> None:
    async def work() -> None:
        done = [n async for n in compare(arms, [(1,), (2,)], PARAMS, seeds=(0, 1), **options)]
        assert done == list(range(1, 4 * len(arms) + 1))

    asyncio.run(work())


def test_warm_up_is_left_out_and_told():
    """Field case 39, for every arm alike: the baseline is warmed up as well."""
    arms = [slow_at_first(4), slow_at_first(0)]
    run(arms, warm_up=8)
    assert arms[0].ms_per_token == pytest.approx(30, rel=0.02)
    assert arms[0].ratio(arms[1]) == pytest.approx(1.0)
    assert [arm.as_dict(arms[1])["warm_up_answers"] for arm in arms] == [8, 8]


def test_a_cold_start_is_called_cold():
    arms = [slow_at_first(4), slow_at_first(0)]
    run(arms, warm_up=0)
    assert arms[0].ms_per_token == pytest.approx(90)
    assert arms[0].as_dict(arms[1])["warm_up_answers"] == 0
    assert len(arms[0].samples) == 4


def test_an_arm_that_never_drafts_has_no_acceptance():
    """Field case 37: null, not NaN and not an exception."""
    arm = slow_at_first(0)
    run([arm])
    assert arm.acceptance is None
    assert arm.as_dict(arm)["acceptance"] is None
