"""Edges that ask one verifier for answers, for real: the driver of `outrider load`.

Every edge has places, each of which makes one answer at a time. A request that is due while all
places of its edge are taken waits there, and its wait counts: its first token is timed from when
it was due, so a verifier that falls behind cannot hide it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from outrider.bench.arrivals import Arrivals
from outrider.bench.live import answer_over
from outrider.bench.load import CloudCount, Outcome, Served, Traffic
from outrider.bench.schedules import WARM_UP_TOKENS
from outrider.engines.base import UnrecordedError
from outrider.engines.replay import Recorded
from outrider.proto.messages import Code
from outrider.runtime.edge import EdgeRuntime
from outrider.runtime.edgerequest import EdgeRequest
from outrider.runtime.edgestream import EdgeResult
from outrider.runtime.failures import CloudError
from outrider.session.schedules import Schedule

LOST: Final = frozenset({Code.UNREACHABLE, Code.UNAUTHORIZED, Code.VERSION, Code.VOCABULARY})
"""Failures after which a place asks no more: the next answer would fail as well, and slowly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """An answer to ask for."""

    request: EdgeRequest
    expected: tuple[int, ...] | None = None
    """Ids that the answer must begin with, where they were recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """How much, and when."""

    requests: int
    """Answers of each edge."""
    places: int = 1
    """Answers that an edge makes at once."""
    warm_up: int = 1
    """Short answers that each place makes first; they are not counted."""
    arrivals: Arrivals = field(default_factory=Arrivals)
    seed: int = 0


Status = Callable[[], Awaitable[Mapping[str, Any] | None]]


async def _untold() -> None:
    """Nobody to ask."""


class LoadRun:
    """`await LoadRun(...).run()`; `outcome` holds what there is, however it ended."""

    def __init__(
        self,
        runtimes: Sequence[EdgeRuntime],
        job: Callable[[int], Job],
        plan: LoadPlan,
        *,
        tenants: Sequence[str] = ("default",),
        told: Callable[[int], None] = lambda _answers: None,
        status: Status | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`job(n)`: request number n; those of the warm-up have the numbers behind the last.
        `tenants`: edges take turns. `told` hears of every answer that ended.
        `status`: asks the verifier for its counters."""
        self._status = status or _untold
        self._clock = clock
        self.outcome = Outcome(asked=len(runtimes) * plan.requests)
        self.error: CloudError | None = None
        """The first failure of an answer."""
        self._runtimes = runtimes
        self._job = job
        self._plan = plan
        self._tenants = tenants
        self._told = told
        self._start = 0.0
        self._todo: list[deque[tuple[int, float | None]]] = [deque() for _ in runtimes]

    async def run(self, stop: asyncio.Event | None = None) -> Outcome:
        """Until all is answered or `stop` is set. Raises CloudError when the warm-up fails, and
        UnrecordedError when an answer is not the recorded one."""
        stop = stop or asyncio.Event()
        if not await _until(stop, [self._warm(edge) for edge in self._places]):
            self.outcome.interrupted = True
            return self.outcome
        self.outcome.warm_up_answers = len(self._places) * self._plan.warm_up
        times = self._plan.arrivals.times(self.outcome.asked, self._plan.seed)
        for number, due in enumerate(times):
            self._todo[number % len(self._runtimes)].append((number, due))
        counted = await self._status()
        before = [runtime.link_use for runtime in self._runtimes]
        busy, self._start = time.process_time(), self._clock()
        whole = await _until(stop, [self._place(edge) for edge in self._places])
        outcome, after = self.outcome, [runtime.link_use for runtime in self._runtimes]
        outcome.interrupted = not whole
        outcome.busy = time.process_time() - busy
        ends = [self._now()] if not whole else [s.last for s in outcome.served]
        outcome.seconds = max(ends, default=self._now())
        outcome.traffic = [
            Traffic(
                up=b.payload_up - a.payload_up,
                down=b.payload_down - a.payload_down,
                reconnects=b.reconnects - a.reconnects,
            )
            for a, b in zip(before, after, strict=True)
        ]
        outcome.cloud = CloudCount.between(counted, await self._status())
        return outcome

    @property
    def _places(self) -> list[int]:
        """The edge of each place."""
        return [edge for edge in range(len(self._runtimes)) for _ in range(self._plan.places)]

    def _now(self) -> float:
        return self._clock() - self._start

    async def _warm(self, edge: int) -> None:
        for turn in range(self._plan.warm_up):
            number = self.outcome.asked + edge + turn * len(self._runtimes)
            request = self._job(number).request
            most = min(WARM_UP_TOKENS, request.params.max_tokens)
            short = replace(request.params, max_tokens=most, min_tokens=0)
            await answer_over(self._runtimes[edge], replace(request, params=short))

    async def _place(self, edge: int) -> None:
        todo = self._todo[edge]
        while todo:
            number, due = todo.popleft()
            if due is not None:
                await asyncio.sleep(max(0.0, due - self._now()))
            try:
                served = await self._answer(edge, number, self._now() if due is None else due)
            except CloudError as error:
                self.outcome.failures[error.code.value] += 1
                self.error = self.error or error
                self.outcome.failure = str(self.error)
                if error.code in LOST:
                    return
            else:
                self.outcome.served.append(served)
            self._told(len(self.outcome.served) + self.outcome.failures.total())

    async def _answer(self, edge: int, number: int, due: float) -> Served:
        job = self._job(number)
        stream = await self._runtimes[edge].stream(job.request)
        marks: list[tuple[float, int]] = []
        rounds = []
        async for step in stream:
            marks.append((self._now(), len(step.tokens)))
            if step.round is not None:
                rounds.append(step.round)
        result = stream.result
        _check(job, result)
        done = result.generation
        colocated = job.request.schedule is Schedule.COLOCATED
        return Served(
            edge=edge,
            tenant=self._tenants[edge % len(self._tenants)],
            due=due,
            first=marks[0][0],
            last=marks[-1][0],
            tokens=done.completion_tokens,
            first_tokens=marks[0][1],
            forwards=done.target_forwards,
            rows=None if colocated else sum(1 + each.drafted for each in rounds),
            drafted=done.counters.drafted,
            accepted=done.counters.accepted,
            wasted=result.wasted,
            queue=tuple(each.queue_s for each in rounds),
            step=tuple(each.step_s for each in rounds),
        )


def _check(job: Job, result: EdgeResult) -> None:
    """Under a recording the answer is known beforehand."""
    got = result.generation.token_ids
    if job.expected is not None and got != job.expected[: len(got)]:
        raise UnrecordedError(
            f"the answer to seed {job.request.params.seed} is not the recorded one: recorded with "
            "another target, or with other numerics"
        )


async def _until(stop: asyncio.Event, work: Sequence[Coroutine[Any, Any, None]]) -> bool:
    """Run all of `work`; True when it ended by itself, False when `stop` was set. Nothing runs
    on behind it; the first error is raised."""
    tasks = [asyncio.ensure_future(each) for each in work]
    whole = asyncio.gather(*tasks)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((whole, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not whole.done():
            return False
        await whole
        return True
    finally:
        for task in (*tasks, stopped):
            task.cancel()
        await asyncio.gather(whole, *tasks, stopped, return_exceptions=True)


def recorded_jobs(
    recorded: Recorded, like: EdgeRequest, max_tokens: int | None = None
) -> Callable[[int], Job]:
    """The recorded answers in turn, each with its own seed; `like` has everything else."""

    def job(number: int) -> Job:
        answer = recorded.answers[number % len(recorded.answers)]
        params = recorded.header.sampling.params(answer.seed)
        if max_tokens is not None:
            params = replace(params, max_tokens=max_tokens)
        request = replace(like, prompt_ids=answer.prompt, params=params)
        return Job(request=request, expected=answer.output)

    return job


def prompted_jobs(prompts: Sequence[tuple[int, ...]], like: EdgeRequest) -> Callable[[int], Job]:
    """Prompts in turn; request number n has the seed of `like` + n."""

    def job(number: int) -> Job:
        params = replace(like.params, seed=like.params.seed + number)
        prompt = prompts[number % len(prompts)]
        return Job(request=replace(like, prompt_ids=prompt, params=params))

    return job
