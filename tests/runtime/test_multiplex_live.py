"""Several answers on one edge, live: they share the draft engine, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from live import PROMPT, Watched, alone, draft_law, pair, run, same
from outrider.core.tokens import SamplingParams
from outrider.engines.base import Block, EngineError
from outrider.engines.drafters import ModelDrafter
from outrider.runtime.edgerequest import EdgeRequest
from outrider.session.schedules import Schedule

SHARED = (Schedule.MULTIPLEX, Schedule.HYBRID)


def requests(schedule: Schedule, count: int) -> list[EdgeRequest]:
    return [
        EdgeRequest(
            prompt_ids=(*PROMPT, 65 + i),
            params=SamplingParams(seed=i, max_tokens=30),
            schedule=schedule,
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("schedule", SHARED)
def test_answers_share_the_engines_forwards_and_one_that_fails_slows_nobody(schedule: Schedule):
    """The third slot's forwards fail for ever, in whose company they may be."""
    sizes: list[int] = []
    served: set[int] = set()

    def before(blocks: Sequence[Block]) -> None:
        slots = {block.slot for block in blocks}
        if 3 in slots:
            raise EngineError("no memory")
        served.update(slots)
        sizes.append(len(blocks))

    model = Watched(draft_law(0.3))
    model.before = before

    async def work() -> None:
        async with pair(
            draft=ModelDrafter("toy-draft", model=model), cloud={"pace": 0.004}
        ) as both:
            asked = requests(schedule, 6)
            heard = await asyncio.gather(*(both.ask(request) for request in asked))
            for request, answer in zip(asked, heard, strict=True):
                same(answer, alone(request.params, request.prompt_ids))
            drafted = [answer.result.generation.counters.drafted for answer in heard]
            assert sorted(drafted)[0] == 0
            assert sorted(drafted)[1] > 0, "five of six were drafted for"
            assert both.edge.drafting.seconds > 0
            await both.idle()

    run(work())
    assert served == {1, 2, 4, 5, 6}
    assert max(sizes) > 1, "some forwards were shared"
