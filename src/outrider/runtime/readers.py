"""Threads for what reading a grammar takes: the grammar itself, and the masks of each step.

Both come from outside and may take long (engines.grammar bounds how long), so neither may hold up
the event loop, nor a login that asked for nothing of the kind: a login has one call under way, and
free threads go to those that wait by turns.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

T = TypeVar("T")

READERS: Final = 2
"""Threads: a login that keeps one busy leaves another to the rest."""

Told = Callable[[Any], None]
"""Called in the event loop with what a call returned, or with the exception it raised."""


class Readers:
    """Runs calls of many logins on few threads. Everything but the calls is the event loop's."""

    def __init__(self, threads: int = READERS) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="outrider-grammars")
        self._free = threads
        self._waiting: OrderedDict[str, deque[tuple[Callable[[], Any], Told]]] = OrderedDict()
        """Calls of each login that has any, the login whose turn is next first."""
        self._busy: set[str] = set()
        """Logins with a call under way."""
        self._closed = False

    def submit(self, owner: str, call: Callable[[], Any], told: Told) -> None:
        """Run `call()` on a thread, behind the owner's others, then `told(outcome)`. Once closed,
        nothing runs and nobody is told."""
        self._waiting.setdefault(owner, deque()).append((call, told))
        self._next()

    async def run(self, owner: str, call: Callable[[], T]) -> T:
        """Await `call()`. A cancelled wait does not stop a call that has begun."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def told(outcome: Any) -> None:
            if future.cancelled():
                return
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        self.submit(owner, lambda: None if future.cancelled() else call(), told)
        return await future

    def _next(self) -> None:
        for owner in [name for name in self._waiting if name not in self._busy]:
            if not self._free or self._closed:
                return
            calls = self._waiting.pop(owner)
            call, told = calls.popleft()
            if calls:
                self._waiting[owner] = calls  # behind everybody else
            self._free -= 1
            self._busy.add(owner)
            done = partial(self._done, asyncio.get_running_loop(), owner, told)
            self._pool.submit(call).add_done_callback(done)

    def _done(
        self, loop: asyncio.AbstractEventLoop, owner: str, told: Told, future: Future[Any]
    ) -> None:
        """On the call's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            loop.call_soon_threadsafe(self._tell, owner, told, future)

    def _tell(self, owner: str, told: Told, future: Future[Any]) -> None:
        self._free += 1
        self._busy.discard(owner)
        if self._closed or future.cancelled():
            return
        self._next()
        told(future.exception() or future.result())

    def close(self) -> None:
        """Forget what waits; what runs ends by itself."""
        self._closed = True
        self._waiting.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)
