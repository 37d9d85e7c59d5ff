"""What lies between an edge and its verifier, for `outrider doctor --cloud`.

Bounded: a few hundred bytes, a dozen PINGs, and at most PROBE_BYTES each way for the bandwidth. No
answer is asked for. Upwards goes an OPEN that every verifier refuses (its rule has no name of ours)
before anything is held for it; downwards comes the filler of PROBE_PATH.
"""

from __future__ import annotations

import asyncio
import email.utils
import http.client
import statistics
import time
from dataclasses import dataclass
from typing import Any, Final

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from outrider.core.tokens import SamplingParams
from outrider.proto.codec import MAX_FRAME_BYTES, decode, encode
from outrider.proto.messages import Error, Hello, Open, Ping, Pong
from outrider.runtime.discreet import discreet
from outrider.runtime.edgeconfig import EdgeConfig
from outrider.runtime.routes import HEALTH_PATH, PROBE_BYTES, PROBE_PATH
from outrider.runtime.status import http_connection
from outrider.session.wire import to_wire

PINGS: Final = 10
PATIENCE_S: Final = 15.0
"""For one answer: PROBE_BYTES over a link of 150 kbit/s."""
FIRST_BYTES: Final = 16 * 1024
"""Sent first; only where that was quick, all of PROBE_BYTES follow."""
QUICK_S: Final = 0.25
RULE: Final = "probe"
"""No rule of the protocol."""
MEASURABLE_S: Final = 0.002
"""Less than this is the machines' own time and no link's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What was found out; None: not known."""

    reachable: bool
    fault: str = ""
    """Why it is not of use, in a line; empty: it is."""
    login: bool | None = None
    """The login was taken (True also where none is asked for)."""
    clock_s: float | None = None
    """Its clock is ahead of ours by so many seconds; known to half a second and half a round
    trip."""
    model: str = ""
    fingerprint: str = ""
    """Of its vocabulary."""
    forward_ms: float | None = None
    """A forward over one row."""
    rtt_ms: float | None = None
    """Median of PINGs, and the worst."""
    worst_rtt_ms: float | None = None
    up_mbit: float | None = None
    """Bandwidth to it, Mbit/s; inf: too fast to tell with so few bytes."""
    down_mbit: float | None = None


async def probe(config: EdgeConfig, hello: Hello) -> Probe:
    """Ask the verifier at `config.url`, as an edge that greets with `hello`. Raises nothing that
    a link or a verifier can cause."""
    try:
        clock = await asyncio.to_thread(_clock, config)
    except (OSError, http.client.HTTPException) as error:
        return Probe(reachable=False, fault=f"cannot reach it: {error or type(error).__name__}")
    try:
        async with asyncio.timeout(6 * PATIENCE_S):
            return await _greet(config, hello, clock)
    except InvalidStatus as error:
        status = error.response.status_code
        refused = status in (401, 403)
        why = "it refuses this login" if refused else f"it answers HTTP {status}"
        return Probe(reachable=True, fault=why, login=not refused, clock_s=clock)
    except _EndedError as error:
        return Probe(reachable=True, fault=f"it hangs up: {error}", login=True, clock_s=clock)
    except (OSError, WebSocketException) as error:
        why = str(error) or type(error).__name__
        return Probe(reachable=True, fault=f"the link broke: {why}", clock_s=clock)


class _EndedError(Exception):
    """The verifier ended the conversation; says why."""


async def _greet(config: EdgeConfig, hello: Hello, clock: float | None) -> Probe:
    async with connect(
        config.endpoint,
        additional_headers=config.authorization(),
        compression=None,
        max_size=MAX_FRAME_BYTES,
        ping_interval=None,
        ssl=config.tls(),
        user_agent_header=None,
        proxy=None,
        logger=discreet("outrider.edge.socket"),
    ) as socket:
        await socket.send(encode(hello))
        peer = await _await(socket, Hello)
        trips = [await _trip(socket) for _ in range(PINGS)]
        rtt = statistics.median(trips)
        up = await _upload(socket, peer, rtt)
        down = await asyncio.to_thread(_download, config, rtt)
        return Probe(
            reachable=True,
            login=True,
            clock_s=clock,
            model=peer.model,
            fingerprint=peer.fingerprint,
            forward_ms=peer.row_ms[0][1] if peer.row_ms else None,
            rtt_ms=1e3 * rtt,
            worst_rtt_ms=1e3 * max(trips),
            up_mbit=up,
            down_mbit=down,
        )


async def _await(socket: ClientConnection, kind: type[Any]) -> Any:
    """The next message of this kind; its own PINGs are answered meanwhile."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            message = decode(await socket.recv())  # type: ignore[arg-type]
            if isinstance(message, kind):
                return message
            if isinstance(message, Ping):
                await socket.send(encode(Pong(stamp=message.stamp)))
            if isinstance(message, Error):
                raise _EndedError(f"{message.message} ({message.code.value})")


async def _trip(socket: ClientConnection) -> float:
    began = time.monotonic()
    await socket.send(encode(Ping(stamp=began)))
    await _await(socket, Pong)
    return time.monotonic() - began


async def _upload(socket: ClientConnection, peer: Hello, rtt: float) -> float | None:
    rate = None
    for size in (FIRST_BYTES, PROBE_BYTES):
        frame = _refused_frame(size, peer)
        began = time.monotonic()
        await socket.send(frame)
        await _await(socket, Error)
        took = time.monotonic() - began
        rate = _mbit(len(frame), took - rtt)
        if took > QUICK_S:
            break
    return rate


def _refused_frame(size: int, peer: Hello) -> bytes:
    """An OPEN of about so many bytes."""
    ids = (min(127, peer.vocab_size - 1),) * min(size, peer.limits.prompt_tokens)  # a byte each
    return encode(
        Open(
            session=1,
            uid=bytes(16),
            prompt=ids,
            sampling=to_wire(SamplingParams()),
            rule=RULE,
            step="wait",
        )
    )


def _download(config: EdgeConfig, rtt: float) -> float | None:
    connection = http_connection(config)
    connection.timeout = PATIENCE_S
    try:
        connection.connect()
        began = time.monotonic()
        connection.request("GET", PROBE_PATH, headers=config.authorization())
        answer = connection.getresponse()
        body = answer.read(PROBE_BYTES)
        took = time.monotonic() - began
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return _mbit(len(body), took - rtt) if answer.status == 200 else None


def _mbit(size: int, seconds: float) -> float:
    return 8e-6 * size / seconds if seconds > MEASURABLE_S else float("inf")


def _clock(config: EdgeConfig) -> float | None:
    """How far its clock is ahead. Raises OSError, HTTPException where nobody answers."""
    connection = http_connection(config)
    try:
        connection.connect()
        began = time.time()
        connection.request("GET", HEALTH_PATH)
        answer = connection.getresponse()
        ended = time.time()
        answer.read(1024)
    finally:
        connection.close()
    date = answer.headers["Date"]
    if date is None:
        return None
    try:
        there = email.utils.parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None
    # The header has whole seconds: in the mean half a one has gone since.
    return there + 0.5 - (began + ended) / 2
