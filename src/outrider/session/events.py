"""What becomes of an edge's sessions and its link, as their driver is told (session.client)."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.tokens import FinishReason
from outrider.proto.messages import Code
from outrider.session.generation import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Tokens were committed. `step.finish` set: the answer is complete."""

    session: int
    step: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The session is over and forgotten here."""

    session: int
    reason: FinishReason
    confirmed: bool
    """The cloud's DONE carried the digest of the very same ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The session is over without a complete answer; what was committed stays valid."""

    session: int
    code: Code
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUp:
    """The cloud greeted. `attempts`: dials it took."""

    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkQuiet:
    """Tokens are awaited, and the cloud has not even answered a PING. Seconds."""

    since: float
    dead_at: float
    """When the link will count as dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkHeard:
    """The cloud that was quiet is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkDown:
    """The link is gone, or an attempt to get one has failed."""

    reason: str
    redial_at: float | None
    """Seconds: of the next attempt; None: nothing needs it."""
    attempts: int = 0
    """That failed since a cloud last greeted."""
    gives_up_at: float | None = None
    """Seconds: when the sessions fail; None: there are none."""


Event = Progress | Ended | Failed | LinkUp | LinkQuiet | LinkHeard | LinkDown
