"""Arms of `bench.schedules` for real: over a link, and in this process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from outrider.bench.schedules import Answer, Arm, Sample
from outrider.core.tokens import Rule, SamplingParams
from outrider.runtime.edge import EdgeRequest, EdgeResult, EdgeRuntime
from outrider.runtime.local import GenerationRequest, GenerationResult, LocalGenerator
from outrider.session.schedules import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the arms of a comparison draft."""

    draft_length: int
    """K of the synchronous and co-located arms."""
    window: int
    """Run-ahead of the streaming arms."""


def sample(result: GenerationResult, *, up: int = 0, down: int = 0, forwards: int) -> Sample:
    """A finished answer as a sample; an answer of one round has no decoding time."""
    tpot = result.timing.tpot_s
    return Sample(
        seconds_per_token=tpot if tpot is not None else result.timing.total_s,
        ttft_s=result.timing.ttft_s,
        tokens=result.completion_tokens,
        forwards=forwards,
        drafted=result.counters.drafted,
        accepted=result.counters.accepted,
        payload_up=up,
        payload_down=down,
        ids=result.token_ids,
    )


async def answer_over(runtime: EdgeRuntime, request: EdgeRequest) -> EdgeResult:
    """Run one answer to its end."""
    stream = await runtime.stream(request)
    async for _ in stream:
        pass
    return stream.result


def over_the_link(
    runtime: EdgeRuntime,
    schedule: Schedule,
    settings: Settings,
    rule: Rule = Rule.COUPLED,
    **wishes: Any,
) -> Answer:
    """Answers through the cloud in one schedule. `wishes`: further fields of EdgeRequest."""

    async def answer(prompt: tuple[int, ...], params: SamplingParams) -> Sample:
        request = EdgeRequest(
            prompt_ids=prompt,
            params=params,
            rule=rule,
            schedule=schedule,
            draft_length=settings.draft_length,
            window=settings.window,
            **wishes,
        )
        result = await answer_over(runtime, request)
        done = result.generation
        return sample(
            done,
            up=result.link.payload_up,
            down=result.link.payload_down,
            forwards=done.target_forwards,
        )

    return answer


def in_process(generator: LocalGenerator, draft_length: int = 0) -> Answer:
    """Answers in this process: a model alone, or with its drafter."""

    async def answer(prompt: tuple[int, ...], params: SamplingParams) -> Sample:
        request = GenerationRequest(prompt_ids=prompt, params=params, draft_length=draft_length)
        result = await asyncio.to_thread(generator.generate, request)
        return sample(result, forwards=result.counters.rounds)

    return answer


def standard_arms(
    runtime: EdgeRuntime,
    settings: Settings,
    *,
    alone: LocalGenerator | None = None,
    colocated: bool = True,
) -> list[Arm]:
    """Cloud-only first (the baseline), then every schedule, the ratio rule's plain loop (the
    fair baseline of the field: ids and q(x) up), co-located speculation, the edge alone."""

    def arm(name: str, schedule: Schedule, rule: Rule = Rule.COUPLED) -> Arm:
        return Arm(
            name=name,
            schedule=schedule,
            answer=over_the_link(runtime, schedule, settings, rule),
            exact=rule is Rule.COUPLED,
        )

    arms = [
        arm("cloud-only", Schedule.CLOUD_ONLY),
        arm("sync (ratio)", Schedule.SYNC, Rule.RATIO),
        arm("sync", Schedule.SYNC),
        arm("stream", Schedule.STREAM),
        arm("freerun", Schedule.FREERUN),
    ]
    if colocated:
        arms.append(arm("colocated", Schedule.COLOCATED))
    if alone is not None:
        arms.append(
            Arm(
                name="edge-only", schedule=Schedule.EDGE_ONLY, answer=in_process(alone), exact=False
            )
        )
    return arms
