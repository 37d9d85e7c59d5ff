"""OpenAI's own Python client, unchanged, against a gateway on a real socket."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from live import PATIENCE, TOKENIZER, alone, run
from outrider.core.tokens import SamplingParams
from outrider.runtime.access import read_tokens
from served import HELLO, MODEL, Served, served

PROMPT = tuple(TOKENIZER.chat(HELLO))


def client(gateway: Served, **how: Any) -> AsyncOpenAI:
    facts: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE}
    return AsyncOpenAI(base_url=f"{gateway.url}/v1", **(facts | how))


def expected(**params: Any) -> str:
    return alone(SamplingParams(seed=7, max_tokens=24, **params), PROMPT).text


def test_a_chat_whole_streamed_and_through_the_streaming_helper():
    async def work() -> None:
        async with served() as gateway, client(gateway) as api:
            how: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 24, "seed": 7}
            whole = await api.chat.completions.create(**how)
            assert whole.choices[0].message.content == expected()
            assert whole.choices[0].finish_reason == "length"
            assert whole.usage is not None
            details = whole.usage.completion_tokens_details
            assert details is not None
            assert details.accepted_prediction_tokens is not None
            assert whole._request_id is not None
            parts = [
                chunk.choices[0].delta.content or ""
                async for chunk in await api.chat.completions.create(**how, stream=True)
            ]
            assert "".join(parts) == expected()
            async with api.chat.completions.stream(
                **(how | {"stop": [*"aeiou "], "max_tokens": 500}),  # the helper wants an end
                n=2,
                logprobs=True,
                stream_options={"include_usage": True},
            ) as stream:
                kinds = {event.type async for event in stream}
                final = await stream.get_final_completion()
            assert {"content.delta", "content.done", "logprobs.content.delta"} <= kinds
            assert len(final.choices) == 2
            assert [choice.finish_reason for choice in final.choices] == ["stop", "stop"]
            first = final.choices[0].message.content or ""
            assert first
            assert expected().startswith(first)
            assert final.usage is not None
            assert final.usage.completion_tokens > len(first)

    run(work())


def test_an_answer_that_ends_at_once_streams_too():
    async def work() -> None:
        async with served() as gateway, client(gateway) as api:
            bias = {str(TOKENIZER.END): 100}
            async with api.chat.completions.stream(
                model=MODEL, messages=HELLO, logit_bias=bias, seed=1
            ) as stream:
                final = await stream.get_final_completion()
            assert final.choices[0].message.content in (None, "")
            assert final.choices[0].finish_reason == "stop"

    run(work())


def test_completions_models_and_our_own_fields():
    async def work() -> None:
        async with served() as gateway, client(gateway) as api:
            assert [model.id async for model in api.models.list()] == [MODEL]
            assert (await api.models.retrieve(MODEL)).owned_by == "outrider"
            made = await api.completions.create(
                model=MODEL,
                prompt=[list(PROMPT)],
                max_tokens=24,
                seed=7,
                logprobs=1,
                temperature=0.5,
                extra_body={"top_k": 5, "outrider": {"schedule": "sync", "details": True}},
            )
            assert made.choices[0].text == expected(temperature=0.5, top_k=5)
            assert made.choices[0].logprobs is not None
            told: Any = made.model_extra
            assert told["outrider"]["choices"][0]["summary"]["schedule"] == "sync"

    run(work())


def test_errors_are_the_clients_own_classes(tmp_path: Path):
    keys = tmp_path / "keys"
    keys.write_text("alice:sk-alice\n")

    async def work() -> None:
        config = {"keys": read_tokens(keys)}
        async with served(config=config, give_up=0.3) as gateway:
            how: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 5}
            async with client(gateway) as stranger:
                with pytest.raises(openai.AuthenticationError):
                    await stranger.chat.completions.create(**how)
            async with client(gateway, api_key="sk-alice") as api:
                with pytest.raises(openai.BadRequestError) as bad:
                    await api.chat.completions.create(**how, temperature=-1)
                assert bad.value.param == "temperature"
                with pytest.raises(openai.BadRequestError) as long:
                    await api.completions.create(model=MODEL, prompt="x" * 5000)
                assert long.value.code == "context_length_exceeded"
                with pytest.raises(openai.NotFoundError) as none:
                    await api.chat.completions.create(**(how | {"model": "gpt-5"}))
                assert none.value.code == "model_not_found"
                await gateway.pair.cloud.stop()
                with pytest.raises(openai.InternalServerError):
                    await api.chat.completions.create(**how)

    run(work())


def test_an_error_in_a_stream_is_raised_and_never_taken_for_an_end():
    async def work() -> None:
        slow = {"pace": 0.01}
        async with served(cloud=slow, give_up=0.3) as gateway, client(gateway) as api:
            stream = await api.chat.completions.create(
                model=MODEL,
                messages=HELLO,
                max_tokens=2000,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            reasons = []

            async def listen() -> None:
                async for chunk in stream:
                    reasons.append(chunk.choices[0].finish_reason)
                    if len(reasons) == 5:
                        await gateway.pair.cloud.stop()

            with pytest.raises(openai.APIError, match="no working link"):
                await listen()
            assert len(reasons) >= 5
            assert set(reasons) == {None}

    run(work())


def test_the_client_without_asyncio():
    def ask(url: str) -> str | None:
        with OpenAI(base_url=f"{url}/v1", api_key="none", timeout=PATIENCE) as api:
            made = api.chat.completions.create(
                model=MODEL, messages=HELLO, max_completion_tokens=24, seed=7
            )
            return made.choices[0].message.content

    async def work() -> None:
        async with served() as gateway:
            assert await asyncio.to_thread(ask, gateway.url) == expected()

    run(work())
