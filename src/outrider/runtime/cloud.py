"""The verifier as a server of its own: `runtime.cloudruntime` on the websockets library."""

from __future__ import annotations

import asyncio
from functools import partial

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from outrider.engines.desk import SlotDesk
from outrider.engines.tokenizer import Tokenizer
from outrider.proto.codec import MAX_FRAME_BYTES
from outrider.runtime.cloudruntime import CloudConfig, CloudRuntime
from outrider.runtime.discreet import discreet
from outrider.runtime.listening import OPEN_TIMEOUT_S, Guest, tls_context
from outrider.runtime.peers import FINISH_S, MAX_UNSENT_BYTES, SocketClosedError
from outrider.runtime.routes import Reply
from outrider.session.service import ServiceConfig

__all__ = ["CloudConfig", "CloudServer", "ServerSocket"]


class CloudServer(CloudRuntime):
    """One target engine behind a WebSocket. `async with` it, or start() and stop()."""

    def __init__(
        self,
        desk: SlotDesk,
        tokenizer: Tokenizer,
        config: CloudConfig | None = None,
        *,
        service: ServiceConfig | None = None,
    ) -> None:
        super().__init__(desk, tokenizer, config, service=service)
        self._server: Server | None = None
        self._guests: set[ServerConnection] = set()
        """Every open socket, upgraded or not."""

    async def start(self) -> None:
        """Listen. Raises OSError when the address is taken, ConfigurationError for certificates
        that cannot be used."""
        config = self.config
        self._server = await serve(
            self._serve_socket,
            config.host,
            config.port,
            ssl=tls_context(config.certificate, config.private_key),
            compression=None,
            max_size=MAX_FRAME_BYTES,
            process_request=self._admit,
            ping_interval=None,  # the protocol has its own heartbeat, both ways
            write_limit=MAX_UNSENT_BYTES,
            open_timeout=OPEN_TIMEOUT_S,
            close_timeout=FINISH_S,
            create_connection=partial(Guest, self._guests),  # type: ignore[arg-type]
            server_header=None,
            logger=discreet("outrider.cloud.socket"),
        )

    @property
    def port(self) -> int:
        """The port really bound (useful with port 0)."""
        assert self._server is not None, "not started"
        return int(next(iter(self._server.sockets)).getsockname()[1])

    async def __aenter__(self) -> CloudServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _admit(self, socket: ServerConnection, request: Request) -> Response | None:
        """Before the upgrade. None lets the handshake go on."""
        path = request.path.split("?", 1)[0]
        answer = self.door(path, request.headers.get_all("Authorization"))
        if isinstance(answer, Reply):
            return socket.respond(answer.status, answer.body)
        socket.visitor = answer  # type: ignore[attr-defined]
        return None

    async def _serve_socket(self, socket: ServerConnection) -> None:
        await self.serve(ServerSocket(socket), socket.visitor)  # type: ignore[attr-defined]

    async def _hang_up(self, patience: float) -> None:
        if self._server is None:
            return
        self._server.close()
        closed = asyncio.ensure_future(self._server.wait_closed())
        await asyncio.wait({closed}, timeout=patience)
        for guest in list(self._guests):  # they do not say goodbye
            guest.transport.abort()
        await closed


class ServerSocket:
    """A WebSocket of the websockets library."""

    paced = True
    """`send` waits while more than MAX_UNSENT_BYTES are in the transport's buffer."""

    def __init__(self, raw: ServerConnection) -> None:
        self.raw = raw

    async def receive(self) -> bytes:
        try:
            frame = await self.raw.recv()
        except ConnectionClosed:
            raise SocketClosedError from None
        return frame.encode() if isinstance(frame, str) else frame

    async def send(self, frame: bytes) -> None:
        try:
            await self.raw.send(frame)
        except ConnectionClosed:
            raise SocketClosedError from None

    async def close(self, code: int) -> None:
        await self.raw.close(code)

    def abort(self) -> None:
        self.raw.transport.abort()
