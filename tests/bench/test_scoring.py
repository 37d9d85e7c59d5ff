"""Scores of literal replies."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from outrider.bench.questions import Question, QuestionError, load
from outrider.bench.sandbox import passes
from outrider.bench.scoring import completed, letter_in, number_in, rouge_l, score


def asked(data: str, **row: Any) -> Question:
    return Question(name="q", data=data, prompt="", row=row)


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        ("3 + 4 = 7\n#### 7", "7"),
        ("First 12, then 30.\n#### $1,250.50 dollars", "1250.50"),
        ("so \\boxed{42} it is, of 99", "42"),
        ("The answer is 18. I used 3 eggs.", "18"),
        ("The answer is: **-5**", "-5"),
        ("He has 5, then 8, then 9 apples.", "9"),
        ("#### 3\n#### 4", "4"),
    ],
)
def test_the_number_of_a_reply(reply: str, number: str):
    assert number_in(reply) == Decimal(number)


def test_no_number_is_no_number():
    assert number_in("I do not know.") is None
    assert score(asked("gsm8k", answer="7"), "I do not know.") == 0.0


def test_numbers_are_compared_as_numbers():
    assert score(asked("gsm8k", answer="1250"), "#### 1,250.00") == 1.0
    assert score(asked("gsm8k", answer="1250"), "#### 125") == 0.0
    maths = asked("spec_bench", subtask="math_reasoning", answer="18")
    assert score(maths, "The answer is 18.") == 1.0


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("B", "B"),
        ("B. library", "B"),
        ("(C) because it is", "C"),
        ("A long story. The answer is D.", "D"),
        ("Answer: (E)", "E"),
        ("**B**", "B"),
        ("It cannot be (A), so it is (C)", "C"),
        ("Because of reasons", None),
        ("A revolving door is safe", None),
    ],
)
def test_the_letter_of_a_reply(reply: str, letter: str | None):
    assert letter_in(reply) == letter


def test_a_choice_is_right_or_wrong():
    assert score(asked("mmlu", answer="B"), "Answer: B") == 1.0
    assert score(asked("commonsense_qa", answer="B"), "Answer: A") == 0.0


def test_rouge_l():
    """Lin 2004: "police killed the gunman" against two others."""
    reference = "police killed the gunman"
    assert rouge_l("police kill the gunman", reference) == pytest.approx(0.75)
    assert rouge_l("the gunman kill police", reference) == pytest.approx(0.5)
    assert rouge_l("", reference) == 0.0


def test_short_answers():
    row = asked("spec_bench", subtask="rag", reference=["14 December 1972", "December 1972"])
    assert score(row, "It was in december 1972.") == 1.0
    assert score(row, "It was in 1969.") == 0.0
    assert score(asked("spec_bench", subtask="qa"), "anything") is None


TASK = {
    "prompt": "def two():\n",
    "test": "def check(f):\n    assert f() == 2\n",
    "entry_point": "two",
}


def test_code_is_run_only_when_asked():
    question = asked("humaneval", **TASK)
    assert score(question, "    return 2\n") is None
    assert score(question, "    return 2\n\nprint('and more')", run_code=True) == 1.0
    assert score(question, "    return 3\n", run_code=True) == 0.0
    assert score(question, "```python\ndef two():\n    return 2\n```", run_code=True) == 1.0


def test_a_completion_ends_at_the_margin():
    assert completed("def f():\n", "    return 1\nprint(f())\n") == "def f():\n    return 1"


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "x = bytearray(1 << 31)",
        "open('big', 'wb').write(bytes(1 << 22))",
    ],
)
def test_code_that_misbehaves_does_not_pass(code: str):
    assert not passes(code, "def check(f): pass", "print", seconds=2.0)


def test_data_sets_that_are_not_here(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OUTRIDER_DATA", raising=False)
    with pytest.raises(QuestionError, match="set OUTRIDER_DATA to the folder that holds gsm8k"):
        load("gsm8k", 2)
    with pytest.raises(QuestionError, match="no data set 'gsm9k': known are built-in, spec_bench"):
        load("gsm9k", 2)
    assert [q.name for q in load("built-in", 2)] == ["0", "1"]
