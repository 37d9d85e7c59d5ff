"""Who gets in, what a stranger may say, and what nobody may see (field cases 29-31, 33, 34, 36)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import pickle
import random
import re
import shutil
import socket
import subprocess
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

import outrider
from live import (
    PATIENCE,
    PROMPT,
    SCHEDULES,
    TARGET,
    TOKENIZER,
    Watched,
    alone,
    ask,
    drafter,
    edge,
    hear,
    pair,
    run,
    same,
    server,
    toy,
    until,
)
from outrider.core.link import LinkError, parse_link
from outrider.core.tokens import ParameterError, SamplingParams
from outrider.engines.base import Block, EngineError
from outrider.engines.desk import PREFILL_CHUNK, DeskJob, DeskResult
from outrider.engines.tokenizer import ByteTokenizer
from outrider.proto.codec import MAX_BLOCK, MAX_FRAME_BYTES, decode, encode
from outrider.proto.messages import (
    PROTOCOL_VERSION,
    Code,
    Draft,
    Error,
    Hello,
    Limits,
    Open,
    Opened,
    Ping,
    Pong,
)
from outrider.runtime import asgi, cloudruntime, listening, peers, routes
from outrider.runtime import cloud as cloud_module
from outrider.runtime.access import ConfigurationError, hash_token, is_loopback, read_tokens
from outrider.runtime.cloud import CloudConfig, CloudServer
from outrider.runtime.discreet import discreet
from outrider.runtime.edge import EdgeRuntime
from outrider.runtime.edgeconfig import EdgeConfig
from outrider.runtime.failures import CloudError
from outrider.runtime.listening import calm_accepts, tls_context
from outrider.runtime.routes import (
    AFFINITY_HEADER,
    HEALTH_PATH,
    METRICS_PATH,
    PATH,
    PROBE_PATH,
    ROUTES,
    STATUS_PATH,
)
from outrider.session.schedules import Schedule
from outrider.session.wire import to_wire

SECRET = "sk-test-SECRET123"
TOKENS = {hash_token(SECRET): "alice", hash_token("other"): "bob"}
SHORT = SamplingParams(seed=3, max_tokens=12)
LONG = replace(SHORT, max_tokens=3000, ignore_eos=True)
UNSENDABLE = ("café-日", "\0\1abc", "abc\r\nX-Evil: 1", "two words", " x", "caf\udce9", "\x7f")


async def http(port: int, path: str, *headers: str) -> tuple[int, str]:
    """A plain GET: status and whole response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = [f"GET {path} HTTP/1.1", "Host: here", *headers, "", ""]
    writer.write("\r\n".join(lines).encode("latin-1"))
    try:
        answer = (await reader.read()).decode("latin-1")
    finally:
        writer.close()
        await writer.wait_closed()
    return int(answer.split(" ", 2)[1]), answer


UPGRADE = (
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
)


def hello(**changes: object) -> Hello:
    facts: dict[str, object] = {
        "versions": (PROTOCOL_VERSION,),
        "role": "edge",
        "agent": "test",
        "fingerprint": TOKENIZER.fingerprint,
        "vocab_size": TOKENIZER.vocab_size,
        "logits_width": TOKENIZER.vocab_size,
        "context_length": 4096,
        "limits": Limits(frame_bytes=MAX_FRAME_BYTES, window=64, sessions=8, prompt_tokens=100_000),
        "rules": ("coupled",),
    }
    return Hello(**(facts | changes))  # type: ignore[arg-type]


def opening(session: int = 1, prompt: tuple[int, ...] = PROMPT, **changes: object) -> Open:
    facts: dict[str, object] = {
        "session": session,
        "uid": bytes([session]) * 16,
        "prompt": prompt,
        "sampling": to_wire(LONG),
        "rule": "coupled",
        "step": "step",
    }
    return Open(**(facts | changes))  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def stranger(port: int, *, greet: bool = True) -> AsyncIterator[ClientConnection]:
    """A peer that speaks frame by frame, as it likes."""
    async with connect(
        f"ws://127.0.0.1:{port}{PATH}", max_size=None, compression=None, ping_interval=None
    ) as raw:
        if greet:
            await raw.send(encode(hello()))
        yield raw


async def end_of(raw: ClientConnection) -> tuple[Error | None, int]:
    """The ERROR before the end, if there was one, and the close code."""
    last: Error | None = None
    try:
        while True:
            message = decode(await raw.recv())  # type: ignore[arg-type]
            if isinstance(message, Error):
                last = message
    except ConnectionClosed:
        assert raw.close_code is not None
        return last, raw.close_code


# -- doors ------------------------------------------------------------------------------------


def test_every_route_is_in_the_table_and_one_alone_is_open():
    """Field case 36: another path is another line of this test."""
    assert {path for path, route in ROUTES.items() if not route.login} == {HEALTH_PATH}
    assert {path for path, route in ROUTES.items() if route.body is None} == {PATH}
    written = []
    for module in (cloud_module, cloudruntime, asgi, routes):
        source = Path(module.__file__).read_text(encoding="utf-8")
        written += re.findall(r"""["'](/[^"']*)["']""", source)
    assert sorted(written) == sorted(ROUTES), "a path beside the table"
    source = Path(cloudruntime.__file__).read_text(encoding="utf-8")
    assert source.count("ROUTES.get(path)") == source.count("ROUTES") - 1 == 1, "looked up once"


def test_the_status_is_for_logins_and_names_no_secret():
    async def work() -> None:
        async with server(tokens=TOKENS) as verifier:
            assert (await http(verifier.port, STATUS_PATH))[0] == 401
            login = f"Authorization: Bearer {SECRET}"
            code, answer = await http(verifier.port, STATUS_PATH, login)
            assert code == 200
            facts = json.loads(answer.partition("\r\n\r\n")[2])
            assert facts["sessions"] == facts["forwards"] == 0
            assert SECRET not in answer

    run(work())


def strange_paths() -> list[str]:
    """Paths that scanners try, and any others: the same ones in every run."""
    chance = random.Random(36)
    letters = "abcdefghijklmnopqrstuvwxyz0123456789._-~%/"
    words = (
        "admin debug docs openapi.json state stats sessions version config login ready live "
        "healthz livez readyz ping v1 v1/models v1/completions v2/outrider .env robots.txt "
        "favicon.ico internal static v1/outrider/admin health/live metrics/"
    ).split()
    made = ("".join(chance.choices(letters, k=chance.randrange(1, 24))) for _ in range(150))
    return ["/" + rest for rest in (*words, *made)] + ["*", "health", "//", "/?/health"]


def test_any_path_that_no_table_names_is_refused():
    """Field case 36, with the right login and with none."""

    async def work() -> None:
        async with server(tokens=TOKENS) as verifier:
            for path in strange_paths():
                assert path not in ROUTES
                for login in ((), (f"Authorization: Bearer {SECRET}",)):
                    got, answer = await http(verifier.port, path, *login)
                    assert got == 404, (path, answer)
            for path, route in ROUTES.items():
                got, _ = await http(verifier.port, path)
                assert got == (401 if route.login else 200), path

    run(work())


@pytest.mark.parametrize("upgrade", [(), UPGRADE])
def test_only_two_paths_answer_and_one_asks_for_a_login(upgrade: tuple[str, ...]):
    """Field case 36: deny by default, however the path is spelled and the login is missing."""
    paths = {
        HEALTH_PATH: 200,
        PATH: 401,
        PATH + "?token=" + SECRET: 401,
        PATH + "/": 404,
        "/" + PATH: 404,
        PATH.upper(): 404,
        "/v1/%6futrider": 404,
        "/v1/../v1/outrider": 404,
        HEALTH_PATH + "/": 404,
        "/": 404,
        "/v1": 404,
        METRICS_PATH: 401,
        PROBE_PATH: 401,
        METRICS_PATH + "/": 404,
        "/v1/chat/completions": 404,
    }
    logins = (
        (),
        ("Authorization: Bearer wrong",),
        ("Authorization: Bearer",),
        ("Authorization: Bearer ",),
        ("Authorization: ",),
        (f"Authorization: Basic {SECRET}",),
        (f"Authorization: {SECRET}",),
        (f"Authorization: Bearer {SECRET}x",),
        (f"Authorization: Bearer {SECRET}\xff",),
        (f"Authorization: Bearer {SECRET}", "Authorization: Bearer wrong"),
        (f"X-Authorization: Bearer {SECRET}",),
    )

    async def work() -> None:
        async with server(tokens=TOKENS) as verifier:
            for path, status in paths.items():
                for login in logins:
                    got, answer = await http(verifier.port, path, *upgrade, *login)
                    assert got == status, (path, login, answer)
                    assert SECRET not in answer
            # Even the right login opens those alone.
            for path in paths:
                got, _ = await http(verifier.port, path, f"Authorization: Bearer {SECRET}")
                opened = 426 if path.startswith(PATH) else 200
                assert got == {200: 200, 401: opened, 404: 404}[paths[path]], path
            assert not verifier._peers

    run(work())


def test_an_edge_names_itself_the_same_way_each_time():
    """By a value that says nothing: what stands in front of several verifiers goes by it."""

    async def work() -> list[str]:
        seen = []
        async with server(tokens=TOKENS) as verifier:
            for _ in range(2):
                async with edge(verifier.port, drafter(), token=SECRET) as runtime:
                    for _ in range(2):
                        same(await hear(await runtime.stream(ask(SHORT))), alone(SHORT))
                        (peer,) = verifier._peers.values()
                        seen += peer.socket.raw.request.headers.get_all(AFFINITY_HEADER)
                        peer.socket.abort()
                        await until(lambda: not verifier._peers)
        return seen

    first, again, second, _ = run(work())
    assert first == again != second
    assert SECRET not in first
    assert len(first) >= 16


def test_the_right_login_works_and_names_its_tenant():
    async def work() -> None:
        async with server(tokens=TOKENS, pace=0.002) as verifier:
            async with edge(verifier.port, drafter(), token=SECRET) as runtime:
                stream = await runtime.stream(ask(SHORT))
                same(await hear(stream), alone(SHORT))
            for token, words in (
                (None, "wants a token: give"),
                ("wrong", "refuses this token: check"),
                ("", "wants a token: give"),
            ):
                async with edge(verifier.port, drafter(), token=token) as runtime:
                    with pytest.raises(CloudError, match=words) as refused:
                        await hear(await runtime.stream(ask(SHORT)))
                    assert refused.value.code is Code.UNAUTHORIZED
                    with pytest.raises(CloudError, match="token"):
                        await runtime.stream(ask(SHORT))
            await until(lambda: not verifier._peers)

    run(work())


def test_a_tenant_cannot_reach_anothers_session():
    """I5: bob knows alice's uid and the digest of her prefix, and still gets nothing."""

    async def work() -> None:
        from outrider.proto.digest import of_prefix
        from outrider.proto.messages import Resume

        async with server(tokens=TOKENS, pace=0.005) as verifier:
            url = f"ws://127.0.0.1:{verifier.port}{PATH}"
            login = {"Authorization": f"Bearer {SECRET}"}
            async with (
                connect(url, additional_headers=login) as alice,
                connect(url, additional_headers={"Authorization": "Bearer other"}) as bob,
            ):
                for raw in (alice, bob):
                    await raw.send(encode(hello()))
                await alice.send(encode(opening()))
                await until(lambda: verifier.service.sessions == 1)
                theft = Resume(
                    session=9, uid=opening().uid, base=len(PROMPT), digest=of_prefix(PROMPT)
                )
                await bob.send(encode(theft))
                while not isinstance(message := decode(await bob.recv()), Error):  # type: ignore[arg-type]
                    assert isinstance(message, Hello)
                assert message.code is Code.UNKNOWN
                assert verifier.service.sessions == 1

    run(work())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_off_loopback_needs_login_and_tls(host: str, tmp_path: Path):
    assert not is_loopback(host)
    certificate = tmp_path / "c.pem"
    for missing in (
        {},
        {"tokens": TOKENS},
        {"certificate": certificate, "private_key": certificate},
    ):
        with pytest.raises(ConfigurationError, match="--token-file and --tls-cert"):
            CloudConfig(host=host, **missing)
    CloudConfig(host=host, insecure=True)
    CloudConfig(host=host, tokens=TOKENS, certificate=certificate, private_key=certificate)


def test_half_a_certificate_is_refused(tmp_path: Path):
    with pytest.raises(ConfigurationError, match="both --tls-cert and --tls-key"):
        CloudConfig(certificate=tmp_path / "c.pem")


def test_loopback_is_recognised():
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.8.8.8", "::1")))


def test_token_files(tmp_path: Path):
    file = tmp_path / "tokens"
    file.write_text(f"# people\n\nalice:{SECRET}\nbare-token\n")
    assert read_tokens(file) == {hash_token(SECRET): "alice", hash_token("bare-token"): "tenant-4"}
    for text, words in (("# none\n", "no token"), ("alice:\n", "line 1")):
        file.write_text(text)
        with pytest.raises(ConfigurationError, match=words):
            read_tokens(file)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="not a text file"):
        read_tokens(file)
    for token in UNSENDABLE:
        if token.strip() == token and len(token.splitlines()) == 1 and token.isprintable():
            file.write_text(f"alice:{SECRET}\nbob:{token}\n", encoding="utf-8")
            with pytest.raises(ConfigurationError, match="line 2") as refused:
                read_tokens(file)
            assert token not in str(refused.value)


@pytest.mark.parametrize("token", UNSENDABLE)
def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(token: str):
    with pytest.raises(ParameterError, match="visible ASCII") as refused:
        EdgeConfig(url="ws://127.0.0.1:1", token=token)
    assert token not in str(refused.value)
    with pytest.raises(ParameterError, match="printable ASCII"):
        EdgeConfig(url="ws://127.0.0.1:1", headers={"X-Key": f"\0{token}"})


def test_a_login_is_not_sent_in_clear_to_another_host():
    """docs/protocol.md: off loopback the transport is TLS."""
    header = {"authorization": "Basic x"}
    for url, login in (
        ("ws://example.org:9", {"token": SECRET}),
        ("WS://192.168.1.5", {"token": SECRET}),
        (f"ws://user:{SECRET}@example.org", {}),
        ("ws://example.org", {"headers": header}),
    ):
        with pytest.raises(ParameterError, match="wss://, or --insecure") as refused:
            EdgeConfig(url=url, **login)  # type: ignore[arg-type]
        assert "SECRET" not in str(refused.value)
        EdgeConfig(url=url, insecure=True, **login)  # type: ignore[arg-type]
    EdgeConfig(url="ws://example.org:9")
    for url in ("wss://example.org", "ws://localhost:1", "ws://127.0.0.1", "ws://[::1]:9"):
        EdgeConfig(url=url, token=SECRET, headers=header)


@pytest.mark.parametrize(
    "url", ["ws://127.0.0.1:0", "ws://a..b:1", f"ws://{'a' * 70}.com", "ws://h:99999", "ws://h#x"]
)
def test_addresses_that_cannot_be(url: str):
    with pytest.raises(ParameterError, match="HOST:PORT"):
        EdgeConfig(url=url)


def test_a_certificate_authority_without_tls_is_not_passed_over():
    with pytest.raises(ParameterError, match="wss:// only"):
        EdgeConfig(url="ws://127.0.0.1:1", ca_file="ca.pem")


def test_a_link_on_which_nobody_can_be_greeted_is_refused():
    with pytest.raises(LinkError, match="no connection can live"):
        EdgeConfig(url="ws://127.0.0.1:1", link=parse_link("rtt=12s"))
    EdgeConfig(url="ws://127.0.0.1:1", link=parse_link("rtt=12s"), heartbeat=7.0)


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("ws://h:1", "ws://h:1/v1/outrider"),
        ("ws://h:1/", "ws://h:1/v1/outrider"),
        ("ws://h:1?key=x", "ws://h:1/v1/outrider?key=x"),
        ("ws://h:1/other/", "ws://h:1/other"),
        ("WSS://h", "wss://h/v1/outrider"),
    ],
)
def test_the_protocols_path_is_added_where_there_is_none(url: str, path: str):
    assert EdgeConfig(url=url).endpoint == path


def test_a_token_is_seen_nowhere(caplog: pytest.LogCaptureFixture):
    """Field case 34: header, query and user name; success, 401, a cut link; everything on DEBUG."""
    seen: list[str] = []

    async def work() -> None:
        async with server(tokens=TOKENS, pace=0.003) as verifier:
            for token in (SECRET, SECRET + "-wrong"):
                config = EdgeConfig(url=f"ws://127.0.0.1:{verifier.port}", token=token)
                seen.append(repr(config))
                async with EdgeRuntime(config, TOKENIZER, drafter()) as runtime:
                    try:
                        stream = await runtime.stream(ask(replace(SHORT, max_tokens=60)))
                        cut = False
                        async for _ in stream:
                            if runtime._socket is not None and not cut:
                                cut = True
                                runtime._socket._raw.transport.abort()
                        seen.append(json.dumps(stream.result.as_dict()))
                    except CloudError as error:
                        seen.append(repr(error) + str(error))
            await http(verifier.port, f"{PATH}?key={SECRET}", f"Cookie: {SECRET}")
            with contextlib.suppress(OSError, IndexError):
                await http(verifier.port, "/\r\nAuthorization " + SECRET)  # no HTTP at all
            port = verifier.port
        for url in (
            f"ws://user:{SECRET}@127.0.0.1:{port}/v1/outrider?key={SECRET}",
            f"ws://127.0.0.1:{port}/?key={SECRET}",
        ):
            async with edge(0, drafter(), url=url, give_up=0.2) as runtime:
                with pytest.raises(CloudError) as refused:
                    await hear(await runtime.stream(ask(SHORT)))
                seen.append(str(refused.value))
        with pytest.raises(Exception, match="HOST:PORT") as bad:
            EdgeConfig(url=f"http://user:{SECRET}@h/?key={SECRET}")
        seen.append(str(bad.value))

    with caplog.at_level(logging.DEBUG):
        for name in ("websockets", "websockets.client", "websockets.server", "outrider", "asyncio"):
            caplog.set_level(logging.DEBUG, logger=name)
        run(work())
    formatter = logging.Formatter()
    seen += [formatter.format(record) for record in caplog.records]
    assert any("Authorization" in line for line in seen), "the dump of headers was looked at"
    assert [line for line in seen if "SECRET123" in line] == []


def test_what_is_said_is_in_no_log(caplog: pytest.LogCaptureFixture):
    """Field case 34: neither prompts nor answers, as text, ids or bytes, on DEBUG: of answers that
    end, are cut, cancelled or refused, and of forwards that fail; frames show their size alone."""
    prompt = tuple(b"my diary says: zyxwvu")
    params = replace(SHORT, max_tokens=40, ignore_eos=True)
    spoken = [alone(params, prompt).token_ids, alone(replace(params, seed=4), prompt).token_ids]
    model = Watched(TARGET)
    failing = False

    def fail(blocks: Sequence[Block]) -> None:
        if failing:
            raise EngineError("no memory")

    model.before = fail

    async def work() -> None:
        nonlocal failing
        async with pair(model=model, cloud={"pace": 0.001}, service={"max_prompt_tokens": 99}) as b:
            for schedule in SCHEDULES:
                request = ask(params, schedule, prompt=prompt)
                same(await b.ask(request), alone(params, prompt))
            stream = await b.edge.stream(ask(replace(params, seed=4), prompt=prompt))
            cut = False
            async for _ in stream:
                if not cut:
                    cut = True
                    assert b.edge._socket is not None
                    b.edge._socket._raw.transport.abort()
            stream = await b.edge.stream(ask(replace(LONG, seed=4), prompt=prompt))
            async for _ in stream:
                break
            stream.close()
            with pytest.raises(CloudError):
                await b.ask(ask(params, prompt=prompt * 9))
            failing = True
            with pytest.raises(CloudError, match="no memory"):
                await b.ask(ask(params, prompt=prompt))
            failing = False
            await b.idle()

    with caplog.at_level(logging.DEBUG):
        # The library's own loggers are not ours to fill: both ends give it one of `discreet`.
        for name in ("websockets", "websockets.client", "websockets.server", "outrider", "asyncio"):
            caplog.set_level(logging.DEBUG, logger=name)
        run(work())
    formatter = logging.Formatter()
    lines = [formatter.format(record) for record in caplog.records]
    assert any("BINARY [" in line for line in lines), "frames were logged"
    assert any("no memory" in line for line in lines), "the failed forward was logged"
    assert any("handshake" in line or "HTTP/1.1" in line for line in lines), "and the sockets"
    said = [[t for t in ids if t != ByteTokenizer.END] for ids in (prompt, *spoken)]
    runs = [ids[at : at + 5] for ids in said for at in range(len(ids) - 4)]
    tells = {
        form
        for ids in runs
        for form in (
            bytes(ids).decode(),
            ", ".join(map(str, ids)),
            " ".join(map(str, ids)),
            bytes(ids).hex(" "),
        )
    }
    assert [line for line in lines if any(tell in line for tell in tells)] == []


def test_a_line_that_a_parser_could_not_read_is_not_quoted(caplog: pytest.LogCaptureFixture):
    """Field case 34: websockets logs "! invalid handshake" with the error, which quotes it."""
    log = discreet("outrider.test.socket")
    with caplog.at_level(logging.DEBUG, logger="outrider.test.socket"):
        for message in ("! invalid handshake", "opening handshake failed", "another"):
            try:
                raise ValueError(f"bad header: {SECRET}")
            except ValueError:
                log.debug(message, exc_info=True)
    lines = [logging.Formatter().format(record) for record in caplog.records]
    assert lines[:2] == ["! invalid handshake", "opening handshake failed"]
    assert "Traceback" in lines[2], "only what quotes strangers is cut"


# -- strangers, and the end -------------------------------------------------------------------


@contextlib.asynccontextmanager
async def strangers(port: int, count: int) -> AsyncIterator[list[asyncio.Future[bytes]]]:
    """Sockets that never say a word; each future is done when the server has closed its own."""
    async with contextlib.AsyncExitStack() as stack:
        ends: list[asyncio.Future[bytes]] = []
        for _ in range(count):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            ends.append(asyncio.ensure_future(reader.read()))
        yield ends
        for end in ends:
            end.cancel()
        await asyncio.gather(*ends, return_exceptions=True)


def test_strangers_who_never_ask_are_counted(monkeypatch: pytest.MonkeyPatch):
    """Sockets before the upgrade have a cap; when they go, an edge gets in."""
    monkeypatch.setattr(listening, "MAX_SOCKETS", 5)
    monkeypatch.setattr(cloud_module, "OPEN_TIMEOUT_S", 600.0)

    async def work() -> None:
        async with server() as verifier:
            async with strangers(verifier.port, 12) as ends:
                await until(lambda: sum(end.done() for end in ends) == 7)
                assert len(verifier._guests) == 5
            await until(lambda: not verifier._guests)
            async with edge(verifier.port, drafter()) as runtime:
                same(await hear(await runtime.stream(ask(SHORT))), alone(SHORT))
                assert len(verifier._guests) == 1

    run(work())


def test_strangers_who_never_ask_are_let_go(monkeypatch: pytest.MonkeyPatch):
    """Long before the library's own 10 s."""
    monkeypatch.setattr(cloud_module, "OPEN_TIMEOUT_S", 0.05)

    async def work() -> None:
        async with server() as verifier, strangers(verifier.port, 3) as ends:
            await asyncio.wait_for(asyncio.wait(ends), 6.0)
            await until(lambda: not verifier._guests)

    run(work())


def test_a_system_without_sockets_is_told_in_one_line(caplog: pytest.LogCaptureFixture):
    """asyncio reports every failed accept() with a traceback; anything else it says is kept."""

    async def work() -> None:
        loop = asyncio.get_running_loop()
        calm_accepts(loop)
        full = OSError(errno.EMFILE, "Too many open files")
        for _ in range(1000):
            loop.call_exception_handler(
                {"message": "socket.accept() out of system resource", "exception": full}
            )
        loop.call_exception_handler({"message": "a bug", "exception": ValueError("ours")})
        loop.call_exception_handler({"message": "a bug with files", "exception": full})

    run(work())
    assert [r.getMessage() for r in caplog.records if r.name == "outrider.cloud"] == [
        "new connections must wait: Too many open files (ulimit -n)"
    ]
    bugs = [r for r in caplog.records if r.name == "asyncio"]
    assert [r.getMessage().splitlines()[0] for r in bugs] == ["a bug", "a bug with files"]


def test_stopping_does_not_wait_for_a_peer_that_sleeps(monkeypatch: pytest.MonkeyPatch):
    """A peer that reads nothing and says no goodbye: cut after HURRY_S, not after a close timeout
    (here as long as a test may last)."""
    for module in (cloud_module, cloudruntime, peers):
        monkeypatch.setattr(module, "FINISH_S", 600.0)
    monkeypatch.setattr(cloudruntime, "HURRY_S", 0.05)

    async def work() -> None:
        async with server() as verifier:
            reader, writer = await asyncio.open_connection("127.0.0.1", verifier.port)
            head = "\r\n".join((f"GET {PATH} HTTP/1.1", "Host: h", *UPGRADE, "", ""))
            writer.write(head.encode())
            await until(lambda: bool(verifier._peers))
            await verifier.stop()
            assert not verifier._guests
            writer.close()
            assert reader is not None

    run(work())


def test_an_impatient_stop_ends_a_drain_at_once(monkeypatch: pytest.MonkeyPatch):
    """As `outrider cloud` does at Ctrl-C: a session runs, its edge reads nothing any more."""
    for module in (cloud_module, cloudruntime, peers):
        monkeypatch.setattr(module, "FINISH_S", 600.0)
    monkeypatch.setattr(cloudruntime, "HURRY_S", 0.05)

    async def work() -> None:
        async with server(pace=0.001) as verifier, stranger(verifier.port) as raw:
            await raw.send(encode(opening()))
            await until(lambda: verifier.service.forwards > 3)
            raw.transport.pause_reading()
            draining = asyncio.ensure_future(verifier.stop(drain=3600.0))
            await asyncio.sleep(0)
            await verifier.stop()
            await draining
            raw.transport.abort()

    run(work())


def test_a_drain_does_not_wait_for_sessions_that_nobody_carries(monkeypatch: pytest.MonkeyPatch):
    """The dead edge's session goes after DETACHED_S; the living one's answer is finished."""
    monkeypatch.setattr(cloudruntime, "DETACHED_S", 0.05)

    async def work() -> None:
        params = replace(SHORT, max_tokens=60, ignore_eos=True)
        async with server(pace=0.01, service={"grace": 3600.0}) as verifier:
            async with stranger(verifier.port) as raw:
                await raw.send(encode(opening()))
                await until(lambda: verifier.service.sessions == 1)
                raw.transport.abort()
            async with edge(verifier.port, drafter()) as runtime:
                answer = asyncio.ensure_future(hear(await runtime.stream(ask(params))))
                await until(lambda: verifier.service.sessions == 2 and len(verifier._peers) == 1)
                await verifier.stop(drain=3600.0)
                same(await answer, alone(params))

    run(work())


@pytest.mark.parametrize("pace", [-1.0, float("nan"), float("inf")])
def test_a_pace_is_a_time(pace: float):
    with pytest.raises(ConfigurationError, match="pace"):
        CloudConfig(pace=pace)


def test_the_greeting_says_what_is_slow_on_purpose():
    async def work() -> None:
        async with server(pace=0.0125) as verifier, edge(verifier.port, drafter()) as runtime:
            await hear(await runtime.stream(ask(SHORT)))
            assert runtime.peer is not None
            assert runtime.peer.pace_ms == 12.5

    run(work())


# -- greetings --------------------------------------------------------------------------------


def test_another_tokenizer_is_refused_with_the_reason():
    other = ByteTokenizer({257: b"extra"})

    async def work() -> None:
        async with pair() as both:
            config = EdgeConfig(url=f"ws://127.0.0.1:{both.cloud.port}")
            async with EdgeRuntime(config, other, drafter(), context_length=4096) as runtime:
                with pytest.raises(CloudError) as refused:
                    await hear(await runtime.stream(ask(SHORT)))
            assert refused.value.code is Code.VOCABULARY
            assert "different tokenizers" in str(refused.value)
            same(await both.ask(ask(SHORT)), alone(SHORT))

    run(work())


@pytest.mark.parametrize(
    ("change", "code", "close"),
    [
        ({"versions": (0,)}, Code.VERSION, 1008),
        ({"versions": ()}, Code.VERSION, 1008),
        ({"fingerprint": "another"}, Code.VOCABULARY, 1008),
        ({"vocab_size": 5}, Code.VOCABULARY, 1008),
        ({"role": "cloud"}, Code.STATE, 1002),
    ],
)
def test_greetings_that_do_not_fit(change: dict[str, object], code: Code, close: int):
    async def work() -> None:
        async with server() as verifier, stranger(verifier.port, greet=False) as raw:
            await raw.send(encode(hello(**change)))
            error, closed = await end_of(raw)
            assert error is not None
            assert (error.code, error.session, closed) == (code, None, close)
            await until(lambda: not verifier._peers)

    run(work())


def test_a_peer_that_never_greets_is_let_go():
    async def work() -> None:
        async with server(heartbeat=0.1) as verifier, stranger(verifier.port, greet=False) as raw:
            await until(lambda: bool(verifier._peers))
            _, closed = await end_of(raw)
            assert closed == 1006
            await until(lambda: not verifier._peers)

    run(work())


# -- nonsense ---------------------------------------------------------------------------------


def bomb(marker: Path) -> bytes:
    class Touch:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(marker),)

    return pickle.dumps(Touch())


NONSENSE: dict[str, tuple[Callable[[Path], bytes | str], Code, int]] = {
    "a pickle": (bomb, Code.MALFORMED, 1007),
    "a pickle as a control frame": (lambda p: b"\x10" + bomb(p), Code.MALFORMED, 1007),
    "random bytes": (lambda _: bytes(range(256)) * 4, Code.MALFORMED, 1007),
    "an empty frame": (lambda _: b"", Code.MALFORMED, 1007),
    "text": (lambda _: '{"type": "hello"}', Code.MALFORMED, 1007),
    "an empty text": (lambda _: "", Code.MALFORMED, 1007),
    "a cut frame": (
        lambda _: encode(Draft(session=1, epoch=0, start=3, tokens=(1, 2)))[:-1],
        Code.MALFORMED,
        1007,
    ),
    "an array of 2**32 - 1": (lambda _: b"\x10\xdd\xff\xff\xff\xff", Code.MALFORMED, 1007),
    "a map of 2**32 - 1": (lambda _: b"\x10\xdf\xff\xff\xff\xff", Code.MALFORMED, 1007),
    "deep nesting": (lambda _: b"\x10" + b"\x91" * 100_000, Code.MALFORMED, 1007),
    "a second greeting": (lambda _: encode(hello()), Code.STATE, 1002),
    "the cloud's own words": (lambda _: encode(Opened(session=1, base=3)), Code.STATE, 1002),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_ends_its_connection_alone(what: str, tmp_path: Path):
    """Field case 29: refused with a code, the peer closed, nothing run, everybody else goes on."""
    make, code, close = NONSENSE[what]
    marker = tmp_path / "marker"

    async def work() -> None:
        async with pair(cloud={"pace": 0.001}) as both:
            params = replace(LONG, max_tokens=40)
            answer = asyncio.ensure_future(both.ask(ask(params)))
            async with stranger(both.cloud.port) as raw:
                await raw.send(encode(opening()))
                await until(lambda: both.cloud.service.sessions == 2)
                await raw.send(make(marker))
                error, closed = await end_of(raw)
                assert error is not None
                assert (error.code, error.session, closed) == (code, None, close)
            same(await answer, alone(params))
            assert both.edge._client.tally.dials == 1
            assert not marker.exists()
            both.cloud.service.tick(time.monotonic() + 3600)  # its session's grace is over
            await both.idle_cloud()

    run(work())


@pytest.mark.parametrize("size", [MAX_FRAME_BYTES + 1, 0xFFFFFFFF])
def test_a_giant_header_and_then_silence(size: int):
    """Field case 30: refused by its length, before there is memory for it."""

    async def work() -> None:
        async with pair() as both:
            reader, writer = await asyncio.open_connection("127.0.0.1", both.cloud.port)
            offer = "Sec-WebSocket-Extensions: permessage-deflate"
            head = "\r\n".join((f"GET {PATH} HTTP/1.1", "Host: h", *UPGRADE, offer, "", ""))
            writer.write(head.encode())
            agreed = await reader.readuntil(b"\r\n\r\n")
            assert b" 101 " in agreed
            assert b"extensions" not in agreed.lower(), "a small frame could be a large one"
            tracemalloc.start()
            writer.write(b"\x82\xff" + size.to_bytes(8, "big") + b"mask")
            said = await reader.read()  # until the server closes
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < 5e6
            assert (1009).to_bytes(2, "big") in said[-80:], "close code: message too big"
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            await until(lambda: len(both.cloud._peers) <= 1)
            same(await both.ask(ask(SHORT)), alone(SHORT))
            ((edge_end),) = both.cloud._peers.values()
            asked = edge_end.socket.raw.request.headers  # type: ignore[union-attr]
            assert "Sec-WebSocket-Extensions" not in asked, "nor does an edge ask for it"

    run(work())


@pytest.mark.parametrize("count", [MAX_BLOCK, 10_000])
def test_too_many_drafts_cost_a_session_or_a_connection_nothing_else(count: int):
    """Field case 30: what fits a frame is cut to the window; more than fits ends the link."""

    async def work() -> None:
        async with server(pace=0.001) as verifier, stranger(verifier.port) as raw:
            await raw.send(encode(opening(step="wait", held=True)))
            await until(lambda: verifier.service.sessions == 1)
            draft = Draft(session=1, epoch=0, start=3, tokens=(97,) * min(count, MAX_BLOCK))
            frame = encode(draft)
            if count > MAX_BLOCK:
                # Count and ids as the packer would write them, had it no limit of its own.
                frame = frame[: -MAX_BLOCK - 2] + b"\x90\x4e" + b"\x61" * count
            await raw.send(frame)
            if count > MAX_BLOCK:
                error, closed = await end_of(raw)
                assert error is not None
                assert (error.code, closed) == (Code.TOO_LARGE, 1009)
                return
            await raw.send(encode(Ping(stamp=1.0)))
            while not isinstance(decode(await raw.recv()), Pong):  # type: ignore[arg-type]
                pass
            (entry,) = verifier.service._entries.values()
            assert entry.session.dropped.overflow >= count - 256

    run(work())


def test_sessions_beyond_the_limit_are_told_busy():
    async def work() -> None:
        limits = {"max_sessions_per_connection": 2}
        async with server(pace=0.002, service=limits) as verifier, stranger(verifier.port) as raw:
            for number in (1, 2, 3):
                await raw.send(encode(opening(number)))
            while True:
                message = decode(await raw.recv())  # type: ignore[arg-type]
                if isinstance(message, Error):
                    break
            assert (message.code, message.session) == (Code.BUSY, 3)
            assert verifier.service.sessions == 2

    run(work())


# -- slow readers and long prompts ------------------------------------------------------------


def test_a_slow_reader_pauses_and_is_dropped_when_it_stays_away(monkeypatch: pytest.MonkeyPatch):
    """Field case 31: its forwards stop at a bound, go on when it reads, and others never wait."""
    for module in (cloud_module, peers):
        monkeypatch.setattr(module, "MAX_UNSENT_BYTES", 4096)
    monkeypatch.setattr(peers, "DROP_UNSENT_BYTES", 32 * 1024)

    async def work() -> None:
        # A heartbeat far away: it is not silence that ends this link.
        async with pair(cloud={"heartbeat": 10 * PATIENCE}) as both:
            async with stranger(both.cloud.port) as raw:
                raw.transport.pause_reading()
                await until(lambda: bool(both.cloud._peers))
                slow = max(both.cloud._peers)
                # The system's own buffers are large; here they shall not hide the reader's pace.
                ends = (raw, both.cloud._peers[slow].socket.raw)
                for end, option in zip(ends, (socket.SO_RCVBUF, socket.SO_SNDBUF), strict=True):
                    wire = end.transport.get_extra_info("socket")
                    wire.setsockopt(socket.SOL_SOCKET, option, 4096)
                await raw.send(encode(opening(sampling=to_wire(replace(LONG, logprobs=20)))))
                await until(lambda: slow in both.cloud.service._blocked)
                passes = both.target.passes
                for _ in range(3):  # the others are served meanwhile
                    same(await both.ask(ask(SHORT)), alone(SHORT))
                peer = both.cloud._peers[slow]
                assert peer.unsent < 32 * 1024
                (entry,) = both.cloud.service._entries.values()
                at = -1
                while at != entry.session.generation.sequence.base:  # until the last buffer is full
                    at = entry.session.generation.sequence.base
                    await asyncio.sleep(0.1)
                assert at < 1000, "its forwards pause"
                assert both.target.passes > passes
                raw.transport.resume_reading()
                drain = asyncio.ensure_future(end_of(raw))
                await until(lambda: entry.session.generation.sequence.base > at + 50)
                raw.transport.pause_reading()
                drain.cancel()
                await asyncio.gather(drain, return_exceptions=True)
                # It will not read, and asks for more and more: the link goes.
                with contextlib.suppress(ConnectionClosed):
                    for _ in range(200_000):
                        await raw.send(encode(Ping(stamp=1.0)))
                        if slow not in both.cloud._peers:
                            break
                await until(lambda: slow not in both.cloud._peers)
                raw.transport.abort()
            same(await both.ask(ask(SHORT)), alone(SHORT))
            both.cloud.service.tick(time.monotonic() + 3600)

    run(work())


def test_health_answers_and_streams_run_while_a_forward_does():
    """Field case 33: the engine's thread is busy for as long as the test likes; the loop is not."""
    started, go = threading.Event(), threading.Event()

    def hold(blocks: object) -> None:
        started.set()
        go.wait(30)

    model = Watched(TARGET)
    model.before = hold

    async def work() -> None:
        async with pair(model=model) as both:
            answer = asyncio.ensure_future(both.ask(ask(SHORT)))
            try:
                await until(started.is_set)
                for _ in range(5):
                    status, _ = await http(both.cloud.port, HEALTH_PATH)
                    assert status == 200
                    async with stranger(both.cloud.port) as raw:
                        await raw.send(encode(Ping(stamp=1.0)))
                        while not isinstance(decode(await raw.recv()), Pong):  # type: ignore[arg-type]
                            pass
                assert not answer.done()
            finally:
                go.set()
            same(await answer, alone(SHORT))

    run(work())


class Ticks(threading.Thread):
    """Counts beside the loop, on the same busy machine: what slows the loop down slows it too."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.count = 0
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.01):
            self.count += 1


MOST_TICKS: Final = 100
"""Ticks that one turn of the loop may last: reading 600,000 ids took 2 or 3 on two cores with a
load of 4; three seconds of anything that lets other threads run are nearly 300."""


def test_a_huge_prompt_does_not_freeze_the_loop():
    """Field case 33: 600,000 ids are parsed and checked between two turns of the loop, and go into
    the engine in pieces, while a small answer comes and goes."""
    size = 600_000
    model = Watched(TARGET, context_length=2_000_000)
    largest = 0

    def watch(blocks: Sequence[Block]) -> None:
        nonlocal largest
        largest = max(largest, sum(len(block.tokens) for block in blocks))

    model.before = watch
    ticks = Ticks()
    gaps = [0]

    async def pulse() -> None:
        last = ticks.count
        while not ticks.over.is_set():
            await asyncio.sleep(0.005)
            gaps.append(ticks.count - last)
            last = ticks.count

    async def work() -> None:
        async with pair(model=model) as both, stranger(both.cloud.port) as raw:
            beat = asyncio.ensure_future(pulse())
            await raw.send(encode(opening(prompt=(97,) * size)))
            await until(lambda: both.cloud.service.sessions == 1)
            (entry,) = both.cloud.service._entries.values()
            await until(lambda: entry.key in both.cloud.desk._slots)
            same(await both.ask(ask(SHORT)), alone(SHORT))
            held = model.length(both.cloud.desk._slots[entry.key])
            assert 0 < held < size, "the small answer did not wait for the huge prompt"
            assert entry.session.generation.sequence.base == size
            ticks.over.set()
            await beat
            raw.transport.abort()
            await until(lambda: len(both.cloud._peers) == 1)
            both.cloud.service.tick(time.monotonic() + 3600)

    ticks.start()
    run(work())
    ticks.join()
    assert largest <= PREFILL_CHUNK + len(PROMPT) + 64
    assert max(gaps) < MOST_TICKS


def test_a_running_answer_gets_a_token_between_the_pieces_of_a_prompt():
    """Field case 33: and the long prompt's own answer is the one it would have been."""
    prompt = (*PROMPT, *(97 + i % 26 for i in range(6 * PREFILL_CHUNK)))
    model = toy(TARGET, context_length=2 * len(prompt))
    pieces: list[int] = []
    tokens: list[int] = []

    async def work() -> None:
        async with pair(model=model, cloud={"pace": 0.002}) as both:
            stream = await both.edge.stream(ask(LONG, Schedule.CLOUD_ONLY))
            running = asyncio.ensure_future(hear(stream))
            await until(lambda: bool(stream._marks))
            (first,) = both.cloud.service._entries.values()
            real = both.cloud.desk.run

            def watched(jobs: Sequence[DeskJob]) -> list[DeskResult]:
                results = real(jobs)
                by_key = {r.key: r for r in results}
                tokens.append(len(by_key[first.key].rows) if first.key in by_key else 0)
                pieces.append(sum(len(r.rows) == 0 for r in results))
                return results

            both.cloud.desk.run = watched  # type: ignore[method-assign]
            async with edge(both.cloud.port, drafter(), context_length=2 * len(prompt)) as other:
                heard = await hear(await other.stream(ask(SHORT, prompt=prompt)))
            same(heard, alone(SHORT, prompt))
            assert sum(pieces) >= 6
            assert all(rows for rows, piece in zip(tokens, pieces, strict=True) if piece)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await both.idle_cloud()

    run(work())


# -- TLS --------------------------------------------------------------------------------------


def openssl(*arguments: str) -> None:
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("no openssl binary")
    subprocess.run([program, *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, made on the spot."""
    folder = tmp_path_factory.mktemp("tls")
    made, key = folder / "cert.pem", folder / "key.pem"
    openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-days", "2", "-subj", "/CN=outrider test", "-addext", "subjectAltName=IP:127.0.0.1"),
        *("-keyout", str(key), "-out", str(made)),
    )
    return made, key


def test_tls_with_a_certificate_of_ones_own(certificate: tuple[Path, Path]):
    made, key = certificate

    async def work() -> None:
        verifier: CloudServer
        async with server(tokens=TOKENS, certificate=made, private_key=key, pace=0.001) as verifier:
            url = f"wss://127.0.0.1:{verifier.port}"
            async with edge(0, drafter(), url=url, token=SECRET, ca_file=str(made)) as runtime:
                for schedule in (Schedule.SYNC, Schedule.FREERUN):
                    same(await hear(await runtime.stream(ask(SHORT, schedule))), alone(SHORT))
            # Without trusting it: refused at once, with the reason, and no token was sent.
            async with edge(0, drafter(), url=url, token=SECRET, give_up=600.0) as runtime:
                with pytest.raises(CloudError, match=r"not trusted.*--ca-file") as refused:
                    await hear(await runtime.stream(ask(SHORT)))
                assert refused.value.code is Code.UNREACHABLE
                assert str(refused.value).count("not trusted") == 1
            # A plain client at a TLS port gives up, it does not hang.
            plain = f"ws://127.0.0.1:{verifier.port}"
            async with edge(0, drafter(), url=plain, token=SECRET, give_up=0.3) as runtime:
                with pytest.raises(CloudError, match="try wss://"):
                    await hear(await runtime.stream(ask(SHORT)))
            loud = f"WSS://127.0.0.1:{verifier.port}/"
            async with edge(0, drafter(), url=loud, token=SECRET, ca_file=str(made)) as runtime:
                same(await hear(await runtime.stream(ask(SHORT))), alone(SHORT))
        async with server() as verifier:
            url = f"wss://127.0.0.1:{verifier.port}"
            async with edge(0, drafter(), url=url, ca_file=str(made), give_up=0.3) as runtime:
                with pytest.raises(CloudError, match="try ws://"):
                    await hear(await runtime.stream(ask(SHORT)))

    run(work())


def test_certificates_that_cannot_be_read(tmp_path: Path):
    junk = tmp_path / "junk.pem"
    junk.write_text("no certificate")
    for file in (junk, tmp_path / "missing.pem"):
        with pytest.raises(OSError, match=file.name):
            edge(1, drafter(), url="wss://127.0.0.1:1", ca_file=str(file))

    async def work() -> None:
        verifier = server(certificate=junk, private_key=junk)
        with pytest.raises(ConfigurationError, match=r"junk\.pem"):
            await verifier.start()
        await verifier.stop()

    run(work())


def test_a_servers_certificate_is_blamed_by_file_and_option(
    certificate: tuple[Path, Path], tmp_path: Path
):
    made, key = certificate
    junk, missing, locked, other = (tmp_path / n for n in ("junk", "missing", "locked", "other"))
    junk.write_bytes(bytes(range(256)))
    openssl("pkey", "-in", str(key), "-aes128", "-passout", "pass:x", "-out", str(locked))
    openssl("genpkey", "-algorithm", "RSA", "-out", str(other))
    for chain, private, words in (
        (junk, key, f"--tls-cert: {junk} holds no PEM certificate"),
        (missing, key, f"--tls-cert: cannot read {missing}"),
        (key, key, f"--tls-cert: {key} holds no PEM certificate"),
        (made, junk, f"--tls-key: {junk} holds no PEM private key"),
        (made, missing, f"--tls-key: cannot read {missing}"),
        (made, locked, f"--tls-key: {locked} is encrypted"),
        (made, other, f"--tls-key: {other} does not belong to the certificate {made}"),
    ):
        with pytest.raises(ConfigurationError) as refused:
            tls_context(chain, private)
        assert words in str(refused.value)
    assert tls_context(made, key) is not None
    assert tls_context(None, None) is None


# -- the source itself ------------------------------------------------------------------------


def test_no_code_travels():
    """Field case 29: nothing on a network path can turn bytes into code."""
    root = Path(outrider.__file__).parent
    danger = re.compile(r"\b(pickle|marshal|yaml|shelve|__import__)\b|(?<![\w.])(eval|exec)\(")
    for folder in ("proto", "session", "runtime"):
        for file in (root / folder).glob("*.py"):
            assert not danger.search(file.read_text(encoding="utf-8")), file.name
