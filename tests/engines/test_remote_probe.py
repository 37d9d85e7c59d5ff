"""The conformance probe: what it says of servers that can and of servers that cannot."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from outrider.cli import run
from outrider.engines.base import ServerError
from outrider.engines.remote_http import Endpoint
from outrider.engines.remote_probe import ProbeReport, probe
from servers import Server, serving


def ask(server: Server, **facts: Any) -> ProbeReport:
    return probe(Endpoint(server.url), **facts)


def usable(report: ProbeReport) -> dict[str, bool]:
    return {way.way: way.usable for way in report.ways}


def answers(report: ProbeReport) -> dict[str, str]:
    return {finding.question: finding.answer for finding in report.findings}


@pytest.mark.parametrize("shape", ["vllm", "llama"])
def test_a_server_that_can_do_everything(shape: str):
    with serving(shape=shape) as server:
        report = ask(server)
    assert usable(report) == {"openai": True, "vllm": True, "sglang": True}
    said = answers(report)
    assert said["greedy answer repeats"] == "the same ids twice"
    assert said["likeliest ids told"] == "20 of 20 asked for"
    assert "dropped: temperature, logit_bias" in said["fields honoured"]
    assert said["log-probabilities"].startswith("before temperature, before top-k")


def test_texts_without_ids_cannot_be_used_at_all():
    with serving(shape="text", most=5) as server:
        report = ask(server)
    assert usable(report) == {"openai": False, "vllm": False, "sglang": False}
    assert not report.usable


def test_few_likeliest_ids_leave_the_greedy_answer():
    with serving(most=5) as server:
        report = ask(server)
    assert usable(report) == {"openai": True, "vllm": False, "sglang": False}
    assert answers(report)["likeliest ids told"] == "5 of 20 asked for"


def test_a_context_that_is_computed_anew_each_time_is_seen():
    with serving() as server:
        # Each look at the clock is later by as many seconds as ids were sent since.
        def clock() -> float:
            return float(sum(len(str(body)) for path, body in server.asked if "comp" in path))

        report = ask(server, clock=clock)
    assert "grows with the context" in answers(report)["prefix cache"]
    assert "the whole context" in {w.way: w.words for w in report.ways}["vllm"]


def test_prompts_that_share_no_cache_are_seen_and_told_from_rows_that_are_dear():
    """llama-server: each of its slots takes in a context by itself, and then keeps it."""
    with serving() as server:

        def clock() -> float:
            seconds, slots = 0.0, set()
            for path, body in server.asked:
                if "comp" not in path:
                    continue
                prompts = body["prompt"] if isinstance(body["prompt"][0], list) else ()
                for slot, prompt in enumerate(prompts):
                    new = slot not in slots and len(prompt) > 100
                    seconds += 10.0 if new else 0.1
                    slots |= {slot} if new else set()
            return seconds

        report = ask(server, clock=clock)
    said = answers(report)["several prompts at once"]
    assert said.startswith(
        "behind 320 ids one row 100 ms, five rows 500 ms, the first time 40100 ms"
    )
    words = {w.way: w.words for w in report.ways}["vllm"]
    assert "five rows take 5.0 times one" in words
    assert "takes its whole context in" in words


def test_guesses_that_a_server_heard_before_are_no_measure():
    with serving() as server:
        ask(server, seed=1)
        rounds = [b["prompt"] for p, b in server.asked if p.endswith("completions")]
    lists = [tuple(map(tuple, p)) for p in rounds if isinstance(p[0], list)]
    drafts = [p[len(r[0]) :] for r in lists for p in r[1:]]
    assert len(lists) == 6
    assert len({d[:1] for d in drafts if len(d) == 4}) == 3  # other guesses each round
    assert all(len(after[0]) == len(r[0]) + 1 for r, after in pairwise(lists))


def test_a_cache_of_whole_blocks_is_seen_behind_half_a_block():
    """vLLM: what a context has behind its last block of 128 is computed in every row."""
    with serving() as server:

        def clock() -> float:
            held: set[tuple[int, ...]] = set()
            seconds = 0.0
            for prompt in prompts(server):
                blocks = [tuple(prompt[: i + 128]) for i in range(0, len(prompt) - 1, 128)]
                known = sum(len(b) % 128 == 0 and b in held for b in blocks)
                seconds += 0.1 + 0.01 * (len(prompt) - 128 * known)
                held.update(b for b in blocks if len(b) % 128 == 0)
            return seconds

        report = ask(server, clock=clock, seed=1)
    said = answers(report)
    assert (
        said["prefix cache"].startswith("769 ids") or "flat in the context" in said["prefix cache"]
    )
    assert "behind the last one" in said["several prompts at once"]
    assert "--block-size" in {w.way: w.words for w in report.ways}["vllm"]


def prompts(server: Server) -> list[list[int]]:
    """All prompts of token ids so far."""
    asked = [b["prompt"] for p, b in server.asked if p.endswith("completions")]
    return [one for p in asked for one in (p if isinstance(p[0], list) else [p])]


def test_a_second_probe_asks_for_texts_that_no_cache_holds_from_the_first():
    with serving() as server:
        ask(server)
        first = {tuple(p) for p in prompts(server) if len(p) > 64}
        server.asked.clear()
        ask(server)
        assert not first & {tuple(p) for p in prompts(server)}


def test_a_model_that_is_not_served_and_nobody_at_all():
    with serving() as server, pytest.raises(ServerError, match="serves: toy-model"):
        ask(server, served="another")
    with pytest.raises(ServerError, match="is the server running"):
        ask(server)


@contextlib.contextmanager
def listening(said: bytes) -> Iterator[str]:
    """Something that is no such server: it says this to whoever comes, and hangs up. Nothing to
    say: it holds the connection and is silent."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        held: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    guest, _ = door.accept()
                except OSError:
                    return
                held.append(guest)
                if said:
                    guest.recv(4096)
                    guest.sendall(said)
                    guest.close()

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{door.getsockname()[1]}"
        finally:
            door.shutdown(socket.SHUT_RDWR)
            for guest in held:
                guest.close()


def page(status: str, body: str) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return (head + body).encode()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (page("404 Not Found", "<html>"), "/v1/models answered 404; is this the address of"),
        (page("200 OK", "<html>"), "not JSON; is this the address of"),
        (page("200 OK", "[]"), "not understood (TypeError); is this the address of"),
        (page("401 Unauthorized", "{}"), "answered 401; put a key that it takes into OUTRIDER_"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "what listens there speaks no HTTP"),
        (b"\x15\x03\x03\x00\x02\x02\x16", "what listens there speaks no HTTP"),  # a TLS alert
        (b"", "it did not answer in time; is the server running?"),
    ],
)
def test_what_is_no_such_server_is_one_line_soon(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, said: bytes, words: str
):
    monkeypatch.setattr("outrider.engines.remote_http.LIST_TIMEOUT_S", 0.5)
    with listening(said) as url:
        assert run(["probe", url]) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert (shown.out, shown.err.count("\n")) == ("", 1)


def test_http_and_https_taken_for_each_other(capsys: pytest.CaptureFixture[str]):
    with listening(page("200 OK", "{}")) as url:
        assert run(["probe", url.replace("http:", "https:")]) == 2
    assert "no TLS is spoken there" in capsys.readouterr().err


def test_the_command_in_words_and_as_json(capsys: pytest.CaptureFixture[str]):
    with serving() as server:
        assert run(["probe", server.url]) == 0
        assert "openai: can be used: temperature 0" in capsys.readouterr().out
        server.shape, server.most = "text", 5
        assert run(["probe", server.url, "--json"]) == 1
        told = json.loads(capsys.readouterr().out)
        assert told["usable"] is False
    assert run(["probe", server.url]) == 2
    assert "no answer from" in capsys.readouterr().err
