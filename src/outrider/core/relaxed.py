"""Relaxed acceptance: drafts that stand although the target chose another token (opt-in).

Each rule asks first whether a draft x stands whatever the target's own token y is; y is the
coupled draw of core.verify, and the edge drafts x with the same shared noise (any other way of
drawing x from the sketched q will do for all rules but `typical`).

| rule      | x stands                                    | else emitted | docs/papers.md        |
| --------- | ------------------------------------------- | ------------ | --------------------- |
| `fsd`     | iff divergence(p, q) <= T                   | y, a draw of p | FSD (7)             |
| `e2sci`   | the same with JSD and the block's own T     | y            | E2-SCI (1)            |
| `relaxed` | JSD(p, q) <= T for certain, or x = y        | y            | ours                  |
| `typical` | iff p(x) > min(epsilon, delta exp(-H(p)))   | y            | Medusa (7)            |

With a sketch in place of q, "divergence <= T" means that its certified upper bound is. What
Medusa and E2-SCI emit on a rejection is not stated; y is our default.

The ledger (core.ledger). Where `fsd`, `e2sci` or `relaxed` find the divergence small enough, the
emitted token is x whatever y is, so its law is q instead of p: that position costs TV(p, q). It
costs this much also where x happens to equal y. Charging unequal tokens alone would not do: x
and y differ in some positions only, but q stands in for p in all of them. What a charge for an
unequal pair would have to cover is the law of x *given* x != y, which may lie at distance 1 from
the target's. Under `typical` the test looks at x, so no position is free: with shared noise
P(x != y) <= 2 TV/(1 + TV) (docs/papers.md, 0, DISD) bounds the change of law, and every drafted
position costs that.

What the sum bounds. Let Z be the emitted tokens and Y the target's own. Given all that happened
before a position, its noise is fresh, so Z's next token has law q there (charged) or p (not
charged), and it can be coupled with Y's such that the two differ with a chance of the charge,
as long as they agreed so far. If the charges never sum above B on any path, then P(Z ever
differs from Y) <= B: the law of the whole answer is within total variation B of the target's
own. A position whose charge does not fit is judged strictly (x stands iff x = y), which costs
nothing.

That rests on two things the cloud cannot see: that drafts come from what the sketches say, and
that whether a position is drafted was not decided by looking at its own noise. An edge that
breaks either changes its own answer, nobody else's.

With budget 0, or T = 0 for `relaxed`, the text is the coupled text. `fsd` and `relaxed` of the
same T emit the same token wherever both find a draft and the budget lasts: the strict test does
not change what stands, it lets blocks go on where x = y.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import numpy as np

from outrider.core.divergence import LN2, Comparison, Divergence, compare, probabilities
from outrider.core.ledger import Ledger, within
from outrider.core.sampling import Distribution
from outrider.core.sparse import Sketch
from outrider.core.tokens import ParameterError, Verdict
from outrider.core.verify import NextDistribution, target_token

TYPICAL_EPSILON: Final = 0.09
TYPICAL_DELTA: Final = 0.3
"""Medusa's own code: posterior_threshold 0.09, posterior_alpha 0.3 (its square root)."""
_MOST: Final = {
    Divergence.JSD: LN2,
    Divergence.TV: 1.0,
    Divergence.KL: 1000.0,
    Divergence.FSD_JS: 1000.0,
}
"""Largest threshold. The unbounded ones: far above any KL of a next token that is finite."""


class RelaxedRule(StrEnum):
    """See the module docstring."""

    FSD = "fsd"
    E2SCI = "e2sci"
    RELAXED = "relaxed"
    TYPICAL = "typical"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A rule with its numbers, fixed for one block. Raises ParameterError out of range.

    Under `e2sci` each block brings its own T: `with_threshold`.
    """

    rule: RelaxedRule = RelaxedRule.RELAXED
    threshold: float = 0.0
    """T; of no meaning to `typical`. In [0, ln 2] for JSD, [0, 1] for TV, [0, 1000] otherwise."""
    divergence: Divergence = Divergence.JSD
    """Of `fsd`; the others that use one use JSD."""
    epsilon: float = TYPICAL_EPSILON
    delta: float = TYPICAL_DELTA

    def __post_init__(self) -> None:
        for name, kind in (("rule", RelaxedRule), ("divergence", Divergence)):
            if not isinstance(getattr(self, name), kind):
                known = ", ".join(kind)
                raise ParameterError(name, f"must be one of {known}; got {getattr(self, name)!r}")
        if self.divergence is not Divergence.JSD and self.rule is not RelaxedRule.FSD:
            raise ParameterError("divergence", f"of {self.rule} is jsd, got {self.divergence}")
        within("threshold", self.threshold, 0.0, _MOST[self.divergence])
        within("epsilon", self.epsilon, 0.0, 1.0)
        within("delta", self.delta, 0.0, 1.0)

    def with_threshold(self, threshold: float) -> Policy:
        """The same with another T, as an adaptive rule asks for block by block."""
        return replace(self, threshold=threshold)


class Fate(StrEnum):
    """What a rule says of a draft before anybody looks at the target's own token."""

    STANDS = "stands"
    FALLS = "falls"
    STRICT = "strict"
    """It stands iff it is the target's own token."""


@dataclass(frozen=True, slots=True)
class Ruling:
    """A rule's answer for one draft, and the ledger behind it."""

    fate: Fate
    ledger: Ledger


def fsd(
    p: Distribution,
    q: Distribution | Sketch,
    draft: int,
    *,
    threshold: float,
    ledger: Ledger,
    divergence: Divergence = Divergence.JSD,
) -> Ruling:
    """FSD as published: the draft stands iff divergence(p, q) <= T. KL is KL(p || q), our
    default. With the whole q the test is on the value itself."""
    if not _possible(q, draft):
        return Ruling(Fate.STRICT, ledger)
    both = compare(p, q)
    measured = both.value(divergence) if both.disjoint else both.bounds(divergence).upper
    if not measured <= threshold:
        return Ruling(Fate.FALLS, ledger)
    return _regardless(both, ledger)


def e2sci(
    p: Distribution, q: Distribution | Sketch, draft: int, *, threshold: float, ledger: Ledger
) -> Ruling:
    """E2-SCI as published: JSD(p, q) <= T(t). What T(t) is, the edge's controller knows
    (`credit`, from the strict rule's acceptance): it comes with each block."""
    return fsd(p, q, draft, threshold=threshold, ledger=ledger)


def relaxed(
    p: Distribution, q: Distribution | Sketch, draft: int, *, threshold: float, ledger: Ledger
) -> Ruling:
    """Ours: stands where the certified upper bound of the JSD is <= T and the budget allows it;
    strict everywhere else."""
    if threshold == 0.0 or ledger.spent >= ledger.budget or not _possible(q, draft):
        return Ruling(Fate.STRICT, ledger)
    both = compare(p, q)
    if not both.bounds(Divergence.JSD).upper <= threshold:
        return Ruling(Fate.STRICT, ledger)
    return _regardless(both, ledger)


def typical(
    p: Distribution,
    q: Distribution | Sketch,
    draft: int,
    *,
    ledger: Ledger,
    epsilon: float = TYPICAL_EPSILON,
    delta: float = TYPICAL_DELTA,
) -> Ruling:
    """Medusa's typical acceptance of one chain: p(x) > min(epsilon, delta exp(-H(p))). q serves
    the ledger alone; the bound of its charge needs drafts made with the shared noise."""
    if not _possible(q, draft):
        return Ruling(Fate.STRICT, ledger)
    both = compare(p, q)
    distance = both.bounds(Divergence.TV).upper
    charge = math.nextafter(2.0 * distance / (1.0 + distance), 1.0) if distance else 0.0
    if not ledger.fits(charge):
        return Ruling(Fate.STRICT, ledger)
    stands = p.prob(draft) > typical_floor(p, epsilon=epsilon, delta=delta)
    after = ledger.charged(charge, both.bounds(Divergence.JSD).upper)
    return Ruling(Fate.STANDS if stands else Fate.FALLS, after)


def typical_floor(
    p: Distribution, *, epsilon: float = TYPICAL_EPSILON, delta: float = TYPICAL_DELTA
) -> float:
    """min(epsilon, delta exp(-H(p))), H in nats: what p(x) must exceed."""
    mass = probabilities(p)
    mass = mass[mass > 0.0]
    return min(epsilon, delta * math.exp(float((mass * np.log(mass)).sum())))


def _possible(q: Distribution | Sketch, draft: int) -> bool:
    """False for a draft that q cannot have produced: no statement about q covers it."""
    if isinstance(q, Sketch):
        return q.may_draw(draft)
    i = int(np.searchsorted(q.ids, draft))
    return i < len(q.ids) and int(q.ids[i]) == draft and float(q.weights[i]) > -math.inf


def _regardless(both: Comparison, ledger: Ledger) -> Ruling:
    """The draft stands whatever the target's own token is, if the ledger can bear it."""
    charge = both.bounds(Divergence.TV).upper
    if not ledger.fits(charge):
        return Ruling(Fate.STRICT, ledger)
    return Ruling(Fate.STANDS, ledger.charged(charge, both.bounds(Divergence.JSD).upper))


def rule_on(
    p: Distribution, q: Distribution | Sketch, draft: int, *, policy: Policy, ledger: Ledger
) -> Ruling:
    """The policy's rule on one draft."""
    match policy.rule:
        case RelaxedRule.RELAXED:
            return relaxed(p, q, draft, threshold=policy.threshold, ledger=ledger)
        case RelaxedRule.TYPICAL:
            return typical(p, q, draft, ledger=ledger, epsilon=policy.epsilon, delta=policy.delta)
        case RelaxedRule.E2SCI:
            return e2sci(p, q, draft, threshold=policy.threshold, ledger=ledger)
        case RelaxedRule.FSD:
            return fsd(
                p,
                q,
                draft,
                threshold=policy.threshold,
                ledger=ledger,
                divergence=policy.divergence,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowVerdict:
    """What became of one draft."""

    stands: bool
    relaxed: bool
    """It stands although the target's own token is another."""
    ledger: Ledger


def judge_row(
    p: Distribution,
    q: Distribution | Sketch,
    draft: int,
    own: int,
    *,
    policy: Policy,
    ledger: Ledger,
) -> RowVerdict:
    """One draft against one row; `own` is the target's own token there (verify.target_token)."""
    ruling = rule_on(p, q, draft, policy=policy, ledger=ledger)
    same = draft == own
    stands = ruling.fate is Fate.STANDS or (ruling.fate is Fate.STRICT and same)
    marked = stands and not same
    after = ruling.ledger.marked() if marked else ruling.ledger
    return RowVerdict(stands=stands, relaxed=marked, ledger=after)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaxedVerdict(Verdict):
    """A verdict that says which drafts stand by the relaxed rule alone."""

    strict: int
    """Leading drafts that equal the target's own token: credit is computed from these. Under
    `fsd`, `e2sci` and `typical` it may be accepted + 1: they drop equal tokens too."""
    relaxed: tuple[int, ...] = ()
    """Indices in the block of the tokens to be marked, ascending."""
    ledger: Ledger
    """After this block."""

    def __post_init__(self) -> None:
        Verdict.__post_init__(self)
        if not 0 <= self.strict <= min(self.accepted + 1, self.drafted):
            raise ValueError(f"strict={self.strict} with accepted={self.accepted}")


def verify_relaxed(
    drafts: Sequence[int],
    sketches: Sequence[Distribution | Sketch],
    at: NextDistribution,
    *,
    seed: int,
    position: int,
    policy: Policy,
    ledger: Ledger,
) -> RelaxedVerdict:
    """Judge drafts for positions position, position+1, ... under a relaxed rule.

    `sketches[i]` tells what drafts[i] was drawn from; ValueError unless there is one for each.
    A function of its arguments: the same round with the same ledger gives the same verdict.
    """
    if len(sketches) != len(drafts):
        raise ValueError(f"{len(drafts)} drafts with {len(sketches)} sketches")
    n = len(drafts)
    marks: list[int] = []
    strict = 0
    for i, (draft, q) in enumerate(zip(drafts, sketches, strict=True)):
        p = at(i)
        own = target_token(p, seed, position + i)
        if draft == own and strict == i:
            strict += 1
        row = judge_row(p, q, draft, own, policy=policy, ledger=ledger)
        ledger = row.ledger
        if not row.stands:
            return RelaxedVerdict(
                drafted=n,
                accepted=i,
                token=own,
                strict=strict,
                relaxed=tuple(marks),
                ledger=ledger,
            )
        if row.relaxed:
            marks.append(i)
    token = target_token(at(n), seed, position + n)
    return RelaxedVerdict(
        drafted=n, accepted=n, token=token, strict=strict, relaxed=tuple(marks), ledger=ledger
    )
