"""Runs a function that a model wrote against its tests, in a process with little to break.

A process of its own in an empty folder, with no environment, with limits on time, memory and files,
and, where the system has a filter on calls, without network, further processes and files to write
(bench.confined). That keeps accidents in; it is no wall against code that means harm, which is why
nothing runs without being asked for.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Final

SECONDS: Final = 10.0
"""HumanEval's tests take milliseconds; its own harness allows 3 seconds on an idle machine."""
CONFINED: Final = Path(__file__).with_name("confined.py")

PROBES: Final = {
    "reach the network": "import socket\nsocket.socket()",
    "start processes": "import os\nif os.fork() == 0: os._exit(0)",
    "write files": "open('file', 'w')",
}
"""What must fail, in words for a warning."""


@cache
def allowed() -> tuple[str, ...]:
    """What code that is run here could do and should not: tried, not guessed."""
    return tuple(what for what, code in PROBES.items() if _ends(code))


def passes(code: str, test: str, entry_point: str, *, seconds: float = SECONDS) -> bool:
    """Does `check(entry_point)` of `test` come to its end after `code`?"""
    return _ends(f"{code}\n{test}\ncheck({entry_point})\n", seconds=seconds)


def _ends(program: str, *, seconds: float = SECONDS) -> bool:
    """Does a program come to its end? An early exit is none."""
    proof = secrets.token_hex(8)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.py"
        file.write_text(program, encoding="utf-8", errors="replace")
        words = [str(CONFINED), str(file), proof, str(int(seconds) + 1)]
        # A process group of its own: where nothing forbids to start others, they end with it.
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", *words],
            cwd=folder,
            env={},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            said = _read(process, len(proof), seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    return said == proof.encode()


def _read(process: subprocess.Popen[bytes], most: int, seconds: float) -> bytes:
    """What it wrote, at most one byte more than expected, within its time."""
    import select

    assert process.stdout is not None
    pipe, said, end = process.stdout.fileno(), b"", time.monotonic() + seconds
    while len(said) <= most:
        left = end - time.monotonic()
        if left <= 0.0 or not select.select([pipe], [], [], left)[0]:
            return b""
        piece = os.read(pipe, most + 1 - len(said))
        if not piece:
            break
        said += piece
    return said
