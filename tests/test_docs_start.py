"""docs/quickstart.md, docs/objectives.md and the sample of docs/api.md say what is so."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from live import run
from outrider import cli
from outrider.gateway.wishes import OBJECTIVES
from outrider.runtime.process import LISTENING
from served import CHAT, chat, served

DOCS = Path(__file__).parent.parent / "docs"
QUICK = (DOCS / "quickstart.md").read_text("utf-8")
CHOOSE = (DOCS / "objectives.md").read_text("utf-8")
API = (DOCS / "api.md").read_text("utf-8")


def blocks(text: str, kind: str) -> list[str]:
    """Code blocks of a language, those within lists too."""
    found = re.findall(rf"^( *)```{kind}\n(.*?)^\1```", text, re.M | re.S)
    return [re.sub(rf"^{indent}", "", code, flags=re.M) for indent, code in found]


SHELL = "\n".join(blocks(QUICK, "sh") + blocks(CHOOSE, "sh")).replace("\\\n", " ")
COMMANDS = [m.strip() for m in re.findall(r"^(?:.*\| )?(outrider .*)$", SHELL, re.M)]


# -- what can be known without a server ---------------------------------------------------------


@pytest.mark.parametrize("line", COMMANDS)
def test_each_command_has_only_options_that_exist(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("token", "tokens", "cloud.pem", "cloud.key"):
        Path(name).touch(mode=0o600)
    _, name, *words = shlex.split(line)
    typer.main.get_command(cli.app).commands[name].make_context(name, words)


def test_the_commands_are_found():
    assert {line.split()[1] for line in COMMANDS} == {
        "doctor", "pull", "serve", "chat", "cloud", "edge", "plan",
    }  # fmt: skip


def test_objectives_are_the_gateways_own():
    table = re.findall(r"^\| `(\w+)` \|.*schedule `([\w-]+)`, controller `(\w+)`", CHOOSE, re.M)
    assert {name: (schedule, who) for name, schedule, who in table} == dict(OBJECTIVES)


CELLS = re.findall(r"^\| (\d+ms) \| (\.\d) \| (.*?) \| (.*?) \| (.*?) \|$", CHOOSE, re.M)
"""Of the table: round trip, acceptance, and what each objective gets."""
QUICKEST = ("200ms", ".4")
"""The cell that every run looks at; planning the six takes seconds."""


@pytest.mark.parametrize(
    ("rtt", "alpha", "latency", "balanced", "cost"),
    [pytest.param(*cell, marks=[] if cell[:2] == QUICKEST else pytest.mark.slow) for cell in CELLS],
)
def test_the_table_is_the_planners_answer(
    rtt: str, alpha: str, latency: str, balanced: str, cost: str, capsys: pytest.CaptureFixture[str]
):
    (line,) = [x for x in COMMANDS if x.startswith("outrider plan")]
    words = shlex.split(line)[1:]
    words[words.index("--rtt") + 1], words[words.index("--alpha") + 1] = rtt, alpha
    assert cli.run(words) == 0
    said = capsys.readouterr().out
    for name, cell in (("latency", latency), ("balanced", balanced), ("cost", cost)):
        (told,) = re.findall(rf"^{name} +(.*)$", said, re.M)
        schedule = re.search(r"draft at the edge, --schedule ([\w-]+)", told)
        assert cell.split(",")[0] == (f"`{schedule[1]}`" if schedule else "don't"), told
        number = re.search(r"\d+\.\d", cell)
        if number:
            assert f": {number[0]} ms" in told
        else:
            assert name == "balanced"


def test_there_are_six_cells():
    assert len(CELLS) == 6


def shape(value: Any, at: str = "") -> dict[str, str]:
    """Path to kind of value; the items of a list share one path."""
    if isinstance(value, dict):
        found = {f"{at}{{}}": "object"}
        for name, inner in value.items():
            found |= shape(inner, f"{at}.{name}")
        return found
    if isinstance(value, list):
        found = {f"{at}[]": "list"}
        for inner in value:
            found |= shape(inner, f"{at}[]")
        return found
    return {at: type(value).__name__}


def test_the_sample_answer_has_the_shape_of_a_real_one():
    (sample,) = re.findall(r'^(\{"id":"chatcmpl.*?)\n```', API, re.M | re.S)
    shown = json.loads(re.sub(r"\n\s*", "", sample))

    async def work() -> None:
        async with served() as gateway:
            real = (await gateway.post(CHAT, chat())).json()
            assert shape(real) == shape(shown)
            assert list(real) == list(shown)

    run(work())


# -- and with one, as people type it --------------------------------------------------------------

TOY = "toy:1"
QUESTION = "Why is the sky blue?"


@contextlib.contextmanager
def running(line: str, folder: Path, *more: str) -> Iterator[str]:
    """A server that the page starts, with the toy pair; where it listens."""
    words = [*shlex.split(line)[1:], *more]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "outrider", *words],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        said = process.stdout.readline()
        assert said.startswith(LISTENING), process.communicate()[1]
        yield said.removeprefix(LISTENING).strip()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()


def typed(line: str, folder: Path) -> str:
    """What a shell says to a line of the page, `outrider` being this checkout's."""
    program = folder / "outrider"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m outrider "$@"\n')
    program.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        ["/bin/sh", "-c", line],
        cwd=folder, capture_output=True, text=True, timeout=100, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def only(kind: str, holds: str) -> str:
    (found,) = [code for code in blocks(QUICK, kind) if holds in code]
    return found


@pytest.mark.slow
def test_the_quick_start_as_people_type_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Serve, ask in three ways, then the same over two processes with TLS and a token. The toy pair
    stands for the built-in one, and free ports for those of the page."""
    pytest.importorskip("openai")
    for program in ("curl", "openssl"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} here")
    toys = ("--target", TOY, "--draft", "toy:1:0.4", "--listen", "127.0.0.1:0")
    curl, python = only("sh", "curl"), only("python", "OpenAI")
    chatting = only("sh", "outrider chat")

    def asked(url: str) -> list[str]:
        here = [
            code.replace("http://127.0.0.1:8000", url).replace("builtin:smollm2", TOY)
            for code in (curl, python, chatting)
        ]
        whole = json.loads(typed(here[0], tmp_path))["choices"][0]["message"]["content"]
        by_client = typed(f"{shlex.quote(sys.executable)} -c {shlex.quote(here[1])}", tmp_path)
        assert by_client.rstrip("\n") == whole.rstrip("\n")
        return [whole, typed(f"{here[2].strip()} --set max_tokens=8", tmp_path)]

    with running(only("sh", "outrider serve").strip(), tmp_path, *toys) as url:
        page = typed(f"curl -s {url}/", tmp_path)
        assert "<title>" in page
        alone = asked(url)
        assert alone[1].strip()

    mine, other = typed("outrider token new laptop", tmp_path).splitlines()[:2]
    for name, secret in (("token", mine), ("tokens", other)):
        (tmp_path / name).write_text(f"{secret}\n")
        (tmp_path / name).chmod(0o600)
    local = "localhost"
    typed(only("sh", "openssl").replace("cloud.example", local), tmp_path)
    start = only("sh", "outrider cloud").replace("0.0.0.0:8765", "127.0.0.1:0").strip()
    with running(start, tmp_path, "--model", TOY) as cloud:
        where = f"wss://{local}:{cloud.rpartition(':')[2]}"
        looked = only("sh", "outrider doctor --cloud").replace("wss://cloud.example:8765", where)
        assert TOY in typed(f"{looked.strip()} --target {TOY}", tmp_path)
        edge = only("sh", "outrider edge").replace("wss://cloud.example:8765", where).strip()
        with running(edge, tmp_path, *toys) as url:
            assert asked(url)[0] == alone[0]
