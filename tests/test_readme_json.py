"""The README's list of --json keys against real objects, in one process and through a verifier."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from live import run, server
from outrider import cli

README = Path(__file__).parent.parent / "README.md"
TOYS = ("--target", "toy:1", "--draft", "toy:1:0.4", "--seed", "7", "--max-tokens", "24")
ASK = ("generate", "hi", "--json", "--temperature", "1", "--ignore-eos", *TOYS)


def listed() -> dict[str, dict[str, set[str]]]:
    """The README's table: condition to keys, each with the keys of the object behind it."""
    section = README.read_text("utf-8").split("`--json` prints one object:")[1].split("\n\n")[1]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines()[2:]]
    return {
        when: {
            key: set(re.findall(r"`(\w+)`", inner or ""))
            for key, inner in re.findall(r"`(\w+)`(?: \(([^)]*)\))?", keys)
        }
        for when, keys in rows
    }


def check(facts: dict[str, object], *conditions: str) -> None:
    table = listed()
    expected = {k: inner for when in ("always", *conditions) for k, inner in table[when].items()}
    assert set(facts) == set(expected)
    for key, inner in expected.items():
        if inner:
            value = facts[key]
            assert isinstance(value, dict)
            assert set(value) == inner, key


def answer(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, object]:
    assert cli.run([*ASK, *options]) == 0
    facts: dict[str, object] = json.loads(capsys.readouterr().out)
    return facts


CASES = [
    ((), ()),
    (("--verify", "ratio"), ("`--verify ratio`, a guess fell",)),
    (("--verify", "relaxed"), ("`--verify relaxed`",)),
    (("--logprobs", "2"), ("`--logprobs N`",)),
]


@pytest.mark.parametrize(("options", "conditions"), CASES, ids=lambda v: str(v)[:30])
def test_in_one_process(
    options: tuple[str, ...], conditions: tuple[str, ...], capsys: pytest.CaptureFixture[str]
):
    facts = answer(capsys, *options)
    check(facts, *conditions)
    assert isinstance(facts["timing"], dict)
    assert facts["timing"]["target_s"] > 0.0


def test_edge_only(capsys: pytest.CaptureFixture[str]):
    check(answer(capsys, "--schedule", "edge-only"), "`--schedule edge-only`")


def test_through_a_verifier(capsys: pytest.CaptureFixture[str]):
    async def work() -> None:
        async with server() as verifier:
            sync = ("--schedule", "sync", "--draft-length", "4")
            url = ("--cloud", f"ws://127.0.0.1:{verifier.port}", *sync)
            for options, conditions in CASES:
                facts = await asyncio.to_thread(answer, capsys, *url, *options)
                check(facts, "`--cloud`", *conditions)
                assert isinstance(facts["timing"], dict)
                assert facts["timing"]["target_s"] is None
                assert facts["timing"]["draft_s"] > 0.0

    run(work())
