"""What the gateway answers: shapes of both endpoints, streamed and whole, and the same text."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import numpy as np
import pytest

from live import TARGET, TOKENIZER, WIDTH, alone, drafter, run, toy
from outrider.core.rng import choice_seed
from outrider.core.tokens import SamplingParams
from outrider.engines.drafters import ModelDrafter
from outrider.engines.tokenizer import ByteTokenizer
from outrider.engines.toy import scripted_law, table_law
from served import CHAT, HELLO, MODEL, TEXT, Served, chat, served, text

CHAT_PROMPT = tuple(TOKENIZER.chat(HELLO))
END = ByteTokenizer.END


def target_text(prompt: tuple[int, ...], **params: Any) -> str:
    return alone(SamplingParams(**params), prompt).text


def joined(events: list[Any], index: int = 0) -> str:
    """The text of a choice's deltas, of either endpoint."""
    parts = []
    for event in events[:-1]:
        for choice in event["choices"]:
            if choice["index"] == index:
                parts.append(choice["text"] if "text" in choice else choice["delta"].get("content"))
    return "".join(part or "" for part in parts)


def says(ids: list[int], prompt: str, context_length: int = 4096) -> dict[str, Any]:
    """A pair whose target says these ids behind a prompt of that length, and then ends; its draft
    is right about every other one."""
    start = len(TOKENIZER.encode(prompt))
    law = scripted_law(ids, start=start, width=WIDTH, filler=END)
    wrong = [token if i % 2 else 120 for i, token in enumerate(ids)]
    guess = scripted_law(wrong, start=start, width=WIDTH, filler=END)
    facts = {"context_length": context_length}
    return {
        "model": toy(law, **facts),
        "draft": ModelDrafter("scripted", model=toy(guess, **facts)),
        "context_length": context_length,
    }


# -- the same text ----------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["sync", "stream", "freerun", "cloud-only", "colocated"])
def test_the_text_is_the_targets_own_in_every_schedule(schedule: str):
    async def work() -> None:
        expected = target_text(CHAT_PROMPT, seed=7, max_tokens=24, temperature=0.8)
        async with served() as gateway:
            body = chat(temperature=0.8, outrider={"schedule": schedule})
            answer = (await gateway.post(CHAT, body)).json()
            assert answer["choices"][0]["message"]["content"] == expected
            assert joined(await gateway.events(CHAT, body)) == expected
            body = text(prompt=list(CHAT_PROMPT), temperature=0.8, outrider={"schedule": schedule})
            answer = (await gateway.post(TEXT, body)).json()
            assert answer["choices"][0]["text"] == expected
            assert joined(await gateway.events(TEXT, body)) == expected

    run(work())


def test_every_field_that_shapes_the_text_reaches_the_target():
    """Each alone changes the answer, and the answer is what the target says under it."""
    base = {"seed": 3, "max_tokens": 40, "temperature": 1.0}
    fields: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "temperature": ({"temperature": 0.2}, {"temperature": 0.2}),
        "top_p": ({"top_p": 0.3}, {"top_p": 0.3}),
        "top_k": ({"top_k": 1}, {"top_k": 1}),
        "min_p": ({"min_p": 0.9}, {"min_p": 0.9}),
        "seed": ({"seed": 4}, {"seed": 4}),
        "max": ({"max_tokens": 9}, {"max_tokens": 9}),
        "presence": ({"presence_penalty": 2.0}, {"presence_penalty": 2.0}),
        "frequency": ({"frequency_penalty": 2.0}, {"frequency_penalty": 2.0}),
        "repetition": ({"repetition_penalty": 3.0}, {"repetition_penalty": 3.0}),
        "bias": ({"logit_bias": {"101": 100}}, {"logit_bias": {101: 100.0}}),
        "end": ({"ignore_eos": True, "max_tokens": 90}, {"ignore_eos": True, "max_tokens": 90}),
        "stop ids": ({"stop_token_ids": [32]}, {"stop_token_ids": frozenset({32})}),
    }

    async def work() -> None:
        plain = target_text(CHAT_PROMPT, **base)
        async with served() as gateway:
            for name, (given, params) in fields.items():
                expected = target_text(CHAT_PROMPT, **(base | params))
                answer = (await gateway.post(CHAT, chat(**(base | given)))).json()
                assert answer["choices"][0]["message"]["content"] == expected, name
                assert expected != plain or name == "end", name

    run(work())


def test_choices_have_seeds_of_their_own_and_the_first_keeps_the_requests():
    async def work() -> None:
        async with served() as gateway:
            body = text(prompt=["hi", "ho"], n=3, max_tokens=12, temperature=1.0)
            whole = (await gateway.post(TEXT, body)).json()["choices"]
            streamed = await gateway.events(TEXT, body)
            assert [c["index"] for c in whole] == list(range(6))
            for place, prompt in enumerate(("hi", "ho")):
                for i in range(3):
                    seed = choice_seed(7, i)
                    ids = tuple(TOKENIZER.encode(prompt))
                    expected = target_text(ids, seed=seed, max_tokens=12)
                    assert whole[3 * place + i]["text"] == expected
                    assert joined(streamed, 3 * place + i) == expected
            ends = [c["index"] for e in streamed[:-1] for c in e["choices"] if c["finish_reason"]]
            assert sorted(ends) == list(range(6))

    run(work())


def test_without_a_seed_one_is_drawn_and_told_and_gives_the_text_again():
    async def work() -> None:
        async with served() as gateway:
            body = chat(temperature=1.0, max_tokens=32)
            del body["seed"]
            first, second = await gateway.post(CHAT, body), await gateway.post(CHAT, body)
            told = [int(r.headers["x-outrider-seed"]) for r in (first, second)]
            assert told[0] != told[1]
            again = await gateway.post(CHAT, body | {"seed": told[0]})
            assert again.json()["choices"] == first.json()["choices"]
            assert first.json()["choices"] != second.json()["choices"]

    run(work())


# -- the chunks -------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [3, 0])
def test_field_case_20(tokens: int):
    """Role once and first, null until the one reason, one id and model in all chunks."""

    async def work() -> None:
        ids = [*b"abc"][:tokens]
        prompt = "user: hi\nassistant: "
        async with served(**says(ids, prompt)) as gateway:
            chunks = (await gateway.events(CHAT, chat()))[:-1]
            whole = (await gateway.post(CHAT, chat())).json()
        assert whole["choices"][0]["message"] == {
            "role": "assistant",
            "content": "abc"[:tokens],
            "refusal": None,
            "annotations": [],
        }
        assert whole["object"] == "chat.completion"
        choices = [chunk["choices"][0] for chunk in chunks]
        assert [c["delta"] for c in choices] == [
            {"role": "assistant", "content": ""},
            *({"content": letter} for letter in "abc"[:tokens]),
            {},
        ]
        assert [c["finish_reason"] for c in choices] == [None] * (tokens + 1) + ["stop"]
        for name in ("id", "created", "model", "system_fingerprint", "object"):
            assert len({chunk[name] for chunk in chunks}) == 1, name
        assert chunks[0]["object"] == "chat.completion.chunk"

    run(work())


@pytest.mark.parametrize("asked", [None, False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_field_case_21(path: str, asked: bool | None):
    """A usage chunk only where it was asked for, last, and one end marker."""

    async def work() -> None:
        async with served() as gateway:
            body = chat() if path == CHAT else text()
            whole = (await gateway.post(path, body)).json()
            options = {} if asked is None else {"stream_options": {"include_usage": asked}}
            response = await gateway.post(path, body | {"stream": True} | options)
            events = await gateway.events(path, body | options)
        assert response.content.endswith(b"}\n\ndata: [DONE]\n\n")
        assert events.count("[DONE]") == 1
        chunks = events[:-1]
        empty = [chunk for chunk in chunks if not chunk["choices"]]
        assert len(empty) == bool(asked)
        if asked:
            assert chunks[-1] is empty[0]
            assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
            for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
                assert empty[0]["usage"][name] == whole["usage"][name]
        else:
            assert all("usage" not in chunk for chunk in chunks)

    run(work())


def test_field_case_18_over_http():
    """Characters of several tokens are never cut: joined deltas are the whole text."""
    said = "héllo 😀👩‍👩‍👧 歪 — end"

    async def work() -> None:
        async with served(**says([*said.encode()], "p")) as gateway:
            body = text(prompt="p", max_tokens=64)
            events = await gateway.events(TEXT, body)
            assert joined(events) == said
            assert all("\ufffd" not in str(event) for event in events)
            assert (await gateway.post(TEXT, body)).json()["choices"][0]["text"] == said

    run(work())


def test_an_event_is_one_line_to_whoever_splits_lines():
    """JSON leaves U+0085, U+2028 and U+2029 as they are; `str.splitlines` ends lines at them."""
    said = "one\u2028two\u2029three\x85end"

    async def work() -> None:
        async with served(**says([*said.encode()], "p")) as gateway:
            body = text(prompt="p", max_tokens=64, stream=True)
            async with gateway.http.stream("POST", TEXT, json=body) as response:
                lines = [line async for line in response.aiter_lines() if line]
            assert all(line.startswith("data: ") for line in lines)
            events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
            assert joined([*events, "[DONE]"]) == said

    run(work())


@pytest.mark.parametrize(
    ("said", "stop", "shown"),
    [
        ("Hi\nUser: more", ["\nUser:"], "Hi"),
        ("Hi\nUsual", ["\nUser:"], "Hi\nUsual"),
        ("x\n\ny", "\n\n", "x"),
    ],
)
def test_field_case_19_over_http(said: str, stop: Any, shown: str):
    """A stop over several tokens never leaks its beginning; what is none is released."""
    prompt = "user: hi\nassistant: "

    async def work() -> None:
        async with served(**says([*said.encode()], prompt)) as gateway:
            for path, body in ((CHAT, chat(stop=stop)), (TEXT, text(prompt=prompt, stop=stop))):
                events = await gateway.events(path, body)
                assert joined(events) == shown
                assert events[-2]["choices"][0]["finish_reason"] == "stop"
                choice = (await gateway.post(path, body)).json()["choices"][0]
                assert (choice["text"] if path == TEXT else choice["message"]["content"]) == shown

    run(work())


# -- log-probabilities ------------------------------------------------------------------------


def test_field_case_26_over_http():
    """The target's own, for accepted, corrected and bonus tokens, streamed and whole."""
    rows = {33: [0.5, 0.3, 0.2], 0: [0.3, 0.5, 0.2], 1: [0.3, 0.2, 0.5], 2: [1.0]}
    law = table_law(rows, WIDTH)
    expected = [math.log(0.5)] * 3 + [0.0]
    body = text(prompt=[33], max_tokens=4, temperature=0, logprobs=2, outrider={"schedule": "sync"})

    async def work() -> None:
        for wrong in (None, 1):  # a draft that is right, and one that is wrong at one place
            drafts = rows | ({wrong: [0.0, 1.0]} if wrong is not None else {})
            guess = ModelDrafter("table", model=toy(table_law(drafts, WIDTH)))
            async with served(model=toy(law), draft=guess) as gateway:
                told = (await gateway.post(TEXT, body)).json()["choices"][0]["logprobs"]
                assert told["token_logprobs"] == pytest.approx(expected, abs=1e-5)
                assert told["tokens"] == ["\x00", "\x01", "\x02", "\x00"]
                assert told["text_offset"] == [0, 1, 2, 3]
                assert [len(top) for top in told["top_logprobs"][:3]] == [2, 2, 2]
                assert all(
                    n in top for n, top in zip(told["tokens"], told["top_logprobs"], strict=True)
                )
                streamed = [
                    logprob
                    for event in (await gateway.events(TEXT, body))[:-2]
                    for logprob in event["choices"][0]["logprobs"]["token_logprobs"]
                ]
                assert streamed == told["token_logprobs"]

    run(work())


def test_a_chats_logprobs_name_each_token_and_leave_the_end_out():
    prompt = "user: hi\nassistant: "

    async def work() -> None:
        async with served(**says([*"é!".encode()], prompt)) as gateway:
            body = chat(logprobs=True, top_logprobs=1)
            content = (await gateway.post(CHAT, body)).json()["choices"][0]["logprobs"]["content"]
            assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9], [0x21]]
            assert [len(entry["top_logprobs"]) for entry in content] == [1, 1, 1]
            streamed = [
                entry
                for event in (await gateway.events(CHAT, body))[:-1]
                for choice in event["choices"]
                for entry in (choice["logprobs"] or {}).get("content", ())
            ]
            assert streamed == content

    run(work())


# -- details ----------------------------------------------------------------------------------


def test_details_say_who_wrote_each_token():
    async def work() -> None:
        async with served(draft=drafter(0.0)) as gateway:
            header = {"X-Outrider-Details": "1"}
            body = chat(outrider={"schedule": "sync", "draft_length": 4})
            events = await gateway.events(CHAT, body, headers=header)
            told = [event["outrider"] for event in events[:-1] if "outrider" in event]
            rounds, summary = told[:-1], told[-1]["summary"]
            tokens = [token for part in rounds for token in part["tokens"]]
            assert "".join(token["text"] for token in tokens) == joined(events)
            start = len(CHAT_PROMPT)
            assert [t["position"] for t in tokens] == list(range(start, start + 24))
            origins = {token["origin"] for token in tokens}
            assert origins >= {"draft", "bonus"}
            assert sum(part["round"]["accepted"] for part in rounds) == summary["accepted"]
            for name in ("window", "threshold", "network_s", "queue_s", "step_s", "bytes_up"):
                assert all(name in part["round"] for part in rounds), name
            assert summary["schedule"] == "sync"
            assert summary["target_forwards"] == summary["rounds"] < 24
            assert summary["confirmed"] is True
            whole = (await gateway.post(CHAT, body, headers=header)).json()
            whole_summary = whole["outrider"]["choices"][0]["summary"]
            assert whole_summary["token_ids"] == [token["id"] for token in tokens]
            details = whole["usage"]["completion_tokens_details"]
            assert details["accepted_prediction_tokens"] == whole_summary["accepted"] > 0
            plain = (await gateway.post(CHAT, body)).json()
            assert "outrider" not in plain
            assert plain["choices"] == whole["choices"]

    run(work())


def test_a_relaxed_answer_reports_what_it_cost():
    async def work() -> None:
        async with served(draft=drafter(1.0)) as gateway:
            how = {"verify": "relaxed", "rule": "fsd", "threshold": 0.6, "budget": "inf"}
            body = text(max_tokens=40, outrider=how | {"schedule": "sync", "details": True})
            summary = (await gateway.post(TEXT, body)).json()["outrider"]["choices"][0]["summary"]
            assert summary["verify"] == "relaxed"
            assert summary["relaxed"]["tokens"] > 0
            assert "relaxed" in summary["origins"]

    run(work())


@pytest.mark.parametrize(("asked", "k", "budget"), [({"tv_budget": 2.0}, 64, 2.0), ({}, 0, 0)])
def test_a_ratio_answer_reports_its_ledger_and_how_rejections_ended(
    asked: dict[str, float], k: int, budget: float
):
    async def work() -> None:
        async with served(draft=drafter(1.0)) as gateway:
            how = {"verify": "ratio", "schedule": "sync", "details": True}
            body = text(max_tokens=40, outrider=how | asked)
            events = await gateway.events(TEXT, body)
            told = next(e["outrider"]["summary"] for e in events[:-1] if "summary" in e["outrider"])
            whole = (await gateway.post(TEXT, body)).json()["outrider"]["choices"][0]["summary"]
            for summary in (told, whole):
                steps = summary["residual"]["steps"]
                assert sum(steps.values()) > 0
                if not k:
                    assert "tv" not in summary
                    continue
                assert (summary["tv"]["k"], summary["tv"]["budget"]) == (k, budget)
                assert 0.0 <= summary["tv"]["spent"] <= budget
                assert set(steps) & {"top-k", "larger-k"}

    run(work())


@pytest.mark.parametrize(
    ("objective", "schedule"), [("latency", "freerun"), ("balanced", "stream"), ("cost", "sync")]
)
def test_an_objective_chooses_a_schedule_and_changes_no_text(objective: str, schedule: str):
    async def work() -> None:
        async with served() as gateway:
            body = chat(outrider={"objective": objective, "details": True})
            answer = (await gateway.post(CHAT, body)).json()
            assert answer["outrider"]["choices"][0]["summary"]["schedule"] == schedule
            expected = target_text(CHAT_PROMPT, seed=7, max_tokens=24)
            assert answer["choices"][0]["message"]["content"] == expected

    run(work())


# -- the rest ---------------------------------------------------------------------------------


def test_echo_puts_the_prompt_before_the_text():
    async def work() -> None:
        async with served() as gateway:
            body = text(prompt="hi there", max_tokens=5)
            plain = (await gateway.post(TEXT, body)).json()["choices"][0]["text"]
            whole = (await gateway.post(TEXT, body | {"echo": True})).json()
            assert whole["choices"][0]["text"] == "hi there" + plain
            assert joined(await gateway.events(TEXT, body | {"echo": True})) == "hi there" + plain

    run(work())


def test_echo_with_logprobs_scores_the_prompt():
    """What the target itself thinks of each id, whatever would have been drawn, ends among them;
    the answer behind it is the one that is given without."""
    ids = [*b"hi there, hi there, hi the", END, *b"re"]
    expected = [None]
    for i in range(1, len(ids)):
        row = TARGET(tuple(ids[:i])).astype(np.float64)
        expected.append(max(row[ids[i]] - np.logaddexp.reduce(row), -9999.0))

    async def work() -> None:
        async with served() as gateway:
            for n, limit in ((1, 0), (1, 1), (2, 5)):
                body = text(
                    prompt=[ids, ids[:1]], max_tokens=limit, logprobs=2, n=n, ignore_eos=True
                )
                heard = await gateway.post(TEXT, body | {"echo": True})
                assert heard.status_code == 200, heard.text
                whole = heard.json()
                events = await gateway.events(TEXT, body | {"echo": True})
                for place in range(2 * n):
                    choice = whole["choices"][place]
                    told = choice["logprobs"]
                    length = len(ids) if place < n else 1
                    assert told["token_logprobs"][:length] == [
                        value if value is None else pytest.approx(value, abs=1e-4)
                        for value in expected[:length]
                    ]
                    assert len(told["tokens"]) == len(told["top_logprobs"]) == length + limit
                    before = ["".join(told["tokens"][:i]) for i in range(length + limit)]
                    assert told["text_offset"] == list(map(len, before))
                    assert joined(events, place) == choice["text"]
                    assert streamed_logprobs(events, place) == told["token_logprobs"]
                assert whole["usage"]["prompt_tokens"] == len(ids) + 1
                assert whole["usage"]["completion_tokens"] == 2 * n * limit
                if limit:
                    plain = (await gateway.post(TEXT, body)).json()["choices"]
                    for choice, own in zip(whole["choices"], plain, strict=True):
                        assert choice["text"].endswith(own["text"])
                        told = choice["logprobs"]["token_logprobs"]
                        assert told[-limit:] == own["logprobs"]["token_logprobs"]
            await gateway.pair.idle()

    run(work())


def test_a_completions_logprobs_have_its_end():
    """As OpenAI's own: max_tokens 1 behind an echo always gives one entry more than the prompt."""

    async def work() -> None:
        async with served(**says([*b"ab"], "hi")) as gateway:
            for limit, more in ((1, 1), (3, 3)):
                body = text(max_tokens=limit, logprobs=0, echo=True)
                told = (await gateway.post(TEXT, body)).json()["choices"][0]["logprobs"]
                assert len(told["token_logprobs"]) == 2 + more
            body = text(prompt="hiab", max_tokens=1, logprobs=0, echo=True)
            ended = (await gateway.post(TEXT, body)).json()["choices"][0]
            assert ended["finish_reason"] == "stop"
            assert len(ended["logprobs"]["token_logprobs"]) == 5

    run(work())


def test_usage_in_every_chunk_grows_to_the_last():
    async def work() -> None:
        async with served() as gateway:
            options = {"include_usage": True, "continuous_usage_stats": True}
            for n in (1, 2):
                body = text(stream_options=options, n=n, ignore_eos=True)
                chunks = (await gateway.events(TEXT, body))[:-1]
                counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
                assert counts == sorted(counts)
                assert counts[0] == 1
                assert counts[-1] == 24 * n
                assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {2}

    run(work())


def streamed_logprobs(events: list[Any], index: int) -> list[float | None]:
    return [
        logprob
        for event in events[:-1]
        for choice in event["choices"]
        if choice["index"] == index and choice["logprobs"]
        for logprob in choice["logprobs"]["token_logprobs"]
    ]


def test_a_chat_without_a_limit_goes_to_the_end_of_the_context():
    async def work() -> None:
        async with served(model=toy(table_law([0.0] * 97 + [1.0], WIDTH), context_length=64)) as g:
            body = chat()
            del body["max_tokens"]
            answer = (await g.post(CHAT, body)).json()
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["total_tokens"] == 64
            answer = (await g.post(CHAT, body | {"max_completion_tokens": 3})).json()
            assert answer["usage"]["completion_tokens"] == 3
            body = text()
            del body["max_tokens"]
            assert (await g.post(TEXT, body)).json()["usage"]["completion_tokens"] == 16

    run(work())


def test_messages_of_parts_and_developers_read_like_plain_ones():
    async def work() -> None:
        async with served() as gateway:
            plain = [{"role": "system", "content": "a\nb"}, {"role": "user", "content": "c"}]
            parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
            same = [
                {"role": "developer", "content": parts},
                {"role": "user", "content": [{"type": "text", "text": "c"}]},
            ]
            answers = [(await gateway.post(CHAT, chat(messages=m))).json() for m in (plain, same)]
            assert answers[0]["choices"] == answers[1]["choices"]
            assert answers[0]["usage"]["prompt_tokens"] == len(TOKENIZER.chat(plain))
            back = [*plain, answers[0]["choices"][0]["message"], HELLO[0]]
            assert (await gateway.post(CHAT, chat(messages=back))).status_code == 200

    run(work())


def test_two_hundred_streams_at_once():
    """More than there are places: everybody is answered, each with its own text."""

    async def one(gateway: Served, seed: int) -> None:
        ids = tuple(TOKENIZER.encode(f"{seed}"))
        events = await gateway.events(TEXT, text(prompt=f"{seed}", seed=seed, max_tokens=12))
        assert joined(events) == target_text(ids, seed=seed, max_tokens=12)

    async def work() -> None:
        async with served() as gateway:
            await asyncio.gather(*(one(gateway, seed) for seed in range(200)))
            room = gateway.app.state.gateway.room
            assert (room.active, room.waiting) == (0, 0)
            await gateway.pair.idle()

    run(work())


def test_models_health_and_metrics():
    async def work() -> None:
        async with served(config={"models": (MODEL, "gpt-4o")}) as gateway:
            health = (await gateway.http.get("/health")).json()
            assert health == {"status": "ok", "cloud": "down"}, "nobody has asked yet"
            listed = (await gateway.http.get("/v1/models")).json()
            assert listed["object"] == "list"
            assert [model["id"] for model in listed["data"]] == [MODEL, "gpt-4o"]
            assert (await gateway.http.get("/v1/models/gpt-4o")).json()["object"] == "model"
            assert (await gateway.http.get("/v1/models/x/y")).status_code == 404
            answer = (await gateway.post(CHAT, chat(model="gpt-4o"))).json()
            assert answer["model"] == "gpt-4o"
            assert (await gateway.http.get("/health")).json()["cloud"] == "up"
            page = (await gateway.http.get("/metrics")).text
            for line in (
                f'outrider_requests_total{{route="{CHAT}",status="200"}} 1.0',
                'outrider_tokens_total{kind="completion"} 24.0',
                "outrider_answers_active 0.0",
                "outrider_cloud_up 1.0",
            ):
                assert line in page, line

    run(work())
