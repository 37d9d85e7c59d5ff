"""What relaxing costs one answer, as its edge hears of it (relaxed rule)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.core.ledger import Ledger
from outrider.core.relaxation import Relaxation
from outrider.core.tokens import Origin, ParameterError
from outrider.proto.codec import MAX_BLOCK
from outrider.proto.errors import RemoteError
from outrider.proto.messages import Code, Done, Marks, Relaxed


class Charges:
    """The cloud's ledger, which only ever grows, and which tokens it is of."""

    def __init__(self, number: int, relaxation: Relaxation | None) -> None:
        """None: nothing may be relaxed."""
        self.ledger = relaxation.ledger if relaxation else Ledger()
        self._number = number
        self._relaxation = relaxation
        self._marked: set[int] = set()

    def verdict(self, frame: Relaxed, origins: list[Origin]) -> int:
        """Mark the tokens and keep the ledger; the drafts that the strict rule had accepted."""
        self.require("a relaxed verdict")
        for i in frame.marks:
            origins[i] = Origin.RELAXED
        self._charge(frame)
        return frame.strict

    def marks(self, frame: Marks, base: int) -> None:
        """Which of the next tokens, from position `base` on, are relaxed, and what they cost."""
        self._charge(frame)
        self._marked |= {p for p in frame.positions if base <= p < base + MAX_BLOCK}

    def origins(self, positions: Sequence[int]) -> tuple[Origin, ...]:
        """Of tokens that came without a verdict. Marks are for the next tokens only."""
        found = tuple(Origin.RELAXED if p in self._marked else Origin.TARGET for p in positions)
        self._marked.clear()
        return found

    def done(self, frame: Done) -> None:
        """The whole answer's."""
        if self._relaxation is not None:
            self._charge(frame)

    def require(self, what: str) -> None:
        """Raises RemoteError where nothing may be relaxed: `what` is then the peer's mistake."""
        if self._relaxation is None:
            raise RemoteError(Code.STATE, f"{what} nobody asked for", self._number)

    def _charge(self, frame: Relaxed | Marks | Done) -> None:
        before = self.ledger
        try:
            self.ledger = replace(
                before,
                spent=max(before.spent, frame.spent),
                max_jsd=max(before.max_jsd, frame.max_jsd),
            )
        except ParameterError as error:
            raise RemoteError(Code.STATE, f"the ledger: {error}", self._number) from None
