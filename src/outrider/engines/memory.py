"""Memory that ran out, whoever says so, as one error that names what to do."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from outrider.engines.base import NoMemoryError

_SAID: Final = re.compile(r"out of memory|can't allocate memory|ALLOC_FAILED", re.IGNORECASE)
"""By torch on CUDA, torch on the CPU, and CUDA's own libraries; each of them in a RuntimeError."""
_AMOUNT: Final = re.compile(
    r"(?:tried to|unable to) allocate (\d+(?:\.\d+)?)\.? ?(bytes|[kMGTPE]?i?B)", re.IGNORECASE
)
"""All that is taken over of another library's words."""


def ran_out(error: BaseException) -> bool:
    """Does it say that no memory was left?"""
    told = isinstance(error, RuntimeError) and _SAID.search(str(error))
    return isinstance(error, MemoryError) or bool(told)


@contextmanager
def memory_named(model: str) -> Iterator[None]:
    """Inside, memory that runs out is a NoMemoryError of `model`'s."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        # The failed pass left tensors in its frames, which the next try could not have.
        traceback.clear_frames(error.__traceback__)
        amount = _AMOUNT.search(str(error))
        asked = f" (it asked for {amount[1]} {amount[2]} more)" if amount else ""
        raise NoMemoryError(
            f"{model} ran out of memory{asked}; shorter prompts need less, and so do fewer answers "
            "at once (outrider cloud --slots)"
        ) from None
