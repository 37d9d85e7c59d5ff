"""`outrider cloud`, `generate --cloud` and `demo` as real processes on toy models."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from live import hear, run, server, until
from outrider import cli
from outrider.commands import remote
from outrider.core.tokens import Origin, SamplingParams
from outrider.engines.load import load_target, load_vocabulary
from outrider.proto.messages import Code
from outrider.runtime import process
from outrider.runtime.access import read_tokens
from outrider.runtime.cores import pin
from outrider.runtime.dialling import greeting
from outrider.runtime.edge import EdgeRuntime
from outrider.runtime.edgeconfig import EdgeConfig
from outrider.runtime.edgerequest import EdgeRequest
from outrider.runtime.failures import CloudError
from outrider.runtime.local import GenerationRequest, LocalGenerator
from outrider.runtime.process import CloudProcess, CloudProcessError
from outrider.runtime.status import fetch_status
from outrider.session.generation import Step
from outrider.session.schedules import Schedule

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
TARGET = ("--target", "toy:1")
DRAFT = ("--draft", "toy:1:0.4")
ANSWER = ("--seed", "7", "--max-tokens", "24", "--temperature", "1", "--ignore-eos")


@dataclass(frozen=True, slots=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The one line of an error, and nothing else on either stream."""
        assert self.out == ""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("error: ")
        return lines[0]


async def start(*arguments: str, **variables: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "outrider",
        *arguments,
        stdout=pipe,
        stderr=pipe,
        env=os.environ | variables,
    )


async def outrider(*arguments: str, **variables: str) -> Ended:
    process = await start(*arguments, **variables)
    out, err = await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())


async def generate(url: str, *arguments: str, **variables: str) -> Ended:
    return await outrider("generate", "hi", *TARGET, "--cloud", url, *arguments, **variables)


def expected(prompt: str = "hi", *, seed: int = 7, max_tokens: int = 24) -> list[int]:
    target = load_target("toy:1")
    params = SamplingParams(seed=seed, max_tokens=max_tokens, temperature=1.0, ignore_eos=True)
    ids = tuple(target.tokenizer.chat([{"role": "user", "content": prompt}]))
    request = GenerationRequest(prompt_ids=ids, params=params, draft_length=0)
    return list(LocalGenerator(target.model, target.tokenizer).generate(request).token_ids)


@contextlib.asynccontextmanager
async def probe(url: str) -> AsyncIterator[EdgeRuntime]:
    """An edge of ours beside the process under test."""
    vocabulary = load_vocabulary("toy:1")
    async with EdgeRuntime(EdgeConfig(url=url), vocabulary.tokenizer) as runtime:
        yield runtime


async def short_answer(runtime: EdgeRuntime) -> Sequence[int]:
    params = SamplingParams(seed=1, max_tokens=3)
    request = EdgeRequest(prompt_ids=(1, 2), params=params, schedule=Schedule.CLOUD_ONLY)
    return (await hear(await runtime.stream(request))).tokens


# -- answers ----------------------------------------------------------------------------------


def test_an_answer_through_two_processes(tmp_path: Path):
    """JSON, its keys and the trace of rounds; text over a shaped link: the target's own."""
    trace = tmp_path / "trace.jsonl"
    keys = (
        "rounds schedule bytes_up bytes_down payload_up payload_down reconnects near_ties".split()
    )

    async def work() -> None:
        trace.write_text("an older trace\n" * 1000)
        async with CloudProcess(["--model", "toy:1", "--target-pace", "2.5"]) as cloud:
            options = (
                "--json",
                "--schedule",
                "sync",
                "--controller",
                "fixed",
                "--trace",
                str(trace),
            )
            end, plain = await asyncio.gather(
                generate(cloud.url, *DRAFT, *ANSWER, *options),
                generate(cloud.url, *DRAFT, *ANSWER, "--link", "rtt=4ms,up=1mbit"),
            )
        ids = expected()
        assert (end.code, end.err) == (0, "")
        facts = json.loads(end.out)
        assert set(keys) <= set(facts)
        assert facts["token_ids"] == ids
        assert facts["confirmed"] is True
        assert facts["target_pace_ms"] == 2.5
        assert "2.5 ms slower on purpose" in plain.err
        assert (facts["finish_reason"], facts["reconnects"]) == ("length", 0)
        assert 0 < facts["payload_up"] < facts["bytes_up"]
        assert 0 < facts["payload_down"] < facts["bytes_down"]
        rounds = [json.loads(line) for line in trace.read_text().splitlines()]
        assert [t for r in rounds for t in r["tokens"]] == ids
        assert [o for r in rounds for o in r["origins"]] == facts["origins"]
        assert len(rounds) == facts["rounds"] < len(ids), "drafts were accepted"
        times = [r["t_s"] for r in rounds]
        assert times == sorted(times)
        assert plain.code == 0
        assert plain.out == facts["text"] + "\n"
        assert "freerun" in plain.err
        assert "bytes up" in plain.err

    run(work())


# -- refusals ---------------------------------------------------------------------------------


def test_what_cannot_work_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The command in a thread of this process, the verifier in another."""
    tokens = tmp_path / "tokens"
    tokens.write_text("alice:right\n")
    missing = str(tmp_path / "missing")
    kept = tmp_path / "kept.jsonl"
    monkeypatch.setattr(remote, "PATIENCE_S", 0.3)

    async def command(*arguments: str) -> Ended:
        code = await asyncio.to_thread(cli.run, list(arguments))
        said = capsys.readouterr()
        return Ended(code, said.out, said.err)

    async def refused(url: str, *more: str, code: int, words: str) -> None:
        end = await command("generate", "hi", *TARGET, *DRAFT, "--cloud", url, *ANSWER, *more)
        assert end.code == code, end.err
        assert words in end.complaint
        assert "SECRET" not in end.err

    async def work() -> None:
        async with server(tokens=read_tokens(tokens)) as verifier:
            url = f"ws://127.0.0.1:{verifier.port}"
            await refused(url, code=2, words="token")
            monkeypatch.setenv(remote.TOKEN_VARIABLE, "wrong-SECRET")
            await refused(url, code=2, words="token")
            monkeypatch.setenv(remote.TOKEN_VARIABLE, "right")
            await refused(f"{url}/elsewhere", code=1, words="no Outrider verifier")
            await refused(url, "--link", "rtt=fast", code=2, words="--link")
            await refused(url, "--link", f"up-trace={missing}", code=2, words="--link")
            await refused(url, "--token-file", missing, code=2, words="missing")
            await refused(url, "--trace", f"{missing}/x", code=2, words="missing")
            busy = await command(
                "cloud", "--model", "toy:1", "--listen", f"127.0.0.1:{verifier.port}"
            )
            assert busy.code == 1
            assert f"cannot listen on 127.0.0.1:{verifier.port}: " in busy.complaint
            assert "in use; give another --listen" in busy.complaint
            dead = url
            kept.write_text("an older trace\n")
        await refused(dead, "--trace", str(kept), code=1, words=f"cannot reach {dead}")
        assert kept.read_text() == "an older trace\n"
        await refused("ws://127.0.0.1:http", code=2, words="--cloud: must be ws://")
        await refused("https://user:SECRET@127.0.0.1", code=2, words="--cloud: must be ws://")
        secure = dead.replace("ws:", "wss:")
        await refused(secure, "--ca-file", missing, code=2, words="missing")
        for listen, code, words in (
            ("0.0.0.0:0", 2, "--token-file"),
            ("here", 2, "HOST:PORT"),
            ("127.0.0.1:70000", 2, "HOST:PORT"),
        ):
            end = await command("cloud", "--model", "toy:1", "--listen", listen)
            assert end.code == code
            assert words in end.complaint

    run(work())


@pytest.mark.parametrize(
    "token", [b"caf\xc3\xa9SECRET", b"\0\1SECRET", b"SECRET\xff\xfe", b"SECRET two", b"a:", b"# a"]
)
def test_a_token_that_cannot_be_sent_is_refused_at_once_and_not_shown(
    token: bytes,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(remote, "must_resolve", lambda _: pytest.fail("it went on"))
    file = tmp_path / "token"
    file.write_bytes(token)
    for options, source in ((["--token-file", str(file)], "--token-file"), ([], "OUTRIDER_TOKEN")):
        if not options:
            if b"SECRET" not in token or b"\0" in token:
                continue  # cannot be in an environment, or is a fine token there
            monkeypatch.setenv(remote.TOKEN_VARIABLE, os.fsdecode(token) + "\r\nX-Evil: 1")
        assert cli.run(["generate", "hi", "--cloud", "ws://127.0.0.1:1", *TARGET, *options]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith(f"error: {source}")
        assert len(said.err.splitlines()) == 1
        assert "SECRET" not in said.err


def test_a_token_in_clear_to_another_host_needs_a_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    class Reached(Exception):
        pass

    def resolve(_: str) -> None:
        raise Reached

    monkeypatch.setattr(remote, "must_resolve", resolve)
    monkeypatch.setenv(remote.TOKEN_VARIABLE, "SECRET")
    words = ["generate", "hi", *TARGET, "--cloud", "ws://192.0.2.1:9"]
    assert cli.run(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: --cloud: is ws://")
    assert "--insecure" in err
    with pytest.raises(Reached):
        cli.run([*words, "--insecure"])


def test_a_host_without_an_address_is_told_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def nobody(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    monkeypatch.setattr(asyncio, "run", lambda _: pytest.fail("it went on"))
    assert cli.run(["generate", "hi", *TARGET, "--cloud", "wss://nosuch.invalid:1"]) == 1
    assert capsys.readouterr().err == (
        "error: --cloud: cannot find nosuch.invalid: Name or service not known\n"
    )


def test_patience_is_short_for_a_first_contact_only(monkeypatch: pytest.MonkeyPatch):
    """A verifier that has greeted may be silent for longer than one that never did."""
    monkeypatch.setattr(remote, "PATIENCE_S", 0.01)
    vocabulary = load_vocabulary("toy:1")

    async def work() -> None:
        config = EdgeConfig(url="ws://127.0.0.1:1")
        async with EdgeRuntime(config, vocabulary.tokenizer) as runtime:
            assert config.give_up == 30.0
            go = asyncio.Event()

            class Late:
                async def told(self) -> AsyncIterator[Step]:
                    await go.wait()
                    yield late

            late = Step(tokens=(1,), pieces=("a",), origins=(Origin.TARGET,))
            with pytest.raises(CloudError, match="no verifier has answered") as gone:
                await anext(remote.told(Late(), runtime))
            assert gone.value.code is Code.UNREACHABLE
            runtime.peer = greeting(vocabulary.tokenizer, 4096)
            first = asyncio.ensure_future(anext(remote.told(Late(), runtime)))
            asyncio.get_running_loop().call_later(0.05, go.set)
            assert await first is late

    run(work())


def test_what_the_command_asks_of_the_edge(monkeypatch: pytest.MonkeyPatch):
    seen = []

    async def ask(config: EdgeConfig, *_: object, **__: object) -> None:
        seen.append(config)

    monkeypatch.setattr(remote, "_ask", ask)
    words = ["generate", "hi", *TARGET, *DRAFT, "--cloud", "ws://127.0.0.1:1"]
    assert cli.run(words) == 0
    assert seen == [EdgeConfig(url="ws://127.0.0.1:1")], "the edge's own patience, too"


async def said(pipe: asyncio.StreamReader, words: str) -> str:
    """The line of a process that holds these words, once it has said it."""
    async for line in pipe:
        if words in (text := line.decode()):
            return text
    raise AssertionError(f"it ended without saying {words!r}")


def test_who_waits_is_told_that_the_verifier_is_silent_or_gone_and_gets_the_same_answer():
    """It showed nothing for half a minute. Stopped, a verifier is like one behind a cut cable:
    nothing closes; killed, it is gone at once."""
    words = ["--model", "toy:1", "--target-pace", "30"]

    async def work() -> None:
        cloud = CloudProcess(words)
        await cloud.start()
        port = cloud.url.rpartition(":")[2]
        successor = CloudProcess([*words, "--listen", f"127.0.0.1:{port}"])
        asked = ("--seed", "7", "--max-tokens", "200", "--temperature", "1", "--ignore-eos")
        more = ("--schedule", "sync", "--json")
        edge = await start(
            "generate", "hi", *TARGET, *DRAFT, "--cloud", cloud.url, *asked, *more
        )  # fmt: skip
        assert edge.stderr is not None
        try:
            await busy(cloud.url)
            cloud.signal(signal.SIGSTOP)
            silent = await said(edge.stderr, "nothing heard of the verifier for 3 s")
            assert "reconnecting in 7 s" in silent
            cloud.signal(signal.SIGCONT)
            await said(edge.stderr, "the verifier is there again after")
            cloud.kill()
            gone = await said(edge.stderr, "no link to the verifier (")
            assert "): reconnecting, attempt 1, gives up in 30 s" in gone
            await cloud.wait()
            await successor.start()
            await said(edge.stderr, "the verifier is there again after")
            out, _ = await edge.communicate()
        finally:
            cloud.signal(signal.SIGCONT)
            await cloud.stop()
            await successor.stop()
        assert edge.returncode == 0
        facts = json.loads(out)
        assert facts["token_ids"] == expected(max_tokens=200)
        assert facts["reconnects"] == 1

    run(work())


async def busy(url: str) -> None:
    """Until the verifier has an answer under way."""
    facts: dict[str, object] | None = None
    while not facts or not facts["sessions"]:
        await asyncio.sleep(0.02)
        facts = await fetch_status(EdgeConfig(url=url))


def test_a_verifier_out_of_files_says_so_in_one_line():
    """Edges that wait in the queue are served when others have gone."""

    async def work() -> None:
        process = await asyncio.create_subprocess_exec(
            *("sh", "-c", 'ulimit -n 40; exec "$0" -P -m outrider "$@"', sys.executable),
            *("cloud", "--model", "toy:1", "--listen", "127.0.0.1:0"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().removeprefix("listening on ").strip()
        port = int(url.rpartition(":")[2])
        writers = [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(60)]
        assert process.stderr is not None
        await process.stderr.readline()  # the model's costs
        said = (await process.stderr.readline()).decode()
        assert "Too many open files" in said
        for writer in writers:
            writer.close()
        async with probe(url) as runtime:
            assert len(await short_answer(runtime)) > 0
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
        assert (process.returncode, err) == (0, b"")

    run(work())


def test_a_verifier_does_not_run_what_lies_in_the_users_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("outrider", "typer", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('run')\n")
    monkeypatch.chdir(tmp_path)

    async def work() -> None:
        async with CloudProcess(["--model", "toy:1"]) as cloud:
            assert cloud.url.startswith("ws://127.0.0.1:")

    run(work())


def test_a_verifier_that_cannot_start_says_why():
    async def work() -> None:
        cloud = CloudProcess(["--model", "toy:x"])
        with pytest.raises(CloudProcessError, match=r"^'toy:x' is not a toy"):
            await cloud.start()
        assert await cloud.wait() == 2
        cancelled = CloudProcess(["--model", "toy:1"])
        task = asyncio.ensure_future(cancelled.start())
        await until(lambda: cancelled._process is not None)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cancelled._process is not None
        assert cancelled._process.returncode is not None, "no orphan is left"

    run(work())


def test_a_verifier_that_still_loads_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    """It was given up after three minutes on a busy machine."""
    monkeypatch.setattr(process, "START_SECONDS", 0.5)

    async def work() -> None:
        async with CloudProcess(["--model", "toy:1"]) as cloud:  # which takes longer than that
            assert cloud.url

    run(work())


def test_one_that_does_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "START_SECONDS", 0.3)
    monkeypatch.setattr(process, "STOP_SECONDS", 0.1)

    class Hung(CloudProcess):
        """It stands still as soon as it is there."""

        async def _ready(self, listening: asyncio.Future[str]) -> str:
            self.signal(signal.SIGSTOP)
            return await super()._ready(listening)

    async def work() -> None:
        with pytest.raises(CloudProcessError, match=r"no sign of life for 0 s"):
            await Hung(["--model", "toy:1"]).start()

    run(work())


def test_a_verifier_ends_with_the_process_that_started_it(tmp_path):
    """A bench that is killed cannot stop its child any more: the child sees its input end."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, sys, time\n"
        "from outrider.runtime.process import CloudProcess\n"
        "async def main():\n"
        "    async with CloudProcess(['--model', 'toy:1']) as cloud:\n"
        "        print(cloud.pid, flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )

    async def work() -> None:
        parent = await asyncio.create_subprocess_exec(
            sys.executable, str(script), stdout=asyncio.subprocess.PIPE
        )
        assert parent.stdout is not None
        child = int(await parent.stdout.readline())
        parent.kill()
        await parent.wait()
        await until(lambda: not alive(child))

    run(work())


def alive(pid: int) -> bool:
    """Does the process run? An ended one whose new parent has not read its code does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.skipif(len(CORES) < 2, reason="one core: nothing to pin to")
def test_pinning_reaches_every_thread_and_is_not_inherited_by_the_next_child():
    """A process pinned to one core still starts a verifier on the other (a bench did not, and
    measured both sides on one core)."""

    async def work() -> None:
        before = os.sched_getaffinity(0)
        async with CloudProcess(["--model", "toy:1"]) as running:
            assert pin(running.pid, 1)
            for task in Path(f"/proc/{running.pid}/task").iterdir():
                assert os.sched_getaffinity(int(task.name)) == {CORES[1]}
        try:
            assert pin(os.getpid(), 1)
            async with CloudProcess(["--model", "toy:1"], core=0) as cloud:
                assert cloud.pinned
                for task in Path(f"/proc/{cloud.pid}/task").iterdir():
                    assert os.sched_getaffinity(int(task.name)) == {CORES[0]}
        finally:
            for task in Path(f"/proc/{os.getpid()}/task").iterdir():
                os.sched_setaffinity(int(task.name), before)

    run(work())


CLAIM = (
    "import os, sys\n"
    "os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])\n"
    "from outrider.runtime.cores import cores\n"
    "print(cores().words, cores() is cores(), flush=True)\n"
    "sys.stdin.read()\n"
)


@pytest.mark.skipif(len(CORES) < 2, reason="one core: nothing to pin to")
def test_two_measurements_do_not_share_a_core(tmp_path: Path):
    """Both put their verifier on the first one. The second pins nothing and says why; whoever comes
    when the first is gone, however it went, has them again."""
    environment = os.environ | {"TMPDIR": str(tmp_path)}

    def claim() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", CLAIM],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def words(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    both = f"verifier on core {CORES[0]}, edge on core {CORES[1]} True"
    with claim() as first:
        assert words(first) == both
        with claim() as second:
            why = f"another measurement has the cores, process {first.pid}"
            assert words(second) == f"not pinned: {why} True"
            second.kill()
        first.kill()
    with claim() as third:
        assert words(third) == both
        third.kill()


# -- signals ----------------------------------------------------------------------------------


def test_a_verifier_that_still_loads_ends_with_who_started_it():
    """Killed, a bench or `serve` can not tell its verifier; only the pipe between them ends."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        model = f"openai:http://127.0.0.1:{silent.getsockname()[1]}#toy:1"
        words = ["cloud", "--until-eof", "--listen", "127.0.0.1:0", "--model", model]
        process = subprocess.Popen(
            [sys.executable, "-m", "outrider", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            silent.settimeout(60)
            asked, _ = silent.accept()  # it loads: this server never answers
            with asked:
                out, err = process.communicate(timeout=60)  # closes its input
        finally:
            process.kill()
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in err


def test_ctrl_c_at_the_edge_leaves_nothing_in_the_cloud():
    """Exit code 130, what was printed stays, no traceback; the session's place is free again."""

    async def work() -> None:
        arguments = ["--model", "toy:1", "--target-pace", "20"]
        async with CloudProcess(arguments) as cloud, probe(cloud.url) as runtime:
            process = await start(
                *("generate", "hi", *TARGET, *DRAFT, "--cloud", cloud.url),
                *("--seed", "7", "--max-tokens", "2000", "--ignore-eos"),
            )
            assert process.stdout is not None
            assert await process.stdout.read(1)
            process.send_signal(signal.SIGINT)
            out, err = await process.communicate()
            assert process.returncode == 130
            assert b"Traceback" not in err
            assert out.endswith(b"\n")
            # SIGTERM drains at once, though its patience is 30 s: no session is left.
            await short_answer(runtime)
            cloud.signal(signal.SIGTERM)
            assert await cloud.wait() == 0

    run(work())


def test_sigterm_drains_and_ctrl_c_ends_the_drain():
    """Of two answers one finishes after SIGTERM; the other would take minutes, and is cut."""

    def request(max_tokens: int) -> EdgeRequest:
        params = SamplingParams(seed=1, max_tokens=max_tokens, ignore_eos=True)
        return EdgeRequest(prompt_ids=(1, 2), params=params, schedule=Schedule.CLOUD_ONLY)

    async def work() -> None:
        arguments = ["--model", "toy:1", "--target-pace", "10", "--drain", "600"]
        async with CloudProcess(arguments) as cloud:
            config = EdgeConfig(url=cloud.url, give_up=0.3)
            vocabulary = load_vocabulary("toy:1")
            async with EdgeRuntime(config, vocabulary.tokenizer) as runtime:
                short = await runtime.stream(request(60))
                endless = await runtime.stream(request(1_000_000))
                await until(lambda: endless._running.steps.qsize() > 2)
                cloud.signal(signal.SIGTERM)
                heard = await hear(short)
                assert len(heard.tokens) == 60
                assert heard.result.confirmed
                cloud.signal(signal.SIGINT)
                assert await cloud.wait() == 0
                with pytest.raises(CloudError) as gone:
                    await hear(endless)
                assert gone.value.code is Code.UNREACHABLE

    run(work())


# -- the demo ---------------------------------------------------------------------------------


def test_the_demo_compares_every_schedule():
    async def work() -> None:
        ended = await outrider(
            *("demo", "--json", "--target", "toy:1", "--draft", "lookup", "--prompts", "2"),
            *("--max-tokens", "12", "--link", "rtt=4ms", "--temperature", "1"),
        )
        assert (ended.code, ended.err) == (0, "")
        facts = json.loads(ended.out)
        rows = {row["name"]: row for row in facts["rows"]}
        assert {"cloud-only", "sync", "stream", "freerun", "colocated"} <= set(rows)
        for row in rows.values():
            assert row["answers"] == 2
            if row["identical_to_cloud_only"] is not None:
                assert row["identical_to_cloud_only"] == row["answers"], row["name"]
        assert rows["cloud-only"]["ratio_to_cloud_only"] == 1.0

    run(work())


# -- the built-in pair ------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_built_in_pair_through_two_processes():
    """A handful of prompts: ids equal `generate --draft none` on this machine alone."""
    from outrider.engines.base import MissingExtraError, ModelNotFoundError

    try:
        target = load_target("builtin:smollm2")
    except (MissingExtraError, ModelNotFoundError) as missing:
        pytest.skip(str(missing))
    from outrider.engines.load import load_drafter

    prompts = ("Why is the sky blue?", "Count to five.", "def add(a, b):")
    local = LocalGenerator(target.model, target.tokenizer)

    async def work() -> None:
        async with CloudProcess(["--model", "builtin:smollm2"]) as cloud:
            config = EdgeConfig(url=cloud.url)
            guess = load_drafter("lookup+small", target)
            async with EdgeRuntime(config, target.tokenizer, guess) as runtime:
                for i, text in enumerate(prompts):
                    ids = tuple(target.tokenizer.chat([{"role": "user", "content": text}]))
                    params = SamplingParams(seed=i, max_tokens=10, temperature=0.7 * (i % 2))
                    alone = local.generate(
                        GenerationRequest(prompt_ids=ids, params=params, draft_length=0)
                    )
                    for schedule in (Schedule.SYNC, Schedule.FREERUN):
                        request = EdgeRequest(prompt_ids=ids, params=params, schedule=schedule)
                        heard = await hear(await runtime.stream(request))
                        assert heard.tokens == alone.token_ids
                        assert heard.text == alone.text

    run(work(), patience=600.0)
