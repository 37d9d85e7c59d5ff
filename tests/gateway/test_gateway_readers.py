"""Clients that go, read slowly or send very much: they cost nobody else anything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import resource
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from live import PATIENCE, PROMPT, TARGET, TOKENIZER, Watched, alone, hear, run, until
from outrider.core.tokens import SamplingParams
from outrider.engines.tokenizer import ByteTokenizer
from outrider.gateway import answers, exchange
from outrider.gateway.admission import Room
from outrider.gateway.errors import ApiError
from outrider.runtime import edge
from outrider.runtime.edgerequest import EdgeRequest
from outrider.session.schedules import Schedule
from served import CHAT, HELLO, TEXT, Served, chat, served, text

LONG = {"max_tokens": 4000, "ignore_eos": True}


def idle(gateway: Served) -> bool:
    """Nothing is held at either end."""
    room = gateway.app.state.gateway.room
    return not any((*gateway.pair.held, room.active, room.waiting))


async def cancelled(gateway: Served) -> int:
    """How many requests count as given up by their clients."""
    page = (await gateway.http.get("/metrics")).text
    line = next(x for x in page.splitlines() if x.startswith("outrider_requests_cancelled_total"))
    return int(float(line.split()[1]))


@contextlib.asynccontextmanager
async def asked(
    gateway: Served, body: dict[str, Any], *, limit: int = 4096
) -> AsyncIterator[asyncio.StreamReader]:
    """The answer to a POST on a socket of its own, which is cut at the end."""
    data = json.dumps(body).encode()
    own = socket.socket()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # what is not read backs up soon
    own.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(own, ("127.0.0.1", gateway.server.port))
    reader, writer = await asyncio.open_connection(sock=own, limit=limit)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    try:
        yield reader
    finally:
        writer.transport.abort()


# -- field case 23 ----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
def test_field_case_23_in_the_middle_of_a_stream(n: int):
    async def work() -> None:
        model = Counted()
        async with served(model=model, cloud={"pace": 0.005}) as gateway:
            body = chat(stream=True, n=n, **LONG)
            async with asked(gateway, body) as reader:
                for _ in range(3 * n + 3):
                    await reader.readuntil(b"data: ")
            await until(lambda: idle(gateway))
            await until_still(model)
            assert await cancelled(gateway) == 1

    run(work())


class Counted(Watched):
    """A target that counts what it is asked."""

    def __init__(self) -> None:
        super().__init__(TARGET)
        self.forwards = 0
        self.before = self._count

    def _count(self, _blocks: object) -> None:
        self.forwards += 1


async def until_still(model: Counted) -> None:
    """The target is asked nothing any more."""
    forwards = model.forwards
    await asyncio.sleep(0.05)
    assert model.forwards == forwards > 0


@pytest.mark.parametrize("stream", [True, False])
def test_field_case_23_before_the_first_token_and_without_streaming(stream: bool):
    """The client goes while the target reads the prompt: what it holds is free right after."""
    started, going = threading.Event(), threading.Event()

    def prefill(_blocks: Any) -> None:
        started.set()
        going.wait(PATIENCE)

    async def work() -> None:
        model = Watched(TARGET)
        async with served(model=model) as gateway:
            model.before = prefill
            async with asked(gateway, chat(stream=stream, **LONG)):
                await until(started.is_set)
            await until(lambda: not gateway.pair.cloud.service.sessions)
            going.set()
            await until(lambda: idle(gateway))
            assert await cancelled(gateway) == 1
            assert (await gateway.post(CHAT, chat())).status_code == 200

    run(work())


def test_field_case_23_while_an_answer_that_is_not_streamed_is_made():
    async def work() -> None:
        model = Counted()
        async with served(model=model, cloud={"pace": 0.005}) as gateway:
            async with asked(gateway, chat(**LONG)):
                await until(lambda: model.forwards > 5)
            await until(lambda: idle(gateway))
            await until_still(model)

    run(work())


def test_a_client_that_goes_while_it_waits_loses_its_place_and_nobody_elses():
    async def work() -> None:
        async with served(config={"answers": 1}, cloud={"pace": 0.005}) as gateway:
            room = gateway.app.state.gateway.room
            async with asked(gateway, chat(**LONG)):
                await until(lambda: room.active == 1)
                async with asked(gateway, chat(max_tokens=2)):
                    await until(lambda: room.waiting == 1)
                    last = asyncio.create_task(gateway.post(CHAT, chat(max_tokens=2)))
                    await until(lambda: room.waiting == 2)
                await until(lambda: room.waiting == 1)
            assert (await last).status_code == 200
            await until(lambda: idle(gateway))

    run(work())


def test_field_case_32_over_http():
    """Requests given up at any moment leave nothing behind, and the next one works."""

    async def work() -> None:
        dice = random.Random(1)
        async with served(config={"answers": 16}) as gateway:

            async def fleeting() -> None:
                with contextlib.suppress(httpx.HTTPError, TimeoutError):
                    async with asyncio.timeout(dice.uniform(0.0, 0.06)):
                        body = chat(stream=dice.random() < 0.5, n=dice.choice((1, 1, 3)))
                        await gateway.post(CHAT, body | {"max_tokens": 200})

            for _ in range(4):
                await asyncio.gather(*(fleeting() for _ in range(25)))
            await until(lambda: idle(gateway))
            assert (await gateway.post(CHAT, chat())).status_code == 200

    run(work())


# -- the socket -------------------------------------------------------------------------------


def test_a_chunk_does_not_wait_for_the_one_before_it():
    """Nagle's algorithm is off: it would hold a token back until the client's system has
    acknowledged the last one, up to 40 ms."""

    async def work() -> None:
        async with served() as gateway, asked(gateway, chat(stream=True, **LONG)) as reader:
            await reader.readuntil(b"data: ")
            (connection,) = gateway.server.connections
            own = connection.get_extra_info("socket")
            assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    run(work())


# -- field case 31 ----------------------------------------------------------------------------


def test_field_case_31_over_http(monkeypatch: pytest.MonkeyPatch):
    """A client that does not read is given up at a bound; the others do not notice."""
    monkeypatch.setattr(answers, "MAX_UNREAD", 50)
    monkeypatch.setattr(exchange, "SEND_TIMEOUT_S", 0.3)

    async def work() -> None:
        async with served(cloud={"pace": 0.0002}) as gateway:
            body = chat(stream=True, n=8, max_tokens=4000, ignore_eos=True, logprobs=True)
            async with asked(gateway, body | {"top_logprobs": 20}) as reader:
                await reader.readuntil(b"data: ")
                good = chat()
                first = (await gateway.post(CHAT, good)).json()["choices"]
                for _ in range(4):
                    assert (await gateway.post(CHAT, good)).json()["choices"] == first
                await until(lambda: idle(gateway))

    run(work())


def test_an_answer_waits_for_its_reader_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch):
    """Behind a bound both engines rest; what is kept stays small; the text is the target's own."""
    monkeypatch.setattr(edge, "PAUSE_UNREAD", 8)
    monkeypatch.setattr(edge, "RESUME_UNREAD", 2)

    async def work() -> None:
        model = Counted()
        params = SamplingParams(seed=5, max_tokens=100, ignore_eos=True)
        async with served(model=model, cloud={"pace": 0.0005}) as gateway:
            runtime = gateway.app.state.gateway.runtime
            for schedule in (Schedule.FREERUN, Schedule.SYNC):
                request = EdgeRequest(prompt_ids=PROMPT, params=params, schedule=schedule)
                stream = await runtime.stream(request)
                await until(lambda stream=stream: stream.behind_s > 0.0)
                await asyncio.sleep(0.05)  # what was under way comes
                await until_still(model)
                assert stream.unread < 50
                assert (await gateway.post(CHAT, chat())).status_code == 200
                await until_still(model)
                assert (await hear(stream)).tokens == alone(params).token_ids
                assert stream.behind_s == 0.0
            await until(lambda: idle(gateway))

    run(work())


def test_a_reader_that_drips_is_given_up_after_a_while(monkeypatch: pytest.MonkeyPatch):
    """The bound is in time: whoever takes a round now and then never catches up."""
    monkeypatch.setattr(edge, "PAUSE_UNREAD", 2)
    monkeypatch.setattr(edge, "RESUME_UNREAD", 0)
    monkeypatch.setattr(answers, "MAX_PAUSE_S", 0.05)

    async def work() -> None:
        async with served() as gateway:
            params = SamplingParams(seed=5, max_tokens=300, ignore_eos=True)
            choice = answers.Choice(0, EdgeRequest(prompt_ids=PROMPT, params=params))
            taken = 0

            async def drip() -> None:
                nonlocal taken
                async for _ in choice.steps(gateway.app.state.gateway.runtime):
                    taken += 1
                    await asyncio.sleep(0.03)

            with pytest.raises(ApiError) as caught:
                await drip()
            assert (caught.value.status, caught.value.code) == (408, "slow_reader")
            assert 0 < taken < 100
            await until(lambda: idle(gateway))

    run(work())


def test_a_slow_reader_hears_why_it_was_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(answers, "MAX_UNREAD", -1)  # everybody is too slow

    async def work() -> None:
        async with served() as gateway:
            events = await gateway.events(TEXT, text(max_tokens=50))
            assert events[-1]["error"]["code"] == "slow_reader"
            assert not any(event["choices"][0]["finish_reason"] for event in events[:-1])
            await until(lambda: idle(gateway))

    run(work())


# -- many at once -----------------------------------------------------------------------------

STREAMS = 200
MEMORY = 64 * 1024 * 1024
"""Bytes for 200 streams: each has at most a few rounds, a buffer of a socket and its own prompt."""


def resident() -> int:
    """Bytes that this process holds; 0 where the system does not say."""
    facts = Path("/proc/self/statm")
    return int(facts.read_text().split()[1]) * resource.getpagesize() if facts.exists() else 0


def test_two_hundred_streams_at_once():
    """All are answered, each with its own text, and memory for them has a bound. That a reader who
    does not read holds up nobody: field case 31, above."""

    async def whole(gateway: Served, seed: int) -> str:
        body = chat(stream=True, seed=seed, max_tokens=16)
        async with asked(gateway, body, limit=2**20) as reader:
            said = (await reader.readuntil(b"data: [DONE]\n\n")).decode()
        lines = [line for line in said.splitlines() if line.startswith('data: {"id"')]
        choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
        assert choices[-1]["finish_reason"] in ("stop", "length")
        return "".join(choice["delta"].get("content") or "" for choice in choices)

    async def work() -> None:
        async with served() as gateway:
            seeds = [i % 5 for i in range(STREAMS)]
            before = resident()
            texts = await asyncio.gather(*(whole(gateway, seed) for seed in seeds))
            grown = resident() - before
            prompt = tuple(TOKENIZER.chat(HELLO))
            own = [alone(SamplingParams(seed=s, max_tokens=16), prompt).text for s in range(5)]
            assert texts == [own[seed] for seed in seeds]
            assert grown < MEMORY
            await until(lambda: idle(gateway))

    run(work())


# -- field case 33 ----------------------------------------------------------------------------


def test_field_case_33_over_http(monkeypatch: pytest.MonkeyPatch):
    """While one long prompt is tokenised, health, streams and short prompts go on."""
    tokenising, going = threading.Event(), threading.Event()
    encode = ByteTokenizer.encode

    def slow(self: ByteTokenizer, words: str) -> list[int]:
        if len(words) > 100_000:
            tokenising.set()
            going.wait(PATIENCE)
        return encode(self, words)

    monkeypatch.setattr(ByteTokenizer, "encode", slow)

    async def work() -> None:
        async with served() as gateway:
            body = text(prompt="x" * 500_000)
            long = asyncio.create_task(gateway.post(TEXT, body))
            await until(tokenising.is_set)
            assert (await gateway.http.get("/health")).status_code == 200
            assert (await gateway.events(TEXT, text()))[-1] == "[DONE]"
            assert (await gateway.post(CHAT, chat())).status_code == 200
            assert not long.done()
            going.set()
            error = (await long).json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert "500000" in error["message"]

    run(work())


# -- the queue --------------------------------------------------------------------------------


def test_places_are_given_in_order_and_all_at_once():
    async def work() -> None:
        room = Room(4, most_waiting=3)
        order: list[str] = []

        async def take(name: str, count: int, leave: asyncio.Event) -> None:
            async with room.hold(count):
                order.append(name)
                await leave.wait()

        gates = [asyncio.Event() for _ in range(4)]
        tasks = [asyncio.create_task(take("a", 3, gates[0]))]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(take("b", 4, gates[1])))
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(take("c", 1, gates[2])))  # would fit, but came later
        await asyncio.sleep(0)
        assert (order, room.active, room.waiting) == (["a"], 3, 2)
        gates[0].set()
        await tasks[0]
        await asyncio.sleep(0)
        assert (order, room.active) == (["a", "b"], 4)
        tasks[2].cancel()
        await asyncio.gather(tasks[2], return_exceptions=True)
        gates[1].set()
        await tasks[1]
        assert (room.active, room.waiting) == (0, 0)

    run(work())


def test_a_place_given_to_one_that_leaves_goes_to_the_next():
    async def work() -> None:
        room = Room(1)
        async with room.hold(1):
            first = asyncio.create_task(room.hold(1).__aenter__())
            await asyncio.sleep(0)
            second = asyncio.create_task(room.hold(1).__aenter__())
            await asyncio.sleep(0)
            assert room.waiting == 2
        first.cancel()  # at the very moment at which it has been given the place
        await asyncio.gather(first, return_exceptions=True)
        await second
        assert (room.active, room.waiting) == (1, 0)

    run(work())


def test_a_place_that_comes_free_while_one_leaves_is_lost_to_nobody():
    async def work() -> None:
        room = Room(1)
        held = room.hold(1)
        await held.__aenter__()
        first = asyncio.create_task(room.hold(1).__aenter__())
        await asyncio.sleep(0)
        second = asyncio.create_task(room.hold(1).__aenter__())
        await asyncio.sleep(0)
        first.cancel()  # it has not run yet when the place comes free
        await held.__aexit__(None, None, None)
        await asyncio.gather(first, return_exceptions=True)
        await second
        assert (room.active, room.waiting) == (1, 0)

    run(work())


def test_more_than_there_are_places_is_refused_at_once():
    async def work() -> None:
        room = Room(2, most_waiting=0)
        with pytest.raises(ApiError) as caught:
            async with room.hold(3):
                pass
        assert caught.value.status == 400
        async with room.hold(2):
            with pytest.raises(ApiError) as caught:
                room.check(1)
            assert caught.value.status == 503
        room.check(2)

    run(work())
