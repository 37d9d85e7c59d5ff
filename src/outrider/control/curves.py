"""A prefix curve for block heads that differ from their tails.

Published prefix curves have a heavy head: the first draft falls at 46 or 38 %, those behind it at
70 to 90 % of what is left (docs/papers.md, 3: "geometric alpha mis-fits"). Indices that were seen
seldom then have more in common with the one before them than with the mean of all, which the first
index dominates.
"""

from __future__ import annotations

from outrider.control.costs import PRIOR_WEIGHT, PrefixCurve


class ChainedCurve(PrefixCurve):
    """Each index shrinks towards the one before it, the first towards the prior.

    An index never seen is taken to accept as the last one that was. The prior is worth
    PRIOR_WEIGHT observations at each.
    """

    __slots__ = ()

    def acceptance(self, index: int) -> float:
        return self._chain(index + 1)[-1]

    def survival(self, count: int) -> list[float]:
        values, alive = [], 1.0
        for rate in self._chain(count):
            alive *= rate
            values.append(alive)
        return values

    def _chain(self, count: int) -> list[float]:
        """Conditional acceptance of indices 0 .. count - 1."""
        rate, rates = self._prior, []
        for hits, tries in zip(self._hits[:count], self._tries[:count], strict=True):
            rate = (hits + rate * PRIOR_WEIGHT) / (tries + PRIOR_WEIGHT)
            rates.append(rate)
        rates += [rate] * (count - len(rates))
        return rates
