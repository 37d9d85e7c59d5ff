"""`credit`: window and threshold from credit inertia (E2-SCI; docs/papers.md, 1).

As published: a history of the last k window acceptance rates, credit
r(t) = (1 - beta) r(t-1) + beta p_acc(t), (omega, W) = g(r, r(t) - r(t-1)),
T = clip(T_base + alpha omega (r - tau_credit), T_min, T_max), hysteresis, a minimum refresh
interval, and a conservative T when Acc(T) < delta. Only k = 5 and beta = .3 are stated there;
everything else is an option here, with our default.

Rules, where the paper leaves room:

1. Rates are those of the *strict* rule, whatever rule is in force: a relaxed one would raise the
   credit that relaxed it (docs/papers.md, 1, Cautions).
2. p_acc(t) = E[L_acc] / W: the expectation is the mean over the history, so k = 1 smooths by
   beta alone. The first window sets r; before it r = tau_credit, hence T = T_base.
3. A calibration brings the k, beta, delta and threshold law it was made with; options come
   before it. g is its predictor, or (`predictor=0`) its table, whose T* is used as it stands.
   Without a calibration omega = 1 and W grows linearly with r from W_min to W_max.
4. g is asked again only after `refresh` rounds, and when r has moved by more than `hysteresis`.
5. Acc is strictly accepted over accepted drafts, leading ones each, of the last `buffer` rounds:
   a low estimate, since drafts behind the first relaxed one may be right too. When a full buffer
   falls short of `delta`, T = T_min at once, until the buffer has filled anew.
6. `state` is high once mean(H) > tau_high and low once mean(H) < tau_low; it ends when the mean
   is back inside by more than `hysteresis`. It is shown and decides nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Final

import numpy as np

from outrider.control.base import (
    MAX_LENGTH,
    CalibrationError,
    ControllerFacts,
    Decision,
    Observation,
    Outcome,
)
from outrider.control.calibration import (
    LN2,
    Calibration,
    Provenance,
    Table,
    ThresholdLaw,
    load,
)
from outrider.control.predictor import Predictor
from outrider.core.draft import StopRule
from outrider.core.tokens import ParameterError

HISTORY: Final = 5
"""k (E2-SCI)."""
BETA: Final = 0.3
"""Weight of the newest rate (E2-SCI)."""
TAU_HIGH: Final = 0.8
"""The paper's illustration of high acceptance; its tau_high is not stated."""
TAU_LOW: Final = 0.4
"""Likewise for low acceptance."""
DELTA: Final = 0.8
"""Least Acc(T) (our default)."""
BUFFER: Final = 10
"""Rounds that Acc(T) is measured over (our default)."""
HYSTERESIS: Final = 0.05
"""In units of credit (our default)."""
REFRESH: Final = 2
"""Least rounds between two changes (our default)."""
T_MIN: Final = 0.02
"""T_min without a calibration (our default). Not 0: the published rule then accepts nothing, strict
credit stays 0, and T with it for ever."""
MAX_MEMORY: Final = 1000
"""Longest history and buffer: memory is bounded (I7)."""

OPTIONS: Final = (
    *("k", "beta", "history", "alpha", "tau_credit", "t_base", "t_min", "t_max", "threshold"),
    *("tau_high", "tau_low", "delta", "buffer", "hysteresis", "refresh"),
    *("window_min", "window_max", "predictor"),
)
"""`history=0`, `threshold=0` and `predictor=0` switch a part off: the credit is the last window
alone; T stays at T_base; a calibration's table is used instead of its network."""

Guide = Callable[[float, float], tuple[float, float]]
"""g: credit and change to (T in nats, W), W not rounded."""


class CreditState(StrEnum):
    """Where mean(H) lies."""

    HIGH = "high"
    BETWEEN = "between"
    LOW = "low"


class CreditHistory:
    """H_t and r(t): the last k window rates and the credit smoothed from their means."""

    __slots__ = ("_beta", "_rates", "_value", "change")

    def __init__(self, *, k: int = HISTORY, beta: float = BETA, start: float = 0.5) -> None:
        """`start`: the credit before the first window."""
        self._beta = beta
        self._rates: deque[float] = deque(maxlen=k)
        self._value = start
        self.change = 0.0
        """r(t) - r(t-1)."""

    def observe(self, rate: float) -> None:
        """A window ended with this acceptance rate in [0, 1], by the strict rule."""
        first = not self._rates
        self._rates.append(rate)
        before = self._value
        self._value = rate if first else before + self._beta * (self.mean - before)
        self.change = 0.0 if first else self._value - before

    @property
    def credit(self) -> float:
        """r(t)."""
        return self._value

    @property
    def mean(self) -> float:
        """mean(H_t); the starting credit while nothing was seen."""
        return sum(self._rates) / len(self._rates) if self._rates else self._value


class Credit:
    """See the module docstring."""

    def __init__(self, facts: ControllerFacts) -> None:
        """Raises ParameterError for options out of range or order, CalibrationError for a
        calibration folder that cannot be used."""
        facts.refuse_options(*OPTIONS)
        self.name = "credit"
        self.calibration: Calibration | None = (
            load(facts.calibration) if facts.calibration else None
        )
        self.law = _law(facts, self.calibration)
        self._threshold_moves = _switch(facts, "threshold")
        self._tau_low = facts.option("tau_low", TAU_LOW, 0.0, 1.0)
        self._tau_high = facts.option("tau_high", TAU_HIGH, 0.0, 1.0)
        if self._tau_low >= self._tau_high:
            raise ParameterError("controller", "tau_low must be less than tau_high")
        made = self.calibration.provenance if self.calibration else None
        self._delta = facts.option("delta", made.delta if made else DELTA, 0.0, 1.0)
        self._hysteresis = facts.option("hysteresis", HYSTERESIS, 0.0, 1.0)
        self._refresh = _whole(facts, "refresh", REFRESH, 1, MAX_MEMORY)
        self._history = _history(facts, made, self.law.tau_credit)
        self._low, self._high = _windows(facts)
        self._guide = self._chosen(_switch(facts, "predictor"))
        self._rounds: deque[tuple[int, int]] = deque(
            maxlen=_whole(facts, "buffer", BUFFER, 1, MAX_MEMORY)
        )
        self._held = False
        self._since = self._refresh
        self._moved_at: float | None = None
        self.state = CreditState.BETWEEN
        self.threshold = self.law.t_base
        """T(t), nats."""
        self.window = self._fit(self._guide(self.credit, 0.0)[1])
        """W."""

    @property
    def credit(self) -> float:
        """r(t)."""
        return self._history.credit

    @property
    def change(self) -> float:
        """r(t) - r(t-1)."""
        return self._history.change

    @property
    def quality(self) -> float:
        """Acc over the buffer; 1 while nothing was accepted."""
        accepted = sum(a for a, _ in self._rounds)
        return sum(s for _, s in self._rounds) / accepted if accepted else 1.0

    @property
    def conservative(self) -> bool:
        """True while the safety check holds T at T_min."""
        return self._held

    def decide(self, observation: Observation) -> Decision:
        length = max(0, min(self.window, observation.room))
        return Decision(length=length, threshold=self.threshold, credit=self.credit)

    def observe(self, outcome: Outcome, now: float) -> None:  # noqa: ARG002
        """A round without drafts tells nothing about acceptance."""
        if outcome.drafted < 1:
            return
        strict = min(outcome.strict, outcome.accepted, outcome.drafted)
        self._history.observe(strict / outcome.drafted)
        self._rounds.append((outcome.accepted, strict))
        self._since += 1
        self.state = self._next_state(self._history.mean)
        if len(self._rounds) == self._rounds.maxlen:
            self._check_quality()
        self._maybe_move()

    def stop_rule(self) -> StopRule | None:
        return None

    def _next_state(self, mean: float) -> CreditState:
        high, low, slack = self._tau_high, self._tau_low, self._hysteresis
        if mean > high or (self.state is CreditState.HIGH and mean >= high - slack):
            return CreditState.HIGH
        if mean < low or (self.state is CreditState.LOW and mean <= low + slack):
            return CreditState.LOW
        return CreditState.BETWEEN

    def _check_quality(self) -> None:
        """Safety before hysteresis: it does not wait for a refresh."""
        if self._threshold_moves and self.quality < self._delta:
            self._held = True
            self.threshold = self.law.t_min
            self._rounds.clear()
        elif self._held:
            self._held = False
            self._moved_at = None  # the threshold must not wait until the credit moves

    def _maybe_move(self) -> None:
        near = self._moved_at is not None and abs(self.credit - self._moved_at) <= self._hysteresis
        if near or self._since < self._refresh:
            return
        self._since = 0
        self._moved_at = self.credit
        threshold, window = self._guide(self.credit, self.change)
        self.window = self._fit(window)
        if self._threshold_moves and not self._held:
            self.threshold = self.law.clip(threshold)

    def _fit(self, window: float) -> int:
        return min(max(round(window), self._low), self._high)

    def _chosen(self, predictor_wanted: bool) -> Guide:  # noqa: FBT001
        if self.calibration is None:
            return self._default_rule
        weights = self.calibration.predictor
        if weights is None or not predictor_wanted:
            return _by_table(self.calibration.table)
        network = Predictor(weights)
        with np.errstate(all="ignore"):
            corners = [network(r, d) for r in (0.0, 0.5, 1.0) for d in (-1.0, 0.0, 1.0)]
        if not all(math.isfinite(x) for corner in corners for x in corner):
            raise CalibrationError(
                "the calibration's network gives no numbers: run `outrider calibrate` again"
            )

        def predicted(credit: float, change: float) -> tuple[float, float]:
            omega, window = network(credit, change)
            return self.law.threshold(omega, credit), window

        return predicted

    def _default_rule(self, credit: float, change: float) -> tuple[float, float]:  # noqa: ARG002
        window = self._low + credit * (self._high - self._low)
        return self.law.threshold(1.0, credit), window


def _by_table(table: Table) -> Guide:
    return lambda credit, _change: table.lookup(credit)


def _law(facts: ControllerFacts, calibration: Calibration | None) -> ThresholdLaw:
    base = calibration.law if calibration else ThresholdLaw(t_min=T_MIN)
    try:
        return ThresholdLaw(
            t_base=facts.option("t_base", base.t_base, 0.0, LN2),
            alpha=facts.option("alpha", base.alpha, 0.0, 100.0),
            tau_credit=facts.option("tau_credit", base.tau_credit, 0.0, 1.0),
            t_min=facts.option("t_min", base.t_min, 0.0, LN2),
            t_max=facts.option("t_max", base.t_max, 0.0, LN2),
        )
    except ParameterError:
        raise
    except ValueError as error:
        raise ParameterError("controller", str(error)) from None


def _history(facts: ControllerFacts, made: Provenance | None, start: float) -> CreditHistory:
    k = _whole(facts, "k", made.k if made else HISTORY, 1, MAX_MEMORY)
    beta = facts.option("beta", made.beta if made else BETA, 1e-6, 1.0)
    if not _switch(facts, "history"):
        k, beta = 1, 1.0
    return CreditHistory(k=k, beta=beta, start=start)


def _windows(facts: ControllerFacts) -> tuple[int, int]:
    low = _whole(facts, "window_min", 1, 1, MAX_LENGTH)
    high = _whole(facts, "window_max", max(low, facts.max_length), 1, MAX_LENGTH)
    if low > high:
        raise ParameterError("controller", "window_min must be at most window_max")
    return low, high


def _whole(facts: ControllerFacts, name: str, default: int, low: int, high: int) -> int:
    value = facts.option(name, default, low, high)
    if value != int(value):
        raise ParameterError("controller", f"{name} must be a whole number, got {value}")
    return int(value)


def _switch(facts: ControllerFacts, name: str) -> bool:
    return bool(_whole(facts, name, 1, 0, 1))
