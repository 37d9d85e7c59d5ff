"""Whose turn it is on the one draft engine of an edge.

Rules:

1. One batch is out at a time. When it is done, those go next that would draft now, up to a limit.
2. Confirmed prefixes (no unjudged drafts of that session) before running ahead: a batch holds one
   of the two kinds. So the engine runs ahead only when it would idle otherwise, and is never idle
   while any session may draft.
3. Within a kind the session whose last turn (or arrival) lies furthest back goes first, and a batch
   is the head of that queue. Fairness: between two turns of a session that wanted one all along,
   any other session had at most one of the same kind. So with n confirmed prefixes ready a turn
   comes within n batches, whoever arrives meanwhile. Running ahead may wait for ever, but every
   verdict makes a confirmed prefix of it: no request starves.
4. A session's first job goes alone. It reads the whole prompt, which no forward shares, and the
   others of a batch are to be timed by what drafting costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

MAX_DRAFT_BATCH: Final = 8
"""Most sessions that draft in lock-step: as many rows as a pass of the shipped drafts takes
(measured, one core, `bench/draft_batch.py`: a token in company of 8 costs .35-.41 of one alone; a
batch of 16 is two passes and gains nothing more)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A session that would draft now."""

    number: int
    ahead: bool
    """Drafts of it are unjudged."""
    turn: int
    """The batch of its last job, or the last one before it arrived."""
    fresh: bool = False
    """It had no job yet."""


def choose(ready: Sequence[Ready], limit: int = MAX_DRAFT_BATCH) -> tuple[int, ...]:
    """Numbers of the sessions that make the next batch, first come first; none of none."""
    order = sorted(ready, key=lambda r: (r.ahead, r.turn, r.number))
    head = list(takewhile(lambda r: not r.fresh and r.ahead is order[0].ahead, order))
    return tuple(r.number for r in head[:limit] or order[:1])
