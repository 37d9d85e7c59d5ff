"""A verifier as a child process: for the demo, the bench and tests that need two processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from outrider.runtime import cores

LISTENING: Final = "listening on "
"""Start of the line by which `outrider cloud` says that it is ready."""
START_SECONDS: Final = 180.0
"""How long a target that loads may neither say anything nor do anything. There is no limit to how
long it may take: nobody knows how large it is, and how busy the machine."""
WORKS: Final = 0.01
"""Share of a core that a process uses which does something."""
STOP_SECONDS: Final = 5.0
LINES_KEPT: Final = 50
LONGEST_LINE: Final = 1 << 20


class CloudProcessError(RuntimeError):
    """The child did not come up; the message holds the last line it said."""


class CloudProcess:
    """`async with CloudProcess([...]) as cloud: cloud.url`."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        core: int | None = None,
        heard: Callable[[str], None] = lambda _line: None,
    ) -> None:
        """`arguments` of `outrider cloud`; `--listen 127.0.0.1:0` is added when none is given.
        `core`: keep it there (runtime.cores).
        `heard`: told each line of its stderr as it comes."""
        listen = [] if "--listen" in arguments else ["--listen", "127.0.0.1:0"]
        # Its input is held open and never written: when this process dies, however it does,
        # the child sees the end.
        self._command = [
            sys.executable,
            "-P",  # the folder that a user stands in may hold an outrider.py or a json.py
            "-m",
            "outrider",
            "cloud",
            "--until-eof",
            *listen,
            *arguments,
        ]
        self._core = core
        self._heard = heard
        self._process: asyncio.subprocess.Process | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._said: deque[str] = deque(maxlen=LINES_KEPT)
        self._lived = False
        """It has said something since it was looked at last."""
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
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=LONGEST_LINE,
            start_new_session=True,  # Ctrl-C is ours to hand on
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        # Both pipes are read to their end: a child that fills one would stop.
        listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._readers = [
            asyncio.create_task(self._listen(self._process.stdout, listening)),
            asyncio.create_task(self._remember(self._process.stderr)),
        ]
        if self._core is not None:
            self.pinned = cores.pin(self._process.pid, self._core)
        try:
            self.url = await self._ready(listening)
        except TimeoutError:
            await self.stop()
            last = f"; it said last: {self._said[-1]}" if self._said else ""
            raise CloudProcessError(f"no sign of life for {START_SECONDS:.0f} s{last}") from None
        except BaseException:  # cancelled: nobody else knows of the child
            await self.stop()
            raise
        if not self.url:
            await self.stop()
            last = self._said[-1] if self._said else "it ended at once"
            raise CloudProcessError(last.removeprefix("error: "))

    async def _ready(self, listening: asyncio.Future[str]) -> str:
        """Raises TimeoutError when it is silent and idle for too long."""
        while True:
            self._lived, before = False, worked(self.pid)
            await asyncio.wait((listening,), timeout=START_SECONDS)
            if listening.done():
                return listening.result()
            idle = worked(self.pid) - before <= WORKS * START_SECONDS
            if idle and not self._lived:
                raise TimeoutError

    @property
    def said(self) -> tuple[str, ...]:
        """The last lines of its stderr."""
        return tuple(self._said)

    @staticmethod
    async def _listen(pipe: asyncio.StreamReader, listening: asyncio.Future[str]) -> None:
        async for line in pipe:
            text = line.decode(errors="replace")
            if text.startswith(LISTENING) and not listening.done():
                listening.set_result(text.removeprefix(LISTENING).strip())
        if not listening.done():
            listening.set_result("")

    async def _remember(self, pipe: asyncio.StreamReader) -> None:
        async for line in pipe:
            if text := line.decode(errors="replace").rstrip():
                self._lived = True
                self._said.append(text.strip())
                self._heard(text)

    def kill(self) -> None:
        """SIGKILL: what a crash looks like."""
        self.signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Send a signal; nothing happens where the process is gone."""
        if self._process is not None and self._process.returncode is None:
            # Not by send_signal: that reaps a child that has just ended, under asyncio's nose.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    async def wait(self) -> int:
        """Its exit code, once it has ended and all it said is read."""
        assert self._process is not None, "not started"
        code = await self._process.wait()
        await asyncio.gather(*self._readers)
        return code

    async def stop(self) -> None:
        """Interrupt, and kill what does not go within a few seconds. Safe to call twice."""
        if self._process is None:
            return
        self.signal(signal.SIGINT)
        try:
            await asyncio.wait_for(self.wait(), STOP_SECONDS)
        except TimeoutError:
            self.kill()
            await self._process.wait()
            for reader in self._readers:
                reader.cancel()
            await asyncio.gather(*self._readers, return_exceptions=True)


def worked(pid: int) -> float:
    """Seconds of processor time of a process so far; 0 where the system does not say."""
    try:
        facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return (int(facts[11]) + int(facts[12])) / os.sysconf("SC_CLK_TCK")
