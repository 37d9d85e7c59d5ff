"""Cache slots by session: brings each slot to what a session claims, then runs one forward.

Rules:

* A slot is reconciled with the session's committed ids before each forward, so rollback, a
  dropped block, eviction and a rebuild on another verifier are one and the same path (I4, I10).
* When the engine has no free slot, the one unused for longest is given up; its session is
  rebuilt from its ids when it comes back.
* At least the newest committed token is always fed: its row is the one that is needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.draft import NO_DRAFT, Draft
from outrider.core.tokens import Rule, SamplingParams
from outrider.engines.base import Block, EngineError, FloatRow, LanguageModel, keep_prefix
from outrider.engines.drafters import Drafter, DraftSession


@dataclass(frozen=True, slots=True, kw_only=True)
class DeskJob:
    """One session's part of a forward."""

    key: int
    committed: tuple[int, ...]
    """Prompt and committed output: at least one id."""
    drafts: tuple[int, ...] = ()
    own_draft: int = 0
    """Draft this many here, with the desk's own drafter, instead of judging `drafts`."""
    prompt_length: int = 0
    params: SamplingParams = field(default_factory=SamplingParams)
    rule: Rule = Rule.COUPLED


@dataclass(frozen=True, slots=True, kw_only=True)
class DeskResult:
    """Rows of logits behind the committed prefix and each draft, float32 [drafts + 1, vocab]."""

    key: int
    rows: FloatRow
    fed: int
    """Tokens appended to the slot."""
    draft: Draft | None = None
    """What was drafted here; None unless `own_draft` was asked for."""


class SlotDesk:
    """See the module docstring. Used by one thread, like the engine it owns."""

    def __init__(self, model: LanguageModel, drafter: Drafter | None = None) -> None:
        self.model = model
        self._drafter = drafter
        self._slots: OrderedDict[int, int] = OrderedDict()
        self._drafts: dict[int, DraftSession] = {}
        self.evictions = 0

    @property
    def drafts(self) -> bool:
        """It can make drafts of its own."""
        return self._drafter is not None

    def run(self, jobs: Sequence[DeskJob]) -> list[DeskResult]:
        """One forward for all jobs; results in their order. At most one job a key."""
        keys = {job.key for job in jobs}
        drafts = [self._draft(job) for job in jobs]
        blocks = [
            self._block(job, (draft or NO_DRAFT).tokens or job.drafts, keys)
            for job, draft in zip(jobs, drafts, strict=True)
        ]
        rows = self.model.forward(blocks)
        return [
            DeskResult(key=job.key, rows=r, fed=len(block.tokens), draft=draft)
            for job, r, block, draft in zip(jobs, rows, blocks, drafts, strict=True)
        ]

    def _draft(self, job: DeskJob) -> Draft | None:
        if job.own_draft < 1 or self._drafter is None:
            return None
        try:
            session = self._drafts.get(job.key)
            if session is None:
                session = self._drafter.session(job.prompt_length, job.params, job.rule)
                self._drafts[job.key] = session
            return session.propose(job.committed, job.own_draft)
        except EngineError:
            return None  # a broken draft costs speed, never the answer

    def _block(self, job: DeskJob, drafts: tuple[int, ...], busy: set[int]) -> Block:
        slot = self._slot(job.key, busy)
        kept = keep_prefix(self.model, slot, job.committed)
        tokens = (*job.committed[kept:], *drafts)
        return Block(slot=slot, start=kept, tokens=tokens, rows=len(drafts) + 1)

    def _slot(self, key: int, busy: set[int]) -> int:
        slot = self._slots.get(key)
        if slot is None:
            slot = self._open(busy)
            self._slots[key] = slot
        self._slots.move_to_end(key)
        return slot

    def _open(self, busy: set[int]) -> int:
        try:
            return self.model.open()
        except EngineError:
            victim = next((k for k in self._slots if k not in busy), None)
            if victim is None:
                raise
            self.evictions += 1
            self.model.close(self._slots.pop(victim))
            return self.model.open()

    def release(self, key: int) -> None:
        """The session is over: free what it held. Unknown keys are fine (evicted before)."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self.model.close(slot)
        session = self._drafts.pop(key, None)
        if session is not None:
            session.close()

    def close(self) -> None:
        """Free everything: the verifier stops."""
        for key in {*self._slots, *self._drafts}:
            self.release(key)

    @property
    def held(self) -> int:
        """Slots in use."""
        return len(self._slots)
