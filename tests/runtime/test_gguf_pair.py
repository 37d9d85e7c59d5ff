"""The built-in model on llama.cpp in every place a model can have: the text never changes (I1)."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from live import hear, run
from outrider.core.tokens import Rule, SamplingParams
from outrider.engines import builtin
from outrider.engines.load import Loaded, load_drafter, load_target, load_vocabulary
from outrider.runtime.edge import EdgeRuntime
from outrider.runtime.edgeconfig import EdgeConfig
from outrider.runtime.edgerequest import EdgeRequest
from outrider.runtime.local import GenerationRequest, GenerationResult, LocalGenerator
from outrider.runtime.process import CloudProcess
from outrider.session.schedules import Schedule

pytest.importorskip(
    "llama_cpp", reason="llama-cpp-python is not installed: pip install 'outrider[llamacpp]'"
)
pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        builtin.find_gguf() is None, reason="the built-in weights are not here: outrider pull"
    ),
]
PROMPTS = ("Why is the sky blue?", "Count from one to twenty.", "def add(a, b):")
PARAMS = SamplingParams(seed=3, max_tokens=24, temperature=0.7)


@functools.cache
def quantised() -> Loaded:
    return load_target(builtin.GGUF_SPEC, threads=1, max_slots=4)


def ids_of(loaded: Loaded, text: str) -> tuple[int, ...]:
    return tuple(loaded.tokenizer.chat([{"role": "user", "content": text}]))


def ask(
    target: Loaded, drafter: Any, text: str, k: int, params: SamplingParams, rule: Rule
) -> GenerationResult:
    made = LocalGenerator(target.model, target.tokenizer, drafter)
    request = GenerationRequest(
        prompt_ids=ids_of(target, text), params=params, draft_length=k, rule=rule
    )
    try:
        return made.generate(request)
    finally:
        made.close()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_quantised_target_says_the_same_with_any_draft(temperature: float) -> None:
    target = quantised()
    params = replace(PARAMS, temperature=temperature)
    own = load_drafter(builtin.GGUF_SPEC, target, threads=1, max_slots=2)
    for text in PROMPTS[:2]:
        alone = ask(target, None, text, 0, params, Rule.COUPLED)
        for drafter, k in ((load_drafter("lookup", target), 5), (own, 2), (own, 7)):
            found = ask(target, drafter, text, k, params, Rule.COUPLED)
            assert found.token_ids == alone.token_ids
            assert found.text == alone.text
    assert found.counters.acceptance == 1.0, "its own twin is always right"


def test_the_shipped_draft_guesses_for_it_too() -> None:
    """Its layers are read from the same file, whoever computes the target."""
    pytest.importorskip("torch", reason="the torch extra is not installed")
    target = quantised()
    draft = load_drafter("small", target, threads=1, max_slots=2)
    alone = ask(target, None, PROMPTS[0], 0, PARAMS, Rule.COUPLED)
    found = ask(target, draft, PROMPTS[0], 4, PARAMS, Rule.COUPLED)
    assert found.token_ids == alone.token_ids
    assert found.counters.acceptance is not None
    assert found.counters.acceptance > 0.2


def test_ratio_with_a_quantised_draft() -> None:
    """Its q is that of the target, so nothing is ever rejected."""
    target = quantised()
    own = load_drafter(builtin.GGUF_SPEC, target, threads=1, max_slots=2)
    found = ask(target, own, PROMPTS[0], 4, PARAMS, Rule.RATIO)
    assert found.counters.acceptance == pytest.approx(1.0, abs=0.1)


@pytest.mark.slow
def test_the_quantised_self_drafts_for_the_whole_target() -> None:
    """hf target in bfloat16, the same model quantised as draft: other engine, same vocabulary."""
    pytest.importorskip("torch", reason="the torch extra is not installed")
    target = load_target(builtin.SPEC, threads=1, max_slots=2)
    draft = load_drafter(builtin.GGUF_SPEC, target, threads=1, max_slots=2)
    alone = ask(target, None, PROMPTS[0], 0, PARAMS, Rule.COUPLED)
    found = ask(target, draft, PROMPTS[0], 4, PARAMS, Rule.COUPLED)
    assert found.token_ids == alone.token_ids
    assert found.counters.acceptance is not None
    assert found.counters.acceptance > 0.6


@pytest.mark.timeout(300)
def test_a_quantised_target_through_the_wire() -> None:
    target = quantised()
    local = LocalGenerator(target.model, target.tokenizer)
    vocabulary = load_vocabulary(builtin.GGUF_SPEC)
    words = ["--model", builtin.GGUF_SPEC, "--threads", "1", "--slots", "2"]

    async def work() -> None:
        async with CloudProcess(words) as cloud:
            draft = load_drafter(f"lookup+{builtin.GGUF_SPEC}", vocabulary, threads=1, max_slots=2)
            config = EdgeConfig(url=cloud.url)
            async with EdgeRuntime(config, vocabulary.tokenizer, draft) as runtime:
                for i, schedule in enumerate((Schedule.SYNC, Schedule.FREERUN, Schedule.PEARL)):
                    ids = ids_of(target, PROMPTS[i])
                    alone = local.generate(
                        GenerationRequest(prompt_ids=ids, params=PARAMS, draft_length=0)
                    )
                    request = EdgeRequest(prompt_ids=ids, params=PARAMS, schedule=schedule)
                    heard = await hear(await runtime.stream(request))
                    assert heard.tokens == alone.token_ids, schedule
                    assert heard.text == alone.text

    run(work(), patience=280.0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_edge_without_torch_speaks_to_a_target_on_torch() -> None:
    """The greeting compares what the tokenizers do, not where they came from."""
    pytest.importorskip("torch", reason="the torch extra is not installed")
    target = load_target(builtin.SPEC, threads=1, max_slots=2)
    local = LocalGenerator(target.model, target.tokenizer)
    vocabulary = load_vocabulary(builtin.GGUF_SPEC)

    async def work() -> None:
        async with CloudProcess(["--model", builtin.SPEC, "--threads", "1"]) as cloud:
            draft = load_drafter(builtin.GGUF_SPEC, vocabulary, threads=1, max_slots=2)
            config = EdgeConfig(url=cloud.url)
            async with EdgeRuntime(config, vocabulary.tokenizer, draft) as runtime:
                for schedule in (Schedule.SYNC, Schedule.STREAM, Schedule.FREERUN):
                    ids = ids_of(vocabulary, PROMPTS[0])
                    assert ids == ids_of(target, PROMPTS[0])
                    alone = local.generate(
                        GenerationRequest(prompt_ids=ids, params=PARAMS, draft_length=0)
                    )
                    request = EdgeRequest(prompt_ids=ids, params=PARAMS, schedule=schedule)
                    heard = await hear(await runtime.stream(request))
                    assert heard.tokens == alone.token_ids, schedule

    run(work(), patience=580.0)
