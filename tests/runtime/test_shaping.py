"""The shaped stream on a real event loop, in a few milliseconds, and trace files."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path as FilePath

import pytest

from outrider.core.link import LinkError, parse_link
from outrider.runtime.shaping import ShapedPath, load_trace, sleep_until


def test_frames_arrive_in_order_and_never_early():
    async def run() -> list[tuple[float, bytes]]:
        got: list[tuple[float, bytes]] = []

        async def deliver(frame: bytes) -> None:
            got.append((time.monotonic(), frame))

        path = ShapedPath(parse_link("rtt=40ms,jitter=10ms").up(), deliver, seed=1)
        task = asyncio.create_task(path.run())
        began = time.monotonic()
        for i in range(20):
            path.put(bytes([i]))
        while len(got) < 20:
            await asyncio.sleep(0.002)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return [(at - began, frame) for at, frame in got]

    got = asyncio.run(run())
    assert [frame for _, frame in got] == [bytes([i]) for i in range(20)]
    assert all(at >= 0.02 for at, _ in got)


def test_waits_are_never_short():
    async def run() -> None:
        for wait in (0.0, 0.0005, 0.003):
            due = time.monotonic() + wait
            await sleep_until(due)
            assert time.monotonic() >= due

    asyncio.run(run())


def test_trace_files(tmp_path: FilePath):
    packets = tmp_path / "up.trace"
    packets.write_text("10\n20\n20\n", encoding="ascii")
    rates = tmp_path / "down.csv"
    rates.write_text("time_s,mbit\n5,8\n6,0\n7,8\n", encoding="ascii")
    link = parse_link(f"up-trace={packets}@1s,down-trace={rates}", load=load_trace)
    up, down = link.up(), link.down()
    size = 1500 - 58
    assert [up.arrival(size, 3.0, lambda: 0.5) for _ in range(4)] == pytest.approx(
        [3.01, 3.02, 3.02, 4.01]
    )
    # One second of 1 MB/s, one of nothing, then on.
    assert down.arrival(1_000_000 - 58 + 500_000, 3.0, lambda: 0.5) == pytest.approx(5.5)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", "time_s,kbit\n0,1\n", "time_s and mbit"),
        ("a.csv", "time_s,mbit\n0,x\n", "numbers"),
        ("a.csv", "time_s,mbit\n0,1\n0,2\n", "ascend"),
        ("a.csv", "time_s,mbit\n", "starts at time 0"),
        ("a.up", "10\nx\n", "neither"),
        ("a.up", "20\n10\n", "ascending"),
        ("a.up", "", "ascending"),
    ],
)
def test_bad_trace_files(tmp_path: FilePath, name: str, text: str, says: str):
    file = tmp_path / name
    file.write_text(text, encoding="ascii")
    with pytest.raises(LinkError, match=says):
        load_trace(str(file))


def test_missing_trace_file(tmp_path: FilePath):
    with pytest.raises(LinkError, match="cannot read"):
        load_trace(str(tmp_path / "none"))
