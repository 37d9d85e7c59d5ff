"""response_format and tools over HTTP, on a toy pair that would write any bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from live import TOKENIZER, WIDTH, run, toy
from outrider.engines.drafters import ModelDrafter
from outrider.engines.toy import blend_law, random_law
from served import CHAT, chat, served
from toys import remember

LAW = remember(random_law(5, WIDTH), 2)
DRAFT = remember(blend_law(LAW, random_law(6, WIDTH), 0.3, 4), 3)
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["small", "large", "huge"]}},
    "required": ["ok", "size"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA}}


TOOLS = [tool("one"), tool("two")]


def gateway() -> Any:
    return served(model=toy(LAW), draft=ModelDrafter("toy", model=toy(DRAFT)))


def test_an_answer_is_json_of_the_schema_streamed_and_whole():
    async def work() -> None:
        async with gateway() as g:
            accepted = 0
            for seed in range(4):
                body = chat(response_format=FORMAT, seed=seed, max_tokens=80)
                whole = (await g.post(CHAT, body)).json()
                (choice,) = whole["choices"]
                assert choice["finish_reason"] == "stop"
                assert set(json.loads(choice["message"]["content"])) == {"ok", "size"}
                events = await g.events(CHAT, body)
                deltas = [e["choices"][0]["delta"] for e in events[:-1]]
                assert "".join(d.get("content", "") for d in deltas) == choice["message"]["content"]
                details = whole["usage"]["completion_tokens_details"]
                accepted += details["accepted_prediction_tokens"]
            assert accepted > 0, "speculation goes on under a grammar"
            body = chat(response_format={"type": "json_object"}, max_tokens=4)
            text = (await g.post(CHAT, body)).json()["choices"][0]["message"]["content"]
            assert text.startswith("{")

    run(work())


@pytest.mark.parametrize(
    "more",
    [
        {"tool_choice": "required"},
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": {"type": "function", "function": {"name": "two"}}},
    ],
)
def test_field_case_27(more: dict[str, Any]):
    """The same calls streamed and whole; `finish_reason` "tool_calls" in both."""

    async def work() -> None:
        async with gateway() as g:
            for seed in range(4):
                body = chat(tools=TOOLS, seed=seed, max_tokens=900, temperature=0.8, **more)
                choice = (await g.post(CHAT, body)).json()["choices"][0]
                calls = choice["message"]["tool_calls"]
                assert choice["finish_reason"] == "tool_calls"
                assert choice["message"]["content"] is None
                for call in calls:
                    assert set(json.loads(call["function"]["arguments"])) == {"ok", "size"}
                if more.get("parallel_tool_calls") is False or isinstance(
                    more["tool_choice"], dict
                ):
                    assert len(calls) == 1
                if isinstance(more["tool_choice"], dict):
                    assert calls[0]["function"]["name"] == "two"
                assert len({call["id"] for call in calls}) == len(calls)
                streamed: list[dict[str, Any]] = []
                events = await g.events(CHAT, body)
                for event in events[:-1]:
                    for part in event["choices"][0]["delta"].get("tool_calls", ()):
                        if part["index"] == len(streamed):
                            streamed.append(part["function"] | {"id": part["id"]})
                        else:
                            streamed[-1]["arguments"] += part["function"]["arguments"]
                assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
                assert [(c["name"], c["arguments"]) for c in streamed] == [
                    (c["function"]["name"], c["function"]["arguments"]) for c in calls
                ]

    run(work())


def test_auto_may_write_and_none_calls_nothing():
    async def work() -> None:
        async with gateway() as g:
            kinds = set()
            for seed in range(3):
                body = chat(tools=TOOLS, seed=seed, max_tokens=40)
                choice = (await g.post(CHAT, body)).json()["choices"][0]
                kinds.add("tool_calls" in choice["message"])
            assert False in kinds
            plain = (await g.post(CHAT, chat())).json()["choices"][0]["message"]
            none = (await g.post(CHAT, chat(tools=TOOLS, tool_choice="none"))).json()
            assert none["choices"][0]["message"] == plain

    run(work())


def test_calls_and_results_go_back_into_the_conversation():
    messages = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "one", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]

    async def work() -> None:
        async with gateway() as g:
            answer = await g.post(CHAT, chat(messages=messages, max_tokens=2))
            assert answer.status_code == 200, answer.text
            text = 'user: hi\nassistant: {"name": "one", "arguments": {}}\n'
            text += "user: Result of one: 42\nassistant: "
            assert answer.json()["usage"]["prompt_tokens"] == len(TOKENIZER.encode(text))

    run(work())


WRONG: list[tuple[dict[str, Any], str, str]] = [
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}},
            }
        },
        "response_format",
        "uniqueItems",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"tool_choice": "required"}, "tool_choice", "tools"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}},
        "tool_choice",
        "no",
    ),
    ({"tools": [tool("one"), tool("one")]}, "tools", "one name"),
    ({"tools": TOOLS, "response_format": FORMAT}, "response_format", "tools"),
    (
        {
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {"properties": {"a": {"not": {}}}}},
                }
            ]
        },
        "tools",
        "not",
    ),
    ({"response_format": FORMAT, "ignore_eos": True}, "ignore_eos", "grammar"),
]


@pytest.mark.parametrize(("more", "param", "word"), WRONG)
def test_what_cannot_be_is_named(more: dict[str, Any], param: str, word: str):
    async def work() -> None:
        async with gateway() as g:
            for stream in (False, True):
                answer = await g.post(CHAT, chat(stream=stream, **more))
                assert answer.status_code == 400, answer.text
                error = answer.json()["error"]
                assert error["param"] == param
                assert word in error["message"]

    run(work())
