"""Several answers on one edge, live: they share the draft engine, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from live import PROMPT, Watched, alone, draft_law, hear, pair, run, same
from outrider.core.tokens import Rule, SamplingParams
from outrider.engines.base import Block, EngineError, MissingExtraError, ModelNotFoundError
from outrider.engines.desk import SlotDesk
from outrider.engines.drafters import ModelDrafter
from outrider.engines.lockstep import Ask, propose_together
from outrider.runtime.cloud import CloudConfig, CloudServer
from outrider.runtime.edge import EdgeConfig, EdgeRequest, EdgeRuntime
from outrider.runtime.local import GenerationRequest, LocalGenerator
from outrider.session.schedules import Schedule
from outrider.session.service import ServiceConfig

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
            assert both.edge.draft_seconds > 0
            await both.idle()

    run(work())
    assert served == {1, 2, 4, 5, 6}
    assert max(sizes) > 1, "some forwards were shared"


@pytest.fixture(scope="module")
def built_in() -> tuple[Any, ModelDrafter]:
    """The built-in target, loaded, and its small draft."""
    pytest.importorskip("torch", reason="the torch extra is not installed")
    from outrider.engines.load import load_drafter, load_target

    try:
        target = load_target("builtin:smollm2", threads=1)
    except (MissingExtraError, ModelNotFoundError) as missing:
        pytest.skip(str(missing))
    small = load_drafter("small", target, threads=1)
    assert isinstance(small, ModelDrafter)
    return target, small


TEXTS = ("What is a tree?", "Count to ten.", "Why is the sky blue?", "Name three rivers.")


def prompts_of(target: Any) -> list[tuple[int, ...]]:
    return [tuple(target.tokenizer.chat([{"role": "user", "content": t}])) for t in TEXTS]


def test_the_shipped_draft_drafts_in_company_what_it_drafts_alone(
    built_in: tuple[Any, ModelDrafter],
):
    """Ids and rows of q to the bit: int8 products on a CPU give a row the same bits in a pass of up
    to eight. (No text hangs on it; `engines.lockstep` says so.)"""
    target, small = built_in
    if small.model is None or small.model.info.dtype != "int8":
        pytest.skip("this torch has no int8 products here")
    prompts = prompts_of(target)
    told: dict[str, list[object]] = {}
    for way in ("alone", "together"):
        sessions = [
            small.session(len(p), SamplingParams(seed=i), Rule.RATIO) for i, p in enumerate(prompts)
        ]
        for session, prompt in zip(sessions, prompts, strict=True):
            session.propose(prompt, 1)  # read by itself both times
        asks = [Ask(s, p, 6) for s, p in zip(sessions, prompts, strict=True)]
        if way == "alone":
            drafts = [ask.session.propose(ask.committed, ask.count) for ask in asks]
        else:
            found = dict(propose_together(asks))
            drafts = [found[i] for i in range(4)]  # type: ignore[misc]
        told[way] = [(d.tokens, d.q, [row.weights.tobytes() for row in d.rows]) for d in drafts]
        for session in sessions:
            session.close()
    assert told["alone"] == told["together"]


def test_four_answers_of_the_built_in_pair_on_one_edge(built_in: tuple[Any, ModelDrafter]):
    target, small = built_in
    prompts = prompts_of(target)
    params = [SamplingParams(temperature=0.7, seed=i, max_tokens=10) for i in range(4)]
    own = LocalGenerator(target.model, target.tokenizer)
    wanted = [
        own.generate(GenerationRequest(prompt_ids=p, params=s, draft_length=0)).token_ids
        for p, s in zip(prompts, params, strict=True)
    ]
    info = target.model.info
    service = ServiceConfig(
        vocab_size=info.vocab_size,
        context_length=info.context_length,
        eos=info.eos_token_ids,
        deterministic=info.deterministic,
    )

    async def work() -> None:
        cloud = CloudServer(
            SlotDesk(target.model), target.tokenizer, CloudConfig(port=0), service=service
        )
        async with cloud:
            url = f"ws://127.0.0.1:{cloud.port}"
            async with EdgeRuntime(EdgeConfig(url=url), target.tokenizer, small) as edge:
                streams = [
                    await edge.stream(EdgeRequest(prompt_ids=p, params=s, schedule=SHARED[i % 2]))
                    for i, (p, s) in enumerate(zip(prompts, params, strict=True))
                ]
                heard = await asyncio.gather(*(hear(stream) for stream in streams))
        assert [answer.tokens for answer in heard] == wanted
        assert all(answer.result.confirmed for answer in heard)
        assert sum(answer.result.generation.counters.accepted for answer in heard) > 5

    run(work(), patience=300.0)
