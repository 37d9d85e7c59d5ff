"""Engines that fail on purpose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from outrider.engines.base import Block, FloatRow
from outrider.engines.toy import ToyModel


@contextmanager
def fails(
    model: ToyModel, error: BaseException, *, call: int = 1, after: int | None = None
) -> Iterator[None]:
    """Inside, forward number `call` from now (from 1) raises `error`, the others work.

    `after`: that many tokens of the first block are in the slot by then, as when a pass breaks
    off in the middle; None: nothing has happened yet.
    """
    real, calls = model.forward, 0

    def forward(blocks: Sequence[Block]) -> list[FloatRow]:
        nonlocal calls
        calls += 1
        if calls != call:
            return real(blocks)
        if after:
            first = blocks[0]
            part = Block(slot=first.slot, start=first.start, tokens=first.tokens[:after], rows=0)
            real([part])
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "forward", forward)
        yield


@contextmanager
def refuses_truncation(model: ToyModel, error: BaseException) -> Iterator[None]:
    """Inside, the model cannot cut a slot: nothing about its slots can be trusted."""

    def truncate(slot: int, length: int) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "truncate", truncate)
        yield
