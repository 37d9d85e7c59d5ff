"""Links that break and verifiers that die, over real sockets: the answer is never another one.

Every run compares ids, text and log-probabilities with the target alone (I1, I2), and `pair` sees
to it that neither side holds anything afterwards (I7).
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from live import (
    SCHEDULES,
    TARGET,
    TOKENIZER,
    Heard,
    Pair,
    alone,
    ask,
    drafter,
    edge,
    hear,
    pair,
    run,
    same,
    server,
    toy,
    until,
)
from outrider.core.tokens import Rule, SamplingParams
from outrider.engines.load import load_drafter, load_target
from outrider.proto.messages import Code
from outrider.runtime.cloud import CloudServer
from outrider.runtime.edge import EdgeRuntime
from outrider.runtime.edgerequest import EdgeRequest
from outrider.runtime.edgestream import EdgeStream
from outrider.runtime.failures import CloudError
from outrider.runtime.local import GenerationRequest, LocalGenerator
from outrider.runtime.process import CloudProcess
from outrider.session.schedules import Schedule
from runtime.proxy import Cut, Proxy

LONG = SamplingParams(seed=5, max_tokens=90, temperature=1.0, ignore_eos=True)
BEAT = 0.2
"""Heartbeat of the runs that need one, in seconds."""


def through(proxy: Proxy, **config: object) -> EdgeRuntime:
    return edge(proxy.port, drafter(), **config)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
def test_cut_at_any_byte_again_and_again(schedule: Schedule, seed: int):
    chance = random.Random(f"{schedule}/{seed}")
    params = replace(LONG, seed=seed, temperature=0.7 * (seed % 3), logprobs=1 if seed else None)

    def somewhere() -> Cut:
        # The handshake is about 250 bytes up and 130 down, the greeting about 350 each way.
        if chance.random() < 0.5:
            return Cut(up=chance.randrange(1, 800))
        return Cut(down=chance.randrange(1, 1000))

    async def work() -> None:
        async with pair(cloud={"pace": 0.0005}) as both:
            first = Cut(down=chance.randrange(1, 500))  # of 700 and more
            cuts = iter([first, *(somewhere() for _ in range(3))])
            async with Proxy(both.cloud.port, cuts) as proxy, through(proxy) as runtime:
                heard = await hear(await runtime.stream(ask(params, schedule)))
                expected = alone(params)
                same(heard, expected)
                assert heard.result.generation.logprobs == expected.logprobs
                assert proxy.broken > 0
                assert runtime._client.tally.dials > 1

    run(work())


@pytest.mark.parametrize("seed", range(3))
def test_ratio_survives_cuts_as_it_was(seed: int):
    """Retransmission replays, it never redraws: `sync` gives the ids of an uninterrupted run."""
    chance = random.Random(seed)
    params = replace(LONG, seed=seed)

    async def work() -> None:
        async with pair(draft=drafter(0.7), cloud={"pace": 0.0005}) as both:
            request = ask(params, Schedule.SYNC, rule=Rule.RATIO)
            expected = await both.ask(request)
            cuts = iter([Cut(down=chance.randrange(500, 1000)) for _ in range(4)])
            async with (
                Proxy(both.cloud.port, cuts) as proxy,
                edge(proxy.port, drafter(0.7)) as runtime,
            ):
                heard = await hear(await runtime.stream(request))
                assert proxy.broken > 0
            assert heard.tokens == expected.tokens
            assert heard.text == expected.text

    run(work())


def test_many_sessions_share_a_link_that_breaks():
    async def work() -> None:
        async with pair(cloud={"pace": 0.0005}) as both:
            cuts = iter([Cut(up=1200), Cut(down=1500), Cut(up=1500), Cut(down=700)])
            async with Proxy(both.cloud.port, cuts) as proxy, through(proxy) as runtime:
                asked = [replace(LONG, seed=i, max_tokens=40) for i in range(6)]

                async def one(i: int) -> Heard:
                    return await hear(await runtime.stream(ask(asked[i], SCHEDULES[i % 5])))

                for params, heard in zip(
                    asked, await asyncio.gather(*map(one, range(6))), strict=True
                ):
                    same(heard, alone(params))
                assert proxy.broken >= 3

    run(work())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_black_hole_that_heals(schedule: Schedule):
    """Field case 35: both sides notice by themselves; the answer goes on when the hole heals."""

    async def work() -> None:
        async with (
            pair(cloud={"pace": 0.002, "heartbeat": BEAT}) as both,
            Proxy(both.cloud.port) as proxy,
            through(proxy, heartbeat=BEAT) as runtime,
        ):
            stream = await runtime.stream(ask(LONG, schedule))
            answer = asyncio.ensure_future(hear(stream))
            await until(lambda: len(stream._marks) > 2)
            proxy.darken()
            await until(lambda: "nothing heard" in runtime.last_break)
            await until(lambda: not both.cloud._peers)
            assert not answer.done()
            proxy.heal()
            heard = await answer
            same(heard, alone(LONG))
            assert heard.result.link.reconnects >= 1
            short = replace(LONG, max_tokens=5)
            same(await hear(await runtime.stream(ask(short, schedule))), alone(short))

    run(work())


def test_a_black_hole_that_stays():
    async def work() -> None:
        async with (
            pair(cloud={"pace": 0.002, "heartbeat": BEAT}, service={"grace": 0.1}) as both,
            Proxy(both.cloud.port) as proxy,
            through(proxy, heartbeat=BEAT, give_up=0.5) as runtime,
        ):
            stream = await runtime.stream(ask(LONG))
            answer = asyncio.ensure_future(hear(stream))
            await until(lambda: bool(stream._marks))
            proxy.darken()
            with pytest.raises(CloudError) as broken:
                await answer
            assert broken.value.code is Code.UNREACHABLE
            await both.idle()  # the cloud let it go as well

    run(work())


async def replaced(both: Pair, stream: EdgeStream, committed: int) -> CloudServer:
    """Let `committed` tokens come, then put an empty verifier in the place of the one there is."""
    await until(lambda: stream._generation.sequence.output_length >= committed)
    port = both.cloud.port
    await both.cloud.stop()
    fresh = server(toy(TARGET), own_draft=drafter(), port=port, pace=0.002)
    await fresh.start()
    return fresh


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_empty_verifier_takes_over(schedule: Schedule, temperature: float):
    """Field case 28: the old one goes at position 37 or so, with a block in flight."""
    params = replace(LONG, temperature=temperature, logprobs=0, frequency_penalty=0.2)

    async def work() -> None:
        async with pair(cloud={"pace": 0.002}) as both:
            stream = await both.edge.stream(ask(params, schedule))
            answer = asyncio.ensure_future(hear(stream))
            fresh = await replaced(both, stream, 37)
            heard = await answer
            expected = alone(params)
            same(heard, expected)
            assert heard.result.generation.logprobs == expected.logprobs
            assert heard.result.confirmed
            assert both.edge._client.tally.reopened == 1
            await until(lambda: not fresh.service.sessions and not fresh.desk.held)
            await both.edge.close()
            await fresh.stop()

    run(work())


def test_a_verifier_killed_and_started_again():
    """The same with processes and SIGKILL."""
    params = replace(LONG, max_tokens=120)
    target = load_target("toy:1")
    request = EdgeRequest(prompt_ids=(1, 2, 3), params=params, schedule=Schedule.FREERUN)
    expected = LocalGenerator(target.model, TOKENIZER).generate(
        GenerationRequest(prompt_ids=request.prompt_ids, params=params, draft_length=0)
    )

    async def work() -> None:
        arguments = ["--model", "toy:1", "--target-pace", "4"]
        first = CloudProcess(arguments)
        await first.start()
        port = first.url.rpartition(":")[2]
        second = CloudProcess([*arguments, "--listen", f"127.0.0.1:{port}"])
        guess = load_drafter("toy:1:0.4", target)
        async with edge(int(port), guess, give_up=50.0) as runtime:
            stream = await runtime.stream(request)
            answer = asyncio.ensure_future(hear(stream))
            await until(lambda: stream._generation.sequence.output_length >= 37)
            first.kill()
            await first.stop()
            try:
                await second.start()
                heard = await answer
            finally:
                answer.cancel()
                await second.stop()
        same(heard, expected)
        assert heard.result.link.reconnects >= 1
        assert runtime._client.tally.reopened == 1

    run(work())
