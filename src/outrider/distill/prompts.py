"""What the target is asked, so that its answers can teach a draft.

A draft learns the target's habits, so variety counts more than the sense of a question:
explanations, lists, stories, letters, code to write and code to complete, sums, riddles, facts,
roles, and texts to summarise or translate. Texts are taken from the target's own earlier answers
(`passages`), which costs nothing and needs no data set. Prompts from files are mixed in.

Everything is drawn from one `random.Random`, so a seed gives the same prompts again. The words
that fill the templates lie in `words.json`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Final

PROMPT_KEYS: Final = ("prompt", "question", "instruction", "text")
"""Fields of a JSONL row that may hold a prompt, in order of preference; else `turns[0]`."""
MAX_PROMPT_CHARACTERS: Final = 4000

_LANGUAGES: Final = ("Python", "Python", "Python", "JavaScript", "Java", "C", "SQL", "Bash")
_SIGNATURES: Final = (
    ("values: list[int]", "int"),
    ("text: str", "str"),
    ("n: int", "bool"),
    ("items: list", "list"),
    ("a: float, b: float", "float"),
)
_ASK: Final = (
    "Explain {topic} in simple terms.",
    "What are some interesting facts about {topic}?",
    "Write a short paragraph about {topic}.",
    "Compare {topic} and {other}.",
    "What is the difference between {topic} and {other}?",
    "What should a beginner know about {topic}?",
    "List five tips for someone interested in {topic}.",
    "Give a short history of {topic}.",
    "How does {topic} affect our daily lives?",
    "Write a short essay about {topic}.",
    "Ask me three quiz questions about {topic} and answer them.",
    "What are the advantages and disadvantages of {topic}?",
)
_FACT: Final = (
    "Who invented {topic}?",
    "Where does {topic} come from?",
    "What is the capital of {place}?",
    "What language is spoken in {place}?",
    "when did people start using {topic}",
    "What happened in {place} in {year}?",
    "How is {topic} related to {other}?",
    "which country is known for {topic}",
)
_WRITE: Final = (
    "Write a short story about {name} and {topic}.",
    "Write a poem about {topic}.",
    "Write a dialogue between {name} and {friend} about {topic}.",
    "Write a polite e-mail to {name} about {topic}.",
    "Write a letter of complaint about {topic}.",
    "Write the opening of a novel in which {name} discovers {topic}.",
    "Plan a trip to {place} for {name}.",
    "You are {role}. {name} asks about {topic}. What do you say?",
    "Pretend to be {role} and explain {topic}.",
)
_COUNT: Final = (
    "{name} has {a} {things}. {friend} gives {name} {b} more. How many {things} are there now?",
    "{name} buys {c} boxes with {b} {things} each and gives away {c}. How many are left?",
    "A train travels {d} miles in {c} hours. What is its average speed?",
    "Solve for x: {c}x + {b} = {e}.",
    "What is {a} times {c}?",
    "A rectangle is {a} cm long and {b} cm wide. What are its area and perimeter?",
    "If one ticket costs ${c}, how much do {b} tickets cost? Show your work.",
    "{name} is {a} years old and {friend} is {c} years younger. How old will {friend} be "
    "in {b} years?",
)
_CODE: Final = (
    "Write a {language} function that {task}.",
    "How do I write a {language} program that {task}?",
    "Explain step by step how to write a {language} function that {task}.",
)
_ABOUT: Final = (
    "Summarize: {passage}",
    "Summarize the following text in two sentences: {passage}",
    "What is the main idea of this passage? {passage}",
    "{passage}\nWhat does the text say about {topic}?",
    "Rewrite the following text in a more formal style: {passage}",
    "Write three questions about this text: {passage}",
    "Extract all names and places from this text: {passage}",
    "Translate to Spanish: {passage}",
    "Continue this text: {passage}",
)
_ENDINGS: Final = ("", "", "", "", " Think step by step.", " Answer in one sentence.")


def _words() -> Mapping[str, Sequence[str]]:
    text = (resources.files("outrider.distill") / "words.json").read_text(encoding="utf-8")
    words: Mapping[str, Sequence[str]] = json.loads(text)
    return words


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSource:
    """Prompts without end."""

    files: tuple[str, ...] = ()
    """Prompts read from files (`read_prompts`)."""
    file_share: float = 0.4
    """Share of prompts from the files, where there are any."""
    words: Mapping[str, Sequence[str]] = field(default_factory=_words)
    """What fills the templates, by kind."""

    def draw(self, random_source: random.Random, passages: Sequence[str] = ()) -> str:
        """One prompt. `passages`: texts of the target to ask about; without any, nothing is
        asked about texts."""
        if self.files and random_source.random() < self.file_share:
            return random_source.choice(self.files) + random_source.choice(_ENDINGS)
        return self._templated(random_source, passages)

    def _templated(self, source: random.Random, passages: Sequence[str]) -> str:
        kinds = [_ASK, _ASK, _FACT, _WRITE, _COUNT, _CODE, None]
        if passages:
            kinds.append(_ABOUT)
        templates = source.choice(kinds)
        if templates is None:
            return self._code_to_complete(source)
        words = self.words
        topic, other = source.sample(words["topics"], 2)
        name, friend = source.sample(words["names"], 2)
        a, b, c = source.randint(2, 60), source.randint(2, 40), source.randint(2, 12)
        return source.choice(templates).format(
            topic=topic,
            other=other,
            name=name,
            friend=friend,
            place=source.choice(words["places"]),
            things=source.choice(words["things"]),
            role=source.choice(words["roles"]),
            language=source.choice(_LANGUAGES),
            task=source.choice(words["tasks"]),
            year=source.randint(1500, 2000),
            passage=source.choice(passages) if passages else "",
            a=a,
            b=b,
            c=c,
            d=a * c,
            e=c * a + b,
        )

    def _code_to_complete(self, source: random.Random) -> str:
        """The head of a Python function with its docstring, and nothing else."""
        task = source.choice(self.words["tasks"])
        arguments, result = source.choice(_SIGNATURES)
        name = "_".join(word for word in task.split()[:3] if word.isalpha())
        doc = f"Function that {task}."
        return f'def {name}({arguments}) -> {result}:\n    """{doc}"""\n'


def read_prompts(paths: Iterable[Path]) -> tuple[str, ...]:
    """All prompts of JSONL files, cut to a sane length. ValueError names file and line."""
    found: list[str] = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            try:
                text = _prompt_of(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{path.name}, line {number}: {error}") from error
            found.append(text[:MAX_PROMPT_CHARACTERS])
    return tuple(found)


def _prompt_of(row: object) -> str:
    if isinstance(row, str) and row.strip():
        return row
    if isinstance(row, dict):
        turns = row.get("turns")
        first = turns[0] if isinstance(turns, list) and turns else None
        for value in (*(row.get(key) for key in PROMPT_KEYS), first):
            if isinstance(value, str) and value.strip():
                return value
    raise ValueError(f"no prompt here; expected a string under {', '.join(PROMPT_KEYS)}")
