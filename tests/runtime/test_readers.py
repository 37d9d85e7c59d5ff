"""Threads for grammars: turns between logins, and nobody's calls side by side."""

from __future__ import annotations

import asyncio
import threading

import pytest

from live import PATIENCE, run, until
from outrider.runtime.readers import Readers


def test_one_login_never_takes_every_thread_and_others_go_by_turns():
    async def work() -> None:
        readers, gate = Readers(2), threading.Event()
        order: list[str] = []
        told: list[object] = []

        def call(name: str) -> str:
            order.append(name)
            if name == "a0":
                gate.wait(PATIENCE)
            return name

        for name in ("a0", "a1", "a2", "b0", "b1", "b2", "c0"):
            readers.submit(name[0], lambda name=name: call(name), told.append)
        await until(lambda: len(told) == 4)
        assert told == ["b0", "b1", "c0", "b2"]  # a1 waits for a0, and holds up nobody
        gate.set()
        await until(lambda: len(told) == 7)
        assert [name for name in order if name[0] == "a"] == ["a0", "a1", "a2"]
        readers.close()

    run(work())


def test_an_error_goes_to_who_asked_and_the_next_call_runs():
    async def work() -> None:
        readers = Readers(1)

        def broken() -> None:
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await readers.run("a", broken)
        assert await readers.run("a", lambda: 5) == 5
        readers.close()

    run(work())


def test_a_wait_given_up_frees_the_thread_and_closing_forgets_what_waits():
    async def work() -> None:
        readers, gate, ran = Readers(1), threading.Event(), threading.Event()
        first = asyncio.create_task(readers.run("a", lambda: gate.wait(PATIENCE)))
        second = asyncio.create_task(readers.run("a", ran.set))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        gate.set()
        await first
        assert await readers.run("b", lambda: 1) == 1
        assert not ran.is_set()
        gate.clear()
        readers.submit("a", lambda: gate.wait(PATIENCE), lambda _: ran.set())
        readers.submit("a", ran.set, lambda _: None)
        readers.close()
        gate.set()
        await asyncio.sleep(0.02)
        assert not ran.is_set()

    run(work())
