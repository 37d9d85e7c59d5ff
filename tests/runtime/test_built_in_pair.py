"""The built-in pair on real sockets: grammars, recordings, several answers at once. One file, so
that one test process loads it once; prompts are short, since a forward of it is dear on a CPU."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from live import ask, hear, run
from outrider.bench import recording
from outrider.core.grammar import Grammar, GrammarKind
from outrider.core.tokens import Rule, SamplingParams
from outrider.engines.base import MissingExtraError, ModelNotFoundError
from outrider.engines.desk import SlotDesk
from outrider.engines.drafters import Drafter, ModelDrafter
from outrider.engines.grammar import GrammarReader
from outrider.engines.lockstep import Ask, propose_together
from outrider.engines.replay import Recorded, ReplayDrafter
from outrider.gateway.app import GatewayConfig, make_app
from outrider.gateway.server import GatewayServer
from outrider.runtime.cloud import CloudConfig, CloudServer
from outrider.runtime.edge import EdgeRuntime
from outrider.runtime.edgeconfig import EdgeConfig
from outrider.runtime.local import GenerationRequest, GenerationResult, LocalGenerator
from outrider.session.generation import Counters
from outrider.session.schedules import Schedule
from outrider.session.service import ServiceConfig
from recordings import shape
from served import events

pytestmark = [pytest.mark.model, pytest.mark.timeout(400)]  # loading on a busy machine
SHARED = (Schedule.MULTIPLEX, Schedule.HYBRID)
TEXTS = ("A tree is", "One, two, three,", "The sky is blue", "Rivers: the")


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


def prompts_of(target: Any) -> list[tuple[int, ...]]:
    return [tuple(target.tokenizer.encode(text)) for text in TEXTS]


def alone(target: Any, prompt: Sequence[int], params: SamplingParams) -> GenerationResult:
    """What the target says by itself."""
    own = LocalGenerator(target.model, target.tokenizer, grammars=GrammarReader(target.tokenizer))
    try:
        return own.generate(
            GenerationRequest(prompt_ids=tuple(prompt), params=params, draft_length=0)
        )
    finally:
        own.close()


# ------------------------------------------------------------------------------- grammars


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("temperature", "schedule"), [(0.0, Schedule.SYNC), (1.0, Schedule.FREERUN)]
)
def test_it_writes_json_of_a_schema(
    built_in: tuple[Any, ModelDrafter], temperature: float, schedule: Schedule
):
    """Ids as of the masked target alone, whoever drafts and whatever the schedule."""
    pytest.importorskip("llguidance", reason="the grammar extra is not installed")
    from outrider.engines.load import load_drafter

    target, _ = built_in
    draft = load_drafter("lookup+small", target, threads=1)
    prompt = tuple(target.tokenizer.encode("Is 3 odd? JSON:"))
    grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(SCHEMA))
    wanted = SamplingParams(seed=5, max_tokens=16, temperature=temperature, grammar=grammar)
    own = alone(target, prompt, wanted)
    assert set(json.loads(own.text)) == {"ok"}

    async def work() -> None:
        cloud = CloudServer(SlotDesk(target.model), target.tokenizer, CloudConfig(port=0))
        async with cloud:
            config = EdgeConfig(url=f"ws://127.0.0.1:{cloud.port}")
            async with EdgeRuntime(config, target.tokenizer, draft) as edge:
                heard = await hear(await edge.stream(ask(wanted, schedule, prompt=prompt)))
                assert heard.tokens == own.token_ids
                assert heard.result.generation.counters.accepted > 0

    run(work(), patience=100.0)


# ------------------------------------------------------------------------------- recordings


def test_recorded_and_replayed(built_in: tuple[Any, ModelDrafter]):
    """A replay drafts and is accepted as the draft it was recorded of."""
    target, small = built_in
    prompt = prompts_of(target)[0]
    wanted = shape(temperature=0.7, max_tokens=10)
    (answer,) = recording.record(target, small, [(7, ("t", prompt))], wanted, window=3)
    spent = recording.token_seconds(small, prompt, wanted.params(7))
    assert spent > 0.0
    header = recording.header(target, "small", wanted, seed=7, window=3, spent=spent)
    held = Recorded(name="x", header=header, answers=(answer,))
    plain = alone(target, prompt, wanted.params(7))
    assert answer.output == plain.token_ids

    async def counted(cloud: CloudServer, draft: Drafter) -> Counters:
        url = f"ws://127.0.0.1:{cloud.port}"
        async with EdgeRuntime(EdgeConfig(url=url), target.tokenizer, draft) as runtime:
            request = ask(wanted.params(7), Schedule.SYNC, prompt=prompt, draft_length=3)
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


# ------------------------------------------------------------------------------- at once


def test_the_draft_drafts_in_company_what_it_drafts_alone(built_in: tuple[Any, ModelDrafter]):
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


def test_four_answers_on_one_edge(built_in: tuple[Any, ModelDrafter]):
    target, small = built_in
    prompts = prompts_of(target)
    params = [SamplingParams(temperature=0.7, seed=i, max_tokens=6) for i in range(4)]
    wanted = [alone(target, p, s).token_ids for p, s in zip(prompts, params, strict=True)]
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
                    await edge.stream(ask(s, SHARED[i % 2], prompt=p))
                    for i, (p, s) in enumerate(zip(prompts, params, strict=True))
                ]
                heard = await asyncio.gather(*(hear(stream) for stream in streams))
        assert [answer.tokens for answer in heard] == wanted
        assert all(answer.result.confirmed for answer in heard)
        assert sum(answer.result.generation.counters.accepted for answer in heard) > 1

    run(work(), patience=300.0)


# ------------------------------------------------------------------------------- over HTTP


@pytest.mark.slow
def test_a_chat_over_http_is_what_the_target_says_alone(built_in: tuple[Any, ModelDrafter]):
    """A streamed chat, and the same whole: the text of the target alone for the seed."""
    target, small = built_in
    question = [{"role": "user", "content": "Name a colour."}]
    own = alone(target, target.tokenizer.chat(question), SamplingParams(seed=7, max_tokens=8))

    async def work() -> None:
        cloud = CloudServer(SlotDesk(target.model), target.tokenizer, CloudConfig(port=0))
        async with cloud:
            config = EdgeConfig(url=f"ws://127.0.0.1:{cloud.port}")
            async with EdgeRuntime(config, target.tokenizer, small) as edge:
                app = make_app(edge, GatewayConfig(models=("builtin:smollm2",)))
                async with (
                    GatewayServer(app, "127.0.0.1", 0) as server,
                    httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as http,
                ):
                    body = {"model": "builtin:smollm2", "messages": question, "seed": 7}
                    body |= {"max_tokens": 8}
                    path = "/v1/chat/completions"
                    raw = await http.post(path, json=body | {"stream": True}, timeout=100.0)
                    deltas = [e["choices"][0]["delta"] for e in events(raw.content)[:-1]]
                    assert "".join(d.get("content") or "" for d in deltas) == own.text
                    whole = (await http.post(path, json=body, timeout=100.0)).json()
                    assert whole["choices"][0]["message"]["content"] == own.text
                app.state.gateway.lanes.close()

    run(work(), patience=200.0)
