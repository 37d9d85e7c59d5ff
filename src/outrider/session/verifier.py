"""Judges blocks of drafts for one request: rows of target logits in, a judgement out.

Owns the request's sampling pipeline on the target's side and the history that penalties need.
The history always equals the committed output: drafts are pushed only as they are accepted
(field case 07: each row sees the counts of the drafts before it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from outrider.core import rng
from outrider.core.draft import Draft
from outrider.core.grammar import Constraint
from outrider.core.ledger import Ledger
from outrider.core.relaxed import Policy, verify_relaxed
from outrider.core.rng import Purpose
from outrider.core.sampling import Distribution, History, SamplingPipeline, token_logprob
from outrider.core.tokens import Rule, SamplingParams, TokenLogprob, Verdict
from outrider.core.verify import (
    NextDistribution,
    Rejection,
    ResidualStep,
    judge_ratio,
    resolve_rejection,
    verify_coupled,
)

NEAR_TIE_NATS: Final = 0.1
"""Default gap (nats of noisy log-score) below which a choice counts as a near-tie. Our default:
bf16 logits of one position differ by more than this between batch shapes only now and then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A verdict with what else was learnt on the way."""

    verdict: Verdict
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each committed token of the block, when asked for."""
    near_ties: tuple[bool, ...] = ()
    """For each committed token, whether the target nearly chose another; empty: not watched."""
    residual: ResidualStep | None = None
    """Which step of the residual dialogue produced the correction (ratio rule)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRejection:
    """A rejection whose residual cannot be drawn here, because q is at the other side."""

    rejection: Rejection
    drafted: int
    accepted: int
    p: Distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """The block under judgement."""

    draft: Draft
    rows: npt.NDArray[np.float32]
    seen: list[Distribution]
    position: int


class Verifier:
    """One request's acceptance, block after block."""

    def __init__(
        self,
        params: SamplingParams,
        rule: Rule,
        *,
        prompt: Sequence[int],
        vocab_size: int,
        end_ids: frozenset[int],
        support: npt.NDArray[np.int64] | None = None,
        watch_ties: bool = False,
        tie_nats: float = NEAR_TIE_NATS,
        policy: Policy | None = None,
        ledger: Ledger | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        """`policy`, `ledger`: of the relaxed rule, which needs the first; a budget of 0 else.
        `constraint`: of the request's grammar, which needs one."""
        if (constraint is None) != (params.grammar is None):
            raise ValueError("a grammar and its constraint come together")
        if rule is Rule.RELAXED and policy is None:
            raise ValueError("the relaxed rule needs a policy")
        self.policy = policy or Policy()
        """May be replaced between blocks: a controller moves T."""
        self.ledger = ledger or Ledger()
        self._params = params
        self._rule = rule
        # Only the coupled rule promises one certain token; ratio accepts by another test.
        self._watch_ties = watch_ties and rule is Rule.COUPLED
        self._tie_nats = tie_nats
        self._pipeline = SamplingPipeline(
            params,
            vocab_size=vocab_size,
            support=support,
            end_ids=end_ids,
            watch_ties=watch_ties,
            constraint=constraint,
        )
        self.history = History(prompt)
        self._block: _Block | None = None

    def judge(
        self, draft: Draft, rows: npt.NDArray[np.float32], position: int
    ) -> Judgement | OpenRejection:
        """Judge `draft` at absolute `position` by the target's rows, float32 [len(draft)+1, V].

        Row i is the target's next-token logits given the committed prefix and drafts 0..i-1.
        Under the ratio rule a rejection needs q: with `draft.rows` it is resolved here, without
        them the answer is an OpenRejection and `settle` ends it once the token is known.
        Afterwards the history includes the committed tokens; after an exception it is as before.
        """
        if len(rows) != len(draft) + 1:
            raise ValueError(f"{len(rows)} rows for a block of {len(draft)} drafts")
        before = len(self.history)
        try:
            return self._judge(draft, rows, position)
        except BaseException:
            self._block = None
            self.history.truncate(before)
            raise

    def _judge(
        self, draft: Draft, rows: npt.NDArray[np.float32], position: int
    ) -> Judgement | OpenRejection:
        seen: list[Distribution] = []

        def at(i: int) -> Distribution:
            if i > 0:
                self.history.push(draft.tokens[i - 1])
            seen.append(self._pipeline.distribution(rows[i], self.history))
            return seen[i]

        self._block = _Block(draft=draft, rows=rows, seen=seen, position=position)
        seed = self._params.seed
        if self._rule is Rule.RELAXED:
            return self._judge_relaxed(draft, at, position)
        if self._rule is Rule.COUPLED:
            return self.settle(verify_coupled(draft.tokens, at, seed=seed, position=position))
        outcome = judge_ratio(draft.tokens, draft.q, at, seed=seed, position=position)
        if isinstance(outcome, Verdict):
            return self.settle(outcome)
        i = outcome.position - position
        if not draft.rows:
            return OpenRejection(rejection=outcome, drafted=len(draft), accepted=i, p=seen[i])
        token, step = resolve_rejection(outcome, seen[i], draft.rows[i], seed=seed)
        return self.settle(Verdict(drafted=len(draft), accepted=i, token=token), step)

    def _judge_relaxed(self, draft: Draft, at: NextDistribution, position: int) -> Judgement:
        verdict = verify_relaxed(
            draft.tokens,
            draft.sketches or draft.rows,
            at,
            seed=self._params.seed,
            position=position,
            policy=self.policy,
            ledger=self.ledger,
        )
        judgement = self.settle(verdict)
        self.ledger = verdict.ledger
        return judgement

    def settle(self, verdict: Verdict, residual: ResidualStep | None = None) -> Judgement:
        """The block's verdict is known: push its token and say what was learnt."""
        block = self._block
        if block is None:
            raise ValueError("no block is being judged")
        self._block = None
        self.history.push(verdict.token)
        return Judgement(
            verdict=verdict,
            logprobs=self._logprobs(block.draft, verdict, block.rows),
            near_ties=self._near_ties(block.seen, block.position),
            residual=residual,
        )

    def _logprobs(
        self, draft: Draft, verdict: Verdict, rows: npt.NDArray[np.float32]
    ) -> tuple[TokenLogprob, ...]:
        wanted = self._params.logprobs
        if wanted is None:
            return ()
        fixed = (*draft.tokens[: verdict.accepted], verdict.token)
        ids = self._pipeline.ids
        return tuple(token_logprob(rows[i], ids, t, wanted) for i, t in enumerate(fixed))

    def _near_ties(self, seen: Sequence[Distribution], position: int) -> tuple[bool, ...]:
        if not self._watch_ties:
            return ()
        keys = (rng.key(self._params.seed, Purpose.TOKEN, position + i) for i in range(len(seen)))
        gaps = (d.margin(k, self._tie_nats) for d, k in zip(seen, keys, strict=True))
        return tuple(gap <= self._tie_nats for gap in gaps)
