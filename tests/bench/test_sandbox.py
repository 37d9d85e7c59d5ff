"""Code that a model wrote, run where it can break little."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path

import pytest

from outrider.bench import confined
from outrider.bench.sandbox import PROBES, allowed, passes

TEST = "def check(f): pass"
FILTERED = sys.platform == "linux" and platform.machine() in confined.MACHINES
needs_filter = pytest.mark.skipif(not FILTERED, reason="no filter on calls here")


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "x = bytearray(1 << 31)",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
        "def f(): f()\nf()",
        "def (",
        # Its output is nobody's: it can neither flood the bench nor say that it passed.
        "import os\nfor n in range(3, 32):\n    try: os.write(n, bytes(1 << 20))\n"
        "    except OSError: pass\n",
    ],
)
def test_code_that_misbehaves_does_not_pass(code: str):
    assert not passes(code, TEST, "print", seconds=5.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(1000)",
        "while True: print('x' * 100_000)",
        "import threading, time\n"
        "while True: threading.Thread(target=time.sleep, args=(1000,)).start()",
        "import signal\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass",
        "import re; re.match('(a+)+$', 'a' * 40 + 'b')",
    ],
)
def test_code_without_an_end_is_ended(code: str):
    assert not passes(code, TEST, "print", seconds=1.0)


REACHES = """
import os, socket, subprocess, multiprocessing
os.chdir(FOLDER)
tries = {
    "fork": os.fork,
    "subprocess": lambda: subprocess.run(["true"]),
    "multiprocessing": lambda: multiprocessing.get_context("fork").Process(target=print).start(),
    "socket": socket.socket,
    "socketpair": socket.socketpair,
    "kill the parent": lambda: os.kill(os.getppid(), 9),
    "kill all": lambda: os.kill(-1, 9),
    "write": lambda: open("file", "w"),
    "append": lambda: open("file", "a"),
    "change": lambda: open("held", "r+"),
    "create": lambda: os.open("file", os.O_CREAT),
    "truncate": lambda: os.truncate("held", 0),
    "mkdir": lambda: os.mkdir("sub"),
    "symlink": lambda: os.symlink("/", "file"),
    "remove": lambda: os.remove("held"),
    "rename": lambda: os.rename("held", "file"),
    "memory": lambda: os.memfd_create("x"),
}
for name, reach in tries.items():
    try:
        reach()
    except PermissionError:
        continue
    os._exit(1)
"""


@needs_filter
def test_what_is_out_of_reach(tmp_path: Path):
    (tmp_path / "held").write_text("kept")
    assert passes(REACHES.replace("FOLDER", repr(str(tmp_path))), TEST, "print")
    assert [path.name for path in tmp_path.iterdir()] == ["held"]
    assert (tmp_path / "held").read_text() == "kept"


@needs_filter
def test_nothing_is_allowed_that_a_warning_would_name():
    assert allowed() == ()
    assert {*PROBES} == {"reach the network", "start processes", "write files"}


def test_what_an_answer_may_need():
    code = (
        "from __future__ import annotations\n"
        "import collections, functools, heapq, itertools, math, random, re, string, threading\n"
        "t = threading.Thread(target=print); t.start(); t.join()\n"
        f"assert open({os.devnull!r}).read() == ''\n"
        "def two() -> int: return 2\n"
    )
    assert passes(code, "def check(f): assert f() == 2", "two")
    assert not passes(code, "def check(f): assert f() == 3", "two")


@pytest.mark.parametrize("machine", confined.MACHINES)
def test_the_filter_is_well_formed(machine: str):
    """Every leap lands inside, every path ends in a verdict; calls by their numbers."""
    code = confined.program(machine)
    steps = [code[i : i + 8] for i in range(0, len(code), 8)]
    assert len(code) % 8 == 0
    assert len(steps) < 4096, "the kernel's limit"
    for place, step in enumerate(steps):
        if step[0] in (confined.EQUAL, confined.MASK):
            assert place + 1 + max(step[2], step[3]) < len(steps)
    assert steps[-1][0] == confined.RETURN
    column, _ = confined.MACHINES[machine]
    numbers = [n[column] for n in confined.REFUSED.values() if n[column] is not None]
    assert len(numbers) == len(set(numbers)), "no call under two names"


@pytest.mark.slow
@pytest.mark.skipif(
    not (Path(os.environ.get("OUTRIDER_DATA", "")) / "humaneval" / "humaneval.jsonl").is_file(),
    reason="OUTRIDER_DATA holds no humaneval",
)
def test_the_canonical_solutions_pass_and_an_empty_one_does_not():
    file = Path(os.environ["OUTRIDER_DATA"]) / "humaneval" / "humaneval.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
    assert len(rows) == 164
    for row in rows:
        code = row["prompt"] + row["reference"]
        assert passes(code, row["test"], row["entry_point"]), row["id"]
        assert not passes(row["prompt"] + "    pass\n", row["test"], row["entry_point"]), row["id"]
