"""Warm-up of `outrider bench` on a live pair that needs no weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from outrider.bench import onlink
from outrider.bench.journal import read
from outrider.cli import run

PAIR = """
system = "live"
[link]
rtt = "1ms"
[live]
target = "toy:1"
draft = "toy:1:0.7"
prompts = 1
[workload]
max-tokens = 6
[schedule]
names = ["freerun"]
"""


def test_each_arm_of_a_live_bench_is_warmed_up_as_often_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Field case 39: warm-up answers are made, and are in no cell."""
    made: list[str] = []
    real = onlink._answer

    async def answer(loaded: Any, arm: str, prompt: Any, params: Any, **more: Any) -> Any:
        made.append(arm)
        return await real(loaded, arm, prompt, params, **more)

    monkeypatch.setattr(onlink, "_answer", answer)
    counts: list[Counter[str]] = []
    for warm_up in (0, 3):
        made.clear()
        (tmp_path / "s.toml").write_text(f"[bench]\nwarm-up = {warm_up}\n{PAIR}")
        out = tmp_path / f"{warm_up}.jsonl"
        assert run(["bench", str(tmp_path / "s.toml"), "-o", str(out)]) == 0
        counts.append(Counter(made))
        cells = read(out).cells
        assert len(cells) == len({cell.key for cell in cells}) == len(counts[-1])
        assert {(cell.warm_up, len(cell.answers)) for cell in cells} == {(warm_up, 1)}
    cold, warm = counts
    assert warm == Counter({arm: count + 3 for arm, count in cold.items()})
