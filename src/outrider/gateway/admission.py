"""How many answers run at once, and who waits for a place: first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from outrider.gateway.errors import draining, invalid, overloaded

MAX_ANSWERS: Final = 64
"""Answers that run at once unless the command line says otherwise: what one verifier takes on one
connection."""
MAX_WAITING: Final = 256
"""Requests that may wait for a place; the next one is told to come back."""


class Room:
    """Places for answers. A request takes all its places at once, so none waits for itself."""

    def __init__(self, places: int = MAX_ANSWERS, *, most_waiting: int = MAX_WAITING) -> None:
        self.places = places
        self.active = 0
        """Places taken."""
        self.draining = False
        """Nobody new is let in; who is here already, running or waiting, is served."""
        self._most_waiting = most_waiting
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def idle(self) -> bool:
        """Nobody has a place or waits for one."""
        return not self.active and not self._queue

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    def check(self, count: int) -> None:
        """Raises ApiError where `count` answers would never get places, the queue is full, or the
        server is about to stop."""
        if self.draining:
            raise draining()
        if count > self.places:
            raise invalid("n", f"{count} answers at once; this server makes {self.places}")
        if len(self._queue) >= self._most_waiting and not self._fits(count):
            raise overloaded(
                f"{self._most_waiting} requests are waiting already; try again in a moment"
            )

    @asynccontextmanager
    async def hold(self, count: int) -> AsyncIterator[None]:
        """Wait for `count` places, and give them back. Raises ApiError as `check` does."""
        self.check(count)
        if self._fits(count):
            self.active += count
        else:
            await self._wait(count)
        try:
            yield
        finally:
            self.active -= count
            self._wake()

    def _fits(self, count: int) -> bool:
        return not self._queue and self.active + count <= self.places

    async def _wait(self, count: int) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (count, place)
        self._queue.append(entry)
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():  # `_wake` may have met it first
                if entry in self._queue:
                    self._queue.remove(entry)
            else:
                self.active -= count  # it was given a place at the moment it left
            self._wake()
            raise

    def _wake(self) -> None:
        while self._queue and self.active + self._queue[0][0] <= self.places:
            count, place = self._queue.popleft()
            if not place.cancelled():
                self.active += count
                place.set_result(None)
