"""A link as arithmetic: when does a frame that is sent now arrive? No clock, no I/O.

One `Path` is one direction: a queue served at a rate, then a fixed delay, jitter, and loss. The
live runtime delays real frames by it and the simulator asks it in virtual time, so that both
mean the same thing by "50 ms, 1 Mbit/s up".

The transport is a stream (TCP): order is kept, and a lost packet is a frame that arrives one
retransmission timeout later, together with everything behind it. The timeout is RFC 6298's with
Linux's floor: round trip + max(200 ms, 4 x jitter). Fast retransmit is not modelled: it needs
later packets in flight, which small frames far apart seldom have; so losses cost their most here.
A trace begins with the path's first frame.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final, Protocol

FRAME_OVERHEAD: Final = 58
"""Bytes that travel with a short frame: IPv4 and TCP headers with timestamps (52), WebSocket
header and mask (6)."""
MIN_RTO_S: Final = 0.2
"""Seconds beyond the round trip that a lost packet costs at least: Linux's floor."""
SEGMENT_BYTES: Final = 1448
"""Payload of a full TCP segment on a 1500-byte path: a longer frame is several packets, and any
of them may be lost."""
MAX_RETRANSMISSIONS: Final = 15
"""Linux's tcp_retries2: what is lost more often ends a connection; here it arrives at last."""
PACKET_BYTES: Final = 1500
"""Size of one delivery opportunity in a mahimahi trace."""
MIN_STEP_S: Final = 1e-6
"""Shortest step of a rate trace: below, adding it to a time of hours changes nothing."""
MAX_TRACE_S: Final = 1e9
MIN_RATE: Final = 1.0
MAX_RATE: Final = 1e15
"""Bits a second that a trace may have in the mean: what a float can still add up exactly."""
MAX_DELAY_S: Final = 60.0
MAX_JITTER_S: Final = 10.0
MAX_LOSS: Final = 0.5

Uniform = Callable[[], float]
"""A draw from [0, 1)."""


class LinkError(ValueError):
    """A link description that means nothing; the message shows what is understood."""


def _sane_times(name: str, times: Sequence[float]) -> None:
    if not all(0 <= t <= MAX_TRACE_S for t in times):  # nan fails both
        raise LinkError(f"the times of {name} are numbers in [0, {MAX_TRACE_S:g}] s")


class Server(Protocol):
    """Serves bytes: the time at which the last byte of a frame has left the queue."""

    def finish(self, size: int, start: float) -> float:
        """`size` bytes, none served before `start` (seconds). Calls come in order of `start`."""
        ...


class Unlimited:
    """No queue at all."""

    def finish(self, size: int, start: float) -> float:  # noqa: ARG002
        return start


class Rate:
    """A constant rate in bits a second."""

    def __init__(self, bits_per_second: float) -> None:
        if not 0 < bits_per_second < math.inf:
            raise LinkError(f"a rate must be above 0, got {bits_per_second}")
        self._rate = bits_per_second

    def finish(self, size: int, start: float) -> float:
        return start + 8.0 * size / self._rate


class Opportunities:
    """A mahimahi trace: at each listed time up to 1500 bytes may cross; then it begins again.

    What an opportunity has left serves the next frame in the queue; an opportunity that finds
    the queue empty is lost, as in mahimahi.
    """

    def __init__(self, times_s: Sequence[float], *, period_s: float | None = None) -> None:
        """`period_s`: when the trace begins again; its last time when None, as in mahimahi."""
        _sane_times("a packet trace", times_s)
        if not times_s or times_s[-1] <= 0 or list(times_s) != sorted(times_s):
            raise LinkError("a packet trace needs ascending times, the last above 0")
        self._times = list(times_s)
        self._period = self._times[-1] if period_s is None else period_s
        if not self._times[-1] <= self._period < math.inf:
            raise LinkError(
                f"the packet trace ends at {self._times[-1]:g} s, behind its period of "
                f"{self._period:g} s"
            )
        self._next = 0
        self._left = 0
        self._at = -math.inf

    def finish(self, size: int, start: float) -> float:
        if start > self._at:
            self._left = 0
            self._seek(start)
        while self._left < size:
            self._at = self._time(self._next)
            self._next += 1
            self._left += PACKET_BYTES
        self._left -= size
        return max(self._at, start)

    def _time(self, index: int) -> float:
        rounds, place = divmod(index, len(self._times))
        return rounds * self._period + self._times[place]

    def _seek(self, start: float) -> None:
        rounds = int(max(start, 0.0) // self._period)
        place = bisect_left(self._times, start - rounds * self._period)
        self._next = max(self._next, rounds * len(self._times) + place)


class Steps:
    """A rate that changes in steps (time_s, bits a second), repeated for ever."""

    def __init__(self, steps: Sequence[tuple[float, float]]) -> None:
        """`steps`: start of each, ascending from 0, and its rate; the last one lasts as long as
        the mean of the others (or one second when it is alone)."""
        if not steps or steps[0][0] != 0 or not all(0 <= r < math.inf for _, r in steps):
            raise LinkError("a rate trace starts at time 0 and has no negative rates, inf or nan")
        _sane_times("a rate trace", [t for t, _ in steps])
        times = [t for t, _ in steps]
        if times != sorted(set(times)):
            raise LinkError("the times of a rate trace must ascend")
        last = times[-1] / (len(times) - 1) if len(times) > 1 else 1.0
        self._times = [*times, times[-1] + last]
        self._rates = [r for _, r in steps]
        spans = [end - begin for begin, end in pairwise(self._times)]
        if min(spans) < MIN_STEP_S:
            raise LinkError(f"the times of a rate trace are at least {MIN_STEP_S:g} s apart")
        self._bits = sum(r * s for r, s in zip(self._rates, spans, strict=True))
        """Bits that one round of the trace carries."""
        if not MIN_RATE <= self._bits / self._times[-1] <= MAX_RATE:
            raise LinkError(
                f"the mean of a rate trace is in [{MIN_RATE:g}, {MAX_RATE:g}] bits a second"
            )

    def finish(self, size: int, start: float) -> float:
        period = self._times[-1]
        # Whole rounds at once: a slow trace of short steps has millions of them in one frame.
        whole = max(0.0, math.floor(8.0 * size / self._bits) - 1.0)
        bits, now = 8.0 * size - whole * self._bits, start + whole * period
        while True:
            rounds = math.floor(now / period)
            inside = now - rounds * period
            place = max(0, bisect_left(self._times, math.nextafter(inside, math.inf)) - 1)
            place = min(place, len(self._rates) - 1)
            end = rounds * period + self._times[place + 1]
            room = self._rates[place] * (end - now)
            if room >= bits:
                return now + bits / self._rates[place] if bits else now
            bits -= room
            now = max(end, math.nextafter(now, math.inf))


@dataclass(slots=True)
class Path:
    """One direction of a link, with its queue. Give each connection a fresh one."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    """Extra delay, uniform in [0, jitter]."""
    loss: float = 0.0
    """Probability that a packet is lost and sent again (possibly more than once)."""
    rto_s: float = MIN_RTO_S
    """Seconds that a lost packet comes later."""
    server: Server = field(default_factory=Unlimited)
    retransmissions: int = 0
    _origin: float | None = None
    _free: float = -math.inf
    _last: float = -math.inf

    def arrival(self, size: int, now: float, uniform: Uniform) -> float:
        """When a frame of `size` bytes given to the link at `now` (seconds) is delivered."""
        if self._origin is None:
            self._origin = now
        # Kept relative to the origin: a server compares its own times exactly.
        start = max(now - self._origin, self._free)
        self._free = self.server.finish(size + FRAME_OVERHEAD, start)
        late = self._origin + self._free + self.delay_s + self.jitter_s * uniform()
        late += self._timeouts(size, uniform) * self.rto_s
        self._last = max(self._last, late)
        return self._last

    def _timeouts(self, size: int, uniform: Uniform) -> int:
        """Retransmission timeouts of a frame: those of its unluckiest packet."""
        worst = 0
        for _ in range(max(1, math.ceil(size / SEGMENT_BYTES)) if self.loss else 0):
            lost = 0
            while lost < MAX_RETRANSMISSIONS and uniform() < self.loss:
                lost += 1
            self.retransmissions += lost
            worst = max(worst, lost)
        return worst


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A description of both directions, as `--link` takes it."""

    rtt_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    up_bps: float = math.inf
    down_bps: float = math.inf
    up_server: Callable[[], Server] | None = None
    """Makes the uplink's server from a trace; wins over up_bps."""
    down_server: Callable[[], Server] | None = None
    text: str = ""
    """The description as the user gave it."""

    def up(self) -> Path:
        """A fresh path from edge to cloud."""
        return self._path(self.up_server, self.up_bps)

    def down(self) -> Path:
        return self._path(self.down_server, self.down_bps)

    def round_trip(self, size: int) -> float:
        """Seconds that a frame of `size` bytes up and one down take together at best: on idle
        paths, without jitter and loss."""
        calm = replace(self, jitter_s=0.0, loss=0.0)
        return sum(path.arrival(size, 0.0, lambda: 0.0) for path in (calm.up(), calm.down()))

    def _path(self, make: Callable[[], Server] | None, bps: float) -> Path:
        server: Server = Unlimited() if math.isinf(bps) else Rate(bps)
        return Path(
            delay_s=self.rtt_s / 2,
            jitter_s=self.jitter_s,
            loss=self.loss,
            rto_s=self.rtt_s + max(MIN_RTO_S, 4 * self.jitter_s),
            server=make() if make else server,
        )


PROFILES: Final = {
    "weak": "up=50mbit,down=150mbit",
    "medium": "up=150mbit,down=1000mbit",
    "strong": "up=250mbit,down=2500mbit",
}
"""Links by name: those of AsymSpec, which states no round trip. Add one: weak,rtt=20ms."""
_RATES: Final = re.compile(r"([0-9]*\.?[0-9]+)/([0-9]*\.?[0-9]+)")
"""Mbit/s up and down in short: .5/5."""
_TIME: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_BITS: Final = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_NUMBER: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z%]*)")
EXAMPLE: Final = "rtt=50ms,up=1mbit,down=20mbit,jitter=5ms,loss=1%"


def _quantity(name: str, text: str, units: dict[str, float]) -> float:
    found = _NUMBER.fullmatch(text.strip().lower())
    if not found or found[2] not in units:
        raise LinkError(
            f"{name}={text}: give a number and one of {', '.join(u for u in units if u)}, as in "
            f"{EXAMPLE}"
        )
    value = float(found[1]) * units[found[2]]
    if not math.isfinite(value):
        raise LinkError(f"{name} is too large a number")
    return value


def seconds(name: str, text: str) -> float:
    """A time with its unit, such as 50ms."""
    return _quantity(name, text, _TIME)


def _within(name: str, value: float, high: float) -> float:
    if value > high:
        raise LinkError(f"{name} must be at most {high:g}, got {value:g}")
    return value


def parse_link(text: str, *, load: Callable[[str], Callable[[], Server]] | None = None) -> Link:
    """`rtt=50ms,up=1mbit,down=20mbit,jitter=5ms,loss=1%`, any of them left out. A profile's name
    (PROFILES) or UP/DOWN in Mbit/s may stand first: `weak,rtt=20ms`, `.5/5,rtt=50ms`.

    `up-trace=FILE`, `down-trace=FILE` take a recorded link instead of a rate; `load` reads a
    file (runtime.shaping.load_trace), since this layer does no I/O. Raises LinkError.
    """
    fields: dict[str, str] = {}
    for part in _profile(text).split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or not value or name in fields:
            raise LinkError(f"{part.strip()!r} is not name=value (once each), as in {EXAMPLE}")
        fields[name] = value
    known = {"rtt", "up", "down", "jitter", "loss", "up-trace", "down-trace"}
    if unknown := sorted(fields.keys() - known):
        raise LinkError(f"unknown {', '.join(unknown)}; known are {', '.join(sorted(known))}")

    def trace(name: str) -> Callable[[], Server] | None:
        if name not in fields:
            return None
        if load is None:
            raise LinkError(f"{name} needs a file, which cannot be read here")
        return load(fields[name])

    return Link(
        rtt_s=_within("rtt", _quantity("rtt", fields.get("rtt", "0s"), _TIME), MAX_DELAY_S),
        jitter_s=_within(
            "jitter", _quantity("jitter", fields.get("jitter", "0s"), _TIME), MAX_JITTER_S
        ),
        loss=_within(
            "loss", _quantity("loss", fields.get("loss", "0%"), {"%": 0.01, "": 1.0}), MAX_LOSS
        ),
        up_bps=_rate("up", fields),
        down_bps=_rate("down", fields),
        up_server=trace("up-trace"),
        down_server=trace("down-trace"),
        text=text,
    )


def _profile(text: str) -> str:
    """The description with a profile at its head written out."""
    first, comma, rest = text.partition(",")
    head = first.strip().lower()
    rates = _RATES.fullmatch(head)
    said = f"up={rates[1]}mbit,down={rates[2]}mbit" if rates else PROFILES.get(head, first)
    return said + comma + rest


def _rate(name: str, fields: dict[str, str]) -> float:
    if name not in fields:
        return math.inf
    rate = _quantity(name, fields[name], _BITS)
    if rate <= 0:
        raise LinkError(f"{name} must be above 0")
    return rate
