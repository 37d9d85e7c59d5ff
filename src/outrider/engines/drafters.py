"""Who guesses: a model, prompt lookup, or lookup in front of a model.

A drafter is shared by requests; a draft session belongs to one. Before each block the session
reconciles its model's slot with the committed ids it is told (field cases 10, 15, 17): it never
trusts that the last draft stood, so skipped rounds, rollbacks and other requests cannot leave
junk behind.

A session drafts alone and in step with others (`engines.lockstep`) by one piece of code: it says
which block it needs a row behind, and goes on from the row.

A stop rule may end a block early. It sees the draft's side alone (the tokens drawn so far and
their distributions), never a draw of the target, and the token it was asked about stays in the
block. Both are what keeps the ratio rule exact: given the tokens before it, a position follows
the target's law whether a draft of it is judged there or a block ends before it and the target
draws it, so a choice between the two that looks at those tokens only changes nothing. A token
withdrawn because q(x) was small would: the drafts left over no longer come from q. (Coupled:
the text is the target's own whatever is drafted.)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Sequence
from typing import Final, NamedTuple, Protocol, runtime_checkable

import numpy as np

from outrider.core import rng
from outrider.core.draft import NO_DRAFT, Draft, DraftSignal, StopRule
from outrider.core.grammar import Constraint
from outrider.core.relaxation import DEFAULT_SKETCH
from outrider.core.rng import Purpose
from outrider.core.sampling import (
    GREEDY_BELOW,
    DeadEndError,
    Distribution,
    History,
    RowError,
    SamplingPipeline,
    certain,
)
from outrider.core.sparse import Sketch, sketched
from outrider.core.tokens import Rule, SamplingParams
from outrider.engines.base import (
    Block,
    EngineError,
    FloatRow,
    LanguageModel,
    keep_prefix,
    plan_prefix,
)
from outrider.engines.lockstep import Steps, advance
from outrider.engines.lookup import NgramIndex

_DEEP: Final = -700.0
"""Nats below the likeliest id from which an id adds nothing to an entropy; keeps -inf out."""


@runtime_checkable
class ShowsHidden(Protocol):
    """What a model may have beside `LanguageModel`: a look at its last hidden state."""

    def hidden(self, slot: int) -> FloatRow:
        """float32 [width]: behind the final norm, at the newest position of the slot; what its
        next-token row was computed from. Raises SlotError when that position was not the last
        one to be computed."""
        ...


class _Guess(NamedTuple):
    """A drafted token, what it was drawn from, and the sketch of that, if one was made."""

    q: Distribution
    token: int
    sketch: Sketch | None


class DraftSession(Protocol):
    """Drafting for one request."""

    def propose(self, committed: Sequence[int], count: int, stop: StopRule | None = None) -> Draft:
        """Up to `count` guesses for the positions behind `committed` (prompt + output).

        Fewer (or none) when the draft's window is full, an end id was guessed, it has no guess,
        or `stop` ended the block. Never raises for a full window (field case 13).

        `stop` is asked after each token that a model drew; that token stays. A copied guess is
        certain (probability 1, entropy 0), so the rule is not asked about it; it counts in
        `DraftSignal.index`. At temperature 0 q is one id and says nothing: probability and
        entropy are then those of the same row and filters at temperature 1 (our default).
        Raises EngineError when the rule needs a hidden state that the model does not show.
        """
        ...

    def close(self) -> None:
        """Free what the session holds; safe to call twice."""
        ...


class Drafter(Protocol):
    """Makes draft sessions."""

    @property
    def name(self) -> str: ...

    def session(
        self,
        prompt_length: int,
        params: SamplingParams,
        rule: Rule,
        *,
        sketch: int = DEFAULT_SKETCH,
        constraint: Constraint | None = None,
    ) -> DraftSession:
        """`sketch`: ids that a sketch lists, under the relaxed rule. `constraint`: of the request's
        grammar, for this session alone; without it drafts know of no grammar, and fall by it."""
        ...


class ModelDrafter:
    """Drafts with a model, with prompt lookup, or with lookup first and the model behind it."""

    def __init__(
        self, name: str, *, model: LanguageModel | None = None, lookup: bool = False
    ) -> None:
        if model is None and not lookup:
            raise ValueError("a drafter needs a model, lookup, or both")
        self._name = name
        self.model = model
        self._lookup = lookup

    @property
    def name(self) -> str:
        return self._name

    @property
    def shows_hidden(self) -> bool:
        """True when its stop rules may need a hidden state; ask before a request does."""
        return isinstance(self.model, ShowsHidden)

    def session(
        self,
        prompt_length: int,
        params: SamplingParams,
        rule: Rule,
        *,
        sketch: int = DEFAULT_SKETCH,
        constraint: Constraint | None = None,
    ) -> DraftSession:
        listed = sketch if rule is Rule.RELAXED else 0
        voice = None
        if self.model is not None:
            voice = _ModelVoice(
                self.model, prompt_length, params, rule, sketch=listed, constraint=constraint
            )
        index = NgramIndex() if self._lookup else None
        ends = params.stop_token_ids if self.model is None else _end_ids(self.model, params)
        return _Session(
            voice,
            index,
            needs_q=rule is Rule.RATIO,
            needs_sketch=bool(listed),
            end_ids=ends,
            filter_=_Filter(constraint, prompt_length, ends) if constraint is not None else None,
        )


def _end_ids(model: LanguageModel, params: SamplingParams) -> frozenset[int]:
    eos = frozenset[int]() if params.ignore_eos else model.info.eos_token_ids
    return params.stop_token_ids | eos


class GivenDrafter:
    """Drafts what the request has given beforehand, and nothing behind it."""

    name = "given"

    def session(
        self,
        prompt_length: int,
        params: SamplingParams,
        rule: Rule,
        *,
        sketch: int = DEFAULT_SKETCH,
        constraint: Constraint | None = None,  # noqa: ARG002 - no request has both
    ) -> DraftSession:
        return _Session(
            None,
            _Given(params.given, prompt_length),
            needs_q=rule is Rule.RATIO,
            needs_sketch=bool(sketch) and rule is Rule.RELAXED,
            end_ids=frozenset(),
        )


class _Copies(Protocol):
    """Guesses that need no model."""

    def update(self, committed: Sequence[int]) -> None: ...

    def guess(self, tail: Sequence[int] = ()) -> int | None: ...


class _Given:
    """Copies the given output."""

    def __init__(self, given: Sequence[int], prompt_length: int) -> None:
        self._given = given
        self._prompt_length = prompt_length
        self._done = 0

    def update(self, committed: Sequence[int]) -> None:
        self._done = len(committed) - self._prompt_length

    def guess(self, tail: Sequence[int] = ()) -> int | None:
        at = self._done + len(tail)
        return self._given[at] if at < len(self._given) else None


class _ModelVoice:
    """The model's part of a draft session: one slot, one sampling pipeline."""

    def __init__(
        self,
        model: LanguageModel,
        prompt_length: int,
        params: SamplingParams,
        rule: Rule,
        *,
        sketch: int = 0,
        constraint: Constraint | None = None,
    ) -> None:
        self.model = model
        self._constraint = constraint
        self._sketch = sketch
        self._prompt_length = prompt_length
        self._seed = params.seed
        # Ratio drafts must be independent of the target's draws; the others share them.
        self._purpose = Purpose.DRAFT if rule is Rule.RATIO else Purpose.TOKEN
        self._pipeline = SamplingPipeline(
            params,
            vocab_size=model.info.vocab_size,
            support=model.support,
            end_ids=_end_ids(model, params),
            constraint=constraint,
        )
        self._params = params
        self._warm: SamplingPipeline | None = None
        self._row: FloatRow | None = None
        self._history: History | None = None
        self._slot: int | None = model.open()
        self.window = model.info.context_length

    def start(self, committed: Sequence[int]) -> None:
        """Make slot and history a prefix of the committed ids; at least one id stays to feed."""
        assert self._slot is not None, "the draft session is closed"
        keep_prefix(self.model, self._slot, committed)
        output = committed[self._prompt_length :]
        if self._history is None:
            self._history = History(committed[: self._prompt_length])
        self._history.truncate(plan_prefix(self._history.output, output))

    def block(self, context: Sequence[int]) -> Block:
        """What to feed for the row behind `context`: the committed ids `start` was told, and
        drafts since then."""
        assert self._slot is not None, "the draft session is closed"
        at = self.model.length(self._slot)
        return Block(slot=self._slot, start=at, tokens=tuple(context[at:]), rows=1)

    def guess(self, context: Sequence[int], row: FloatRow) -> _Guess | None:
        """q behind `context` by the row that came of `block`, and the token drawn from it; None:
        there is none that the grammar allows (an output vocabulary may lack it)."""
        assert self._history is not None, "start comes first"
        self._row = row
        for token in context[self._prompt_length + len(self._history) :]:
            self._history.push(token)
        try:
            q = self._pipeline.distribution(row, self._history)
        except DeadEndError:
            return None
        except RowError as error:
            raise EngineError(f"draft model {self.model.info.name}: {error}") from None
        sketch = None
        if self._sketch:  # what is drawn from is what the cloud is told, not what it came from
            sketch, q = sketched(q, self._sketch)
        return _Guess(q, q.draw(rng.key(self._seed, self._purpose, len(context))), sketch)

    def check(self, stop: StopRule) -> None:
        """Raises EngineError when `stop` needs what the model does not show."""
        if stop.needs_hidden and not isinstance(self.model, ShowsHidden):
            raise EngineError(
                f"draft {self.model.info.name} shows no hidden state; use a distilled draft, or "
                "a stop rule that needs none (adaedl)"
            )

    def signal(self, index: int, q: Distribution, token: int, stop: StopRule) -> DraftSignal:
        """What there is to know about `token`, just drawn from `q` by `guess`."""
        if self._params.temperature <= GREEDY_BELOW:
            q = self._warmed()
        hidden = None
        if stop.needs_hidden and isinstance(self.model, ShowsHidden):
            assert self._slot is not None, "the draft session is closed"
            hidden = self.model.hidden(self._slot)
        return DraftSignal(
            index=index, probability=q.prob(token), entropy=entropy(q), hidden=hidden
        )

    def _warmed(self) -> Distribution:
        """The newest row at temperature 1."""
        assert self._row is not None, "guess comes first"
        assert self._history is not None, "start comes first"
        if self._warm is None:
            self._warm = SamplingPipeline(
                dataclasses.replace(self._params, temperature=1.0),
                vocab_size=self.model.info.vocab_size,
                support=self.model.support,
                end_ids=_end_ids(self.model, self._params),
                constraint=self._constraint,
            )
        return self._warm.distribution(self._row, self._history)

    def close(self) -> None:
        if self._slot is not None:
            self.model.close(self._slot)
            self._slot = None


class _Filter:
    """Which copied ids the grammar would let stand."""

    def __init__(self, constraint: Constraint, prompt_length: int, end_ids: frozenset[int]) -> None:
        self._constraint = constraint
        self._prompt_length = prompt_length
        self._ends = end_ids

    def __call__(self, context: Sequence[int], token: int) -> bool:
        try:
            ids, end = self._constraint.allowed(context[self._prompt_length :])
        except DeadEndError:
            return False
        return bool(ids[token]) or (end and token in self._ends)


class _Session:
    def __init__(
        self,
        voice: _ModelVoice | None,
        index: _Copies | None,
        *,
        needs_q: bool,
        needs_sketch: bool,
        end_ids: frozenset[int],
        filter_: _Filter | None = None,
    ) -> None:
        self._filter = filter_
        self._needs_sketch = needs_sketch
        self._voice = voice
        self._index = index
        self._needs_q = needs_q
        self._end_ids = end_ids

    @property
    def model(self) -> LanguageModel | None:
        return self._voice.model if self._voice is not None else None

    def propose(self, committed: Sequence[int], count: int, stop: StopRule | None = None) -> Draft:
        steps, row = self.steps(committed, count, stop), None
        while isinstance(outcome := advance(steps, row), Block):
            assert self._voice is not None, "only a model asks for rows"
            row = self._voice.model.forward([outcome])[0][0]
        return outcome

    def steps(self, committed: Sequence[int], count: int, stop: StopRule | None = None) -> Steps:
        if count < 1:
            return NO_DRAFT
        self._start(committed, stop)
        context = list(committed)
        rows: list[Distribution] = []
        sketches: list[Sketch] = []
        while len(rows) < count:
            copied = self._copied(context, len(committed))
            guess = copied or (yield from self._spoken(context))
            if guess is None:
                break
            q, token, sketch = guess
            context.append(token)
            rows.append(q)
            if self._needs_sketch:
                sketches.append(sketch or sketched(q, 1)[0])
            if token in self._end_ids:
                break
            if copied is None and self._stops(len(rows) - 1, q, token, stop):
                break
        tokens = tuple(context[len(committed) :])
        if not self._needs_q:
            return Draft(tokens=tokens, sketches=tuple(sketches))
        q_values = tuple(d.prob(t) for d, t in zip(rows, tokens, strict=True))
        return Draft(tokens=tokens, q=q_values, rows=tuple(rows))

    def _start(self, committed: Sequence[int], stop: StopRule | None) -> None:
        if stop is not None:
            if self._voice is not None:
                self._voice.check(stop)
            stop.start()
        if self._index is not None:
            self._index.update(committed)
        if self._voice is not None:
            self._voice.start(committed)

    def _copied(self, context: Sequence[int], committed: int) -> _Guess | None:
        """What comes behind the context, of which `committed` ids are no drafts, by lookup."""
        token = None if self._index is None else self._index.guess(context[committed:])
        if token is None or (self._filter is not None and not self._filter(context, token)):
            return None
        return _Guess(certain(token), token, None)

    def _spoken(self, context: list[int]) -> Generator[Block, FloatRow, _Guess | None]:
        if self._voice is None or len(context) > self._voice.window:
            return None
        row = yield self._voice.block(context)
        return self._voice.guess(context, row)

    def _stops(self, index: int, q: Distribution, token: int, stop: StopRule | None) -> bool:
        if stop is None or self._voice is None:
            return False
        return stop.stop(self._voice.signal(index, q, token, stop))

    def close(self) -> None:
        if self._voice is not None:
            self._voice.close()


def entropy(q: Distribution) -> float:
    """H(q) in nats, >= 0."""
    depth = np.maximum(q.weights - q.top, np.float32(_DEEP))
    p = np.exp(depth)
    total = float(p.sum(dtype=np.float64))
    return max(0.0, math.log(total) - float(p @ depth) / total)
