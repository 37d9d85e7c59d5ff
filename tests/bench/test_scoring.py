"""Scores of literal replies."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from outrider.bench.questions import Question, QuestionError, load
from outrider.bench.scoring import completed, letter_in, number_in, rouge_l, score


def asked(data: str, **row: Any) -> Question:
    return Question(name="q", data=data, prompt="", row=row)


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        ("3 + 4 = 7\n#### 7", "7"),
        ("#### 1,234", "1234"),
        ("First 12, then 30.\n#### $1,250.50 dollars", "1250.50"),
        ("#### **18**", "18"),
        ("####18 hours and 30 minutes", "18"),
        ("#### -12", "-12"),
        ("#### 3\n\nQuestion: and 1 more?\n#### 4", "3"),
        ("Format: #### NUMBER\n#### 7", "7"),
        ("so \\boxed{42} it is, of 99", "42"),
        ("\\boxed{\\$1,250}", "1250"),
        ("The answer is 18. I used 3 eggs.", "18"),
        ("The answer is **$1,234.50**.", "1234.50"),
        ("The answer is \\$18.", "18"),
        ("The answer is: **-5**", "-5"),
        ("He has 5, then 8, then 9 apples.", "9"),
        ("costs -$5", "-5"),
        ("costs $-5", "-5"),
        ("it is \u22125", "-5"),
        ("pages 10-15", "15"),
        ("(3)-2", "2"),
        ("about 50% of it", "50"),
        ("she paid .5 dollars", "0.5"),
        ("x = 3.", "3"),
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
        ("b", "B"),
        ("(b)", "B"),
        ("B. library", "B"),
        ("B - library", "B"),
        ("(C) because it is", "C"),
        ("A long story. The answer is D.", "D"),
        ("Answer: (E)", "E"),
        ("Answer:B", "B"),
        ("**B. mall**", "B"),
        ("The correct answer is:\n\n**C) mall**", "C"),
        ("The answer is option B", "B"),
        ("The answer is b.", "B"),
        ("The answer would be C", "C"),
        ("\\boxed{D}", "D"),
        ("\\boxed{\\text{D}}", "D"),
        ("It cannot be (A), so it is (C)", "C"),
        ("The answer is not A, it is (B)", "B"),
        ("Because of reasons", None),
        ("A revolving door is safe", None),
        ("I think so", None),
        ("I think the answer is a bank", None),
        ("The answer is Einstein", None),
        ("the best answer for Amy's case", None),
        ("Doctor", None),
    ],
)
def test_the_letter_of_a_reply(reply: str, letter: str | None):
    assert letter_in(reply) == letter


def test_only_letters_of_the_choices():
    assert letter_in("The answer is E, or (B)", "ABCD") == "B"


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
    assert score(asked("spec_bench", subtask="rag", reference=["no"]), "I know.") == 0.0
    assert score(asked("spec_bench", subtask="rag", reference=["The U.S."]), "the u.s.") == 1.0
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


PROMPT = "from math import pi\n\ndef g(x):\n    return x\n\ndef f():\n    'doc'\n"


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("    return 1\nprint(f())\n", PROMPT + "    return 1"),
        ("    return 1\n```\nIt returns 1.", PROMPT + "    return 1"),
        ("```python\n    return 1\n```", PROMPT + "    return 1\n"),
        # A whole function stands behind the prompt's imports and helpers.
        ("```python\ndef f():\n    return g(pi)\n```", "HEAD" + "def f():\n    return g(pi)\n"),
        ("So:\n```Py\r\ndef f():\n    return 1", "HEAD" + "def f():\n    return 1"),
        (
            "```\nimport os\ndef f():\n    pass\n```\nUse it:\n```\nf()\n```",
            "HEAD" + "import os\ndef f():\n    pass\n",
        ),
    ],
)
def test_the_function_of_a_reply(reply: str, code: str):
    head = PROMPT[: PROMPT.index("def f")]
    assert completed(PROMPT, reply, "f") == code.replace("HEAD", head)


def test_data_sets_that_are_not_here(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OUTRIDER_DATA", raising=False)
    with pytest.raises(QuestionError, match="set OUTRIDER_DATA to the folder that holds spec_ben"):
        load("spec_bench", 2)
    with pytest.raises(QuestionError, match="no data set 'gsm9k': known are built-in, spec_bench"):
        load("gsm9k", 2)
    assert [q.name for q in load("built-in", 2)] == ["0", "1"]


def test_a_folder_of_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OUTRIDER_DATA", str(tmp_path))
    file = tmp_path / "humaneval" / "humaneval.jsonl"
    file.parent.mkdir()
    with pytest.raises(QuestionError, match="the data set humaneval is not here"):
        load("humaneval", 1)
    row = {"id": "h", "prompt": "def two():\u2028", "test": "t", "entry_point": "two"}
    file.write_text(json.dumps(row, ensure_ascii=False) + "\n\n", encoding="utf-8")
    assert [q.prompt for q in load("humaneval", 3)] == ["def two():\u2028"], "no line ends there"
    for content, says in (
        ("{}", r"row 1: has no id, test, entry_point, prompt, which humaneval needs"),
        ("[1]", "row 1: must be an object"),
        ("{", "line 1: no JSON"),
        ("", "holds no row"),
        ("\xff", "cannot be read"),
    ):
        file.write_bytes(content.encode("latin-1"))
        with pytest.raises(QuestionError, match=says):
            load("humaneval", 1)


def test_spec_bench_as_its_authors_publish_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OUTRIDER_DATA", str(tmp_path))
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
        {
            "question_id": 401,
            "category": "math_reasoning",
            "turns": ["How many?"],
            "reference": ["3 + 4 = 7\n#### 1,007"],
        },
        {"question_id": 481, "category": "rag", "turns": ["When?"], "reference": [["1972"]]},
    ]
    file = tmp_path / "spec_bench" / "question.jsonl"
    file.parent.mkdir()
    file.write_text("\n".join(map(json.dumps, rows)))
    writing, maths, rag = load("spec_bench", 3)
    assert (writing.name, writing.prompt) == ("spec_bench/81", "Write.")
    assert score(writing, "x") is None
    assert score(maths, "#### 1007") == 1.0
    assert score(rag, "In 1972.") == 1.0
    file.write_text('{"prompt": "x"}')
    with pytest.raises(QuestionError, match="has not question_id, category and turns"):
        load("spec_bench", 1)
