"""Acceptance: the one place where losslessness is decided.

coupled (default; shared-seed Gumbel, arXiv 2408.07978)
    Both sides know the noise of every position. The target's token at position n is
    y_n = argmin E_n/p_n whatever was drafted; a draft is accepted while it equals y_n, and y_n is
    emitted in any case. So the output is a function of target, prompt, parameters and seed.

ratio (Leviathan et al. 2023, Chen et al. 2023)
    Accept a draft x ~ q while u < p(x)/q(x). After a rejection the token comes from the residual
    norm((p - q)+), which needs p (cloud) and q (edge) together. Three exact ways, tried in order
    (docs/architecture.md, Acceptance; the idea of proposals is AsymSpec's):
      1. proposals: draws y_i ~ p with p(y_i) go down; the first with
         u_i < (p(y_i) - q(y_i))+ / p(y_i) is a residual sample. Each succeeds with
         probability Z = TV(p, q);
      2. further proposals, more at a time;
      3. the whole row p, and one draw from the residual.
    All draws have addresses (core.rng), so a retry repeats them. Where an edge asks for it, a
    list of the likeliest ids comes first (core.residual).

Temperature 0 needs no branch of its own: distributions are then one-hot, and both rules accept
exactly the likeliest token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from outrider.core import rng
from outrider.core.rng import Purpose
from outrider.core.sampling import Distribution, F64Array, draw_from
from outrider.core.tokens import Verdict

PROPOSAL_BATCHES: Final = (16, 64, 256, 1024)
"""Most proposals in each reply before the full row is asked for; only the first may be smaller.
An (id, p) pair is about 11 bytes, so all together are 15 kB, and at Z = .005 they fail once in 900
rejections. A row of 49,152 ids is 197 kB, and rejections are as rare as Z is small."""
PROPOSAL_FAILURE: Final = 0.05
"""Aimed-at chance that a first batch of proposals yields nothing (our default)."""

RESIDUAL_FLOOR: Final = 1e-9
"""Leftover mass below this is rounding noise of float64 sums, not a distribution: draw from p."""

NextDistribution = Callable[[int], Distribution]
"""Row i of a block to its distribution, given that drafts 0..i-1 stand. Called in order."""


class ResidualStep(StrEnum):
    """Which step of the residual dialogue ended a rejection."""

    TOP_K = "top-k"
    """A list of the likeliest ids (core.residual)."""
    LARGER_K = "larger-k"
    FIRST_PROPOSALS = "proposals"
    MORE_PROPOSALS = "more-proposals"
    FULL_ROW = "full-row"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A fresh draw from p and its probability; travels from cloud to edge."""

    token: int
    p: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """What the ratio rule knows after a rejected draft, before the residual is drawn."""

    position: int
    token: int
    """The rejected draft x."""
    p: float
    q: float

    @property
    def residual_floor(self) -> float:
        """A lower bound of Z = TV(p, q) that the cloud knows: q(x) - p(x) > 0. A q that is no
        probability says nothing."""
        return max(0.0, min(self.q, 1.0) - self.p) if math.isfinite(self.q) else 0.0


def target_token(dist: Distribution, seed: int, position: int) -> int:
    """The target's own token at a position (shared noise): draft or no draft, it is this one."""
    return dist.draw(rng.key(seed, Purpose.TOKEN, position))


def verify_coupled(
    drafts: Sequence[int], at: NextDistribution, *, seed: int, position: int
) -> Verdict:
    """Judge drafts for positions position, position+1, ... under the coupled rule."""
    for i, draft in enumerate(drafts):
        token = target_token(at(i), seed, position + i)
        if token != draft:
            return Verdict(drafted=len(drafts), accepted=i, token=token)
    n = len(drafts)
    return Verdict(drafted=n, accepted=n, token=target_token(at(n), seed, position + n))


def accepts(p: float, q: float, *, seed: int, position: int) -> bool:
    """The ratio rule's test for one draft; q is the very number it was drawn with.

    u lies strictly inside (0, 1), so p = 0 is never accepted and p >= q always is. A q that is
    zero or not finite cannot have produced the draft: refuse it rather than divide.
    """
    if not (q > 0.0 and math.isfinite(q)):
        return False
    return rng.uniform(seed, Purpose.ACCEPT, position) * q < p


def judge_ratio(
    drafts: Sequence[int],
    q: Sequence[float],
    at: NextDistribution,
    *,
    seed: int,
    position: int,
) -> Verdict | Rejection:
    """Judge drafts under the ratio rule: a Verdict with the bonus token, or the Rejection."""
    if len(q) != len(drafts):
        raise ValueError(f"{len(drafts)} drafts with {len(q)} probabilities")
    for i, draft in enumerate(drafts):
        p = at(i).prob(draft)
        if not accepts(p, q[i], seed=seed, position=position + i):
            return Rejection(position=position + i, token=draft, p=p, q=q[i])
    n = len(drafts)
    return Verdict(drafted=n, accepted=n, token=target_token(at(n), seed, position + n))


def proposal_count(rejection: Rejection) -> int:
    """How many proposals make a failure rarer than PROPOSAL_FAILURE, from Z >= q(x) - p(x)."""
    floor = rejection.residual_floor
    if floor <= 0.0:
        return PROPOSAL_BATCHES[0]
    if floor >= 1.0:
        return 1
    needed = math.ceil(math.log(PROPOSAL_FAILURE) / math.log1p(-floor))
    return max(1, min(needed, PROPOSAL_BATCHES[0]))


def batch_at(rejection: Rejection, batch: int) -> tuple[int, int]:
    """Index of the first proposal of a batch, and how many it has. Batches never share an index,
    so the draws of one say nothing of those of another."""
    start = sum(PROPOSAL_BATCHES[:batch])
    return start, PROPOSAL_BATCHES[batch] if batch else proposal_count(rejection)


def batch_after(have: int) -> int | None:
    """The batch to send to an edge that judged the proposals before index `have`; None: there is
    no further one, the row is due."""
    batch = sum(end < have for end in itertools.accumulate((0, *PROPOSAL_BATCHES)))
    return batch if batch < len(PROPOSAL_BATCHES) else None


def propose(
    p: Distribution, *, seed: int, position: int, start: int, count: int
) -> tuple[Proposal, ...]:
    """Cloud side: independent draws from p with indices start, start+1, ..."""
    tokens = p.draws([rng.key(seed, Purpose.PROPOSAL, position, start + i) for i in range(count)])
    return tuple(Proposal(token=t, p=p.prob(t)) for t in tokens)


def proposal_step(start: int) -> ResidualStep:
    """The step of a batch that begins at index `start`."""
    return ResidualStep.MORE_PROPOSALS if start else ResidualStep.FIRST_PROPOSALS


def choose(
    proposals: Sequence[Proposal], q: Distribution, *, seed: int, position: int, start: int
) -> int | None:
    """Edge side: the first proposal that the residual test takes, or None."""
    for i, y in enumerate(proposals):
        u = rng.uniform(seed, Purpose.PROPOSAL_ACCEPT, position, start + i)
        if u * y.p < y.p - q.prob(y.token):
            return y.token
    return None


def leftover(p: Distribution, q: Distribution) -> F64Array:
    """p(x) - q(x) for the ids of p: float64 [n]."""
    left = p.probabilities()
    at = np.minimum(np.searchsorted(q.ids, p.ids), len(q.ids) - 1)
    left -= np.where(q.ids[at] == p.ids, q.probabilities()[at], 0.0)
    return left


def residual_draw(p: Distribution, q: Distribution, *, seed: int, position: int) -> int:
    """One draw from norm((p - q)+); from p when nothing is left (field case 05). Where p is a part
    of a whole one, from what that part leaves, with the noise of the draw from the whole."""
    left = leftover(p, q)
    keep = np.flatnonzero(left > 0.0)
    draw_key = rng.key(seed, Purpose.RESIDUAL, position)
    if not float(left[keep].sum()) > RESIDUAL_FLOOR:  # also catches NaN
        return p.draw(draw_key)
    return draw_from(p.ids[keep], left[keep], draw_key)


def resolve_rejection(
    rejection: Rejection, p: Distribution, q: Distribution, *, seed: int
) -> tuple[int, ResidualStep]:
    """The residual dialogue with both sides at hand; the wire version splits it at the calls."""
    for i in range(len(PROPOSAL_BATCHES)):
        start, count = batch_at(rejection, i)
        batch = propose(p, seed=seed, position=rejection.position, start=start, count=count)
        token = choose(batch, q, seed=seed, position=rejection.position, start=start)
        if token is not None:
            return token, proposal_step(start)
    token = residual_draw(p, q, seed=seed, position=rejection.position)
    return token, ResidualStep.FULL_ROW
