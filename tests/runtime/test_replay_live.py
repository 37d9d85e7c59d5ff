"""Replayed drafts over real sockets: the same text and counters, and errors instead of silence."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from msgspec import structs

from live import alone, ask, drafter, edge, hear, pair, run, same, server, until
from outrider.core.tokens import Rule
from outrider.engines.base import UnrecordedError
from outrider.engines.replay import ReplayDrafter
from outrider.runtime.failures import CloudError
from outrider.session.schedules import Schedule
from recordings import SEEDS, params, recorded

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
