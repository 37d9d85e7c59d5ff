"""What is asked of an edge for one answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from outrider.control.base import ControllerFacts
from outrider.core.relaxation import Relaxation, require_relaxation
from outrider.core.residual import TopKReply, require_ratio
from outrider.core.tokens import ParameterError, Rule, SamplingParams
from outrider.runtime.local import MAX_DRAFT_LENGTH
from outrider.session.schedules import (
    DEFAULT_GROWTH,
    DEFAULT_WINDOW,
    MAX_WINDOW,
    Plan,
    Schedule,
    plan,
)
from outrider.session.window import MAX_GROWTH

MAX_DUE_MS: Final = 3_600_000
"""An hour: whoever can wait longer says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeRequest:
    """One answer to make with the cloud's help."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    rule: Rule = Rule.COUPLED
    schedule: Schedule = Schedule.FREERUN
    draft_length: int = 4
    """K of `sync`, `multiplex`, `hybrid`, `pearl` and `colocated`, the first window of `plc`."""
    window: int = DEFAULT_WINDOW
    """Run-ahead of the streaming schedules; with a controller the most it may ask for."""
    growth: float = DEFAULT_GROWTH
    """eta of `plc`."""
    controller: str = "fixed"
    """Who says how many drafts (`control.registry`); `fixed` is K and W as they stand here."""
    controller_options: Mapping[str, float] = field(default_factory=dict)
    relaxation: Relaxation | None = None
    """For the relaxed rule, which needs it; no other rule may have it."""
    reply: TopKReply = field(default_factory=TopKReply)
    """Ratio rule: how rejections may be answered."""
    due_ms: int = 0
    """Milliseconds within which the next token is wanted: of one login's answers the earliest goes
    first. 0: nothing said."""
    calibration: str | None = None
    """Folder of `outrider calibrate`, for the controllers that use one."""

    def __post_init__(self) -> None:
        if not 1 <= self.draft_length <= MAX_DRAFT_LENGTH:
            raise ParameterError("draft_length", f"must be in [1, {MAX_DRAFT_LENGTH}]")
        if not 1 <= self.window <= MAX_WINDOW:
            raise ParameterError("window", f"must be in [1, {MAX_WINDOW}]")
        require_relaxation(self.rule, self.relaxation)
        require_ratio(self.rule, self.reply)
        if self.controller == "fixed" and self.controller_options:
            raise ParameterError("controller", "fixed has no options: K and W are its own")
        if not 0 <= self.due_ms <= MAX_DUE_MS:
            raise ParameterError("due_ms", f"must be in [0, {MAX_DUE_MS}]")
        if not 0.0 <= self.growth <= MAX_GROWTH:
            raise ParameterError("growth", f"must be in [0, {MAX_GROWTH}]")

    def plan(self) -> Plan:
        """The schedule made concrete. A controller chooses within `window`."""
        # The block of `hybrid` is K under a controller too, which says how far ahead of it to go.
        fixed = self.controller == "fixed" or self.schedule is Schedule.HYBRID
        length = self.draft_length if fixed else self.longest
        return plan(self.schedule, draft_length=length, window=self.window, growth=self.growth)

    @property
    def longest(self) -> int:
        """Most drafts that a controller may ask for."""
        return min(self.window, MAX_DRAFT_LENGTH)

    def facts(self) -> ControllerFacts:
        """What its controller is made with."""
        streaming = self.schedule in (Schedule.STREAM, Schedule.HYBRID, Schedule.FREERUN)
        return ControllerFacts(
            max_length=self.longest,
            fixed_length=min(self.longest if streaming else self.draft_length, self.longest),
            seed=self.params.seed,
            options=dict(self.controller_options),
            calibration=self.calibration,
        )
