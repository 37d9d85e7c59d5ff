"""Shaping a real connection in user space: frames wait until `core.link` says they arrive.

No privileges, any system, both directions at one end. A frame's due time is kept to about a
tenth of a millisecond: the event loop sleeps to just before it and yields for the rest, since
its own timer is a millisecond coarse.
"""

from __future__ import annotations

import asyncio
import csv
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path as FilePath
from typing import Final

from outrider.core.link import LinkError, Opportunities, Path, Server, Steps, seconds
from outrider.core.reasons import why

SPIN_S: Final = 0.0012
"""The last part of a wait, spent yielding instead of sleeping: asyncio's timer may be a
millisecond late."""
MAX_TRACE_LINES: Final = 5_000_000

Deliver = Callable[[bytes], Awaitable[None]]


class ShapedPath:
    """Frames in, the same frames out in the same order when they have arrived."""

    def __init__(self, path: Path, deliver: Deliver, *, seed: int) -> None:
        self._path = path
        self._deliver = deliver
        self._uniform = random.Random(seed).random
        self._due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    def put(self, frame: bytes) -> None:
        """Hand a frame to the link now."""
        arrival = self._path.arrival(len(frame), time.monotonic(), self._uniform)
        self._due.put_nowait((arrival, frame))

    def occupy(self, size: int) -> None:
        """So many bytes of somebody else travel first: a load beside the frames."""
        self._path.arrival(size, time.monotonic(), self._uniform)

    async def run(self) -> None:
        """Deliver frames for ever; cancel to stop."""
        while True:
            due, frame = await self._due.get()
            try:
                await sleep_until(due)
                await self._deliver(frame)
            finally:
                self._due.task_done()

    async def drained(self) -> None:
        """Return when everything handed in has been delivered."""
        await self._due.join()


async def sleep_until(due: float) -> None:
    """Return at `due` (monotonic seconds), not before and hardly after."""
    left = due - time.monotonic()
    if left > SPIN_S:
        await asyncio.sleep(left - SPIN_S)
    while time.monotonic() < due:
        await asyncio.sleep(0)


def load_trace(name: str) -> Callable[[], Server]:
    """A trace file: csv with columns time_s and mbit, or mahimahi (one ms a line).

    `FILE@140s`: a mahimahi trace that begins again after 140 s and not with its last packet.
    Raises LinkError when it is neither.
    """
    path, sign, again = name.rpartition("@")
    path, period = (path, seconds("trace period", again)) if sign else (name, None)
    file = FilePath(path).expanduser()
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LinkError(f"cannot read the trace {name}: {why(error)}") from None
    if len(lines) > MAX_TRACE_LINES:
        raise LinkError(f"{name} has more than {MAX_TRACE_LINES} lines")
    if lines and "," in lines[0]:
        steps = _csv_steps(name, lines)
        Steps(steps)  # refuse it now, not at the first frame
        return lambda: Steps(steps)
    try:
        times = [int(line) / 1e3 for line in lines if line.strip()]
    except (ValueError, OverflowError):
        raise LinkError(
            f"{name} is neither csv with time_s,mbit nor mahimahi (one whole number a line)"
        ) from None
    Opportunities(times, period_s=period)
    return lambda: Opportunities(times, period_s=period)


def _csv_steps(name: str, lines: list[str]) -> list[tuple[float, float]]:
    reader = csv.DictReader(lines)
    if not {"time_s", "mbit"} <= set(reader.fieldnames or ()):
        raise LinkError(f"{name}: a csv trace needs the columns time_s and mbit")
    try:
        rows = [(float(row["time_s"]), float(row["mbit"]) * 1e6) for row in reader]
    except (TypeError, ValueError):
        raise LinkError(f"{name}: time_s and mbit must be numbers in every line") from None
    start = rows[0][0] if rows else 0.0
    return [(t - start, rate) for t, rate in rows]
