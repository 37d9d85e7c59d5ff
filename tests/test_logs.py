"""What servers log, and what they never do (field case 34)."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import httpx
import pytest

from live import drafter, edge, run, server
from outrider.commands.logs import JsonLines, LogFormat, LogLevel, TextLines, start
from outrider.gateway.app import GatewayConfig, make_app
from outrider.gateway.server import GatewayServer
from outrider.runtime.access import Logins, hash_token
from outrider.runtime.exposition import exposition
from outrider.runtime.rotation import LoginFile

TOKEN = "tok-SECRET123"
KEY = "sk-test-SECRET123"
PROMPT = "the PLANTED prompt"


@pytest.fixture
def everything() -> Iterator[io.StringIO]:
    """All that any library logs at debug, as JSON lines."""
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield said
    root.removeHandler(handler)
    root.setLevel(before)


def test_no_secret_and_no_prompt_at_any_level(everything: io.StringIO, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(f"alice:{KEY}\n")

    answers: list[str] = []
    pages: list[str] = []

    async def work() -> None:
        tokens = {hash_token(TOKEN): "alice"}
        async with server(tokens=tokens) as cloud, edge(cloud.port, drafter(), token=TOKEN) as one:
            config = GatewayConfig(models=("toy",), keys={hash_token(KEY): "bob"})
            app = make_app(one, config)
            async with (
                GatewayServer(app, "127.0.0.1", 0) as gateway,
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}") as http,
            ):
                body = {"model": "toy", "prompt": PROMPT, "max_tokens": 8, "logprobs": 2}
                right = {"Authorization": f"Bearer {KEY}"}
                path = "/v1/completions"
                made = await http.post(path, json=body, headers=right)
                assert made.status_code == 200
                answers.append(made.json()["choices"][0]["text"])
                wrong = {"Authorization": f"Bearer {KEY}x"}
                assert (await http.post(path, json=body, headers=wrong)).status_code == 401
                bad = body | {"temperature": PROMPT}
                assert (await http.post(path, json=bad, headers=right)).status_code == 400
                for peer in list(cloud._peers.values()):  # a reconnect
                    peer.socket.abort()
                assert (await http.post(path, json=body, headers=right)).status_code == 200
                pages.append((await http.get("/metrics", headers=right)).text)
                pages.append(exposition(cloud.status()) + json.dumps(cloud.status()))
            app.state.gateway.lanes.close()
            keys.write_text(f"alice:{KEY} rate=SECRET123\n")
            LoginFile(keys, Logins(), cloud.admit).look()
            cloud.admit(Logins(tokens={hash_token("other"): "alice"}))

    run(work())
    text = everything.getvalue()
    events = [json.loads(line) for line in text.splitlines()]
    said = [event["event"] for event in events if event["logger"].startswith("outrider")]
    for due in ("connected", "answer opened", "answer done", "request", "token withdrawn"):
        assert due in said, due
    assert any("the logins before it stay" in event for event in said)
    (said_by_model,) = answers
    assert len(said_by_model) > 4
    for secret in ("SECRET123", "PLANTED", hash_token(TOKEN), hash_token(KEY), said_by_model):
        assert secret not in text
        assert all(secret not in page for page in pages)


def record(exc: BaseException | None = None) -> logging.LogRecord:
    found = (type(exc), exc, exc.__traceback__) if exc else None
    made = logging.LogRecord("outrider.cloud", logging.INFO, "f", 1, "answer %s", ("done",), found)
    made.created = 1_796_000_000.5
    made.facts = {"tokens": 3}  # type: ignore[attr-defined]
    return made


def test_lines():
    assert json.loads(JsonLines().format(record())) == {
        "time": "2026-11-30T00:53:20.500Z",
        "level": "info",
        "logger": "outrider.cloud",
        "event": "answer done",
        "tokens": 3,
    }
    assert TextLines().format(record()) == "2026-11-30T00:53:20.500Z info answer done tokens=3"


def test_a_traceback_is_shown_without_what_it_says():
    try:
        raise ValueError(PROMPT)
    except ValueError as error:
        for form in (JsonLines(), TextLines()):
            line = form.format(record(error))
            assert "ValueError" in line
            assert "test_logs" in line
            assert "PLANTED" not in line


def test_levels(capsys: pytest.CaptureFixture[str]):
    root, own = logging.getLogger(), logging.getLogger("outrider")
    handlers, levels = root.handlers[:], (root.level, own.level)
    try:
        start(LogFormat.TEXT, LogLevel.INFO)
        logging.getLogger("outrider.cloud").info("ours")
        logging.getLogger("outrider.cloud").debug("too fine")
        logging.getLogger("other").info("not ours")
        logging.getLogger("outrider.cloud.socket").info("of each socket")
        start(LogFormat.TEXT, LogLevel.INFO)
        logging.getLogger("outrider.cloud").info("once")
        lines = capsys.readouterr().err.splitlines()
        assert [line.split("info ")[1] for line in lines] == ["ours", "once"]
    finally:
        root.handlers[:] = handlers
        root.setLevel(levels[0])
        own.setLevel(levels[1])
