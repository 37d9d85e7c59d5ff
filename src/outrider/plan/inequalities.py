"""The published conditions with numbers put in: why the table looks as it does.

Numbered as in docs/papers.md, 0. Those of the run-ahead shapes (3 to 6) are about constant
acceptance and forwards of one price: they take the curve's alpha and t_v of the block, and stand
beside the table, which takes the whole curve. Times in seconds; shown in milliseconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.control.specstop import (
    critical_round_trip,
    expected_tokens,
    stopping_length,
)
from outrider.plan.facts import Facts
from outrider.plan.modes import (
    Estimate,
    colocated,
    lengths,
    payload_seconds,
    round_seconds,
    sync,
)
from outrider.session.schedules import Schedule

# ------------------------------------------------------------------------------ closed forms


def tokens_a_round(alpha: float, length: int) -> float:
    """E[L](k) = (1 - alpha^(k+1)) / (1 - alpha)."""
    return (1.0 - alpha ** (length + 1)) / (1.0 - alpha)


def pearl_seconds(alpha: float, length: int, draft: float, verify: float, trip: float) -> float:
    """Per token of one-block run-ahead without a bonus token. acceptance in (0, 1)."""
    block, wait = length * draft, trip + verify
    whole = alpha**length
    return (1.0 - alpha) / (1.0 - whole) * (block + wait - whole * min(block, wait))


def stream_seconds(alpha: float, chunk: int, draft: float, verify: float, trip: float) -> float:
    """Per token of streaming in chunks of g, as long as g t_d >= t_v."""
    return (1.0 - alpha) * (chunk * draft / (1.0 - alpha**chunk) + trip + verify)


# ------------------------------------------------------------------------------ with numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Inequality:
    """One condition: holds iff left < right."""

    number: str
    """As in docs/papers.md, 0, or where else it is from."""
    claim: str
    """What holds if it does."""
    formula: str
    left: float
    right: float
    """Both sides in seconds, or as the formula says."""
    numbers: str
    """The formula with the numbers put in."""

    @property
    def holds(self) -> bool:
        return self.left < self.right


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}"


def inequalities(facts: Facts) -> list[Inequality]:
    """All of them at these facts, with each side's best length."""
    block = _best_sync(facts)
    found = [_sync_pays(facts, block)]
    if facts.cloud_draft is not None:
        found += [_colocated_wins(facts, block), _ahead_may_win(facts, block)]
    return [*found, *_ahead(facts, block), _length(facts, block), *_rest(facts, block)]


def _best_sync(facts: Facts) -> int:
    most = lengths(facts, Schedule.SYNC)
    return min(most, key=lambda k: (sync(facts, k).seconds, k))


def _sync_pays(facts: Facts, k: int) -> Inequality:
    tokens = expected_tokens(facts.curve.survival(k))[-1]
    payload = payload_seconds(facts, k)
    right = tokens * facts.step - facts.seconds(k + 1) - k * facts.draft - payload
    return Inequality(
        number="1",
        claim="sync beats cloud streaming",
        formula="R < B(k) t_ar - t_v - k t_d - bytes",
        left=facts.round_trip,
        right=right,
        numbers=f"{_ms(facts.round_trip)} < {tokens:.3g} x {_ms(facts.step)} - "
        f"{_ms(facts.seconds(k + 1))} - {k} x {_ms(facts.draft)}"
        + (f" - {_ms(payload)}" if payload else "")
        + f" = {_ms(right)}",
    )


def _colocated_wins(facts: Facts, k: int) -> Inequality:
    assert facts.cloud_draft is not None
    best = min((colocated(facts, n) for n in lengths(facts, Schedule.COLOCATED)), key=_seconds)
    edge = sync(facts, k)
    return Inequality(
        number="2",
        claim="the cloud's own draft beats sync",
        formula="(k t_d' + t_v) / B(k) < (k t_d + R + t_v) / B(k), each at its best k",
        left=best.seconds,
        right=edge.seconds,
        numbers=f"{_ms(best.seconds)} (k = {best.length}) < {_ms(edge.seconds)} (k = {k})",
    )


def _seconds(estimate: Estimate) -> float:
    return estimate.seconds


def _ahead_may_win(facts: Facts, k: int) -> Inequality:
    assert facts.cloud_draft is not None
    right = k * facts.cloud_draft
    return Inequality(
        number="3",
        claim="one-block run-ahead may beat the cloud's own draft",
        formula="R < k t_d'",
        left=facts.round_trip,
        right=right,
        numbers=f"{_ms(facts.round_trip)} < {k} x {_ms(facts.cloud_draft)} = {_ms(right)}",
    )


def _ahead(facts: Facts, k: int) -> list[Inequality]:
    alpha, draft, trip = facts.curve.alpha, facts.draft, facts.round_trip
    verify = facts.seconds(k + 1)
    block, wait, tokens = k * draft, trip + verify, tokens_a_round(alpha, k)
    g = max(1, math.ceil(facts.seconds(1) / draft))
    chunk = g * draft
    of_chunk = chunk * (1.0 - alpha) / (alpha * (1.0 - alpha**g)) if alpha else math.inf
    most = facts.step / (1.0 - alpha) - chunk / (1.0 - alpha**g) - facts.step
    return [
        Inequality(
            number="4",
            claim=f"one-block run-ahead beats sync at k = {k}",
            formula="k t_d + R + t_v < min(k t_d, R + t_v) B(k)",
            left=block + wait,
            right=min(block, wait) * tokens,
            numbers=f"{_ms(block)} + {_ms(wait)} < {_ms(min(block, wait))} x {tokens:.3g} = "
            f"{_ms(min(block, wait) * tokens)}",
        ),
        Inequality(
            number="5",
            claim=f"streaming in chunks of g = {g} beats sync with k = g",
            formula="g t_d (1 - a) / (a (1 - a^g)) < R + t_v",
            left=of_chunk,
            right=trip + facts.step,
            numbers=f"{_ms(of_chunk)} < {_ms(trip)} + {_ms(facts.step)} (a = {alpha:.3g})",
        ),
        Inequality(
            number="6",
            claim=f"streaming in chunks of g = {g} beats cloud streaming",
            formula="R < t_ar / (1 - a) - g t_d / (1 - a^g) - t_v",
            left=trip,
            right=most,
            numbers=f"{_ms(trip)} < {_ms(facts.step / (1.0 - alpha))} - "
            f"{_ms(chunk / (1.0 - alpha**g))} - {_ms(facts.step)} = {_ms(most)}",
        ),
    ]


def costs(facts: Facts, most: int, *, link: bool = True) -> list[float]:
    """N(0), ..., N(most) of the synchronous loop; `link`: with the round trip."""
    less = 0.0 if link else facts.round_trip
    return [round_seconds(facts, k) - less for k in range(most + 1)]


def _length(facts: Facts, k: int) -> Inequality:
    """The stopping rule at the length it stops at."""
    most = max(lengths(facts, Schedule.SYNC)) + 1
    spent, tokens = costs(facts, most), expected_tokens(facts.curve.survival(most))
    stop = min(stopping_length(spent, tokens), most - 1)
    gain = tokens[stop + 1] - tokens[stop]
    right = (spent[stop + 1] - spent[stop]) / gain if gain else math.inf
    left = spent[stop] / tokens[stop]
    return Inequality(
        number="7",
        claim=f"a block of {stop} is long enough" + ("" if stop == k else f" (by scan: {k})"),
        formula="N(k) / B(k) <= (N(k+1) - N(k)) / S(k+1)",
        left=left,
        right=right,
        numbers=f"{_ms(left)} <= {_ms(right)}",
    )


def critical_delay_of(facts: Facts) -> float:
    """One-way delay (seconds) up to which blocks of one draft are best; negative: never, inf:
    always (UCB-SpecStop Thm 5 with measured costs)."""
    spent = costs(facts, 2, link=False)
    return critical_round_trip(spent, expected_tokens(facts.curve.survival(2))) / 2.0


def capacity_gain(facts: Facts, length: int) -> float | None:
    """N_dsd / N_coloc = 1 + k t_d' / t_v: how many more edges a saturated verifier serves when they
    draft themselves (arXiv 2606.25091, Prop 9); None where it cannot draft."""
    if facts.cloud_draft is None:
        return None
    return 1.0 + length * facts.cloud_draft / facts.seconds(length + 1)


def _rest(facts: Facts, k: int) -> list[Inequality]:
    critical = critical_delay_of(facts)
    found = [
        Inequality(
            number="UCB-SpecStop, Thm 5",
            claim="the link is short enough for blocks of one draft",
            formula="R / 2 < d_c",
            left=facts.round_trip / 2.0,
            right=critical,
            numbers=f"{_ms(facts.round_trip / 2.0)} < {_ms(critical)}",
        )
    ]
    gain = capacity_gain(facts, k)
    if gain is not None:
        assert facts.cloud_draft is not None
        found.append(
            Inequality(
                number="2606.25091, Prop 9",
                claim="a saturated verifier serves more edges that draft themselves",
                formula="1 < 1 + k t_d' / t_v",
                left=1.0,
                right=gain,
                numbers=f"1 < 1 + {k} x {_ms(facts.cloud_draft)} / {_ms(facts.seconds(k + 1))} = "
                f"{gain:.3g}",
            )
        )
    return found
