"""`outrider edge` and `outrider serve` as people start them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from outrider import cli
from outrider.runtime.process import LISTENING
from served import chat

TOYS = ("--target", "toy:1", "--draft", "toy:1:0.4")


@contextlib.contextmanager
def started(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command in a process of its own, once it listens, and where."""
    process = subprocess.Popen(
        [sys.executable, "-m", "outrider", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith(LISTENING), process.communicate()[1]
        yield process, line.removeprefix(LISTENING).strip()
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str], number: int) -> tuple[int, str]:
    """Exit code and stderr after a signal."""
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    return process.returncode, said


def answer(url: str, **more: object) -> str:
    made = httpx.post(f"{url}/v1/chat/completions", json=chat(**more), timeout=60)
    assert made.status_code == 200, made.text
    content: str = made.json()["choices"][0]["message"]["content"]
    return content


def test_serve_answers_and_so_does_an_edge_of_another_cloud_with_the_same_text(tmp_path: Path):
    logging = ("--log-format", "json", "--log-level", "info")
    with started("serve", *TOYS, "--listen", "127.0.0.1:0", *logging) as (serve, url):
        first = answer(url, model="toy:1")
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "toy:1"
        code, said = ended(serve, signal.SIGTERM)
        assert code == 0
        assert "the cloud serves toy:1" in said
        # Both processes log as they were told, into one stream.
        events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        told = {(event["logger"], event["event"]) for event in events}
        assert {("outrider.gateway", "request"), ("outrider.cloud", "answer done")} <= told
    keys = tmp_path / "keys"
    keys.write_text("me:sk-me\n")
    more = ("--model-name", "gpt-4o", "--api-key-file", str(keys), "--schedule", "sync")
    with started("cloud", "--model", "toy:1", "--listen", "127.0.0.1:0") as (_, cloud):
        words = ("edge", "--cloud", cloud, *TOYS, "--listen", "127.0.0.1:0", *more)
        with started(*words) as (edge, url):
            refused = httpx.post(f"{url}/v1/chat/completions", json=chat())
            assert refused.status_code == 401
            key = {"Authorization": "Bearer sk-me"}
            made = httpx.post(
                f"{url}/v1/chat/completions", json=chat(model="gpt-4o"), headers=key, timeout=60
            )
            assert made.json()["choices"][0]["message"]["content"] == first
            code, _ = ended(edge, signal.SIGINT)
            assert code == 0


def test_an_edge_starts_without_its_cloud_and_says_so():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        cloud = f"ws://127.0.0.1:{held.getsockname()[1]}"
        words = ("edge", "--cloud", cloud, *TOYS, "--listen", "127.0.0.1:0", "--give-up", "0.3")
        with started(*words) as (edge, url):
            made = httpx.post(f"{url}/v1/chat/completions", json=chat(model="toy:1"), timeout=60)
            assert made.status_code == 503
            assert made.headers["retry-after"]
            _, said = ended(edge, signal.SIGTERM)
            assert "warning: the cloud does not answer yet" in said


def test_serve_ends_when_its_verifier_does():
    with started("serve", *TOYS, "--listen", "127.0.0.1:0") as (serve, url):
        answer(url, model="toy:1")
        children = Path(f"/proc/{serve.pid}/task/{serve.pid}/children")
        if not children.exists():
            pytest.skip("the system does not list children")
        for child in children.read_text().split():
            os.kill(int(child), signal.SIGKILL)
        _, said = serve.communicate(timeout=60)
        assert serve.returncode == 2
        assert "error: the verifier has ended" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("edge", "--cloud", "http://x"), "error: --cloud: must be ws://HOST:PORT"),
        (("edge",), "error: Missing option '--cloud'"),
        (("serve", "--listen", "nowhere"), "error: --listen takes HOST:PORT, got 'nowhere'"),
        (("serve", "--listen", "0.0.0.0:1"), "needs --api-key-file and --tls-cert/--tls-key"),
        (("serve", "--schedule", "edge-only"), "error: edge-only asks no cloud"),
        (("serve", "--controller", "x"), "error: --controller: must be one of fixed"),
        (("serve", "--draft", "smal"), "error: --draft: no model 'smal'"),
        (("serve", "--tls-cert", __file__), "error: TLS needs both --tls-cert and --tls-key"),
    ],
)
def test_what_cannot_work_is_one_line_before_anything_is_loaded(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
):
    assert cli.run([*words]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert shown.count("\n") == 1


def test_a_taken_port_is_one_line(capsys: pytest.CaptureFixture[str]):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        words = ["edge", "--cloud", "ws://127.0.0.1:1", *TOYS, "--listen", f"127.0.0.1:{port}"]
        assert cli.run(words) == 1
    said = capsys.readouterr().err
    assert said == (
        f"error: cannot listen on 127.0.0.1:{port}: Address already in use; give another --listen\n"
    )
