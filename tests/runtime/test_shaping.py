"""The shaped stream on a real event loop, in a few milliseconds, and trace files."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path as FilePath

import pytest

from live import TOKENIZER
from outrider.core.link import LinkError, parse_link
from outrider.proto.connection import HELLO_BYTES, Connection, Role, usable
from outrider.runtime.dialling import greeting
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
        ("a.up", "1\n" + "9" * 400 + "\n", "neither"),
        ("a.up", "1\n" + "9" * 300 + "\n", "times"),
        ("a.up", "-5\n3\n", "times"),
        ("a.csv", "time_s,mbit\n0,nan\n1,5\n", "nan"),
        ("a.csv", "time_s,mbit\n0,inf\n1,5\n", "inf"),
        ("a.csv", "time_s,mbit\n0,-1\n1,5\n", "negative"),
        ("a.csv", "time_s,mbit\n0,1\ninf,5\n", "times"),
        ("a.csv", "time_s,mbit\nnan,1\n1,5\n", "time 0"),
        ("a.csv", "time_s,mbit\n0,1\nnan,5\n", "times"),
        ("a.csv", "time_s,mbit\n0,0\n1e-300,0.001\n", "apart"),
    ],
)
def test_bad_trace_files(tmp_path: FilePath, name: str, text: str, says: str):
    file = tmp_path / name
    file.write_text(text, encoding="ascii")
    with pytest.raises(LinkError, match=says):
        load_trace(str(file))


@pytest.mark.parametrize(
    ("spec", "lives"),
    [
        ("rtt=12s", False),
        ("rtt=10s", False),
        ("rtt=9.9s", True),
        ("up=10bit", False),
        ("down=10bit", False),
        ("up=1kbit,down=1kbit", True),
        ("rtt=9s,up=1kbit", False),
        ("rtt=1s,jitter=10s,loss=50%", True),
    ],
)
def test_a_link_over_which_no_peer_can_be_greeted(spec: str, lives: bool):
    if lives:
        usable(parse_link(spec))
        return
    with pytest.raises(LinkError, match="no connection can live") as refused:
        usable(parse_link(spec))
    assert spec in str(refused.value)


def test_a_trace_with_an_outage_at_its_start_lets_nobody_in(tmp_path: FilePath):
    """Every connection begins the trace anew."""
    file = tmp_path / "out.csv"
    file.write_text("time_s,mbit\n0,0\n11,1\n", encoding="ascii")
    with pytest.raises(LinkError, match="no connection can live"):
        usable(parse_link(f"up-trace={file}", load=load_trace))
    usable(parse_link(f"up-trace={file}", load=load_trace), heartbeat=6.0)


def test_a_hello_is_about_as_long_as_assumed():
    connection = Connection(Role.EDGE, greeting(TOKENIZER, 4096), now=0.0)
    (frame,) = connection.take()
    assert 0.5 * HELLO_BYTES < len(frame) < 1.5 * HELLO_BYTES


def test_missing_trace_file(tmp_path: FilePath):
    with pytest.raises(LinkError, match="cannot read"):
        load_trace(str(tmp_path / "none"))
