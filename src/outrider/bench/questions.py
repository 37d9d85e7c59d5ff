"""Data sets by name: rows of the folder in OUTRIDER_DATA, as their usual prompts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from outrider.bench.prompts import PROMPTS
from outrider.calibrate.questions import HELD_OUT, VARIABLE

BUILT_IN: Final = "built-in"
"""Our own prompts; no score."""
FILES: Final[Mapping[str, tuple[str, int]]] = {
    **HELD_OUT,
    "cnn_dailymail": ("cnn_dailymail/summeval_100.jsonl", 0),
}
"""Name to (file, rows left out at its beginning: built-in drafts were trained on them)."""
ASK: Final[Mapping[str, str]] = {
    "gsm8k": "\nThink step by step, and end with a line of the form: #### NUMBER",
    "commonsense_qa": "\nReply with the letter of the right choice.",
    "mmlu": "\nReply with the letter of the right choice.",
}
"""What is put behind a question, so that its answer can be found."""


class QuestionError(ValueError):
    """A data set that is not there; the message names the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One thing to ask, and what is needed to score the reply."""

    name: str
    data: str
    prompt: str
    raw: bool = False
    """Continued as it stands, not through the chat template."""
    row: Mapping[str, Any] = field(default_factory=dict)


def load(data: str, count: int) -> list[Question]:
    """`count` questions of a set, spread evenly over it. Raises QuestionError."""
    if data == BUILT_IN:
        return [
            Question(name=str(i), data=data, prompt=text) for i, text in enumerate(PROMPTS[:count])
        ]
    rows = _rows(data)
    chosen = rows[:: max(1, len(rows) // count)][:count]
    return [_question(data, row) for row in chosen]


def _rows(data: str) -> list[dict[str, Any]]:
    if data not in FILES:
        known = ", ".join((BUILT_IN, *FILES))
        raise QuestionError(f"no data set {data!r}: known are {known}")
    name, skip = FILES[data]
    folder = os.environ.get(VARIABLE, "")
    path = Path(folder) / name
    if not folder or not path.is_file():
        raise QuestionError(
            f"the data set {data} is not here: set {VARIABLE} to the folder that holds {name}, or "
            f'ask our own prompts (--set live.data=["{BUILT_IN}"])'
        )
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        return [json.loads(line) for line in lines if line.strip()][skip:]
    except ValueError as error:
        raise QuestionError(f"{path}: {error}") from None


def _question(data: str, row: Mapping[str, Any]) -> Question:
    prompt = row["turns"][0] if "turns" in row else row["prompt"]
    return Question(
        name=str(row["id"]),
        data=data,
        prompt=prompt + ASK.get(data, ""),
        raw=data == "humaneval",
        row=row,
    )
