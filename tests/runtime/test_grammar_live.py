"""Answers under a grammar on real sockets, with the real library: toy bytes, and the built-in
pair."""

from __future__ import annotations

import json
import re

import pytest

import live
from outrider.core.grammar import Grammar, GrammarKind
from outrider.core.tokens import GrammarError, Rule, SamplingParams
from outrider.engines.base import EngineError
from outrider.engines.desk import SlotDesk
from outrider.engines.grammar import GrammarReader
from outrider.proto.messages import Code
from outrider.runtime.cloud import CloudConfig, CloudServer
from outrider.runtime.edge import CloudError, EdgeConfig, EdgeRequest, EdgeRuntime
from outrider.runtime.local import GenerationRequest, LocalGenerator
from outrider.session.schedules import Schedule

PATTERN = "([a-m]{1,4} ){3,6}x"
REGEX = Grammar(kind=GrammarKind.REGEX, text=PATTERN)


def params(seed: int, **changes: object) -> SamplingParams:
    values = {"seed": seed, "max_tokens": 60, "grammar": REGEX, "temperature": 1.0}
    return SamplingParams(**{**values, **changes})  # type: ignore[arg-type]


def alone(wanted: SamplingParams) -> tuple[int, ...]:
    generator = LocalGenerator(
        live.toy(live.TARGET), live.TOKENIZER, grammars=GrammarReader(live.TOKENIZER)
    )
    request = GenerationRequest(prompt_ids=live.PROMPT, params=wanted, draft_length=0)
    return generator.generate(request).token_ids


def test_the_text_is_the_masked_targets_on_real_sockets():
    async def work() -> None:
        async with live.pair(draft=live.drafter(0.3)) as pair:
            for i, schedule in enumerate(live.SCHEDULES):
                wanted = params(i, temperature=(1.0, 0.0)[i % 2])
                request = EdgeRequest(prompt_ids=live.PROMPT, params=wanted, schedule=schedule)
                heard = await pair.ask(request)
                assert heard.tokens == alone(wanted), schedule
                assert re.fullmatch(PATTERN, heard.text)
            for rule in (Rule.RATIO,):
                request = EdgeRequest(prompt_ids=live.PROMPT, params=params(9), rule=rule)
                assert re.fullmatch(PATTERN, (await pair.ask(request)).text)

    live.run(work())


@pytest.mark.parametrize("draft", ["model", "lookup+model"])
def test_in_one_process_too(draft: str):
    drafter = live.drafter(0.3)
    drafter._lookup = draft != "model"
    generator = LocalGenerator(
        live.toy(live.TARGET), live.TOKENIZER, drafter, grammars=GrammarReader(live.TOKENIZER)
    )
    for seed in range(6):
        wanted = params(seed, temperature=(1.0, 0.0)[seed % 2])
        request = GenerationRequest(prompt_ids=live.PROMPT, params=wanted)
        result = generator.generate(request)
        assert result.token_ids == alone(wanted)
        assert result.counters.accepted > 0


def test_a_bad_grammar_is_refused_before_anything_is_sent():
    async def work() -> None:
        bad = params(1, grammar=Grammar(kind=GrammarKind.REGEX, text="(a"))
        async with live.pair(draft=live.drafter(0.3)) as pair:
            with pytest.raises(GrammarError, match="invalid regex"):
                await pair.edge.stream(EdgeRequest(prompt_ids=live.PROMPT, params=bad))
            assert not pair.edge.link_use.payload_up

    live.run(work())


def test_the_cloud_reads_and_refuses_for_itself(monkeypatch: pytest.MonkeyPatch):
    """An edge without the library, or with bad will."""

    async def work() -> None:
        bad = params(1, grammar=Grammar(kind=GrammarKind.REGEX, text="(a"))
        async with live.pair(draft=live.drafter(0.3)) as pair:
            pair.edge._grammars = None
            for wanted in (bad, params(2)):
                stream = await pair.edge.stream(EdgeRequest(prompt_ids=live.PROMPT, params=wanted))
                if wanted is bad:
                    with pytest.raises(CloudError) as caught:
                        await live.hear(stream)
                    assert caught.value.code is Code.GRAMMAR
                else:
                    assert (await live.hear(stream)).tokens == alone(wanted)

    live.run(work())


def test_a_cloud_without_the_library_says_so():
    async def work() -> None:
        async with live.pair(draft=live.drafter(0.3)) as pair:
            pair.cloud._grammars = pair.cloud.service._grammars = None
            stream = await pair.edge.stream(EdgeRequest(prompt_ids=live.PROMPT, params=params(1)))
            with pytest.raises(CloudError, match=r"outrider\[grammar\]") as caught:
                await live.hear(stream)
            assert caught.value.code is Code.GRAMMAR

    live.run(work())


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "count": {"type": "integer"}},
    "required": ["ok", "count"],
    "additionalProperties": False,
}


@pytest.mark.model
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_built_in_pair_writes_json_of_a_schema(temperature: float):
    """Ids as of the masked target alone, whoever drafts and whatever the schedule."""
    from outrider.engines.load import load_drafter, load_target

    try:
        target = load_target("builtin:smollm2", threads=1)
        draft = load_drafter("lookup+small", target, threads=1)
    except EngineError as error:
        pytest.skip(str(error))
    prompt = tuple(target.tokenizer.chat([{"role": "user", "content": "JSON: is 3 odd?"}]))
    wanted = SamplingParams(
        seed=5,
        max_tokens=24,
        temperature=temperature,
        grammar=Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(SCHEMA)),
    )
    generator = LocalGenerator(
        target.model, target.tokenizer, grammars=GrammarReader(target.tokenizer)
    )
    own = generator.generate(GenerationRequest(prompt_ids=prompt, params=wanted, draft_length=0))
    generator.close()
    value = json.loads(own.text)
    assert set(value) == {"ok", "count"}

    async def work() -> None:
        cloud = CloudServer(SlotDesk(target.model), target.tokenizer, CloudConfig(port=0))
        async with cloud:
            config = EdgeConfig(url=f"ws://127.0.0.1:{cloud.port}")
            async with EdgeRuntime(config, target.tokenizer, draft) as edge:
                for schedule in (Schedule.SYNC, Schedule.FREERUN):
                    request = EdgeRequest(prompt_ids=prompt, params=wanted, schedule=schedule)
                    heard = await live.hear(await edge.stream(request))
                    assert heard.tokens == own.token_ids, schedule
                    assert heard.result.generation.counters.accepted > 0

    live.run(work(), patience=100.0)
