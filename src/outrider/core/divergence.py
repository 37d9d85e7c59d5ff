"""How far a draft's distribution q is from the target's p: exact, or certified from a sketch.

All are f-divergences: sums over the vocabulary of a convex function t(p_v, q_v) with
t(ca, cb) = c t(a, b). In nats where a logarithm is involved.

| name     | t(a, b)                                      | range       |
| -------- | -------------------------------------------- | ----------- |
| `jsd`    | a/2 ln(2a/(a+b)) + b/2 ln(2b/(a+b))          | [0, ln 2]   |
| `tv`     | abs(a - b)/2                                 | [0, 1]      |
| `kl`     | a ln(a/b): KL(p || q)                        | [0, inf]    |
| `fsd-js` | m/2 ln(m/a) + m/2 ln(m/b), m = (a + b)/2     | [0, inf]    |

`fsd-js` is what FSD's code calls "JS": KL(M || P)/2 + KL(M || Q)/2, the arguments the other way
round (docs/papers.md, 7). It is infinite as soon as one side rules out what the other does not, so
any filter (top-k, top-p, min-p) usually makes it so.

A sketch leaves open how the tail of q spreads over the ids that it does not list. Because t is
convex and homogeneous, t(sum a, sum b) <= sum t(a, b) <= sum t(a, 0) + sum t(0, b): merging
both tails into one bucket bounds from below (attained where q's tail is in proportion to p's),
taking them as disjoint bounds from above. Where q has no tail the two meet.

Rounding: float64 errors of `jsd` and `tv` are some 1e-14 for any vocabulary (each probability
is right to some 30 ulp, and errors enter multiplied by probabilities); bounds are moved outward
by ROUNDING, a hundred times that. `kl` and `fsd-js` are as good while no probability is below
1e-300; they are offered as published rules and certify nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from outrider.core.sampling import Distribution, F64Array, IdArray
from outrider.core.sparse import Sketch

LN2: Final = math.log(2.0)
ROUNDING: Final = 1e-12
"""What every bound is moved outward by."""


class Divergence(StrEnum):
    """See the module docstring."""

    JSD = "jsd"
    TV = "tv"
    KL = "kl"
    FSD_JS = "fsd-js"


@dataclass(frozen=True, slots=True)
class Bounds:
    """The true value lies in [lower, upper]."""

    lower: float
    upper: float


@dataclass(frozen=True, slots=True)
class _Form:
    """t, with its values where one side alone has mass."""

    terms: Callable[[F64Array, F64Array], F64Array]
    p_alone: float
    """t(1, 0)."""
    q_alone: float
    """t(0, 1)."""
    most: float


def _times_log(a: F64Array, x: F64Array, y: F64Array) -> F64Array:
    """a ln(x/y), 0 where a = 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        terms: F64Array = np.where(a > 0.0, a * np.log(x / y), 0.0)
    return terms


def _jsd_terms(a: F64Array, b: F64Array) -> F64Array:
    both = a + b
    return (_times_log(a, 2.0 * a, both) + _times_log(b, 2.0 * b, both)) / 2.0


def _tv_terms(a: F64Array, b: F64Array) -> F64Array:
    return np.abs(a - b) / 2.0


def _kl_terms(a: F64Array, b: F64Array) -> F64Array:
    return _times_log(a, a, b)


def _fsd_terms(a: F64Array, b: F64Array) -> F64Array:
    middle = (a + b) / 2.0
    return (_times_log(middle, middle, a) + _times_log(middle, middle, b)) / 2.0


_FORMS: Final = MappingProxyType(
    {
        Divergence.JSD: _Form(_jsd_terms, LN2 / 2.0, LN2 / 2.0, LN2),
        Divergence.TV: _Form(_tv_terms, 0.5, 0.5, 1.0),
        Divergence.KL: _Form(_kl_terms, math.inf, 0.0, math.inf),
        Divergence.FSD_JS: _Form(_fsd_terms, math.inf, math.inf, math.inf),
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """p and q side by side: the ids both name, and what each has beside them."""

    p: F64Array
    """Probabilities under p of the common ids, float64 [n]."""
    q: F64Array
    """The same under q."""
    p_rest: float
    """Probability of p outside the common ids."""
    q_rest: float
    disjoint: bool
    """The two rests share no id: every value is exact."""
    rounding: float = ROUNDING

    def bounds(self, divergence: Divergence) -> Bounds:
        """Certified for `jsd` and `tv`; see the module docstring for the others."""
        form = _FORMS[divergence]
        common = float(form.terms(self.p, self.q).sum())
        upper = common + self._apart(form)
        lower = upper if self.disjoint else common + self._merged(form)
        return Bounds(
            lower=min(max(lower - self.rounding, 0.0), form.most),
            upper=min(max(upper + self.rounding, 0.0), form.most),
        )

    def value(self, divergence: Divergence) -> float:
        """The value itself, not moved by any rounding. Needs the whole of q (ValueError)."""
        if not self.disjoint:
            raise ValueError("a sketch with a tail has bounds, not a value")
        form = _FORMS[divergence]
        whole = float(form.terms(self.p, self.q).sum()) + self._apart(form)
        return min(max(whole, 0.0), form.most)

    def _apart(self, form: _Form) -> float:
        alone = ((self.p_rest, form.p_alone), (self.q_rest, form.q_alone))
        return sum(mass * each for mass, each in alone if mass > 0.0)

    def _merged(self, form: _Form) -> float:
        return float(form.terms(np.array([self.p_rest]), np.array([self.q_rest]))[0])


def compare(p: Distribution, q: Distribution | Sketch) -> Comparison:
    """Lays q beside p. One exponential for each id of p (and of q where it is whole).

    Distributions of a single id (temperature 0) are compared without rounding.
    """
    if isinstance(q, Sketch):
        return _with_sketch(p, q)
    a, b = probabilities(p), probabilities(q)
    rounding = _rounding(len(p.ids), len(q.ids))
    if p.ids is q.ids or np.array_equal(p.ids, q.ids):
        return Comparison(a, b, 0.0, 0.0, disjoint=True, rounding=rounding)
    if len(p.ids) <= len(q.ids):
        in_p, in_q = _common(p.ids, q.ids)
    else:
        in_q, in_p = _common(q.ids, p.ids)
    return Comparison(
        a[in_p],
        b[in_q],
        _without(a, in_p),
        _without(b, in_q),
        disjoint=True,
        rounding=rounding,
    )


def _with_sketch(p: Distribution, q: Sketch) -> Comparison:
    ids = np.array(q.ids, dtype=np.int64)
    listed, at = _common(ids, p.ids)
    whole = probabilities(p)
    a = np.zeros(len(ids))
    a[listed] = whole[at]
    return Comparison(
        a,
        q.probabilities(),
        _without(whole, at),
        q.tail,
        disjoint=q.rest == 0.0,
        rounding=_rounding(len(p.ids), len(ids) + (q.rest > 0.0)),
    )


def probabilities(dist: Distribution) -> F64Array:
    """float64 [n]. Right to some 30 ulp however large the weights are (at low temperatures the
    log of their total alone is not)."""
    p: F64Array = np.exp(dist.weights.astype(np.float64) - float(dist.top))
    p /= p.sum()
    return p


def _rounding(p_ids: int, q_ids: int) -> float:
    return 0.0 if p_ids == q_ids == 1 else ROUNDING


def _common(few: IdArray, many: IdArray) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Indices in `few` and in `many` of the ids in both."""
    at = np.minimum(np.searchsorted(many, few), len(many) - 1)
    inside = np.flatnonzero(many[at] == few)
    found: npt.NDArray[np.intp] = at[inside]
    return inside, found


def _without(mass: F64Array, index: npt.NDArray[np.intp]) -> float:
    """Sum over all but `index`. No difference of sums: it is 0 only where nothing is left."""
    rest = mass.copy()
    rest[index] = 0.0
    return float(rest.sum())


def jsd(p: Distribution, q: Distribution) -> float:
    """Jensen-Shannon divergence, nats, in [0, ln 2]."""
    return compare(p, q).value(Divergence.JSD)


def tv(p: Distribution, q: Distribution) -> float:
    """Total variation distance, in [0, 1]."""
    return compare(p, q).value(Divergence.TV)


def kl(p: Distribution, q: Distribution) -> float:
    """KL(p || q), nats; inf where q rules out an id that p does not."""
    return compare(p, q).value(Divergence.KL)


def fsd_js(p: Distribution, q: Distribution) -> float:
    """FSD's published "JS" (module docstring), nats; inf where supports differ."""
    return compare(p, q).value(Divergence.FSD_JS)


def jsd_bounds(p: Distribution, q: Distribution | Sketch) -> Bounds:
    """Certified bounds of the Jensen-Shannon divergence, nats."""
    return compare(p, q).bounds(Divergence.JSD)


def tv_bounds(p: Distribution, q: Distribution | Sketch) -> Bounds:
    """Certified bounds of the total variation distance."""
    return compare(p, q).bounds(Divergence.TV)
