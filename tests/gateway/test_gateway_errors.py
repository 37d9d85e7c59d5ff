"""What the gateway refuses, and how: OpenAI's error shape, the right status, nothing queued."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from live import WIDTH, alone, run, toy
from outrider.core.tokens import SamplingParams
from outrider.engines.toy import table_law
from outrider.gateway import exchange
from outrider.gateway.errors import explain, from_validation
from outrider.gateway.openpaths import OPEN
from outrider.gateway.schema import REFUSED, ChatRequest
from outrider.proto.messages import Code
from outrider.runtime.access import read_tokens
from outrider.runtime.failures import CloudError
from served import CHAT, MODEL, TEXT, Served, chat, served, text

PATHS = {CHAT: chat, TEXT: text}


def refused(response: Any, status: int, param: str | None = None, code: str | None = None) -> str:
    """The message of an error in OpenAI's shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert code is None or error["code"] == code, error
    return str(error["message"])


# -- values -----------------------------------------------------------------------------------

BAD_VALUES: list[tuple[str, Any, str]] = [
    *[("temperature", value, "temperature") for value in (-1, 1e9, "hot", True)],
    *[("top_p", value, "top_p") for value in (-1, 1.5)],
    ("repetition_penalty", 0, "repetition_penalty"),
    *[("n", value, "n") for value in (0, 100_000, 1.5)],
    *[("max_tokens", value, "max_tokens") for value in (-1, 0, 1.5, 1e12)],
    ("stop", [""], "stop"),
    ("stop", ["x"] * 1000, "stop"),
    ("stop", 5, "stop"),
    ("logit_bias", {"abc": 1}, "logit_bias"),
    ("logit_bias", {"1": 101}, "logit_bias"),
    ("logit_bias", [1], "logit_bias"),
    ("seed", -1, "seed"),
    ("seed", 2**70, "seed"),
    ("min_tokens", 25, "min_tokens"),
    ("presence_penalty", 3, "presence_penalty"),
    ("stream_options", {"include_usage": True}, "stream_options"),
    ("outrider", {"schedule": "warp"}, "outrider.schedule"),
    ("outrider", {"schedule": "edge-only"}, "outrider.schedule"),
    ("outrider", {"controller": "clairvoyant"}, "outrider.controller"),
    ("outrider", {"controller": "ucb-specstop:beta=nan"}, "outrider.controller"),
    ("outrider", {"controller": "auto", "schedule": "cloud-only"}, "outrider.controller"),
    ("outrider", {"window": 0}, "outrider.window"),
    ("outrider", {"draft_length": 65}, "outrider.draft_length"),
    ("outrider", {"budget": 1.0}, "outrider.budget"),
    ("outrider", {"verify": "relaxed", "budget": -1.0}, "outrider.budget"),
    ("outrider", {"tv_budget": 0.1}, "outrider.tv_budget"),
    ("outrider", {"verify": "relaxed", "top_k_reply": 4}, "outrider.top_k_reply"),
    ("outrider", {"verify": "ratio", "tv_budget": -0.1}, "outrider.tv_budget"),
    ("outrider", {"verify": "ratio", "top_k_reply": -1}, "outrider.top_k_reply"),
    ("outrider", {"verify": "ratio", "top_k_reply": 0, "tv_budget": 1.0}, "outrider.tv_budget"),
    (
        "outrider",
        {"verify": "ratio", "top_k_reply": 4, "schedule": "cloud-only"},
        "outrider.top_k_reply",
    ),
    ("outrider", {"verify": "relaxed", "threshold": 9.0}, "outrider.threshold"),
    ("outrider", {"surprise": 1}, "outrider.surprise"),
    ("model", None, "model"),
    ("surprise", 1, "surprise"),
]


def test_field_case_25():
    """Out of range, of a wrong kind, unknown: 400 that names the field, and nothing hangs."""

    async def work() -> None:
        async with served() as gateway:
            good = {path: (await gateway.post(path, PATHS[path]())).json() for path in PATHS}
            for path, make in PATHS.items():
                for name, value, param in BAD_VALUES:
                    message = refused(await gateway.post(path, make(**{name: value})), 400, param)
                    assert param in message, message
                answer = (await gateway.post(path, make())).json()
                assert answer["choices"] == good[path]["choices"]
            assert gateway.pair.cloud.service.sessions == 0

    run(work())


ONE_ENDPOINT: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "name": "a"}]}, "messages[0].name"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"max_completion_tokens": 0, "max_tokens": None}, "max_completion_tokens"),
    (CHAT, {"max_completion_tokens": 5}, "max_tokens"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {"prompt": [1, -1]}, "prompt"),
    (TEXT, {"prompt": [WIDTH]}, "prompt"),
    (TEXT, {"prompt": [[1], []]}, "prompt[1]"),
    (TEXT, {"prompt": ["x"] * 100, "n": 2}, "prompt"),
    (TEXT, {"logprobs": 21}, "logprobs"),
    (
        TEXT,
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
    ),
    (TEXT, {"max_tokens": 0}, "max_tokens"),
    (TEXT, {"max_tokens": -1, "echo": True}, "max_tokens"),
    (TEXT, {"best_of": 3}, "best_of"),
    (TEXT, {"suffix": "end"}, "suffix"),
]


def test_what_only_one_endpoint_takes():
    async def work() -> None:
        async with served() as gateway:
            for path, body, param in ONE_ENDPOINT:
                whole = PATHS[path]() | body
                whole = {k: v for k, v in whole.items() if v is not None}
                refused(await gateway.post(path, whole), 400, param)

    run(work())


ASKING: dict[str, Any] = {
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "modalities": ["audio"],
    "audio": {"voice": "alloy"},
    "prediction": {"type": "content", "content": "x"},
    "reasoning_effort": "high",
    "verbosity": "low",
    "web_search_options": {},
    "moderation": {},
    "store": True,
    "service_tier": "flex",
    "prompt_cache_retention": "24h",
}


def test_what_is_not_supported_is_refused_by_name_and_its_neutral_value_is_taken():
    assert set(ASKING) | {"suffix"} == set(REFUSED)

    async def work() -> None:
        async with served() as gateway:
            plain = (await gateway.post(CHAT, chat(max_tokens=2))).json()["choices"]
            for name, value in ASKING.items():
                answer = await gateway.post(CHAT, chat(**{name: value}))
                refused(answer, 400, name, "unsupported_parameter")
            neutral = {name: values[-1] for name, (values, _) in REFUSED.items()}
            del neutral["suffix"]
            taken = await gateway.post(CHAT, chat(max_tokens=2, user="u", **neutral))
            assert taken.json()["choices"] == plain

    run(work())


def test_field_case_24():
    """One rule for prompts that are too long, whole or streamed, chat or completion."""

    async def work() -> None:
        law = table_law([0.0] * 97 + [1.0], WIDTH)
        async with served(model=toy(law, context_length=128), context_length=128) as gateway:
            for stream in (False, True):
                for ids, limit in ((127, 1), (100, 100)):
                    body = text(prompt=[97] * ids, max_tokens=limit, stream=stream)
                    answer = await gateway.post(TEXT, body)
                    assert answer.status_code == 200
                    assert answer.text.count("length") == 1
                    if not stream:
                        made = answer.json()["usage"]["completion_tokens"]
                        assert made == min(limit, 128 - ids)
                for ids in (128, 129):
                    body = text(prompt=[97] * ids, stream=stream, max_tokens=1)
                    answer = await gateway.post(TEXT, body)
                    message = refused(answer, 400, "prompt", "context_length_exceeded")
                    assert "128" in message
                    assert str(ids) in message
                messages = [{"role": "user", "content": "x" * 128}]
                answer = await gateway.post(CHAT, chat(messages=messages, stream=stream))
                refused(answer, 400, "messages", "context_length_exceeded")

    run(work())


def test_a_smaller_context_of_the_cloud_is_the_same_error():
    """Known only once the cloud has greeted: the first request learns of it, too."""

    async def work() -> None:
        law = table_law([0.0] * 97 + [1.0], WIDTH)
        async with served(model=toy(law, context_length=64), context_length=128) as gateway:
            for _ in range(2):
                answer = await gateway.post(TEXT, text(prompt=[97] * 100))
                message = refused(answer, 400, "prompt", "context_length_exceeded")
                assert "64" in message

    run(work())


# -- what is no request -----------------------------------------------------------------------


def test_bodies_that_are_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(exchange, "MAX_BODY_BYTES", 2000)
    monkeypatch.setattr(exchange, "BODY_TIMEOUT_S", 0.2)
    as_json = {"Content-Type": "application/json"}

    async def slowly() -> Any:
        yield b"{"
        await asyncio.sleep(1.0)
        yield b"}"

    async def pieces() -> Any:
        for _ in range(30):
            yield b" " * 100

    async def work() -> None:
        async with served() as gateway:
            http = gateway.http
            for body in (b"{", b"", b"\xff", b"[" * 1500, b'{"a": "\\ud800"}', b"NaN", b"null"):
                refused(await http.post(CHAT, content=body, headers=as_json), 400)
            refused(await http.post(CHAT, content=b"{}"), 415)
            refused(
                await http.post(CHAT, content=b"{}", headers={"Content-Type": "text/json"}), 415
            )
            packed = as_json | {"Content-Encoding": "gzip"}
            refused(await http.post(CHAT, content=b"{}", headers=packed), 415)
            refused(await http.post(CHAT, content=b" " * 2001, headers=as_json), 413)
            refused(await http.post(CHAT, content=pieces(), headers=as_json), 413)
            refused(await http.post(CHAT, content=slowly(), headers=as_json), 408)
            refused(await http.get(CHAT), 405)
            refused(await http.get("/v1/nothing"), 404)
            answer = await gateway.post(CHAT, chat(model="gpt-5"))
            assert MODEL in refused(answer, 404, "model", "model_not_found")
            assert (await gateway.post(CHAT, chat(max_tokens=1))).status_code == 200

    run(work())


def test_paths_in_errors_lead_into_the_body():
    for body, path in (
        ({"model": "m"}, "messages"),
        ({"model": "m", "messages": "x"}, "messages"),
        ({"model": "m", "messages": [{"role": "user", "content": [{"typ": 1}]}]}, None),
        ({"model": "m", "messages": [{"role": "user", "content": "x"}], "stop": [1]}, "stop[0]"),
    ):
        with pytest.raises(ValidationError) as caught:
            ChatRequest.model_validate_json(json.dumps(body))
        shown = from_validation(caught.value, body)
        assert path is None or shown.param == path
        assert not any(word in str(shown.param) for word in ("list[", "str", "nullable"))


# -- room -------------------------------------------------------------------------------------


def test_a_full_queue_says_when_to_come_back():
    async def work() -> None:
        how = {"config": {"answers": 2, "waiting": 1}, "cloud": {"pace": 0.005}}
        async with served(**how) as gateway:
            room = gateway.app.state.gateway.room
            body = chat(max_tokens=40, ignore_eos=True)
            tasks = [asyncio.create_task(gateway.post(CHAT, body | {"n": 2}))]
            while room.active < 2:
                await asyncio.sleep(0.005)
            tasks.append(asyncio.create_task(gateway.post(CHAT, body)))
            while not room.waiting:
                await asyncio.sleep(0.005)
            answer = await gateway.post(CHAT, body)
            refused(answer, 503, None, "overloaded")
            assert int(answer.headers["retry-after"]) > 0
            refused(await gateway.post(CHAT, body | {"n": 3}), 400, "n")
            assert [r.status_code for r in await asyncio.gather(*tasks)] == [200, 200]
            assert (room.active, room.waiting) == (0, 0)

    run(work())


@pytest.mark.parametrize(
    ("code", "status", "shown"),
    [
        (Code.BUSY, 503, "overloaded"),
        (Code.DRAINING, 503, "overloaded"),
        (Code.UNREACHABLE, 503, "cloud_unreachable"),
        (Code.UNAUTHORIZED, 502, "cloud_error"),
        (Code.VOCABULARY, 502, "cloud_error"),
        (Code.ENGINE, 502, "cloud_error"),
        (Code.CONTEXT, 400, "context_length_exceeded"),
        (Code.PARAMETER, 400, "invalid_value"),
    ],
)
def test_what_the_cloud_says_has_a_status(code: Code, status: int, shown: str):
    error = explain(CloudError(code, "words"))
    assert error is not None
    assert (error.status, error.code) == (status, shown)
    assert ("Retry-After" in error.headers) is (status == 503)
    assert code.value not in str(error) or code.value in "words the cloud:"


# -- the cloud goes ---------------------------------------------------------------------------


def test_field_case_22_before_the_first_token():
    """A failure before any token is an HTTP status, streamed or not."""

    async def work() -> None:
        async with served(give_up=0.3) as gateway:
            await gateway.pair.cloud.stop()
            for stream in (True, False):
                answer = await gateway.post(CHAT, chat(stream=stream))
                refused(answer, 503, None, "cloud_unreachable")
                assert "retry-after" in answer.headers

    run(work())


def test_field_case_22_after_the_first_token():
    """Behind the first token: an error event, no reason to finish, no end marker."""

    async def work() -> None:
        async with served(give_up=0.3, cloud={"pace": 0.01}) as gateway:
            body = chat(max_tokens=2000, ignore_eos=True, stream=True)
            seen = b""
            async with gateway.http.stream("POST", CHAT, json=body) as response:
                assert response.status_code == 200
                async for piece in response.aiter_raw():
                    seen += piece
                    if b"error" not in seen and seen.count(b"data:") > 5:
                        await gateway.pair.cloud.stop()
            last = seen.decode().rstrip("\n").split("\n\n")[-1]
            error = json.loads(last.removeprefix("data: "))["error"]
            assert error["code"] == "cloud_unreachable"
            assert b"[DONE]" not in seen
            assert b'"finish_reason":"' not in seen

    run(work())


# -- keys and secrets -------------------------------------------------------------------------


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    file = tmp_path / "keys"
    file.write_text("alice:sk-test-SECRET123\n")
    return read_tokens(file)


def test_field_case_36_over_http(keys: dict[str, str]):
    """Every route but the listed ones wants a key, however it is spelt, and those say nothing of
    any request."""

    async def work() -> None:
        async with served(config={"keys": keys}) as gateway:
            paths = {getattr(route, "path", "") for route in gateway.app.routes}
            assert {CHAT, TEXT, "/v1/models", "/metrics", "/health", "/openapi.json"} <= paths
            paths |= {"/v1/models/toy", "/nothing"}
            paths |= {path + "/" for path in paths} | {"/" + path for path in paths}
            wrong = [{}, {"Authorization": "Bearer"}, {"Authorization": "Bearer nobody"}]
            wrong += [{"Authorization": "sk-test-SECRET123"}, {"X-Api-Key": "sk-test-SECRET123"}]
            listed = {path for path in OPEN if not path.startswith("/static/")}
            assert listed == {"/", "/favicon.ico", "/health"}
            for path in sorted(paths - OPEN):
                for header in wrong:
                    for method in ("GET", "POST", "OPTIONS"):
                        url = gateway.url + path
                        answer = await gateway.http.request(method, url, headers=header)
                        refused(answer, 401, None, "invalid_api_key")
            assert (await gateway.http.get("/health")).status_code == 200
            right = {"Authorization": "Bearer sk-test-SECRET123"}
            assert (await gateway.post(CHAT, chat(), headers=right)).status_code == 200
            assert (await gateway.http.get("/metrics", headers=right)).status_code == 200

    run(work())


def test_field_case_34_over_http(keys: dict[str, str], caplog: pytest.LogCaptureFixture):
    """No key in any log, metric or error; no prompt and no answer in a log."""
    caplog.set_level(logging.DEBUG)
    said: list[str] = []

    async def work() -> None:
        async with served(config={"keys": keys}, give_up=0.3) as gateway:
            right = {"Authorization": "Bearer sk-test-SECRET123"}
            wrong = {"Authorization": "Bearer sk-test-SECRET123x"}
            messages = [{"role": "user", "content": "PRIVATEPROMPT"}]
            body = chat(messages=messages)
            for header, more in (
                (right, {}),
                (wrong, {}),
                (right, {"top_p": 7}),
                (right, {"q": 1}),
            ):
                url = f"{CHAT}?api_key=sk-test-SECRET123"
                answer = await gateway.post(url, body | more, headers=header)
                said.append("" if answer.status_code == 200 else answer.text)
            gateway.app.state.gateway.lanes.run = None  # a fault of ours
            answer = await gateway.post(CHAT, body, headers=right)
            refused(answer, 500)
            said.append(answer.text)
            said.append((await gateway.http.get("/metrics", headers=right)).text)

    run(work())
    # The client of this test logs its own requests; it is no part of the server.
    server = [
        r.getMessage() for r in caplog.records if not r.name.startswith(("httpx", "httpcore"))
    ]
    assert any("failed" in line for line in server)
    logged = "\n".join([*server, caplog.handler.formatter.formatException((None, None, None))])
    for word in ("SECRET123", "PRIVATEPROMPT"):
        assert word not in logged
        assert word not in "".join(said)


def test_a_page_with_another_name_for_this_machine_is_refused():
    async def work() -> None:
        async with served() as gateway:
            for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example"):
                answer = await gateway.http.get("/v1/models", headers={"Host": host})
                refused(answer, 403, None, "wrong_host")
            for host in ("localhost:8000", "127.0.0.1", "[::1]:8000", "[::1]"):
                answer = await gateway.http.get("/v1/models", headers={"Host": host})
                assert answer.status_code == 200, host

    run(work())


def test_pages_of_other_origins_ask_only_where_they_may():
    origin = {"Origin": "https://chat.example"}
    ask = origin | {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }

    async def work(cors: tuple[str, ...], allowed: str | None) -> None:
        async with served(config={"cors": cors}) as gateway:
            answer = await gateway.http.options(CHAT, headers=ask)
            assert answer.headers.get("access-control-allow-origin") == allowed
            answer = await gateway.post(CHAT, chat(max_tokens=1), headers=origin)
            assert answer.headers.get("access-control-allow-origin") == allowed

    run(work((), None))
    run(work(("https://chat.example",), "https://chat.example"))
    run(work(("https://other.example",), None))


# -- a neighbour's mistake costs nobody else --------------------------------------------------


def test_an_error_of_one_choice_ends_the_request_and_frees_the_others():
    async def work() -> None:
        async with served(service={"max_sessions": 3}, cloud={"pace": 0.01}) as gateway:
            answer = await gateway.post(CHAT, chat(n=8, max_tokens=50, ignore_eos=True))
            refused(answer, 503, None, "overloaded")
            await gateway.pair.idle()
            assert gateway.app.state.gateway.room.active == 0
            good = (await gateway.post(CHAT, chat())).json()
            prompt = tuple(gateway.pair.edge.tokenizer.chat([{"role": "user", "content": "hi"}]))
            expected = alone(SamplingParams(seed=7, max_tokens=24), prompt).text
            assert good["choices"][0]["message"]["content"] == expected

    run(work())


def test_the_helpers_of_these_tests_know_an_error():
    async def work(gateway: Served) -> None:
        with pytest.raises(AssertionError):
            refused(await gateway.post(CHAT, chat()), 400)

    async def whole() -> None:
        async with served() as gateway:
            await work(gateway)

    run(whole())


def test_a_cloud_that_refused_this_edge_is_asked_again(tmp_path: Path):
    """A mistake in the cloud's configuration, put right, is over without a restart here."""
    file = tmp_path / "tokens"
    file.write_text("edge:another\n")
    tokens = dict(read_tokens(file))

    async def work() -> None:
        async with served(cloud={"tokens": tokens}, token="mine") as gateway:
            refused(await gateway.post(CHAT, chat()), 502, None, "cloud_error")
            file.write_text("edge:mine\n")
            tokens.update(read_tokens(file))
            assert (await gateway.post(CHAT, chat())).status_code == 200

    run(work())


def test_the_schema_of_the_requests_has_all_its_parts():
    async def work() -> None:
        async with served() as gateway:
            page = (await gateway.http.get("/openapi.json")).json()
            refs = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(page)))
            assert {"ChatMessage", "OutriderOptions"} <= refs <= set(page["components"]["schemas"])
            for path in PATHS:
                body = page["paths"][path]["post"]["requestBody"]["content"]["application/json"]
                assert body["schema"]["additionalProperties"] is False

    run(work())
