"""Did counts come from a law? Pearson's test, without scipy: one short formula is enough."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

F64Array = npt.NDArray[np.float64]


def chi_square_tail(x: float, freedom: int) -> float:
    """P(chi-square with `freedom` degrees > x): the regularised upper gamma Q(freedom/2, x/2)."""
    a, z = freedom / 2, x / 2
    if z <= 0:
        return 1.0
    front = math.exp(-z + a * math.log(z) - math.lgamma(a))
    if z < a + 1:  # series of the lower function
        term = total = 1 / a
        n = a
        while abs(term) > abs(total) * 1e-15:
            n += 1
            term *= z / n
            total += term
        return max(0.0, 1.0 - total * front)
    b = z + 1 - a  # continued fraction of the upper one (Lentz)
    c, d = 1e300, 1 / b
    h = d
    for i in range(1, 10_000):
        step = -i * (i - a)
        b += 2
        d = 1 / (step * d + b)
        c = b + step / c
        h *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return front * h


def fit(counts: Sequence[int] | F64Array, law: Sequence[float] | F64Array) -> float:
    """p-value of the chi-square test of `counts` against `law`; 0 when an id of probability 0
    occurred. Bins that expect fewer than 5 are put together. Raises ValueError for what is no law
    and for too few counts to fill two bins."""
    counts, law = np.asarray(counts, dtype=float), np.asarray(law, dtype=float)
    if not abs(law.sum() - 1) < 1e-6:
        raise ValueError(f"probabilities that sum to {law.sum()}")
    if counts[law == 0].any():
        return 0.0
    expected = law * counts.sum()
    big = expected >= 5
    seen = [*counts[big], counts[~big].sum()]
    hoped = [*expected[big], expected[~big].sum()]
    if hoped[-1] < 5:  # too little for a bin of its own
        seen[-2:], hoped[-2:] = [seen[-2] + seen[-1]], [hoped[-2] + hoped[-1]]
    if len(hoped) < 2:
        raise ValueError("one bin proves nothing")
    distance = sum((s - h) ** 2 / h for s, h in zip(seen, hoped, strict=True))
    return chi_square_tail(float(distance), len(hoped) - 1)  # numpy's float is none to JSON
