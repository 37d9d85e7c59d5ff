"""Tool calls: what is read does not hang on how the text came (field case 27)."""

from __future__ import annotations

import json

import numpy as np
import pytest

from outrider.core.sampling import DeadEndError
from outrider.engines.grammar import GrammarReader
from outrider.engines.tokenizer import ByteTokenizer
from outrider.gateway.calls import MAX_CALLS, CallReader, Function, briefing, grammar, line

WEATHER = Function(
    name="weather",
    description="of a place",
    parameters={
        "type": "object",
        "properties": {"place": {"type": "string"}},
        "required": ["place"],
        "additionalProperties": False,
    },
)
CLOCK = Function(name="clock", description=None, parameters={"type": "object", "properties": {}})
ARGUMENTS = ['{"place": "a \\"b\\" {c} \\\\"}', '{"place":"Ulm", "x": [{"y": "}"}]}']
CALLS = "\n".join([line("weather", ARGUMENTS[0]), line("clock", ARGUMENTS[1])])


def gathered(pieces: list[str]) -> tuple[list[str], list[str], list[str], str]:
    """What a client makes of the deltas: ids, names, arguments, content."""
    reader = CallReader("x")
    ids, names, arguments, content = [], [], [], ""
    for piece in pieces:
        delta = reader.push(piece)
        content += delta.get("content") or ""
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(names):
                ids.append(part["id"])
                names.append(part["function"]["name"])
                arguments.append("")
            else:
                assert "id" not in part
                assert "name" not in part["function"]
            arguments[part["index"]] += part["function"]["arguments"]
    assert (names, arguments) == (reader.names, reader.arguments)
    assert reader.complete == len(names)
    assert reader.reason("stop") == ("tool_calls" if names else "stop")
    return ids, names, arguments, content


def test_calls_are_the_same_whole_by_letters_and_cut_anywhere():
    whole = gathered([CALLS])
    assert whole == (["call_x0", "call_x1"], ["weather", "clock"], ARGUMENTS, "")
    assert gathered(list(CALLS)) == whole
    for i in range(len(CALLS) + 1):
        assert gathered([CALLS[:i], CALLS[i:]]) == whole
    for i in range(0, len(CALLS), 3):
        for j in range(i, len(CALLS), 5):
            assert gathered([CALLS[:i], CALLS[i:j], CALLS[j:]]) == whole


def test_a_text_stays_a_text():
    text = 'Say {"name": "weather", "arguments": {}}'
    assert gathered(list(text)) == gathered([text]) == ([], [], [], text)
    assert CallReader("x").message() == {"content": ""}


def test_a_call_that_is_cut_off_is_not_complete():
    reader = CallReader("x")
    reader.push(CALLS[:40])
    assert reader.reason("length") == "length"
    assert reader.message()["tool_calls"][0]["function"]["name"] == "weather"


def accepts(text: str, **how: bool) -> bool:
    constraint = GrammarReader(ByteTokenizer()).constraint(grammar([WEATHER, CLOCK], **how))
    try:
        return constraint.allowed(tuple(text.encode())).end
    except DeadEndError:
        return False


ONE = line("weather", '{"place": "Ulm"}')


@pytest.mark.parametrize(
    ("text", "must", "parallel", "right"),
    [
        (ONE, True, False, True),
        (f"{ONE}\n{ONE}", True, True, True),
        (f"{ONE}\n{ONE}", True, False, False),
        ("\n".join([ONE] * MAX_CALLS), True, True, True),
        ("\n".join([ONE] * (MAX_CALLS + 1)), True, True, False),
        ("It is warm {there}.\n", False, True, True),
        ("It is warm.", True, True, False),
        ("", False, True, True),
        ("", True, True, False),
        (ONE, False, True, True),
        ("{it", False, True, False),
        (line("other", "{}"), True, True, False),
        (line("weather", "{}"), True, True, False),
    ],
)
def test_the_grammar_of_calls(text: str, must: bool, parallel: bool, right: bool):
    assert accepts(text, must=must, parallel=parallel) is right


def test_the_grammar_gives_what_the_reader_reads():
    constraint = GrammarReader(ByteTokenizer()).constraint(
        grammar([WEATHER], must=True, parallel=False)
    )
    random = np.random.default_rng(4)
    path: list[int] = []
    while not (found := constraint.allowed(path)).end:
        likely = np.flatnonzero(found.ids[:128])
        quote = ord('"') in likely and len(path) > 60
        path.append(ord('"') if quote else int(random.choice(likely)))
    reader = CallReader("x")
    for token in path:
        reader.push(chr(token))
    assert reader.names == ["weather"]
    assert set(json.loads(reader.arguments[0])) == {"place"}


def test_the_briefing_names_every_function():
    text = briefing([WEATHER, CLOCK], must=False, parallel=True)
    assert '"weather"' in text
    assert '"clock"' in text
