"""Who may ask: API keys in front of every route, deny by default (field case 36)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from outrider.gateway.errors import ApiError
from outrider.gateway.openpaths import OPEN
from outrider.runtime.access import is_loopback, tenant_of

Scope = Any
Receive = Any
Send = Any


class Doorkeeper:
    """ASGI middleware: lets a request through that has a key, or asks for an open path."""

    def __init__(self, app: Any, *, keys: Mapping[str, str], local: bool) -> None:
        """`keys`: SHA-256 (hex) of a key to its owner; empty: nobody needs one. `local`: the
        gateway is for this machine alone."""
        self._app = app
        self._keys = keys
        self._local = local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refusal = self._refusal(scope)
            if refusal is not None:
                await send_error(refusal, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = scope["headers"]
        if self._local and not self._keys and not _own_name(headers):
            # A page that has its own name resolve to this machine would be let in by a browser.
            return ApiError(403, "this server is for its own machine only", code="wrong_host")
        if scope["path"] in OPEN or not self._keys:
            return None
        given = [value.decode("latin-1") for name, value in headers if name == b"authorization"]
        if tenant_of(given, self._keys) is not None:
            return None
        return ApiError(
            401,
            "Incorrect API key provided."
            if given
            else "You didn't provide an API key: send it as Authorization: Bearer YOUR_KEY.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _own_name(headers: Any) -> bool:
    host = next((value.decode("latin-1") for name, value in headers if name == b"host"), "")
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    return is_loopback(name.strip("[]"))


async def send_error(error: ApiError, send: Send) -> None:
    """Send the error as the whole response."""
    body = msgspec.json.encode(error.body())
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    headers |= {name.lower(): value for name, value in error.headers.items()}
    await send(
        {
            "type": "http.response.start",
            "status": error.status,
            "headers": [(n.encode("latin-1"), v.encode("latin-1")) for n, v in headers.items()],
        }
    )
    await send({"type": "http.response.body", "body": body})
