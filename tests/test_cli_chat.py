"""`outrider chat`: settings, commands, both answerers, a pipe, a terminal."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import re
import signal
import subprocess
import sys
import time
from typing import Any

import httpx
import pytest
from rich.console import Console

from live import TARGET, TOKENIZER, Watched, alone, drafter, pair, run, server, toy, until
from outrider import cli
from outrider.commands.chatting import Chat, parsed, settings_of
from outrider.commands.errors import CommandError
from outrider.commands.voices import EdgeVoice, GatewayVoice
from outrider.core.tokens import SamplingParams
from outrider.gateway.wishes import Manner
from served import served

SETTINGS = {"seed": 7, "max_tokens": 24, "temperature": 1.0}


def text_of(*messages: dict[str, str], **params: Any) -> str:
    chosen = {"seed": 7, "max_tokens": 24, "temperature": 1.0} | params
    return alone(SamplingParams(**chosen), tuple(TOKENIZER.chat(messages))).text


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


class Screen:
    """Where a chat prints, without a terminal's colours unless asked for."""

    def __init__(self, *, terminal: bool = False) -> None:
        self.file = io.StringIO()
        self.console = Console(
            file=self.file, force_terminal=terminal, width=200, color_system="standard" if terminal
            else None, highlight=False,
        )  # fmt: skip

    def take(self) -> str:
        text = self.file.getvalue()
        self.file.seek(0)
        self.file.truncate()
        return text


def chat(both: Any, screen: Screen, **settings: Any) -> Chat:
    return Chat(EdgeVoice(both.edge, Manner()), "toy", screen.console, settings=SETTINGS | settings)


def test_the_conversation_goes_on_and_is_forgotten():
    async def work() -> None:
        screen = Screen()
        async with pair() as both:
            talk = chat(both, screen)
            first = text_of(said("user", "hi"))
            assert await talk.take("hi\n")
            assert screen.take().startswith(first + "\n24 tokens")
            history = [said("user", "hi"), said("assistant", first), said("user", "ho")]
            await talk.take("ho")
            assert screen.take().startswith(text_of(*history))
            await talk.take("/new")
            screen.take()
            await talk.take("hi")
            assert screen.take().startswith(first)
            assert not await talk.take("/quit")

    run(work())


def test_set_changes_the_next_answer_and_refuses_what_would_not_do():
    async def work() -> None:
        screen = Screen()
        async with pair() as both:
            talk = chat(both, screen)
            await talk.take("/set system be brief")
            await talk.take("/set temperature 0.3")
            await talk.take("/set schedule sync")
            assert screen.take() == ""
            await talk.take("hi")
            prompt = (said("system", "be brief"), said("user", "hi"))
            assert screen.take().startswith(text_of(*prompt, temperature=0.3))
            for line, word in (
                ("/set temperature -1", "temperature"),
                ("/set schedule slow", "schedule"),
                ("/set colour red", "no setting 'colour'"),
                ("/set controller nobody", "controller"),
                ("/sett", "no command /sett"),
                ("/stats x /compare", ""),
            )[:5]:
                kept = dict(talk.settings)
                await talk.take(line)
                complaint = screen.take()
                assert complaint.startswith("error: "), line
                assert word in complaint
                assert talk.settings == kept
            await talk.take("/set system")
            await talk.take("/set temperature")
            assert talk.settings == SETTINGS | {"schedule": "sync"}
            await talk.take("/set")
            assert "schedule sync" in screen.take()

    run(work())


def test_compare_answers_again_on_the_same_seed():
    async def work() -> None:
        screen = Screen()
        async with pair() as both:
            talk = chat(both, screen, schedule="sync")
            await talk.take("/compare schedule=cloud-only")
            assert "ask something first" in screen.take()
            await talk.take("hi")
            first = screen.take()
            await talk.take("/compare schedule=cloud-only")
            again = screen.take()
            assert again.startswith(text_of(said("user", "hi")))
            assert again.endswith("identical: 24 tokens\n")
            assert "1.00 target calls a token" in again
            assert "1.00 target calls a token" not in first
            await talk.take("/compare temperature=0.1")
            assert "different from token" in screen.take()
            assert talk.settings["schedule"] == "sync"
            assert len(talk.messages) == 2

    run(work())


def test_stats_add_up_the_chat():
    async def work() -> None:
        screen = Screen()
        async with pair() as both:
            talk = chat(both, screen, schedule="sync")
            await talk.take("/stats")
            assert "ask something first" in screen.take()
            for _ in range(2):
                await talk.take("hi")
            screen.take()
            await talk.take("/stats")
            rows = {line[:24].strip(): line[24:].split() for line in screen.take().splitlines()[1:]}
            counts = [len(turn.ids) for turn in talk.turns]
            assert rows["tokens"] == [str(counts[1]), str(sum(counts))]
            assert rows["guesses accepted"][0].endswith("%")
            assert float(rows["round trip, ms (median)"][0]) > 0

    run(work())


def test_a_terminal_sees_colours_and_nothing_that_could_steer_it():
    async def work() -> None:
        screen = Screen(terminal=True)
        async with pair() as both:
            talk = chat(both, screen, schedule="sync")
            await talk.take("hi")
            shown = screen.take()
            assert "\x1b[32m" in shown  # the draft's
            assert "\x1b[4;33m" in shown  # corrections, underlined too
            talk._show("\x1b[2Jboo\r", talk.turns[0].origins[0])
            assert "\ufffd[2Jboo\ufffd" in screen.take()
            await talk.take("/legend")
            assert "guessed by the draft" in screen.take()

    run(work())


def test_ctrl_c_stops_the_answer_and_not_the_chat():
    async def work() -> None:
        screen = Screen()
        model = Watched(TARGET)
        model.before = lambda _: time.sleep(0.005)
        async with pair(model=model) as both:
            talk = chat(both, screen, max_tokens=3000)
            answer = asyncio.ensure_future(talk.take("hi"))
            await until(lambda: len(screen.file.getvalue()) > 5)
            os.kill(os.getpid(), signal.SIGINT)
            assert await answer
            assert screen.take().endswith("stopped\n")
            await both.idle()
            talk.settings["max_tokens"] = 5
            await talk.take("more")
            assert "5 tokens" in screen.take()

    run(work())


def test_a_gateway_answers_the_same():
    async def work() -> None:
        screen = Screen()
        async with served() as gateway, httpx.AsyncClient(base_url=gateway.url) as http:
            voice = GatewayVoice(http, gateway.url)
            talk = Chat(voice, await voice.model(), screen.console, settings=SETTINGS)
            await talk.take("hi")
            shown = screen.take()
            assert shown.startswith(text_of(said("user", "hi")))
            assert "target calls a token" in shown
            await talk.take("/set temperature 1000")
            await talk.take("hi")
            assert screen.take().startswith("error: temperature: ")
            await gateway.server.stop()
            await talk.take("/set temperature")
            await talk.take("hi")
            assert "is outrider serve or outrider edge running there?" in screen.take()

    run(work())


@pytest.mark.parametrize("through", ["edge", "gateway"])
def test_a_verifier_that_goes_is_told_beside_the_answer(
    through: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    """On stderr; a gateway says it in its log and, to whoever streams, in comments."""

    async def work() -> None:
        screen = Screen()
        async with (
            served(cloud={"pace": 0.01}) as gateway,
            httpx.AsyncClient(base_url=gateway.url) as http,
        ):
            both = gateway.pair
            local = EdgeVoice(both.edge, Manner())
            voice = local if through == "edge" else GatewayVoice(http, gateway.url)
            settings = SETTINGS | {"max_tokens": 80, "schedule": "sync"}
            talk = Chat(voice, "toy", screen.console, settings=settings)
            answer = asyncio.ensure_future(talk.take("hi"))
            await until(lambda: len(screen.file.getvalue()) > 5)
            port = both.cloud.port
            await both.cloud.stop()
            await until(lambda: both.edge.contact.attempt > 1)
            fresh = server(toy(TARGET), own_draft=drafter(), port=port)
            await fresh.start()
            assert await answer
            assert screen.take().startswith(text_of(said("user", "hi"), max_tokens=80))
            await both.edge.close()
            await fresh.stop()

    run(work())
    told = [line for line in capsys.readouterr().err.splitlines() if "verifier" in line]
    assert len(told) == 2
    assert told[0].startswith("no link to the verifier")
    assert "): reconnecting, attempt 1, gives up in " in told[0] or through == "gateway"
    assert told[1].startswith("the verifier is there again after ")
    logged = [r.facts["link"] for r in caplog.records if r.message == "link to the verifier"]
    assert logged == ["down", "up"], "warnings: further attempts are for those who look closer"


@pytest.mark.parametrize(
    ("value", "expected"),
    [("1", 1), ("0.5", 0.5), ("sync", "sync"), ("", None), ("inf", "inf"), ("[1]", "[1]")],
)
def test_values(value: str, expected: object):
    assert parsed(value) == expected


@pytest.mark.parametrize("item", ["seed", "colour=red"])
def test_settings_of_the_command_line_are_checked(item: str):
    with pytest.raises(CommandError):
        settings_of([item])


TOY = ("--target", "toy:1", "--draft", "toy:1:0.4")
CALM = ("--set", "seed=7", "--set", "max_tokens=12", "--set", "temperature=1")


def test_a_pipe_is_read_line_by_line():
    async def work() -> None:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "outrider", "chat", *TOY, *CALM,
            stdin=pipe, stdout=pipe, stderr=pipe,
            env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
        )  # fmt: skip
        lines = (
            b"hi\n/compare schedule=sync\n/nonsense\n/stats\n\xff no text\n/set system 1e3\n/set\n"
        )
        out, err = await process.communicate(lines)
        assert (process.returncode, err) == (0, b"")
        text = out.decode()
        assert "identical: 12 tokens" in text
        assert "error: no command /nonsense" in text
        assert "bytes up a token" in text
        assert text.count("12 tokens \u00b7") == 3  # what is no text was answered, too
        assert "system 1e3\n" in text
        assert "\x1b[3" not in text

    run(work())


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(600)
def test_the_built_in_pair_talks_and_compares():
    pytest.importorskip("torch")
    from outrider.engines import builtin

    if builtin.find_gguf() is None:
        pytest.skip("the built-in weights are not here: outrider pull")
    ended = subprocess.run(
        [sys.executable, "-m", "outrider", "chat", "--threads", "1", *CALM],
        input="Why is the sky blue?\n/compare schedule=sync\n",
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "identical: 12 tokens" in ended.stdout


def test_a_terminal_has_a_prompt_and_ctrl_d_leaves():
    pid, terminal = pty.fork()
    if pid == 0:  # pragma: no cover - the child
        os.environ["TERM"] = "xterm-256color"
        os.execv(sys.executable, [sys.executable, "-m", "outrider", "chat", *TOY, *CALM])
    ready = b"\x1b[?2004h"  # it takes a line now

    def read_until(mark: bytes) -> bytes:
        seen = b""
        while mark not in seen:
            chunk = os.read(terminal, 4096)
            seen += chunk
            if b"\x1b[6n" in chunk:  # where is the cursor? It waits for an answer
                os.write(terminal, b"\x1b[1;1R")
        return seen

    try:
        read_until(ready)
        os.write(terminal, b"hi\r")
        answer = read_until(ready)
        assert b"12 tokens" in answer
        assert re.search(rb"\x1b\[(\d;)?3[2346]m", answer)  # the colour of an origin
        os.write(terminal, b"/compare schedule=cloud-only\r")
        assert b"identical: 12 tokens" in read_until(ready)
        os.write(terminal, b"\x04")
        _, status = os.waitpid(pid, 0)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--gateway", "http://127.0.0.1:9", "--draft", "small"], "--draft is the gateway's own"),
        (["--set", "colour=red"], "no setting 'colour'"),
        (["--gateway", "http://127.0.0.1:9"], "no answer from the gateway"),
        (["--link", "fast"], "--link"),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
):
    assert cli.run(["chat", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("error: ")
    assert word in told.err
    assert len(told.err.splitlines()) == 1
