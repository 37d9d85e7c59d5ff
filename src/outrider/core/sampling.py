"""From a row of logits to the distribution a token is drawn from.

One pipeline, used by draft and target alike (field case 04: a filter on one side only makes
text drift without an error). The order is fixed and documented, because a different order is
a different distribution:

    penalties -> logit bias -> minimum length -> temperature -> top-k -> top-p -> min-p

Repetition penalty looks at prompt and output (Keskar et al. 2019); presence and frequency
penalties look at the output alone (the OpenAI meaning). Ties are broken towards the lower id,
so that the result is a function of the numbers and not of a sorting routine.

Temperature 0 is the limit T -> 0: after the same filters the whole mass is on the likeliest id.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from outrider.core import rng
from outrider.core.tokens import SamplingParams, TokenLogprob

FloatRow = npt.NDArray[np.float32]
IdArray = npt.NDArray[np.int64]
F64Array = npt.NDArray[np.float64]

_SLACK: Final = np.float32(1.0 + 1e-5)
"""Relative slack of the float32 pre-selection in `Distribution.draw`; its own rounding error is
below 1e-6, and a wider margin only adds candidates that float64 then decides."""
GREEDY_BELOW: Final = 1e-5
"""Temperatures up to this are the limit T -> 0: dividing by less overflows float32."""
_MAX_EXPONENT: Final = np.float32(87.0)
"""exp() of more overflows float32. A token 87 nats below the best could win only against odds
of e**-87; clipping keeps it among the candidates instead of making it infinite."""


class History:
    """Which ids a request has seen: the prompt's set, and counts of the output.

    `push` and `pop` follow drafted tokens; the pipeline only reads. When a request uses no
    penalty the counters are still exact, since `len` is the output length that min_tokens needs.
    """

    __slots__ = ("_output", "counts", "prompt")

    def __init__(self, prompt: Iterable[int], output: Iterable[int] = ()) -> None:
        self.prompt: frozenset[int] = frozenset(prompt)
        self._output: list[int] = []
        self.counts: Counter[int] = Counter()
        for token in output:
            self.push(token)

    def __len__(self) -> int:
        return len(self._output)

    @property
    def output(self) -> tuple[int, ...]:
        return tuple(self._output)

    def push(self, token: int) -> None:
        self._output.append(token)
        self.counts[token] += 1

    def pop(self) -> int:
        token = self._output.pop()
        self.counts[token] -= 1
        if not self.counts[token]:
            del self.counts[token]
        return token

    def truncate(self, length: int) -> None:
        """Forget output tokens from index `length` on."""
        while len(self._output) > length:
            self.pop()


class Distribution:
    """A next-token distribution after every filter.

    `ids` are the candidate ids (ascending, int64 [n]) and `weights` their log-weights divided by
    the temperature (float32 [n], not normalised, all finite except -inf for impossible ids).
    """

    __slots__ = ("_log_total", "_offsets", "gap", "ids", "top", "weights")

    def __init__(
        self, ids: IdArray, weights: FloatRow, offsets: rng.U64Array, gap: float = math.inf
    ) -> None:
        self.ids = ids
        self.weights = weights
        self.gap = gap
        """At temperature 0: logits between the chosen id and the runner-up (inf: not asked)."""
        self.top = np.float32(weights.max())
        if not np.isfinite(self.top):
            raise ValueError("no token has a finite logit: the row cannot be sampled")
        self._offsets = offsets
        self._log_total: float | None = None

    @property
    def log_total(self) -> float:
        """log of the sum of exp(weights), float64."""
        if self._log_total is None:
            shifted = np.exp(self.weights.astype(np.float64) - float(self.top))
            self._log_total = float(self.top) + math.log(float(shifted.sum()))
        return self._log_total

    def probabilities(self) -> F64Array:
        """float64 [n], sums to 1 within rounding; aligned with `ids`."""
        p: F64Array = np.exp(self.weights.astype(np.float64) - self.log_total)
        return p

    def dense(self, vocab_size: int) -> F64Array:
        """Probabilities of all ids, float64 [vocab_size]. For proofs and for the full row."""
        full = np.zeros(vocab_size)
        full[self.ids] = self.probabilities()
        return full

    def _index(self, token: int) -> int | None:
        i = int(np.searchsorted(self.ids, token))
        return i if i < len(self.ids) and self.ids[i] == token else None

    def logprob(self, token: int) -> float:
        i = self._index(token)
        return -math.inf if i is None else float(self.weights[i]) - self.log_total

    def prob(self, token: int) -> float:
        return math.exp(self.logprob(token))

    def likeliest(self) -> int:
        """The most likely id; the lowest one on a tie."""
        return int(self.ids[int(self.weights.argmax())])

    def draw(self, draw_key: int) -> int:
        """argmin E/p over the candidates with the noise of `draw_key` (core.rng).

        The law of the result is exactly this distribution. -log1p(-v) >= v for v in (0, 1), so
        v/p bounds E/p from below: one float32 pass finds all ids that can still win, and only
        those are decided in float64. The result is the float64 argmin over all ids.
        """
        if len(self.ids) == 1:
            return int(self.ids[0])
        found, scores = self._contenders(draw_key, 0.0)
        return int(self.ids[found[int(scores.argmin())]])

    def margin(self, draw_key: int, tolerance: float) -> float:
        """Gap in nats between the two best noisy log-scores; inf when above `tolerance`.

        A gap below the numerical error of the logits means that another kernel or batch shape
        could have chosen the other token: a near-tie (SYSTEM.md, Numerics).
        """
        if len(self.ids) == 1:
            return self.gap if self.gap <= tolerance else math.inf
        _, scores = self._contenders(draw_key, tolerance)
        if len(scores) < 2:
            return math.inf
        best, second = np.partition(scores, 1)[:2]
        gap = math.log(second) - math.log(best)
        return gap if gap <= tolerance else math.inf

    def _contenders(self, draw_key: int, tolerance: float) -> tuple[npt.NDArray[np.intp], F64Array]:
        """Indices (ascending) whose score may lie within `tolerance` nats of the best one, and
        their exact scores. Ascending, so that argmin takes the lower id on a tie."""
        x = rng.integers(draw_key, self._offsets)
        inverse = np.exp(np.minimum(self.top - self.weights, _MAX_EXPONENT))
        lower = (x >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24) * inverse
        # Two good guesses bound the best score from above: the best lower bound, and the
        # likeliest id (the first alone can be an id of almost no weight whose bound is 0).
        guesses = np.array([int(lower.argmin()), int(self.weights.argmax())])
        best = float(self._scores(x, guesses).min()) * math.exp(tolerance)
        found = np.flatnonzero(lower <= np.float32(best) * _SLACK)
        return found, self._scores(x, found)

    def _scores(self, x: rng.U64Array, index: npt.NDArray[np.intp]) -> F64Array:
        """Exact E/p (times a constant) of the chosen candidates, float64."""
        shift = float(self.top) - self.weights[index].astype(np.float64)
        with np.errstate(over="ignore"):
            scores: F64Array = rng.exponentials(x[index]) * np.exp(shift)
        return scores


class SamplingPipeline:
    """Turns raw logits of one model into `Distribution`s under one request's parameters."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        vocab_size: int,
        support: IdArray | None = None,
        end_ids: frozenset[int] = frozenset(),
        watch_ties: bool = False,
    ) -> None:
        """`support`: ids of the row's columns, ascending; None when column = id.

        `end_ids`: ids that may not occur before `min_tokens` (the model's end ids).
        `watch_ties`: fill in `Distribution.gap`, at the price of one more pass at T=0.
        """
        self.params = params
        self._watch_ties = watch_ties
        self.ids: IdArray = (
            np.arange(vocab_size, dtype=np.int64) if support is None else support.astype(np.int64)
        )
        self._direct = support is None
        self._offsets = rng.token_offsets(self.ids)
        bias = {t: b for t, b in params.logit_bias.items() if t < vocab_size}
        self._bias_columns, self._bias_values = self._bias(bias)
        ends = end_ids | params.stop_token_ids
        self._end_columns = self._columns(np.array(sorted(ends), dtype=np.int64))

    def _bias(self, bias: dict[int, float]) -> tuple[IdArray, FloatRow]:
        tokens = np.array(sorted(bias), dtype=np.int64)
        columns = self._columns(tokens)
        values = np.array([bias[int(self.ids[c])] for c in columns], dtype=np.float32)
        return columns, values

    def _columns(self, tokens: IdArray) -> IdArray:
        """Columns of the given ids; ids outside the row are left out."""
        if self._direct:
            return tokens[tokens < len(self.ids)]
        at = np.searchsorted(self.ids, tokens)
        at = np.minimum(at, len(self.ids) - 1)
        hit: IdArray = at[self.ids[at] == tokens].astype(np.int64)
        return hit

    def distribution(self, row: FloatRow, history: History) -> Distribution:
        """The distribution behind one row of raw logits, float32 [columns]."""
        p = self.params
        logits = self._adjusted(row, history)
        if p.temperature <= GREEDY_BELOW:
            return self._greedy(logits)
        weights = logits if p.temperature == 1.0 else logits / np.float32(p.temperature)
        keep = self._kept(weights)
        if keep is None:
            return Distribution(self.ids, weights, self._offsets)
        return self._select(weights, keep)

    def _greedy(self, logits: FloatRow) -> Distribution:
        best = np.array([int(logits.argmax())])
        gap = math.inf
        if self._watch_ties and len(logits) > 1:
            second, first = np.partition(logits, len(logits) - 2)[-2:]
            gap = float(first) - float(second)
        return Distribution(self.ids[best], logits[best], self._offsets[best], gap)

    def _select(self, weights: FloatRow, keep: npt.NDArray[np.intp]) -> Distribution:
        return Distribution(self.ids[keep], weights[keep], self._offsets[keep])

    def _adjusted(self, row: FloatRow, history: History) -> FloatRow:
        p = self.params
        masked = len(history) < p.min_tokens and len(self._end_columns) > 0
        if not (p.uses_history or len(self._bias_columns) or masked):
            return row
        logits = row.copy()
        if p.uses_history:
            self._penalise(logits, history)
        logits[self._bias_columns] += self._bias_values
        if masked:
            logits[self._end_columns] = -np.inf
        return logits

    def _penalise(self, logits: FloatRow, history: History) -> None:
        p = self.params
        if p.repetition_penalty != 1.0:
            seen = np.array(sorted(history.prompt | history.counts.keys()), dtype=np.int64)
            columns = self._columns(seen)
            values = logits[columns]
            factor = np.float32(p.repetition_penalty)
            logits[columns] = np.where(values > 0, values / factor, values * factor)
        if history.counts and (p.presence_penalty or p.frequency_penalty):
            tokens = np.array(sorted(history.counts), dtype=np.int64)
            columns = self._columns(tokens)
            times = np.array([history.counts[int(self.ids[c])] for c in columns], dtype=np.float32)
            logits[columns] -= np.float32(p.presence_penalty)
            logits[columns] -= np.float32(p.frequency_penalty) * times

    def _kept(self, weights: FloatRow) -> npt.NDArray[np.intp] | None:
        """Indices that survive top-k, top-p and min-p, ascending; None = all."""
        p = self.params
        keep: npt.NDArray[np.intp] | None = None
        if 0 < p.top_k < len(weights):
            keep = _top_k(weights, p.top_k)
        if p.top_p < 1.0:
            part = weights if keep is None else weights[keep]
            inside = _top_p(part, p.top_p)
            keep = inside if keep is None else keep[inside]
        if p.min_p > 0.0:
            part = weights if keep is None else weights[keep]
            floor = float(part.max()) + math.log(p.min_p)
            inside = np.flatnonzero(part.astype(np.float64) >= floor)
            keep = inside if keep is None else keep[inside]
        return keep


def _top_k(weights: FloatRow, k: int) -> npt.NDArray[np.intp]:
    """Indices of the k largest, ascending; among equals the lower index is kept."""
    threshold = np.partition(weights, len(weights) - k)[len(weights) - k]
    above = np.flatnonzero(weights > threshold)
    equal = np.flatnonzero(weights == threshold)[: k - len(above)]
    merged: npt.NDArray[np.intp] = np.sort(np.concatenate([above, equal]))
    return merged


def _top_p(weights: FloatRow, top_p: float) -> npt.NDArray[np.intp]:
    """Indices of the smallest likeliest set that holds at least top_p, ascending.

    Ids below (1 - top_p)/n hold less than 1 - top_p together, so they are never needed: leaving
    them out before sorting keeps the result and saves sorting the whole vocabulary.
    """
    p = np.exp(weights.astype(np.float64) - float(weights.max()))
    p /= p.sum()
    candidates = np.flatnonzero(p >= (1.0 - top_p) / len(p))
    order = candidates[np.lexsort((candidates, -p[candidates]))]
    count = int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1
    kept: npt.NDArray[np.intp] = np.sort(order[:count])
    return kept


def token_logprob(row: FloatRow, ids: IdArray, token: int, alternatives: int) -> TokenLogprob:
    """Log-probability of `token` under the model's raw row (temperature 1, no filter).

    This is what OpenAI-style clients mean by logprobs: the model's own view, also at T=0.
    """
    wide = row.astype(np.float64)
    top = float(wide.max())
    total = top + math.log(float(np.exp(wide - top).sum()))
    best = _top_k(row, min(alternatives, len(row))) if alternatives else np.array([], dtype=int)
    ranked = sorted(((int(ids[i]), float(wide[i]) - total) for i in best), key=lambda a: -a[1])
    column = int(np.searchsorted(ids, token))
    return TokenLogprob(token=token, logprob=float(wide[column]) - total, top=tuple(ranked))
