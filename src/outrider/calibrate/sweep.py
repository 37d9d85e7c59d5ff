"""The sweep: thresholds {theta_j} and windows W for each bin of the credit, and the labels.

E2-SCI (docs/papers.md, 1, Predictor): for each r try candidate thresholds, note acceptance,
accuracy and latency; label = argmin of E[T_seg | r] - gamma E[L_acc | r]. Two things it leaves
open, and what we do:

* Nothing in that objective speaks against a loose threshold, so by itself it always picks the
  loosest. "Accuracy" must bound it: a label needs Acc >= delta (`control.credit`, rule 5).
* gamma. Unless one is given it is the value at which the whole policy's seconds are gamma times
  its tokens (Dinkelbach's iteration): the labels then minimise seconds a token.

Credits are those that the controller would have: recorded text is replayed with the labels found
so far, bins are counted anew, until the labels stay (`MAX_PASSES`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from outrider.calibrate.costs import Pipeline, SegmentCosts
from outrider.calibrate.trace import Answer, F64Array, leading, runs
from outrider.control.calibration import LN2, Table
from outrider.control.credit import CreditHistory

BINS: Final = 10
"""Bins of the credit, of equal width (our default)."""
THRESHOLDS: Final = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, LN2)
"""{theta_j}, nats (our default; the paper's are not stated)."""
WINDOWS: Final = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Our default."""
FIRST_WINDOW: Final = 4
"""Of the first replay, under the strict rule."""
MIN_VISITS: Final = 30
"""A bin seen less often takes the figures of the nearest bin seen often enough."""
MAX_PASSES: Final = 4
_GAMMA_STEPS: Final = 60

Policy = Callable[[float, float], tuple[float, int]]
"""Credit and change to (T, W)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """A segment of the replay begins."""

    answer: int
    """Index of the answer."""
    start: int
    """Position in it."""
    credit: float
    change: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Surfaces:
    """Means by bin, threshold and window; float64 [B, N, M] each."""

    visits: tuple[int, ...]
    seconds: F64Array
    tokens: F64Array
    quality: F64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What a sweep found."""

    table: Table
    gamma: float
    visits: tuple[Visit, ...]
    """Of the last replay."""


def sweep(
    answers: Sequence[Answer],
    costs: SegmentCosts,
    *,
    k: int,
    beta: float,
    delta: float,
    gamma: float | None = None,
    thresholds: Sequence[float] = THRESHOLDS,
    windows: Sequence[int] = WINDOWS,
) -> Swept:
    """Replay, count, label, until the labels stay. `gamma`: seconds a token; None: found.

    Raises ValueError when no answer is as long as the largest window.
    """
    edges = [b / BINS for b in range(1, BINS)]
    policy: Policy = lambda _credit, _change: (0.0, FIRST_WINDOW)  # noqa: E731
    labels: list[tuple[float, int]] = []
    for _ in range(MAX_PASSES):
        seen = replay_visits(answers, policy, costs.pipeline, CreditHistory(k=k, beta=beta))
        found = surfaces(answers, seen, costs, edges, thresholds, windows)
        best, used = label(found, thresholds, windows, delta=delta, gamma=gamma)
        table = Table(
            edges=edges,
            thresholds=list(thresholds),
            windows=list(windows),
            visits=list(found.visits),
            best_threshold=[t for t, _ in best],
            best_window=[w for _, w in best],
            seconds=found.seconds.tolist(),
            tokens=found.tokens.tolist(),
            quality=found.quality.tolist(),
        )
        if best == labels:
            break
        labels, policy = best, _looked_up(table)
    return Swept(table=table, gamma=used, visits=tuple(seen))


def _looked_up(table: Table) -> Policy:
    return lambda credit, _change: table.lookup(credit)


def replay_visits(
    answers: Sequence[Answer], policy: Policy, pipeline: Pipeline, history: CreditHistory
) -> list[Visit]:
    """Segments, one after another through all answers, as `policy` cuts them."""
    seen = []
    for number, answer in enumerate(answers):
        strict, jsd = answer.strict, np.array(answer.jsd)
        start = 0
        while start < len(answer):
            seen.append(
                Visit(answer=number, start=start, credit=history.credit, change=history.change)
            )
            threshold, window = policy(history.credit, history.change)
            part = slice(start, start + window)
            accepted = leading(strict[part] | (jsd[part] <= threshold))
            history.observe(leading(strict[part]) / len(strict[part]))
            whole = accepted == window and pipeline is Pipeline.PLC
            start += accepted + (not whole)
    return seen


def surfaces(
    answers: Sequence[Answer],
    seen: Sequence[Visit],
    costs: SegmentCosts,
    edges: Sequence[float],
    thresholds: Sequence[float],
    windows: Sequence[int],
) -> Surfaces:
    """Means over the visits of each bin. A start whose largest window would pass the end of its
    answer is left out, or the end would look like a rejection."""
    shape = (len(edges) + 1, len(thresholds), len(windows))
    accepted, strict, whole = (np.zeros(shape) for _ in range(3))
    counts = np.zeros(shape[0], dtype=np.int64)
    sizes = np.array(windows)
    lengths = [_runs_by_threshold(answer, thresholds) for answer in answers]
    for visit in seen:
        run = lengths[visit.answer]
        if visit.start + sizes[-1] > run.shape[1]:
            continue
        at = int(np.searchsorted(edges, visit.credit, side="right"))
        counts[at] += 1
        stand = np.minimum(run[1:, visit.start, None], sizes)
        accepted[at] += stand
        whole[at] += stand == sizes
        strict[at] += np.minimum(run[0, visit.start], sizes)
    if not counts.any():
        raise ValueError(f"no answer is longer than the largest window of {sizes[-1]}")
    return _means(counts, accepted, strict, whole, costs, windows)


def _runs_by_threshold(answer: Answer, thresholds: Sequence[float]) -> F64Array:
    """float64 [1 + N, n]: lengths of runs that stand: strictly, then under each threshold."""
    strict, jsd = answer.strict, np.array(answer.jsd)
    rows = [runs(strict), *(runs(strict | (jsd <= t)) for t in thresholds)]
    return np.array(rows, dtype=np.float64)


def _means(
    counts: np.ndarray[tuple[int], np.dtype[np.int64]],
    accepted: F64Array,
    strict: F64Array,
    whole: F64Array,
    costs: SegmentCosts,
    windows: Sequence[int],
) -> Surfaces:
    quorum = min(MIN_VISITS, int(counts.max()))
    good = np.flatnonzero(counts >= quorum)
    source = [int(good[np.abs(good - b).argmin()]) for b in range(len(counts))]
    scale = counts[source][:, None, None]
    accepted, strict, whole = (a[source] / scale for a in (accepted, strict, whole))
    seconds = np.empty_like(accepted)
    for index in np.ndindex(*accepted.shape):
        seconds[index] = costs.seconds(windows[index[2]], float(whole[index]))
    tokens = accepted + 1.0 - (whole if costs.pipeline is Pipeline.PLC else 0.0)
    quality = np.divide(strict, accepted, out=np.ones_like(strict), where=accepted > 0)
    return Surfaces(
        visits=tuple(int(n) for n in counts), seconds=seconds, tokens=tokens, quality=quality
    )


def label(
    found: Surfaces,
    thresholds: Sequence[float],
    windows: Sequence[int],
    *,
    delta: float,
    gamma: float | None = None,
) -> tuple[list[tuple[float, int]], float]:
    """(T*, W*) of each bin, and the gamma used. Among equals the smaller threshold, then the
    smaller window. Threshold 0 is the strict rule, Acc = 1: some label is always allowed."""
    weights = np.array(found.visits, dtype=np.float64)
    allowed = found.quality >= delta
    worth = gamma if gamma is not None else float(found.seconds[:, 0, 0].mean())
    for _ in range(_GAMMA_STEPS):
        objective = np.where(allowed, found.seconds - worth * found.tokens, np.inf)
        flat = objective.reshape(len(weights), -1).argmin(axis=1)
        rows, columns = np.unravel_index(flat, objective.shape[1:])
        bins = np.arange(len(weights))
        seconds = float(weights @ found.seconds[bins, rows, columns])
        tokens = float(weights @ found.tokens[bins, rows, columns])
        if gamma is not None or abs(seconds / tokens - worth) <= 1e-12 * worth:
            break
        worth = seconds / tokens
    best = [(float(thresholds[i]), int(windows[j])) for i, j in zip(rows, columns, strict=True)]
    return best, worth
