"""One thread for one engine, so that a forward never blocks the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timed(Generic[T]):
    """A result and when its work began and ended, monotonic seconds, on the engine's thread."""

    value: T
    started: float
    ended: float


class EngineThread:
    """Runs calls one after the other on one thread of its own."""

    def __init__(self, name: str, *, pace: float = 0.0) -> None:
        """`pace`: seconds added to every `run`, standing for a slower engine. Always stated."""
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self.pace = pace

    async def run(self, call: Callable[[], T]) -> Timed[T]:
        """Await `call()`, a forward, on the thread. A cancelled wait does not stop a running
        call; the next call simply queues behind it."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._timed, call)

    async def chore(self, call: Callable[[], T]) -> T:
        """Await `call()`, which is no forward (opening and freeing slots): it is not paced."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    def _timed(self, call: Callable[[], T]) -> Timed[T]:
        started = time.monotonic()
        value = call()
        if self.pace:
            time.sleep(self.pace)
        return Timed(value, started, time.monotonic())

    def close(self) -> None:
        """Drop what is queued; wait for the running call."""
        self._pool.shutdown(wait=True, cancel_futures=True)
