"""HTTP to a server that runs the target next to this process: JSON both ways, and event streams.

Rules:

* One request at a time and thread, like the engine that asks; a stream has a connection of its own.
* Whatever goes wrong is a ServerError that says what to look at. What a server says in an error is
  cut before it could repeat a prompt.
* Replies have a bound, waiting has one (I7). A kept connection that the server closed meanwhile is
  opened again once; a request that was on its way is not repeated.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import ssl
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import urlsplit

from outrider.engines.base import ServerError

TIMEOUT_S: Final = 120.0
"""Most seconds without a byte: a prompt of some thousand ids on a busy CPU takes half of that."""
LIST_TIMEOUT_S: Final = 15.0
"""Most seconds without a byte of what needs no model, as the list of models, and to connect for it:
a port of something else, or a filter that drops packets, is known after this."""
MAX_REPLY_BYTES: Final = 64 << 20
"""Of a whole reply: 64 rows of 128 likeliest ids in the wordiest JSON seen take 1 MB."""
MAX_EVENT_BYTES: Final = 1 << 20
"""Of one event of a stream, which holds a token or a few."""
_MAX_WORDS: Final = 160
"""Characters of a server's own error message that are shown."""
_HOPELESS: Final = (OSError, http.client.HTTPException)


class RefusedError(ServerError):
    """What answers is there, and answers otherwise than asked."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Endpoint:
    """A server by its address. Not thread-safe."""

    def __init__(self, url: str, *, key: str = "", timeout: float = TIMEOUT_S) -> None:
        """`url`: http or https, host, port and an optional path before the API's own paths. `key`:
        sent as a bearer token. ServerError for anything else."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            raise ServerError(f"{url!r} has no usable port") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerError(f"{url!r} is no address of a server; use http://HOST:PORT")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ServerError("the address of a server holds no login and no query")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._https = parts.scheme == "https"
        self._host, self._port = parts.hostname, port
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._key = key
        self._timeout = timeout
        self._kept: http.client.HTTPConnection | None = None
        self.connects = 0
        """Connections made so far: one more than expected may be another server."""

    def get(self, path: str) -> Any:
        """The JSON value at `path`, for which no model has to run."""
        return self._exchange("GET", path, None)

    def post(self, path: str, body: Any) -> Any:
        """The JSON answer to a JSON body."""
        return self._exchange("POST", path, _encoded(body))

    def stream(self, path: str, body: Any) -> EventStream:
        """The answer's events, as they come."""
        connection = self._connect()
        try:
            self._send(connection, "POST", path, _encoded(body))
            reply = connection.getresponse()
            if reply.status != http.HTTPStatus.OK:
                raise self._refused(path, reply.status, reply.read(MAX_EVENT_BYTES))
        except ServerError:
            connection.close()
            raise
        except _HOPELESS as error:
            connection.close()
            raise self._gone(error) from error
        return EventStream(self, connection, reply)

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def __del__(self) -> None:
        if hasattr(self, "_kept"):  # engines have no last word: the socket goes with its owner
            self.close()

    def _exchange(self, method: str, path: str, body: bytes | None) -> Any:
        try:
            status, data = self._ask(method, path, body)
        except _HOPELESS as error:
            self.close()
            raise self._gone(error) from error
        if status != http.HTTPStatus.OK:
            raise self._refused(path, status, data)
        if len(data) > MAX_REPLY_BYTES:
            self.close()
            raise ServerError(f"{self.url}{path} answered with more than {MAX_REPLY_BYTES} bytes")
        return self.decoded(data)

    def _ask(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        used = self._kept is not None
        if self._kept is None:
            self._kept = self._connect()
        _wait(self._kept, self._timeout if body else min(self._timeout, LIST_TIMEOUT_S))
        try:
            self._send(self._kept, method, path, body)
            reply = self._kept.getresponse()
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
            if not used:
                raise
            self.close()  # it was closed while nothing was asked: no request is lost with it
            return self._ask(method, path, body)
        return reply.status, reply.read(MAX_REPLY_BYTES + 1)

    def _connect(self) -> http.client.HTTPConnection:
        self.connects += 1
        if not self._https:
            return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(
            self._host, self._port, timeout=self._timeout, context=context
        )

    def _send(
        self, to: http.client.HTTPConnection, method: str, path: str, body: bytes | None
    ) -> None:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        to.request(method, self._path + path, body=body, headers=headers)

    def decoded(self, data: bytes) -> Any:
        try:
            return json.loads(data)
        except ValueError:
            raise RefusedError(
                f"{self.url} answered with something that is not JSON", http.HTTPStatus.OK
            ) from None

    def _gone(self, error: Exception) -> ServerError:
        return ServerError(f"no answer from {self.url}: {_reason(error, https=self._https)}")

    def _refused(self, path: str, status: int, data: bytes) -> ServerError:
        words = _own_words(data)
        said = f": {words}" if words else ""
        return RefusedError(f"{self.url}{path} answered {status}{said}", status)

    def broken(self, error: Exception) -> ServerError:
        """For a stream of this server that ended in the middle."""
        return self._gone(error)


class EventStream:
    """Server-sent events with JSON data. Iterate, or close early: the server then stops."""

    def __init__(
        self,
        owner: Endpoint,
        connection: http.client.HTTPConnection,
        reply: http.client.HTTPResponse,
    ) -> None:
        self._owner = owner
        self._connection = connection
        self._reply = reply

    def __iter__(self) -> Iterator[Any]:
        try:
            while line := self._reply.readline(MAX_EVENT_BYTES):
                data = line.strip()
                if not data.startswith(b"data:"):
                    continue
                data = data.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                yield self._owner.decoded(data)
            raise http.client.IncompleteRead(b"")  # an end that nobody said is a cut
        except _HOPELESS as error:
            raise self._owner.broken(error) from error
        finally:
            self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._reply.close()
        self._connection.close()

    def __del__(self) -> None:
        self.close()


def _encoded(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def _wait(connection: http.client.HTTPConnection, seconds: float) -> None:
    """Give up after so long without a byte, whether it is open yet or not."""
    connection.timeout = seconds
    if connection.sock is not None:
        connection.sock.settimeout(seconds)


def _reason(error: Exception, *, https: bool) -> str:
    """Why, and what to look at."""
    match error:
        case ssl.SSLCertVerificationError():
            return (
                f"its certificate is not trusted ({error.verify_message}); name its authority's "
                "file in SSL_CERT_FILE"
            )
        case ssl.SSLError():
            return f"no TLS is spoken there ({error.reason}); use http:// if that is meant"
        case http.client.IncompleteRead():
            why = "it broke off in the middle of an answer"
        case TimeoutError():
            why = "it did not answer in time"
        case ConnectionResetError():  # http.client.RemoteDisconnected is one
            why = "it hung up without an answer"
            return f"{why}; is the server running{'' if https else ', and with http, not https'}?"
        case http.client.HTTPException():
            return "what listens there speaks no HTTP; is it the server's port?"
        case _:
            why = getattr(error, "strerror", None) or type(error).__name__
    return f"{why}; is the server running?"


def _own_words(data: bytes) -> str:
    """The message of an error reply, up to where it could begin to quote what it was sent."""
    try:
        value = json.loads(data)
    except ValueError:
        return ""
    inner = value.get("error", value) if isinstance(value, dict) else None
    message = inner.get("message") if isinstance(inner, dict) else inner
    if not isinstance(message, str):
        return ""
    return " ".join(re.split(r"[\[{\"'`]", message, maxsplit=1)[0].split())[:_MAX_WORDS]
