"""Verifier and edge over a real socket: identity in every schedule, cancels, failures, drain."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from live import (
    PROMPT,
    SCHEDULES,
    TARGET,
    TOKENIZER,
    Watched,
    alone,
    ask,
    draft_law,
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
from outrider.core.draft import Draft, StopRule
from outrider.core.link import parse_link
from outrider.core.tokens import FinishReason, Origin, ParameterError, Rule, SamplingParams
from outrider.engines.base import Block, EngineError
from outrider.engines.desk import SlotDesk
from outrider.engines.drafters import DraftSession, ModelDrafter
from outrider.proto.messages import Code
from outrider.runtime.cloud import CloudConfig, CloudServer
from outrider.runtime.edgeconfig import EdgeConfig
from outrider.runtime.failures import CloudError
from outrider.session.schedules import Schedule

LONG = SamplingParams(seed=5, max_tokens=2000, temperature=1.0, ignore_eos=True)


# -- identity ---------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_says_what_the_target_says(schedule: Schedule):
    async def work() -> None:
        async with pair() as both:
            for seed in range(4):
                params = SamplingParams(seed=seed, max_tokens=48, temperature=0.5 * seed)
                heard = await both.ask(ask(params, schedule))
                same(heard, alone(params))
                assert heard.result.confirmed
                assert heard.result.link.reconnects == 0
            await both.idle()

    run(work())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ratio_over_the_wire_repeats(schedule: Schedule):
    """Its text depends on the drafts, and in `sync` those are a function of the seed."""

    async def work() -> None:
        async with pair(draft=drafter(0.7)) as both:
            params = SamplingParams(seed=11, max_tokens=48, temperature=1.0)
            request = ask(params, schedule, rule=Rule.RATIO)
            first = await both.ask(request)
            again = await both.ask(request)
            assert first.result.confirmed
            assert again.result.confirmed
            if schedule in (Schedule.SYNC, Schedule.CLOUD_ONLY, Schedule.COLOCATED):
                assert first.tokens == again.tokens
                assert first.text == again.text
            if schedule is Schedule.SYNC:
                counters = first.result.generation.counters
                assert 0 < counters.accepted < counters.drafted
                assert Origin.CORRECTION in first.origins
            await both.idle()

    run(work())


def test_a_sampled_answer_with_everything_on():
    """Penalties, bias, filters and log-probabilities cross the wire exactly."""
    params = SamplingParams(
        seed=3,
        temperature=0.9,
        top_k=12,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias={ord("e"): 2.0, ord("x"): -100.0},
        max_tokens=40,
        min_tokens=20,
        logprobs=3,
    )

    async def work() -> None:
        expected = alone(params)
        async with pair() as both:
            for schedule in SCHEDULES:
                heard = await both.ask(ask(params, schedule))
                same(heard, expected)
                assert heard.result.generation.logprobs == expected.logprobs, schedule

    run(work())


@pytest.mark.parametrize("schedule", [Schedule.SYNC, Schedule.STREAM, Schedule.FREERUN])
def test_stop_strings_and_limits_end_both_sides_at_the_same_token(schedule: Schedule):
    async def work() -> None:
        whole = alone(replace(LONG, max_tokens=60)).text
        async with pair() as both:
            for params in (
                replace(LONG, max_tokens=60, stop=(whole[20:23],)),  # across two tokens
                replace(LONG, max_tokens=60, stop=("never said", whole[31:33])),
                replace(LONG, max_tokens=1),
                replace(LONG, max_tokens=7),
                SamplingParams(seed=1, max_tokens=400, temperature=1.2),
            ):
                heard = await both.ask(ask(params, schedule))
                same(heard, alone(params))
                assert heard.result.confirmed
                stopped = heard.result.generation.finish_reason is FinishReason.STOP
                assert stopped is bool(params.stop or not params.ignore_eos)
            await both.idle()

    run(work())


@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.RATIO])
def test_what_is_given_stands_and_takes_few_forwards(rule: Rule):
    """The ids of the output that a request gives are in it, whatever anybody would have drawn, and
    under the coupled rule what follows is what the target says behind them."""
    given = tuple(b"zebra zebra zebra zebra zebra!") + tuple(TOKENIZER.eos_token_ids)
    params = SamplingParams(
        given=given, seed=3, max_tokens=len(given) + 8, ignore_eos=True, logprobs=0
    )

    async def work() -> None:
        async with pair() as both:
            for schedule in SCHEDULES:
                heard = await both.ask(ask(params, schedule, rule=rule))
                assert heard.tokens[: len(given)] == given
                assert len(heard.result.generation.logprobs) == len(heard.tokens)
                if rule is Rule.COUPLED:
                    same(heard, alone(params))
                if schedule is Schedule.SYNC:  # blocks of 4, then token by token
                    assert heard.result.generation.counters.rounds <= len(given) // 5 + 1 + 8
            await both.idle()

    run(work())


def test_eight_at_once_on_one_connection():
    async def work() -> None:
        async with pair() as both:
            asked = [
                ask(
                    SamplingParams(seed=i, max_tokens=40, temperature=1.0),
                    SCHEDULES[i % len(SCHEDULES)],
                    prompt=(*PROMPT, 97 + i),
                )
                for i in range(8)
            ]
            heard = await asyncio.gather(*(both.ask(request) for request in asked))
            for request, answer in zip(asked, heard, strict=True):
                same(answer, alone(request.params, request.prompt_ids))
                assert answer.result.confirmed
            await both.idle()

    run(work())


def test_eight_on_eight_connections():
    async def work() -> None:
        guess = toy(draft_law(0.3))
        async with pair() as both, contextlib.AsyncExitStack() as stack:
            edges = [
                await stack.enter_async_context(
                    edge(both.cloud.port, ModelDrafter("toy-draft", model=guess))
                )
                for _ in range(8)
            ]
            params = [SamplingParams(seed=i, max_tokens=40) for i in range(8)]

            async def one(i: int) -> None:
                heard = await hear(await edges[i].stream(ask(params[i], SCHEDULES[i % 5])))
                same(heard, alone(params[i]))

            await asyncio.gather(*(one(i) for i in range(8)))
            await until(lambda: not both.cloud.service.sessions)

    run(work())


def test_more_sessions_than_slots_on_both_sides():
    """The cloud evicts and runs several forwards; an edge without room drafts less."""

    async def work() -> None:
        guess = drafter(0.3, max_slots=2)
        async with pair(model=toy(TARGET, max_slots=3), draft=guess) as both:
            params = [SamplingParams(seed=i, max_tokens=30, temperature=1.0) for i in range(7)]
            heard = await asyncio.gather(*(both.ask(ask(p, Schedule.FREERUN)) for p in params))
            for answer, p in zip(heard, params, strict=True):
                same(answer, alone(p))
            await both.idle()

    run(work())


def test_the_link_may_be_shaped():
    """Frames arrive late and in order, the last ones before the end of the connection."""

    async def work() -> None:
        link = parse_link("rtt=6ms,up=1mbit,down=1mbit,jitter=2ms,loss=1%")
        async with pair(link=link) as both:
            params = SamplingParams(seed=2, max_tokens=24)
            for schedule in (Schedule.SYNC, Schedule.FREERUN):
                same(await both.ask(ask(params, schedule)), alone(params))

    run(work())


def test_a_connection_that_idles_serves_the_next_answer():
    async def work() -> None:
        async with pair(heartbeat=0.25, cloud={"heartbeat": 0.25}) as both:
            params = SamplingParams(seed=2, max_tokens=8)
            same(await both.ask(ask(params)), alone(params))
            await asyncio.sleep(0.6)  # a few heartbeats
            heard = await both.ask(ask(params))
            same(heard, alone(params))
            assert both.edge._client.tally.dials == 1

    run(work())


# -- cancel -----------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_closing_after_the_first_step_frees_both_sides(schedule: Schedule):
    async def work() -> None:
        async with pair(cloud={"pace": 0.002}) as both:
            stream = await both.edge.stream(ask(LONG, schedule))
            async for _ in stream:
                break
            stream.close()
            cut = stream.result.generation.token_ids
            stream.close()  # idempotent
            assert stream.result.generation.token_ids == cut
            assert 0 < len(cut) < 2000
            assert cut == alone(replace(LONG, max_tokens=len(cut))).token_ids
            await both.idle()
            assert both.edge._client.tally.dials == 1, "a cancel costs no connection"
            short = SamplingParams(seed=1, max_tokens=5)
            same(await both.ask(ask(short, schedule)), alone(short))

    run(work())


def test_cancelled_at_any_moment():
    """Field case 32: requests given up between being asked for and being answered."""

    async def work() -> None:
        async with pair() as both:
            loop = asyncio.get_running_loop()

            async def one(i: int) -> None:
                schedule = SCHEDULES[i % len(SCHEDULES)]
                task = loop.create_task(both.ask(ask(replace(LONG, seed=i), schedule)))
                await asyncio.sleep(i % 30 * 1e-3)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

            for start in range(0, 120, 30):
                await asyncio.gather(*(one(i) for i in range(start, start + 30)))
            gc.collect()
            await both.idle()
            params = SamplingParams(seed=1, max_tokens=20)
            same(await both.ask(ask(params)), alone(params))

    run(work())


def test_a_client_that_vanishes_is_forgotten_after_its_grace():
    async def work() -> None:
        async with pair(service={"grace": 0.2}, cloud={"pace": 0.005}) as both:
            gone = edge(both.cloud.port, drafter())
            stream = await gone.stream(ask(LONG))
            async for _ in stream:
                break
            assert gone._socket is not None
            gone._client.disconnected(1e12)  # it will say nothing more
            gone._socket._raw.transport.abort()
            await until(lambda: not both.cloud.service.sessions)
            await until(lambda: not both.cloud.desk.held)
            stream.close()
            await gone.close()

    run(work())


def test_closing_the_edge_fails_what_runs():
    async def work() -> None:
        async with pair(cloud={"pace": 0.005}) as both:
            stream = await both.edge.stream(ask(LONG))
            task = asyncio.ensure_future(hear(stream))
            await until(lambda: bool(stream._marks))
            await both.edge.close()
            await both.edge.close()  # idempotent
            with pytest.raises(CloudError, match="closed"):
                await task
            stream.close()
            with pytest.raises(CloudError, match="closed"):
                await both.edge.stream(ask(LONG))

    run(work())


def test_closing_while_it_dials():
    async def work() -> None:
        held: list[asyncio.StreamWriter] = []
        silent = await asyncio.start_server(lambda _, w: held.append(w), "127.0.0.1", 0)
        port = silent.sockets[0].getsockname()[1]
        async with edge(port, drafter()) as runtime:
            stream = await runtime.stream(ask(LONG))
            await until(lambda: bool(held))
            stream.close()
        silent.close()
        held[0].transport.abort()

    run(work())


# -- failures ---------------------------------------------------------------------------------


def test_an_engine_error_ends_its_session_alone():
    """Two sessions share forwards; the one whose ids the engine refuses goes, the other stays."""

    def fail(blocks: Sequence[Block]) -> None:
        for block in blocks:
            ids = (*model.tokens(block.slot), *block.tokens)
            if ids[3:4] == (ord("!"),) and len(ids) > 12:
                raise EngineError("this cache is full")
            if ids[3:4] == (ord("?"),) and len(ids) > 12:
                raise ZeroDivisionError("a bug of the engine")

    model = Watched(TARGET)
    model.before = fail

    async def work() -> None:
        async with pair(model=model) as both:
            params = SamplingParams(seed=4, max_tokens=60, ignore_eos=True)
            texts = ("a", "!", "b", "?")
            asked = [ask(params, Schedule.CLOUD_ONLY, prompt=(*PROMPT, ord(end))) for end in texts]
            good, bad, other, bug = await asyncio.gather(
                *(both.ask(request) for request in asked), return_exceptions=True
            )
            same(good, alone(params, asked[0].prompt_ids))
            same(other, alone(params, asked[2].prompt_ids))
            assert isinstance(bad, CloudError)
            assert bad.code is Code.ENGINE
            assert "this cache is full" in str(bad)
            assert isinstance(bug, CloudError)
            assert "ZeroDivisionError" in str(bug)
            assert "a bug of the engine" not in str(bug), "an unknown error's text stays here"
            await both.idle()
            same(await both.ask(ask(params)), alone(params))

    run(work())


def test_memory_that_runs_out_in_a_shared_forward_ends_the_answer_that_needs_it_alone(
    caplog: pytest.LogCaptureFixture,
):
    """The longest text does not fit beside the others, nor by itself; they go on."""

    def law(context: tuple[int, ...]) -> Any:
        if len(context) > 60:
            np.empty(1 << 55)  # numpy's own error
        return TARGET(context)

    model = Watched(law)
    shared: list[int] = []
    model.before = lambda blocks: shared.append(len(blocks))
    params = SamplingParams(seed=4, max_tokens=40, ignore_eos=True)
    long = PROMPT * 12

    async def work() -> None:
        async with pair(model=model) as both:
            asked = [ask(params, Schedule.CLOUD_ONLY, prompt=p) for p in (PROMPT, long, PROMPT)]
            first, bad, last = await asyncio.gather(
                *(both.ask(request) for request in asked), return_exceptions=True
            )
            same(first, alone(params))
            same(last, alone(params))
            assert isinstance(bad, CloudError)
            assert bad.code is Code.ENGINE
            assert "toy ran out of memory (it asked for 256 PiB more); shorter prompts" in str(bad)
            assert "fewer answers at once (outrider cloud --slots)" in str(bad)
            await both.idle()

    with caplog.at_level(logging.WARNING, "outrider.cloud"):
        run(work())
    assert max(shared) == 3
    (line,) = [r.getMessage() for r in caplog.records if r.name == "outrider.cloud"]
    assert line.startswith("forward failed: toy ran out of memory (it asked for 256 PiB more)")
    assert "Traceback" not in line
    assert "File " not in line


class Broken(ModelDrafter):
    """A drafter whose sessions fail from the n-th call on, or are refused from the start."""

    def __init__(self, error: Exception, *, at: int) -> None:
        super().__init__("broken", model=toy(draft_law(0.3)))
        self.error = error
        self.left = at

    def session(
        self,
        prompt_length: int,
        params: SamplingParams,
        rule: Rule,
        *,
        sketch: int = 16,
        constraint: object = None,
    ) -> DraftSession:
        if not self.left:
            raise self.error
        inner = super().session(prompt_length, params, rule)
        whole = self

        class Session:
            def propose(
                self, committed: Sequence[int], count: int, stop: StopRule | None = None
            ) -> Draft:
                whole.left = max(0, whole.left - 1)
                if not whole.left:
                    raise whole.error
                return inner.propose(committed, count)

            def close(self) -> None:
                inner.close()

        return Session()


@pytest.mark.parametrize("error", [EngineError("no memory"), ValueError("a bug")])
@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("schedule", [Schedule.SYNC, Schedule.STREAM, Schedule.FREERUN])
def test_a_broken_draft_engine_costs_speed_only(schedule: Schedule, at: int, error: Exception):
    async def work() -> None:
        async with pair(draft=Broken(error, at=at)) as both:
            params = SamplingParams(seed=4, max_tokens=24)
            same(await both.ask(ask(params, schedule)), alone(params))
            await both.idle()

    run(work())


@pytest.mark.parametrize("at", [0, 2])
def test_a_broken_draft_in_the_cloud_costs_speed_only(at: int):
    async def work() -> None:
        own = Broken(EngineError("no memory"), at=at)
        desk = SlotDesk(toy(TARGET), own)
        async with (
            CloudServer(desk, TOKENIZER, CloudConfig(port=0)) as verifier,
            edge(verifier.port) as runtime,
        ):
            params = SamplingParams(seed=4, max_tokens=24)
            same(await hear(await runtime.stream(ask(params, Schedule.COLOCATED))), alone(params))

    run(work())


def test_a_prompt_beyond_the_clouds_limits_is_told_so():
    """Before and after the link is up: the second time the machine refuses within the call."""

    async def work() -> None:
        async with pair(service={"max_prompt_tokens": 50}) as both:
            for _ in range(2):
                with pytest.raises(CloudError) as refused:
                    await both.ask(ask(LONG, prompt=PROMPT * 30))
                assert refused.value.code is Code.TOO_LARGE
            await both.idle()
        async with pair(model=toy(TARGET, context_length=64)) as both:
            with pytest.raises(CloudError) as refused:
                await both.ask(ask(LONG, prompt=PROMPT * 30))
            assert refused.value.code is Code.CONTEXT
            with pytest.raises(ParameterError, match="context"):
                await both.ask(ask(LONG, prompt=PROMPT * 30))
            await both.idle()

    run(work())


def test_nobody_listens():
    async def work() -> None:
        async with server() as verifier:
            port = verifier.port
        async with edge(port, drafter(), give_up=0.3) as runtime:
            with pytest.raises(CloudError) as refused:
                await hear(await runtime.stream(ask(LONG)))
            assert refused.value.code is Code.UNREACHABLE
            assert f"cannot reach ws://127.0.0.1:{port}" in str(refused.value)

    run(work())


@pytest.mark.parametrize("url", ["", "ws://", "http://h:1", "ws://h:x", "ws://h:99999", "h:1"])
def test_an_address_that_is_none(url: str):
    with pytest.raises(ParameterError, match="ws://HOST:PORT"):
        EdgeConfig(url=url)


# -- draining ---------------------------------------------------------------------------------


def test_draining_lets_answers_finish_and_refuses_newcomers():
    async def work() -> None:
        async with pair(cloud={"pace": 0.003}) as both:
            params = replace(LONG, max_tokens=60)
            stream = await both.edge.stream(ask(params))
            answer = asyncio.ensure_future(hear(stream))
            await until(lambda: bool(stream._marks))
            stopping = asyncio.ensure_future(both.cloud.stop(drain=30.0))
            await asyncio.sleep(0)
            async with edge(both.cloud.port, drafter(), give_up=1.0) as late:
                with pytest.raises(CloudError) as refused:
                    await hear(await late.stream(ask(params)))
                assert refused.value.code in (Code.DRAINING, Code.UNREACHABLE)
            same(await answer, alone(params))
            assert stream.result.confirmed, "the last frame leaves before the socket closes"
            assert stream.result.link.reconnects == 0
            await stopping

    run(work())


def test_impatience_ends_a_drain():
    async def work() -> None:
        async with pair(cloud={"pace": 0.01}, give_up=0.2) as both:
            stream = await both.edge.stream(ask(LONG))
            answer = asyncio.ensure_future(hear(stream))
            await until(lambda: bool(stream._marks))
            stopping = asyncio.ensure_future(both.cloud.stop(drain=600.0))
            await asyncio.sleep(0.05)
            assert not stopping.done()
            await both.cloud.stop()
            await stopping
            with pytest.raises(CloudError) as broken:
                await answer
            assert broken.value.code is Code.UNREACHABLE

    run(work())
