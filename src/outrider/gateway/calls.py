"""Tools: how a model is told of them, what it has to write to call one, and reading that back.

A call is one line of JSON, {"name": ..., "arguments": {...}}, several calls are several lines. The
grammar holds the answer to it: with `tool_choice` "auto" a text that does not begin with a brace is
a text, and one that does is calls. So the first character says which, and reading needs no guess.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from outrider.core.grammar import Grammar, GrammarKind
from outrider.engines.grammar import json_rule

MAX_CALLS: Final = 16
"""Most calls of one answer: a small model that may go on would go on."""

_HEAD: Final = re.compile(r'\{ ?"name" ?: ?("(?:[^"\\]|\\.)*") ?, ?"arguments" ?: ?(?=\{)')


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """What may be called."""

    name: str
    description: str | None
    parameters: dict[str, Any]
    """JSON schema of an object."""


def grammar(functions: Sequence[Function], *, must: bool, parallel: bool) -> Grammar:
    """Of an answer that may call, or `must`; several at once where it is `parallel`."""
    kinds = [
        {
            "type": "object",
            "properties": {"name": {"const": f.name}, "arguments": f.parameters},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for f in functions
    ]
    more = f' ("\\n" call){{0,{MAX_CALLS - 1}}}' if parallel else ""
    start = "calls" if must else "(TEXT | calls)?"
    rules = [f"start: {start}", f"calls: call{more}", f"call: {json_rule({'anyOf': kinds})}"]
    if not must:
        rules.append(r"TEXT: /[^{](.|\n)*/")
    return Grammar(kind=GrammarKind.LARK, text="\n".join(rules))


def briefing(functions: Sequence[Function], *, must: bool, parallel: bool) -> str:
    """What the model is told, as a part of the system message."""
    told = [
        json.dumps({"name": f.name, "description": f.description, "parameters": f.parameters})
        for f in functions
    ]
    lines = [
        "You can call functions. To call one, answer with one line of JSON and nothing else: "
        '{"name": NAME, "arguments": {...}}.',
        "Several calls are several lines." if parallel else "Call one function at most.",
        "Call one now." if must else "Where no function is needed, answer in words.",
        "The functions:",
    ]
    return "\n".join([*lines, *told])


def line(name: str, arguments: str) -> str:
    """A call as the model writes it."""
    return f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}'


@dataclass(slots=True)
class CallReader:
    """An answer's text, in any pieces, to content and calls (field case 27)."""

    prefix: str
    """Of the calls' ids, unique to the answer."""
    content: str = ""
    names: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    complete: int = 0
    """Calls whose arguments are all there."""
    _calls: bool | None = None
    _rest: str = ""
    _inside: bool = False
    _depth: int = 0
    _quoted: bool = False
    _escaped: bool = False

    def push(self, text: str) -> dict[str, Any]:
        """The delta of a message that the next piece of text comes to."""
        if self._calls is None and text:
            self._calls = text[0] == "{"
        if not self._calls:
            self.content += text
            return {"content": text} if text else {}
        parts: dict[int, dict[str, Any]] = {}
        self._rest += text
        while self._rest and (self._argue(parts) if self._inside else self._begin(parts)):
            pass
        return {"tool_calls": list(parts.values())} if parts else {}

    def _begin(self, parts: dict[int, dict[str, Any]]) -> bool:
        """Find the next call's name; False: it is not whole yet."""
        found = _HEAD.search(self._rest)
        if found is None:
            return False
        index, name = len(self.names), json.loads(found.group(1))
        self._rest, self._inside = self._rest[found.end() :], True
        self.names.append(name)
        self.arguments.append("")
        parts[index] = {
            "index": index,
            "id": self.id(index),
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }
        return True

    def _argue(self, parts: dict[int, dict[str, Any]]) -> bool:
        """Take what is there of the arguments."""
        index = len(self.names) - 1
        size = next((i for i, letter in enumerate(self._rest, 1) if self._closes(letter)), None)
        piece = self._rest[:size]
        self._rest = self._rest[len(piece) :]
        if size is not None:
            self._inside = False
            self.complete += 1
        self.arguments[index] += piece
        part = parts.setdefault(index, {"index": index, "function": {"arguments": ""}})
        part["function"]["arguments"] += piece
        return True

    def _closes(self, letter: str) -> bool:
        """Does the object of the arguments end with this letter?"""
        if self._escaped:
            self._escaped = False
        elif self._quoted:
            self._escaped, self._quoted = letter == "\\", letter != '"'
        elif letter == '"':
            self._quoted = True
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
            return self._depth == 0
        return False

    def id(self, index: int) -> str:
        return f"call_{self.prefix}{index}"

    def message(self) -> dict[str, Any]:
        """The whole message's own parts."""
        if not self.names:
            return {"content": self.content}
        calls = [
            {
                "id": self.id(i),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for i, (name, arguments) in enumerate(zip(self.names, self.arguments, strict=True))
        ]
        return {"content": None, "tool_calls": calls}

    def reason(self, reason: str) -> str:
        """Why the answer ended, in OpenAI's words."""
        return "tool_calls" if reason == "stop" and self.complete else reason
