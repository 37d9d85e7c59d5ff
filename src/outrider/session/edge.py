"""One session at the edge: drafts in, draft frames out, the cloud's words in, steps out.

Rules:

1. Only the cloud commits. What it commits is compared with the drafted tail: equal tokens are
   settled, the first difference drops the tail and begins a new epoch (proto.messages).
2. At most one drafting job is in flight. Its result counts only if it still continues what is
   committed; otherwise it is dropped and counted.
3. How far ahead to draft is the window policy's business; when, the client's, which has one draft
   engine for all sessions (session.turns). Drafts go out as soon as a drafting job is done: a
   chunk of one is a stream, a chunk of K a block.
4. When nothing can be drafted (full window, no guess, the end in sight) and the cloud waits for
   drafts, an empty DRAFT asks for one step of the target alone.
5. With a controller (session.pilot) the window is what it says, capped by the policy; where it
   says "do not speculate", the session asks for STEP: the cloud then streams alone.
6. While nobody takes its tokens a session is paused: it drafts nothing and asks for nothing.
7. A frame that was sent and not answered for `retry_after` seconds is sent again, as it was:
   retransmission replays, it never redraws.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from outrider.core import draft as core_draft
from outrider.core.draft import StopRule
from outrider.core.ledger import Ledger
from outrider.core.relaxation import Relaxation, require_relaxation
from outrider.core.residual import TopKReply, require_ratio
from outrider.core.sampling import Distribution
from outrider.core.sparse import Sketch
from outrider.core.tokens import Origin, ParameterError, Rule, TokenLogprob
from outrider.core.verify import ResidualStep, proposal_step
from outrider.proto.codec import MAX_BLOCK, encode
from outrider.proto.digest import DigestChain
from outrider.proto.errors import RemoteError
from outrider.proto.messages import (
    Code,
    Correct,
    Done,
    Draft,
    Logprobs,
    Marks,
    Message,
    Proposals,
    Relaxed,
    Row,
    Tokens,
    TopK,
    Verdict,
)
from outrider.session.dialogue import Call, Choice, EdgeDialogue
from outrider.session.generation import Generation, Round, Step
from outrider.session.pilot import Judged, Pilot, WatchingPilot

FRAME_BYTES: Final = 6
"""What a DRAFT frame is long without its ids, about: a controller is told sizes, not counts."""
ID_BYTES: Final = 3
Q_BYTES: Final = 8
SKETCH_BYTES: Final = 9
SKETCH_ID_BYTES: Final = 4
RETRY_AFTER: Final = 10.0
"""Seconds without progress before an unanswered frame is sent again (our default). A transport
that keeps order and delivers makes this a net for the peer's bugs, not the normal path."""


MAX_GROWTH: Final = 4.0
"""Largest eta: five times the window on one good block is beyond any use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPolicy:
    """How many unjudged drafts may exist, and in what portions they are made and sent."""

    window: int
    """Most unjudged drafts; 0: never draft."""
    chunk: int
    """Drafts made (and sent) at a time."""
    wait_empty: bool = False
    """Draft only when nothing is outstanding: the plain synchronous loop."""
    asks: bool = True
    """Ask for a step when there is no draft to send (the cloud waits for drafts)."""
    lead: int = 0
    """So many drafts of an empty window go ahead alone (pre-hit, PEARL and E2-SCI: a block whose
    first token falls is known to be lost before the rest is made); 0: no difference."""
    growth: float = 0.0
    """eta: a block that stands whole while others are under way lets the window grow by the
    factor 1 + eta, a rejection brings it back (E2-SCI's W * prod(1 + eta_j))."""
    reach: int = 0
    """Most drafts that a grown window may hold; 0: it does not grow."""

    def __post_init__(self) -> None:
        if self.window < 0 or self.chunk < 1 or self.lead < 0 or self.reach < 0:
            raise ValueError(f"{self}")
        if not 0.0 <= self.growth <= MAX_GROWTH:
            raise ValueError(f"growth={self.growth} is not in [0, {MAX_GROWTH}]")

    @property
    def most(self) -> int:
        """Most unjudged drafts there can ever be."""
        return max(self.window, self.reach)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftJob:
    """Draft up to `count` ids behind `context`."""

    context: tuple[int, ...]
    """Prompt, committed output and unjudged drafts."""
    count: int
    epoch: int
    stop: StopRule | None = None
    """May end the block early."""


class EdgeSession:
    """See the module docstring."""

    def __init__(
        self,
        number: int,
        generation: Generation,
        policy: WindowPolicy,
        *,
        now: float,
        rule: Rule = Rule.COUPLED,
        relaxation: Relaxation | None = None,
        retry_after: float = RETRY_AFTER,
        pilot: Pilot | None = None,
        reply: TopKReply | None = None,
    ) -> None:
        """Under the ratio rule drafts carry q and keep their rows here, and `reply` says how
        rejections may be answered; under the relaxed one, which needs `relaxation`, they carry
        sketches."""
        require_relaxation(rule, relaxation)
        self.reply = reply or TopKReply()
        require_ratio(rule, self.reply)
        self.tv = self.reply.ledger
        """What truncated residuals have cost, of the tokens committed here."""
        self.number = number
        self.generation = generation
        self.policy = policy
        self.wasted = 0
        """Drafted ids that were dropped unjudged: the price of running ahead."""
        self.rejoined = 0
        """Committed tokens that came without a verdict but had been drafted all the same."""
        self.alone = False
        """The controller found that speculation does not pay, or the cloud that it has no time for
        drafts: the cloud should stream alone."""
        self.paused = False
        """Nobody takes its tokens: it drafts and asks for nothing, until `resume`."""
        self._limit: int | None = None
        self._pilot = pilot or WatchingPilot()
        self._grown = 1.0
        self._last_window = policy.window
        self._needs_q = rule is Rule.RATIO
        self.relaxation = relaxation
        self._charged = relaxation.ledger if relaxation else Ledger()
        self._sketches: list[Sketch] = []
        self._marked: set[int] = set()
        self._retry_after = retry_after
        self._digest = DigestChain()
        self._drafting: DraftJob | None = None
        self._sent = 0
        self._asked: int | None = None
        self._rows: list[tuple[float, Distribution]] = []
        self._progress = now
        self._logprobs: dict[int, TokenLogprob] = {}
        self._dialogue: EdgeDialogue | None = None
        self._awaited: Choice | None = None
        self._refused = False

    # ---------------------------------------------------------------- drafting

    def room(self, now: float) -> int:
        """How many ids a drafting job of now would draft; 0: none wanted, or one is under way."""
        sequence = self.generation.sequence
        over = self.generation.finish is not None
        if self._drafting is not None or over or self._refused or self.paused:
            return 0
        tail = sequence.tail
        outstanding = len(tail)
        if outstanding and (self.policy.wait_empty or self.generation.rules.is_end(tail[-1])):
            return 0  # behind a guessed end there is nothing to guess
        if self.policy.wait_empty and not sequence.output_length:
            # The prefill's own token comes first. A block that raced it would be judged with it
            # or behind it, as the network pleases: under the ratio rule, another text (I4).
            return 0
        window = self._window(now)
        room = min(
            window - outstanding, self.generation.draft_room(window + outstanding) - outstanding
        )
        chunk = self.policy.chunk if outstanding else self.policy.lead or self.policy.chunk
        return max(0, min(chunk, room))

    @property
    def ahead(self) -> bool:
        """A job of now would run ahead: drafts of this session are unjudged."""
        return bool(self.generation.sequence.tail)

    def next_draft(self, now: float) -> DraftJob | None:
        """The drafting job wanted now, if none is in flight."""
        count = self.room(now)
        if not count:
            return None
        sequence = self.generation.sequence
        self._drafting = DraftJob(
            context=sequence.slice(0),
            count=count,
            epoch=sequence.epoch,
            stop=self._pilot.stop_rule(),
        )
        return self._drafting

    def greeted(self, network: float, now: float) -> None:
        """OPENED came `network` seconds behind OPEN."""
        self._pilot.greeted(network, ID_BYTES * self.generation.sequence.base, now)
        self._window(now)

    def ask(self, now: float) -> None:
        """Find out whether the cloud should stream alone, before the session is opened there."""
        self._window(now)

    def _window(self, now: float) -> int:
        """Most unjudged drafts now: the policy's, the controller's, and what has grown on it."""
        policy = self.policy
        useful = self.generation.draft_room(policy.window)
        limit = policy.most if self._limit is None else self._limit
        window = self._pilot.length(now, min(useful, limit))
        self.alone = useful > 0 and window == 0
        if policy.reach and window:
            window = min(int(window * self._grown), max(policy.reach, window), limit)
        self._last_window = window
        return window

    def limited(self, window: int | None) -> None:
        """The cloud wants at most `window` unjudged drafts from now on; None: no limit."""
        self._limit = window

    def pause(self) -> None:
        """Draft and ask for nothing from now on; what was sent is answered."""
        self.paused = True

    def resume(self, now: float) -> None:
        """Go on. The pause is nobody's round: a controller does not hear of it."""
        self.paused = False
        self._touch(now)
        self._pilot.resumed(now)

    def drafted(
        self, draft: core_draft.Draft, now: float, *, seconds: float = 0.0
    ) -> tuple[Message, ...]:
        """The drafting job's result, and what it took; frames to send."""
        job, self._drafting = self._drafting, None
        if draft.tokens and seconds > 0.0:
            self._pilot.drafted(len(draft.tokens), seconds)
        if job is None or self.generation.finish is not None:
            return ()
        sequence = self.generation.sequence
        known = sequence.slice(0)
        overlap = len(known) - len(job.context)
        fits = (
            job.epoch == sequence.epoch
            and draft.tokens[:overlap] == known[len(job.context) :][: len(draft.tokens)]
        )
        if not fits:
            self.wasted += len(draft.tokens)
            return ()
        # An empty guess is final for its position: without this the driver would ask for ever.
        self._refused = not draft.tokens and not overlap
        fresh = draft.tokens[overlap:]
        sequence.extend(fresh)
        if self._needs_q:
            self._rows.extend(zip(draft.q[overlap:], draft.rows[overlap:], strict=True))
        if self.relaxation is not None:
            self._sketches.extend(draft.sketches[overlap:])
        return self.unsent(now)

    def unsent(self, now: float) -> tuple[Message, ...]:
        """Frames that are due: fresh drafts, or the call for a step."""
        sequence = self.generation.sequence
        if self.generation.finish is not None:
            return ()
        tail = sequence.tail
        if self._sent < len(tail):
            start = sequence.base + self._sent
            frame = self._frame(start, tail[self._sent :])
            self._sent = len(tail)
            self._touch(now)
            self._pilot.sent(start + len(frame.tokens), self._size(len(frame.tokens)), now)
            return (frame,)
        if self._must_ask(len(tail)):
            self._asked = sequence.base
            self._touch(now)
            return (self._frame(sequence.base, ()),)
        return ()

    def _must_ask(self, outstanding: int) -> bool:
        """Nothing is outstanding, nothing can be drafted, and the cloud waits for a frame."""
        if (
            self.alone
            or self.paused
            or not self.policy.asks
            or outstanding
            or self._asked == self.generation.sequence.base
        ):
            return False
        idle = self._drafting is None
        return idle and (self._refused or self.generation.draft_room(self.policy.window) == 0)

    def _frame(self, start: int, tokens: tuple[int, ...]) -> Draft:
        sequence = self.generation.sequence
        first = start - sequence.base
        q = tuple(q for q, _ in self._rows[first : first + len(tokens)]) if self._needs_q else ()
        sketches = tuple(self._sketches[first : first + len(tokens)])
        return Draft(
            session=self.number,
            epoch=sequence.epoch,
            start=start,
            tokens=tokens,
            q=q,
            sketches=sketches,
            threshold=self._pilot.threshold if sketches else None,
        )

    def _size(self, count: int) -> int:
        """Bytes of a frame of so many drafts, about."""
        each = ID_BYTES + Q_BYTES * self._needs_q
        if self.relaxation is not None:
            each += SKETCH_BYTES + SKETCH_ID_BYTES * self.relaxation.sketch
        return FRAME_BYTES + count * each

    def _touch(self, now: float) -> None:
        self._progress = now

    # ---------------------------------------------------------------- the cloud's words

    def on_verdict(self, frame: Verdict | Relaxed, now: float) -> Step | None:
        """Commit a verdict; None when it is a repetition of what is already committed."""
        sequence = self.generation.sequence
        if self._old(frame.start, now) or self.generation.finish is not None:
            return None
        if frame.accepted > len(sequence.tail) or (
            frame.accepted and frame.epoch != sequence.epoch
        ):
            raise RemoteError(Code.STATE, "verdict on drafts that were never sent", self.number)
        tokens = (*sequence.tail[: frame.accepted], frame.token)
        last = Origin.BONUS if frame.accepted == frame.drafted else Origin.CORRECTION
        origins = [*[Origin.DRAFT] * frame.accepted, last]
        strict = frame.accepted
        if isinstance(frame, Relaxed):
            strict = self._relaxed(frame, origins)
        step = self._commit(tokens, tuple(origins))
        self.generation.count(drafted=frame.drafted, accepted=frame.accepted, kept=len(step.tokens))
        judged = Judged(
            start=frame.start,
            drafted=frame.drafted,
            accepted=frame.accepted,
            strict=strict,
            tokens=len(step.tokens),
            load=frame.load,
        )
        return self._judged(judged, step, now)

    def _relaxed(self, frame: Relaxed, origins: list[Origin]) -> int:
        """Mark the tokens and keep the ledger; the drafts that the strict rule had accepted."""
        if self.relaxation is None:
            raise RemoteError(Code.STATE, "a relaxed verdict nobody asked for", self.number)
        for i in frame.marks:
            origins[i] = Origin.RELAXED
        self._charge(frame.spent, frame.max_jsd)
        return frame.strict

    def _charge(self, spent: float, max_jsd: float) -> None:
        """The cloud's ledger, which only ever grows."""
        before = self._charged
        try:
            self._charged = replace(
                before, spent=max(before.spent, spent), max_jsd=max(before.max_jsd, max_jsd)
            )
        except ParameterError as error:
            raise RemoteError(Code.STATE, f"the ledger: {error}", self.number) from None

    @property
    def ledger(self) -> Ledger:
        """What relaxing has cost, as the cloud said last, of the tokens committed here."""
        return self.generation.accounted(self._charged)

    def on_marks(self, frame: Marks) -> None:
        """Which of the next tokens are relaxed, and what they cost."""
        if self.relaxation is None:
            raise RemoteError(Code.STATE, "marks nobody asked for", self.number)
        if self.generation.finish is None:
            self._charge(frame.spent, frame.max_jsd)
            base = self.generation.sequence.base
            self._marked |= {p for p in frame.positions if base <= p < base + MAX_BLOCK}

    def _judged(self, judged: Judged, step: Step, now: float) -> Step:
        """A block's verdict is in force: tell the controller, and let the window grow or not.
        The step with how it came about."""
        self._pilot.verdict(judged, now)
        if judged.accepted < judged.drafted:
            self._grown = 1.0
        elif judged.drafted and self.policy.reach:
            self._grown = min(self._grown * (1.0 + self.policy.growth), float(self.policy.reach))
        return self._told(judged, step)

    def _told(self, judged: Judged, step: Step) -> Step:
        decision = self._pilot.decision
        known = Round(
            drafted=judged.drafted,
            accepted=judged.accepted,
            strict=judged.strict,
            window=self._last_window,
            queue_s=judged.load.queue_us / 1e6,
            step_s=judged.load.step_us / 1e6,
            network_s=self._pilot.network if judged.drafted else None,
            threshold=decision.threshold if decision else None,
            length=decision.length if decision else None,
            credit=decision.credit if decision else None,
        )
        return replace(step, round=known)

    def on_tokens(self, frame: Tokens, now: float) -> Step | None:
        """Commit tokens that came without a verdict; an overlap with known ones must agree."""
        sequence = self.generation.sequence
        known = sequence.base - frame.start
        if known > 0:
            committed = sequence.committed[frame.start :]
            if committed[: len(frame.tokens)] != frame.tokens[:known]:
                raise RemoteError(Code.STATE, "a committed token was changed", self.number)
        elif known < 0:
            raise RemoteError(Code.STATE, "tokens are missing before this frame", self.number)
        fresh = frame.tokens[max(known, 0) :]
        if not fresh or self.generation.finish is not None:
            return None
        self._touch(now)
        tail = sequence.tail
        self.rejoined += sum(1 for a, b in zip(tail, fresh, strict=False) if a == b)
        base = sequence.base
        step = self._commit(
            fresh,
            tuple(
                Origin.RELAXED if base + i in self._marked else Origin.TARGET
                for i in range(len(fresh))
            ),
        )
        self._marked.clear()
        self.generation.count(drafted=0, accepted=0, kept=len(step.tokens))
        self._pilot.streamed(len(step.tokens), frame.load, now)
        return self._told(Judged(tokens=len(step.tokens), load=frame.load), step)

    def on_logprobs(self, frame: Logprobs, now: float) -> Step | None:
        """Keep log-probabilities until the tokens they belong to are committed; a correction
        chosen here that waited for its own is committed now."""
        ahead = frame.start + len(frame.entries) - self.generation.sequence.base
        if ahead > MAX_BLOCK:
            raise RemoteError(Code.STATE, "log-probabilities far ahead", self.number)
        for i, (token, logprob, top) in enumerate(frame.entries):
            entry = TokenLogprob(token=token, logprob=logprob, top=top)
            if frame.start + i >= self.generation.sequence.base:
                self._logprobs[frame.start + i] = entry
        awaited = self._awaited
        if awaited is None or frame.start != self.generation.sequence.base:
            return None
        return self._commit_choice(awaited, now)

    def on_done(self, frame: Done) -> None:
        """The cloud says the answer is complete: both sides must hold the same ids (I10)."""
        sequence = self.generation.sequence
        digest = self._digest.of(sequence.committed)
        if self.generation.finish is None or digest != frame.digest:
            raise RemoteError(Code.DIGEST, "edge and cloud end with different ids", self.number)
        if self.relaxation is not None:
            self._charge(frame.spent, frame.max_jsd)
        counters = self.generation.counters
        counters.near_ties = frame.near_ties
        counters.drafted += frame.own_drafted
        counters.accepted += frame.own_accepted

    def _old(self, start: int, now: float) -> bool:
        base = self.generation.sequence.base
        if start > base:
            raise RemoteError(Code.STATE, "tokens are missing before this frame", self.number)
        if start == base:
            self._touch(now)
        return start < base

    def _commit(self, tokens: tuple[int, ...], origins: tuple[Origin, ...]) -> Step:
        sequence = self.generation.sequence
        tail, epoch, base = sequence.tail, sequence.epoch, sequence.base
        logprobs = tuple(
            self._logprobs.pop(base + i) for i in range(len(tokens)) if base + i in self._logprobs
        )
        step = self.generation.commit(tokens, origins, logprobs)
        if sequence.epoch == epoch:
            settled = len(tail) - len(sequence.tail)
            del self._rows[:settled], self._sketches[:settled]
            self._sent = max(0, self._sent - settled)
        else:
            agreed = sum(1 for a, b in zip(tail, step.tokens, strict=False) if a == b)
            self.wasted += max(0, len(tail) - agreed - 1)
            self._rows.clear()
            self._sketches.clear()
            self._sent = 0
            self._pilot.dropped()
        self._refused = False
        self._awaited = None
        self._dialogue = None
        return step

    # ---------------------------------------------------------------- residual dialogue

    def on_proposals(self, frame: Proposals, now: float) -> tuple[Step | None, tuple[Message, ...]]:
        """A draft was rejected (ratio rule): choose from the residual, or ask for more."""
        dialogue = self._begun(frame, now)
        if dialogue is None:
            return None, ()
        return self._answer(frame, proposal_step(frame.first), dialogue.on_proposals(frame), now)

    def on_top_k(self, frame: TopK, now: float) -> tuple[Step | None, tuple[Message, ...]]:
        """The same, by the likeliest ids of p."""
        if not self.reply.k:
            raise RemoteError(Code.STATE, "a list nobody asked for", self.number)
        dialogue = self._begun(frame, now)
        if dialogue is None:
            return None, ()
        step = ResidualStep.LARGER_K if frame.first else ResidualStep.TOP_K
        return self._answer(frame, step, dialogue.on_list(frame, self.tv), now)

    def on_row(self, frame: Row, now: float) -> tuple[Step | None, tuple[Message, ...]]:
        """The last resort: p itself."""
        dialogue = self._dialogue
        if dialogue is None or frame.position != dialogue.position:
            return None, ()
        return self._answer(frame, ResidualStep.FULL_ROW, dialogue.on_row(frame), now)

    def _begun(self, frame: Proposals | TopK, now: float) -> EdgeDialogue | None:
        """The dialogue that the frame is of; None: it is of one that has ended."""
        sequence = self.generation.sequence
        if self._old(frame.start, now) or self.generation.finish is not None:
            return None
        sent = frame.epoch == sequence.epoch and frame.accepted < len(sequence.tail)
        if not sent or not self._needs_q:
            raise RemoteError(Code.STATE, "rejection of a draft that was never sent", self.number)
        known = self._dialogue
        if known is None or known.accepted != frame.accepted:
            known = self._dialogue = EdgeDialogue(
                start=frame.start,
                drafted=frame.drafted,
                accepted=frame.accepted,
                load=frame.load,
                q=self._rows[frame.accepted][1],
                seed=self.generation.params.seed,
            )
        # A verifier that rebuilt the session may have judged a longer block.
        known.drafted, known.load = frame.drafted, frame.load
        return known

    def _answer(
        self,
        frame: Proposals | TopK | Row,
        step: ResidualStep,
        found: Choice | Call | None,
        now: float,
    ) -> tuple[Step | None, tuple[Message, ...]]:
        """Say what came of a frame of the dialogue, and count what both took."""
        dialogue = self._dialogue
        assert dialogue is not None, "a frame was judged in it"
        if found is None:
            return None, ()
        if isinstance(found, Call):
            answer = Correct(
                session=self.number,
                position=dialogue.position,
                have=found.have,
                listed=found.listed,
            )
        else:
            answer = self._correct(dialogue, found)
        self.generation.counters.exchanged(
            step.value, down=len(encode(frame)), up=len(encode(answer))
        )
        if isinstance(found, Call):
            return None, (answer,)
        if self.generation.params.logprobs is not None:
            # They are the target's, so the cloud tells them once it knows the token: until then
            # nothing is shown, or tokens and log-probabilities would part.
            self._awaited = found
            return None, (answer,)
        return self._commit_choice(found, now), (answer,)

    def _correct(self, dialogue: EdgeDialogue, choice: Choice) -> Correct:
        left = self.tv.charged(choice.charge).left if choice.charge else None
        return Correct(
            session=self.number, position=dialogue.position, token=choice.token, left=left
        )

    def _commit_choice(self, choice: Choice, now: float) -> Step:
        """The token drawn from the residual takes its place."""
        dialogue = self._dialogue
        assert dialogue is not None, "a choice is made in one"
        accepted = dialogue.accepted
        tokens = (*self.generation.sequence.tail[:accepted], choice.token)
        last = Origin.TRUNCATED if choice.charge else Origin.CORRECTION
        step = self._commit(tokens, (*[Origin.DRAFT] * accepted, last))
        kept = len(step.tokens)
        if kept > accepted:  # else an end came before it, and nobody sees it
            self.tv = self.tv.charged(choice.charge)
        self.generation.count(
            drafted=dialogue.drafted, accepted=accepted, kept=kept, residual=choice.step.value
        )
        judged = Judged(
            start=dialogue.start,
            drafted=dialogue.drafted,
            accepted=accepted,
            strict=accepted,
            tokens=kept,
            load=dialogue.load,
        )
        return self._judged(judged, step, now)

    # ---------------------------------------------------------------- time and failure

    @property
    def deadline(self) -> float | None:
        """When `retry` is due; None while nothing is outstanding."""
        waiting = self._sent > 0 or self._asked == self.generation.sequence.base
        if self.generation.finish is not None or not waiting:
            return None
        return self._progress + self._retry_after

    def retry(self, now: float) -> tuple[Message, ...]:
        """Send what is unanswered again, exactly as it was."""
        self._sent = 0
        self._asked = None
        frames = self.unsent(now)
        if self._awaited is None or self._dialogue is None:
            return frames
        return (*frames, self._correct(self._dialogue, self._awaited))

    @property
    def prefix_digest(self) -> bytes:
        """Digest of the committed prefix, for RESUME."""
        return self._digest.of(self.generation.sequence.committed)
