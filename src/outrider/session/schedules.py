"""Schedules: one row of two policies each (docs/architecture.md, Schedules).

No pipeline is a loop of its own. A schedule says how the edge fills its window and when the
cloud runs a forward; everything else is the same machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from outrider.session.cloud import StepPolicy, Take
from outrider.session.window import WindowPolicy

MAX_WINDOW: Final = 256
"""Most unjudged drafts of a session: two seconds ahead of a fast draft model."""
DEFAULT_WINDOW: Final = 16
"""Run-ahead of the streaming schedules (our default): enough to cover a 100 ms round trip at
6 ms a draft."""


DEFAULT_GROWTH: Final = 0.25
"""eta of `plc` (our default: the paper gives the product, not the factors)."""


class Schedule(StrEnum):
    """Names as users write them."""

    SYNC = "sync"
    PEARL = "pearl"
    PLC = "plc"
    STREAM = "stream"
    MULTIPLEX = "multiplex"
    HYBRID = "hybrid"
    FREERUN = "freerun"
    CLOUD_ONLY = "cloud-only"
    COLOCATED = "colocated"
    EDGE_ONLY = "edge-only"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A schedule made concrete."""

    window: WindowPolicy
    step: StepPolicy
    take: Take
    cloud_draft: int = 0
    """Drafts a block made by the cloud itself (co-located speculation); 0: none."""


STREAMING: Final = frozenset(
    {Schedule.STREAM, Schedule.HYBRID, Schedule.FREERUN, Schedule.PEARL, Schedule.PLC}
)
"""Schedules whose drafts go out while others are unjudged."""
ROUNDS: Final = frozenset({Schedule.SYNC, Schedule.MULTIPLEX})
"""Schedules that draft K and wait for the verdict."""


def plan(
    schedule: Schedule, *, draft_length: int, window: int, growth: float = DEFAULT_GROWTH
) -> Plan:
    """The two policies of a schedule.

    `draft_length`: K of the synchronous loops, the first window of `plc`. `window`: run-ahead of
    the streaming ones. `growth`: eta of `plc`. Raises ValueError for EDGE_ONLY, which needs no
    cloud and no plan.

    Several requests share the draft engine by `session.turns`, whatever their schedules; so
    `multiplex` is the synchronous loop of each, drafted by turns, and `hybrid` adds what a request
    may draft ahead when nobody's confirmed prefix waits.
    """
    match schedule:
        case Schedule.SYNC:
            edge = WindowPolicy(window=draft_length, chunk=max(draft_length, 1), wait_empty=True)
            return Plan(window=edge, step=StepPolicy.WAIT, take=Take.ALL)
        case Schedule.PEARL:
            # Post-verify is one block under way while the next is made; pre-verify is the lead.
            edge = WindowPolicy(window=2 * draft_length, chunk=draft_length, lead=1)
            return Plan(window=edge, step=StepPolicy.WAIT, take=Take.ALL)
        case Schedule.PLC:
            edge = WindowPolicy(
                window=draft_length, chunk=draft_length, lead=1, growth=growth, reach=window
            )
            return Plan(window=edge, step=StepPolicy.WAIT, take=Take.ALL)
        case Schedule.STREAM:
            edge = WindowPolicy(window=window, chunk=1)
            return Plan(window=edge, step=StepPolicy.WAIT, take=Take.BEST)
        case Schedule.MULTIPLEX:
            # What is outstanding is many requests' blocks: a loaded cloud may judge fewer of each,
            # and the rest of a block with the next forward.
            edge = WindowPolicy(window=draft_length, chunk=max(draft_length, 1), wait_empty=True)
            return Plan(window=edge, step=StepPolicy.WAIT, take=Take.BEST)
        case Schedule.HYBRID:
            # Ahead token by token: a prefix that is confirmed meanwhile waits for one at most.
            edge = WindowPolicy(window=max(window, draft_length), chunk=1, lead=draft_length)
            return Plan(window=edge, step=StepPolicy.WAIT, take=Take.BEST)
        case Schedule.FREERUN:
            edge = WindowPolicy(window=window, chunk=1, asks=False)
            return Plan(window=edge, step=StepPolicy.STEP, take=Take.BEST)
        case Schedule.CLOUD_ONLY:
            edge = WindowPolicy(window=0, chunk=1, asks=False)
            return Plan(window=edge, step=StepPolicy.STEP, take=Take.ALL)
        case Schedule.COLOCATED:
            edge = WindowPolicy(window=0, chunk=1, asks=False)
            return Plan(window=edge, step=StepPolicy.STEP, take=Take.ALL, cloud_draft=draft_length)
        case Schedule.EDGE_ONLY:
            raise ValueError("edge-only runs without a cloud")
