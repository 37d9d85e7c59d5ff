"""Runs a function that a model wrote against its tests, in a process with little to break.

A process of its own in an empty folder, with no environment, limits on time, memory, files and
processes, and no network where the system can take it away. That keeps accidents in; it is no
wall against code that means harm, which is why nothing runs without being asked for.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

SECONDS: Final = 10.0
"""HumanEval's tests take milliseconds; its own harness allows 3 seconds on an idle machine."""
MEMORY_BYTES: Final = 1 << 30
FILE_BYTES: Final = 1 << 20
FILES: Final = 32

_LIMITS: Final = """
import resource as r
for what, most in ((r.RLIMIT_CPU, {cpu}), (r.RLIMIT_AS, {memory}), (r.RLIMIT_FSIZE, {size}),
                   (r.RLIMIT_NOFILE, {files}), (r.RLIMIT_CORE, 0)):
    r.setrlimit(what, (most, most))
del r, what, most
"""


@cache
def without_network() -> tuple[str, ...]:
    """Words before a command that take the network away; none where the system does not let us."""
    tool = shutil.which("unshare")
    words = (tool, "--user", "--net") if tool else ()
    if words and subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        return ()
    return words


def passes(code: str, test: str, entry_point: str, *, seconds: float = SECONDS) -> bool:
    """Does `check(entry_point)` of `test` come to its end after `code`?"""
    proof = secrets.token_hex(8)  # an early exit is no pass
    limits = _LIMITS.format(cpu=int(seconds) + 1, memory=MEMORY_BYTES, size=FILE_BYTES, files=FILES)
    program = f"{limits}\n{code}\n{test}\ncheck({entry_point})\nprint({proof!r})\n"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.py"
        file.write_text(program, encoding="utf-8", errors="replace")
        command = [*without_network(), sys.executable, "-I", "-S", str(file)]
        with subprocess.Popen(
            command,
            cwd=folder,
            env={},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that what it started ends with it
        ) as process:
            try:
                said, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                said = b""
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    return said.split()[-1:] == [proof.encode()]
