"""Arms of `bench.schedules` for real: over a link, and in this process."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from outrider.bench.schedules import TRUNCATED, Answer, Arm, Sample
from outrider.control.base import CalibrationError, ControllerFacts
from outrider.control.registry import CONTROLLERS
from outrider.control.registry import make as make_controller
from outrider.control.registry import parse as parse_controller
from outrider.core.relaxation import Relaxation
from outrider.core.relaxed import Policy, RelaxedRule
from outrider.core.residual import DEFAULT_TOP_K, TopKReply
from outrider.core.tokens import ParameterError, Rule, SamplingParams
from outrider.runtime.edge import EdgeRuntime
from outrider.runtime.edgerequest import EdgeRequest
from outrider.runtime.edgestream import EdgeResult
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
        relaxed=result.relaxed.relaxed if result.relaxed else 0,
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


RELAX_THRESHOLD: Final = 0.1
RELAX_BUDGET: Final = 1.0
"""Nats of JSD and total variation of the relaxed arms (our defaults)."""


def wishes_of(text: str) -> dict[str, Any]:
    """Fields of EdgeRequest from 'SCHEDULE/CONTROLLER/RULE', in any order and each once at most:
    'plc/credit/e2sci', 'sync/auto', 'freerun/relaxed'. Rules: coupled, ratio, top-k (ratio with
    lists within a budget), and the relaxed ones, of which the published know no budget. Raises
    ParameterError for other words."""
    wishes: dict[str, Any] = {}
    for word in text.split("/"):
        for field, value in _meaning(word).items():
            if field in wishes:
                raise ParameterError("arm", f"{text!r} names two of a kind")
            wishes[field] = value
    return {"schedule": Schedule.SYNC, **wishes}


def _meaning(word: str) -> dict[str, Any]:
    if word in set(Schedule) - {Schedule.EDGE_ONLY}:
        return {"schedule": Schedule(word)}
    if word in (Rule.COUPLED, Rule.RATIO):
        return {"rule": Rule(word)}
    if word == TRUNCATED:
        reply = TopKReply(k=DEFAULT_TOP_K, budget=RELAX_BUDGET)
        return {"rule": Rule.RATIO, "reply": reply}
    if word in set(RelaxedRule):
        rule = RelaxedRule(word)
        budget = RELAX_BUDGET if rule is RelaxedRule.RELAXED else math.inf
        policy = Policy(rule=rule, threshold=RELAX_THRESHOLD)
        return {"rule": Rule.RELAXED, "relaxation": Relaxation(policy=policy, budget=budget)}
    try:
        name, options = parse_controller(word)
    except ParameterError:
        known = (*Schedule, Rule.COUPLED, Rule.RATIO, TRUNCATED, *RelaxedRule, *CONTROLLERS)
        raise ParameterError("arm", f"{word!r} is none of {', '.join(known)}") from None
    with contextlib.suppress(CalibrationError):  # what it needs is known when it runs
        make_controller(name, ControllerFacts(options=options))
    return {"controller": name, "controller_options": options}


def standard_arms(
    runtime: EdgeRuntime,
    settings: Settings,
    *,
    alone: LocalGenerator | None = None,
    colocated: bool = True,
    more: Sequence[str] = (),
) -> list[Arm]:
    """Cloud-only first (the baseline), then every schedule, the ratio rule's plain loop (the
    fair baseline of the field: ids and q(x) up), co-located speculation, the edge alone. `more`:
    see `wishes_of`."""

    def arm(name: str, schedule: Schedule, rule: Rule = Rule.COUPLED, **wishes: Any) -> Arm:
        return Arm(
            name=name,
            schedule=schedule,
            answer=over_the_link(runtime, schedule, settings, rule, **wishes),
            exact=rule is Rule.COUPLED,
        )

    arms = [
        arm("cloud-only", Schedule.CLOUD_ONLY),
        arm("sync (ratio)", Schedule.SYNC, Rule.RATIO),
        arm("sync", Schedule.SYNC),
        arm("stream", Schedule.STREAM),
        arm("freerun", Schedule.FREERUN),
        *(arm(text, **wishes_of(text)) for text in more),
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
