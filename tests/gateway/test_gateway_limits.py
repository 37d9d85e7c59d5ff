"""Limits of one key, keys that change while it runs, and a gateway that is about to stop."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from live import run, until
from outrider.gateway.errors import ApiError
from outrider.gateway.keys import Keyring
from outrider.runtime.access import Logins, hash_token
from outrider.session.quotas import TenantLimits
from served import CHAT, chat, served

KEYS = {hash_token("a"): "alice", hash_token("b"): "bob"}
LONG = {"max_tokens": 300, "seed": 1, "ignore_eos": True, "outrider": {"schedule": "cloud-only"}}


def key(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def ring(**limits: Any) -> Keyring:
    return Keyring(Logins(tokens=KEYS, limits={"alice": TenantLimits(**limits)}))


def test_answers_under_way_are_counted_and_given_back():
    keyring = ring(sessions=2)
    with keyring.count("alice", 2, 0.0), keyring.count("bob", 50, 0.0):
        with pytest.raises(ApiError) as refused, keyring.count("alice", 1, 0.0):
            pass
        assert refused.value.status == 429
        assert refused.value.headers["Retry-After"] == "2"
    for _ in range(3):
        with keyring.count("alice", 2, 0.0):
            pass


def test_a_rate_says_when_to_come_back():
    keyring = ring(rate=0.1)
    with keyring.count("alice", 1, 0.0):
        pass
    with pytest.raises(ApiError) as refused, keyring.count("alice", 1, 4.0):
        pass
    assert refused.value.headers["Retry-After"] == "6"
    with keyring.count("alice", 1, 10.0):
        pass


def test_a_key_over_its_rate_gets_429_and_another_does_not():
    async def work() -> None:
        limits = {"alice": TenantLimits(rate=0.01)}
        async with served(config={"keys": KEYS, "limits": limits}) as gateway:
            short = chat(max_tokens=4)
            assert (await gateway.post(CHAT, short, headers=key("a"))).status_code == 200
            refused = await gateway.post(CHAT, short, headers=key("a"))
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            assert 90 <= int(refused.headers["retry-after"]) <= 100
            for _ in range(2):
                assert (await gateway.post(CHAT, short, headers=key("b"))).status_code == 200

    run(work())


def test_keys_change_while_it_runs():
    async def work() -> None:
        async with served(config={"keys": KEYS}) as gateway:
            short = chat(max_tokens=4)
            gateway.app.state.gateway.keyring.admit(Logins(tokens={hash_token("c"): "alice"}))
            assert (await gateway.post(CHAT, short, headers=key("a"))).status_code == 401
            assert (await gateway.post(CHAT, short, headers=key("c"))).status_code == 200

    run(work())


def test_a_drain_finishes_what_runs_and_turns_away_what_comes():
    async def work() -> None:
        async with served(drain=60.0, cloud={"pace": 0.005}) as gateway:
            room = gateway.app.state.gateway.room
            running = asyncio.ensure_future(gateway.post(CHAT, chat(**LONG)))
            await until(lambda: room.active == 1)
            stopping = asyncio.ensure_future(gateway.server.stop())
            await until(lambda: room.draining)
            health = await gateway.http.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "draining")
            refused = await gateway.post(CHAT, chat(max_tokens=4))
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
            assert refused.headers["retry-after"]
            assert not running.done(), "it must still run, or the test shows nothing"
            answer = await running
            assert answer.status_code == 200
            assert json.loads(answer.content)["usage"]["completion_tokens"] == 300
            await stopping

    run(work())


def test_a_hurried_drain_does_not_wait():
    async def work() -> None:
        async with served(drain=3600.0, cloud={"pace": 0.2}) as gateway:
            room = gateway.app.state.gateway.room
            running = asyncio.ensure_future(gateway.post(CHAT, chat(**LONG)))
            await until(lambda: room.active == 1)
            stopping = asyncio.ensure_future(gateway.server.stop())
            await until(lambda: room.draining)
            gateway.server.hurry()
            await stopping
            assert not running.done()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    run(work())
