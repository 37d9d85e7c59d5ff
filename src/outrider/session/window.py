"""How far one session drafts ahead of what is judged.

The policy is the schedule's. Within it three have a say: the controller (session.pilot), the cloud
where it has no time for drafts (session.pressure), and what good blocks have earned (`growth`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from outrider.session.pilot import Judged, Pilot

MAX_GROWTH: Final = 4.0
"""Largest eta: five times the window on one good block is beyond any use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPolicy:
    """How many unjudged drafts may exist, and in what portions they are made and sent."""

    window: int
    """Most unjudged drafts; 0: never draft."""
    chunk: int
    """Drafts made (and sent) at a time."""
    wait_empty: bool = False
    """Draft only when nothing is outstanding: the plain synchronous loop."""
    asks: bool = True
    """Ask for a step when there is no draft to send (the cloud waits for drafts)."""
    lead: int = 0
    """So many drafts of an empty window go ahead alone (pre-hit, PEARL and E2-SCI: a block whose
    first token falls is known to be lost before the rest is made); 0: no difference."""
    growth: float = 0.0
    """eta: a block that stands whole while others are under way lets the window grow by the
    factor 1 + eta, a rejection brings it back (E2-SCI's W * prod(1 + eta_j))."""
    reach: int = 0
    """Most drafts that a grown window may hold; 0: it does not grow."""

    def __post_init__(self) -> None:
        if self.window < 0 or self.chunk < 1 or self.lead < 0 or self.reach < 0:
            raise ValueError(f"{self}")
        if not 0.0 <= self.growth <= MAX_GROWTH:
            raise ValueError(f"growth={self.growth} is not in [0, {MAX_GROWTH}]")

    @property
    def most(self) -> int:
        """Most unjudged drafts there can ever be."""
        return max(self.window, self.reach)


class Window:
    """One session's, as it is now."""

    def __init__(self, policy: WindowPolicy, pilot: Pilot) -> None:
        self.policy = policy
        self.limit: int | None = None
        """Most unjudged drafts that the cloud wants; None: no limit."""
        self.alone = False
        """The controller found that speculation does not pay, or the cloud that it has no time for
        drafts: the cloud should stream alone."""
        self.newest = policy.window
        """As it was when it was last asked for."""
        self._pilot = pilot
        self._grown = 1.0

    def most(self, useful: int, now: float) -> int:
        """Most unjudged drafts now, where `useful` of the policy's window would be of use."""
        policy = self.policy
        limit = policy.most if self.limit is None else self.limit
        window = self._pilot.length(now, min(useful, limit))
        self.alone = useful > 0 and window == 0
        if policy.reach and window:
            window = min(int(window * self._grown), max(policy.reach, window), limit)
        self.newest = window
        return window

    def judged(self, judged: Judged) -> None:
        """A block's verdict is in force: the window grows, or comes back."""
        if judged.accepted < judged.drafted:
            self._grown = 1.0
        elif judged.drafted and self.policy.reach:
            self._grown = min(self._grown * (1.0 + self.policy.growth), float(self.policy.reach))
