"""deploy/nginx.conf.example: two verifiers behind a real nginx, one of which dies or drains."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import behind
from live import TOKENIZER, alone, ask, edge, hear, run, same, server, until
from outrider.core.tokens import SamplingParams
from outrider.engines.load import load_drafter, load_target
from outrider.runtime.access import hash_token
from outrider.runtime.edge import EdgeRuntime
from outrider.runtime.edgerequest import EdgeRequest
from outrider.runtime.failures import CloudError
from outrider.runtime.local import GenerationRequest, LocalGenerator
from outrider.runtime.process import CloudProcess
from outrider.runtime.routes import AFFINITY_HEADER
from outrider.runtime.status import fetch_status
from outrider.session.quotas import TenantLimits

pytestmark = pytest.mark.skipif(not behind.installed(), reason="no nginx: apt install nginx-light")
PARAMS = SamplingParams(seed=5, max_tokens=120, temperature=1.0, ignore_eos=True)
REQUEST = EdgeRequest(prompt_ids=(1, 2, 3), params=PARAMS)


def test_it_sends_the_header_that_edges_send():
    assert f"$http_{AFFINITY_HEADER.replace('-', '_')} consistent" in behind.EXAMPLE.read_text()


@asynccontextmanager
async def farm(folder: Path) -> AsyncIterator[tuple[EdgeRuntime, list[CloudProcess]]]:
    arguments = ["--model", "toy:1", "--target-pace", "4"]
    clouds = [CloudProcess(arguments), CloudProcess(arguments)]
    target = load_target("toy:1")
    try:
        await asyncio.gather(*(cloud.start() for cloud in clouds))
        ports = [int(cloud.url.rpartition(":")[2]) for cloud in clouds]
        with behind.nginx(folder, ports) as port:
            config = {"url": f"wss://127.0.0.1:{port}", "ca_file": str(folder / "cloud.pem")}
            guess = load_drafter("toy:1:0.4", target)
            async with edge(port, guess, give_up=50.0, **config) as runtime:
                yield runtime, clouds
    finally:
        for cloud in clouds:
            await cloud.stop()


def test_a_login_that_is_refused_takes_no_verifier_from_others(tmp_path: Path):
    """One login has all its connections everywhere and asks for more: 503 from each verifier. It
    is no failure of theirs, and the next edge of another login finds them."""
    logins = {hash_token("full"): "alice", hash_token("other"): "bob"}
    params = SamplingParams(seed=5, max_tokens=8, ignore_eos=True)

    async def work() -> None:
        made = {"tokens": logins, "limits": {"alice": TenantLimits(connections=0)}}
        async with server(**made) as first, server(**made) as second:
            with behind.nginx(tmp_path, [first.port, second.port]) as port:
                config = {"url": f"wss://127.0.0.1:{port}", "ca_file": str(tmp_path / "cloud.pem")}
                async with edge(0, token="full", give_up=0.3, **config) as refused:
                    with pytest.raises(CloudError, match="HTTP 50"):
                        await hear(await refused.stream(ask(params)))
                async with edge(0, token="other", **config) as served:
                    same(await hear(await served.stream(ask(params))), alone(params))
                    assert served._client.tally.dials == 1

    run(work())


async def busy(clouds: list[CloudProcess]) -> CloudProcess:
    """The one that has the session."""
    for cloud in clouds:
        facts = await fetch_status(edge(0, url=cloud.url).config)
        if facts and facts["sessions"]:
            return cloud
    raise AssertionError("nobody has it")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_an_answer_outlives_its_verifier(how: signal.Signals, tmp_path: Path):
    target = load_target("toy:1")
    expected = LocalGenerator(target.model, TOKENIZER).generate(
        GenerationRequest(prompt_ids=REQUEST.prompt_ids, params=PARAMS, draft_length=0)
    )

    async def work() -> None:
        async with farm(tmp_path) as (runtime, clouds):
            stream = await runtime.stream(REQUEST)
            answer = asyncio.ensure_future(hear(stream))
            await until(lambda: stream._generation.sequence.output_length >= 37)
            first = await busy(clouds)
            first.signal(how)
            same(await answer, expected)
            (left,) = (cloud for cloud in clouds if cloud is not first)
            if how is signal.SIGKILL:
                assert runtime._client.tally.reopened == 1
            else:  # it drains: what runs ends there
                assert runtime._client.tally.reconnects == 0
                await first.wait()
            same(await hear(await runtime.stream(REQUEST)), expected)
            facts = await fetch_status(edge(0, url=left.url).config)
            assert facts["opened"] >= 1

    run(work(), patience=100.0)
