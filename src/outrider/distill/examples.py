"""What a stop head learns from: states of a draft, and whether its guesses would have stood.

Along a text of the target, position by position, the draft is asked for one token behind the
text so far. That is just the place where a stop rule needs an answer: P(this token stands | all
before it do), since under the coupled rule the tokens before it stand exactly when they are the
target's own text. (SpecDec++ trains on states behind drafted tokens, in one pass over a text in
which 15 % of the tokens are the target's and the others drafted: its mixing. States of ours are
in front of the token, so all positions of the true text serve and there is nothing to mix.)

The label is the probability that the token stands, over the shared noise, in closed form
(`standing`); whether it did stand with one seed is kept beside it, for the figures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.control.head import log_q
from outrider.core import rng
from outrider.core.draft import DraftSignal
from outrider.core.rng import Purpose
from outrider.core.sampling import Distribution, History, SamplingPipeline
from outrider.core.tokens import Rule, SamplingParams
from outrider.engines.base import Block, LanguageModel
from outrider.engines.drafters import ModelDrafter

F32 = np.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """n guesses; all arrays are aligned."""

    hidden: npt.NDArray[np.float32]
    """[n, width]: the state each guess was drawn from."""
    log_q: npt.NDArray[np.float32]
    """[n]: log q(x), cut off as the head cuts it."""
    entropy: npt.NDArray[np.float32]
    """[n]: H(q), nats."""
    label: npt.NDArray[np.float32]
    """[n]: P(the guess stands), given the guess."""
    stood: npt.NDArray[np.bool_]
    """[n]: whether it did, with the request's seed."""

    def __len__(self) -> int:
        return len(self.label)


def joined(parts: Sequence[Examples]) -> Examples:
    """All of them, in order."""
    names = Examples.__dataclass_fields__
    return Examples(**{n: np.concatenate([getattr(part, n) for part in parts]) for n in names})


class Watching:
    """A stop rule that never stops and keeps what it was shown."""

    needs_hidden = True

    def __init__(self) -> None:
        self.seen: list[DraftSignal] = []

    def start(self) -> None:
        self.seen.clear()

    def stop(self, signal: DraftSignal) -> bool:
        self.seen.append(signal)
        return False


def collect(
    target: LanguageModel,
    drafter: ModelDrafter,
    ids: Sequence[int],
    prompt_length: int,
    params: SamplingParams,
    *,
    draws: int = 1,
) -> Examples:
    """Examples of every token behind the prompt of one text of the target.

    `ids`: prompt and answer. `draws`: guesses a position; the first is that of `params.seed`,
    the others have seeds of their own. Raises EngineError when the draft shows no hidden state,
    ValueError for params with min_tokens.
    """
    if params.min_tokens:
        raise ValueError("a text with min_tokens has places where its end ids are forbidden")
    slot = target.open()
    try:
        block = Block(slot=slot, start=0, tokens=tuple(ids[:-1]), rows=len(ids) - prompt_length)
        rows = target.forward([block])[0]
    finally:
        target.close(slot)
    pipeline = SamplingPipeline(
        params,
        vocab_size=target.info.vocab_size,
        support=target.support,
        end_ids=target.info.eos_token_ids,
    )
    history = History(ids[:prompt_length])
    # The ratio rule's sessions give their rows; the guess itself is drawn here. An end id would
    # end their block before the rule is asked.
    endless = dataclasses.replace(params, ignore_eos=True, stop_token_ids=frozenset())
    session = drafter.session(prompt_length, endless, Rule.RATIO)
    watching = Watching()
    found: list[tuple[npt.NDArray[np.float32], float, float, float, bool]] = []
    try:
        for at, row in enumerate(rows, start=prompt_length):
            p = pipeline.distribution(row, history)
            (q,) = session.propose(ids[:at], 1, watching).rows
            (seen,) = watching.seen
            assert seen.hidden is not None, "the rule needs it"
            for draw in range(draws):
                seed = rng.key(params.seed, Purpose.CHOICE, 0, draw) if draw else params.seed
                key = rng.key(seed, Purpose.TOKEN, at)
                x = q.draw(key)
                found.append(
                    (
                        seen.hidden,
                        log_q(q.prob(x)),
                        seen.entropy,
                        standing(p, q, x),
                        x == p.draw(key),
                    )
                )
            history.push(ids[at])
    finally:
        session.close()
    hidden, logs, entropies, labels, stood = zip(*found, strict=True)
    return Examples(
        hidden=np.stack(hidden).astype(F32),
        log_q=np.array(logs, F32),
        entropy=np.array(entropies, F32),
        label=np.array(labels, F32),
        stood=np.array(stood, np.bool_),
    )


def standing(p: Distribution, q: Distribution, token: int) -> float:
    """P(the target draws `token` | the draft drew it), both with the same noise (coupled rule).

    Both draw it with probability 1 / sum over u of max(p_u / p_x, q_u / q_x) (docs/architecture.md,
    Acceptance; arXiv 2408.07978), the draft alone with q_x."""
    p_x, q_x = p.prob(token), q.prob(token)
    if not p_x > 0.0:
        return 0.0
    size = int(max(p.ids[-1], q.ids[-1])) + 1
    most = np.maximum(p.dense(size) / p_x, q.dense(size) / q_x)
    return min(1.0, 1.0 / (float(most.sum()) * q_x))
