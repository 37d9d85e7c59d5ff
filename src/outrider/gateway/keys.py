"""Who may ask: API keys in front of every route, deny by default (field case 36)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from outrider.gateway.errors import ApiError, limited
from outrider.gateway.openpaths import OPEN
from outrider.runtime.access import Logins, is_loopback, tenant_of
from outrider.session.quotas import NO_LIMITS, Bucket

OWNER: Final = "outrider.owner"

Scope = Any
Receive = Any
Send = Any


class Keyring:
    """The keys in force, and what their owners have under way."""

    def __init__(self, logins: Logins) -> None:
        self.logins = logins
        self._running: Counter[str] = Counter()
        self._begun: dict[str, Bucket] = {}

    def admit(self, logins: Logins) -> None:
        """From now on these. Answers under way go on: each was let in when it was asked for."""
        assert logins.tokens or not self.logins.tokens, "a file without keys opens no door"
        self.logins = logins

    @contextmanager
    def count(self, owner: str, answers: int, now: float) -> Iterator[None]:
        """So many answers of this owner are under way. Raises ApiError (429) where that is more
        than it may have; then none of them counts."""
        limits = self.logins.limits.get(owner, NO_LIMITS)
        if limits.sessions is not None and self._running[owner] + answers > limits.sessions:
            raise limited(f"this key may have {limits.sessions} answers under way")
        if limits.rate is not None:
            burst = max(1.0, limits.rate)
            begun = self._begun.setdefault(owner, Bucket(burst, now))
            wait = begun.take(answers, rate=limits.rate, burst=burst, now=now)
            if wait:
                raise limited(f"this key may begin {limits.rate:g} answers a second", seconds=wait)
        self._running[owner] += answers
        try:
            yield
        finally:
            self._running[owner] -= answers


class Doorkeeper:
    """ASGI middleware: lets a request through that has a key, or asks for an open path. Puts the
    key's owner into the scope, under OWNER."""

    def __init__(self, app: Any, *, keyring: Keyring, local: bool) -> None:
        """`keyring` without keys: nobody needs one. `local`: the gateway is for this machine
        alone."""
        self._app = app
        self._keyring = keyring
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
        keys = self._keyring.logins.tokens
        if self._local and not keys and not _own_name(headers):
            # A page that has its own name resolve to this machine would be let in by a browser.
            return ApiError(403, "this server is for its own machine only", code="wrong_host")
        if scope["path"] in OPEN or not keys:
            return None
        given = [value.decode("latin-1") for name, value in headers if name == b"authorization"]
        owner = tenant_of(given, keys)
        if owner is not None:
            scope[OWNER] = owner
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
