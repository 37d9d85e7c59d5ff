"""One WebSocket as two ordered streams of frames, shaped when asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed
from websockets.protocol import State

from outrider.core.link import Link
from outrider.runtime.shaping import ShapedPath

FLUSH_S: Final = 0.5
"""How long closing waits for frames that are still queued, such as a CANCEL."""


class FrameSocket:
    """Frames out without waiting, frames in by iteration. Nothing is delivered after close."""

    def __init__(self, raw: ClientConnection, link: Link | None, *, seed: int) -> None:
        self._raw = raw
        self._out: asyncio.Queue[bytes] = asyncio.Queue()
        self._in: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue()
        self._up: ShapedPath | None = None
        self._down: ShapedPath | None = None
        if link is not None:
            self._up = ShapedPath(link.up(), self._raw.send, seed=seed)
            self._down = ShapedPath(link.down(), self._in.put, seed=seed + 1)
        loop = asyncio.get_running_loop()
        work = [self._write(), self._read()]
        work += [path.run() for path in (self._up, self._down) if path is not None]
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

    async def _read(self) -> None:
        """Frames to the queue, by way of the shaped path; then why there are no more."""
        end: BaseException | None = None
        try:
            async for frame in self._raw:
                data = frame if isinstance(frame, bytes) else frame.encode()
                if self._down is not None:
                    self._down.put(data)
                else:
                    self._in.put_nowait(data)
        except ConnectionClosed as error:
            end = error
        if self._down is not None:
            await self._down.drained()  # what was sent before the end arrives before it
        self._in.put_nowait(end)

    async def frames(self) -> AsyncIterator[bytes]:
        """Frames as they arrive; ends when the peer closed, raises ConnectionClosed if it broke."""
        while True:
            item = await self._in.get()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    async def close(self) -> None:
        """Let the last frames out, for FLUSH_S at most, then close; safe to call twice."""
        if self._raw.state is State.OPEN:
            last = self._out.join() if self._up is None else self._up.drained()
            with contextlib.suppress(TimeoutError):  # a peer that does not read is owed nothing
                await asyncio.wait_for(last, FLUSH_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._in.put_nowait(None)  # whoever iterates is released
        await self._raw.close()
