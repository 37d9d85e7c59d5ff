"""One session in the cloud: draft frames in, verify jobs out, verdicts back.

Rules:

1. The committed prefix is the cloud's. A draft chain (proto.messages) is alive while it agrees
   with it; at the first difference it is dead, its pending drafts go, and frames of its epoch
   are dropped and counted (field case 16). So nothing that arrives can undo a token.
2. At most one forward of a session is in flight. Drafts that arrive meanwhile wait behind it.
3. `wait` runs a forward when a draft (or a call for a step) is there; `step` (free-run) always.
   The first forward, the prefill, never waits: the first token needs no draft.
4. How many pending drafts a forward judges: all of them, or as many as pay (`control.costs`),
   counting what the other sessions of the forward bring.
5. Under the ratio rule a rejection opens a dialogue (session.dialogue); no forward runs until it
   is closed. A repeated CORRECT gets a repeated answer (I4).
6. The cloud trusts no field (I5): ids, positions, counts and probabilities are checked here.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from outrider.control.costs import PrefixCurve
from outrider.core import draft as core_draft
from outrider.core.relaxed import RelaxedVerdict
from outrider.core.residual import TopKReply
from outrider.core.sparse import Sketch
from outrider.core.tokens import FinishReason, Origin, ParameterError, Rule, TokenLogprob
from outrider.core.tokens import Verdict as CoreVerdict
from outrider.proto.digest import of_prefix
from outrider.proto.errors import RemoteError
from outrider.proto.messages import (
    Code,
    Correct,
    Done,
    Draft,
    Load,
    Logprobs,
    Marks,
    Message,
    Relaxed,
    Steer,
    Tokens,
    Verdict,
)
from outrider.session.dialogue import CloudDialogue
from outrider.session.generation import Generation
from outrider.session.verifier import Judgement, OpenRejection, Verifier

MAX_REPLAY: Final = 512
"""Most ids in one replay frame after RESUME."""


class StepPolicy(enum.StrEnum):
    """When a forward runs for a session."""

    WAIT = "wait"
    STEP = "step"


class Take(enum.StrEnum):
    """How many pending drafts one forward judges."""

    ALL = "all"
    BEST = "best"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyJob:
    """One session's share of a forward: append to its cache, return `len(drafts) + 1` rows."""

    session: int
    committed: tuple[int, ...]
    drafts: tuple[int, ...]
    ready_at: float
    """Seconds, the driver's clock: since when the job could have run."""

    @property
    def rows(self) -> int:
        return len(self.drafts) + 1


class _Pending(NamedTuple):
    """A draft that waits to be judged."""

    token: int
    q: tuple[float, ...]
    """Ratio rule: one number; else none."""
    sketch: tuple[Sketch, ...]
    """Relaxed rule: one; else none."""
    threshold: float
    """T of the frame it came with, not of whatever was sent behind it."""


@dataclass(slots=True)
class Dropped:
    """Draft tokens thrown away without being judged, by reason."""

    stale: int = 0
    """Of a dead or older chain."""
    duplicate: int = 0
    gap: int = 0
    overflow: int = 0


class CloudSession:
    """See the module docstring."""

    def __init__(
        self,
        number: int,
        generation: Generation,
        verifier: Verifier,
        *,
        rule: Rule,
        policy: StepPolicy,
        take: Take,
        vocab_size: int,
        window: int,
        now: float,
        held: bool = False,
        reply: TopKReply | None = None,
    ) -> None:
        """`window`: most pending drafts held. `now`: seconds, when the session was opened.
        `held`: no forward before the first draft frame (proto.messages.Open). `reply`: how
        rejections are to be answered, and what is left of the edge's budget for that."""
        self.number = number
        self.generation = generation
        self.policy = policy
        self.curve = PrefixCurve()
        self.dropped = Dropped()
        self._verifier = verifier
        self._rule = rule
        self._take = take
        self._vocab_size = vocab_size
        self._window = window
        self._epoch = -1
        self._alive = False
        self._pending: list[_Pending] = []
        self._threshold = verifier.policy.threshold
        self._marks: list[int] = []
        self._relaxed_before = verifier.ledger.relaxed
        # Position at which one step of the target alone was asked for; the prefill never waits.
        self._asked: int | None = generation.sequence.base
        self._held = held
        self._ready_at = now
        self._job: VerifyJob | None = None
        self._job_draft = core_draft.NO_DRAFT
        self._job_epoch = -1
        self._drafts_here = False
        self._open: CloudDialogue | None = None
        self._reply = reply or TopKReply()
        # Log-probabilities told so far, for an edge that missed some: from `_told_from` on.
        self._told: list[TokenLogprob] = []
        self._told_from = generation.sequence.base

    # ---------------------------------------------------------------- draft frames

    def on_draft(self, frame: Draft, now: float) -> None:
        """Take a frame of drafts. Raises RemoteError on contents no honest edge sends."""
        self._check(frame)
        if self._held:
            self._held = False
            self._ready_at = now
        if self.generation.finish is not None:
            return
        if frame.epoch < self._epoch or (frame.epoch == self._epoch and not self._alive):
            self.dropped.stale += len(frame.tokens)
            return
        if frame.epoch > self._epoch:
            if frame.start > self.generation.sequence.base:
                # The head of the chain was lost; the edge will send it again.
                self.dropped.gap += len(frame.tokens)
                return
            self._epoch, self._alive = frame.epoch, True
            self._pending.clear()
        if not frame.tokens:
            # "No guess from here": only meaningful when nothing further was committed since.
            if frame.start == self.generation.sequence.base + len(self._pending):
                self._note_ready(now)
                self._asked = frame.start
            return
        self._append(frame, now)

    def on_steer(self, frame: Steer, now: float) -> None:
        """Another step policy from now on. Raises RemoteError for one that does not exist."""
        try:
            policy = StepPolicy(frame.step)
        except ValueError:
            words = " or ".join(StepPolicy)
            raise RemoteError(Code.PARAMETER, f"step is {words}", self.number) from None
        if policy is StepPolicy.STEP:
            self._note_ready(now)
        self.policy = policy

    def _check(self, frame: Draft) -> None:
        if any(t >= self._vocab_size for t in frame.tokens):
            raise RemoteError(Code.MALFORMED, "draft id outside the vocabulary", self.number)
        if frame.start < self.generation.sequence.prompt_length:
            raise RemoteError(Code.MALFORMED, "draft position inside the prompt", self.number)
        if self._rule is Rule.RELAXED:
            self._check_sketches(frame)
            return
        if frame.sketches or frame.threshold is not None:
            raise RemoteError(Code.MALFORMED, "sketches are of the relaxed rule", self.number)
        if self._rule is not Rule.RATIO:
            return
        if len(frame.q) != len(frame.tokens):
            raise RemoteError(Code.MALFORMED, "ratio drafts need one q(x) each", self.number)
        if any(not (0.0 < q <= 1.0 + 1e-9) or not math.isfinite(q) for q in frame.q):
            raise RemoteError(Code.MALFORMED, "q(x) must be in (0, 1]", self.number)

    def _check_sketches(self, frame: Draft) -> None:
        if len(frame.sketches) != len(frame.tokens):
            raise RemoteError(Code.MALFORMED, "relaxed drafts need one sketch each", self.number)
        if any(sketch.ids[-1] >= self._vocab_size for sketch in frame.sketches):
            raise RemoteError(Code.MALFORMED, "sketch of ids outside the vocabulary", self.number)
        if frame.threshold is None:
            return
        try:
            self._verifier.policy.with_threshold(frame.threshold)
        except ParameterError as error:
            raise RemoteError(Code.PARAMETER, str(error), self.number) from None

    def _append(self, frame: Draft, now: float) -> None:
        """Add what is new of the frame, comparing the rest with what is known."""
        sequence = self.generation.sequence
        if frame.start > sequence.base + len(self._pending):
            self.dropped.gap += len(frame.tokens)
            return
        if frame.start < sequence.base:
            known = (*sequence.committed[frame.start :], *(p.token for p in self._pending))
        else:
            known = tuple(p.token for p in self._pending[frame.start - sequence.base :])
        overlap = min(len(known), len(frame.tokens))
        if known[:overlap] != frame.tokens[:overlap]:
            self._kill_chain()
            self.dropped.stale += len(frame.tokens)
            return
        self.dropped.duplicate += overlap
        fresh = frame.tokens[overlap:]
        room = self._window - len(self._pending)
        self.dropped.overflow += max(0, len(fresh) - room)
        if fresh and room > 0:
            self._note_ready(now)
            if frame.threshold is not None:
                self._threshold = frame.threshold
            for i in range(overlap, overlap + len(fresh[:room])):
                self._pending.append(
                    _Pending(
                        token=frame.tokens[i],
                        q=frame.q[i : i + 1],
                        sketch=frame.sketches[i : i + 1],
                        threshold=self._threshold,
                    )
                )

    def _note_ready(self, now: float) -> None:
        """A forward becomes possible now, unless it already was."""
        if self._job is None and not self._wanted:
            self._ready_at = now

    def _kill_chain(self) -> None:
        self._alive = False
        self._pending.clear()

    @property
    def wants(self) -> bool:
        """Is there a forward to run for this session now?"""
        idle = self._job is None and self._open is None and self.generation.finish is None
        return idle and self._wanted

    @property
    def ready_at(self) -> float:
        """Since when (seconds) the wanted forward could have run."""
        return self._ready_at

    @property
    def _wanted(self) -> bool:
        """Would a forward run now, by the step policy?"""
        if self._held:
            return False
        if self.policy is StepPolicy.STEP or self._pending:
            return True
        return self._asked == self.generation.sequence.base

    # ---------------------------------------------------------------- forwards

    @property
    def usable(self) -> int:
        """Pending drafts that a forward could judge now: the target's own token takes the last
        place of the answer."""
        return min(len(self._pending), self.generation.tokens_left - 1)

    @property
    def chooses(self) -> bool:
        """A forward judges as many of them as pay; otherwise all."""
        return self._take is Take.BEST

    def next_job(self, count: int) -> VerifyJob:
        """The forward this session wants now, judging `count` of the `usable` drafts. Ask only
        while it `wants` one."""
        if not self.wants or not 0 <= count <= self.usable:
            raise ValueError(f"no forward over {count} drafts is wanted")
        block = self._pending[:count]
        draft = core_draft.Draft(
            tokens=tuple(p.token for p in block),
            q=tuple(x for p in block for x in p.q),
            sketches=tuple(x for p in block for x in p.sketch),
        )
        job = VerifyJob(
            session=self.number,
            committed=self.generation.sequence.committed,
            drafts=draft.tokens,
            ready_at=self._ready_at,
        )
        self._job, self._job_draft = job, draft
        if block and self._rule is Rule.RELAXED:
            strictest = min(p.threshold for p in block)
            self._verifier.policy = self._verifier.policy.with_threshold(strictest)
        self._job_epoch = self._epoch
        return job

    @property
    def laborious(self) -> bool:
        """Judging may take long: each row is held to a grammar, which came from outside."""
        return self.generation.params.grammar is not None

    def judge(
        self, rows: npt.NDArray[np.float32], own_draft: core_draft.Draft | None = None
    ) -> Judgement | OpenRejection:
        """Judge the forward in flight, for `complete` to go on with. While it is in flight nothing
        else uses what this touches, so it may run on another thread. Raises RowError."""
        if self._job is None:
            raise ValueError("no forward is in flight")
        return self._verifier.judge(own_draft or self._job_draft, rows, len(self._job.committed))

    def complete(
        self,
        rows: npt.NDArray[np.float32],
        load: Load,
        now: float,
        *,
        own_draft: core_draft.Draft | None = None,
        outcome: Judgement | OpenRejection | None = None,
    ) -> tuple[Message, ...]:
        """The forward is done: judge, commit, answer. float32 [drafts + 1, vocab].

        `own_draft`: what the cloud drafted itself for this forward (co-located speculation).
        `outcome`: of `judge`, where it has judged already.
        """
        if self._job is None:
            raise ValueError("no forward is in flight")
        if self.generation.finish is None and outcome is None:
            outcome = self.judge(rows, own_draft)
        job, self._job = self._job, None
        self._ready_at = now
        if outcome is None or self.generation.finish is not None:
            return ()
        self._drafts_here = self._drafts_here or own_draft is not None
        draft = own_draft or self._job_draft
        if isinstance(outcome, OpenRejection):
            self._open = CloudDialogue(
                outcome,
                draft,
                start=len(job.committed),
                epoch=self._job_epoch,
                load=load,
                seed=self.generation.params.seed,
                vocab_size=self._vocab_size,
                reply=self._reply,
            )
            return (self._open.first(self.number),)
        return self._commit(draft, outcome, load, own_draft=own_draft is not None)

    def abandon(self) -> None:
        """The forward failed or was cancelled before it judged anything."""
        self._job = None
        self._asked = self.generation.sequence.base

    def _commit(
        self,
        draft: core_draft.Draft,
        judgement: Judgement,
        load: Load,
        *,
        own_draft: bool = False,
    ) -> tuple[Message, ...]:
        start = self.generation.sequence.base
        step = self.generation.apply(draft, judgement)
        verdict = judgement.verdict
        marks = [start + i for i, o in enumerate(step.origins) if o is Origin.RELAXED]
        self._marks += marks
        self._learn(verdict, own_draft=own_draft)
        self._settle(step.tokens)
        messages: list[Message] = []
        if step.logprobs:
            self._told.extend(step.logprobs)
            messages.append(_logprobs(self.number, start, step.logprobs))
        if isinstance(verdict, RelaxedVerdict) and verdict.drafted and not own_draft:
            messages.append(self._relaxed(start, verdict, load))
        elif verdict.drafted and not own_draft:
            messages.append(
                Verdict(
                    session=self.number,
                    epoch=self._job_epoch,
                    start=start,
                    drafted=verdict.drafted,
                    accepted=verdict.accepted,
                    token=verdict.token,
                    load=load,
                )
            )
        else:
            if isinstance(verdict, RelaxedVerdict) and verdict.drafted:
                messages.append(self._marked(marks))
            messages.append(Tokens(session=self.number, start=start, tokens=step.tokens, load=load))
        if step.finish is not None:
            messages.append(self.done())
        return tuple(messages)

    def _marked(self, positions: Sequence[int]) -> Marks:
        ledger = self._verifier.ledger
        return Marks(
            session=self.number,
            positions=tuple(positions),
            spent=ledger.spent,
            max_jsd=ledger.max_jsd,
        )

    def _relaxed(self, start: int, verdict: RelaxedVerdict, load: Load) -> Relaxed:
        return Relaxed(
            session=self.number,
            epoch=self._job_epoch,
            start=start,
            drafted=verdict.drafted,
            accepted=verdict.accepted,
            token=verdict.token,
            strict=verdict.strict,
            marks=verdict.relaxed,
            spent=verdict.ledger.spent,
            max_jsd=verdict.ledger.max_jsd,
            load=load,
        )

    def _learn(self, verdict: CoreVerdict, *, own_draft: bool) -> None:
        """Feed the acceptance curve. Under the coupled rule a pending draft that was not judged
        is told apart by the target's own token all the same: so an acceptance that improves is
        noticed even while no draft is worth a row."""
        drafted, accepted = verdict.drafted, verdict.accepted
        # A chain that began during the forward starts at its head, or behind drafts not judged.
        same_chain = drafted == 0 or self._epoch == self._job_epoch
        told = self._rule is Rule.COUPLED and same_chain and not own_draft
        if told and accepted == drafted and len(self._pending) > drafted:
            accepted += self._pending[drafted].token == verdict.token
            drafted += 1
        self.curve.observe(drafted=drafted, accepted=accepted)

    def _settle(self, tokens: Sequence[int]) -> None:
        """Pending drafts that equal the new tokens go on behind them; others end the chain."""
        for token in tokens:
            if self._pending and self._pending[0].token == token:
                del self._pending[0]
            elif self._pending:
                self._kill_chain()
                return

    def done(self) -> Done:
        finish = self.generation.finish
        assert finish is not None, "the answer is not complete"
        return Done(
            session=self.number,
            reason=finish.value,
            output_tokens=self.generation.sequence.output_length,
            digest=of_prefix(self.generation.sequence.committed),
            near_ties=self.generation.counters.near_ties,
            own_drafted=self.generation.counters.drafted if self._drafts_here else 0,
            own_accepted=self.generation.counters.accepted if self._drafts_here else 0,
            relaxed=self._relaxed_before + self.generation.counters.relaxed,
            spent=self._verifier.ledger.spent,
            max_jsd=self._verifier.ledger.max_jsd,
        )

    # ---------------------------------------------------------------- residual dialogue

    def on_correct(self, frame: Correct, now: float) -> tuple[Message, ...]:
        """The edge chose, or needs more. Late and repeated frames are recognised by position."""
        dialogue = self._open
        if dialogue is None or frame.position != dialogue.position:
            return ()
        if frame.token is None:
            return (dialogue.more(frame),)
        if frame.left is not None:
            self._reply = self._poorer(frame.left)
        return self._chosen(dialogue, frame.token, now)

    def _poorer(self, left: float) -> TopKReply:
        """The edge's budget after a charge. It says only how to begin the next dialogue, so a lie
        costs the liar alone (I5); but a number it must be."""
        try:
            return replace(self._reply, budget=left)
        except ParameterError as error:
            raise RemoteError(Code.MALFORMED, str(error), self.number) from None

    def _chosen(self, dialogue: CloudDialogue, token: int, now: float) -> tuple[Message, ...]:
        if token >= self._vocab_size:
            raise RemoteError(Code.MALFORMED, "correction outside the vocabulary", self.number)
        self._open = None
        self._ready_at = now
        opened = dialogue.opened
        verdict = CoreVerdict(drafted=opened.drafted, accepted=opened.accepted, token=token)
        judgement = self._verifier.settle(verdict, dialogue.step)
        # The edge committed the token itself: the cloud answers only what the edge cannot know.
        replies = self._commit(dialogue.draft, judgement, dialogue.load)
        return tuple(m for m in replies if isinstance(m, Done | Logprobs))

    # ---------------------------------------------------------------- resume

    def replay(self, base: int, digest: bytes, now: float) -> tuple[Message, ...]:
        """What an edge that holds [0, base) has missed. Raises RemoteError on another prefix."""
        committed = self.generation.sequence.committed
        prompt = self.generation.sequence.prompt_length
        if not prompt <= base <= len(committed) or of_prefix(committed[:base]) != digest:
            raise RemoteError(
                Code.DIGEST, "the prefixes differ: open the session anew", self.number
            )
        messages: list[Message] = []
        for start in range(base, len(committed), MAX_REPLAY):
            end = min(start + MAX_REPLAY, len(committed))
            told = self._told[max(0, start - self._told_from) : max(0, end - self._told_from)]
            if told:
                first = max(start, self._told_from)
                messages.append(_logprobs(self.number, first, told))
            if self._rule is Rule.RELAXED:
                messages.append(self._marked([p for p in self._marks if start <= p < end]))
            messages.append(Tokens(session=self.number, start=start, tokens=committed[start:end]))
        if self._open is not None:
            messages.append(self._open.first(self.number))
        if self.generation.finish is not None:
            messages.append(self.done())
        elif self._job is None:
            self._ready_at = now
        return tuple(messages)

    def restore(self, committed: Sequence[int]) -> None:
        """Adopt output tokens that another verifier committed (I4), before anything ran."""
        if committed:
            self.generation.commit(committed, [Origin.TARGET] * len(committed))
            for token in self.generation.sequence.output:
                self._verifier.history.push(token)
            self._told_from = self.generation.sequence.base
            self._asked = self.generation.sequence.base

    @property
    def finish(self) -> FinishReason | None:
        return self.generation.finish

    @property
    def busy(self) -> bool:
        """A forward of this session is in flight."""
        return self._job is not None

    @property
    def drafts_come(self) -> bool:
        """Its edge has sent drafts, and the answer goes on."""
        return self._epoch >= 0 and self.generation.finish is None

    @property
    def pending(self) -> int:
        """Drafts waiting to be judged."""
        return len(self._pending)


def _logprobs(session: int, start: int, entries: Sequence[TokenLogprob]) -> Logprobs:
    return Logprobs(
        session=session,
        start=start,
        entries=tuple((e.token, e.logprob, e.top) for e in entries),
    )
