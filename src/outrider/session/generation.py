"""One request's life on its committed side: judgements in, finished tokens and text out.

Rules:

* A token is committed once, in order, and never taken back (I2).
* Ids, text, counters and cache claims are all cut at the first end event (I3, field case 01).
* Counters speak of committed tokens only (field case 37): drafts behind an end were never
  judged, so they are neither drafted nor accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from outrider.core.draft import Draft
from outrider.core.ledger import Ledger
from outrider.core.relaxed import RelaxedVerdict
from outrider.core.sequence import SpeculativeSequence
from outrider.core.stopping import StopRules, StopText
from outrider.core.tokens import (
    FinishReason,
    Origin,
    ParameterError,
    SamplingParams,
    TokenLogprob,
)
from outrider.session.verifier import Judgement


class TextStream(Protocol):
    """Ids to text, one at a time, never splitting a character (engines.tokenizer)."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """How the tokens of a step came about, as an edge sees it; for traces and plots."""

    drafted: int
    """Drafts judged; 0: the cloud went on alone."""
    accepted: int
    strict: int
    """Leading drafts that the strict rule had accepted."""
    window: int
    """Most unjudged drafts when the round ended."""
    queue_s: float
    """The cloud's words: wait for the engine, and its forward."""
    step_s: float
    network_s: float | None = None
    """The way there and back of the frame that completed the block; None: not known."""
    threshold: float | None = None
    """T in force (relaxed rule), where a controller moves it."""
    length: int | None = None
    """K or window that the controller decided on; None: there is none."""
    credit: float | None = None
    """r, where the controller has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one round added: tokens for ever, and the text that may be shown."""

    tokens: tuple[int, ...]
    origins: tuple[Origin, ...]
    pieces: tuple[str, ...]
    """Text that each token released; a piece may be empty (half a character, a held-back stop)."""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    round: Round | None = None
    """Known at an edge."""

    @property
    def text(self) -> str:
        """Text that may be shown now."""
        return "".join(self.pieces)


@dataclass(slots=True)
class Counters:
    """Sums over rounds, of committed tokens only."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    """How many blocks had a judged draft at index i."""
    accepted_at: list[int] = field(default_factory=list)
    """How many blocks had their draft at index i accepted."""
    near_ties: int = 0
    relaxed: int = 0
    """Committed tokens that stand although the target chose others."""
    residual: dict[str, int] = field(default_factory=dict)
    """Rejections by the step of the residual dialogue that ended them."""
    residual_down: dict[str, int] = field(default_factory=dict)
    """Bytes of the cloud's frames, by the step they were; counted at an edge."""
    residual_up: dict[str, int] = field(default_factory=dict)
    """Bytes of the edge's answers, by the step they answer."""

    def add(
        self, *, judged: int, accepted: int, near_ties: int = 0, residual: str | None = None
    ) -> None:
        """One round: of `judged` drafts the first `accepted` stand."""
        self.rounds += 1
        self.drafted += judged
        self.accepted += accepted
        grow = judged - len(self.drafted_at)
        self.drafted_at.extend([0] * grow)
        self.accepted_at.extend([0] * grow)
        for i in range(judged):
            self.drafted_at[i] += 1
            self.accepted_at[i] += i < accepted
        self.near_ties += near_ties
        if residual is not None:
            self.residual[residual] = self.residual.get(residual, 0) + 1

    def exchanged(self, step: str, *, down: int, up: int) -> None:
        """One frame of the residual dialogue and the answer to it, in bytes."""
        self.residual_down[step] = self.residual_down.get(step, 0) + down
        self.residual_up[step] = self.residual_up.get(step, 0) + up

    @property
    def acceptance(self) -> float | None:
        """Accepted share of judged drafts; None when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None


class Generation:
    """State of one generation request between rounds."""

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        context_length: int,
        eos: frozenset[int],
        text: TextStream,
    ) -> None:
        """`context_length`: the target's window, in tokens; prompt and output share it."""
        if not prompt:
            raise ParameterError("prompt", "must not be empty")
        room = context_length - len(prompt)
        if room < 1:
            raise ParameterError(
                "prompt",
                f"has {len(prompt)} tokens; the context of {context_length} leaves no room for an "
                f"answer: shorten it to at most {context_length - 1} tokens",
            )
        self.params = params
        self.sequence = SpeculativeSequence(prompt)
        self.rules = StopRules.of(params, eos=eos, room=room)
        self.counters = Counters()
        self.finish: FinishReason | None = None
        self._text = text
        self._stops = StopText(params.stop)

    def fit(self, context_length: int) -> None:
        """The verifier's window is smaller than was thought: the limit shrinks with it.

        Raises ParameterError when what is already there does not fit.
        """
        room = context_length - self.sequence.prompt_length
        if room <= self.sequence.output_length:
            have = self.sequence.base
            raise ParameterError(
                "prompt", f"has {have} tokens with its answer; the verifier takes {context_length}"
            )
        self.rules = replace(self.rules, limit=min(self.rules.limit, room))

    @property
    def tokens_left(self) -> int:
        return 0 if self.finish else self.rules.limit - self.sequence.output_length

    def draft_room(self, wanted: int) -> int:
        """How many drafts are of use now: the target's own token takes the last place."""
        return max(0, min(wanted, self.tokens_left - 1))

    def accounted(self, ledger: Ledger) -> Ledger:
        """A relaxed request's ledger with the tokens that were committed: those behind an end were
        judged, and paid for, and are nobody's."""
        return replace(ledger, relaxed=self.counters.relaxed)

    def apply(self, draft: Draft, judgement: Judgement) -> Step:
        """Commit a judged block and look for the earliest end in it."""
        if self.finish is not None:
            raise ValueError("the generation has ended")
        verdict = judgement.verdict
        fixed = (*draft.tokens[: verdict.accepted], verdict.token)
        origins = [*[Origin.DRAFT] * verdict.accepted, verdict.origin]
        for i in verdict.relaxed if isinstance(verdict, RelaxedVerdict) else ():
            origins[i] = Origin.RELAXED
        step = self.commit(fixed, origins, judgement.logprobs)
        self.count(
            drafted=verdict.drafted,
            accepted=verdict.accepted,
            kept=len(step.tokens),
            near_ties=judgement.near_ties,
            residual=judgement.residual and judgement.residual.value,
        )
        return step

    def count(
        self,
        *,
        drafted: int,
        accepted: int,
        kept: int,
        near_ties: Sequence[bool] = (),
        residual: str | None = None,
    ) -> None:
        """Count a round of which `kept` tokens were committed (fewer when the answer ended).

        `near_ties`: one for each token of the block; `residual`: how its correction was found.
        """
        # Of a block cut short only the drafts up to the cut were judged for this answer.
        whole = min(drafted, accepted + 1)
        judged = whole if kept > accepted else kept
        self.counters.add(
            judged=judged,
            accepted=min(accepted, kept),
            near_ties=sum(near_ties[:kept]),
            residual=residual if kept > accepted else None,
        )

    def commit(
        self,
        tokens: Sequence[int],
        origins: Sequence[Origin],
        logprobs: Sequence[TokenLogprob] = (),
    ) -> Step:
        """Fix the next tokens of the answer, up to the earliest end among them."""
        if self.finish is not None:
            raise ValueError("the generation has ended")
        before = self.sequence.output_length
        shown: list[str] = []
        kept = 0
        for token in tokens:
            kept += 1
            shown.append(self._advance(token, before + kept))
            if self.finish is not None:
                break
        self.sequence.settle(tokens[:kept])
        self.counters.relaxed += sum(o is Origin.RELAXED for o in origins[:kept])
        if self.finish is not None:
            self.sequence.rollback()
        return Step(
            tokens=tuple(tokens[:kept]),
            origins=tuple(origins[:kept]),
            pieces=tuple(shown),
            logprobs=tuple(logprobs[:kept]),
            finish=self.finish,
        )

    def _advance(self, token: int, count: int) -> str:
        """Text that token number `count` releases; sets `finish` when it is the last."""
        end = self.rules.is_end(token)
        delta = "" if end else self._text.push(token)
        shown, stopped = self._stops.push(delta)
        self.finish = self.rules.reason(token, count, stop_text=stopped)
        if self.finish is None or stopped:
            return shown
        tail, stopped = self._stops.push(self._text.flush())
        if stopped:
            self.finish = FinishReason.STOP
            return shown + tail
        return shown + tail + self._stops.flush()
