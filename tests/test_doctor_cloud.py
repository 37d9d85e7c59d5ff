"""`outrider doctor --cloud`: what it finds out, and what it says where it cannot."""

from __future__ import annotations

import asyncio
import json
import math
import socket

import pytest

from live import TOKENIZER, run, server
from outrider import cli
from outrider.commands.doctorcloud import advice
from outrider.runtime.access import hash_token
from outrider.runtime.dialling import greeting
from outrider.runtime.edgeconfig import EdgeConfig
from outrider.runtime.probe import Probe, probe


def asked(port: int, **how: str) -> Probe:
    config = EdgeConfig(url=f"ws://127.0.0.1:{port}", **how)
    return asyncio.run(probe(config, greeting(TOKENIZER, 4096)))


async def ask(port: int, **how: str) -> Probe:
    config = EdgeConfig(url=f"ws://127.0.0.1:{port}", **how)
    return await probe(config, greeting(TOKENIZER, 4096))


def test_a_verifier_that_can_be_used():
    async def work() -> None:
        async with server(tokens={hash_token("s"): "me"}) as cloud:
            found = await ask(cloud.port, token="s")
            assert (found.reachable, found.login, found.fault) == (True, True, "")
            assert found.fingerprint == TOKENIZER.fingerprint
            assert found.clock_s is not None
            assert abs(found.clock_s) < 5
            assert found.rtt_ms is not None
            assert found.worst_rtt_ms is not None
            assert 0 < found.rtt_ms <= found.worst_rtt_ms
            assert found.up_mbit is not None
            assert found.down_mbit is not None
            assert cloud.service.sessions == cloud.service.opened == 0, "no answer was asked for"
            assert cloud.service.load.forwards == 0

    run(work())


def test_a_login_that_is_refused():
    async def work() -> None:
        async with server(tokens={hash_token("s"): "me"}) as cloud:
            for how in ({}, {"token": "other"}):
                found = await ask(cloud.port, **how)
                assert (found.reachable, found.login) == (True, False)
                assert found.fault == "it refuses this login"

    run(work())


def test_another_vocabulary_is_found_out():
    async def work() -> None:
        async with server() as cloud:
            config = EdgeConfig(url=f"ws://127.0.0.1:{cloud.port}")
            hello = greeting(TOKENIZER, 4096)
            other = type(hello)(**{f: getattr(hello, f) for f in hello.__struct_fields__} | {
                "fingerprint": "0" * len(hello.fingerprint)
            })  # fmt: skip
            found = await probe(config, other)
            assert (found.reachable, found.login) == (True, True)
            assert found.fault.startswith("it hangs up: ")
            assert found.fault.endswith("(vocabulary)")

    run(work())


def test_nobody_there_and_somebody_else(capsys: pytest.CaptureFixture[str]):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        assert asked(port).reachable is False
        words = ["doctor", "--cloud", f"ws://127.0.0.1:{port}", "--target", "toy:1"]
        assert cli.run(words) == 1
        assert "cannot reach it" in capsys.readouterr().out
        assert cli.run([*words, "--json"]) == 1
        facts = json.loads(capsys.readouterr().out)
        assert (facts["ok"], facts["reachable"], facts["rtt_ms"]) == (False, False, None)


def test_options_without_a_cloud_are_refused(capsys: pytest.CaptureFixture[str]):
    assert cli.run(["doctor", "--insecure"]) == 2
    assert "go with --cloud" in capsys.readouterr().err
    assert cli.run(["doctor", "--cloud", "http://x", "--target", "toy:1"]) == 2


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({}, ""),
        ({"rtt_ms": 5.0, "forward_ms": 20.0, "up_mbit": math.inf}, "any schedule does"),
        ({"rtt_ms": 50.0, "forward_ms": 20.0, "up_mbit": 8.0}, "2.5 forwards: freerun hides it"),
        ({"rtt_ms": 50.0, "forward_ms": 20.0, "up_mbit": 0.05}, "a thin uplink"),
        ({"rtt_ms": 50.0}, "outrider plan"),
    ],
)
def test_advice(facts: dict[str, float], words: str):
    assert words in advice(Probe(reachable=True, **facts))
