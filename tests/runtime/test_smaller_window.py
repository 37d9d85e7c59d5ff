"""A verifier with a smaller window than the edge assumed: both sides end at the same token."""

from __future__ import annotations

import asyncio

import pytest

from outrider.core.tokens import FinishReason, SamplingParams
from outrider.engines.desk import SlotDesk
from outrider.engines.tokenizer import ByteTokenizer
from outrider.engines.toy import ToyModel, random_law
from outrider.proto.messages import Code
from outrider.runtime.cloud import CloudConfig, CloudServer
from outrider.runtime.edge import EdgeRuntime
from outrider.runtime.edgeconfig import EdgeConfig
from outrider.runtime.edgerequest import EdgeRequest
from outrider.runtime.edgestream import EdgeResult
from outrider.runtime.failures import CloudError

WINDOW = 24


async def answer(prompt: tuple[int, ...]) -> EdgeResult:
    words = ByteTokenizer()
    model = ToyModel(
        random_law(1, words.vocab_size),
        vocab_size=words.vocab_size,
        context_length=WINDOW,
        fingerprint=words.fingerprint,
    )
    async with CloudServer(SlotDesk(model), words, CloudConfig(port=0)) as server:
        config = EdgeConfig(url=f"ws://127.0.0.1:{server.port}")
        async with EdgeRuntime(config, words, context_length=1000) as runtime:
            params = SamplingParams(max_tokens=100, ignore_eos=True)
            stream = await runtime.stream(EdgeRequest(prompt_ids=prompt, params=params))
            async for _ in stream:
                pass
            return stream.result


def test_the_first_answer_ends_at_the_verifiers_window():
    result = asyncio.run(answer(tuple(range(4))))
    assert result.generation.completion_tokens == WINDOW - 4
    assert result.generation.finish_reason is FinishReason.LENGTH
    assert result.confirmed


def test_a_prompt_that_fits_only_here_is_refused():
    with pytest.raises(CloudError) as refused:
        asyncio.run(answer(tuple(range(WINDOW))))
    assert refused.value.code is Code.CONTEXT
