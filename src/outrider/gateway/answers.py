"""A request's answers as one stream of rounds; leaving it cancels all of them on both sides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from outrider.gateway.errors import ApiError
from outrider.gateway.tracing import NoTracing, Tracing
from outrider.runtime.contact import Contact
from outrider.runtime.edge import EdgeRuntime
from outrider.runtime.edgerequest import EdgeRequest
from outrider.runtime.edgestream import EdgeResult, EdgeStream
from outrider.session.generation import Step

MAX_PAUSE_S: Final = 60.0
"""Seconds for which an answer may wait for its client. One that is behind pauses on both sides
(runtime.edge.PAUSE_UNREAD); one that takes longer than this to catch up is given up: it holds a
place here and a cache in the cloud (field case 31)."""
MAX_UNREAD: Final = 2048
"""Rounds that a client may be behind, whatever a cloud sends that was told to wait."""
HELD_BACK: Final = 64
"""Rounds of several answers that wait to be written, before each answer waits by itself."""


Told = Step | Contact | None
"""A round, what has become of the link to the cloud, or the end."""


@dataclass(slots=True)
class Choice:
    """One answer."""

    index: int
    request: EdgeRequest
    stream: EdgeStream | None = None
    """Once it was asked for."""
    tracing: Tracing = field(default_factory=NoTracing)

    @property
    def result(self) -> EdgeResult:
        assert self.stream is not None, "the answer was not asked for"
        return self.stream.result

    async def steps(self, runtime: EdgeRuntime) -> AsyncIterator[tuple[Choice, Told]]:
        """Ask, hand out rounds as they come, and None behind the last. Raises CloudError,
        ParameterError; ApiError for a reader that stays too far behind."""
        runtime.forgive()
        trace = self.tracing.answer(self.index, self.request)
        ended: BaseException | None = None
        try:
            self.stream = await runtime.stream(self.request)
            async with aclosing(self.stream.told()) as steps:  # type: ignore[type-var]
                async for step in steps:
                    if isinstance(step, Step):
                        trace.round(step)
                    yield self, step
                    if self.stream.behind_s > MAX_PAUSE_S or self.stream.unread > MAX_UNREAD:
                        raise ApiError(
                            408, "the client reads too slowly", code="slow_reader", kind="timeout"
                        )
            yield self, None
        except BaseException as error:
            ended = error
            raise
        finally:
            if self.stream is not None:
                self.stream.close()
            trace.end(self.stream and self.stream.result, ended)


async def merged(
    choices: Sequence[Choice], runtime: EdgeRuntime
) -> AsyncIterator[tuple[Choice, Told]]:
    """The rounds of all answers, each in its order. Raises what the first to fail raises."""
    if len(choices) == 1:
        async with aclosing(choices[0].steps(runtime)) as steps:  # type: ignore[type-var]
            async for item in steps:
                yield item
        return
    queue: asyncio.Queue[tuple[Choice, Told] | BaseException] = asyncio.Queue(HELD_BACK)
    tasks = [
        asyncio.create_task(_feed(choice, runtime, queue), name=f"outrider-choice-{choice.index}")
        for choice in choices
    ]
    running = len(tasks)
    try:
        while running:
            told = await queue.get()
            if isinstance(told, BaseException):
                raise told
            running -= told[1] is None
            yield told
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(
    choice: Choice,
    runtime: EdgeRuntime,
    queue: asyncio.Queue[tuple[Choice, Told] | BaseException],
) -> None:
    try:
        async with aclosing(choice.steps(runtime)) as steps:  # type: ignore[type-var]
            async for item in steps:
                await queue.put(item)
    except Exception as error:  # noqa: BLE001 - it is raised where the answer is read
        await queue.put(error)
