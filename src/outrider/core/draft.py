"""A draft: ids somebody guessed, and what the ratio rule must know about them."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.sampling import Distribution


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

    def __post_init__(self) -> None:
        if any(part and len(part) != len(self.tokens) for part in (self.q, self.rows)):
            raise ValueError(
                f"{len(self.tokens)} tokens, {len(self.q)} probabilities, {len(self.rows)} rows"
            )

    def __len__(self) -> int:
        return len(self.tokens)


NO_DRAFT = Draft()
"""Nothing drafted: the target decodes alone."""
