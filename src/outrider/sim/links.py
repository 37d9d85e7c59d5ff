"""Links between an edge and its cloud: `core.link`, and what changes while it runs.

The transport is a stream, so nothing is reordered or repeated: a packet that is lost or overtaken
on the way shows as a pause of everything behind it (`loss`, `jitter`). What can happen besides:

* levels: the round trip jumps between a few values, a Markov chain in time;
* an outage: nothing arrives for a while, and the first retransmission behind it brings what waited;
* a cut: the connection breaks, what was under way is lost (`World.cut`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from outrider.core.link import MIN_RTO_S, Link, Path
from outrider.sim.events import Chance

WAYS: Final = ("up", "down")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """A link and what it goes through. Seconds."""

    link: Link = field(default_factory=Link)
    levels: tuple[float, ...] = ()
    """Round trips that the link jumps between; empty: `link.rtt_s` always."""
    switch: float = 0.1
    """Probability to leave a level, each `every`."""
    every: float = 0.1
    outages: tuple[tuple[float, float], ...] = ()
    """(begin, length), ascending, apart."""

    def held(self, when: float) -> float:
        """When something that would happen at `when` happens, outages considered."""
        for begin, length in self.outages:
            back = begin + length + MIN_RTO_S
            if begin <= when < back:
                return back
        return when


class Levels:
    """The chain of round trips of one edge's link."""

    def __init__(self, conditions: Conditions, chance: Chance) -> None:
        self._conditions = conditions
        self._chance = chance
        self._states: list[int] = []

    def at(self, now: float) -> float:
        """Round trip at `now`, seconds."""
        levels = self._conditions.levels
        if not levels:
            return self._conditions.link.rtt_s
        while len(self._states) <= math.floor(now / self._conditions.every):
            self._states.append(self._next())
        return levels[self._states[math.floor(now / self._conditions.every)]]

    def _next(self) -> int:
        count = len(self._conditions.levels)
        if not self._states:
            return self._chance.below(count)  # the stationary law
        if count == 1 or self._chance.uniform() >= self._conditions.switch:
            return self._states[-1]
        step = 1 + self._chance.below(count - 1)
        return (self._states[-1] + step) % count


class Wire:
    """One connection's two directions."""

    def __init__(self, conditions: Conditions, levels: Levels, chance: Chance) -> None:
        self._conditions = conditions
        self._levels = levels
        self._uniform = chance.uniform
        self._paths: Mapping[str, Path] = {
            "up": conditions.link.up(),
            "down": conditions.link.down(),
        }
        self._newest = dict.fromkeys(WAYS, 0.0)

    def arrival(self, way: str, size: int, now: float, extra: float = 0.0) -> float:
        """When a frame of `size` bytes sent at `now` is delivered, seconds; `extra`: held up for so
        long on the way, with everything behind it."""
        path, conditions = self._paths[way], self._conditions
        if conditions.levels:
            trip = self._levels.at(now)
            path.delay_s = trip / 2
            path.rto_s = trip + max(MIN_RTO_S, 4 * conditions.link.jitter_s)
        sent = conditions.held(now)
        arrives = conditions.held(path.arrival(size, sent, self._uniform) + extra)
        self._newest[way] = max(self._newest[way], arrives)
        return self._newest[way]

    def newest(self, way: str) -> float:
        """When the newest frame of a direction arrives."""
        return self._newest[way]

    def trip(self, now: float) -> float:
        """The round trip now, seconds."""
        return self._levels.at(now)
