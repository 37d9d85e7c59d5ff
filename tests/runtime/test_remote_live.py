"""A verifier in front of a server: ids over the wire, refusals, a server that goes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from live import PROMPT, TARGET, TOKENIZER, Heard, alone, ask, drafter, edge, hear, run, same
from outrider.core.relaxation import Relaxation
from outrider.core.tokens import Rule, SamplingParams
from outrider.engines import remote
from outrider.engines.desk import SlotDesk
from outrider.engines.load import load_target
from outrider.proto.messages import Code
from outrider.runtime.cloud import CloudConfig, CloudServer
from outrider.runtime.edgerequest import EdgeRequest
from outrider.runtime.failures import CloudError
from outrider.session.schedules import Schedule
from servers import Server, serving
from toys import remember

GREEDY = SamplingParams(temperature=0.0, max_tokens=32)
SAMPLED = SamplingParams(temperature=0.9, top_k=20, seed=5, max_tokens=32)


def cloud(server: Server, way: str) -> CloudServer:
    loaded = load_target(f"{way}:{server.url}#toy:1")
    return CloudServer(SlotDesk(loaded.model), TOKENIZER, CloudConfig(port=0))


async def heard(server: Server, way: str, *requests: EdgeRequest) -> list[Heard]:
    async with cloud(server, way) as verifier, edge(verifier.port, drafter()) as runtime:
        return [await hear(await runtime.stream(request)) for request in requests]


@pytest.mark.parametrize("way", ["openai", "vllm", "sglang"])
def test_the_ids_are_the_servers_own_in_every_schedule(way: str):
    schedules = (Schedule.SYNC, Schedule.STREAM, Schedule.FREERUN, Schedule.CLOUD_ONLY)
    with serving() as server:
        for got in run(heard(server, way, *(ask(GREEDY, s) for s in schedules))):
            same(got, alone(GREEDY))


@pytest.mark.parametrize("way", ["vllm", "sglang"])
def test_the_same_seed_gives_the_same_text(way: str):
    with serving() as server:
        for got in run(heard(server, way, ask(SAMPLED), ask(SAMPLED, Schedule.SYNC))):
            same(got, alone(SAMPLED))


@pytest.mark.parametrize(
    ("way", "request_", "words"),
    [
        ("openai", ask(SAMPLED), "temperature: this target tells the likeliest id"),
        ("vllm", ask(SamplingParams(temperature=1.0)), "top_k from 1 to 20"),
        (
            "openai",
            ask(GREEDY, rule=Rule.RELAXED, relaxation=Relaxation()),
            "cannot do relaxed",
        ),
    ],
)
def test_what_cannot_be_exact_is_refused_and_nobody_else_suffers(
    way: str, request_: EdgeRequest, words: str
):
    with serving() as server:
        with pytest.raises(CloudError, match=words) as refused:
            run(heard(server, way, request_))
        assert refused.value.code is Code.PARAMETER
        (after,) = run(heard(server, way, ask(GREEDY)))
        same(after, alone(GREEDY))


def test_a_server_that_goes_ends_the_answers_it_owes_and_no_verifier():
    async def story(server: Server) -> None:
        async with cloud(server, "vllm") as verifier, edge(verifier.port, drafter()) as runtime:
            server.error = (503, "gone for lunch")
            with pytest.raises(CloudError, match="answered 503: gone for lunch") as failed:
                await hear(await runtime.stream(ask(GREEDY)))
            assert failed.value.code is Code.ENGINE
            server.error = None
            same(await hear(await runtime.stream(ask(GREEDY))), alone(GREEDY))

    with serving() as server:
        run(story(server))


def no_end(context: tuple[int, ...]) -> Any:
    row = TARGET(context).copy()
    row[TOKENIZER.END] = -50.0
    return row


ENDLESS = remember(no_end, 2)
WAYS = ("openai", "vllm", "sglang")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"root": "weights-2"}, "the server no longer serves the toy-model it began with"),
        ({"gone": True}, "no answer from the server: "),
        ({"error": (503, "full")}, "the server answered 503: full"),
    ],
)
def test_what_befalls_the_server_under_a_running_answer_is_told_to_its_edge(
    way: str, change: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
):
    """And nothing of where that server stands; what was shown before stays the server's own."""
    monkeypatch.setattr(remote, "IDENTITY_S", -1.0)  # look every time
    params = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)

    async def story(server: Server) -> None:
        async with cloud(server, way) as verifier, edge(verifier.port, drafter()) as runtime:
            shown: list[int] = []

            async def listen() -> None:
                async for step in await runtime.stream(ask(params, Schedule.SYNC)):
                    shown.extend(step.tokens)
                    for name, value in change.items():
                        setattr(server, name, value)

            with pytest.raises(CloudError) as failed:
                await listen()
            assert failed.value.code is Code.ENGINE
            assert words in str(failed.value)
            assert server.url not in str(failed.value)
            ids = PROMPT
            for token in shown:
                assert token == int(np.argmax(ENDLESS(ids)))
                ids = (*ids, token)
            assert shown
            for name in change:
                setattr(server, name, getattr(Server(), name))
            (rest,) = [await hear(await runtime.stream(ask(GREEDY)))]
            assert rest.tokens[: len(shown)] == tuple(shown)[:32]

    with serving(law=ENDLESS) as server:
        run(story(server))


def test_a_session_is_rebuilt_on_a_second_verifier_behind_another_server():
    half = SamplingParams(temperature=0.0, max_tokens=12)
    with serving() as first, serving(shape="llama") as second:
        (begun,) = run(heard(first, "openai", ask(half)))
        prompt = (*PROMPT, *begun.tokens)
        rest = SamplingParams(temperature=0.0, max_tokens=20)
        (ended,) = run(heard(second, "vllm", ask(rest, prompt=prompt)))
    assert (*begun.tokens, *ended.tokens) == alone(GREEDY).token_ids
