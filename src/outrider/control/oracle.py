"""The oracle: what could be had at best. For the bench; it cannot exist live.

It is given the true law of a round (seconds and expected tokens of every length) and the delay
of every round to come. No edge knows either, so it stands in no registry: the bench makes it.

The figure of merit is seconds per token over many rounds, sum N / sum B, a ratio of sums and
not a sum of ratios (docs/papers.md, 3, Thm 6 and the remark there). Its minimum over the lengths of
all rounds is found by Dinkelbach's iteration: with the present ratio c, every round takes the k
that minimises N(k) - c*B(k); repeat with the ratio that comes out (Management Science 13, 1967).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from outrider.control.base import Decision, Observation, Outcome
from outrider.core.draft import StopRule

F64Array = npt.NDArray[np.float64]
I64Array = npt.NDArray[np.int64]


def best_lengths(seconds: F64Array, tokens: F64Array) -> tuple[I64Array, float]:
    """The lengths with the fewest seconds per token over all rounds, and that ratio.

    `seconds[round, k]` (float64) is N of length k in that round, `tokens[k]` (float64) is B(k),
    both from k = 0; a length that may not be played has N = inf. Returns (int64[round], seconds
    a token). Raises ValueError for no rounds, or when no length may be played.
    """
    if not len(seconds) or not np.isfinite(seconds).any(axis=1).all():
        raise ValueError("every round needs a length that may be played")
    ratio = math.inf
    while True:
        merit = seconds - ratio * tokens if math.isfinite(ratio) else seconds
        chosen = np.argmin(merit, axis=1)
        spent = float(np.take_along_axis(seconds, chosen[:, None], axis=1).sum())
        found = spent / float(tokens[chosen].sum())
        # Every step lowers the ratio; below rounding it has arrived.
        if not found < ratio * (1.0 - 1e-12):
            return chosen, found
        ratio = found


def best_fixed(seconds: F64Array, tokens: F64Array) -> tuple[int, float]:
    """The one length that is best in all these rounds together, and its seconds per token.

    Arguments as for `best_lengths`.
    """
    ratios = seconds.sum(axis=0) / (len(seconds) * tokens)
    best = int(np.argmin(ratios))
    return best, float(ratios[best])


class Oracle:
    """Plays given lengths, one a round. Rounds are counted by what is observed."""

    def __init__(self, lengths: I64Array, *, name: str = "oracle") -> None:
        """`lengths[round]`: int64, what to play; the last goes on for ever."""
        if not len(lengths):
            raise ValueError("an oracle foresees one round at least")
        self.name = name
        self._lengths = lengths
        self._round = 0

    @classmethod
    def foresight(cls, seconds: F64Array, tokens: F64Array) -> Oracle:
        """Knows every round's delay before it decides: no policy is better."""
        return cls(best_lengths(seconds, tokens)[0])

    @classmethod
    def blind(cls, seconds: F64Array, tokens: F64Array) -> Oracle:
        """Knows the law of the delays and not the present one: the best fixed length."""
        return cls(np.array([best_fixed(seconds, tokens)[0]]), name="oracle-fixed")

    def decide(self, observation: Observation) -> Decision:
        length = int(self._lengths[min(self._round, len(self._lengths) - 1)])
        return Decision(length=max(0, min(length, observation.room)))

    def observe(self, outcome: Outcome, now: float) -> None:  # noqa: ARG002
        self._round += 1

    def stop_rule(self) -> StopRule | None:
        return None
