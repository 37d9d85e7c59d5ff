"""The verifier under uvicorn: what is true of its own server is true there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import test_access
import test_exposition
import test_live
import uvicorn
from test_access import LONG, SECRET, SHORT, TOKENS, opening, stranger
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

import live
from live import alone, ask, drafter, edge, hear, pair, run, same, server, until
from outrider.proto.codec import MAX_FRAME_BYTES, encode
from outrider.proto.messages import Ping
from outrider.runtime import peers
from outrider.runtime.asgi import CloudApp
from outrider.runtime.cloudruntime import CloudRuntime
from outrider.runtime.routes import HEALTH_PATH, PATH, STATUS_PATH
from outrider.session.schedules import Schedule
from outrider.session.wire import to_wire


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):
        yield


class UvicornCloud(CloudRuntime):
    """As `CloudServer`, on uvicorn."""

    extensions: frozenset[str] | None = None
    """Those that the host offers; None: all of uvicorn's."""

    async def start(self) -> None:
        app: Any = CloudApp(self)
        if self.extensions is not None:
            app = without_extensions(app)
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                app,
                port=self.config.port,
                ws="websockets-sansio",
                ws_max_size=MAX_FRAME_BYTES,
                ws_per_message_deflate=False,
                ws_ping_interval=None,
                lifespan="off",
                log_level="critical",
                timeout_graceful_shutdown=2,
                timeout_keep_alive=0,
            )
        )
        self._serving = asyncio.create_task(self._uvicorn.serve())
        while not self._uvicorn.started:
            await asyncio.sleep(0.001)

    @property
    def port(self) -> int:
        return self._uvicorn.servers[0].sockets[0].getsockname()[1]

    async def stop(self, *, drain: float = 0.0) -> None:
        await super().stop(drain=drain)
        self._uvicorn.should_exit = True
        await self._serving

    async def __aenter__(self) -> UvicornCloud:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


def without_extensions(app: CloudApp) -> Callable[..., Any]:
    async def plain(scope: Any, receive: Any, send: Any) -> None:
        await app({k: v for k, v in scope.items() if k != "extensions"}, receive, send)

    return plain


@pytest.fixture(autouse=True)
def uvicorn_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "CloudServer", UvicornCloud)


@pytest.mark.parametrize(
    "test",
    [
        test_live.test_eight_at_once_on_one_connection,
        test_live.test_draining_lets_answers_finish_and_refuses_newcomers,
        test_live.test_impatience_ends_a_drain,
        test_live.test_a_client_that_vanishes_is_forgotten_after_its_grace,
        test_access.test_the_right_login_works_and_names_its_tenant,
        test_access.test_the_status_is_for_logins_and_names_no_secret,
        test_access.test_a_peer_that_never_greets_is_let_go,
        test_exposition.test_the_route_gives_it_to_a_login_and_health_says_when_it_drains,
    ],
    ids=lambda test: test.__name__.removeprefix("test_"),
)
def test_the_same_as_of_its_own_server(test: Callable[[], None]):
    test()


@pytest.mark.parametrize("schedule", [Schedule.SYNC, Schedule.FREERUN])
def test_schedules_say_what_the_target_says(schedule: Schedule):
    test_live.test_every_schedule_says_what_the_target_says(schedule)


@pytest.mark.parametrize("what", ["text", "an empty frame", "a pickle", "a second greeting"])
def test_nonsense_ends_its_connection_alone(what: str, tmp_path):
    test_access.test_nonsense_ends_its_connection_alone(what, tmp_path)


@pytest.mark.parametrize(("path", "status"), [(PATH, 426), (STATUS_PATH, 405), ("/docs", 404)])
def test_plain_requests(path: str, status: int):
    async def work() -> None:
        async with server() as cloud:
            reader, writer = await asyncio.open_connection("127.0.0.1", cloud.port)
            writer.write(f"POST {path} HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n".encode())
            assert int((await reader.read()).split()[1]) == status
            writer.close()

    run(work())


@pytest.mark.parametrize(
    ("path", "token", "status"),
    [(PATH, "", 401), (PATH, "wrong", 401), ("/docs", SECRET, 404), (HEALTH_PATH, "", 400)],
)
def test_a_handshake_is_refused_with_a_status(path: str, token: str, status: int):
    async def work() -> None:
        async with server(tokens=TOKENS) as cloud:
            login = {"Authorization": f"Bearer {token}"} if token else {}
            with pytest.raises(InvalidStatus) as refused:
                await connect(f"ws://127.0.0.1:{cloud.port}{path}", additional_headers=login)
            assert refused.value.response.status_code == status

    run(work())


@pytest.mark.parametrize("extensions", [None, frozenset()])
def test_no_room_is_no_refusal_for_good(extensions, monkeypatch: pytest.MonkeyPatch):
    """Where a host knows no status but 403, an edge would believe that its token is wrong."""
    monkeypatch.setattr(UvicornCloud, "extensions", extensions)

    async def work() -> None:
        async with server(tenant_connections=1) as cloud, edge(cloud.port, drafter()) as second:
            async with stranger(cloud.port):
                answer = asyncio.ensure_future(hear(await second.stream(ask(SHORT))))
                await until(lambda: second._client.tally.dials > 1)
            same(await answer, alone(SHORT))

    run(work())


def test_a_slow_reader_pauses_and_is_dropped(monkeypatch: pytest.MonkeyPatch):
    """Field case 31, where `send` tells nothing: PINGs say what was read."""
    monkeypatch.setattr(peers, "MAX_UNSENT_BYTES", 4096)
    monkeypatch.setattr(peers, "DROP_UNSENT_BYTES", 32 * 1024)

    async def work() -> None:
        async with pair(cloud={"heartbeat": 600.0}) as both, stranger(both.cloud.port) as raw:
            (slow,) = both.cloud._peers
            raw.transport.pause_reading()
            await raw.send(encode(opening(sampling=to_wire(LONG))))
            service = both.cloud.service
            await until(lambda: slow in service._blocked)
            same(await both.ask(ask(SHORT)), alone(SHORT))  # the others are served meanwhile
            (entry,) = service._entries.values()
            at = entry.session.generation.sequence.base
            await asyncio.sleep(0.05)
            assert entry.session.generation.sequence.base == at < LONG.max_tokens
            with contextlib.suppress(ConnectionClosed):  # it does not read, and asks for more
                for _ in range(20_000):
                    await raw.send(encode(Ping(stamp=1.0)))
                    if slow not in both.cloud._peers:
                        break
            await until(lambda: slow not in both.cloud._peers)
            raw.transport.abort()
            service.tick(1e12)

    run(work())


def test_whoever_answers_its_pings_is_never_blocked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peers, "MAX_UNSENT_BYTES", 512)
    monkeypatch.setattr(peers, "DROP_UNSENT_BYTES", 8192)

    async def work() -> None:
        async with pair() as both:
            params = live.SamplingParams(seed=3, max_tokens=250, ignore_eos=True)
            heard = await both.ask(ask(params, Schedule.CLOUD_ONLY))
            same(heard, alone(params))
            (peer,) = both.cloud._peers.values()
            assert heard.result.link.reconnects == 0
            assert peer.connection.sent_bytes > 2048
            assert peer.unsent <= 512

    run(work())
