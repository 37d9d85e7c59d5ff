"""Cache slots by session: brings each slot to what a session claims, then runs one forward.

Rules:

* A slot is reconciled with the session's committed ids before each forward, so rollback, a
  dropped block, eviction and a rebuild on another verifier are one and the same path (I4, I10).
* A session that is over leaves its slot *parked*. A new one of the same tenant whose ids begin
  like those of a slot takes it over, or copies the part they share: the next turn of a
  conversation and prompts with one head are not computed twice. Never across tenants, who could
  find out by the time it takes what another one asked.
* When the engine has no free slot, a parked one goes (of the tenant that has most, the oldest),
  then the one unused for longest; its session is rebuilt from its ids when it comes back.
* A parked slot fails no answer: where memory runs out, all of them go and the forward is tried
  once more.
* At least the newest committed token is always fed: its row is the one that is needed.
* A forward takes in at most `chunk` ids that say nothing yet (a prompt, a rebuild), so that a
  long prompt does not hold up the sessions that share the engine. A job whose ids are not all in
  gets no rows and is run again; what its slot holds by then is not fed twice.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from outrider.core.draft import NO_DRAFT, Draft
from outrider.core.grammar import Constraint
from outrider.core.tokens import Rule, SamplingParams
from outrider.engines.base import (
    Block,
    EngineError,
    FloatRow,
    LanguageModel,
    NoMemoryError,
    UnrecordedError,
    keep_prefix,
    plan_prefix,
)
from outrider.engines.drafters import Drafter, DraftSession

PREFILL_CHUNK: Final = 512
"""Ids of prompts that one forward takes in (our default): enough to keep an engine busy, and a
running answer waits for no more than these."""
MIN_SHARED: Final = 16
"""Ids that must be alike before a slot is shared (our default): fewer are computed as fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeskJob:
    """One session's part of a forward."""

    key: int
    committed: tuple[int, ...]
    """Prompt and committed output: at least one id."""
    drafts: tuple[int, ...] = ()
    own_draft: int = 0
    """Draft this many here, with the desk's own drafter, instead of judging `drafts`."""
    room: int = PREFILL_CHUNK
    """Most ids that say nothing yet which this forward may take in for the job, at least 1."""
    tenant: str = ""
    """Slots are shared within one tenant only."""
    prompt_length: int = 0
    params: SamplingParams = field(default_factory=SamplingParams)
    rule: Rule = Rule.COUPLED
    constraint: Constraint | None = None
    """Of the request's grammar, for the drafts made here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeskResult:
    """Rows of logits behind the committed prefix and each draft, float32 [drafts + 1, vocab]; no
    row at all, [0, vocab], while committed ids are missing in the slot: run the job again."""

    key: int
    rows: FloatRow
    fed: int
    """Tokens appended to the slot."""
    draft: Draft | None = None
    """What was drafted here; None unless `own_draft` was asked for."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What one job adds to a forward."""

    job: DeskJob
    block: Block | None
    """None: others have used up what this forward takes in."""
    draft: Draft | None = None


class _Kin(NamedTuple):
    """What a session must have in common with a slot before their ids are compared to the end:
    most of many slots begin otherwise."""

    tenant: str
    head: tuple[int, ...]
    """The first MIN_SHARED ids."""


def _kin(job: DeskJob) -> _Kin:
    return _Kin(job.tenant, job.committed[:MIN_SHARED])


class SlotDesk:
    """See the module docstring. Used by one thread, like the engine it owns."""

    def __init__(
        self, model: LanguageModel, drafter: Drafter | None = None, *, chunk: int = PREFILL_CHUNK
    ) -> None:
        """`chunk`: most ids, at least 1, that one forward takes in before the ids it has rows
        for."""
        if chunk < 1:
            raise ValueError(f"a chunk of {chunk} ids would never end")
        self.model = model
        self._drafter = drafter
        self._chunk = chunk
        self._slots: OrderedDict[int, int] = OrderedDict()
        self._parked: OrderedDict[int, _Kin] = OrderedDict()
        """Slots of sessions that are over, oldest first."""
        self._kin: dict[int, _Kin] = {}
        """Of each key that has a slot."""
        self.shared_ids = 0
        """Ids that were found in a slot of an earlier or another session."""
        self._drafts: dict[int, DraftSession] = {}
        self._filling: set[int] = set()
        """Keys whose slot holds a part of their ids."""
        self._whole: set[int] = set()
        """Keys that lost such a slot: fed in one piece, or two of them could take one slot from
        each other for ever."""
        self.evictions = 0

    @property
    def drafts(self) -> bool:
        """It can make drafts of its own."""
        return self._drafter is not None

    def run(self, jobs: Sequence[DeskJob]) -> list[DeskResult]:
        """One forward for all jobs; results in their order. At most one job a key.

        Ids are taken in in the order of the jobs, the first one's first. Raises EngineError when
        there are more jobs than slots, and what the engine raises.
        """
        keys = {job.key for job in jobs}
        room, parts = self._chunk, []
        for job in jobs:
            part, room = self._part(job, keys, room)
            parts.append(part)
        blocks = [part.block for part in parts if part.block is not None]
        rows = iter(self._forward(blocks))
        return [self._result(part, rows) for part in parts]

    def _forward(self, blocks: Sequence[Block]) -> list[FloatRow]:
        try:
            return self.model.forward(blocks)
        except NoMemoryError:
            if not self._parked:
                raise
        while self._unpark(None):
            pass
        return self.model.forward(blocks)

    def _part(self, job: DeskJob, busy: set[int], room: int) -> tuple[_Part, int]:
        """The job's part of a forward that takes in `room` more ids, and what is left of them."""
        slot = self._slot(job, busy)
        kept = keep_prefix(self.model, slot, job.committed)
        missing = len(job.committed) - 1 - kept
        own = min(room, job.room)
        if missing > own and job.key not in self._whole:
            self._filling.add(job.key)
            ids = job.committed[kept : kept + own]
            block = Block(slot=slot, start=kept, tokens=ids, rows=0) if ids else None
            return _Part(job, block), room - own
        draft = self._draft(job)
        drafts = (draft or NO_DRAFT).tokens or job.drafts
        tokens = (*job.committed[kept:], *drafts)
        block = Block(slot=slot, start=kept, tokens=tokens, rows=len(drafts) + 1)
        return _Part(job, block, draft), max(0, room - missing)

    def _result(self, part: _Part, rows: Iterator[FloatRow]) -> DeskResult:
        key, block = part.job.key, part.block
        if block is None:
            return DeskResult(key=key, rows=np.empty((0, 0), dtype=np.float32), fed=0)
        if block.rows:
            self._filling.discard(key)
            self._whole.discard(key)
        return DeskResult(key=key, rows=next(rows), fed=len(block.tokens), draft=part.draft)

    def _draft(self, job: DeskJob) -> Draft | None:
        if job.own_draft < 1 or self._drafter is None:
            return None
        try:
            session = self._drafts.get(job.key)
            if session is None:
                session = self._drafter.session(
                    job.prompt_length, job.params, job.rule, constraint=job.constraint
                )
                self._drafts[job.key] = session
            return session.propose(job.committed, job.own_draft)
        except UnrecordedError:
            raise
        except EngineError:
            return None  # a broken draft costs speed, never the answer

    def _slot(self, job: DeskJob, busy: set[int]) -> int:
        slot = self._slots.get(job.key)
        if slot is None:
            slot = self._slots[job.key] = self._begun(job, busy)
        self._kin[job.key] = _kin(job)  # the head of a short prompt grows
        self._slots.move_to_end(job.key)
        return slot

    def _begun(self, job: DeskJob, busy: set[int]) -> int:
        """A slot for a new session, with what the tenant's other slots hold of its ids."""
        if len(job.committed) <= MIN_SHARED:
            return self._open(busy)
        kin = _kin(job)
        mine = [s for s, other in self._parked.items() if other == kin]
        mine += [s for k, s in self._slots.items() if self._kin[k] == kin]
        alike = {s: plan_prefix(self.model.tokens(s), job.committed) for s in mine}
        best = max(alike, key=lambda s: alike[s], default=None)
        shared = min(alike[best], len(job.committed) - 1) if best is not None else 0
        if best is None or shared < MIN_SHARED:
            return self._open(busy)
        if best in self._parked and 2 * shared >= self.model.length(best):
            self.shared_ids += shared
            del self._parked[best]
            return best
        try:
            slot = self._open(busy, keep=best)
        except EngineError:
            # It may be all that could make room: then it is taken, and not copied.
            if not self._taken(best, busy):
                raise
            self.shared_ids += shared
            return best
        try:
            self.model.copy_prefix(best, slot, shared)
        except NoMemoryError:
            return slot  # an empty one is as right, and the forward says whether it fits
        self.shared_ids += shared
        return slot

    def _open(self, busy: set[int], *, keep: int | None = None) -> int:
        """A new slot; `keep` is one that must not be given up for it."""
        try:
            return self.model.open()
        except EngineError:
            if self._unpark(keep):
                return self.model.open()
            victim = next(
                (k for k, slot in self._slots.items() if k not in busy and slot != keep), None
            )
            if victim is None:
                raise
            self.model.close(self._evicted(victim))
            return self.model.open()

    def _evicted(self, key: int) -> int:
        """The slot that a living session loses."""
        self.evictions += 1
        if key in self._filling:
            self._whole.add(key)
        return self._forget(key)

    def _taken(self, slot: int, busy: set[int]) -> bool:
        """Take a slot from whoever has it; False where that one is at work."""
        if slot in self._parked:
            del self._parked[slot]
            return True
        owner = next(key for key, held in self._slots.items() if held == slot)
        if owner in busy:
            return False
        self._evicted(owner)
        return True

    def _unpark(self, keep: int | None) -> bool:
        """Give a parked slot up, if there is one."""
        counts = Counter(kin.tenant for kin in self._parked.values())
        free = {s: counts[kin.tenant] for s, kin in self._parked.items() if s != keep}
        slot = max(free, key=lambda s: free[s], default=None)
        if slot is not None:
            del self._parked[slot]
            self.model.close(slot)
        return slot is not None

    def _forget(self, key: int) -> int:
        del self._kin[key]
        return self._slots.pop(key)

    def release(self, key: int) -> None:
        """The session is over: its slot may serve the next one. Unknown keys are fine (evicted
        before)."""
        self._filling.discard(key)
        self._whole.discard(key)
        if key in self._slots:
            kin = self._kin[key]
            self._parked[self._forget(key)] = kin
        session = self._drafts.pop(key, None)
        if session is not None:
            session.close()

    def close(self) -> None:
        """Free everything: the verifier stops."""
        for key in {*self._slots, *self._drafts}:
            self.release(key)
        while self._unpark(None):
            pass

    @property
    def held(self) -> int:
        """Slots of sessions that live."""
        return len(self._slots)

    @property
    def parked(self) -> int:
        """Slots kept for what they hold."""
        return len(self._parked)

    def ids(self, key: int) -> tuple[int, ...] | None:
        """What the slot of a session holds (I10); None when it has none."""
        slot = self._slots.get(key)
        return None if slot is None else self.model.tokens(slot)
