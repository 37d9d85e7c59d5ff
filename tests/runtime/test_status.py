"""Asking a verifier for its counters: what it says, and whatever else may answer there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from live import ask, drafter, edge, hear, run, server
from outrider.bench.load import CloudCount
from outrider.core.tokens import SamplingParams
from outrider.runtime.access import hash_token
from outrider.runtime.edgeconfig import EdgeConfig
from outrider.runtime.routes import METRICS_PATH
from outrider.runtime.status import MAX_BYTES, fetch_status, http_connection


class Verifier(BaseHTTPRequestHandler):
    replies: tuple[int, bytes] = (200, b"{}")
    asked: list[tuple[str, str | None]] = []  # noqa: RUF012 - a handler has no other place for it

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers["Authorization"]))
        status, body = self.replies
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def port() -> Iterator[int]:
    Verifier.asked.clear()
    with HTTPServer(("127.0.0.1", 0), Verifier) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield listening.server_port
        listening.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "body", "found"),
    [
        (200, b'{"forwards": 3, "rows": 9}', {"forwards": 3, "rows": 9}),
        (404, b"no such path\n", None),
        (401, b'{"forwards": 3}', None),
        (200, b"<html>", None),
        (200, b"[1, 2]", None),
        (200, b"\xff", None),
        (200, b'{"a": "' + b"x" * MAX_BYTES + b'"}', None),
    ],
)
def test_what_comes_back(port: int, status: int, body: bytes, found, monkeypatch):
    monkeypatch.setattr(Verifier, "replies", (status, body))
    config = EdgeConfig(url=f"ws://127.0.0.1:{port}/v1/outrider", token="secret")
    assert asyncio.run(fetch_status(config)) == found
    assert Verifier.asked == [("/status", "Bearer secret")]


def test_nobody_there():
    assert asyncio.run(fetch_status(EdgeConfig(url="ws://127.0.0.1:1"))) is None
    assert asyncio.run(fetch_status(EdgeConfig(url="wss://127.0.0.1:1"))) is None


def test_a_verifier_of_ours():
    async def work() -> None:
        async with server() as cloud, edge(cloud.port, drafter()) as runtime:
            before = await fetch_status(runtime.config)
            await hear(await runtime.stream(ask(SamplingParams(max_tokens=8, ignore_eos=True))))
            count = CloudCount.between(before, await fetch_status(runtime.config))
            assert count is not None
            assert 0 < count.forwards <= 8 <= count.rows

    run(work())


def test_a_login_is_asked_for():
    async def work() -> None:
        async with server(tokens={hash_token("secret"): "me"}) as cloud:
            url = f"ws://127.0.0.1:{cloud.port}"
            assert await fetch_status(EdgeConfig(url=url)) is None
            found = await fetch_status(EdgeConfig(url=url, token="secret"))
            assert found is not None
            assert found["forwards"] == 0

    run(work())


def test_a_login_is_told_of_itself_alone_and_the_operator_of_all():
    async def work() -> None:
        names = ("one", "two", "operator")
        async with server(tokens={hash_token(name): name for name in names}) as cloud:
            for name in names[:2]:
                async with edge(cloud.port, drafter(), token=name) as runtime:
                    await hear(await runtime.stream(ask(SamplingParams(max_tokens=4))))
            url = f"ws://127.0.0.1:{cloud.port}"
            for name, seen in (("one", {"one"}), ("two", {"two"}), ("operator", {"one", "two"})):
                found = await fetch_status(EdgeConfig(url=url, token=name))
                assert found is not None
                assert set(found["tenants"]) == seen
                assert found["forwards"] > 0
                config = EdgeConfig(url=url, token=name)
                page = await asyncio.to_thread(_page, config)
                told = {x for x in names if f'tenant="{x}"' in page}
                assert told == seen

    run(work())


def _page(config: EdgeConfig) -> str:
    connection = http_connection(config)
    connection.request("GET", METRICS_PATH, headers=config.authorization())
    return connection.getresponse().read().decode()
