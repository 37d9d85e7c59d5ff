"""Model-based draft length: the one that minimises expected seconds per token.

A synchronous round of k drafts costs

    N(k) = start + k t_d + R + queue + bytes_up(k) b_up + bytes_down b_down + t_v(k + 1)

and commits B(k) = 1 + S(1) + ... + S(k) tokens. The ratio of expectations N(k) / B(k) is what a
long run pays per token (UCB-SpecStop, arXiv 2606.20591; docs/papers.md, 3). With measured row costs
and a measured S(k) the ratio need not have one valley only, so the rule here is the exact argmin by
scan; `stopping_length` is the published inequality (Cor. 1, with general S), equal to it wherever
N is convex.

k = 0 is another thing than a round without drafts: the cloud streams alone and no token waits for
a round trip, so it costs queue + t_v(1) per token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

from outrider.control.base import (
    MAX_LENGTH,
    ControllerFacts,
    Decision,
    Estimates,
    Observation,
    Outcome,
)
from outrider.control.costs import RowCosts
from outrider.control.gate import GATE_OPTIONS, GRACE, Gate
from outrider.core.draft import StopRule

UP_BYTES: Final = 8
"""Of a DRAFT frame beside its ids (docs/protocol.md)."""
DOWN_BYTES: Final = 12
"""Of a VERDICT frame (our default)."""
TOKEN_BYTES: Final = 3.0
"""A draft takes upwards under the coupled rule: one id. The ratio rule adds q(x)."""
EQUAL: Final = 1e-9
"""Relative difference below which two costs are the same, and the shorter length is taken."""
BELIEF: Final = 0.75
"""What was judged n times may stand by BELIEF / sqrt(n + 1) oftener than it did: one and a half
standard deviations at a rate of a half (our default)."""
LEAST_SHARE: Final = 0.1
"""Of a modelled cost that a correction leaves."""


# --------------------------------------------------------------------------- closed forms


def geometric(acceptance: float, count: int) -> list[float]:
    """S(1), ..., S(count) of constant acceptance."""
    return [acceptance**i for i in range(1, count + 1)]


def expected_tokens(survival: Sequence[float]) -> list[float]:
    """B(0), ..., B(len(survival)): tokens a round commits, the target's own included."""
    return list(accumulate(survival, initial=1.0))


def linear_costs(draft: float, verify: float, delay: float, count: int) -> list[float]:
    """N(0), ..., N(count) of the published model: k (c_d + c_v) + 2 d + c_v.

    `draft` c_d and `verify` c_v per token, `delay` d one way, in one unit of time
    (arXiv 2606.20591; docs/papers.md, 3).
    """
    return [k * (draft + verify) + 2.0 * delay + verify for k in range(count + 1)]


def best_length(costs: Sequence[float], tokens: Sequence[float], *, least: int = 1) -> int:
    """argmin of N(k) / B(k) over k = least .. len(costs) - 1, the smallest of equals.

    `costs` N and `tokens` B are indexed by k from 0 and of one length.
    """
    return cheapest([n / b for n, b in zip(costs, tokens, strict=True)], least=least)


def cheapest(token_seconds: Sequence[float], *, least: int = 1) -> int:
    """Index of the smallest from `least` on, the first of (nearly) equals."""
    best = least
    for k in range(least + 1, len(token_seconds)):
        if token_seconds[k] < token_seconds[best] * (1.0 - EQUAL):
            best = k
    return best


def stopping_length(costs: Sequence[float], tokens: Sequence[float], *, least: int = 1) -> int:
    """The first k >= least with N(k) / B(k) <= (N(k+1) - N(k)) / S(k+1), or the last k.

    The optimal stopping rule of Cor. 1 with general S (docs/papers.md, 0, decision inequality 7).
    It is `best_length` where N is convex in k; elsewhere it may stop in the first valley.
    """
    for k in range(least, len(costs) - 1):
        if costs[k] * (tokens[k + 1] - tokens[k]) <= (costs[k + 1] - costs[k]) * tokens[k]:
            return k
    return len(costs) - 1


def critical_delay(acceptance: float, draft: float, verify: float) -> float:
    """d_c of Thm 5: below this one-way delay one draft is best. Negative: never.

    (c_d + c_v)(1 + alpha) / (2 alpha^2) - (c_d + 2 c_v) / 2, in the unit of the costs
    (arXiv 2606.20591; docs/papers.md, 3). acceptance in (0, 1].
    """
    both = draft + verify
    return both * (1.0 + acceptance) / (2.0 * acceptance**2) - (draft + 2.0 * verify) / 2.0


def critical_round_trip(costs: Sequence[float], tokens: Sequence[float]) -> float:
    """The same for measured costs N without a link: the R at which one draft stops being best.

    Compares k = 1 with k = 2 as Thm 5 does; inf where a second draft never stands. Needs both.
    """
    gain = tokens[2] - tokens[1]
    if gain <= 0.0:
        return math.inf
    return (costs[2] - costs[1]) * tokens[1] / gain - costs[1]


def rtt_ceiling(
    acceptance: float,
    *,
    draft: float,
    plain: float,
    verify: float | None = None,
    lengths: Sequence[int] = range(1, MAX_LENGTH + 1),
) -> float | None:
    """Largest round trip at which synchronous speculation beats cloud streaming; None: at none.

    max over the lengths of B(k) t_ar - t_v - k t_d (docs/papers.md, 0, decision inequality 1;
    arXiv 2606.25091 Prop 2). `plain` t_ar; `verify` t_v is t_ar unless given.
    """
    tokens = expected_tokens(geometric(acceptance, max(lengths)))
    t_v = plain if verify is None else verify
    most = max(tokens[k] * plain - t_v - k * draft for k in lengths)
    return most if most > 0.0 else None


def streaming_ceiling(
    acceptance: float, *, draft: float, plain: float, verify: float | None = None
) -> float | None:
    """The same for streaming run-ahead in chunks of g = ceil(t_v / t_d) drafts.

    t_ar / (1 - alpha) - g t_d / (1 - alpha^g) - t_v (docs/papers.md, 0, decision inequality 6).
    acceptance in [0, 1).
    """
    t_v = plain if verify is None else verify
    chunk = max(1, math.ceil(t_v / draft))
    most = plain / (1.0 - acceptance) - chunk * draft / (1.0 - acceptance**chunk) - t_v
    return most if most > 0.0 else None


# --------------------------------------------------------------------------- measured costs


def row_seconds(costs: RowCosts, most: int) -> list[float]:
    """t_v(1), ..., t_v(most): `costs.seconds` for all of them in one walk along the curve."""
    points = costs.curve()
    if not points:
        return [costs.seconds(rows) for rows in range(1, most + 1)]
    # One row by its own question: it is the price of a plain token, whatever that means there.
    values = [costs.seconds(1)]
    (first, low), (last, high) = points[0], points[-1]
    slope = (high - low) / (last - first) if last > first else 0.0
    at = 0
    for rows in range(2, most + 1):
        while at < len(points) and points[at][0] < rows:
            at += 1
        if at == len(points):
            values.append(high + slope * (rows - last))
        elif at == 0 or points[at][0] == rows:
            values.append(points[at][1])
        else:
            (r0, t0), (r1, t1) = points[at - 1], points[at]
            values.append(t0 + (t1 - t0) * (rows - r0) / (r1 - r0))
    return values


def link_seconds(estimates: Estimates) -> float:
    """R: of the present delay level where there are several, else the recent mean."""
    levels = estimates.delay_levels
    if len(levels) > 1 and 0 <= estimates.delay_state < len(levels):
        return levels[estimates.delay_state]
    return estimates.round_trip


def round_costs(
    estimates: Estimates,
    most: int,
    *,
    link: float | None = None,
    token_bytes: float = TOKEN_BYTES,
) -> list[float]:
    """N(0), ..., N(most), seconds; N(0) is a plain token of the cloud, without a round trip.

    `link`: R in place of the estimated one. A plain step waits for the engine as a judged block
    does, so the queue stands in N(0) too.
    """
    e = estimates
    rows = row_seconds(e.verify, most + 1)
    way = link_seconds(e) if link is None else link
    fixed = e.draft_start + way + e.queue + UP_BYTES * e.byte_up + DOWN_BYTES * e.byte_down
    each = e.draft + token_bytes * e.byte_up
    return [e.queue + rows[0], *(fixed + k * each + rows[k] for k in range(1, most + 1))]


def window_seconds(estimates: Estimates, most: int) -> list[float]:
    """Seconds per token of streaming run-ahead by window W = 0 .. most; W = 0: the cloud alone.

    While nothing is rejected a token takes u(W) = max(t_d, (t_d + L) / W), L = R + queue + t_v:
    a window smaller than what is under way stalls the edge. A rejection costs L and the drafts of
    the chunk it fell in, g t_d / (1 - alpha^g) (docs/papers.md, 0, streaming row; the stall is
    ours). The runs between rejections follow S as far as `most`, then its last ratio.
    """
    e = estimates
    alive = e.curve.survival(most)
    tail = e.curve.acceptance(most)
    run = sum(alive) + alive[-1] * tail / (1.0 - tail)
    share = run / (run + 1.0)
    rows = row_seconds(e.verify, most + 1)
    each, way = e.draft, link_seconds(e) + e.queue
    whole = math.ceil(min(rows[1] / each, most)) if each > 0.0 else most
    seconds = [e.queue + rows[0]]
    for window in range(1, most + 1):
        chunk = min(window, max(1, whole))
        wait = way + rows[chunk]
        stall = max(0.0, (each + wait) / window - each)
        seconds.append((chunk * each / (1.0 - share**chunk) + wait + run * stall) / (run + 1.0))
        if stall == 0.0 and chunk >= whole:
            # Nothing is won beyond what is under way.
            return seconds + [seconds[-1]] * (most - window)
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What the model says of every length, and where its answer would turn."""

    token_seconds: tuple[float, ...]
    """Seconds per token by length; [0]: the cloud streams alone."""
    excess: tuple[float, ...]
    """Plain steps that a round of this length costs more than its tokens would alone (>= 0)."""
    length: int
    """Best length from 1 on, whether it pays or not."""
    tokens: tuple[float, ...]
    """B by length."""
    round_seconds: tuple[float, ...] = ()
    """N by length without `extra`; empty for windows."""

    @property
    def worth(self) -> bool:
        """Whether speculation beats the cloud alone."""
        return self.token_seconds[self.length] < self.token_seconds[0]

    def worth_going_on(self, rounds: int) -> bool:
        """The same while acceptance rests on `rounds` verdicts only: with fewer than GRACE it is
        worth it if drafts stood as well as may be believed after so few."""
        if self.worth or rounds >= GRACE:
            return self.worth
        hoped = hoped_tokens(self.tokens, BELIEF / math.sqrt(rounds + 1.0))
        plain = self.token_seconds[0]
        facts = zip(self.token_seconds[1:], self.tokens[1:], hoped[1:], strict=True)
        return any(s * b < plain * h for s, b, h in facts)


def hoped_tokens(tokens: Sequence[float], bonus: float) -> list[float]:
    """B with every conditional acceptance higher by `bonus`, at most 1."""
    hoped, alive, before = [1.0], 1.0, 1.0
    for low, high in pairwise(tokens):
        stands = high - low
        alive *= min(1.0, (stands / before if before > 0.0 else 0.0) + bonus)
        before = stands
        hoped.append(hoped[-1] + alive)
    return hoped


def outlook(
    estimates: Estimates,
    most: int,
    *,
    streaming: bool = False,
    token_bytes: float = TOKEN_BYTES,
    extra: float = 0.0,
) -> Outlook:
    """`Outlook` for lengths 0 .. most (>= 1).

    `extra`: seconds that a synchronous round takes beside what the model says; may be negative,
    but leaves a round LEAST_SHARE of its cost.
    """
    tokens = expected_tokens(estimates.curve.survival(most))
    costs: list[float] = []
    if streaming:
        seconds = window_seconds(estimates, most)
    else:
        costs = round_costs(estimates, most, token_bytes=token_bytes)
        seconds = [n / b for n, b in zip(costs, tokens, strict=True)]
        if extra:
            for k in range(1, most + 1):
                seconds[k] = max(costs[k] + extra, LEAST_SHARE * costs[k]) / tokens[k]
    plain = max(seconds[0], EQUAL)
    excess = [max(0.0, b * (s / plain - 1.0)) for s, b in zip(seconds, tokens, strict=True)]
    return Outlook(
        token_seconds=tuple(seconds),
        excess=tuple(excess),
        length=cheapest(seconds),
        tokens=tuple(tokens),
        round_seconds=tuple(costs),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Turning:
    """Round trips (seconds) at which the synchronous answer turns; for people."""

    critical: float
    """Below it one draft is best; negative: never (Thm 5 with measured costs)."""
    ceiling: float
    """Above it the cloud alone is faster; negative: it always is."""


def turning_points(estimates: Estimates, most: int = MAX_LENGTH) -> Turning:
    """Critical delay and ceiling from measured costs. `most` >= 2."""
    costs = round_costs(estimates, most, link=0.0)
    tokens = expected_tokens(estimates.curve.survival(most))
    ceiling = max(b * costs[0] - n for n, b in zip(costs[1:], tokens[1:], strict=True))
    return Turning(critical=critical_round_trip(costs, tokens), ceiling=ceiling)


class SpecStop:
    """The best length by the model, each round anew; "do not speculate" with two strikes.

    Options: those of `gate.Gate`, and `token_bytes` (bytes a draft takes upwards).
    """

    def __init__(self, facts: ControllerFacts) -> None:
        facts.refuse_options(*GATE_OPTIONS, "token_bytes")
        self.name = "specstop"
        self._most = max(1, min(facts.max_length, MAX_LENGTH))
        self._token_bytes = facts.option("token_bytes", TOKEN_BYTES, 0.0, 1e6)
        self._gate = Gate.from_facts(facts, dwell=0)

    def decide(self, observation: Observation) -> Decision:
        room = min(self._most, observation.room)
        if room < 1:
            return Decision(length=0)
        if observation.free:
            return Decision(length=room)
        view = outlook(
            observation.estimates,
            room,
            streaming=observation.streaming,
            token_bytes=self._token_bytes,
        )
        worth = view.worth_going_on(observation.estimates.rounds)
        on = self._gate.speculate(worth=worth, excess=view.excess[view.length])
        return Decision(length=view.length if on else 0)

    def observe(self, outcome: Outcome, now: float) -> None:  # noqa: ARG002
        self._gate.round_ended(speculated=outcome.drafted > 0)

    def stop_rule(self) -> StopRule | None:
        return None
