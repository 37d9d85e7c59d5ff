"""From a row of logits to the distribution a token is drawn from.

One pipeline, used by draft and target alike (field case 04: a filter on one side only makes
text drift without an error). The order is fixed and documented, because a different order is
a different distribution:

    grammar -> penalties -> logit bias -> minimum length -> temperature -> top-k -> top-p -> min-p

Repetition penalty looks at prompt and output (Keskar et al. 2019); presence and frequency
penalties look at the output alone (the OpenAI meaning). Ties are broken towards the lower id,
so that the result is a function of the numbers and not of a sorting routine.

Temperature 0 is the limit T -> 0: after the same filters the whole mass is on the likeliest id.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from outrider.core import rng
from outrider.core.grammar import Allowed, Constraint
from outrider.core.tokens import SamplingParams, TokenLogprob

FloatRow = npt.NDArray[np.float32]
IdArray = npt.NDArray[np.int64]
F64Array = npt.NDArray[np.float64]

GREEDY_BELOW: Final = 1e-5
"""Temperatures up to this are the limit T -> 0: dividing by less overflows float32."""
_NEAR_NATS: Final = 7.0
"""`Distribution.draw` looks at ids this close to the likeliest one by one, and at the others only
when their noise is small enough to make up for it. Any value is exact; 7 is fast on real rows."""
_MAX_SHIFT: Final = 700.0
"""Distances from the likeliest id are cut off here before exp(), which would overflow. E lies in
[2**-53, 36.8]: an id more than 40.4 nats below never wins anyway."""
_FEW: Final = 64
"""Up to so many ids are simply decided in float64: ruling some out first would cost more."""


class RowError(ValueError):
    """A row of logits that nothing can be drawn from: NaN, +inf, or -inf everywhere."""


class DeadEndError(RowError):
    """Under the request's grammar nothing can follow."""


class History:
    """Which ids a request has seen: the prompt's set, and counts of the output.

    `push` and `pop` follow drafted tokens; the pipeline only reads. Each costs the same however
    long the history is, and the views for the penalties are ready at any time.
    """

    __slots__ = ("_distinct", "_fresh", "_index", "_output", "_prompt_ids", "_times", "prompt")

    def __init__(self, prompt: Iterable[int], output: Iterable[int] = ()) -> None:
        self.prompt: frozenset[int] = frozenset(prompt)
        self._prompt_ids: IdArray = np.array(sorted(self.prompt), dtype=np.int64)
        self._output: list[int] = []
        # Distinct output ids in order of first occurrence, with what the penalties need. An id
        # whose count falls to zero by popping was the last to come, so rows 0..n-1 stay dense.
        self._index: dict[int, int] = {}
        self._distinct: IdArray = np.empty(64, dtype=np.int64)
        self._times: FloatRow = np.empty(64, dtype=np.float32)
        self._fresh: npt.NDArray[np.bool_] = np.empty(64, dtype=np.bool_)
        for token in output:
            self.push(token)

    def __len__(self) -> int:
        return len(self._output)

    @property
    def output(self) -> tuple[int, ...]:
        return tuple(self._output)

    def has_any(self, tokens: frozenset[int]) -> bool:
        """Does one of them occur in the output?"""
        return any(token in self._index for token in tokens)

    @property
    def distinct(self) -> IdArray:
        """Distinct ids of the output. A view, valid until the next push or pop."""
        return self._distinct[: len(self._index)]

    @property
    def times(self) -> FloatRow:
        """How often each id of `distinct` occurs. A view as well."""
        return self._times[: len(self._index)]

    @property
    def seen(self) -> IdArray:
        """Distinct ids of prompt and output."""
        fresh = self.distinct[self._fresh[: len(self._index)]]
        ids: IdArray = np.concatenate([self._prompt_ids, fresh])
        return ids

    def push(self, token: int) -> None:
        self._output.append(token)
        i = self._index.get(token)
        if i is not None:
            self._times[i] += 1
            return
        i = len(self._index)
        if i == len(self._distinct):
            self._grow()
        self._index[token] = i
        self._distinct[i] = token
        self._times[i] = 1
        self._fresh[i] = token not in self.prompt

    def _grow(self) -> None:
        self._distinct = np.concatenate([self._distinct, np.empty_like(self._distinct)])
        self._times = np.concatenate([self._times, np.empty_like(self._times)])
        self._fresh = np.concatenate([self._fresh, np.empty_like(self._fresh)])

    def pop(self) -> int:
        token = self._output.pop()
        i = self._index[token]
        self._times[i] -= 1
        if not self._times[i]:
            del self._index[token]
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

    __slots__ = ("_likeliest", "_log_total", "_offsets", "_scratch", "gap", "ids", "top", "weights")

    def __init__(
        self,
        ids: IdArray,
        weights: FloatRow,
        offsets: rng.U64Array,
        *,
        gap: float = math.inf,
        scratch: rng.Scratch | None = None,
        log_total: float | None = None,
    ) -> None:
        """`offsets`: rng.token_offsets(ids). `scratch`: memory of this width, lent for draws.
        `log_total`: of a whole distribution of which these ids are a part (core.residual)."""
        self.ids = ids
        self.weights = weights
        self.gap = gap
        """At temperature 0: logits between the chosen id and the runner-up (inf: not asked)."""
        self._likeliest = int(weights.argmax())
        self.top = np.float32(weights[self._likeliest])
        _check_top(self.top)
        self._offsets = offsets
        self._scratch = scratch
        self._log_total = log_total

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
        return int(self.ids[self._likeliest])

    def draw(self, draw_key: int) -> int:
        """argmin E/p over the candidates with the noise of `draw_key` (core.rng), in float64;
        among equal scores the lower id. The law of the result is exactly this distribution."""
        if len(self.ids) == 1:
            return int(self.ids[0])
        found = self._contenders(draw_key, 0.0)
        if len(found) > 1:
            found = found[[int(self._scores(draw_key, found).argmin())]]
        return int(self.ids[found[0]])

    def draws(self, keys: Sequence[int]) -> tuple[int, ...]:
        """One id for each key, independent draws: the first whose running sum of p, in the order
        of ids, exceeds u, the uniform of the key (v of token 0). One pass over the row however
        many there are; rounding of the sum moves the law by less than 1e-10 of total variation."""
        sums = np.cumsum(self.probabilities())
        u = np.array([rng.token_uniform(key, 0) for key in keys])
        # u <= 1 - 2**-53 and the total is 1 up to rounding, so u * total stays below it.
        at = np.searchsorted(sums, u * sums[-1], side="right")
        return tuple(self.ids[at].tolist())

    def margin(self, draw_key: int, tolerance: float) -> float:
        """Gap in nats between the two best noisy log-scores; inf when above `tolerance`.

        A gap below the numerical error of the logits means that another kernel or batch shape
        could have chosen the other token: a near-tie (docs/architecture.md, Numerics).
        """
        if len(self.ids) == 1:
            return self.gap if self.gap <= tolerance else math.inf
        scores = self._scores(draw_key, self._contenders(draw_key, tolerance))
        if len(scores) < 2:
            return math.inf
        best, second = np.partition(scores, 1)[:2]
        gap = math.log(second) - math.log(best)
        return gap if gap <= tolerance else math.inf

    def _contenders(self, draw_key: int, tolerance: float) -> npt.NDArray[np.intp]:
        """Indices, ascending, of all ids whose score may lie within `tolerance` nats of the
        best one, and of few others.

        -log1p(-v) >= v for v in (0, 1), so an id that lies s nats below the likeliest scores at
        least v*exp(s): with a score in hand (any will do), v alone rules out nearly all ids, and
        v is known to 31 bits before the noise is complete.
        """
        if len(self.ids) <= _FEW:
            return np.arange(len(self.ids))
        rough = rng.rough_integers(
            draw_key, self._offsets, self._scratch or rng.Scratch(len(self.ids))
        )
        border = self.top - np.float32(_NEAR_NATS)
        near = np.flatnonzero(self.weights >= border)
        in_hand = min(self._score(draw_key, i) for i in (self._likeliest, *near[:4].tolist()))
        best = in_hand * math.exp(tolerance)
        near = near[rough[near] <= rng.rough_limit(best)]
        further = float(self.top) - float(border)
        far = np.flatnonzero(rough <= rng.rough_limit(best * math.exp(-further)))
        far = far[self.weights[far] < border]
        return np.sort(np.concatenate([near, far]))

    def _scores(self, draw_key: int, index: npt.NDArray[np.intp]) -> F64Array:
        """Exact E/p (times a constant) of the chosen candidates, float64."""
        x = rng.integers(draw_key, self._offsets[index])
        shift = float(self.top) - self.weights[index].astype(np.float64)
        scores: F64Array = rng.exponentials(x) * np.exp(np.minimum(shift, _MAX_SHIFT))
        return scores

    def _score(self, draw_key: int, index: int) -> float:
        """One of them for an id near the top, up to an ulp: a bound, never a decision."""
        noise = -math.log1p(-rng.token_uniform(draw_key, int(self.ids[index])))
        return noise * math.exp(float(self.top) - float(self.weights[index]))


def draw_from(ids: IdArray, p: F64Array, draw_key: int) -> int:
    """One of `ids` with probability in proportion to `p` (all positive): argmin E/p, plainly."""
    noise = rng.exponentials(rng.integers(draw_key, rng.token_offsets(ids)))
    return int(ids[int((noise / p).argmin())])


def _check_top(top: np.float32) -> None:
    """`top`: the largest logit. NaN anywhere makes it NaN."""
    if not math.isfinite(top):
        raise RowError(f"the largest logit is {top}: the row cannot be sampled")


def certain(token: int) -> Distribution:
    """All mass on one id."""
    ids = np.array([token], dtype=np.int64)
    return Distribution(ids, np.zeros(1, dtype=np.float32), rng.token_offsets(ids))


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
        constraint: Constraint | None = None,
    ) -> None:
        """`support`: ids of the row's columns, strictly ascending; None when column = id.

        `end_ids`: ids that may not occur before `min_tokens` (the model's end ids).
        `watch_ties`: fill in `Distribution.gap`, at the price of one more pass at T=0.
        `constraint`: of the request's grammar; an end id may occur where the text may end.
        """
        self._constraint = constraint
        self.params = params
        self._watch_ties = watch_ties
        self.ids: IdArray = (
            np.arange(vocab_size, dtype=np.int64) if support is None else support.astype(np.int64)
        )
        self._column_of = np.full(vocab_size, -1, dtype=np.int64)
        self._column_of[self.ids] = np.arange(len(self.ids))
        if not len(self.ids) or (np.diff(self.ids) <= 0).any():
            raise ValueError("support must be ids in strictly ascending order, at least one")
        self._offsets = rng.token_offsets(self.ids)
        self._scratch = rng.Scratch(len(self.ids))
        tokens = np.array(list(params.logit_bias), dtype=np.int64)
        values = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self._bias_columns, known = self._columns(tokens)
        self._bias_values = values[known]
        self._ends = end_ids | params.stop_token_ids
        self._end_columns, _ = self._columns(np.array(sorted(self._ends), dtype=np.int64))

    def _columns(self, tokens: IdArray) -> tuple[IdArray, npt.NDArray[np.bool_]]:
        """Columns of the given ids, and which ids have one: those outside the row are left out."""
        known = tokens < len(self._column_of)
        columns = self._column_of[np.where(known, tokens, 0)]
        known &= columns >= 0
        return columns[known], known

    def distribution(self, row: FloatRow, history: History) -> Distribution:
        """The distribution behind one row of raw logits, float32 [columns]. Raises RowError."""
        p = self.params
        if len(history) < len(p.given):
            return certain(p.given[len(history)])
        logits = self._adjusted(row, history)
        # Behind an end comes nothing that anybody reads: a block may go on there all the same.
        if self._constraint is not None and not history.has_any(self._ends):
            return self._constrained(logits, self._constraint.allowed(history.output))
        if p.temperature <= GREEDY_BELOW:
            return self._greedy(logits)
        weights = logits if p.temperature == 1.0 else logits / np.float32(p.temperature)
        if not p.filters:
            return Distribution(self.ids, weights, self._offsets, scratch=self._scratch)
        _check_top(weights.max())
        keep = self._kept(weights)
        return Distribution(self.ids[keep], weights[keep], self._offsets[keep])

    def _constrained(self, logits: FloatRow, allowed: Allowed) -> Distribution:
        """The same over what the grammar allows alone."""
        inside = allowed.ids[self.ids]
        if allowed.end:
            inside[self._end_columns] = True
        inside &= logits != -np.inf  # what is impossible anyhow is no way out
        columns = np.flatnonzero(inside)
        if not len(columns):
            raise DeadEndError("the grammar allows nothing that the model can say here")
        p, weights = self.params, logits[columns]
        if p.temperature <= GREEDY_BELOW:
            return self._greedy(weights, columns)
        if p.temperature != 1.0:
            weights = weights / np.float32(p.temperature)
        _check_top(weights.max())
        keep = self._kept(weights)
        columns = columns[keep]
        return Distribution(self.ids[columns], weights[keep], self._offsets[columns])

    def _greedy(
        self, logits: FloatRow, columns: npt.NDArray[np.intp] | None = None
    ) -> Distribution:
        """`columns`: which ones the logits are of; None: all."""
        best = np.array([int(logits.argmax())])
        gap = math.inf
        if self._watch_ties and len(logits) > 1:
            second, first = np.partition(logits, len(logits) - 2)[-2:]
            gap = float(first) - float(second)
        at = best if columns is None else columns[best]
        return Distribution(self.ids[at], logits[best], self._offsets[at], gap=gap)

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
            columns, _ = self._columns(history.seen)
            values = logits[columns]
            factor = np.float32(p.repetition_penalty)
            logits[columns] = np.where(values > 0, values / factor, values * factor)
        if p.presence_penalty or p.frequency_penalty:
            columns, known = self._columns(history.distinct)
            logits[columns] -= np.float32(p.presence_penalty)
            logits[columns] -= np.float32(p.frequency_penalty) * history.times[known]

    def _kept(self, weights: FloatRow) -> npt.NDArray[np.intp] | slice:
        """Indices that survive top-k, top-p and min-p, ascending."""
        p = self.params
        keep: npt.NDArray[np.intp] | slice = slice(None)
        if 0 < p.top_k < len(weights):
            keep = likeliest(weights, p.top_k)
        if p.top_p < 1.0:
            keep = _within(keep, _top_p(weights[keep], p.top_p))
        if p.min_p > 0.0:
            keep = _within(keep, _min_p(weights[keep], p.min_p))
        return keep


def _within(
    keep: npt.NDArray[np.intp] | slice, inside: npt.NDArray[np.intp]
) -> npt.NDArray[np.intp]:
    return inside if isinstance(keep, slice) else keep[inside]


def _min_p(weights: FloatRow, min_p: float) -> npt.NDArray[np.intp]:
    """Indices of all that are at least min_p times as likely as the likeliest, ascending."""
    floor = float(weights.max()) + math.log(min_p)
    return np.flatnonzero(weights.astype(np.float64) >= floor)


def likeliest(weights: FloatRow, k: int) -> npt.NDArray[np.intp]:
    """Indices of the k largest, ascending; among equals the lower index is kept."""
    if k >= len(weights):
        return np.arange(len(weights))
    threshold = np.partition(weights, len(weights) - k)[len(weights) - k]
    above = np.flatnonzero(weights > threshold)
    equal = np.flatnonzero(weights == threshold)[: k - len(above)]
    merged: npt.NDArray[np.intp] = np.sort(np.concatenate([above, equal]))
    return merged


def _top_p(weights: FloatRow, top_p: float) -> npt.NDArray[np.intp]:
    """Indices of the smallest likeliest set that holds at least top_p, ascending; equal weights
    count in the order of their indices.

    Bisection on the weight brackets the border of the set; only what lies in the bracket is
    sorted. It starts at ids so unlikely that n of them hold less than 1 - top_p together.
    """
    top = float(weights.max())
    p = np.exp(weights - np.float32(top))
    total = float(p.sum(dtype=np.float64))
    low, high = math.log((1.0 - top_p) / len(p) * total), 0.0  # nats, relative to the top
    border = np.flatnonzero(weights >= np.float32(top + low))
    inside, held = [], 0.0
    while len(border) > _FEW and high - low > 1e-3:
        middle = (low + high) / 2
        above = weights[border] >= np.float32(top + middle)
        mass = float(p[border[above]].sum(dtype=np.float64))
        if held + mass >= top_p * total:
            border, low = border[above], middle
        else:
            inside.append(border[above])
            border, high, held = border[~above], middle, held + mass
    order = border[np.argsort(-weights[border], kind="stable")]
    reached = held + np.cumsum(p[order], dtype=np.float64)
    count = int(np.searchsorted(reached, top_p * total)) + 1
    kept: npt.NDArray[np.intp] = np.sort(np.concatenate([*inside, order[:count]]))
    return kept


def token_logprob(row: FloatRow, ids: IdArray, token: int, alternatives: int) -> TokenLogprob:
    """Log-probability of `token` under the model's raw row (temperature 1, no filter).

    This is what OpenAI-style clients mean by logprobs: the model's own view, also at T=0.
    Impossible ids are never alternatives, so there may be fewer than asked for.
    """
    wide = row.astype(np.float64)
    top = float(wide.max())
    total = top + math.log(float(np.exp(wide - top).sum()))
    best = likeliest(row, min(alternatives, len(row))) if alternatives else np.array([], dtype=int)
    possible = best[np.isfinite(row[best])]
    ranked = sorted(((int(ids[i]), float(wide[i]) - total) for i in possible), key=lambda a: -a[1])
    column = int(np.searchsorted(ids, token))
    return TokenLogprob(token=token, logprob=float(wide[column]) - total, top=tuple(ranked))
