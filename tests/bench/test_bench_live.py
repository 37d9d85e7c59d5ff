"""The bench on the built-in pair: a smoke test of cells, warm-up, scores and identity."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.bench.journal import read
from outrider.cli import run
from outrider.engines import builtin

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.timeout(600),  # it loads three models
    pytest.mark.skipif(builtin.find_gguf() is None, reason="the built-in target is not here"),
]

SCENARIO = """
title = "smoke"
[bench]
system = "live"
[link]
rtt = "5ms"
[live]
data = ["built-in", "gsm8k"]
prompts = 1
[workload]
max-tokens = 6
[schedule]
names = ["freerun"]
"""


def test_cells_of_the_built_in_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "gsm8k").mkdir()
    row = {"id": "q1", "prompt": "What is 2 + 3?", "answer": "5"}
    lines = "".join(json.dumps(row) + "\n" for _ in range(1001))
    (tmp_path / "gsm8k" / "test.jsonl").write_text(lines)
    monkeypatch.setenv("OUTRIDER_DATA", str(tmp_path))
    (tmp_path / "s.toml").write_text(SCENARIO)
    out = tmp_path / "run.jsonl"
    assert run(["bench", str(tmp_path / "s.toml"), "-o", str(out), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {(r["data"], r["arm"]) for r in rows} == {
        (data, arm)
        for data in ("built-in", "gsm8k")
        for arm in ("cloud-only", "colocated", "sync/ratio", "sync", "edge-only", "freerun")
    }
    for found in rows:
        assert found["warm_up"] == 1
        assert found["tokens"] <= 6
        assert (found["score"] is not None) == (found["data"] == "gsm8k")
        if found["arm"] in ("cloud-only", "colocated", "sync", "sync/ratio", "freerun"):
            assert found["identical"] == 1, "temperature 0: the target's own text"
    marks = {c.key.arm: c.marks for c in read(out).cells if c.key.data == "gsm8k"}
    assert all(mark.step > 0 for mark in marks["freerun"])
    assert sum(mark.tokens for mark in marks["freerun"]) == rows[-1]["tokens"]
    page = tmp_path / "r.html"
    assert run(["report", str(out), "-o", str(page)]) == 0
    assert ">cloud</text>" in page.read_text()
