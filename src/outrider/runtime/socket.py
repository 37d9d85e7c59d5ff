"""One WebSocket as two ordered streams of frames, shaped when asked."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, ConnectionClosedOK
from websockets.protocol import State

from outrider.core.link import Link
from outrider.runtime.shaping import ShapedPath

FLUSH_S: Final = 0.5
"""How long closing waits for frames that are still queued, such as a CANCEL."""


class FrameSocket:
    """Frames out without waiting, frames in one by one. Nothing is delivered after close."""

    def __init__(self, raw: ClientConnection, link: Link | None, *, seed: int) -> None:
        self._raw = raw
        self._out: asyncio.Queue[bytes] = asyncio.Queue()
        self._in: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue()
        self._up: ShapedPath | None = None
        self._down: ShapedPath | None = None
        self._closed = False
        if link is None:
            work = [self._write()]
        else:
            self._up = ShapedPath(link.up(), self._raw.send, seed=seed)
            self._down = ShapedPath(link.down(), self._in.put, seed=seed + 1)
            work = [self._up.run(), self._down.run(), self._hold(self._down)]
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(w, name="outrider-socket") for w in work]

    def send(self, frame: bytes) -> None:
        """Queue a frame; order is kept."""
        if self._up is not None:
            self._up.put(frame)
        else:
            self._out.put_nowait(frame)

    async def _write(self) -> None:
        try:
            while True:
                frame = await self._out.get()
                try:
                    await self._raw.send(frame)
                finally:
                    self._out.task_done()
        except ConnectionClosed:
            return  # the reader reports it

    async def receive(self) -> bytes | None:
        """The next frame; None once the peer closed. Raises ConnectionClosed if the link broke."""
        if self._closed:
            return None
        if self._down is None:
            return await self._next()
        item = await self._in.get()
        if isinstance(item, BaseException):
            raise item
        return item

    async def _next(self) -> bytes | None:
        try:
            frame = await self._raw.recv()
        except ConnectionClosedOK:
            return None
        return frame if isinstance(frame, bytes) else frame.encode()

    async def _hold(self, down: ShapedPath) -> None:
        """Frames into the shaped path; behind the last one, why there are no more."""
        end: BaseException | None = None
        try:
            while (frame := await self._next()) is not None:
                down.put(frame)
        except ConnectionClosed as error:
            end = error
        await down.drained()
        self._in.put_nowait(end)

    async def close(self) -> None:
        """Let the last frames out, for FLUSH_S at most, then close; safe to call twice."""
        if self._raw.state is State.OPEN:
            last = self._out.join() if self._up is None else self._up.drained()
            with contextlib.suppress(TimeoutError):  # a peer that does not read is owed nothing
                await asyncio.wait_for(last, FLUSH_S)
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._in.put_nowait(None)  # whoever waits for a frame is released
        await self._raw.close()
