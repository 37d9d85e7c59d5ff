"""Shared by all tests. Its being here puts this folder on the import path: `import pair`."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

# Compiled modules are shared by the test processes and by all that tests start. Where the
# environment forbids to write them (usual in containers), each start compiles all of torch and
# transformers anew, about 10 seconds of processor time: then they get a folder of their own.
if sys.dont_write_bytecode:
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(Path(__file__).parents[1] / ".pytest_cache" / "bytecode")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# One thread a test process: several, each with as many threads as there are cores, would spin
# against each other and make seconds of minutes. Tests of threads ask for them (tiny.threads).
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts tests in the background has them, and all that they start, ignore Ctrl-C;
# tests of Ctrl-C would wait for good.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run and no time limit an example: a red test stays red on rerun,
# and a busy machine turns none red.
settings.register_profile(
    "outrider",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("outrider")


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """A command that a test runs in this process sets up logging; the next test has its own."""
    root, ours = logging.getLogger(), logging.getLogger("outrider")
    handlers, level = root.handlers[:], ours.level
    yield
    for handler in [h for h in root.handlers if h not in handlers]:
        root.removeHandler(handler)
    ours.setLevel(level)
