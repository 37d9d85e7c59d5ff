"""One answer of an edge as its reader sees it: steps as they come, then the account."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from outrider.core.tokens import Origin, TokenLogprob
from outrider.engines.base import EngineError
from outrider.engines.drafters import DraftSession
from outrider.proto.messages import Hello
from outrider.runtime.contact import Contact
from outrider.runtime.drafting import Drafting
from outrider.runtime.edgerequest import EdgeRequest
from outrider.runtime.failures import CloudError
from outrider.runtime.linkuse import LinkUse
from outrider.runtime.local import GenerationResult, Timing
from outrider.session.edge import EdgeSession
from outrider.session.events import Ended, Failed
from outrider.session.generation import Step
from outrider.session.schedules import Schedule


@dataclass(slots=True)
class Running:
    """One session's place in the runtime."""

    request: EdgeRequest
    steps: asyncio.Queue[Step | Ended | Failed | EngineError | Contact]
    drafts: DraftSession | None = None
    paused_at: float | None = None
    """Seconds: since when it waits for its reader; None: it does not."""
    contact: Contact | None = None
    """What its reader does not know yet of the link."""

    def inform(self, contact: Contact) -> None:
        """Of the link's changes that nobody has read, one is kept: the last."""
        if self.contact is None:
            self.steps.put_nowait(contact)
        self.contact = contact


class Home(Protocol):
    """The edge that makes the answer."""

    peer: Hello | None
    drafting: Drafting

    @property
    def link_use(self) -> LinkUse: ...

    def taken(self, number: int) -> None:
        """A reader took a step."""

    def end(self, number: int) -> None:
        """Nobody reads any more."""

    def failure(self, failed: Failed) -> CloudError: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeResult:
    """A finished answer and its account."""

    generation: GenerationResult
    schedule: Schedule
    link: LinkUse
    origins: tuple[Origin, ...]
    wasted: int
    """Drafted tokens dropped unjudged: the price of running ahead."""
    confirmed: bool
    """The cloud's digest of the whole answer agreed with ours."""

    def as_dict(self) -> dict[str, object]:
        """The JSON object of `outrider generate --cloud --json`."""
        facts = self.generation.as_dict()
        facts.update(
            schedule=self.schedule.value,
            payload_up=self.link.payload_up,
            payload_down=self.link.payload_down,
            bytes_up=self.link.bytes_up,
            bytes_down=self.link.bytes_down,
            reconnects=self.link.reconnects,
            wasted=self.wasted,
            confirmed=self.confirmed,
            origins=[o.value for o in self.origins],
        )
        return facts


class EdgeStream:
    """Iterate for `Step`s, or call `told` to hear of the link as well. Leaving early and calling
    `close` cancels on both sides."""

    def __init__(self, home: Home, running: Running, machine: EdgeSession) -> None:
        self._home = home
        self._running = running
        self._machine = machine
        self._number = machine.number
        self._generation = machine.generation
        self._started = time.monotonic()
        self._marks: list[tuple[float, int]] = []
        self._texts: list[str] = []
        self._origins: list[Origin] = []
        self._logprobs: list[TokenLogprob] = []
        self._before = home.link_use
        self._draft_s = home.drafting.seconds
        self._result: EdgeResult | None = None

    async def __aiter__(self) -> AsyncIterator[Step]:
        async with aclosing(self.told()) as items:  # type: ignore[type-var]
            async for item in items:
                if isinstance(item, Step):
                    yield item

    async def told(self) -> AsyncIterator[Step | Contact]:
        """Steps, and between them what becomes of the link while they are awaited."""
        try:
            while True:
                item = await self._running.steps.get()
                self._home.taken(self._number)
                if isinstance(item, Failed):
                    raise self._home.failure(item)
                if isinstance(item, EngineError):
                    raise item
                if isinstance(item, Ended):
                    self._result = self._summary(confirmed=item.confirmed)
                    return
                if isinstance(item, Contact):
                    item, self._running.contact = self._running.contact or item, None
                    yield item
                    continue
                self._note(item)
                yield item
        finally:
            self.close()

    def close(self) -> None:
        """Stop now; `result` then covers what was committed."""
        if self._result is None:
            self._result = self._summary(confirmed=False)
        self._home.end(self._number)

    @property
    def result(self) -> EdgeResult:
        if self._result is None:
            raise RuntimeError("the answer is still running: iterate it or close it first")
        return self._result

    @property
    def unread(self) -> int:
        """Steps that wait to be taken."""
        return self._running.steps.qsize()

    @property
    def behind_s(self) -> float:
        """Seconds for which the answer has been paused for its reader; 0: it is not."""
        since = self._running.paused_at
        return 0.0 if since is None else time.monotonic() - since

    @property
    def link(self) -> LinkUse:
        """What went over the link since this answer began."""
        return self._home.link_use.since(self._before)

    @property
    def draft_seconds(self) -> float:
        """Seconds of this edge's drafting since this answer began, for whichever answers."""
        return self._home.drafting.seconds - self._draft_s

    def _note(self, step: Step) -> None:
        self._marks.append((time.monotonic(), len(step.tokens)))
        self._texts.append(step.text)
        self._origins.extend(step.origins)
        self._logprobs.extend(step.logprobs)

    def _summary(self, *, confirmed: bool) -> EdgeResult:
        request = self._running.request
        sequence = self._generation.sequence
        peer, drafter = self._home.peer, self._home.drafting.drafter
        result = GenerationResult(
            text="".join(self._texts),
            token_ids=sequence.output,
            prompt_tokens=sequence.prompt_length,
            finish_reason=self._generation.finish,
            seed=request.params.seed,
            target_forwards=self._generation.counters.rounds,
            counters=self._generation.counters,
            timing=self._timing(),
            target=peer.model if peer else "",
            draft=drafter.name if drafter else "none",
            verify=request.rule,
            logprobs=tuple(self._logprobs),
            relaxed=self._machine.ledger if request.relaxation else None,
            tv=self._machine.tv if request.reply.k else None,
        )
        return EdgeResult(
            generation=result,
            schedule=request.schedule,
            link=self.link,
            origins=tuple(self._origins),
            wasted=self._machine.wasted,
            confirmed=confirmed,
        )

    def _timing(self) -> Timing:
        now = time.monotonic()
        first = self._marks[0][0] if self._marks else now
        later = sum(count for _, count in self._marks[1:])
        return Timing(
            ttft_s=first - self._started,
            tpot_s=(self._marks[-1][0] - first) / later if later else None,
            total_s=(self._marks[-1][0] if self._marks else now) - self._started,
            draft_s=self.draft_seconds,
            target_s=None,
        )
