"""Answers under a grammar on real sockets, with the real library. (The built-in pair:
tests/runtime/test_built_in_pair.py.)"""

from __future__ import annotations

import re

import pytest

import live
from outrider.core.grammar import Grammar, GrammarKind
from outrider.core.tokens import GrammarError, Rule, SamplingParams
from outrider.engines.grammar import GrammarReader
from outrider.proto.messages import Code
from outrider.runtime.edge import CloudError, EdgeRequest
from outrider.runtime.local import GenerationRequest, LocalGenerator

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
