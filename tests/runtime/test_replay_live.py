"""Replayed drafts over real sockets: the same text and counters, and errors instead of silence."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from msgspec import structs

from live import alone, ask, drafter, edge, hear, pair, run, same, server, until
from outrider.bench import recording
from outrider.core.tokens import Rule
from outrider.engines.base import MissingExtraError, ModelNotFoundError, UnrecordedError
from outrider.engines.desk import SlotDesk
from outrider.engines.drafters import Drafter
from outrider.engines.replay import Recorded, ReplayDrafter
from outrider.runtime.cloud import CloudConfig, CloudServer
from outrider.runtime.edge import CloudError, EdgeConfig, EdgeRuntime
from outrider.runtime.local import GenerationRequest, LocalGenerator
from outrider.session.generation import Counters
from outrider.session.schedules import Schedule
from recordings import SEEDS, params, recorded, shape

DRAFTING = (Schedule.SYNC, Schedule.STREAM, Schedule.FREERUN, Schedule.PEARL, Schedule.PLC)


def replay(**how: object) -> ReplayDrafter:
    return ReplayDrafter(recorded(**how), token_seconds=0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", DRAFTING)
def test_the_targets_own_text_in_every_schedule(schedule: Schedule):
    async def work() -> None:
        async with server() as cloud, edge(cloud.port, replay(window=24)) as runtime:
            for seed in SEEDS:
                request = ask(params(seed), schedule, draft_length=4, window=8)
                same(await hear(await runtime.stream(request)), alone(params(seed)))

    run(work())


def test_counters_of_the_real_draft_in_sync():
    """What is drafted and accepted hangs on no clock there."""

    async def counted(draft: object) -> list[object]:
        async with server() as cloud, edge(cloud.port, draft) as runtime:  # type: ignore[arg-type]
            found = []
            for seed in SEEDS:
                request = ask(params(seed), Schedule.SYNC, draft_length=5)
                heard = await hear(await runtime.stream(request))
                facts = heard.result.generation.counters
                found.append((facts, heard.origins, heard.result.wasted))
            return found

    async def work() -> None:
        real, again = await counted(drafter()), await counted(replay())
        assert real == again
        assert any(facts.accepted < facts.drafted for facts, _, _ in real)  # type: ignore[attr-defined]

    run(work())


@pytest.mark.parametrize(
    ("request_of", "why"),
    [
        (lambda: ask(params(99), Schedule.SYNC), "recorded with seeds 5 to 10, not 99"),
        (lambda: ask(params(5), Schedule.SYNC, prompt=(72, 105)), "another prompt"),
        (lambda: ask(params(5, temperature=0.5), Schedule.SYNC), "temperature 1.0, not 0.5"),
        (lambda: ask(params(5), Schedule.SYNC, rule=Rule.RATIO), "for the coupled rule"),
        (lambda: ask(params(5), Schedule.STREAM, window=24), "recorded with --window 8"),
    ],
)
def test_what_was_not_recorded_fails_the_answer(request_of, why: str):
    async def work() -> None:
        async with server() as cloud, edge(cloud.port, replay(share=0.9)) as runtime:
            with pytest.raises(UnrecordedError, match=why):
                await hear(await runtime.stream(request_of()))
            await until(lambda: not cloud.service.sessions)
            # The edge is none the worse for it.
            request = ask(params(5), Schedule.SYNC)
            same(await hear(await runtime.stream(request)), alone(params(5)))

    run(work())


def test_another_target_is_found_out_by_its_text():
    """The recording is doctored: its text is no longer the target's."""
    held = recorded()
    first = held.answers[0]
    output = list(first.output)
    output[9] = (output[9] + 1) % 100
    chains = {at: chain for at, chain in first.chains.items() if at not in range(12)}
    wrong = replace(
        held, answers=(structs.replace(first, output=tuple(output), chains=chains, ended=()),)
    )

    async def work() -> None:
        async with (
            server() as cloud,
            edge(cloud.port, ReplayDrafter(wrong, token_seconds=0.0)) as runtime,
        ):
            with pytest.raises(UnrecordedError, match="recorded with another target"):
                await hear(await runtime.stream(ask(params(SEEDS[0]), Schedule.SYNC)))

    run(work())


def test_a_colocated_replay_fails_the_session_alone():
    """The cloud drafts itself; its desk gives the error on."""

    async def work() -> None:
        async with server(own_draft=replay()) as cloud, edge(cloud.port) as runtime:
            request = ask(params(99), Schedule.COLOCATED)
            with pytest.raises(CloudError, match="recorded with seeds 5 to 10, not 99"):
                await hear(await runtime.stream(request))
            request = ask(params(5), Schedule.COLOCATED)
            same(await hear(await runtime.stream(request)), alone(params(5)))

    run(work())


def test_an_edge_counts_its_link():
    async def work() -> None:
        async with pair() as both:
            before = both.edge.link_use
            heard = await both.ask(ask(params(5), Schedule.SYNC))
            await asyncio.sleep(0)
            after = both.edge.link_use
            assert (before.payload_up, before.payload_down) == (0, 0)
            assert after.payload_up >= heard.result.link.payload_up > 0
            assert after.payload_down >= heard.result.link.payload_down > 0
            assert after.bytes_up > after.payload_up

    run(work())


@pytest.mark.model
def test_the_built_in_pair_recorded_and_replayed():
    from outrider.engines.load import load_drafter, load_target

    try:
        target = load_target("builtin:smollm2", threads=1)
    except (MissingExtraError, ModelNotFoundError) as missing:
        pytest.skip(str(missing))
    small = load_drafter("small", target, threads=1)
    assert small is not None
    prompt = tuple(target.tokenizer.chat([{"role": "user", "content": "What is a tree?"}]))
    wanted = shape(temperature=0.7, max_tokens=16)
    (answer,) = recording.record(target, small, [(7, ("t", prompt))], wanted, window=8)
    spent = recording.token_seconds(small, prompt, wanted.params(7))
    assert spent > 0.0
    header = recording.header(target, "small", wanted, seed=7, window=8, spent=spent)
    held = Recorded(name="x", header=header, answers=(answer,))
    own = LocalGenerator(target.model, target.tokenizer)
    plain = own.generate(
        GenerationRequest(prompt_ids=prompt, params=wanted.params(7), draft_length=0)
    )
    assert answer.output == plain.token_ids

    async def counted(cloud: CloudServer, draft: Drafter) -> Counters:
        url = f"ws://127.0.0.1:{cloud.port}"
        async with EdgeRuntime(EdgeConfig(url=url), target.tokenizer, draft) as runtime:
            request = ask(wanted.params(7), Schedule.SYNC, prompt=prompt, draft_length=4)
            heard = await hear(await runtime.stream(request))
        assert heard.tokens == plain.token_ids
        return heard.result.generation.counters

    async def work() -> None:
        desk = SlotDesk(target.model)
        async with CloudServer(desk, target.tokenizer, CloudConfig(port=0)) as cloud:
            real = await counted(cloud, small)
            again = await counted(cloud, ReplayDrafter(held, token_seconds=0.0))
            assert 0 < real.accepted < real.drafted
            assert real == again

    run(work())
