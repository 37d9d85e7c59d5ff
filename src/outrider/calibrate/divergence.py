"""Distances of a draft's distribution from the target's, exact, over the whole vocabulary."""

from __future__ import annotations

import numpy as np

from outrider.core.sampling import Distribution, F64Array


def jsd_and_tv(p: Distribution, q: Distribution) -> tuple[float, float]:
    """Jensen-Shannon divergence (nats, at most ln 2) and total variation of p and q."""
    width = int(max(p.ids[-1], q.ids[-1])) + 1
    a, b = p.dense(width), q.dense(width)
    middle = (a + b) / 2
    divergence = (_relative(a, middle) + _relative(b, middle)) / 2
    return min(max(divergence, 0.0), float(np.log(2.0))), float(np.abs(a - b).sum() / 2)


def _relative(a: F64Array, m: F64Array) -> float:
    """KL(a || m), nats; m > 0 wherever a > 0."""
    some = a > 0
    return float((a[some] * np.log(a[some] / m[some])).sum())
