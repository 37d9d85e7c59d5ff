"""Ctrl-C in a live bench: nothing is lost, nothing is left running, and it goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outrider.bench.journal import read

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCENARIO = """
title = "toy"
[bench]
system = "live"
[points]
"near" = ["link.rtt=2ms"]
"far" = ["link.rtt=10ms"]
[live]
target = "toy:1"
draft = "toy:1:0.7"
prompts = 4
[workload]
max-tokens = 12
[schedule]
names = ["freerun"]
"""
CELLS = 2 * 4 * 6


def started(*words: str) -> subprocess.Popen[bytes]:
    # A shell's background jobs do not hear Ctrl-C, and this test may be one.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from outrider.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, "bench", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def verifiers(parent: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.append(int(status.parent.name))
    return found


def cells_in(file: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    while not file.exists() or file.read_bytes().count(b"\n") <= count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for children in /proc")
def test_an_interrupted_live_bench_goes_on(tmp_path: Path):
    (tmp_path / "s.toml").write_text(SCENARIO)
    out = tmp_path / "run.jsonl"
    for count, words in ((3, [str(tmp_path / "s.toml"), "-o", str(out)]), (30, None)):
        process = started(*(words or ["--resume", str(out)]))
        cells_in(out, count, process)
        children = verifiers(process.pid)
        assert len(children) == 1
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
        assert process.returncode == 130, said
        assert b"go on: outrider bench --resume" in said
        assert not Path(f"/proc/{children[0]}").exists()
        assert count <= len(read(out).cells) < CELLS
    kept = read(out).cells
    process = started("--resume", str(out))
    process.communicate(timeout=300)
    assert process.returncode == 0
    cells = read(out).cells
    assert cells[: len(kept)] == kept
    assert len(cells) == len({cell.key for cell in cells}) == CELLS
    exact = {c.key.item: set[str]() for c in cells}
    for cell in cells:
        if cell.key.arm in ("cloud-only", "colocated", "sync", "freerun"):
            exact[cell.key.item].add(cell.answers[0].digest)
    assert all(len(digests) == 1 for digests in exact.values()), "one text, before and after"


def test_a_run_that_ends_before_its_first_cell_leaves_no_file(tmp_path: Path):
    (tmp_path / "s.toml").write_text(SCENARIO.replace('"toy:1"', '"./nowhere"'))
    process = started(str(tmp_path / "s.toml"), "-o", str(tmp_path / "run.jsonl"))
    _, said = process.communicate(timeout=120)
    assert process.returncode == 2
    assert b"the verifier did not start" in said
    assert not (tmp_path / "run.jsonl").exists()
