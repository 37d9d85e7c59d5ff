"""Drafts that no verdict has reached yet, and the frames they travel in.

The ids are the tail of the sequence; what goes with them stands here beside them: q and its row
under the ratio rule, a sketch under the relaxed one. A frame that is made twice is the same frame.
"""

from __future__ import annotations

from typing import Final

from outrider.core import draft as core_draft
from outrider.core.relaxation import Relaxation
from outrider.core.sampling import Distribution
from outrider.core.sequence import SpeculativeSequence
from outrider.core.sparse import Sketch
from outrider.core.tokens import Rule
from outrider.proto.messages import Draft

FRAME_BYTES: Final = 6
"""What a DRAFT frame is long without its ids, about: a controller is told sizes, not counts."""
ID_BYTES: Final = 3
Q_BYTES: Final = 8
SKETCH_BYTES: Final = 9
SKETCH_ID_BYTES: Final = 4


class Outbox:
    """Of one session."""

    def __init__(
        self, number: int, sequence: SpeculativeSequence, rule: Rule, relaxation: Relaxation | None
    ) -> None:
        self.needs_q = rule is Rule.RATIO
        self.sent = 0
        """Drafts of the tail that are on their way."""
        self._number = number
        self._sequence = sequence
        self._relaxation = relaxation
        self._rows: list[tuple[float, Distribution]] = []
        self._sketches: list[Sketch] = []

    def add(self, draft: core_draft.Draft, known: int) -> None:
        """Fresh drafts behind the tail; the first `known` of them are there already."""
        self._sequence.extend(draft.tokens[known:])
        if self.needs_q:
            self._rows.extend(zip(draft.q[known:], draft.rows[known:], strict=True))
        if self._relaxation is not None:
            self._sketches.extend(draft.sketches[known:])

    def settle(self, count: int) -> None:
        """The first ones are committed."""
        del self._rows[:count], self._sketches[:count]
        self.sent = max(0, self.sent - count)

    def drop(self) -> None:
        """The tail is void."""
        self._rows.clear()
        self._sketches.clear()
        self.sent = 0

    def row(self, place: int) -> Distribution:
        """What the draft at this place of the tail was drawn from."""
        return self._rows[place][1]

    def unsent(self, threshold: float | None) -> Draft | None:
        """A frame of all that has not been sent; it counts as sent. `threshold`: T to judge it by,
        where that is the controller's."""
        first, tail = self.sent, self._sequence.tail
        if first >= len(tail):
            return None
        self.sent = len(tail)
        tokens = tail[first:]
        q = tuple(q for q, _ in self._rows[first : first + len(tokens)]) if self.needs_q else ()
        sketches = tuple(self._sketches[first : first + len(tokens)])
        return Draft(
            session=self._number,
            epoch=self._sequence.epoch,
            start=self._sequence.base + first,
            tokens=tokens,
            q=q,
            sketches=sketches,
            threshold=threshold if sketches else None,
        )

    def call(self) -> Draft:
        """A frame without drafts: it asks for a step of the target alone."""
        sequence = self._sequence
        return Draft(session=self._number, epoch=sequence.epoch, start=sequence.base, tokens=())

    def size(self, count: int) -> int:
        """Bytes of a frame of so many drafts, about."""
        each = ID_BYTES + Q_BYTES * self.needs_q
        if self._relaxation is not None:
            each += SKETCH_BYTES + SKETCH_ID_BYTES * self._relaxation.sketch
        return FRAME_BYTES + count * each
