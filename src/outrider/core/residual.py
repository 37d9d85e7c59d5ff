"""Truncated residuals: the likeliest ids of p instead of all of it, and what that can cost.

After a rejection (core.verify) the cloud may send a *list*: the K likeliest ids S of p with their
probabilities, and the weight t of all others (AsymSpec's top-K reply). The edge, which has q,
draws from norm((p - q)+) cut off at S. With m the mass of (p - q)+ inside S, the mass outside is
z <= t, so of the residual's mass m + z a share z / (m + z) is missed:

    TV(cut off, exact) <= t / (m + t)                                        (ours)

* t = 0 makes it exact: nothing is left out (few ids pass the filters, or T = 0).
* Otherwise the bound is charged to a ledger (core.ledger.TvLedger) and the draw is made only if
  it fits the budget. If the charges of a request never sum above B on any path, its law is within
  a total variation distance of B of the exact one (maximal coupling, step by step).
* m = 0 certifies nothing.

The draw has the address and the noise of the draw from the whole row, so the two differ only
where the exact draw falls outside S.

A longer list costs only its further ids. It is asked for where it may still pay (`after_list`);
proposals, which are exact and free of charge, come else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from outrider.core import rng
from outrider.core.ledger import TvLedger, within
from outrider.core.sampling import Distribution, FloatRow, IdArray, likeliest
from outrider.core.tokens import ParameterError, Rule
from outrider.core.verify import (
    PROPOSAL_BATCHES,
    PROPOSAL_FAILURE,
    ResidualStep,
    leftover,
)

MAX_TOP_K: Final = 1024
"""Longest list, about 6 kB: for as many bytes 560 proposals would nearly never fail."""
DEFAULT_TOP_K: Final = 64
"""K of an edge that names a budget and no K (ours): about 380 bytes."""
GROWTH: Final = 4
"""Times as many ids in the next list (ours): 16, 64, 256, 1024."""
SUM_SLACK: Final = 1e-6
"""How far the probabilities of a list and its rest may be from 1: float64 sums over any vocabulary
are far closer, another p is not."""
_ROUNDING: Final = 1e-12
"""Sums of float64 probabilities are right to better than this: taken off m, and put on t in
proportion, so that the bound holds of the numbers as they are."""


class ListError(ValueError):
    """Numbers that are no part of any distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopKReply:
    """What an edge wishes after a rejection (ratio rule). The default is exact and asks nothing.

    Raises ParameterError for numbers out of range, and for a budget that no list could use.
    """

    k: int = 0
    """Ids of the first list; 0: none, proposals at once."""
    budget: float = 0.0
    """Most total variation distance of the answer's law. 0: lists come only where exact."""

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or not 0 <= self.k <= MAX_TOP_K:
            raise ParameterError("top_k_reply", f"must be in [0, {MAX_TOP_K}], got {self.k!r:.60}")
        within("tv_budget", self.budget, 0.0, math.inf)
        if self.budget and not self.k:
            raise ParameterError("tv_budget", "is spent on lists: top_k_reply must be 1 or more")

    @property
    def ledger(self) -> TvLedger:
        """Before the first token."""
        return TvLedger(budget=self.budget)


def require_ratio(rule: Rule, reply: TopKReply) -> None:
    """Raises ParameterError where lists are wished for under another rule."""
    if reply.k and rule is not Rule.RATIO:
        raise ParameterError("top_k_reply", "is of the ratio rule: the others need no residual")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Listing:
    """The ids of p from one rank to another, and the weight of all that follow."""

    ids: IdArray
    """Ascending."""
    weights: FloatRow
    """float32 [n]: log-weights aligned with `ids`; p = exp(weight - log_total)."""
    log_total: float
    """Of all of p."""
    rest: float
    """Probability of the ids of higher ranks. Exactly 0.0 where there is none."""


def listing(p: Distribution, first: int, end: int) -> Listing:
    """Ranks first, ..., end - 1 of p, likeliest first, the lower id on a tie; fewer where p has
    fewer possible ids."""
    chosen = likeliest(p.weights, end)
    probabilities = p.probabilities()
    chosen = chosen[probabilities[chosen] > 0.0]
    rest = probabilities.copy()
    rest[chosen] = 0.0
    if first:
        chosen = np.setdiff1d(chosen, likeliest(p.weights, first), assume_unique=True)
    return Listing(
        ids=p.ids[chosen],
        weights=p.weights[chosen],
        log_total=p.log_total,
        rest=float(rest.sum()),
    )


def next_end(known: int) -> int:
    """How long the list becomes that follows one of `known` ids."""
    return min(GROWTH * known, MAX_TOP_K)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Listed:
    """What an edge knows of p: the parts that came, together."""

    p: Distribution
    """The listed ids; its probabilities are those of the whole p."""
    rest: float

    def __len__(self) -> int:
        return len(self.p.ids)

    def bound(self, q: Distribution) -> float | None:
        """Certificate: the residual of p and q cut off at the listed ids is at most this far, in
        total variation, from the exact one. None: nothing is known."""
        if not self.rest:
            return 0.0
        mass = self.mass(q) - _ROUNDING
        rest = self.rest * (1.0 + _ROUNDING)
        return rest / (mass + rest) if mass > 0.0 else None

    def mass(self, q: Distribution) -> float:
        """m: what (p - q)+ holds inside the list."""
        return float(np.maximum(leftover(self.p, q), 0.0).sum())

    def after(self, q: Distribution, ledger: TvLedger) -> ResidualStep:
        """The step to ask for where the bound does not fit: a larger K only if it may bring the
        bound within what is left, and proposals are likely to fail. It knows p, q and the ledger,
        and no draw, so the choice does not bias what is drawn."""
        mass, end = self.mass(q), next_end(len(self))
        smallest = math.exp(float(self.p.weights.min()) - self.p.log_total)
        least = max(0.0, self.rest - (end - len(self)) * smallest)
        may_pay = end > len(self) and least <= ledger.left * (mass + self.rest)
        fails = (1.0 - min(mass, 1.0)) ** PROPOSAL_BATCHES[0]  # Z >= m
        if ledger.left > 0.0 and may_pay and fails > PROPOSAL_FAILURE:
            return ResidualStep.LARGER_K
        return ResidualStep.FIRST_PROPOSALS


def listed(part: Listing, before: Listed | None = None) -> Listed:
    """A list, or the further ids of one. Raises ListError unless together they are a part of one
    distribution."""
    ids, weights = part.ids, part.weights
    if before is not None:
        if part.log_total != before.p.log_total:
            raise ListError("the list goes on with another total")
        ids = np.concatenate([before.p.ids, ids])
        order = np.argsort(ids, kind="stable")
        ids, weights = ids[order], np.concatenate([before.p.weights, weights])[order]
    if not len(ids) or ids[0] < 0 or (np.diff(ids) <= 0).any():
        raise ListError("the ids of a list must be distinct, at least one")
    numbers = np.array([*weights, part.log_total, part.rest])
    if not np.isfinite(numbers).all() or not 0.0 <= part.rest <= 1.0:
        raise ListError("the numbers of a list must be finite, its rest in [0, 1]")
    with np.errstate(over="ignore"):  # whoever sends such a total is told that it is none
        total = float(np.exp(weights.astype(np.float64) - part.log_total).sum()) + part.rest
    if not abs(total - 1.0) <= SUM_SLACK:
        raise ListError(f"the probabilities of a list and its rest sum to {total:.6g}, not 1")
    p = Distribution(ids, weights, rng.token_offsets(ids), log_total=part.log_total)
    return Listed(p=p, rest=part.rest)


def worth_sending(part: Listing, left: float) -> bool:
    """May a list be of use to an edge with so much budget left? m + t <= 1, so the bound is never
    below t."""
    return part.rest <= left
