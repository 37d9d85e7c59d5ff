"""Grammars as masks: what llguidance makes of them, held to what we rest on."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import random
import re
from threading import Thread

import numpy as np
import pytest

from outrider.core.grammar import Grammar, GrammarKind
from outrider.core.sampling import DeadEndError
from outrider.core.tokens import GrammarError
from outrider.engines import grammar as leaf
from outrider.engines.base import MissingExtraError
from outrider.engines.grammar import MAX_KEPT_OF_ONE, GrammarReader
from outrider.engines.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer({257: b"ab", 258: b"abc", 259: b"bc", 260: b'{"', 261: b'": '})
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def schema(value: object) -> Grammar:
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(value))


def regex(text: str) -> Grammar:
    return Grammar(kind=GrammarKind.REGEX, text=text)


@pytest.fixture(scope="module")
def reader() -> GrammarReader:
    return GrammarReader(TOKENIZER)


def ids(allowed: leaf.Allowed) -> list[int]:
    return np.flatnonzero(allowed.ids).tolist()


def test_every_id_whose_bytes_go_on_is_allowed(reader: GrammarReader):
    """No way to cut a text into ids is preferred, forced texts included."""
    c = reader.constraint(regex("abcabc"))
    assert ids(c.allowed(())) == [ord("a"), 257, 258]
    assert ids(c.allowed((257,))) == [ord("c")]
    assert ids(c.allowed((ord("a"),))) == [ord("b"), 259]
    assert c.allowed((258, 258)).end
    assert ids(c.allowed((258, 258))) == []


def test_what_is_allowed_hangs_on_the_ids_and_not_on_the_way_there(reader: GrammarReader):
    grammar = schema(SCHEMA)
    for seed in range(10):
        chance = random.Random(seed)
        walked = reader.constraint(grammar)
        path: list[int] = []
        for _ in range(60):
            path = path[: len(path) - chance.choice((0, 0, 0, 1, 2, 5))]
            found = walked.allowed(path)
            fresh = reader.constraint(grammar).allowed(path)
            assert (found.ids == fresh.ids).all()
            assert found.end == fresh.end
            if not found.ids.any():
                break
            path.append(chance.choice(ids(found)))


def test_walks_through_a_schema_give_json_of_it(reader: GrammarReader):
    for seed in range(10):
        chance, c, path = random.Random(seed), reader.constraint(schema(SCHEMA)), []
        while (found := c.allowed(path)).ids.any() and len(path) < 200:
            path.append(chance.choice(ids(found)))
            if found.end:
                break
        if found.end:
            value = json.loads(TOKENIZER.decode(path))
            assert list(value) == ["name", "age"]


@pytest.mark.parametrize("text", ["a/b", "a\nb", r"\d+/\w", "[/]x", "(?i)ab", ""])
def test_expressions_mean_what_they_mean(reader: GrammarReader, text: str):
    c, path, chance = reader.constraint(regex(text)), [], random.Random(1)
    while not (found := c.allowed(path)).end:
        letters = [token for token in ids(found) if token < 128]
        path.append(chance.choice(letters))
    assert re.fullmatch(text, TOKENIZER.decode(path))


def test_an_object_and_a_rule(reader: GrammarReader):
    c = reader.constraint(Grammar(kind=GrammarKind.JSON_OBJECT))
    assert ids(c.allowed(())) == [ord("{"), 260]
    c = reader.constraint(Grammar(kind=GrammarKind.LARK, text='start: "x" | "y"'))
    assert ids(c.allowed(())) == [ord("x"), ord("y")]


def test_control_tokens_are_no_text(reader: GrammarReader):
    c = reader.constraint(regex("(.|\n)*"))
    assert not c.allowed(()).ids[ByteTokenizer.END]
    assert not reader.constraint(regex("<end>")).allowed(()).ids[ByteTokenizer.END]


def test_a_wrong_id_is_a_dead_end_and_no_more(reader: GrammarReader):
    c = reader.constraint(regex("(abc)+"))
    for wrong in ((ord("x"),), (258, ByteTokenizer.END), (258, 10**6)):
        with pytest.raises(DeadEndError):
            c.allowed(wrong)
        assert ids(c.allowed((258,))) == [ord("a"), 257, 258]


def test_the_words_of_a_dead_end_do_not_quote_the_answer(reader: GrammarReader):
    c = reader.constraint(regex("secret+"))
    with pytest.raises(DeadEndError) as caught:
        c.allowed(tuple(b"secretly"))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("grammar", "word"),
    [
        (schema({"not": {}}), "not"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"type": "bogus"}), "bogus"),
        (schema(False), "false"),
        (schema(3), "object"),
        (Grammar(kind=GrammarKind.JSON_SCHEMA, text="{"), "JSON"),
        (Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"items":' * 9000), "JSON"),
        (regex("(a"), "invalid regex"),
        (regex("(?=a)b"), "invalid regex"),
        (Grammar(kind=GrammarKind.LARK, text='start: "a" b'), "b"),
        (Grammar(kind=GrammarKind.LARK, text='%llguidance {}\nstart: "a"'), "%llguidance"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(
    reader: GrammarReader, grammar: Grammar, word: str
):
    for _ in range(2):  # the second time from what is kept
        with pytest.raises(GrammarError) as caught:
            reader.constraint(grammar)
        assert word in str(caught.value)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "grammar",
    [
        regex("((a{1,200}){1,200}){1,200}"),
        regex("(a|b)*a(a|b){18}"),
        regex(r"(\w+\s?){1,2000}"),
        schema({"anyOf": [{"properties": {f"p{i}": {"type": "string"}}} for i in range(300)]}),
        Grammar(kind=GrammarKind.LARK, text='start: a\na: a a | "x" | ""'),
    ],
)
def test_a_hostile_grammar_ends_in_an_error_or_goes_on(reader: GrammarReader, grammar: Grammar):
    """Bounded by the library's own counters, not by a clock; either way nothing hangs."""
    path: list[int] = []
    with contextlib.suppress(GrammarError, DeadEndError):
        c = reader.constraint(grammar)
        while len(path) < 40 and (found := c.allowed(path)).ids.any():
            path.append(ids(found)[len(path) % 2 - 1])
    assert ids(reader.constraint(regex("a")).allowed(())) == [ord("a")]


def test_what_was_read_is_kept_for_its_owner_only():
    reader = GrammarReader(TOKENIZER)
    for i in range(MAX_KEPT_OF_ONE + 5):
        reader.constraint(regex("a" * i), "one")
    reader.constraint(regex("b"), "two")
    kept = list(reader._kept)
    assert len([key for key in kept if key[0] == "one"]) == MAX_KEPT_OF_ONE
    assert ("one", regex("a" * (MAX_KEPT_OF_ONE + 4))) in kept
    assert ("two", regex("b")) in kept
    for i in range(80):
        reader.constraint(regex("c"), f"tenant {i}")
    assert len(reader._kept) == leaf.MAX_KEPT


def test_several_threads_read_at_once():
    reader, found = GrammarReader(TOKENIZER), []
    threads = [
        Thread(target=lambda: found.append(ids(reader.constraint(regex("abc")).allowed(()))))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[ord("a"), 257, 258]] * 8


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(MissingExtraError, match=r"outrider\[grammar\]"):
        GrammarReader(TOKENIZER).constraint(regex("a"))
