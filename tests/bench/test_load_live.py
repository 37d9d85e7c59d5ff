"""The load driver against a toy verifier on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest
from msgspec import structs

from live import edge, run, server, until
from outrider.bench.load import Outcome, summary
from outrider.bench.loadrun import LoadPlan, LoadRun, recorded_jobs
from outrider.engines.base import UnrecordedError
from outrider.engines.replay import Recorded, ReplayDrafter
from outrider.runtime.cloud import CloudServer
from outrider.runtime.edge import EdgeRuntime
from outrider.runtime.edgerequest import EdgeRequest
from outrider.runtime.failures import CloudError
from outrider.session.schedules import Schedule
from recordings import LENGTH, recorded

SYNC = EdgeRequest(prompt_ids=(0,), schedule=Schedule.SYNC)


@asynccontextmanager
async def edges(
    cloud: CloudServer, count: int, held: Recorded, **config: object
) -> AsyncIterator[list[EdgeRuntime]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                edge(cloud.port, ReplayDrafter(held, token_seconds=0.0), **config)
            )
            for _ in range(count)
        ]


async def load(
    count: int,
    plan: LoadPlan,
    *,
    held: Recorded | None = None,
    like: EdgeRequest = SYNC,
    service: dict[str, object] | None = None,
    stop_after: int | None = None,
) -> Outcome:
    held = held or recorded()
    stop = asyncio.Event()

    def told(done: int) -> None:
        if done == stop_after:
            stop.set()

    async with server(service=service) as cloud:
        async with edges(cloud, count, held) as runtimes:
            driver = LoadRun(runtimes, recorded_jobs(held, like), plan, told=told)
            outcome = await driver.run(stop)
            await until(lambda: not any(len(runtime._running) for runtime in runtimes))
        await until(lambda: not cloud.service.sessions)
    return outcome


@pytest.mark.parametrize("schedule", [Schedule.SYNC, Schedule.FREERUN, Schedule.CLOUD_ONLY])
def test_every_answer_is_the_recorded_one(schedule: Schedule):
    """The driver holds each against the recording; here: that all came, and what they say."""
    like = replace(SYNC, schedule=schedule, window=8)
    outcome = run(load(3, LoadPlan(requests=4, places=2), like=like))
    facts = summary(outcome)
    assert (facts["answers"], facts["unfinished"], facts["errors"]) == (12, 0, {})
    assert facts["tokens"] == 12 * LENGTH
    assert [part["answers"] for part in facts["edges"]] == [4, 4, 4]
    assert facts["warm_up_answers"] == 6
    assert facts["bytes_up_per_token"] > 0
    if schedule is Schedule.SYNC:
        assert facts["acceptance"] is not None
    elif schedule is Schedule.CLOUD_ONLY:
        assert facts["acceptance"] is None
    # In free-run over a link without delay the cloud may win every race: then no draft is judged.
    assert 0 < facts["forwards_per_token"] <= 1.0
    assert all(one.due <= one.first <= one.last for one in outcome.served)


def test_rows_are_those_of_whole_blocks():
    """One edge in sync: a block of K drafts is K + 1 rows, the prefill's token one."""
    outcome = run(load(1, LoadPlan(requests=2)))
    for one in outcome.served:
        assert one.rows is not None
        assert one.forwards < one.rows <= 1 + 5 * (one.forwards - 1)
        assert len(one.queue) == len(one.step) == one.forwards


def test_another_text_ends_the_run():
    held = recorded()
    first, *rest = held.answers
    wrong = structs.replace(first, output=(*first.output[:-1], first.output[-1] ^ 1))
    doctored = replace(held, answers=(wrong, *rest))
    like = replace(SYNC, schedule=Schedule.CLOUD_ONLY)
    with pytest.raises(UnrecordedError, match="answer to seed 5 is not the recorded one"):
        run(load(2, LoadPlan(requests=3), held=doctored, like=like))


def test_refused_answers_are_counted():
    """The verifier has room for one session; three edges ask at once."""
    outcome = run(load(3, LoadPlan(requests=3, warm_up=0), service={"max_sessions": 1}))
    facts = summary(outcome)
    assert facts["answers"] >= 1
    assert facts["errors"].keys() == {"busy"}
    assert facts["answers"] + facts["errors"]["busy"] == 9
    assert "all 1 sessions are taken" in facts["first_error"]


def test_a_failing_warm_up_is_an_error():
    with pytest.raises(CloudError, match="all 0 sessions are taken"):
        run(load(1, LoadPlan(requests=1), service={"max_sessions": 0}))


def test_an_edge_without_a_link_asks_no_more():
    async def work() -> Outcome:
        async with server() as cloud:
            port = cloud.port
        gone = edge(port, ReplayDrafter(recorded(), token_seconds=0.0), give_up=0.2)
        async with gone:
            plan = LoadPlan(requests=50, warm_up=0)
            driver = LoadRun([gone], recorded_jobs(recorded(), SYNC), plan)
            return await driver.run()

    outcome = run(work())
    assert outcome.failures == {"unreachable": 1}
    assert outcome.unfinished == 49


def test_what_there_is_when_it_is_stopped():
    outcome = run(load(2, LoadPlan(requests=200), stop_after=5))
    assert outcome.interrupted
    assert 5 <= len(outcome.served) < 400
    assert outcome.unfinished == 400 - len(outcome.served)
    assert summary(outcome)["tokens_per_s"] > 0


def test_stopped_before_the_first_answer():
    async def work() -> Outcome:
        async with server() as cloud, edges(cloud, 1, recorded()) as runtimes:
            driver = LoadRun(runtimes, recorded_jobs(recorded(), SYNC), LoadPlan(requests=1))
            stop = asyncio.Event()
            stop.set()
            return await driver.run(stop)

    facts = summary(run(work()))
    assert (facts["interrupted"], facts["answers"], facts["tokens_per_s"]) == (True, 0, None)
