"""Data sets by name, as their usual prompts: rows of the folder in OUTRIDER_DATA, or of the hub.

NAME is a set of the folder, or of the hub where OUTRIDER_DATA is not set; NAME@REVISION is always
the hub's, at that branch, tag or commit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from outrider.bench import hub
from outrider.bench.prompts import PROMPTS
from outrider.calibrate.questions import HELD_OUT, VARIABLE
from outrider.core.reasons import why

BUILT_IN: Final = "built-in"
"""Our own prompts; no score."""
FILES: Final[Mapping[str, tuple[str, int]]] = {
    **HELD_OUT,
    "cnn_dailymail": ("cnn_dailymail/summeval_100.jsonl", 0),
}
"""Name to (file, rows left out at its beginning: built-in drafts were trained on them)."""
AS_PUBLISHED: Final[Mapping[str, str]] = {"spec_bench": "spec_bench/question.jsonl"}
"""Files that may stand there instead, as their authors publish them."""
ASK: Final[Mapping[str, str]] = {
    "gsm8k": "\nThink step by step, and end with a line of the form: #### NUMBER",
    "commonsense_qa": "\nReply with the letter of the right choice.",
    "mmlu": "\nReply with the letter of the right choice.",
}
"""What is put behind a question, so that its answer can be found."""
NEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    "gsm8k": ("answer",),
    "commonsense_qa": ("answer",),
    "mmlu": ("answer",),
    "humaneval": ("test", "entry_point"),
    "cnn_dailymail": ("reference",),
}
"""What a row must hold to be scored, beside its id and prompt."""
SUBTASKS: Final = ("translation", "summarization", "qa", "math_reasoning", "rag")
"""Categories of Spec-Bench that are tasks; the others are those of MT-Bench."""


class QuestionError(ValueError):
    """A data set that is not there or cannot be read; the message names the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One thing to ask, and what is needed to score the reply."""

    name: str
    data: str
    prompt: str
    raw: bool = False
    """Continued as it stands, not through the chat template."""
    row: Mapping[str, Any] = field(default_factory=dict)


def name_of(text: str) -> str:
    """The set of 'NAME' or 'NAME@REVISION'. Raises QuestionError."""
    data, at, revision = text.partition("@")
    if data != BUILT_IN and data not in FILES:
        known = ", ".join((BUILT_IN, *FILES))
        raise QuestionError(f"no data set {data!r}: known are {known}")
    if at and (data not in hub.PUBLISHED or not revision):
        names = ", ".join(hub.PUBLISHED)
        raise QuestionError(
            f"{text!r}: write NAME@REVISION with a branch, a tag or a commit of the hub's; there "
            f"are {names}"
        )
    return data


def pinned(names: Iterable[str]) -> dict[str, str]:
    """Each set that comes from the hub, with the commit that it has now. Raises QuestionError."""
    pins = {}
    for text in dict.fromkeys(names):
        if name_of(text) != BUILT_IN and _from_hub(text):
            pins[text] = _fetched(text).commit
        elif text != BUILT_IN:
            _of_folder(text)
    return pins


def load(data: str, count: int, pins: Mapping[str, str] | None = None) -> list[Question]:
    """`count` questions of a set, spread evenly over it; of the hub's, at the commit in `pins`.
    Raises QuestionError."""
    name = name_of(data)
    if name == BUILT_IN:
        return [
            Question(name=str(i), data=data, prompt=text) for i, text in enumerate(PROMPTS[:count])
        ]
    pin = (pins or {}).get(data)
    rows = _fetched(f"{name}@{pin}" if pin else data).rows if pin or _from_hub(data) else None
    rows = (_of_folder(data) if rows is None else rows)[FILES[name][1] :]
    if not rows:
        raise QuestionError(f"the data set {data} holds no row that may be asked")
    chosen = rows[:: max(1, len(rows) // count)][:count]
    return [_question(name, row) for row in chosen]


def _from_hub(data: str) -> bool:
    return "@" in data or (not os.environ.get(VARIABLE) and data in hub.PUBLISHED)


def _fetched(data: str) -> hub.Fetched:
    name, _, revision = data.partition("@")
    try:
        return hub.fetch(name, revision or hub.LATEST)
    except hub.HubError as error:
        raise QuestionError(f"the data set {data}: {error}; or {_fix(name)}") from None


def _fix(name: str) -> str:
    return (
        f"set {VARIABLE} to the folder that holds {FILES[name][0]}, or ask our own prompts "
        f'(--set live.data=["{BUILT_IN}"])'
    )


def _of_folder(name: str) -> list[dict[str, Any]]:
    folder = os.environ.get(VARIABLE, "")
    paths = [Path(folder) / file for file in (FILES[name][0], AS_PUBLISHED.get(name, "")) if file]
    path = next((path for path in paths if folder and path.is_file()), None)
    if path is None:
        more = f", or (from the hub) {name}@main" if name in hub.PUBLISHED else ""
        raise QuestionError(f"the data set {name} is not here: {_fix(name)}{more}")
    rows = _lines(path)
    if path.name != Path(FILES[name][0]).name:
        rows = [_spec_bench(row, path) for row in rows]
    for number, row in enumerate(rows, 1):
        _check(name, row, f"{path}, row {number}")
    return rows


def _lines(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file. Not by splitlines: a text may hold U+2028, which ends no line here."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise QuestionError(f"{path} cannot be read: {why(error)}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError:
                raise QuestionError(
                    f"{path}, line {number}: no JSON: take the line out, or fetch the file anew"
                ) from None
    return rows


def _check(name: str, row: Any, where: str) -> None:
    if not isinstance(row, dict):
        raise QuestionError(f"{where}: must be an object")
    turns = row.get("turns")
    asked = turns[0] if isinstance(turns, list) and turns else row.get("prompt")
    missing = [key for key in ("id", *NEEDED.get(name, ())) if row.get(key) in (None, "")]
    if not isinstance(asked, str) or not asked:
        missing.append("prompt")
    if missing:
        raise QuestionError(f"{where}: has no {', '.join(missing)}, which {name} needs")


def _spec_bench(row: dict[str, Any], path: Path) -> dict[str, Any]:
    """A row of Spec-Bench's own question.jsonl."""
    try:
        category = row["category"]
        found = {
            "id": f"spec_bench/{row['question_id']}",
            "subtask": category if category in SUBTASKS else "mt_bench",
            "turns": row["turns"],
            "reference": _flat(row.get("reference", [])),
        }
    except (KeyError, TypeError):
        raise QuestionError(
            f"{path} has not question_id, category and turns in each row: take the file from "
            "Spec-Bench's own repository"
        ) from None
    if category == "math_reasoning":
        found["answer"] = found["reference"][0].rpartition("####")[2].strip().replace(",", "")
    return found


def _flat(value: Any) -> list[str]:
    return [text for item in value for text in _flat(item)] if isinstance(value, list) else [value]


def _question(data: str, row: Mapping[str, Any]) -> Question:
    prompt = row["turns"][0] if "turns" in row else row["prompt"]
    return Question(
        name=str(row["id"]),
        data=data,
        prompt=prompt + ASK.get(data, ""),
        raw=data == "humaneval",
        row=row,
    )
