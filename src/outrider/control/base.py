"""What a controller is: told facts, asked one question (docs/controllers.md).

A controller says how many drafts may be unjudged: the block length K of the synchronous loop,
the window of the streaming schedules. 0 means "do not speculate now": the cloud then streams
alone. It is a small object: facts arrive through `observe`, one question is asked with
`decide`, time and randomness are arguments, and a new one is one file and one line in
`control.registry`.

Rules:

1. `decide` depends on what was told and on its arguments alone; asking twice is harmless.
2. Every `Outcome` carries the `Decision` it came from, so that requests running side by side
   may share one controller: it outlives a request and goes on learning.
3. Only facts a live edge has: times it measured, verdicts it got, drafts it made. What nobody
   can know live (`oracle`) is for the bench and says so.
4. Statistics forget: links drift, texts change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from outrider.control.costs import PrefixCurve, RowCosts
from outrider.core.draft import StopRule
from outrider.core.tokens import ParameterError

MAX_LENGTH: Final = 64
"""Most drafts a controller may ask for in one block; the schedule's own window caps it too."""


class CalibrationError(ValueError):
    """A stored table, predictor or head that cannot be used; the message names the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """The present best knowledge of link, engines and acceptance (`control.estimators`).

    Times are seconds. All are finite and >= 0 whatever was fed in: a fact that is not known yet
    stands at a stated default.
    """

    round_trip: float
    """Network alone: a round trip less queue and forward."""
    queue: float = 0.0
    """Wait for the target engine, per round."""
    draft: float
    """t_d: one draft token."""
    draft_start: float = 0.0
    """What a drafting job costs before its first token."""
    verify: RowCosts
    """t_v(rows); `verify.seconds(1)` is a plain step of the target, t_ar."""
    curve: PrefixCurve
    """S(k), by the strict rule."""
    byte_up: float = 0.0
    """Seconds a byte takes upwards (1 / bandwidth)."""
    byte_down: float = 0.0
    credit: float = 0.5
    """r: smoothed strict acceptance of recent windows (E2-SCI; docs/papers.md, 1)."""
    credit_change: float = 0.0
    """r(t) - r(t-1)."""
    delay_state: int = 0
    """Which of the known delay levels the link is in now, 0 the shortest."""
    delay_levels: tuple[float, ...] = ()
    """The known levels of `round_trip`, ascending; `delay_state` counts along them."""
    informed: bool = False
    """Link and target were measured before the first round: nothing but acceptance and the draft's
    own cost stands at a default."""
    rounds: int = 0
    """Rounds these rest on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The question: how many drafts now?"""

    now: float
    """Seconds, monotonic."""
    room: int
    """Most drafts of any use: what is left of the answer, the window and both contexts."""
    estimates: Estimates
    opening: bool = False
    """The session is about to be opened: nothing has been heard of it yet, and 0 lets the cloud
    begin alone until it has."""
    free: bool = False
    """The cloud never waits for drafts (free-run): those that come late cost no time, so there is
    no length that is too long and no reason to stop."""
    streaming: bool = False
    """Drafts go out while others are unjudged: `length` is then a window, and a round trip is
    paid once and not a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The answer."""

    length: int
    """Most unjudged drafts; 0: do not speculate."""
    threshold: float | None = None
    """T of the relaxed rules (nats of JSD); None: the rule's own default."""
    credit: float | None = None
    """r that it rests on, in [0, 1], where the policy has one; shown and nothing else."""

    def __post_init__(self) -> None:
        if not 0 <= self.length <= MAX_LENGTH:
            raise ValueError(f"length {self.length} is not in [0, {MAX_LENGTH}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one round came to."""

    decision: Decision
    drafted: int
    """Drafts judged (a block cut short by a stop rule has fewer than were asked for)."""
    accepted: int
    """Leading drafts that stand, by the rule in force."""
    strict: int
    """Leading drafts that stand by the strict rule; credit is computed from these alone."""
    tokens: int
    """Tokens committed: accepted + 1, fewer at the end of an answer."""
    seconds: float
    """From the start of drafting to the verdict."""
    delay_state: int = 0
    """`Estimates.delay_state` when the decision was taken."""


class Controller(Protocol):
    """See the module docstring."""

    name: str

    def decide(self, observation: Observation) -> Decision: ...

    def observe(self, outcome: Outcome, now: float) -> None:
        """A round ended at `now` (seconds)."""
        ...

    def stop_rule(self) -> StopRule | None:
        """For the next block; None: draft all that was decided."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerFacts:
    """What a controller may be made with: only what it asks for is used."""

    max_length: int = 16
    """Largest length it may choose."""
    fixed_length: int = 4
    """K of `fixed`, and where the learners begin."""
    seed: int = 0
    """Of the policies that draw lots (`exp3`)."""
    delays: Sequence[float] = ()
    """Known levels of the round trip, seconds, ascending; for delay states. Empty: learnt."""
    options: dict[str, float] = field(default_factory=dict)
    """Options of the policy by name; an unknown name is an error that lists the known ones."""
    draft: str = ""
    """Name of the draft model in use."""
    calibration: str | None = None
    """A calibration folder (`outrider calibrate`), where the policy needs one."""

    def refuse_options(self, *known: str) -> None:
        """Raises ParameterError for an option that the policy does not have."""
        for name in self.options:
            if name not in known:
                has = f"it has {', '.join(known)}" if known else "it has none"
                raise ParameterError("controller", f"no option {name!r}: {has}")

    def option(self, name: str, default: float, low: float, high: float) -> float:
        """A number in [low, high], the default when it is not given."""
        value = self.options.get(name, default)
        if not low <= value <= high:  # also catches NaN
            raise ParameterError("controller", f"{name} must be in [{low}, {high}], got {value}")
        return value
