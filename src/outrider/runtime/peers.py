"""One edge's WebSocket as the verifier sees it, whatever hosts it, with a queue in front.

`PeerSocket` is all that a host has to offer: `runtime.cloud` has one over the websockets library,
`runtime.asgi` one over ASGI's `receive` and `send`.

How much of what was sent is still under way bounds what a slow reader costs (I7, field case 31).
A host whose `send` waits for room tells it by that. Where `send` returns at once, however long the
queue behind it is, PINGs tell it: a PONG comes back when everything before its PING was read.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from outrider.proto.connection import Connection
from outrider.proto.errors import RemoteError
from outrider.proto.messages import Code
from outrider.runtime.events import note

MAX_UNSENT_BYTES: Final = 256 * 1024
"""Bytes queued for a reader before its sessions pause (field case 31)."""
DROP_UNSENT_BYTES: Final = 4 * MAX_UNSENT_BYTES
"""Bytes queued for a reader before its connection is closed."""
PINGS_A_LIMIT: Final = 4
"""PINGs among MAX_UNSENT_BYTES, where they tell what was read."""
FINISH_S: Final = 1.0
"""How long the last frames may take to leave, and then a peer to say goodbye."""

CLOSE_NORMAL: Final = 1000
CLOSE_GOING_AWAY: Final = 1001
CLOSE_PROTOCOL_ERROR: Final = 1002
CLOSE_POLICY: Final = 1008
CLOSE_TRY_LATER: Final = 1013
CLOSE_CODES: Final = {
    Code.MALFORMED: 1007,
    Code.TOO_LARGE: 1009,
    Code.VOCABULARY: CLOSE_POLICY,
    Code.VERSION: CLOSE_POLICY,
}
"""WebSocket close codes (RFC 6455, 7.4.1) by our own; anything else is 1002. For people who look
at a capture: the ERROR frame before it says more."""


class SocketClosedError(Exception):
    """The WebSocket is closed, or its link broke: nothing comes and nothing goes any more."""


class PeerSocket(Protocol):
    """An accepted WebSocket."""

    paced: bool
    """`send` returns when there is room again behind it, so a frame that it took is on its way."""

    async def receive(self) -> bytes:
        """The next message; a text as its bytes. Raises SocketClosedError."""

    async def send(self, frame: bytes) -> None:
        """One binary message. Raises SocketClosedError."""

    async def close(self, code: int) -> None:
        """Say goodbye; safe to call twice, and on a closed one. May take FINISH_S."""

    def abort(self) -> None:
        """Drop the link without a word; `receive` ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """Whom a handshake was granted to."""

    tenant: str
    login: str = ""
    """Hash of the token it came with; empty without one."""


class Peer:
    """A connection and its socket: nobody waits for a slow reader."""

    def __init__(
        self,
        socket: PeerSocket,
        connection: Connection,
        number: int,
        visitor: Visitor,
        unblocked: Callable[[int], None],
    ) -> None:
        """`unblocked`: told the number when a reader that had fallen behind has caught up."""
        self.socket = socket
        self.connection = connection
        self.number = number
        self.tenant = visitor.tenant
        self.login = visitor.login
        self._dismissed = False
        self.unsent = 0
        """Bytes that are not known to be on their way."""
        self.blocked = False
        """More is unsent than a session may add to."""
        self._unblocked = unblocked
        self._frames: asyncio.Queue[bytes] = asyncio.Queue()
        self._marks: deque[tuple[float, int]] = deque()
        """PINGs that are not answered yet: stamp, and the bytes since the one before it."""
        self._unmarked = 0
        """Bytes since the last of them."""

    def flush(self) -> None:
        """Hand what the connection wants to send to the writer."""
        if not self.socket.paced:
            self._mark()
        for frame in self.connection.take():
            self.unsent += len(frame)
            self._unmarked += len(frame)
            self._frames.put_nowait(frame)
        self.blocked = self.blocked or self.unsent > MAX_UNSENT_BYTES
        if self.unsent > DROP_UNSENT_BYTES:
            note("slow reader dropped", connection=self.number)
            self.socket.abort()

    def _mark(self) -> None:
        """Ask with a PING how far the reader is, once enough has gone out since the last one."""
        if self._unmarked < MAX_UNSENT_BYTES // PINGS_A_LIMIT:
            return
        now = time.monotonic()
        if self._marks and self._marks[-1][0] >= now:
            return  # a stamp names one PING
        before = self.connection.sent_bytes
        self.connection.ping(now)
        if self.connection.sent_bytes > before:  # it may not have been greeted yet
            self._marks.append((now, self._unmarked))
            self._unmarked = 0

    def heard(self) -> None:
        """A frame came; it may have been the answer to one of our PINGs."""
        stamp = self.connection.ponged
        if not any(mark == stamp for mark, _ in self._marks):
            return
        while self._marks:
            mark, size = self._marks.popleft()
            self._left(size)
            if mark == stamp:
                return

    def _left(self, size: int) -> None:
        self.unsent -= size
        if self.blocked and self.unsent <= MAX_UNSENT_BYTES // 2:
            self.blocked = False
            self._unblocked(self.number)

    def dismiss(self, error: RemoteError) -> None:
        """Say why and close; whoever does not read that is cut off."""
        self.connection.fail(error)
        self.flush()
        self._dismissed = True
        asyncio.get_running_loop().call_later(FINISH_S, self.socket.abort)

    async def write(self) -> None:
        """Send what is queued, until the socket is closed."""
        while True:
            frame = await self._frames.get()
            try:
                await self.socket.send(frame)
            except SocketClosedError:
                return
            finally:
                self._frames.task_done()
                if self.socket.paced:
                    self._left(len(frame))
            if self._dismissed and self._frames.empty():
                await self.socket.close(CLOSE_POLICY)
                return

    async def finish(self, patience: float = FINISH_S) -> None:
        """Let the last frames out, for `patience` seconds at most."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._frames.join(), patience)
