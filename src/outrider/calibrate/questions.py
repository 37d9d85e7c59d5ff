"""What the target is asked: question sets behind OUTRIDER_DATA, or JSONL files of prompts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from outrider.control.base import CalibrationError
from outrider.distill.prompts import read_prompts

VARIABLE: Final = "OUTRIDER_DATA"
HELD_OUT: Final = {
    "spec_bench": ("spec_bench/spec_bench.jsonl", 0),
    "humaneval": ("humaneval/humaneval.jsonl", 0),
    "gsm8k": ("gsm8k/test.jsonl", 1000),
    "commonsense_qa": ("commonsense_qa/dev.jsonl", 1000),
    "mmlu": ("mmlu/test_513.jsonl", 300),
}
"""Task: (file, rows left out at its beginning). No built-in draft was trained on the rest
(src/outrider/data/drafts/README.md)."""


def questions(count: int, files: Sequence[Path] = ()) -> list[tuple[str, str]]:
    """`count` pairs (task, prompt), the tasks taking turns, rows spread evenly over each task.

    A file's name without its ending is its task. Without files, the question sets of the folder
    in OUTRIDER_DATA. Raises CalibrationError when there is nothing to ask.
    """
    if files:
        sets = {path.stem: _read(path) for path in files}
    else:
        folder = _folder()
        sets = {task: _read(folder / name)[skip:] for task, (name, skip) in HELD_OUT.items()}
    each = -(-count // len(sets))
    columns = {task: rows[:: max(1, len(rows) // each)][:each] for task, rows in sets.items()}
    turns = [
        (task, rows[i]) for i in range(each) for task, rows in columns.items() if i < len(rows)
    ]
    if not turns:
        raise CalibrationError("no prompt in the files given")
    return turns[:count]


def _read(path: Path) -> tuple[str, ...]:
    try:
        return read_prompts([path])
    except ValueError as error:
        raise CalibrationError(str(error)) from None


def _folder() -> Path:
    value = os.environ.get(VARIABLE, "")
    folder = Path(value)
    missing = [name for name, _ in HELD_OUT.values() if not (folder / name).is_file()]
    if not value or missing:
        raise CalibrationError(
            f"no question sets: set {VARIABLE} to the folder that holds {', '.join(HELD_OUT)}, "
            "or name a JSONL file with --prompts"
        )
    return folder
