"""One thread for one engine, so that a forward never blocks the event loop.

Handing a call over and its outcome back is most of what a round trip costs here, so the way is
short: one queue there, one callback in the event loop back, no future in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timed(Generic[T]):
    """A result and when its work began and ended, monotonic seconds, on the engine's thread."""

    value: T
    started: float
    ended: float


Told = Callable[[Timed[Any] | BaseException], None]
"""Called with what a call returned, or raised; in the event loop, where it is a caller's."""


class EngineThread:
    """Runs calls one after the other on one thread of its own."""

    def __init__(self, name: str, *, pace: float = 0.0) -> None:
        """`pace`: seconds added to every forward, standing for a slower engine. Always stated."""
        self.pace = pace
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._closed = False

    def submit(self, call: Callable[[], Any], told: Told, *, forward: bool = True) -> None:
        """Run `call()` on the thread, then `told(outcome)` in this event loop. `forward`: it is
        one, and is paced; opening and freeing slots is not. Raises RuntimeError once closed."""
        pace = self.pace if forward else 0.0

        def once(tell: Told) -> None:
            started = time.monotonic()
            value = call()
            if pace:
                time.sleep(pace)
            tell(Timed(value, started, time.monotonic()))

        self._queue(once, told)

    def submit_each(self, call: Callable[[], Iterable[Any]], told: Told) -> None:
        """The same for a forward of several parts: `told` hears of each thing that `call()` yields
        as it comes, timed from the beginning, and of an error once, behind which nothing comes."""

        def each(tell: Told) -> None:
            started = time.monotonic()
            if self.pace:
                time.sleep(self.pace)
            for value in call():
                tell(Timed(value, started, time.monotonic()))

        self._queue(each, told)

    def _queue(self, work: Callable[[Told], None], told: Told) -> None:
        if self._closed:
            raise RuntimeError(f"the engine thread {self._thread.name} is closed")
        if self._thread.ident is None:
            self._thread.start()
        loop = asyncio.get_running_loop()
        self._calls.put(partial(self._run, work, partial(_tell, loop, told)))

    async def chore(self, call: Callable[[], T]) -> T:
        """Await `call()`, which is no forward. A cancelled wait does not stop the call; the next
        one simply queues behind it."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def told(outcome: Timed[T] | BaseException) -> None:
            if future.cancelled():
                return
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome.value)

        self.submit(call, told, forward=False)
        return await future

    def _work(self) -> None:
        while (run := self._calls.get()) is not None:
            run()

    def _run(self, work: Callable[[Told], None], tell: Told) -> None:
        if self._closed:
            tell(RuntimeError("the engine thread was closed"))
            return
        try:
            work(tell)
        except BaseException as error:  # noqa: BLE001 - it is told where it can be handled
            tell(error)

    def close(self) -> None:
        """Wait for the running call; queued ones are told that they will not run. Safe to call
        twice, and from another thread than the loop's."""
        self._closed = True
        if self._thread.ident is not None:
            self._calls.put(None)
            self._thread.join()


def _tell(loop: asyncio.AbstractEventLoop, told: Told, outcome: Timed[Any] | BaseException) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
        loop.call_soon_threadsafe(told, outcome)
