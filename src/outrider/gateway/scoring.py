"""Log-probabilities of a prompt: `echo` together with `logprobs`.

The rows of a prompt stay in the cloud. So its text is asked for once more as an answer whose ids
are all given (core.tokens, `given`): they go up as drafts that always stand, in whole blocks, and
their log-probabilities come down as those of any answer do. Behind it the cache holds the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import Final

from outrider.core.tokens import Rule, SamplingParams, TokenLogprob
from outrider.gateway.answers import Choice, merged
from outrider.runtime.edge import EdgeRuntime
from outrider.runtime.edgerequest import EdgeRequest
from outrider.session.generation import Step
from outrider.session.schedules import Schedule

BLOCK: Final = 32
"""Ids of a prompt in one forward: few enough that a running answer beside it hardly waits."""

Prompt = tuple[int, ...]


async def score(
    prompts: Sequence[Prompt], logprobs: int, runtime: EdgeRuntime
) -> list[tuple[TokenLogprob, ...]]:
    """For each prompt what the target thinks of its ids, the first left out: nothing is before it.
    Raises what `merged` does."""
    choices = [
        Choice(index=place, request=_request(ids, logprobs))
        for place, ids in enumerate(prompts)
        if len(ids) > 1
    ]
    found: list[list[TokenLogprob]] = [[] for _ in prompts]
    if choices:
        async with aclosing(merged(choices, runtime)) as rounds:  # type: ignore[type-var]
            async for choice, step in rounds:
                if isinstance(step, Step):
                    found[choice.index] += step.logprobs
    return [tuple(entries) for entries in found]


def _request(ids: Prompt, logprobs: int) -> EdgeRequest:
    given = ids[1:]
    params = SamplingParams(
        given=given, max_tokens=len(given), logprobs=logprobs, ignore_eos=True, seed=0
    )
    return EdgeRequest(
        prompt_ids=ids[:1],
        params=params,
        rule=Rule.COUPLED,
        schedule=Schedule.SYNC,
        draft_length=min(BLOCK, len(given)),
    )
