"""Links in virtual time: rate, delay, queueing, order, loss and traces, with literal numbers."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.link import (
    FRAME_OVERHEAD,
    MAX_RETRANSMISSIONS,
    PACKET_BYTES,
    Link,
    LinkError,
    Opportunities,
    Path,
    Rate,
    Steps,
    parse_link,
)

HALF = 0.5
NAN, INF = float("nan"), float("inf")


def certain() -> float:
    """A draw that loses nothing."""
    return HALF


def test_the_example_of_the_help_text():
    link = parse_link("rtt=50ms,up=1mbit,down=20mbit,jitter=5ms,loss=1%")
    assert (link.rtt_s, link.jitter_s, link.loss) == (0.05, 0.005, 0.01)
    assert (link.up_bps, link.down_bps) == (1e6, 20e6)


def test_units():
    link = parse_link("rtt=0.2s, up=800kbit ,down=1.5gbit,loss=0.02")
    assert (link.rtt_s, link.up_bps, link.down_bps, link.loss) == (0.2, 8e5, 1.5e9, 0.02)
    assert parse_link("rtt=500us").rtt_s == pytest.approx(0.0005)


@pytest.mark.parametrize(
    ("spec", "rates"),
    [
        ("weak", (50e6, 150e6)),
        ("Medium", (150e6, 1e9)),
        ("strong", (250e6, 2.5e9)),
        ("5/20", (5e6, 20e6)),
        (".5/5", (5e5, 5e6)),
        ("0.1/2", (1e5, 2e6)),
    ],
)
def test_profiles_stand_for_rates(spec: str, rates: tuple[float, float]):
    link = parse_link(spec)
    assert (link.up_bps, link.down_bps, link.rtt_s) == (*rates, 0.0)
    more = parse_link(f"{spec},rtt=20ms,loss=1%")
    assert (more.up_bps, more.down_bps, more.rtt_s, more.loss) == (*rates, 0.02, 0.01)
    assert more.text == f"{spec},rtt=20ms,loss=1%", "as it was said"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("weak,up=1mbit", "once each"),
        ("rtt=1ms,weak", "'weak' is not name=value"),
        ("feeble", "'feeble' is not name=value"),
        ("0/5", "up must be above 0"),
        ("5/", "'5/' is not name=value"),
        ("rtt=50", "rtt=50"),
        ("rtt=50m", "rtt=50m"),
        ("rtt=-1ms", "rtt=-1ms"),
        ("rtt=nanms", "rtt=nanms"),
        ("rtt=infs", "rtt=infs"),
        ("rtt=1e9s", "rtt"),
        ("rtt=61s", "at most 60"),
        (f"up={'9' * 400}mbit", "too large"),
        ("up=0mbit", "above 0"),
        ("up=1mb", "kbit, mbit"),
        ("loss=51%", "loss"),
        ("loss=2", "loss"),
        ("speed=1mbit", "speed"),
        ("rtt=1ms,rtt=2ms", "once"),
        ("rtt", "name=value"),
        ("", "name=value"),
        ("up-trace=x", "cannot be read here"),
        ("٥=1ms", "٥"),
    ],
)
def test_what_means_nothing_is_refused_by_name(spec: str, says: str):
    with pytest.raises(LinkError) as refused:
        parse_link(spec)
    assert says in str(refused.value)


def test_delay_is_half_a_round_trip_each_way():
    link = parse_link("rtt=100ms")
    assert link.up().arrival(10, 7.0, certain) == pytest.approx(7.05)
    assert link.down().arrival(10_000_000, 7.0, certain) == pytest.approx(7.05)


def test_rate_and_queue():
    """Two frames at once on 1 mbit/s: the second waits for the first; a pause empties the queue."""
    path = parse_link("rtt=20ms,up=1mbit").up()
    one = 8 * (1000 + FRAME_OVERHEAD) / 1e6
    assert path.arrival(1000, 5.0, certain) == pytest.approx(5.0 + one + 0.01)
    assert path.arrival(1000, 5.0, certain) == pytest.approx(5.0 + 2 * one + 0.01)
    assert path.arrival(1000, 5.0 + one, certain) == pytest.approx(5.0 + 3 * one + 0.01)
    assert path.arrival(1000, 9.0, certain) == pytest.approx(9.0 + one + 0.01)


@given(
    st.lists(st.tuples(st.floats(0.0, 0.05), st.integers(0, 5000)), min_size=1, max_size=40),
    st.integers(0, 2**32),
)
def test_order_is_kept_and_nothing_arrives_early(sends: list[tuple[float, int]], seed: int):
    uniform = random.Random(seed).random
    path = parse_link("rtt=30ms,up=2mbit,jitter=40ms,loss=20%").up()
    now, last = 100.0, 0.0
    for gap, size in sends:
        now += gap
        at = path.arrival(size, now, uniform)
        assert at >= now + 0.015 + 8 * (size + FRAME_OVERHEAD) / 2e6 - 1e-9
        assert at >= last
        last = at


def test_jitter_is_uniform():
    uniform = random.Random(1).random
    path = parse_link("jitter=10ms").up()
    late = [path.arrival(1, float(i), uniform) - i for i in range(4000)]
    assert 0.0 <= min(late) < 0.0002
    assert 0.0098 < max(late) < 0.01
    assert sum(late) / len(late) == pytest.approx(0.005, abs=0.0002)


def test_a_loss_costs_one_timeout_and_holds_up_what_follows():
    draws = iter([HALF, 0.0, HALF, HALF, HALF])  # jitter, lost, not lost again; jitter, not lost
    path = Path(delay_s=0.05, loss=0.1, rto_s=0.3)
    assert path.arrival(10, 0.0, lambda: next(draws)) == pytest.approx(0.35)
    assert path.arrival(10, 0.1, lambda: next(draws)) == pytest.approx(0.35)
    assert path.retransmissions == 1


def test_timeout_is_the_round_trip_and_linuxs_floor():
    assert parse_link("rtt=100ms,loss=1%").up().rto_s == pytest.approx(0.3)
    assert parse_link("rtt=100ms,jitter=80ms,loss=1%").down().rto_s == pytest.approx(0.42)


@pytest.mark.parametrize(("size", "packets"), [(10, 1), (1448, 1), (1449, 2), (14480, 10)])
def test_loss_rate_counts_packets(size: int, packets: int):
    uniform = random.Random(2).random
    path = parse_link("loss=2%").up()
    frames = 20_000 // packets
    for i in range(frames):
        path.arrival(size, float(i), uniform)
    expected = frames * packets * 0.02 / 0.98
    assert path.retransmissions == pytest.approx(expected, rel=0.1)


def test_a_packet_is_not_lost_for_ever():
    assert Path(loss=0.5, rto_s=1.0).arrival(1, 0.0, lambda: 0.0) == MAX_RETRANSMISSIONS


# ------------------------------------------------------------------------------- traces


def test_packet_trace_is_exact():
    """Full packets leave at exactly the listed times, round after round."""
    times = [0.010, 0.020, 0.020, 0.050]
    server = Opportunities(times)
    out = [server.finish(PACKET_BYTES, 0.0) for _ in range(9)]
    expected = [r * 0.050 + t for r in range(3) for t in times]
    assert out == pytest.approx(expected[:9])


def test_packet_trace_shares_an_opportunity_but_never_saves_one():
    server = Opportunities([0.01, 0.02, 0.03])
    assert [server.finish(500, 0.0) for _ in range(4)] == pytest.approx([0.01, 0.01, 0.01, 0.02])
    # The rest of the packet at 20 ms is gone at 25 ms, and so are two rounds of idle packets.
    assert server.finish(500, 0.025) == pytest.approx(0.03)
    assert server.finish(500, 0.085) == pytest.approx(0.09)


def test_packet_trace_period():
    server = Opportunities([0.01, 0.02], period_s=1.0)
    assert [server.finish(PACKET_BYTES, 0.0) for _ in range(3)] == pytest.approx([0.01, 0.02, 1.01])
    with pytest.raises(LinkError, match="behind its period"):
        Opportunities([0.01, 2.0], period_s=1.0)


def test_a_trace_begins_with_the_first_frame():
    path = Path(server=Opportunities([0.5, 1.0]))
    assert path.arrival(1, 1234.4, certain) == pytest.approx(1234.9)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 4000))
def test_packet_trace_carries_its_capacity(gaps: list[int], size: int):
    times = list(itertools.accumulate(g / 1e3 for g in gaps))
    server = Opportunities(times)
    rounds, frames = 5, 0
    while server.finish(size, 0.0) <= times[-1] * rounds + 1e-9:
        frames += 1
    capacity = rounds * len(times) * PACKET_BYTES
    assert frames == capacity // size


def test_rate_trace_is_exact():
    server = Steps([(0.0, 8e6), (1.0, 0.0), (3.0, 16e6)])  # the last lasts 1.5 s: period 4.5
    assert server.finish(500_000, 0.0) == pytest.approx(0.5)
    assert server.finish(1_000_000, 0.5) == pytest.approx(3.25)  # through the outage
    assert server.finish(3_500_000, 3.25) == pytest.approx(4.5 + 1.0)
    assert server.finish(1, 5.5 + 1e-6) == pytest.approx(4.5 + 3.0, abs=1e-3)


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [(1.0, 1.0)],
        [(0.0, -1.0)],
        [(0.0, 0.0)],
        [(0.0, 1.0), (0.0, 2.0)],
        [(0.0, NAN)],
        [(0.0, 1e6), (1.0, NAN)],
        [(0.0, INF)],
        [(0.0, 1e6), (INF, 1e6)],
        [(0.0, 1e6), (NAN, 1e6)],
        [(0.0, 1e6), (1e10, 1e6)],
        [(0.0, 0.0), (1e-300, 1e3)],
        [(0.0, 1e-9)],
        [(0.0, 1e300)],
    ],
)
def test_bad_rate_traces(steps: list[tuple[float, float]]):
    with pytest.raises(LinkError):
        Steps(steps)


def test_a_slow_rate_trace_is_not_walked_step_by_step():
    """2 bit/s in steps of a microsecond: a frame takes billions of steps, and no time to say so."""
    server = Steps([(0.0, 4.0), (1e-6, 0.0)])
    assert server.finish(1000, 0.0) == pytest.approx(4000.0)
    assert server.finish(1000, 4000.0) == pytest.approx(8000.0)


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9)), min_size=1, max_size=6),
    st.integers(1, 3000),
    st.floats(0.0, 50.0),
)
def test_rate_trace_gives_the_bits_that_it_has(
    steps: list[tuple[int, int]], size: int, start: float
):
    """However many rounds it takes, the integral of the rate over the wait is the frame."""
    times = [0.0, *itertools.accumulate(t / 10 for t, _ in steps)]
    rates = [100.0 * r for _, r in steps] + [500.0]
    end = Steps(list(zip(times, rates, strict=True))).finish(size, start)
    bounds = [*times, times[-1] + times[-1] / len(steps)]
    period = bounds[-1]

    def carried(until: float) -> float:
        rounds, inside = divmod(until, period)
        spans = [(max(0.0, min(inside, b) - a), b - a) for a, b in itertools.pairwise(bounds)]
        part = sum(r * s for r, (s, _) in zip(rates, spans, strict=True))
        return rounds * sum(r * s for r, (_, s) in zip(rates, spans, strict=True)) + part

    assert carried(end) - carried(start) == pytest.approx(8.0 * size, rel=1e-6)


@pytest.mark.parametrize("times", [[], [0.0], [2.0, 1.0], [-5.0, 3.0], [NAN, 1.0], [1.0, INF]])
def test_bad_packet_traces(times: list[float]):
    with pytest.raises(LinkError):
        Opportunities(times)


def test_a_packet_trace_begins_again_some_day():
    with pytest.raises(LinkError, match="period"):
        Opportunities([1.0], period_s=INF)


@pytest.mark.parametrize("rate", [0.0, -1.0, NAN, INF])
def test_bad_rate(rate: float):
    with pytest.raises(LinkError):
        Rate(rate)


def test_round_trip_is_the_best_case():
    link = parse_link("rtt=100ms,up=8kbit,jitter=1s,loss=50%")
    assert link.round_trip(100 - FRAME_OVERHEAD) == pytest.approx(0.1 + 0.1)
    assert parse_link("rtt=2s").round_trip(400) == pytest.approx(2.0)


def test_links_are_reproducible():
    def run() -> list[float]:
        uniform = random.Random(9).random
        path = Link(rtt_s=0.05, jitter_s=0.01, loss=0.1, up_bps=1e6).up()
        return [path.arrival(100, i * 0.01, uniform) for i in range(200)]

    assert run() == run()
