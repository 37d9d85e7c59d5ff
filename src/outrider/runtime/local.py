"""Co-located generation: draft and target in one process, one thread, no network.

The loop is the whole of speculative decoding in a few lines; everything that decides anything
is in `core` and `session`, where the networked drivers use it too.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

from outrider.core.draft import NO_DRAFT, Draft
from outrider.core.grammar import Grammars
from outrider.core.ledger import Ledger, TvLedger
from outrider.core.partial import require_known
from outrider.core.relaxation import DEFAULT_SKETCH, Relaxation, require_relaxation
from outrider.core.sampling import RowError
from outrider.core.tokens import (
    FinishReason,
    GrammarError,
    ParameterError,
    Rule,
    SamplingParams,
    TokenLogprob,
)
from outrider.engines.base import Block, EngineError, LanguageModel, keep_prefix
from outrider.engines.drafters import Drafter, DraftSession
from outrider.session.generation import Counters, Generation, Step, TextStream
from outrider.session.verifier import Judgement, Verifier

MAX_DRAFT_LENGTH: Final = 64
"""Most drafts in a block: beyond this no acceptance rate makes the last one worth its row."""
DEFAULT_DRAFT_LENGTH: Final = 4
"""Drafts a block when nobody says otherwise (our default; docs/papers.md: the best fixed value lies
between 2 and 6 for nearly every pair measured)."""

Clock = Callable[[], float]


class Tokenizer(Protocol):
    """The part of engines.tokenizer that generation needs."""

    def decode(self, ids: list[int]) -> str: ...

    def text_stream(self) -> TextStream: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One answer to make."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    rule: Rule = Rule.COUPLED
    draft_length: int = DEFAULT_DRAFT_LENGTH
    """Most drafts a block; 0 = the target alone."""
    relaxation: Relaxation | None = None
    """For the relaxed rule, which needs it."""

    def __post_init__(self) -> None:
        try:
            ids = tuple(operator.index(token) for token in self.prompt_ids)
        except TypeError:
            raise ParameterError("prompt", "must be a sequence of token ids") from None
        require_relaxation(self.rule, self.relaxation)
        if not isinstance(self.params, SamplingParams) or self.rule not in tuple(Rule):
            raise ParameterError("rule", "needs SamplingParams and one of the rules of core.tokens")
        object.__setattr__(self, "prompt_ids", ids)
        object.__setattr__(self, "rule", Rule(self.rule))
        if isinstance(self.draft_length, bool) or not isinstance(self.draft_length, int):
            raise ParameterError("draft_length", f"must be an integer, got {self.draft_length!r}")
        if not 0 <= self.draft_length <= MAX_DRAFT_LENGTH:
            raise ParameterError(
                "draft_length", f"must be in [0, {MAX_DRAFT_LENGTH}], got {self.draft_length}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds, monotonic clock of this process."""

    ttft_s: float
    """From the request to its first committed token (prefill included)."""
    tpot_s: float | None
    """Mean time per output token after the first round; None with only one round."""
    total_s: float
    draft_s: float
    """Spent drafting."""
    target_s: float | None
    """Spent in the target's forward passes; None where they ran behind a network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """Everything known about a finished (or cancelled) generation."""

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: FinishReason | None
    """None when the caller stopped early."""
    seed: int
    target_forwards: int
    """Passes through the target, prefill included."""
    counters: Counters
    timing: Timing
    target: str
    draft: str
    verify: Rule
    logprobs: tuple[TokenLogprob, ...] = ()
    relaxed: Ledger | None = None
    """What relaxing cost; None under the exact rules."""
    tv: TvLedger | None = None
    """What truncated residuals cost; None where none was asked for."""

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)

    def as_dict(self) -> dict[str, object]:
        """The JSON object of `outrider generate --json` (keys: docs in the README)."""
        counters = self.counters
        facts: dict[str, object] = {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "finish_reason": self.finish_reason and self.finish_reason.value,
            "seed": self.seed,
            "target_forwards": self.target_forwards,
            "rounds": counters.rounds,
            "drafted": counters.drafted,
            "accepted": counters.accepted,
            "acceptance": counters.acceptance,
            "drafted_per_position": list(counters.drafted_at),
            "accepted_per_position": list(counters.accepted_at),
            "timing": {
                "ttft_s": self.timing.ttft_s,
                "tpot_s": self.timing.tpot_s,
                "total_s": self.timing.total_s,
                "draft_s": self.timing.draft_s,
                "target_s": self.timing.target_s,
            },
            "near_ties": counters.near_ties,
            "target": self.target,
            "draft": self.draft,
            "verify": self.verify.value,
        }
        if self.relaxed is not None:
            facts["relaxed"] = _relaxed_facts(self.relaxed)
        if self.tv is not None:
            facts["tv"] = _tv_facts(self.tv)
        if counters.residual:
            facts["residual"] = _residual_facts(counters)
        if self.logprobs:
            facts["logprobs"] = [
                {"token": e.token, "logprob": e.logprob, "top": [list(t) for t in e.top]}
                for e in self.logprobs
            ]
        return facts


class GenerationStream:
    """Iterate for `Step`s; `result` is there once iteration ended or `close` was called.

    Closing early cancels the generation: the draft's slot is freed and the target's slot keeps
    only committed tokens. An exception while a step is made does the same. `with` closes; a
    loop left by `break` without it stays open until `close`.
    """

    def __init__(self, owner: LocalGenerator, request: GenerationRequest) -> None:
        self._owner = owner
        self._request = request
        self._life = owner._begin(request)
        self._rounds = self._run()
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._marks: list[tuple[float, int]] = []
        self._result: GenerationResult | None = None

    def __enter__(self) -> GenerationStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Step]:
        return self._rounds

    def close(self) -> None:
        """Stop now and clean up; `result` then covers what was committed."""
        self._rounds.close()
        if self._result is None:  # not one step was asked for
            self._end()

    @property
    def result(self) -> GenerationResult:
        if self._result is None:
            raise RuntimeError("the generation is still running: iterate it or close it first")
        return self._result

    def _run(self) -> Generator[Step, None, None]:
        try:
            while self._life.generation.finish is None:
                step = self._life.round()
                self._texts.append(step.text)
                self._logprobs.extend(step.logprobs)
                self._marks.append((self._owner.clock(), len(step.tokens)))
                yield step
        finally:
            self._end()

    def _end(self) -> None:
        try:
            self._life.end()
        finally:
            self._result = self._summary()

    def _summary(self) -> GenerationResult:
        life, owner = self._life, self._owner
        sequence = life.generation.sequence
        return GenerationResult(
            text="".join(self._texts),
            token_ids=sequence.output,
            prompt_tokens=sequence.prompt_length,
            finish_reason=life.generation.finish,
            seed=self._request.params.seed,
            target_forwards=life.passes,
            counters=life.generation.counters,
            timing=self._timing(),
            target=owner.target.info.name,
            draft=owner.drafter.name if owner.drafter else "none",
            verify=self._request.rule,
            logprobs=tuple(self._logprobs),
            relaxed=life.ledger if self._request.relaxation else None,
        )

    def _timing(self) -> Timing:
        now = self._owner.clock()
        first = self._marks[0][0] if self._marks else now
        later = sum(count for _, count in self._marks[1:])
        return Timing(
            ttft_s=first - self._life.started,
            tpot_s=(self._marks[-1][0] - first) / later if later else None,
            total_s=now - self._life.started,
            draft_s=self._life.draft_s,
            target_s=self._life.target_s,
        )


class LocalGenerator:
    """A target, a tokenizer and maybe a drafter, answering one request at a time.

    Keeps the target's slot between requests, so a prompt that begins like the last conversation
    is not computed again; only committed tokens ever stay in it (field case 14).
    """

    def __init__(
        self,
        target: LanguageModel,
        tokenizer: Tokenizer,
        drafter: Drafter | None = None,
        *,
        clock: Clock = time.monotonic,
        grammars: Grammars | None = None,
    ) -> None:
        """`grammars`: reads the grammars of requests; None: there must be none."""
        self.target = target
        self.grammars = grammars
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.clock = clock
        self._slot: int | None = None
        self._busy = False

    def stream(self, request: GenerationRequest) -> GenerationStream:
        """Start an answer. Raises ParameterError when the prompt does not fit the context."""
        return GenerationStream(self, request)

    def generate(self, request: GenerationRequest) -> GenerationResult:
        """Run an answer to its end."""
        stream = self.stream(request)
        for _ in stream:
            pass
        return stream.result

    def close(self) -> None:
        """Free the kept slot."""
        if self._slot is not None:
            self.target.close(self._slot)
            self._slot = None

    def _begin(self, request: GenerationRequest) -> _Life:
        if self._busy:
            raise RuntimeError("one request at a time: finish or close the running stream first")
        info = self.target.info
        if request.rule not in info.rules:
            raise ParameterError("verify", f"{info.name} cannot do {request.rule.value}")
        require_known(request.params, info.known_ids)
        _check_ids("prompt", request.prompt_ids, info.vocab_size)
        _check_ids("logit_bias", request.params.logit_bias, info.vocab_size)
        _check_ids("stop_token_ids", request.params.stop_token_ids, info.vocab_size)
        generation = Generation(
            request.prompt_ids,
            request.params,
            context_length=info.context_length,
            eos=info.eos_token_ids,
            text=self.tokenizer.text_stream(),
        )
        if self._slot is None:
            self._slot = self.target.open()
        life = _Life(self, self._slot, request, generation)
        self._busy = True
        return life

    def _finished(self, *, slot_usable: bool) -> None:
        self._busy = False
        if not slot_usable and self._slot is not None:
            slot, self._slot = self._slot, None
            self.target.close(slot)


def _check_ids(field_name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ParameterError(field_name, f"token id {token} is not in [0, {vocab_size - 1}]")


def _relaxed_facts(ledger: Ledger) -> dict[str, object]:
    """The report of a relaxed answer: tokens the target did not choose, the summed bound of the
    total variation distance of its law, the largest certified JSD (nats)."""
    return {
        "tokens": ledger.relaxed,
        "tv_bound": ledger.spent,
        "max_jsd": ledger.max_jsd,
        "budget": None if math.isinf(ledger.budget) else ledger.budget,
    }


def _tv_facts(ledger: TvLedger) -> dict[str, object]:
    """The report of an answer that asked for truncated residuals: with `spent` 0 it is exact."""
    return {
        "budget": None if math.isinf(ledger.budget) else ledger.budget,
        "spent": ledger.spent,
        "events": ledger.events,
    }


def _residual_facts(counters: Counters) -> dict[str, object]:
    """Rejections by the step that ended them; what each step took, where there is a wire."""
    facts: dict[str, object] = {"steps": dict(counters.residual)}
    if counters.residual_down:
        facts["bytes_up"] = dict(counters.residual_up)
        facts["bytes_down"] = dict(counters.residual_down)
    return facts


class _Life:
    """One running request: the decoding loop's state and its two engines."""

    def __init__(
        self, owner: LocalGenerator, slot: int, request: GenerationRequest, generation: Generation
    ) -> None:
        info = owner.target.info
        constraint = None
        if request.params.grammar is not None:
            if owner.grammars is None:
                raise GrammarError("there are no grammars here")
            constraint = owner.grammars.constraint(request.params.grammar, "")
        self._owner = owner
        self._slot = slot
        self._request = request
        self.generation = generation
        self._verifier = Verifier(
            request.params,
            request.rule,
            prompt=request.prompt_ids,
            vocab_size=info.vocab_size,
            end_ids=frozenset() if request.params.ignore_eos else info.eos_token_ids,
            support=owner.target.support,
            watch_ties=not info.deterministic,
            policy=request.relaxation and request.relaxation.policy,
            ledger=request.relaxation and request.relaxation.ledger,
            constraint=constraint,
        )
        self._passes_before = owner.target.passes
        self._ended = False
        self.passes = 0
        self.draft_s = 0.0
        self.target_s = 0.0
        self.started = owner.clock()
        self._reuse_prefix()
        # Last, since nobody would close it if something above failed.
        self._drafts: DraftSession | None = None
        if owner.drafter is not None and request.draft_length > 0:
            sketch = request.relaxation.sketch if request.relaxation else DEFAULT_SKETCH
            self._drafts = owner.drafter.session(
                len(request.prompt_ids),
                request.params,
                request.rule,
                sketch=sketch,
                constraint=constraint and constraint.fork(),
            )

    @property
    def ledger(self) -> Ledger:
        """What relaxing has cost so far."""
        return self.generation.accounted(self._verifier.ledger)

    def _reuse_prefix(self) -> None:
        keep_prefix(self._owner.target, self._slot, self._request.prompt_ids)

    def round(self) -> Step:
        """Draft, verify, commit: one block."""
        clock = self._owner.clock
        began = clock()
        draft = self._draft()
        drafted = clock()
        sequence = self.generation.sequence
        target = self._owner.target
        start = target.length(self._slot)
        block = Block(
            slot=self._slot,
            start=start,
            tokens=(*sequence.slice(start), *draft.tokens),
            rows=len(draft) + 1,
        )
        rows = target.forward([block])[0]
        self.draft_s += drafted - began
        self.target_s += clock() - drafted
        try:
            judgement = self._verifier.judge(draft, rows, sequence.base)
        except RowError as error:
            raise EngineError(f"target model {target.info.name}: {error}") from None
        assert isinstance(judgement, Judgement), "a co-located draft always brings its rows"
        step = self.generation.apply(draft, judgement)
        self._drop_unjudged()
        return step

    def _draft(self) -> Draft:
        if self._drafts is None:
            return NO_DRAFT
        count = self.generation.draft_room(self._request.draft_length)
        return self._drafts.propose(self.generation.sequence.committed, count)

    def _drop_unjudged(self) -> None:
        """The slot keeps what was committed, except the newest token, which it never saw."""
        keep_prefix(self._owner.target, self._slot, self.generation.sequence.committed)

    def end(self) -> None:
        """Release what the request holds. Safe to call twice."""
        if self._ended:
            return
        self._ended = True
        self.passes = self._owner.target.passes - self._passes_before
        usable = False
        try:
            if self._drafts is not None:
                self._drafts.close()
            self._drop_unjudged()
            usable = True
        finally:
            self._owner._finished(slot_usable=usable)
