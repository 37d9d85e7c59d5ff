"""More than one verifier behind an address: what it adds, a verifier killed, all of them replaced.

For each host: `plain` is one `outrider cloud` (killed, another is started at its address; replaced
the same way), `nginx` two of them behind deploy/nginx.conf.example with TLS, `ray` is `outrider
cloud --replicas 2`. Three figures each:

    trip      ms a round of `sync` with one draft, target without pace: the host's own time
    failover  seconds from kill -9 of the verifier that has the answer to the next token
    rolling   every verifier replaced under the load of --edges edges: the longest time that any of
              them waited for a token, in seconds, and the longest in the same load before that

Every answer's ids are compared with those of the target alone; one that differs is an error.

    python bench/replicas.py [--host plain nginx ray] [--model toy:1] [--edges 4] [--repeats 3]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # its nginx, and two processes

import behind
from outrider.core.tokens import SamplingParams
from outrider.engines.load import Loaded, load_drafter, load_target
from outrider.runtime.edge import EdgeRuntime
from outrider.runtime.edgeconfig import EdgeConfig
from outrider.runtime.edgerequest import EdgeRequest
from outrider.runtime.local import GenerationRequest, LocalGenerator
from outrider.runtime.process import CloudProcess
from outrider.runtime.status import fetch_status
from outrider.session.schedules import Schedule

PROMPT = (72, 105, 33)
ANSWER = 160
TRIPS = 300
PATIENCE = 120.0
"""Seconds for which an edge waits for a verifier."""


@dataclass
class Farm:
    """Verifiers and where edges find them."""

    host: str
    arguments: list[str]
    url: str = ""
    ca_file: str | None = None
    clouds: list[CloudProcess] = field(default_factory=list)

    def config(self) -> EdgeConfig:
        return EdgeConfig(url=self.url, ca_file=self.ca_file, give_up=PATIENCE)

    async def add(self, listen: int) -> CloudProcess:
        cloud = CloudProcess([*self.arguments, "--listen", f"127.0.0.1:{listen}"])
        await cloud.start()
        return cloud

    async def kill_busy(self) -> asyncio.Task[None] | None:
        """Kill -9 whoever has a session; for `plain` a successor is on its way."""
        if self.host == "ray":
            os.kill(await self._busy_replica(), signal.SIGKILL)
            return None
        for i, cloud in enumerate(self.clouds):
            facts = await fetch_status(EdgeConfig(url=cloud.url))
            if facts and facts["sessions"]:
                cloud.kill()
                return asyncio.create_task(self._again(i))
        raise SystemExit("error: nobody has the session")

    async def _again(self, i: int) -> None:
        cloud = self.clouds[i]
        await cloud.wait()
        self.clouds[i] = await self.add(int(cloud.url.rpartition(":")[2]))

    async def _busy_replica(self) -> int:
        """Of Ray's replicas the one whose processor time grows most."""
        pids = replicas(self.clouds[0].pid)
        before = {pid: ticks(pid) for pid in pids}
        await asyncio.sleep(0.3)
        return max(pids, key=lambda pid: ticks(pid) - before[pid])

    async def replace(self) -> None:
        """Every verifier by a new one, one after the other, each with its time to drain."""
        if self.host == "ray":
            cloud = self.clouds[0]
            cloud.signal(signal.SIGHUP)
            while not any(line.strip() == "replaced" for line in cloud.said):
                if any("not replaced" in line for line in cloud.said):
                    raise SystemExit(f"error: {cloud.said[-1]}")
                await asyncio.sleep(0.05)
            return
        for i, cloud in enumerate(self.clouds):
            cloud.signal(signal.SIGTERM)
            await self._again(i)


def replicas(driver: int) -> list[int]:
    """Processes of the Ray that `driver` started; there may be others on the machine."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            name = (folder / "cmdline").read_bytes()
            if name.startswith(b"ray::ServeReplica:outrider"):
                found.append(int(folder.name))
    found = [pid for pid in found if driver in ancestors(pid)]
    if not found:
        raise SystemExit(f"error: no replica of process {driver} is to be seen")
    return found


def ancestors(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        while pid > 1:
            facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            pid = int(facts[1])
            found.append(pid)
    return found


def ticks(pid: int) -> int:
    try:
        facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(facts[11]) + int(facts[12])


@contextlib.asynccontextmanager
async def farm(host: str, arguments: list[str]) -> AsyncIterator[Farm]:
    made = Farm(host, arguments)
    with contextlib.ExitStack() as stack:
        try:
            if host == "ray":
                made.arguments = [*arguments, "--replicas", "2"]
            count = 2 if host == "nginx" else 1
            made.clouds = [await made.add(behind.free_port()) for _ in range(count)]
            made.url = made.clouds[0].url
            if host == "nginx":
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                ports = [int(cloud.url.rpartition(":")[2]) for cloud in made.clouds]
                made.url = f"wss://127.0.0.1:{stack.enter_context(behind.nginx(folder, ports))}"
                made.ca_file = str(folder / "cloud.pem")
            yield made
        finally:
            for cloud in made.clouds:
                cloud.signal(signal.SIGINT)
                await cloud.wait()


def request(seed: int, length: int, schedule: Schedule, draft_length: int = 4) -> EdgeRequest:
    params = SamplingParams(seed=seed, max_tokens=length, temperature=1.0, ignore_eos=True)
    return EdgeRequest(
        prompt_ids=PROMPT, params=params, schedule=schedule, draft_length=draft_length
    )


class Measured:
    """Answers of edges, held against the target alone."""

    def __init__(self, target: Loaded, draft: str) -> None:
        self.target = target
        self.draft = draft
        self.answers: list[tuple[EdgeRequest, tuple[int, ...]]] = []

    def edge(self, made: Farm) -> EdgeRuntime:
        drafter = load_drafter(self.draft, self.target, max_slots=8)
        return EdgeRuntime(made.config(), self.target.tokenizer, drafter)

    async def ask(self, runtime: EdgeRuntime, asked: EdgeRequest, at: list[float]) -> float:
        """Seconds a round. `at`: when tokens came."""
        stream = await runtime.stream(asked)
        tokens: list[int] = []
        async for step in stream:
            tokens += step.tokens
            at.append(time.monotonic())
        told = stream.result.generation
        self.answers.append((asked, tuple(tokens)))
        return told.timing.total_s / max(1, told.counters.rounds)

    def check(self) -> None:
        """After what is timed: every answer so far against the target alone."""
        alone = LocalGenerator(self.target.model, self.target.tokenizer)
        for asked, tokens in self.answers:
            wanted = alone.generate(
                GenerationRequest(prompt_ids=asked.prompt_ids, params=asked.params, draft_length=0)
            )
            if tokens != wanted.token_ids:
                raise SystemExit(f"error: seed {asked.params.seed}: not the target's own ids")
        alone.close()


async def trip(measured: Measured, made: Farm) -> float:
    async with measured.edge(made) as runtime:
        for length in (20, TRIPS):
            asked = request(1, length, Schedule.SYNC, draft_length=1)
            seconds = await measured.ask(runtime, asked, [])
        return 1e3 * seconds


async def failover(measured: Measured, made: Farm, seed: int) -> float:
    """A length that outlasts the kill."""
    at: list[float] = []
    async with measured.edge(made) as runtime:
        answer = asyncio.create_task(
            measured.ask(runtime, request(seed, ANSWER, Schedule.FREERUN), at)
        )
        while len(at) < 10 and not answer.done():
            await asyncio.sleep(0.002)
        successor = await made.kill_busy()
        killed = time.monotonic()
        await answer
        if runtime.link_use.reconnects == 0:
            raise SystemExit("error: the answer was over before its verifier was killed")
        if successor is not None:
            await successor
    # What had been sent before the kill may arrive after it.
    before = [t for t in at if t < killed + 0.02]
    return next(t for t in at if t >= killed + 0.02) - max(before[-1], killed)


async def rolling(measured: Measured, made: Farm, edges: int) -> tuple[float, float, int]:
    """Longest wait for a token before and while everything is replaced; answers meanwhile."""
    waits: list[tuple[float, float]] = []
    over = asyncio.Event()
    began = len(measured.answers)

    async def load(number: int) -> None:
        async with measured.edge(made) as runtime:
            seed = 1000 * number
            while not over.is_set():
                at = [time.monotonic()]
                seed += 1
                await measured.ask(runtime, request(seed, ANSWER, Schedule.FREERUN), at)
                waits.extend((b, b - a) for a, b in pairwise(at))

    async with asyncio.TaskGroup() as tasks:
        for number in range(edges):
            tasks.create_task(load(number))
        await asyncio.sleep(10.0)
        start = time.monotonic()
        try:
            await made.replace()
        finally:
            over.set()
    usual = max(wait for at, wait in waits if at < start)
    return usual, max(wait for at, wait in waits if at >= start), len(measured.answers) - began


async def main(arguments: argparse.Namespace) -> None:
    target = load_target(arguments.model, threads=1, max_slots=8)
    for host in arguments.host:
        measured = Measured(target, arguments.draft)
        common = ["--model", arguments.model, "--threads", "1", "--drain", "5"]
        found: dict[str, object] = {"host": host, "model": arguments.model}
        if "trip" in arguments.what:
            async with farm(host, common) as made:
                found["trip_ms"] = round(await trip(measured, made), 2)
        async with farm(host, [*common, "--target-pace", str(arguments.pace)]) as made:
            if "failover" in arguments.what:
                times = [await failover(measured, made, i) for i in range(arguments.repeats)]
                found["failover_s"] = round(median(times), 3)
                found["failover_max_s"] = round(max(times), 3)
            if "rolling" in arguments.what:
                usual, longest, answers = await rolling(measured, made, arguments.edges)
                found["longest_wait_s"] = round(usual, 3)
                found["rolling_wait_s"] = round(longest, 3)
                found["rolling_answers"] = answers
        measured.check()
        found["answers"] = len(measured.answers)
        found["load"] = round(os.getloadavg()[0], 1)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--host", nargs="+", choices=("plain", "nginx", "ray"), default=["plain", "nginx"]
    )
    what = ["trip", "failover", "rolling"]
    parser.add_argument("--what", nargs="*", choices=what, default=what)
    parser.add_argument("--model", default="toy:1")
    parser.add_argument("--draft", default="toy:1:0.4")
    parser.add_argument(
        "--pace", type=float, default=20.0, help="ms added to a forward, so that an answer lasts"
    )
    parser.add_argument("--edges", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    asyncio.run(main(parser.parse_args()))
