"""Answers under a grammar on real sockets, with the real library. (The built-in pair:
tests/runtime/test_built_in_pair.py.)"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Sequence

import pytest

import live
from outrider.core.grammar import Grammar, GrammarKind
from outrider.core.tokens import GrammarError, Rule, SamplingParams
from outrider.engines.grammar import GrammarReader, MaskConstraint
from outrider.proto.messages import Code
from outrider.runtime.access import hash_token
from outrider.runtime.edge import EdgeRuntime
from outrider.runtime.edgerequest import EdgeRequest
from outrider.runtime.failures import CloudError
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
            pair.edge.drafting._grammars = None
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


class Held:
    """Stands before `MaskConstraint.allowed` in the cloud: waits where it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.going, self.waits = threading.Event(), 0
        own, allowed = threading.get_ident(), MaskConstraint.allowed

        def slow(mask: MaskConstraint, output: Sequence[int]) -> object:
            name = threading.current_thread().name
            assert threading.get_ident() != own, "no mask is made on the event loop"
            if name.startswith("outrider-grammars") and len(output) > 2:
                self.waits += 1
                assert self.going.wait(live.PATIENCE)
            return allowed(mask, output)

        monkeypatch.setattr(MaskConstraint, "allowed", slow)


def test_field_case_33_masks_that_take_long_hold_up_their_own_answer(monkeypatch):
    """Steps of others are answered meanwhile, with and without a grammar of their own."""
    expected = {3: alone(params(3)), 4: alone(params(4, max_tokens=2))}
    held = Held(monkeypatch)

    async def work() -> None:
        tokens = {hash_token(name): name for name in ("one", "two")}
        async with (
            live.server(tokens=tokens) as cloud,
            live.edge(cloud.port, live.drafter(0.3), token="one") as one,
            live.edge(cloud.port, live.drafter(0.3), token="two") as two,
        ):
            request = EdgeRequest(prompt_ids=live.PROMPT, params=params(3))
            slow = asyncio.create_task(_heard(one, request))
            await live.until(lambda: held.waits == 1)
            plain = SamplingParams(seed=1, max_tokens=20, ignore_eos=True)
            other = EdgeRequest(prompt_ids=live.PROMPT, params=plain)
            for edge in (one, two):
                assert (await _heard(edge, other)).tokens == live.alone(plain).token_ids
            short = params(4, max_tokens=2)
            brief = EdgeRequest(prompt_ids=live.PROMPT, params=short, schedule=Schedule.CLOUD_ONLY)
            assert (await _heard(two, brief)).tokens == expected[4]
            assert held.waits == 1
            assert not slow.done()
            held.going.set()
            assert (await slow).tokens == expected[3]

    live.run(work())


def test_an_answer_given_up_while_its_masks_are_made_leaves_nothing(monkeypatch):
    held = Held(monkeypatch)

    async def work() -> None:
        async with live.pair(draft=live.drafter(0.3)) as pair:
            request = EdgeRequest(prompt_ids=live.PROMPT, params=params(3))
            stream = await pair.edge.stream(request)
            await live.until(lambda: held.waits == 1)
            stream.close()
            await live.until(lambda: not pair.cloud.service.sessions)
            held.going.set()
            await live.until(lambda: not any(pair.held))
            plain = SamplingParams(seed=1, max_tokens=20)
            other = EdgeRequest(prompt_ids=live.PROMPT, params=plain)
            assert (await pair.ask(other)).tokens == live.alone(plain).token_ids

    live.run(work())


async def _heard(edge: EdgeRuntime, request: EdgeRequest) -> live.Heard:
    return await live.hear(await edge.stream(request))
