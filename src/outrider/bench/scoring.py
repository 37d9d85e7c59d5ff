"""Scores of replies in [0, 1], by the usual rules of each data set; None where there is no rule.

* gsm8k and Spec-Bench's maths: the first number behind `####`, else the last in a box, else the
  last behind "answer is", else the last of all; right when equal as a number.
* multiple choice: the letter in a box, else behind "answer is" or "Answer:", else at the beginning,
  else the last one that stands alone in brackets; right when equal. Only letters of the choices.
* Spec-Bench's rag: does one of the short answers occur in the reply, word by word (as SQuAD
  compares: no case, punctuation or articles)?
* cnn_dailymail, Spec-Bench's summaries: ROUGE-L, the F measure on lower-case words, no stemming
  (what the package rouge_score gives).
* humaneval: do the tests pass (bench.sandbox)? Only where running code is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Final

from outrider.bench.questions import Question
from outrider.bench.sandbox import passes

_SIGN: Final = r"(?:(?<![\w)])[-\u2212])?"
"""Minus, not the dash of 10-15."""
_NUMBER: Final = rf"{_SIGN}(?:\\?\$\s?)?{_SIGN}(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_MARKED: Final = (
    re.compile(rf"####[\s*]*({_NUMBER})"),
    re.compile(rf"\\boxed\{{\s*({_NUMBER})"),
    re.compile(rf"answer is:?[\s*]*({_NUMBER})", re.IGNORECASE),
)
_BOXED: Final = r"\\boxed\{{\s*(?:\\text\{{)?\(?([{0}])\b"
_NAMED: Final = (
    r"(?i:answer)(?:\s+(?i:is|would be|should be))?\s*:?[\s*]*(?:(?i:option|choice|letter)\s+)?"
    r"(?:\*\*)?[(\[]?([{0}])(?![\w'])(?!\s+[a-z]+ing\b)"
)
_NAMED_SMALL: Final = r"(?i:answer(?: is)?)\s*:?\s*[(\[]?([{0}])(?:[)\].]|\s*$)"
_FIRST: Final = r"^\s*(?:\*\*)?[(\[]?([{0}])(?:[)\].,:*]|\s*(?:\n|$)|\s+-\s)"
_ALONE: Final = r"^\s*[(\[]?([{0}])[)\].]?\s*$"
_BRACKETED: Final = r"[(\[]([{0}])[)\]]"
_CHOICES: Final = {"mmlu": "ABCD", "commonsense_qa": "ABCDE"}
_ENDS: Final = re.compile(r"\n(?:class |def |#|if |print\(|@|assert |```|<\|)")
"""Where a completion of HumanEval ends: at the next thing that stands at the margin."""
_FENCED: Final = re.compile(
    r"```[ \t]*(?:python3?|py)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE
)
_ARTICLES: Final = {"a", "an", "the"}


def number_in(text: str) -> Decimal | None:
    """The number that a reply ends up with."""
    # Behind the first #### a model may go on with a question of its own.
    for place, pattern in zip((0, -1, -1), _MARKED, strict=True):
        if found := pattern.findall(text):
            return _decimal(found[place])
    found = re.findall(_NUMBER, text)
    return _decimal(found[-1]) if found else None


def _decimal(text: str) -> Decimal | None:
    bare = re.sub(r"[\s,$\\]", "", text).replace("\u2212", "-")
    try:
        return Decimal(bare)
    except InvalidOperation:
        return None


def letter_in(text: str, choices: str = "ABCDE") -> str | None:
    """The choice that a reply names, one of `choices`."""
    small = choices.lower()
    for pattern, letters in (
        (_BOXED, choices),
        (_NAMED, choices),
        (_NAMED_SMALL, small),
        (_FIRST, choices),
        (_ALONE, small),
    ):
        if found := re.search(pattern.format(letters), text):
            return found[1].upper()
    brackets = re.findall(_BRACKETED.format(choices), text)
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


def completed(prompt: str, reply: str, entry_point: str) -> str:
    """HumanEval's function, from a continuation, or from a code block that holds it or goes on."""
    begins = re.compile(rf"^(?:async )?def {re.escape(entry_point)}\b", re.MULTILINE)
    blocks = _FENCED.findall(reply)
    whole = next((block for block in blocks if begins.search(block)), None)
    if whole is not None:  # behind the prompt's imports and helpers
        start = begins.search(prompt)
        return (prompt[: start.start()] if start else "") + whole
    goes_on = reply.lstrip("\r\n").startswith((" ", "\t"))
    body = blocks[0] if blocks and not goes_on else reply
    end = _ENDS.search(body)
    return prompt + (body[: end.start()] if end else body)


def _plain(text: str) -> str:
    """As SQuAD compares: words only, no case, no articles."""
    words = re.findall(r"\w+", text.lower())
    return " " + " ".join(word for word in words if word not in _ARTICLES) + " "


def score(question: Question, reply: str, *, run_code: bool = False) -> float | None:
    """How right a reply is."""
    row = question.row
    match question.data, row.get("subtask"):
        case ("gsm8k", _) | ("spec_bench", "math_reasoning"):
            return float(number_in(reply) == _decimal(str(row["answer"])))
        case ("commonsense_qa" | "mmlu", _):
            return float(letter_in(reply, _CHOICES[question.data]) == row["answer"])
        case ("cnn_dailymail", _):
            return rouge_l(reply, row["reference"])
        case ("spec_bench", "summarization"):
            return rouge_l(reply, row["reference"][0])
        case ("spec_bench", "rag"):
            return float(any(_plain(a) in _plain(reply) for a in row["reference"]))
        case ("humaneval", _) if run_code:
            code = completed(row["prompt"], reply, row["entry_point"])
            return float(passes(code, row["test"], row["entry_point"]))
    return None
