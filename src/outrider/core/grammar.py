"""A grammar as a part of a request: its text, and what the sampling pipeline asks of it.

An answer under a grammar is drawn from the model's distribution with every id left out that cannot
go on with the text. Draft and target leave out the same ids, so a draft is judged as always, and
the law of the answer is the target's own under the mask. What is left out hangs on the output ids
alone, never on how they came about: a session that is rebuilt elsewhere from its committed ids
(I4) goes on under the same mask.

The machine that reads grammars is a leaf (`engines.grammar`); here is what it has to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

MAX_GRAMMAR_BYTES: Final = 64 * 1024
"""Longest grammar, UTF-8: the schemas of a large set of tools have less."""


class GrammarKind(StrEnum):
    """What the text of a grammar is written in."""

    JSON_OBJECT = "json_object"
    """Any JSON object; no text."""
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    """Of the whole answer."""
    LARK = "lark"
    """The dialect of llguidance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What the whole text of an answer has to be. Checked by `core.tokens.SamplingParams`, read by
    a `Grammars`."""

    kind: GrammarKind
    text: str = ""


class Allowed(NamedTuple):
    """What may come next."""

    ids: npt.NDArray[np.bool_]
    """bool [vocab_size]: ids whose bytes the text may go on with."""
    end: bool
    """The text may end here."""


class Constraint(Protocol):
    """A grammar at work on one answer."""

    def allowed(self, output: Sequence[int]) -> Allowed:
        """What may follow the output ids, of which none ends the text. A function of them alone;
        fast when they go on from those of the last call, or are a part of them.

        Raises core.sampling.DeadEndError: the ids are not of the grammar, or reading on costs more
        than its limits allow.
        """
        ...

    def fork(self) -> Constraint:
        """Another one of the same grammar, at its beginning."""
        ...


class Grammars(Protocol):
    """Reads grammars for one vocabulary."""

    def constraint(self, grammar: Grammar, owner: str) -> Constraint:
        """A constraint at its beginning. What reading it took is kept for the owner's next answer,
        and shared with nobody else. Raises core.tokens.GrammarError."""
        ...
