"""Back-pressure: how many unjudged drafts a loaded verifier still wants of a session.

What a draft is worth depends on who else shares the forward. The verifier knows: `worth` is how
many drafts of the session it would judge in a forward like the last ones, if it had them
(control.costs.share_rows). From that a session is told a limit, in steps of a ladder: none, 8,
4, 2, and 0, which means that speculation is off and the cloud streams alone.

Rules:

1. The limit leaves room for twice what is worth judging: some drafts are always on the way.
2. It moves only when what is wanted has differed from it for `DWELL_S`, so a load that hops around
   an edge of the ladder moves nothing (field case 17).
3. Speculation that is off comes back only when a whole draft is worth judging, and goes off when
   less than a quarter of one is.
"""

from __future__ import annotations

from typing import Final

LADDER: Final = (2, 4, 8)
"""Limits between off and none."""
OFF_BELOW: Final = 0.25
ON_ABOVE: Final = 1.0
DWELL_S: Final = 1.0
"""Seconds that a wish must last (our default): thirty forwards of a fast target."""
PROBE: Final = 8
"""Drafts that are tried on paper."""
EVERY_S: Final = 0.1
"""Seconds from one look at the load to the next."""
MEMORY: Final = 0.7
"""Weight kept by earlier looks."""


class Pressure:
    """What one session is told of the load."""

    __slots__ = ("_since", "_worth", "limit")

    def __init__(self) -> None:
        self.limit: int | None = None
        """Told last; None: no limit."""
        self._since: float | None = None
        self._worth: float | None = None

    def judge(self, worth: float, now: float) -> bool:
        """A look at the load: `worth` drafts of this session would be judged. True when `limit`
        has changed and the edge is to be told."""
        known = self._worth
        self._worth = worth if known is None else MEMORY * known + (1.0 - MEMORY) * worth
        wanted = self._wanted(self._worth)
        if wanted == self.limit:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        if now - self._since < DWELL_S:
            return False
        self.limit, self._since = wanted, None
        return True

    def _wanted(self, worth: float) -> int | None:
        if worth < (ON_ABOVE if self.limit == 0 else OFF_BELOW):
            return 0
        return next((step for step in LADDER if step >= 2.0 * worth), None)
