"""Virtual time: a heap of events, chance with an address, and a fingerprint of what happened.

Events at one time come in the order in which they were planned, so a run is a function of its
inputs alone: no clock, no hash order, no global randomness.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
import struct
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from outrider.core import rng

Value = TypeVar("Value")

MAX_STEPS: Final = 50_000_000
"""Events after which a run counts as one that never ends: an hour of the largest scenario."""


class RestlessError(Exception):
    """The world does not come to rest: a fault of the machines, never of a scenario."""


class Chance:
    """A stream of numbers at an address: the SplitMix64 stream of (seed, address)."""

    __slots__ = ("_state",)

    def __init__(self, seed: int, *address: int) -> None:
        state = seed & rng.MASK
        for part in address:
            state = rng.mix((state + (part + 1) * rng.GOLDEN) & rng.MASK)
        self._state = state

    def uniform(self) -> float:
        """In [0, 1)."""
        self._state = (self._state + rng.GOLDEN) & rng.MASK
        return (rng.mix(self._state) >> 11) * 2.0**-53

    def below(self, count: int) -> int:
        """In 0..count - 1, count >= 1."""
        return int(self.uniform() * count)

    def between(self, low: int, high: int) -> int:
        """In low..high, both ends included."""
        return low + self.below(high - low + 1)

    def choice(self, values: Sequence[Value]) -> Value:
        return values[self.below(len(values))]

    def exponential(self, mean: float) -> float:
        return -mean * math.log1p(-self.uniform())


class Heap:
    """What happens when. `now`: seconds since the world began."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._hash = hashlib.blake2b(digest_size=8)
        self._wishes = 0

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Do it at `when`; at once, behind what is planned for now, if that is past."""
        heapq.heappush(self._heap, (max(when, self.now), next(self._count), call))

    def later(self, when: float, call: Callable[[], None]) -> None:
        """Like `at`, and the world is not at rest before it happened."""
        self._wishes += 1

        def wish() -> None:
            self._wishes -= 1
            call()

        self.at(when, wish)

    @property
    def wishes(self) -> int:
        """Things planned with `later` that have not happened yet."""
        return self._wishes

    def note(self, kind: bytes, what: bytes = b"") -> None:
        """Put an event into the fingerprint."""
        self._hash.update(struct.pack("<d", self.now) + kind + what)

    @property
    def fingerprint(self) -> str:
        """Hex digest of every event noted, with its time."""
        return self._hash.hexdigest()

    def run(
        self,
        until: float = math.inf,
        *,
        rest: Callable[[], bool] = lambda: False,
        steps: int = MAX_STEPS,
    ) -> None:
        """Run events up to and at `until` (seconds), or until `rest` says that all is done.

        Raises RestlessError after `steps` events."""
        for _ in range(steps):
            if not self._heap or self._heap[0][0] > until:
                if until < math.inf:
                    self.now = max(self.now, until)
                return
            if rest():
                return
            self.now, _, call = heapq.heappop(self._heap)
            self.events += 1
            call()
        raise RestlessError(f"no rest after {steps} events, at {self.now:.3f} s")
