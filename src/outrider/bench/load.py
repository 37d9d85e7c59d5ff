"""What a loaded verifier did for its edges: one record an answer, and their statistics. Pure.

Tokens are counted as tokens, never as frames (field case 38), of committed text alone (37); what
is not known is None, never NaN. Percentiles are over all answers: the smallest value that at least
that share of them does not exceed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

QUANTILES: Final = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One finished answer. Times in seconds from the start of the measurement."""

    edge: int
    tenant: str
    due: float
    """When it was asked for: its arrival, or when its place became free (closed loop)."""
    first: float
    """When its first tokens were there."""
    last: float
    tokens: int
    first_tokens: int
    """Tokens that came at `first`."""
    forwards: int
    """Target forwards that this answer took part in."""
    rows: int | None
    """Rows of those forwards that were this answer's; None: not known at an edge."""
    drafted: int
    accepted: int
    wasted: int
    """Drafted tokens that were dropped unjudged."""
    queue: tuple[float, ...] = ()
    """Waits for the engine, one a forward, as the cloud says."""
    step: tuple[float, ...] = ()

    @property
    def ttft(self) -> float:
        return self.first - self.due

    @property
    def seconds_per_token(self) -> float | None:
        """While decoding; None where all tokens came at once."""
        later = self.tokens - self.first_tokens
        return (self.last - self.first) / later if later else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes of protocol frames of one edge while the load ran."""

    up: int = 0
    down: int = 0
    reconnects: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudCount:
    """What the verifier itself counted while the load ran, for whoever it served."""

    forwards: int
    rows: int
    """Judged: one for each token of the target, drafts included."""
    evictions: int
    """Sessions whose cache slot was given to another, to be rebuilt."""

    @classmethod
    def between(
        cls, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
    ) -> CloudCount | None:
        """From two of its /status answers; None where one is missing, or it began anew between."""
        counts = {}
        for name in cls.__dataclass_fields__:
            old, new = (before or {}).get(name), (after or {}).get(name)
            if not isinstance(old, int) or not isinstance(new, int) or new < old:
                return None
            counts[name] = new - old
        return cls(**counts)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """A whole run."""

    served: list[Served] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    """Answers that failed, by the protocol's code."""
    failure: str = ""
    """What the first of them said."""
    asked: int = 0
    """Answers that were to be made."""
    warm_up_answers: int = 0
    """Made before, and not counted; 0: the figures are of a cold start."""
    seconds: float = 0.0
    """From the start to the last token, or to the interruption."""
    busy: float = 0.0
    """Processor seconds that this process, the edges, spent meanwhile."""
    interrupted: bool = False
    traffic: list[Traffic] = field(default_factory=list)
    """One an edge."""
    cloud: CloudCount | None = None
    """None: the verifier does not tell."""

    @property
    def unfinished(self) -> int:
        return self.asked - len(self.served) - self.failures.total()


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest of `values` that at least `share` of them do not exceed; None without any."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def jain(rates: Sequence[float]) -> float | None:
    """Jain's index: 1 where all are equal, 1/n where one has everything; None where all have
    nothing."""
    squares = sum(rate * rate for rate in rates)
    return sum(rates) ** 2 / (len(rates) * squares) if squares else None


def rate(served: Sequence[Served]) -> float | None:
    """Tokens a second between the first request and the last token of these answers."""
    if not served:
        return None
    span = max(s.last for s in served) - min(s.due for s in served)
    return sum(s.tokens for s in served) / span if span > 0 else None


def _ms(values: Sequence[float], shares: Sequence[float] = QUANTILES) -> dict[str, float | None]:
    found = {f"p{100 * share:g}": percentile(values, share) for share in shares}
    return {name: None if value is None else 1e3 * value for name, value in found.items()}


def _paces(served: Sequence[Served]) -> list[float]:
    return [s.seconds_per_token for s in served if s.seconds_per_token is not None]


def _ratio(part: float | None, whole: float) -> float | None:
    return part / whole if whole and part is not None else None


def summary(outcome: Outcome) -> dict[str, Any]:
    """The figures of a run, ready for JSON."""
    served = outcome.served
    tokens = sum(s.tokens for s in served)
    forwards = sum(s.forwards for s in served)
    drafted, accepted = sum(s.drafted for s in served), sum(s.accepted for s in served)
    rates, cloud = _rates(outcome), outcome.cloud
    return {
        "answers": len(served),
        "asked": outcome.asked,
        "unfinished": outcome.unfinished,
        "errors": dict(outcome.failures),
        "first_error": outcome.failure or None,
        "interrupted": outcome.interrupted,
        "warm_up_answers": outcome.warm_up_answers,
        "cold": not outcome.warm_up_answers,
        "seconds": outcome.seconds,
        "edges_cpu": _ratio(outcome.busy, outcome.seconds),
        "tokens": tokens,
        "tokens_per_s": _ratio(tokens, outcome.seconds),
        "ttft_ms": _ms([s.ttft for s in served]),
        "ms_per_token": _ms(_paces(served)),
        "queue_ms": _ms([q for s in served for q in s.queue], QUANTILES[:2]),
        "step_ms": _ms([t for s in served for t in s.step], QUANTILES[:2]),
        "forwards": forwards,
        "forwards_per_token": _ratio(forwards, tokens),
        "rows_per_forward": _ratio(_rows(served), forwards),
        "cloud_forwards": cloud and cloud.forwards,
        "cloud_rows_per_forward": _ratio(cloud.rows, cloud.forwards) if cloud else None,
        "cloud_evictions": cloud and cloud.evictions,
        "cloud_forwards_per_token": _ratio(cloud.forwards, tokens) if cloud else None,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance": _ratio(accepted, drafted),
        "wasted": sum(s.wasted for s in served),
        "bytes_up_per_token": _ratio(sum(t.up for t in outcome.traffic), tokens),
        "bytes_down_per_token": _ratio(sum(t.down for t in outcome.traffic), tokens),
        "reconnects": sum(t.reconnects for t in outcome.traffic),
        "fairness": jain([r or 0.0 for r in rates]) if rates else None,
        "edges": [_edge(outcome, number, rates[number]) for number in range(len(rates))],
        "tenants": _tenants(served),
    }


def _rows(served: Sequence[Served]) -> int | None:
    known = [s.rows for s in served if s.rows is not None]
    return sum(known) if len(known) == len(served) else None


def _rates(outcome: Outcome) -> list[float | None]:
    """Tokens a second of each edge."""
    return [
        rate([s for s in outcome.served if s.edge == number])
        for number in range(len(outcome.traffic))
    ]


def _edge(outcome: Outcome, number: int, tokens_per_s: float | None) -> dict[str, Any]:
    mine = [s for s in outcome.served if s.edge == number]
    use = outcome.traffic[number]
    return {"edge": number, "bytes_up": use.up, "bytes_down": use.down} | _share(mine, tokens_per_s)


def _tenants(served: Sequence[Served]) -> Mapping[str, dict[str, Any]]:
    names = sorted({s.tenant for s in served})
    parts = {name: [s for s in served if s.tenant == name] for name in names}
    return {name: _share(part, rate(part)) for name, part in parts.items()}


def _share(served: Sequence[Served], tokens_per_s: float | None) -> dict[str, Any]:
    return {
        "answers": len(served),
        "tokens": sum(s.tokens for s in served),
        "tokens_per_s": tokens_per_s,
        "ttft_ms": _ms([s.ttft for s in served]),
        "ms_per_token": _ms(_paces(served)),
    }
