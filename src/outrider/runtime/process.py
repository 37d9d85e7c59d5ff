"""A verifier as a child process: for the demo, the bench and tests that need two processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Final

LISTENING: Final = "listening on "
"""Start of the line by which `outrider cloud` says that it is ready."""
START_SECONDS: Final = 180.0
"""How long a target may take to load."""
STOP_SECONDS: Final = 5.0


class CloudProcessError(RuntimeError):
    """The child did not come up; the message holds the last line it said."""


def pin(pid: int, core: int) -> bool:
    """Keep a process on one core, where the system can; True when it is pinned.

    On a small machine edge and cloud would otherwise chase each other over the cores, and the
    times would say more about that than about the schedule.
    """
    if not hasattr(os, "sched_setaffinity"):
        return False
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2 or core >= len(allowed):
        return False
    with contextlib.suppress(OSError):
        os.sched_setaffinity(pid, {allowed[core]})
        return True
    return False


class CloudProcess:
    """`async with CloudProcess([...]) as cloud: cloud.url`."""

    def __init__(self, arguments: Sequence[str], *, core: int | None = None) -> None:
        """`arguments` of `outrider cloud`; `--listen 127.0.0.1:0` is added when none is given."""
        listen = [] if "--listen" in arguments else ["--listen", "127.0.0.1:0"]
        self._command = [sys.executable, "-m", "outrider", "cloud", *listen, *arguments]
        self._core = core
        self._process: asyncio.subprocess.Process | None = None
        self.url = ""
        self.pinned = False

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    async def __aenter__(self) -> CloudProcess:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start and wait until it listens. Raises CloudProcessError with what it said."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is ours to hand on
        )
        if self._core is not None:
            self.pinned = pin(self._process.pid, self._core)
        try:
            line = await asyncio.wait_for(self._first_line(), START_SECONDS)
        except TimeoutError:
            await self.stop()
            raise CloudProcessError(f"no answer within {START_SECONDS:.0f} s") from None
        if not line.startswith(LISTENING):
            assert self._process.stderr is not None
            said = (await self._process.stderr.read()).decode(errors="replace").strip()
            await self.stop()
            raise CloudProcessError(said.splitlines()[-1] if said else "it ended at once")
        self.url = line.removeprefix(LISTENING).strip()

    async def _first_line(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        return (await self._process.stdout.readline()).decode()

    def kill(self) -> None:
        """SIGKILL: what a crash looks like."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def stop(self) -> None:
        """Interrupt, and kill what does not go within a few seconds. Safe to call twice."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(2)
        try:
            await asyncio.wait_for(process.wait(), STOP_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()
