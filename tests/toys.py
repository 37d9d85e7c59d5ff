"""A toy pair whose laws remember their rows: most of a test's time went into them."""

from __future__ import annotations

import functools

from outrider.engines.toy import Law, blend_law, random_law, remember

__all__ = ["TARGET", "VOCAB", "draft", "remember"]

VOCAB = 40
"""Vocabulary of the toy pair below; id 0 may serve as its end id."""


TARGET = remember(random_law(1, VOCAB), 2)


@functools.cache
def draft(share: float) -> Law:
    """The target's law, but another one at a `share` of contexts: 0 always right, 1 a stranger."""
    return remember(blend_law(TARGET, random_law(2, VOCAB), share, 3), 3)
