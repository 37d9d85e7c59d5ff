"""Who guesses: a model, prompt lookup, or lookup in front of a model.

A drafter is shared by requests; a draft session belongs to one. Before each block the session
reconciles its model's slot with the committed ids it is told (field cases 10, 15, 17): it never
trusts that the last draft stood, so skipped rounds, rollbacks and other requests cannot leave
junk behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from outrider.core import rng
from outrider.core.draft import NO_DRAFT, Draft
from outrider.core.rng import Purpose
from outrider.core.sampling import Distribution, History, RowError, SamplingPipeline
from outrider.core.tokens import Rule, SamplingParams
from outrider.engines.base import Block, EngineError, LanguageModel, keep_prefix, plan_prefix
from outrider.engines.lookup import NgramIndex


class DraftSession(Protocol):
    """Drafting for one request."""

    def propose(self, committed: Sequence[int], count: int) -> Draft:
        """Up to `count` guesses for the positions behind `committed` (prompt + output).

        Fewer (or none) when the draft's window is full, an end id was guessed, or it has no
        guess. Never raises for a full window (field case 13).
        """
        ...

    def close(self) -> None:
        """Free what the session holds; safe to call twice."""
        ...


class Drafter(Protocol):
    """Makes draft sessions."""

    @property
    def name(self) -> str: ...

    def session(self, prompt_length: int, params: SamplingParams, rule: Rule) -> DraftSession: ...


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

    def session(self, prompt_length: int, params: SamplingParams, rule: Rule) -> DraftSession:
        voice = None
        if self.model is not None:
            voice = _ModelVoice(self.model, prompt_length, params, rule)
        index = NgramIndex() if self._lookup else None
        ends = params.stop_token_ids if self.model is None else _end_ids(self.model, params)
        return _Session(voice, index, needs_q=rule is Rule.RATIO, end_ids=ends)


def _end_ids(model: LanguageModel, params: SamplingParams) -> frozenset[int]:
    eos = frozenset[int]() if params.ignore_eos else model.info.eos_token_ids
    return params.stop_token_ids | eos


class _ModelVoice:
    """The model's part of a draft session: one slot, one sampling pipeline."""

    def __init__(
        self, model: LanguageModel, prompt_length: int, params: SamplingParams, rule: Rule
    ) -> None:
        self._model = model
        self._prompt_length = prompt_length
        self._seed = params.seed
        # Ratio drafts must be independent of the target's draws; coupled ones share them.
        self._purpose = Purpose.TOKEN if rule is Rule.COUPLED else Purpose.DRAFT
        self._pipeline = SamplingPipeline(
            params,
            vocab_size=model.info.vocab_size,
            support=model.support,
            end_ids=_end_ids(model, params),
        )
        self._history: History | None = None
        self._slot: int | None = model.open()
        self.window = model.info.context_length

    def start(self, committed: Sequence[int]) -> None:
        """Make slot and history a prefix of the committed ids; at least one id stays to feed."""
        assert self._slot is not None, "the draft session is closed"
        keep_prefix(self._model, self._slot, committed)
        output = committed[self._prompt_length :]
        if self._history is None:
            self._history = History(committed[: self._prompt_length])
        self._history.truncate(plan_prefix(self._history.output, output))

    def distribution(self, context: Sequence[int]) -> tuple[Distribution, int]:
        """q behind `context` (the committed ids `start` was told, and drafts since then), and
        the token drawn from it."""
        assert self._slot is not None, "the draft session is closed"
        assert self._history is not None, "start comes first"
        at = self._model.length(self._slot)
        block = Block(slot=self._slot, start=at, tokens=tuple(context[at:]), rows=1)
        row = self._model.forward([block])[0][0]
        for token in context[self._prompt_length + len(self._history) :]:
            self._history.push(token)
        try:
            q = self._pipeline.distribution(row, self._history)
        except RowError as error:
            raise EngineError(f"draft model {self._model.info.name}: {error}") from None
        return q, q.draw(rng.key(self._seed, self._purpose, len(context)))

    def close(self) -> None:
        if self._slot is not None:
            self._model.close(self._slot)
            self._slot = None


class _Session:
    def __init__(
        self,
        voice: _ModelVoice | None,
        index: NgramIndex | None,
        *,
        needs_q: bool,
        end_ids: frozenset[int],
    ) -> None:
        self._voice = voice
        self._index = index
        self._needs_q = needs_q
        self._end_ids = end_ids

    def propose(self, committed: Sequence[int], count: int) -> Draft:
        if count < 1:
            return NO_DRAFT
        if self._index is not None:
            self._index.update(committed)
        if self._voice is not None:
            self._voice.start(committed)
        context = list(committed)
        rows: list[Distribution] = []
        while len(context) < len(committed) + count:
            guess = self._next(context, len(committed))
            if guess is None:
                break
            q, token = guess
            context.append(token)
            rows.append(q)
            if token in self._end_ids:
                break
        tokens = tuple(context[len(committed) :])
        if not self._needs_q:
            return Draft(tokens=tokens)
        q_values = tuple(d.prob(t) for d, t in zip(rows, tokens, strict=True))
        return Draft(tokens=tokens, q=q_values, rows=tuple(rows))

    def _next(self, context: list[int], base: int) -> tuple[Distribution, int] | None:
        if self._index is not None:
            copied = self._index.guess(context[base:])
            if copied is not None:
                return _certain(copied), copied
        if self._voice is None or len(context) > self._voice.window:
            return None
        return self._voice.distribution(context)

    def close(self) -> None:
        if self._voice is not None:
            self._voice.close()


def _certain(token: int) -> Distribution:
    """All mass on one id: what a copied guess was drawn from."""
    ids = np.array([token], dtype=np.int64)
    return Distribution(ids, np.zeros(1, dtype=np.float32), rng.token_offsets(ids))
