"""Questions for the bench scripts, from the data folder named by OUTRIDER_DATA.

Only rows that no built-in draft was trained on (src/outrider/data/drafts/README.md): all of
spec_bench and humaneval, gsm8k test rows 1001 on, commonsense_qa rows 1001 on, mmlu test rows
301 on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

HELD_OUT = {
    "spec_bench": ("spec_bench/spec_bench.jsonl", 0),
    "humaneval": ("humaneval/humaneval.jsonl", 0),
    "gsm8k": ("gsm8k/test.jsonl", 1000),
    "commonsense_qa": ("commonsense_qa/dev.jsonl", 1000),
    "mmlu": ("mmlu/test_513.jsonl", 300),
}


def data_folder() -> Path:
    """The folder behind OUTRIDER_DATA; leaves with a clear message when it is not there."""
    value = os.environ.get("OUTRIDER_DATA", "")
    folder = Path(value)
    if not value or not (folder / "spec_bench").is_dir():
        raise SystemExit("set OUTRIDER_DATA to the folder that holds spec_bench/, gsm8k/, ...")
    return folder


def held_out(task: str, count: int) -> list[str]:
    """`count` prompts of a task, spread evenly over its held-out rows."""
    path, skip = HELD_OUT[task]
    rows = (data_folder() / path).read_text(encoding="utf-8").splitlines()[skip:]
    picked = rows[:: max(1, len(rows) // count)][:count]
    return [_prompt(json.loads(row)) for row in picked]


def mixed(count: int) -> Iterator[tuple[str, str]]:
    """(task, prompt), the tasks taking turns, `count` in all."""
    each = -(-count // len(HELD_OUT))
    columns = {task: held_out(task, each) for task in HELD_OUT}
    pairs = ((t, columns[t][i]) for i in range(each) for t in columns if i < len(columns[t]))
    for number, pair in enumerate(pairs):
        if number >= count:
            return
        yield pair


def _prompt(row: dict[str, object]) -> str:
    turns = row.get("turns")
    return str(turns[0]) if isinstance(turns, list) else str(row["prompt"])
