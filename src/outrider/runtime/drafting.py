"""An edge's draft engine, on a thread of its own: slots for answers, and batches of drafts.

Whatever goes wrong here costs speed, never the answer; a replayed draft alone cannot be replaced by
none, or what is measured would not be what was recorded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from outrider.core.draft import NO_DRAFT, Draft
from outrider.core.grammar import Constraint
from outrider.core.relaxation import DEFAULT_SKETCH
from outrider.engines.base import UnrecordedError
from outrider.engines.drafters import Drafter, DraftSession, GivenDrafter
from outrider.engines.grammar import GrammarReader, available
from outrider.engines.lockstep import Ask, propose_together
from outrider.engines.tokenizer import Tokenizer
from outrider.runtime.dialling import reason_of
from outrider.runtime.edgerequest import EdgeRequest
from outrider.runtime.worker import EngineThread, Timed

log = logging.getLogger("outrider.edge")


DraftTold = Callable[[int, Draft | UnrecordedError, float], None]
"""Called in the event loop, once for each draft that was asked for: the session, its draft, and its
part of the engine's time in seconds. An error instead of a draft: the answer cannot go on."""


class Drafting:
    """The draft engine of an edge; without a drafter, of drafts that are given."""

    def __init__(
        self, tokenizer: Tokenizer, drafter: Drafter | None, told: DraftTold, *, pace: float = 0.0
    ) -> None:
        self.drafter = drafter
        self.seconds = 0.0
        """Of the engine's time, so far."""
        self.timed: Callable[[int, float], None] | None = None
        """Told the tokens and seconds of each drafting job, for whoever measures."""
        self._told = told
        self._grammars = GrammarReader(tokenizer) if available() else None
        self._engine = EngineThread("draft", pace=pace)
        self._open: set[DraftSession] = set()
        """Every draft session that holds a slot."""
        self._closed = False

    async def close(self) -> None:
        """Free everything, behind the forward that runs."""
        self._closed = True
        await asyncio.to_thread(self._engine.close)
        for session in self._open:  # the engine's thread is gone: nobody else uses them
            session.close()
        self._open.clear()

    # ---------------------------------------------------------------- slots

    async def session(self, request: EdgeRequest) -> DraftSession | None:
        """A draft session for an answer, or None where there is no draft engine or it has no room.
        Raises GrammarError, and UnrecordedError for a replayed draft."""
        constraint = await self._constraint(request)
        drafter = GivenDrafter() if request.params.given else self.drafter
        if drafter is None or self._closed:
            return None

        def make() -> DraftSession:
            sketch = request.relaxation.sketch if request.relaxation else DEFAULT_SKETCH
            session = drafter.session(
                len(request.prompt_ids),
                request.params,
                request.rule,
                sketch=sketch,
                constraint=constraint,
            )
            self._open.add(session)
            made.append(session)
            return session

        made: list[DraftSession] = []
        try:
            return await self._engine.chore(make)
        except asyncio.CancelledError:
            self._free(made)  # the call may be running: what it makes is freed behind it
            raise
        except UnrecordedError:
            raise
        except Exception as error:  # noqa: BLE001 - a broken draft costs speed, never the answer
            log.warning("no draft for this answer: %s", reason_of(error))
            return None

    async def _constraint(self, request: EdgeRequest) -> Constraint | None:
        """Of the request's grammar, for its drafts. None where grammars cannot be read: drafts then
        break it, and fall in the cloud, which costs speed."""
        grammar = request.params.grammar
        if grammar is None:
            return None
        if self._grammars is None:
            log.warning("drafts know of no grammar: install outrider[grammar] here, too")
            return None
        return await asyncio.to_thread(self._grammars.constraint, grammar)

    def let_go(self, session: DraftSession | None) -> None:
        """Free a draft session, behind whatever the engine does with it now."""
        if session is not None:
            self._free([session])

    def _free(self, sessions: Sequence[DraftSession]) -> None:
        def close_all() -> None:
            for session in sessions:
                session.close()
                self._open.discard(session)

        if not self._closed:  # else `close` does
            self._engine.submit(close_all, self._freed, forward=False)

    def _freed(self, outcome: Timed[Any] | BaseException) -> None:
        if isinstance(outcome, BaseException) and not self._closed:
            log.warning("freeing a draft's slot failed: %s", reason_of(outcome))

    # ---------------------------------------------------------------- drafts

    def propose(self, asks: Mapping[int, Ask]) -> None:
        """Draft for sessions together. Whatever becomes of each, it is told."""
        batch = list(asks.values())
        self._engine.submit_each(
            lambda: propose_together(batch), partial(self._proposed, _Batch(tuple(asks)))
        )

    def _proposed(
        self, batch: _Batch, outcome: Timed[tuple[int, Draft | Exception]] | BaseException
    ) -> None:
        if isinstance(outcome, Timed):
            place, draft = outcome.value
            number, seconds = batch.done(place, outcome)
            self.seconds += seconds
            if isinstance(draft, Draft):
                if self.timed is not None:
                    self.timed(len(draft), seconds)
                self._told(number, draft, seconds)
                return
            if isinstance(draft, UnrecordedError):
                self._told(number, draft, 0.0)
                return
            log.warning("drafting failed: %s", reason_of(draft))
            self._told(number, NO_DRAFT, 0.0)
        elif not self._closed:
            log.warning("drafting failed: %s", reason_of(outcome))
            for number in batch.rest():
                self._told(number, NO_DRAFT, 0.0)


class _Batch:
    """Sessions that draft together, and what of the engine's time is whose: of every stretch of
    it, one part for each session that was still in the batch."""

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self._left = dict(enumerate(numbers))
        self._until: float | None = None
        self._share = 0.0

    def done(self, place: int, told: Timed[Any]) -> tuple[int, float]:
        """The session whose job is done, and its seconds."""
        since = told.started if self._until is None else self._until
        self._share += (told.ended - since) / len(self._left)
        self._until = told.ended
        return self._left.pop(place), self._share

    def rest(self) -> list[int]:
        """Sessions of which nothing will be told any more."""
        left, self._left = self._left, {}
        return list(left.values())
