"""Scores of replies in [0, 1], by the usual rules of each data set; None where there is no rule.

* gsm8k and Spec-Bench's maths: the number behind `####`, else in a box, else behind "answer is",
  else the last one; right when equal as a number.
* multiple choice: the letter behind "answer is" or "Answer:", else at the beginning, else the last
  one that stands alone in brackets; right when equal.
* Spec-Bench's rag: does one of the short answers occur in the reply?
* cnn_dailymail, Spec-Bench's summaries: ROUGE-L, the F measure on lower-case words, no stemming.
* humaneval: do the tests pass (bench.sandbox)? Only where running code is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Final

from outrider.bench.questions import Question
from outrider.bench.sandbox import passes

_NUMBER: Final = r"-?\$?\d[\d,]*(?:\.\d+)?"
_MARKED: Final = (
    re.compile(rf"####\s*({_NUMBER})"),
    re.compile(rf"\\boxed\{{\s*({_NUMBER})"),
    re.compile(rf"answer is:?\s*\**({_NUMBER})", re.IGNORECASE),
)
_LETTERS: Final = (
    re.compile(r"answer(?: is)?\s*:?\s*\**\(?([A-J])\b", re.IGNORECASE),
    re.compile(r"^\s*\**\(?([A-J])(?:[).:*]|\s*(?:\n|$))"),
)
_BRACKETED: Final = re.compile(r"\(([A-J])\)")
_ENDS: Final = re.compile(r"\n(?:class |def |#|if |print\(|@|assert )")
"""Where a completion of HumanEval ends: at the next thing that stands at the margin."""
_FENCED: Final = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)


def number_in(text: str) -> Decimal | None:
    """The number that a reply ends up with."""
    for pattern in _MARKED:
        if found := pattern.findall(text):
            return _decimal(found[-1])
    found = re.findall(_NUMBER, text)
    return _decimal(found[-1]) if found else None


def _decimal(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None


def letter_in(text: str) -> str | None:
    """The choice that a reply names."""
    for pattern in _LETTERS:
        if found := pattern.search(text):
            return found[1].upper()
    brackets = _BRACKETED.findall(text)
    return brackets[-1] if brackets else None


def rouge_l(reply: str, reference: str) -> float:
    """F of the longest common subsequence of words."""
    ours, theirs = (re.findall(r"[a-z0-9]+", text.lower()) for text in (reply, reference))
    common = _common(ours, theirs)
    return 2.0 * common / (len(ours) + len(theirs)) if common else 0.0


def _common(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for word in a:
        before = 0
        for j, other in enumerate(b, 1):
            above = row[j]
            row[j] = before + 1 if word == other else max(above, row[j - 1])
            before = above
    return row[-1]


def completed(prompt: str, reply: str) -> str:
    """HumanEval's function, from a continuation or from a whole one in a code block."""
    if fenced := _FENCED.search(reply):
        return fenced[1]
    end = _ENDS.search(reply)
    return prompt + (reply[: end.start()] if end else reply)


def score(question: Question, reply: str, *, run_code: bool = False) -> float | None:
    """How right a reply is."""
    row = question.row
    match question.data, row.get("subtask"):
        case ("gsm8k", _) | ("spec_bench", "math_reasoning"):
            return float(number_in(reply) == _decimal(str(row["answer"])))
        case ("commonsense_qa" | "mmlu", _):
            return float(letter_in(reply) == row["answer"])
        case ("cnn_dailymail", _):
            return rouge_l(reply, row["reference"])
        case ("spec_bench", "summarization"):
            return rouge_l(reply, row["reference"][0])
        case ("spec_bench", "rag"):
            return float(any(a.lower() in reply.lower() for a in row["reference"]))
        case ("humaneval", _) if run_code:
            code = completed(row["prompt"], reply)
            return float(passes(code, row["test"], row["entry_point"]))
    return None
