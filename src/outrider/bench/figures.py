"""Cells to the rows of a table, with intervals: pure, and seeded.

An answer is the unit. Speeds are paired: the same question and seed in two arms. `ms_per_token` and
`speed` are medians over answers, which a busy machine disturbs little; `mean_ms_per_token` is
sum of time over sum of tokens, which is what published tables hold. Intervals are percentile
bootstraps over answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from outrider.bench.journal import Answer, Cell

F64Array = npt.NDArray[np.float64]
RESAMPLES: Final = 2000
LEVEL: Final = 0.95
FEWEST: Final = 3
"""Answers below which an interval would be invented."""
EDGE_ONLY: Final = "edge-only"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure and where it may lie; low and high None: too few answers to say."""

    value: float
    low: float | None = None
    high: float | None = None


Statistic = Callable[[F64Array], F64Array]
"""float64[resamples, answers, columns] to float64[resamples]."""


def median(values: F64Array) -> F64Array:
    """Of the first column."""
    return np.asarray(np.median(values[:, :, 0], axis=1))


def ratio_of_sums(values: F64Array) -> F64Array:
    """First column over the second."""
    return np.asarray(values[:, :, 0].sum(axis=1) / values[:, :, 1].sum(axis=1))


def bootstrap(values: F64Array, statistic: Statistic, *, seed: int = 0) -> Estimate:
    """`values`: float64[answers, columns]; resampled by answers."""
    count = len(values)
    value = float(statistic(values[None])[0])
    if count < FEWEST:
        return Estimate(value=value)
    picks = np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))
    found = statistic(values[picks])
    low, high = np.quantile(found, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value=value, low=float(low), high=float(high))


Place = tuple[str, int, int]
"""Item, seed, number of the answer: what is paired."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An arm at one point, on one data set."""

    point: str
    data: str
    arm: str
    answers: int
    tokens: int
    unfinished: int
    warm_up: int
    ms_per_token: Estimate | None
    mean_ms_per_token: Estimate | None
    speed: Estimate | None
    """Times as fast as the base arm."""
    ttft_ms: float | None
    tokens_per_second: float | None
    forwards_per_token: float | None
    cloud_share: float | None
    """Target time a token against the base arm's."""
    bytes_up: float | None
    bytes_down: float | None
    acceptance: float | None
    score: Estimate | None
    identical: int | None
    """Answers with the same ids as cloud-only's; None: nothing to compare."""


def answers_of(cells: Sequence[Cell]) -> dict[Place, Answer]:
    """All answers by what is paired."""
    return {
        (cell.key.item, cell.key.seed, i): answer
        for cell in cells
        for i, answer in enumerate(cell.answers)
    }


def paired(ours: Mapping[Place, Answer], theirs: Mapping[Place, Answer]) -> F64Array:
    """Their seconds a token over ours, float64[answers, 1], where both are known."""
    ratios = []
    for place, answer in ours.items():
        other = theirs.get(place)
        if other is not None and answer.per_token and other.per_token:
            ratios.append([other.per_token / answer.per_token])
    return np.array(ratios, dtype=np.float64).reshape(-1, 1)


def rows(cells: Sequence[Cell], *, base: str) -> list[Row]:
    """One row for each (point, data, arm), in the order in which they were first measured."""
    groups: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.key.point, cell.key.data, cell.key.arm), []).append(cell)
    return [
        _row(
            found, groups.get((point, data, base), []), groups.get((point, data, "cloud-only"), [])
        )
        for (point, data, _), found in groups.items()
    ]


def _row(cells: Sequence[Cell], base: Sequence[Cell], plain: Sequence[Cell]) -> Row:
    key = cells[0].key
    ours = answers_of(cells)
    answers = list(ours.values())
    tokens = sum(a.tokens for a in answers)
    gaps = np.array([[1e3 * a.rest, a.later] for a in answers if a.later], dtype=np.float64)
    each = np.array([[1e3 * a.rest / a.later] for a in answers if a.later], dtype=np.float64)
    against = paired(ours, answers_of(base))
    scores = np.array([[a.score] for a in answers if a.score is not None], dtype=np.float64)
    seconds = sum(c.seconds for c in cells)
    drafted = sum(a.drafted for a in answers)
    busy, busy_base = _busy(cells), _busy(base)
    return Row(
        point=key.point,
        data=key.data,
        arm=key.arm,
        answers=len(answers),
        tokens=tokens,
        unfinished=sum(c.unfinished for c in cells),
        warm_up=min(c.warm_up for c in cells),
        ms_per_token=bootstrap(each, median) if len(each) else None,
        mean_ms_per_token=bootstrap(gaps, ratio_of_sums) if len(gaps) else None,
        speed=bootstrap(against, median) if len(against) else None,
        ttft_ms=1e3 * float(np.median([a.first for a in answers])) if answers else None,
        tokens_per_second=_each(tokens, seconds),
        forwards_per_token=_each(sum(c.forwards for c in cells), tokens),
        cloud_share=_each(busy, busy_base) if busy is not None and busy_base else None,
        bytes_up=_each(sum(c.bytes_up for c in cells), tokens),
        bytes_down=_each(sum(c.bytes_down for c in cells), tokens),
        acceptance=_each(sum(a.accepted for a in answers), drafted),
        score=bootstrap(scores, lambda v: v[:, :, 0].mean(axis=1)) if len(scores) else None,
        identical=_identical(ours, answers_of(plain)) if key.arm != EDGE_ONLY else None,
    )


def _busy(cells: Sequence[Cell]) -> float | None:
    """Target seconds a token."""
    known = [c for c in cells if c.busy is not None]
    tokens = sum(a.tokens for c in known for a in c.answers)
    return sum(c.busy or 0.0 for c in known) / tokens if tokens else None


def _each(total: float, count: float) -> float | None:
    return total / count if count else None


def _identical(ours: Mapping[Place, Answer], plain: Mapping[Place, Answer]) -> int | None:
    pairs = [(a, plain[p]) for p, a in ours.items() if p in plain and a.digest]
    return sum(a.digest == b.digest for a, b in pairs) if pairs else None


def value(row: Row, figure: str) -> float | None:
    """A figure of a row, without its interval."""
    found: Any = getattr(row, figure)
    return found.value if isinstance(found, Estimate) else found
