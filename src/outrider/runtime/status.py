"""What a verifier says of itself: one GET of its /status, by the edge's own address and login."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import ssl
from typing import Any, Final
from urllib.parse import urlsplit

from outrider.runtime.edge import EdgeConfig
from outrider.runtime.routes import STATUS_PATH

TIMEOUT_S: Final = 5.0
"""A verifier that answers later is busy with something better."""
MAX_BYTES: Final = 1 << 20
"""Of an answer; a verifier's has a few hundred bytes and a line a tenant."""


async def fetch_status(config: EdgeConfig) -> dict[str, Any] | None:
    """The verifier's counters (`forwards`, `rows`, ... since it began); None where it tells
    none: an older one, another server before it, a link that is down."""
    return await asyncio.to_thread(_fetch, config)


def _fetch(config: EdgeConfig) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
        connection = http_connection(config)
        try:
            connection.request("GET", STATUS_PATH, headers=authorization(config))
            answer = connection.getresponse()
            facts = json.loads(answer.read(MAX_BYTES)) if answer.status == 200 else None
        finally:
            connection.close()
        return facts if isinstance(facts, dict) else None
    return None


def authorization(config: EdgeConfig) -> dict[str, str]:
    """The headers of a request to the verifier."""
    headers = dict(config.headers)
    if config.token:
        headers["Authorization"] = f"Bearer {config.token}"
    return headers


def http_connection(config: EdgeConfig) -> http.client.HTTPConnection:
    """To the verifier, for its routes beside the protocol; not connected yet."""
    parts = urlsplit(config.url)
    host, port = parts.hostname or "", parts.port
    if parts.scheme.lower() != "wss":
        return http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    context = ssl.create_default_context(cafile=config.ca_file)
    return http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)
