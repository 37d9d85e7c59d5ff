"""A gateway on a real socket in front of a toy pair, and a client for it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

import httpx

from live import PATIENCE, Pair, pair
from outrider.gateway.app import GatewayConfig, make_app
from outrider.gateway.server import GatewayServer

MODEL: Final = "toy"
CHAT: Final = "/v1/chat/completions"
TEXT: Final = "/v1/completions"
HELLO: Final = [{"role": "user", "content": "hi"}]


@dataclass(slots=True)
class Served:
    """Everything of one gateway."""

    pair: Pair
    app: Any
    server: GatewayServer
    http: httpx.AsyncClient

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    async def post(self, path: str, body: Any, **how: Any) -> httpx.Response:
        return await self.http.post(path, json=body, **how)

    async def events(self, path: str, body: dict[str, Any], **how: Any) -> list[Any]:
        """The values of a stream's events; the end marker as the string it is."""
        response = await self.post(path, body | {"stream": True}, **how)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return events(response.content)


def events(raw: bytes) -> list[Any]:
    """Each event is one `data:` line and a blank one."""
    assert raw.endswith(b"\n\n")
    lines = raw.decode().removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    values = [line.removeprefix("data: ") for line in lines]
    return [value if value == "[DONE]" else json.loads(value) for value in values]


@contextlib.asynccontextmanager
async def served(
    *, config: dict[str, Any] | None = None, drain: float = 0.0, **how: Any
) -> AsyncIterator[Served]:
    """`config`: of the gateway; everything else is of `live.pair`."""
    facts: dict[str, Any] = {"models": (MODEL,)}
    async with pair(**how) as both:
        app = make_app(both.edge, GatewayConfig(**(facts | (config or {}))))
        try:
            async with (
                GatewayServer(
                    app, "127.0.0.1", 0, drain=drain, room=app.state.gateway.room
                ) as server,
                httpx.AsyncClient(
                    base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE
                ) as http,
            ):
                yield Served(both, app, server, http)
        finally:
            app.state.gateway.lanes.close()


def chat(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HELLO, "max_tokens": 24, "seed": 7} | more


def text(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hi", "max_tokens": 24, "seed": 7} | more
