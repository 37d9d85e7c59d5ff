"""`generate --cloud --verify ratio --top-k-reply K --tv-budget B`: what it does and reports."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from live import hear, run, server
from outrider import cli
from outrider.core.residual import TopKReply
from outrider.core.tokens import Origin, Rule, SamplingParams
from outrider.engines.base import MissingExtraError, ModelNotFoundError
from outrider.engines.load import load_drafter, load_target
from outrider.runtime.edge import EdgeRuntime
from outrider.runtime.edgeconfig import EdgeConfig
from outrider.runtime.edgerequest import EdgeRequest
from outrider.runtime.process import CloudProcess
from outrider.session.schedules import Schedule

TOYS = ("--target", "toy:1", "--draft", "toy:1:0.8", "--seed", "7", "--max-tokens", "60")
ASK = ("generate", "hi", "--temperature", "1", "--ignore-eos", "--verify", "ratio", *TOYS)
SYNC = ("--schedule", "sync", "--draft-length", "4")


def through_a_verifier(work: Callable[[str], None]) -> None:
    """`work` on a thread of its own, told the verifier's address."""

    async def serve() -> None:
        async with server() as verifier:
            await asyncio.to_thread(work, f"ws://127.0.0.1:{verifier.port}")

    run(serve())


def test_what_an_answer_reports(capsys: pytest.CaptureFixture[str]):
    def facts(url: str, *options: str) -> dict:  # type: ignore[type-arg]
        assert cli.run([*ASK, *SYNC, "--cloud", url, "--json", *options]) == 0
        found = json.loads(capsys.readouterr().out)
        fell = found["drafted"] - found["accepted"]
        assert set(found["residual"]) == {"steps", "bytes_up", "bytes_down"}
        assert sum(found["residual"]["steps"].values()) <= fell
        assert sum(found["residual"]["bytes_down"].values()) < found["payload_down"]
        return found

    def work(url: str) -> None:
        plain = facts(url)
        assert "tv" not in plain
        assert not {"top-k", "larger-k"} & set(plain["residual"]["steps"])
        # The toy's text has 28 different ids: a list of 64 is all of them.
        whole = facts(url, "--top-k-reply", "64")
        assert set(whole["residual"]["steps"]) == {"top-k"}
        assert whole["tv"] == {"budget": 0.0, "spent": 0.0, "events": 0}
        assert Origin.TRUNCATED.value not in whole["origins"]
        # One of 4 is not, and without a budget none is sent.
        none = facts(url, "--top-k-reply", "4")
        assert "top-k" not in none["residual"]["bytes_down"]
        assert none["token_ids"] == plain["token_ids"]
        lossy = facts(url, "--top-k-reply", "4", "--tv-budget", "30")
        assert lossy["tv"]["events"] == lossy["origins"].count("truncated") > 0
        assert 0.0 < lossy["tv"]["spent"] <= lossy["tv"]["budget"] == 30.0
        endless = facts(url, "--tv-budget", "inf")
        assert endless["tv"]["budget"] is None

    through_a_verifier(work)


def test_a_lossy_answer_says_so_to_people(capsys: pytest.CaptureFixture[str]):
    def work(url: str) -> None:
        assert (
            cli.run([*ASK, *SYNC, "--cloud", url, "--top-k-reply", "4", "--tv-budget", "30"]) == 0
        )
        assert "tokens from cut-off lists, " in capsys.readouterr().err
        assert cli.run([*ASK, *SYNC, "--cloud", url, "--top-k-reply", "64"]) == 0
        assert "cut-off" not in capsys.readouterr().err

    through_a_verifier(work)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_built_in_pair_through_the_dialogue():
    """Every way to end a rejection on real rows, in two processes."""
    try:
        target = load_target("builtin:smollm2")
    except (MissingExtraError, ModelNotFoundError) as missing:
        pytest.skip(str(missing))
    ids = tuple(target.tokenizer.chat([{"role": "user", "content": "Why is the sky blue?"}]))
    params = SamplingParams(seed=3, max_tokens=40, temperature=1.0, ignore_eos=True)
    wishes = (TopKReply(), TopKReply(k=16, budget=0.5), TopKReply(k=64))

    async def work() -> None:
        async with CloudProcess(["--model", "builtin:smollm2"]) as cloud:
            guess = load_drafter("small", target)
            async with EdgeRuntime(EdgeConfig(url=cloud.url), target.tokenizer, guess) as runtime:
                for reply in wishes:
                    request = EdgeRequest(
                        prompt_ids=ids,
                        params=params,
                        schedule=Schedule.SYNC,
                        rule=Rule.RATIO,
                        reply=reply,
                    )
                    heard = await hear(await runtime.stream(request))
                    made = heard.result.generation
                    assert len(heard.tokens) == 40
                    assert heard.result.confirmed
                    assert sum(made.counters.residual.values()) > 3
                    lossy = made.tv.spent if made.tv else 0.0
                    assert lossy <= reply.budget
                    assert (lossy > 0.0) is (Origin.TRUNCATED in heard.origins)
                    assert (lossy > 0.0) is (reply.budget > 0.0)

    run(work(), patience=600.0)
