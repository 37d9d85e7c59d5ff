"""A TCP proxy that breaks connections as it is told: at a byte, or by swallowing everything."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Cut:
    """Reset a connection once this many bytes went through in one direction."""

    up: int | None = None
    down: int | None = None


@dataclass(slots=True)
class Proxy:
    """`async with Proxy(port) as proxy: proxy.port`. Connection n is cut as the n-th of `cuts`
    says; connections behind the last one are left alone."""

    target: int
    cuts: Iterator[Cut] = field(default_factory=lambda: iter(()))
    port: int = 0
    accepted: int = 0
    broken: int = 0
    _light: asyncio.Event = field(default_factory=asyncio.Event)
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def __aenter__(self) -> Proxy:
        self._light.set()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def darken(self) -> None:
        """A black hole from now on: nothing arrives, nothing closes."""
        self._light.clear()

    def heal(self) -> None:
        """What was swallowed arrives after all, as TCP would see to; connections work again."""
        self._light.set()

    def cut_all(self) -> None:
        """Reset every connection now."""
        for task in list(self._tasks):
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        cut = next(self.cuts, Cut())
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        other: asyncio.StreamWriter | None = None
        try:
            await self._light.wait()
            back, other = await asyncio.open_connection("127.0.0.1", self.target)
            pumps = [
                asyncio.create_task(self._pump(reader, other, cut.up)),
                asyncio.create_task(self._pump(back, writer, cut.down)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass  # the verifier is away, or the test ends
        finally:
            self._tasks.discard(task)
            for end in (writer, other):
                if end is not None:
                    end.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int | None
    ) -> None:
        """Copy until the end, or until `limit` bytes went through; returning resets both sides."""
        passed = 0
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._light.wait()
                if limit is not None and passed + len(data) >= limit:
                    writer.write(data[: limit - passed])
                    await writer.drain()
                    await asyncio.sleep(0.001)  # so that these bytes arrive before the reset
                    self.broken += 1
                    return
                passed += len(data)
                writer.write(data)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()
            await asyncio.sleep(0.2)  # an orderly close: let the other side finish
