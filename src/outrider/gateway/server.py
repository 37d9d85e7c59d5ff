"""The application on a socket, with uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import time
from collections.abc import Iterator
from typing import Any, Final

import uvicorn

from outrider.gateway.admission import Room

MAX_CONNECTIONS: Final = 1024
"""Sockets at once; the next one gets a plain 503."""
DRAIN_CHECK_S: Final = 0.02
IDLE_S: Final = 30.0
"""Seconds for which a connection may stay open between two requests."""


class _Server(uvicorn.Server):
    """Signals are the command's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class GatewayServer:
    """`async with GatewayServer(app, host, port) as server: server.port`."""

    def __init__(
        self,
        app: Any,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None = None,
        drain: float = 0.0,
        room: Room | None = None,
    ) -> None:
        """`drain`: seconds for which running answers may go on when it stops. `room`: where they
        are counted, so that meanwhile new requests get an answer (503), and not a closed port."""
        self._address = (host, port)
        self._tls = tls
        self._drain = drain
        self._room = room
        self._server = _Server(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",  # its errors quote what a client sent; ours say enough
                access_log=False,
                server_header=False,
                limit_concurrency=MAX_CONNECTIONS,
                timeout_keep_alive=int(IDLE_S),
                timeout_graceful_shutdown=drain,  # type: ignore[arg-type]
                ssl_context_factory=None if tls is None else lambda _config, _default: tls,
            )
        )
        self._serving: asyncio.Task[None] | None = None
        self.port = 0

    async def __aenter__(self) -> GatewayServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen. Raises OSError when the address is taken."""
        listening = _listening(*self._address)
        self.port = int(listening.getsockname()[1])
        self._serving = asyncio.create_task(
            self._server.serve(sockets=[listening]), name="outrider-gateway"
        )
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.001)
        if self._serving.done():
            self._serving.result()

    @property
    def connections(self) -> tuple[asyncio.Transport, ...]:
        """The open sockets."""
        return tuple(connection.transport for connection in self._server.server_state.connections)

    def hurry(self) -> None:
        """Do not wait for running answers."""
        self._server.should_exit = self._server.force_exit = True

    async def stop(self) -> None:
        """No new requests: they are told to ask elsewhere. Those that run or wait have their time,
        then they are cut. Safe to call twice."""
        until = time.monotonic() + self._drain
        if self._room is not None:
            self._room.draining = True
            while not (self._room.idle or self._server.force_exit) and time.monotonic() < until:
                await asyncio.sleep(DRAIN_CHECK_S)
        left = max(0.0, until - time.monotonic())
        self._server.config.timeout_graceful_shutdown = left  # type: ignore[assignment]
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named as TCP, or asyncio leaves Nagle's algorithm on in what it accepts (it looks at `proto`,
    # which socket.create_server leaves open), and every chunk waits for the one before it.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":  # elsewhere the option lets two servers share an address
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(MAX_CONNECTIONS)
    except BaseException:
        listening.close()
        raise
    return listening
