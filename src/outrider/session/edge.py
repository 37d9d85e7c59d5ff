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
from outrider.core.ledger import Ledger, TvLedger
from outrider.core.relaxation import Relaxation, require_relaxation
from outrider.core.residual import TopKReply, require_ratio
from outrider.core.tokens import Origin, Rule, TokenLogprob
from outrider.proto.codec import MAX_BLOCK
from outrider.proto.digest import DigestChain
from outrider.proto.errors import RemoteError
from outrider.proto.messages import (
    Code,
    Done,
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
from outrider.session.charges import Charges
from outrider.session.corrections import Corrections
from outrider.session.generation import Generation, Round, Step
from outrider.session.outbox import ID_BYTES, Outbox
from outrider.session.pilot import Judged, Pilot, WatchingPilot
from outrider.session.window import Window, WindowPolicy

RETRY_AFTER: Final = 10.0
"""Seconds without progress before an unanswered frame is sent again (our default). A transport
that keeps order and delivers makes this a net for the peer's bugs, not the normal path."""


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
        self.number = number
        self.generation = generation
        self.wasted = 0
        """Drafted ids that were dropped unjudged: the price of running ahead."""
        self.rejoined = 0
        """Committed tokens that came without a verdict but had been drafted all the same."""
        self.paused = False
        """Nobody takes its tokens: it drafts and asks for nothing, until `resume`."""
        self.relaxation = relaxation
        self._pilot = pilot or WatchingPilot()
        self.window = Window(policy, self._pilot)
        self._outbox = Outbox(number, generation.sequence, rule, relaxation)
        self._corrections = Corrections(number, generation, self._outbox, self.reply)
        self._charges = Charges(number, relaxation)
        self._retry_after = retry_after
        self._digest = DigestChain()
        self._drafting: DraftJob | None = None
        self._asked: int | None = None
        self._progress = now
        self._logprobs: dict[int, TokenLogprob] = {}
        self._refused = False

    # ---------------------------------------------------------------- drafting

    def room(self, now: float) -> int:
        """How many ids a drafting job of now would draft; 0: none wanted, or one is under way."""
        sequence = self.generation.sequence
        over = self.generation.finish is not None
        if self._drafting is not None or over or self._refused or self.paused:
            return 0
        tail = sequence.tail
        outstanding, policy = len(tail), self.window.policy
        if outstanding and (policy.wait_empty or self.generation.rules.is_end(tail[-1])):
            return 0  # behind a guessed end there is nothing to guess
        if policy.wait_empty and not sequence.output_length:
            # The prefill's own token comes first. A block that raced it would be judged with it
            # or behind it, as the network pleases: under the ratio rule, another text (I4).
            return 0
        window = self._most(now)
        room = min(
            window - outstanding, self.generation.draft_room(window + outstanding) - outstanding
        )
        chunk = policy.chunk if outstanding else policy.lead or policy.chunk
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
        self._most(now)

    def ask(self, now: float) -> None:
        """Find out whether the cloud should stream alone, before the session is opened there."""
        self._most(now)

    def _most(self, now: float) -> int:
        """Most unjudged drafts now."""
        return self.window.most(self.generation.draft_room(self.window.policy.window), now)

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
        self._outbox.add(draft, overlap)
        return self.unsent(now)

    def unsent(self, now: float) -> tuple[Message, ...]:
        """Frames that are due: fresh drafts, or the call for a step."""
        sequence = self.generation.sequence
        if self.generation.finish is not None:
            return ()
        frame = self._outbox.unsent(self._pilot.threshold)
        if frame is not None:
            size = self._outbox.size(len(frame.tokens))
            self._touch(now)
            self._pilot.sent(frame.start + len(frame.tokens), size, now)
            return (frame,)
        if self._must_ask(len(sequence.tail)):
            self._asked = sequence.base
            self._touch(now)
            return (self._outbox.call(),)
        return ()

    def _must_ask(self, outstanding: int) -> bool:
        """Nothing is outstanding, nothing can be drafted, and the cloud waits for a frame."""
        if (
            self.window.alone
            or self.paused
            or not self.window.policy.asks
            or outstanding
            or self._asked == self.generation.sequence.base
        ):
            return False
        idle = self._drafting is None
        return idle and (
            self._refused or self.generation.draft_room(self.window.policy.window) == 0
        )

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
            strict = self._charges.verdict(frame, origins)
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

    @property
    def ledger(self) -> Ledger:
        """What relaxing has cost, as the cloud said last, of the tokens committed here."""
        return self.generation.accounted(self._charges.ledger)

    @property
    def tv(self) -> TvLedger:
        """What truncated residuals have cost, of the tokens committed here."""
        return self._corrections.tv

    def on_marks(self, frame: Marks) -> None:
        """Which of the next tokens are relaxed, and what they cost."""
        self._charges.require("marks")
        if self.generation.finish is None:
            self._charges.marks(frame, self.generation.sequence.base)

    def _judged(self, judged: Judged, step: Step, now: float) -> Step:
        """A block's verdict is in force: tell the controller, and let the window grow or not.
        The step with how it came about."""
        self._pilot.verdict(judged, now)
        self.window.judged(judged)
        return self._told(judged, step)

    def _told(self, judged: Judged, step: Step) -> Step:
        decision = self._pilot.decision
        known = Round(
            drafted=judged.drafted,
            accepted=judged.accepted,
            strict=judged.strict,
            window=self.window.newest,
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
        origins = self._charges.origins(range(sequence.base, sequence.base + len(fresh)))
        step = self._commit(fresh, origins)
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
        if self._corrections.chosen is None or frame.start != self.generation.sequence.base:
            return None
        return self._commit_choice(now)

    def on_done(self, frame: Done) -> None:
        """The cloud says the answer is complete: both sides must hold the same ids (I10)."""
        sequence = self.generation.sequence
        digest = self._digest.of(sequence.committed)
        if self.generation.finish is None or digest != frame.digest:
            raise RemoteError(Code.DIGEST, "edge and cloud end with different ids", self.number)
        self._charges.done(frame)
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
            self._outbox.settle(len(tail) - len(sequence.tail))
        else:
            agreed = sum(1 for a, b in zip(tail, step.tokens, strict=False) if a == b)
            self.wasted += max(0, len(tail) - agreed - 1)
            self._outbox.drop()
            self._pilot.dropped()
        self._refused = False
        self._corrections.close()
        return step

    # ---------------------------------------------------------------- residual dialogue

    def on_residual(
        self, frame: Proposals | TopK | Row, now: float
    ) -> tuple[Step | None, tuple[Message, ...]]:
        """A draft was rejected (ratio rule): choose from the residual, or ask for more."""
        if isinstance(frame, TopK):
            self._corrections.require_wish()
        if not isinstance(frame, Row) and (
            self._old(frame.start, now) or self.generation.finish is not None
        ):
            return None, ()
        answer = self._corrections.hear(frame)
        if answer is None:
            return None, ()
        # Log-probabilities are the target's, so the cloud tells them once it knows the token: until
        # then nothing is shown, or tokens and log-probabilities would part.
        if self._corrections.chosen is None or self.generation.params.logprobs is not None:
            return None, (answer,)
        return self._commit_choice(now), (answer,)

    def _commit_choice(self, now: float) -> Step:
        """The token drawn from the residual takes its place."""
        dialogue, choice = self._corrections.open, self._corrections.chosen
        assert dialogue is not None, "a choice is made in a dialogue"
        assert choice is not None, "it has been made"
        accepted = dialogue.accepted
        step = self._commit(*self._corrections.tokens())
        kept = len(step.tokens)
        if kept > accepted:  # else an end came before it, and nobody sees it
            self._corrections.tv = self.tv.charged(choice.charge)
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
        waiting = self._outbox.sent > 0 or self._asked == self.generation.sequence.base
        if self.generation.finish is not None or not waiting:
            return None
        return self._progress + self._retry_after

    def retry(self, now: float) -> tuple[Message, ...]:
        """Send what is unanswered again, exactly as it was."""
        self._outbox.sent = 0
        self._asked = None
        frames = self.unsent(now)
        choice = self._corrections.again()
        return frames if choice is None else (*frames, choice)

    @property
    def prefix_digest(self) -> bytes:
        """Digest of the committed prefix, for RESUME."""
        return self._digest.of(self.generation.sequence.committed)
