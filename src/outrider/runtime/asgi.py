"""The verifier as an ASGI application: `runtime.cloudruntime` on anybody's server.

`CloudApp` speaks ASGI 3: `lifespan` (nothing to start, the engine runs from its first forward on;
shutdown stops it), `http` for the routes beside the protocol and `websocket` for the protocol. It
was run on uvicorn and on Ray Serve; it imports neither.

What a host decides is its own: address, certificates, and what its stop signal does to open
WebSockets. What it should be told: messages up to MAX_FRAME_BYTES (a longer one is refused here,
too, but then it has been read), and no pings of its own (the protocol has some).

How far a reader is behind cannot be seen in ASGI: `send` may wait for it (uvicorn) or queue without
end (Ray Serve). So PINGs tell, at any host (`runtime.peers`).
"""

from __future__ import annotations

import asyncio
import contextlib
import http
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final

from outrider.proto.codec import MAX_FRAME_BYTES
from outrider.runtime.cloudruntime import CloudRuntime
from outrider.runtime.peers import CLOSE_TRY_LATER, FINISH_S, SocketClosedError
from outrider.runtime.routes import Reply

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

DENIAL: Final = "websocket.http.response"
"""ASGI's extension by which a handshake is answered with a status of ours; without it every refusal
is a 403."""
READ_METHODS: Final = ("GET", "HEAD")


class CloudApp:
    """A CloudRuntime as an ASGI application. Whoever makes it starts no engine: the first forward
    does."""

    def __init__(
        self,
        cloud: CloudRuntime,
        *,
        drain: float = 0.0,
        beside: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`drain`: seconds that answers which still run get when the host shuts it down."""
        self.cloud = cloud
        self.beside = beside
        """Runs for as long as it is up, such as a watch on a token file."""
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "lifespan":
                await self._live(receive, send)
            case "http":
                await self._http(scope, send)
            case "websocket":
                await self._websocket(scope, receive, send)
            case other:
                raise ValueError(f"no ASGI scope {other!r} here")

    async def _live(self, receive: Receive, send: Send) -> None:
        beside: asyncio.Future[None] | None = None
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                if self.beside is not None:
                    beside = asyncio.ensure_future(self.beside())
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                if beside is not None:
                    beside.cancel()
                await self.cloud.stop(drain=self._drain)
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _http(self, scope: Scope, send: Send) -> None:
        answer = self.cloud.door(scope["path"], _authorization(scope["headers"]))
        headers: list[tuple[bytes, bytes]] = []
        if not isinstance(answer, Reply):
            # The path speaks the protocol, and nobody asked for that (RFC 9110, 15.5.22).
            answer = Reply(status=http.HTTPStatus.UPGRADE_REQUIRED, body="a WebSocket is needed\n")
            headers = [(b"upgrade", b"websocket")]
        if answer.status is http.HTTPStatus.OK and scope["method"] not in READ_METHODS:
            answer = Reply(status=http.HTTPStatus.METHOD_NOT_ALLOWED, body="GET it\n")
            headers = [(b"allow", ", ".join(READ_METHODS).encode())]
        await _reply(send, answer, "http", *headers)

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self.cloud.door(scope["path"], _authorization(scope["headers"]))
        if not isinstance(answer, Reply):
            message = await receive()
            if message["type"] == "websocket.connect":
                await send({"type": "websocket.accept"})
                await self.cloud.serve(AsgiSocket(receive, send), answer)
            return
        if answer.status is http.HTTPStatus.OK:  # of a path that is for plain requests
            answer = Reply(status=http.HTTPStatus.BAD_REQUEST, body="no WebSocket here\n")
        await receive()
        if DENIAL in (scope.get("extensions") or {}):
            await _reply(send, answer, "websocket.http")
            return
        if answer.status is http.HTTPStatus.SERVICE_UNAVAILABLE:
            # A 403 would say that the login is wrong, and an edge would not come back.
            await send({"type": "websocket.accept"})
            await send({"type": "websocket.close", "code": CLOSE_TRY_LATER})
            return
        await send({"type": "websocket.close"})


class AsgiSocket:
    """A WebSocket that an ASGI host has accepted."""

    paced = False

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._gone = False
        """Closed by either side, or aborted."""
        self._coming: asyncio.Future[Message] | None = None

    async def receive(self) -> bytes:
        """Aborting ends this, and returning to the host then drops the link."""
        if self._gone:
            raise SocketClosedError
        self._coming = asyncio.ensure_future(self._receive())
        try:
            message = await self._coming
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._gone or (task is not None and task.cancelling()):
                raise  # it is not the message that was cancelled
            raise SocketClosedError from None
        if message["type"] == "websocket.disconnect":
            self._gone = True
            raise SocketClosedError
        frame = message.get("bytes")
        frame = (message.get("text") or "").encode() if frame is None else frame
        # One byte more than allowed is enough for the refusal: what is longer was not asked for.
        return bytes(frame[: MAX_FRAME_BYTES + 1])

    async def send(self, frame: bytes) -> None:
        if self._gone:
            raise SocketClosedError
        try:
            await self._send({"type": "websocket.send", "bytes": frame})
        except Exception as error:  # hosts differ in what they raise on a closed one
            self._gone = True
            raise SocketClosedError from error

    async def close(self, code: int) -> None:
        if self._gone:
            return
        goodbye = self._send({"type": "websocket.close", "code": code})
        with contextlib.suppress(Exception):  # it is closed, or does not read: both are an end
            await asyncio.wait_for(goodbye, FINISH_S)
        self._gone = True

    def abort(self) -> None:
        self._gone = True
        if self._coming is not None:
            self._coming.cancel()


async def _reply(send: Send, answer: Reply, kind: str, *headers: tuple[bytes, bytes]) -> None:
    body = answer.body.encode()
    facts = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
        *headers,
    ]
    await send({"type": f"{kind}.response.start", "status": int(answer.status), "headers": facts})
    await send({"type": f"{kind}.response.body", "body": body})


def _authorization(headers: Iterable[tuple[bytes, bytes]]) -> list[str]:
    """Every such header, as the other host reads them: bytes beyond ASCII are nobody's token."""
    return [
        value.decode("ascii", "surrogateescape")
        for name, value in headers
        if name.lower() == b"authorization"
    ]
