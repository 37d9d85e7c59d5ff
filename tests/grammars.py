"""Grammars of toy ids, which every test can think through: no text, no library."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from outrider.core.grammar import Allowed, Grammar, GrammarKind
from outrider.core.sampling import DeadEndError
from outrider.core.tokens import GrammarError

MARCH = Grammar(kind=GrammarKind.LARK, text="march")
"""Ids go up by 1 to 9, modulo the vocabulary without id 0; the text may end after 5 ids and must
after 30."""
TRAP = Grammar(kind=GrammarKind.LARK, text="trap")
"""Anything for 4 ids, and then nothing at all."""


def march(output: Sequence[int], width: int) -> Allowed:
    ids = np.zeros(width, dtype=bool)
    if len(output) < 30:
        last = output[-1] if output else 0
        ids[[(last + step - 1) % (width - 1) + 1 for step in range(1, 10)]] = True
    return Allowed(ids, len(output) >= 5)


def trap(output: Sequence[int], width: int) -> Allowed:
    ids = np.full(width, len(output) < 4)
    ids[0] = False
    return Allowed(ids, False)


LAWS: dict[str, Callable[[Sequence[int], int], Allowed]] = {"march": march, "trap": trap}


class ToyConstraint:
    def __init__(self, law: Callable[[Sequence[int], int], Allowed], width: int) -> None:
        self.law, self.width = law, width

    def allowed(self, output: Sequence[int]) -> Allowed:
        for i, token in enumerate(output):
            if not self.law(output[:i], self.width).ids[token]:
                raise DeadEndError("not of the grammar")
        return self.law(output, self.width)

    def fork(self) -> ToyConstraint:
        return ToyConstraint(self.law, self.width)


class ToyGrammars:
    """Reads the grammars above. `owners`: who asked."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.owners: list[str] = []

    def constraint(self, grammar: Grammar, owner: str) -> ToyConstraint:
        self.owners.append(owner)
        if grammar.text not in LAWS:
            raise GrammarError("no such toy")
        return ToyConstraint(LAWS[grammar.text], self.width)
