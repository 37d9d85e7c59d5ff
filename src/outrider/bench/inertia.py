"""Does acceptance have inertia? Statistics of window acceptance rates, and their controls.

E2-SCI (docs/papers.md, 1) rests on "credit inertia": rates of neighbouring windows correlate, and a
window that follows a history H of k windows with mean(H) > tau_high is accepted far more often
than one after mean(H) < tau_low. Both would also be seen if every prompt had a fixed acceptance
of its own and windows within a prompt were independent: easy prompts beside hard ones suffice.
So the control is the *within-prompt shuffle*: the windows of each answer in random order, which
keeps every prompt's mean and destroys the order. What exceeds it is inertia in time, which a
controller that adapts within an answer can use. (A shuffle over all prompts destroys both, and
calls any mix of prompts inertia; it is given for contrast.)

Intervals: percentile bootstrap over answers, which are independent where windows are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from outrider.calibrate.trace import BoolArray, leading

F64Array = npt.NDArray[np.float64]

POOLED: Final = "all"
LEVEL: Final = 0.95
"""Of every interval."""
MIN_ANSWERS: Final = 5
"""Resampling fewer answers than this says nothing about other answers: no interval is given."""
_SLACK: Final = 1e-9
"""A mean equal to tau up to rounding is not beyond it."""
NAMES: Final = ("correlation", "high", "low", "gap")
"""Figures: correlation of adjacent rates; mean rate after mean(H) > tau_high; after mean(H) <
tau_low; the difference of the two."""


class Cut(StrEnum):
    """How an answer is cut into windows."""

    ROUNDS = "rounds"
    """As synchronous speculation does: a window begins behind the last verdict's token, its rate
    is leading accepted drafts over W. What a credit controller sees."""
    TILES = "tiles"
    """W positions side by side, the rate is the share of them that stand. No position counts
    twice or not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Window rates of one answer, in order."""

    task: str
    rates: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of the series."""

    history: int = 5
    """k (E2-SCI)."""
    tau_high: float = 0.8
    """The paper's illustration; its value is not stated."""
    tau_low: float = 0.4
    shuffles: int = 500
    resamples: int = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure, its control, and the difference; None where nothing (or too little) was seen."""

    value: float | None
    interval: tuple[float, float] | None
    control: float | None
    """Under the within-prompt shuffle."""
    excess: float | None
    """value - control."""
    excess_interval: tuple[float, float] | None
    p: float | None
    """Share of shuffles at least as large (as small for `low`): one-sided."""
    global_control: float | None
    """Under the shuffle over all prompts of the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inertia:
    """One group of answers."""

    group: str
    answers: int
    windows: int
    mean: float
    after_high: int
    """Windows that follow a history with mean(H) > tau_high."""
    after_low: int
    figures: dict[str, Figure]
    """By NAMES."""


def window_rates(strict: BoolArray, window: int, cut: Cut) -> tuple[float, ...]:
    """Rates of an answer's full windows; `strict`: bool [n], the draft is the target's token."""
    rates, start = [], 0
    while start + window <= len(strict):
        part = strict[start : start + window]
        if cut is Cut.TILES:
            rates.append(float(part.mean()))
            start += window
        else:
            accepted = leading(part)
            rates.append(accepted / window)
            start += accepted + 1
    return tuple(rates)


def measure(
    series: Sequence[Series], question: Question, random: np.random.Generator
) -> list[Inertia]:
    """All answers pooled, then each task. Answers of fewer than two windows say nothing and are
    left out; ValueError when none is left."""
    usable = [s for s in series if len(s.rates) > 1]
    if not usable:
        raise ValueError("no answer has two windows: longer answers or a smaller window are needed")
    tasks = sorted({s.task for s in usable})
    groups = [(POOLED, usable)] if len(tasks) > 1 else []
    groups += [(task, [s for s in usable if s.task == task]) for task in tasks]
    return [_group(name, members, question, random) for name, members in groups]


def _group(
    name: str, members: Sequence[Series], question: Question, random: np.random.Generator
) -> Inertia:
    rows = [np.array(s.rates) for s in members]
    seen = np.array([_sums(x[None], question)[0] for x in rows])
    shuffled = np.array([_sums(_within(x, question.shuffles, random), question) for x in rows])
    control = shuffled.mean(axis=1)
    everywhere = _everywhere(rows, question, random)
    resamples = question.resamples if len(rows) >= MIN_ANSWERS else 0
    weights = random.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), size=resamples)
    value, chance = _figures(seen.sum(axis=0)), _figures(control.sum(axis=0))
    values, chances = _figures(weights @ seen), _figures(weights @ control)
    by_shuffle = _figures(shuffled.sum(axis=0))
    contrast = _figures(everywhere)
    figures = {}
    for i, key in enumerate(NAMES):
        sign = -1.0 if key == "low" else 1.0
        figures[key] = Figure(
            value=_number(value[i]),
            interval=_interval(values[:, i]),
            control=_number(chance[i]),
            excess=_number(value[i] - chance[i]),
            excess_interval=_interval(values[:, i] - chances[:, i]),
            p=_share(sign * by_shuffle[:, i], sign * float(value[i])),
            global_control=_number(contrast[i]),
        )
    whole = np.concatenate(rows)
    return Inertia(
        group=name,
        answers=len(rows),
        windows=len(whole),
        mean=float(whole.mean()),
        after_high=int(seen[:, _HIGH].sum()),
        after_low=int(seen[:, _LOW].sum()),
        figures=figures,
    )


def _within(x: F64Array, count: int, random: np.random.Generator) -> F64Array:
    """[count, n]: x in `count` random orders."""
    return random.permuted(np.tile(x, (count, 1)), axis=1)


def _everywhere(
    rows: Sequence[F64Array], question: Question, random: np.random.Generator
) -> F64Array:
    """Sums, averaged over shuffles of all windows of the group."""
    ends = np.cumsum([len(x) for x in rows])
    mixed = _within(np.concatenate(rows), question.shuffles, random)
    parts = np.split(mixed, ends[:-1], axis=1)
    total: F64Array = sum(_sums(part, question) for part in parts).mean(axis=0)  # type: ignore[union-attr]
    return total


_HIGH: Final = 6
_LOW: Final = 8


def _sums(x: F64Array, question: Question) -> F64Array:
    """[s, 10] of rates x [s, n]: pairs, sums of first, second, squares and product; then count
    and sum of the rates after a high history, and after a low one."""
    a, b = x[:, :-1], x[:, 1:]
    columns = [np.full(len(x), float(a.shape[1])), a.sum(1), b.sum(1)]
    columns += [(a * a).sum(1), (b * b).sum(1), (a * b).sum(1)]
    k = question.history
    if x.shape[1] > k:
        history = np.lib.stride_tricks.sliding_window_view(x[:, :-1], k, axis=1).mean(axis=2)
        after = x[:, k:]
        high = history > question.tau_high + _SLACK
        low = history < question.tau_low - _SLACK
        columns += [high.sum(1), (after * high).sum(1), low.sum(1), (after * low).sum(1)]
    else:
        columns += [np.zeros(len(x))] * 4
    return np.stack(columns, axis=1).astype(np.float64)


def _figures(sums: F64Array) -> F64Array:
    """[..., 4], in the order of NAMES; NaN where undefined."""
    n, a, b, aa, bb, ab, highs, high, lows, low = np.moveaxis(sums, -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = np.sqrt(np.maximum(aa / n - (a / n) ** 2, 0.0)) * np.sqrt(
            np.maximum(bb / n - (b / n) ** 2, 0.0)
        )
        correlation = np.where(spread > _SLACK, (ab / n - a * b / n**2) / spread, np.nan)
        after_high, after_low = high / highs, low / lows
    return np.stack([correlation, after_high, after_low, after_high - after_low], axis=-1)


def _number(value: float | np.float64) -> float | None:
    return float(value) if np.isfinite(value) else None


def _interval(values: F64Array) -> tuple[float, float] | None:
    """Percentile interval; None where a resample in ten has no value, or there is none."""
    known = values[np.isfinite(values)]
    if not len(known) or len(known) < 0.9 * len(values):
        return None
    low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _share(shuffled: F64Array, value: float) -> float | None:
    """One-sided permutation p, the observed order counted among the shuffles."""
    known = shuffled[np.isfinite(shuffled)]
    if not np.isfinite(value) or not len(known):
        return None
    return (1 + int((known >= value - _SLACK).sum())) / (1 + len(known))
