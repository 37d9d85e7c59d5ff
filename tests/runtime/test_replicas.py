"""Verifiers on Ray Serve: one dies, all are replaced, and nothing is left behind."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import behind
from live import TOKENIZER, edge, hear, run, same, until
from outrider.cli import run as outrider
from outrider.core.tokens import SamplingParams
from outrider.engines.load import load_drafter, load_target
from outrider.runtime import replicas
from outrider.runtime.edgerequest import EdgeRequest
from outrider.runtime.local import GenerationRequest, GenerationResult, LocalGenerator
from outrider.runtime.process import CloudProcess
from outrider.runtime.replicas import Listening, Replicas, ReplicasError
from outrider.runtime.serving import Settings
from outrider.session.schedules import Schedule

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="no Ray: pip install 'outrider[ray]'"
)


# -- without Ray ------------------------------------------------------------------------------


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "ray" else find(name, *rest),
    )
    assert outrider(["cloud", "--model", "toy:1", "--replicas", "2"]) == 2
    assert capsys.readouterr().err == (
        "error: --replicas needs Ray Serve: pip install 'outrider[ray]'\n"
    )


class Stub(Replicas):
    """Room is a question of figures alone."""

    def __init__(self, count: int) -> None:
        self._count = count

    @property
    def running(self):
        return [{"pid": 1, "state": "RUNNING"}]


@pytest.mark.parametrize(
    ("count", "one", "free", "fits"),
    [(3, 10, 22, True), (3, 10, 21, False), (1, 10, 0.5, True), (2, 0, 1, True), (9, 10, 0, True)],
)
def test_replicas_that_do_not_fit(count: int, one: float, free: float, fits: bool, monkeypatch):
    gib = 2**30
    monkeypatch.setattr(replicas, "_resident", lambda _: int(one * gib))
    monkeypatch.setattr(replicas, "_available", lambda: int(free * gib))
    if fits:
        Stub(count)._require_room()
        return
    with pytest.raises(
        ReplicasError, match=r"3 replicas do not fit: one takes 10.0 GiB.*--replicas 2"
    ):
        Stub(count)._require_room()


def test_what_linux_says_of_memory():
    assert 2**20 < replicas._resident(os.getpid()) < replicas._available() * 1000
    assert replicas._kilobytes(Path("/nowhere"), "VmRSS") == 0


def test_a_start_of_ray_that_fails_is_tried_again_and_leaves_no_daemon():
    """On a busy machine its daemons have 30 seconds, whatever one says."""
    daemons: list[subprocess.Popen[bytes]] = []

    class Busy:
        def init(self, **_: object) -> None:
            daemons.append(subprocess.Popen(["sleep", "600"]))
            if len(daemons) < failing:
                raise Exception("first\nThe raylet took too long\n")

        def shutdown(self) -> None:
            pass

    told: list[str] = []
    stub = Stub(1)
    stub._ray = Busy()
    failing = 3
    stub._start_ray(told.append)
    assert told == [
        f"Ray did not start (The raylet took too long): attempt {n} of 6" for n in (2, 3)
    ]
    assert [daemon.wait() for daemon in daemons[:2]] == [-signal.SIGKILL] * 2
    assert daemons[2].poll() is None
    daemons[2].kill()
    daemons[2].wait()
    failing = 10
    with pytest.raises(ReplicasError, match=r"in 6 attempts \(The raylet took too long\)"):
        stub._start_ray(told.append)
    assert [daemon.wait() for daemon in daemons[3:]] == [-signal.SIGKILL] * 6


def test_how_far_replicas_are_in_words():
    mine = {"pid": os.getpid(), "state": "STARTING"}
    said = replicas.progress([{"pid": 1, "state": "RUNNING"}, mine], 3)
    assert re.fullmatch(
        r"1 of 3 replicas serve; one is starting: \d+ s of processor time, 0\.\d GiB", said
    )
    assert replicas.progress([{"state": "STOPPING"}], 1) == (
        "0 of 1 replicas serve; one is stopping: 0 s of processor time, 0.0 GiB"
    )


# -- with it ----------------------------------------------------------------------------------


def alone(params: SamplingParams) -> GenerationResult:
    target = load_target("toy:1")
    request = GenerationRequest(prompt_ids=(1, 2, 3), params=params, draft_length=0)
    return LocalGenerator(target.model, TOKENIZER).generate(request)


@asynccontextmanager
async def farm(*more: str):
    """The command with two replicas; nothing may be left of it."""
    listen = f"127.0.0.1:{behind.free_port()}"
    words = [
        "--model",
        "toy:1",
        "--target-pace",
        "20",
        "--replicas",
        "2",
        "--listen",
        listen,
        *more,
    ]
    cloud = CloudProcess(words)
    await cloud.start()
    try:
        yield cloud
    finally:
        cloud.signal(signal.SIGINT)
        await cloud.wait()
    await until(lambda: not workers())


def workers() -> list[int]:
    """Processes of the replicas."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if words.startswith(b"ray::ServeReplica:outrider"):
            found.append(int(folder.name))
    return found


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_dies_and_all_are_replaced_without_a_lost_token():
    params = SamplingParams(seed=5, max_tokens=150, temperature=1.0, ignore_eos=True)
    guess = load_drafter("toy:1:0.4", load_target("toy:1"))

    async def work() -> None:
        async with farm("--drain", "2") as cloud:
            port = int(cloud.url.rpartition(":")[2])
            async with edge(port, guess, give_up=100.0) as runtime:
                for act in ("kill", "update"):
                    request = EdgeRequest(
                        prompt_ids=(1, 2, 3), params=params, schedule=Schedule.CLOUD_ONLY
                    )
                    stream = await runtime.stream(request)
                    answer = asyncio.ensure_future(hear(stream))
                    await until(lambda s=stream: s._generation.sequence.output_length >= 20)
                    before = set(workers())
                    assert len(before) == 2
                    if act == "kill":
                        for pid in before:
                            os.kill(pid, signal.SIGKILL)
                    else:
                        cloud.signal(signal.SIGHUP)
                    same(await answer, alone(params))
                    if act == "kill":
                        assert runtime._client.tally.reopened >= 1
                        await until(lambda: len(workers()) == 2)
                    else:
                        await until(lambda: "replaced" in cloud.said)
                        assert not before & set(workers())
                        same(await hear(await runtime.stream(request)), alone(params))

    run(work(), patience=500.0)


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["its parent goes", "SIGTERM"])
def test_a_start_that_is_given_up_leaves_no_ray(how: str):
    """A bench that was killed while they loaded left a Ray behind that went on loading."""

    async def work() -> None:
        command = [sys.executable, "-m", "outrider", "cloud", "--until-eof", "--model", "toy:1"]
        listen = f"127.0.0.1:{behind.free_port()}"
        cloud = await asyncio.create_subprocess_exec(
            *command, "--replicas", "1", "--listen", listen,
            stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert cloud.stdin is not None
        assert cloud.stderr is not None
        said = b"begins"
        while said and b"a first replica loads" not in said:  # a busy machine says more before it
            said = await cloud.stderr.readline()
        assert said, "it was given up before, by Ray"
        daemons = replicas.children(cloud.pid)
        assert daemons
        if how == "SIGTERM":
            cloud.terminate()
        else:
            cloud.stdin.close()
        assert await cloud.wait() == 0
        await until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in daemons))
        assert not workers()

    run(work(), patience=500.0)


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # Ray's own, of what its dependencies will drop
def test_a_model_that_does_not_load_is_told_in_a_line():
    where = Listening(host="127.0.0.1", port=behind.free_port())
    made = Replicas(Settings(model="builtin:nothing"), 1, where)
    try:
        with pytest.raises(ReplicasError, match=r"no replica came up: .*builtin:nothing"):
            made.start()
    finally:
        made.stop()
    assert not workers()


if sys.platform != "linux":
    pytest.skip("the tests look at /proc", allow_module_level=True)
