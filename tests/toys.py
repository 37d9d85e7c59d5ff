"""Toy laws that remember their rows: a law is pure, and most of a test's time went into it."""

from __future__ import annotations

import functools

from outrider.engines.base import FloatRow
from outrider.engines.toy import Law, blend_law, random_law

VOCAB = 40
"""Vocabulary of the toy pair below; id 0 may serve as its end id."""


def remember(law: Law, order: int) -> Law:
    """The same law, which must depend on the last `order` ids alone."""
    rows: dict[tuple[int, ...], FloatRow] = {}

    def known(context: tuple[int, ...]) -> FloatRow:
        key = context[-order:]
        row = rows.get(key)
        if row is None:
            row = rows[key] = law(context)
        return row

    return known


TARGET = remember(random_law(1, VOCAB), 2)


@functools.cache
def draft(share: float) -> Law:
    """The target's law, but another one at a `share` of contexts: 0 always right, 1 a stranger."""
    return remember(blend_law(TARGET, random_law(2, VOCAB), share, 3), 3)
