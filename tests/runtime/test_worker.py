"""The engine's thread: order, pace, and nobody waiting for ever."""

from __future__ import annotations

import asyncio
import threading

import pytest

from live import run
from outrider.runtime import worker
from outrider.runtime.worker import EngineThread, Timed


def test_calls_run_in_order_on_one_thread_of_their_own():
    async def work() -> None:
        engine = EngineThread("engine")
        outcomes: list[Timed[int] | BaseException] = []
        threads: set[int] = set()

        def call(i: int) -> int:
            threads.add(threading.get_ident())
            return i

        for i in range(20):
            engine.submit(lambda i=i: call(i), outcomes.append)
        assert await engine.chore(lambda: "behind them") == "behind them"
        values = [o.value for o in outcomes if isinstance(o, Timed)]
        assert values == list(range(20))
        assert threading.get_ident() not in threads
        assert len(threads) == 1
        assert all(o.started <= o.ended for o in outcomes if isinstance(o, Timed))
        engine.close()

    run(work())


def test_only_forwards_are_paced(monkeypatch: pytest.MonkeyPatch):
    slept: list[float] = []
    monkeypatch.setattr(worker.time, "sleep", slept.append)

    async def work() -> None:
        engine = EngineThread("engine", pace=0.06)
        engine.submit(lambda: None, lambda _: None)
        engine.submit(lambda: None, lambda _: None, forward=False)
        await engine.chore(lambda: None)
        assert slept == [0.06]
        engine.close()

    run(work())


def test_what_a_call_raises_is_told():
    async def work() -> None:
        engine = EngineThread("engine")
        with pytest.raises(ZeroDivisionError):
            await engine.chore(lambda: 1 // 0)
        told: list[object] = []
        engine.submit(lambda: 1 // 0, told.append)
        assert await engine.chore(lambda: 2) == 2, "the thread goes on"
        assert isinstance(told[0], ZeroDivisionError)
        engine.close()

    run(work())


def test_closing_waits_for_the_running_call_and_tells_the_others():
    async def work() -> None:
        engine = EngineThread("engine")
        started, go = threading.Event(), threading.Event()
        running = asyncio.ensure_future(engine.chore(lambda: (started.set(), go.wait(30))))
        queued = asyncio.ensure_future(engine.chore(lambda: 1))
        given_up = asyncio.ensure_future(engine.chore(lambda: 2))
        await asyncio.to_thread(started.wait)
        given_up.cancel()
        closing = asyncio.ensure_future(asyncio.to_thread(engine.close))
        await asyncio.sleep(0.01)
        assert not closing.done()
        go.set()
        await closing
        assert await running
        with pytest.raises(RuntimeError, match="closed"):
            await queued
        with pytest.raises(RuntimeError, match="closed"):
            engine.submit(lambda: None, lambda _: None)
        engine.close()  # twice is fine
        await asyncio.gather(given_up, return_exceptions=True)

    run(work())


def test_a_thread_nobody_used_closes():
    EngineThread("engine").close()
