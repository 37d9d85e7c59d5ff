"""A draft: ids somebody guessed, and what the ratio rule must know about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from outrider.core.sampling import Distribution
from outrider.core.sparse import Sketch


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Drafted ids for consecutive positions.

    `q[i]` is the very probability `tokens[i]` was drawn with and `rows[i]` the distribution it
    came from; both are empty when the rule needs neither (coupled). Rows stay at the edge, so a
    draft that came over the wire has q without rows.
    """

    tokens: tuple[int, ...] = ()
    q: tuple[float, ...] = ()
    rows: tuple[Distribution, ...] = ()
    sketches: tuple[Sketch, ...] = ()
    """Relaxed rules: what tokens[i] was drawn from, as the cloud is told."""

    def __post_init__(self) -> None:
        parts = (self.q, self.rows, self.sketches)
        if any(part and len(part) != len(self.tokens) for part in parts):
            raise ValueError(
                f"{len(self.tokens)} tokens, {len(self.q)} probabilities, {len(self.rows)} rows, "
                f"{len(self.sketches)} sketches"
            )

    def __len__(self) -> int:
        return len(self.tokens)


NO_DRAFT = Draft()
"""Nothing drafted: the target decodes alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSignal:
    """What the draft engine knows after drawing a token; for rules that stop a block early."""

    index: int
    """Place in the block, 0 the first."""
    probability: float
    """q(x) of the token drawn."""
    entropy: float
    """Of q, nats."""
    hidden: npt.NDArray[np.float32] | None = None
    """The draft model's last hidden state [width], where it has one to show."""


class StopRule(Protocol):
    """Ends a block early. Used on the draft engine's thread: it holds no shared state."""

    needs_hidden: bool

    def start(self) -> None:
        """A new block begins."""
        ...

    def stop(self, signal: DraftSignal) -> bool:
        """Was this token (which stays in the block) the last one worth drafting?"""
        ...
