"""What a verifier says of itself: one GET of its /status, by the edge's own address and login."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
from typing import Any, Final
from urllib.parse import urlsplit

from outrider.runtime.edgeconfig import EdgeConfig
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
            connection.request("GET", STATUS_PATH, headers=config.authorization())
            answer = connection.getresponse()
            facts = json.loads(answer.read(MAX_BYTES)) if answer.status == 200 else None
        finally:
            connection.close()
        return facts if isinstance(facts, dict) else None
    return None


def http_connection(config: EdgeConfig) -> http.client.HTTPConnection:
    """To the verifier, for its routes beside the protocol; not connected yet. Raises OSError."""
    parts = urlsplit(config.url)
    host, port = parts.hostname or "", parts.port
    context = config.tls()
    if context is None:
        return http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    return http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)
