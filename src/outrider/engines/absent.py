"""A model that runs elsewhere: known by its facts, never run here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from outrider.engines.base import Block, EngineError, FloatRow, IdArray, ModelInfo


class AbsentModel:
    """A LanguageModel of which only `info` works: what an edge knows of the cloud's target."""

    def __init__(self, info: ModelInfo) -> None:
        self._info = info

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def support(self) -> IdArray | None:
        return None

    @property
    def passes(self) -> int:
        return 0

    def _refuse(self) -> NoReturn:
        raise EngineError(f"{self._info.name} was not loaded here: it runs in the cloud")

    def open(self) -> int:
        self._refuse()

    def close(self, slot: int) -> None:  # noqa: ARG002
        self._refuse()

    def tokens(self, slot: int) -> tuple[int, ...]:  # noqa: ARG002
        self._refuse()

    def length(self, slot: int) -> int:  # noqa: ARG002
        self._refuse()

    def truncate(self, slot: int, length: int) -> None:  # noqa: ARG002
        self._refuse()

    def copy_prefix(self, source: int, target: int, length: int) -> None:  # noqa: ARG002
        self._refuse()

    def forward(self, blocks: Sequence[Block]) -> list[FloatRow]:  # noqa: ARG002
        self._refuse()
