"""Toy pairs in one process: laws, drafters of every kind, a tokenizer of whole pieces."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from outrider.core.draft import Draft, StopRule
from outrider.core.relaxation import Relaxation
from outrider.core.tokens import Rule, SamplingParams
from outrider.engines.base import LanguageModel
from outrider.engines.drafters import Drafter, ModelDrafter
from outrider.engines.toy import Law, ToyModel, blend_law, random_law
from outrider.runtime.local import GenerationRequest, GenerationResult, LocalGenerator
from toys import remember


class Pieces:
    """A stand-in tokenizer: id to text, possibly of several characters."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = tuple(pieces)

    def decode(self, ids: list[int]) -> str:
        return "".join(self.pieces[i] for i in ids)

    def text_stream(self) -> PieceStream:
        return PieceStream(self.pieces)

    def ids(self, *pieces: str) -> tuple[int, ...]:
        return tuple(self.pieces.index(piece) for piece in pieces)


class PieceStream:
    def __init__(self, pieces: tuple[str, ...]) -> None:
        self._pieces = pieces

    def push(self, token: int) -> str:
        return self._pieces[token]

    def flush(self) -> str:
        return ""


class HalfCharacters(PieceStream):
    """Gives out text one token late, as a byte tokenizer does within a character."""

    def __init__(self, pieces: tuple[str, ...]) -> None:
        super().__init__(pieces)
        self._late = ""

    def push(self, token: int) -> str:
        text, self._late = self._late, self._pieces[token]
        return text

    def flush(self) -> str:
        text, self._late = self._late, ""
        return text


def letters(width: int) -> Pieces:
    return Pieces([chr(ord("A") + i) for i in range(width)])


class Saying:
    """A drafter that says what it is told to: `guess(committed, count)`. Coupled rule only."""

    name = "saying"

    def __init__(self, guess: Callable[[Sequence[int], int], Sequence[int]]) -> None:
        self.guess = guess
        self.open_sessions = 0

    def session(
        self,
        prompt_length: int,
        params: SamplingParams,
        rule: Rule,
        *,
        sketch: int = 16,
        constraint: object = None,
    ) -> Saying:
        assert rule is Rule.COUPLED
        self.open_sessions += 1
        return self

    def propose(self, committed: Sequence[int], count: int, stop: StopRule | None = None) -> Draft:
        return Draft(tokens=tuple(self.guess(committed, count))[:count])

    def close(self) -> None:
        self.open_sessions -= 1


def generator(
    target: Law | LanguageModel,
    drafter: Drafter | Law | None = None,
    *,
    width: int,
    tokenizer: Pieces | None = None,
    **model: object,
) -> LocalGenerator:
    """A generator on a toy target; a law as drafter becomes a toy model that drafts."""
    if not isinstance(target, ToyModel):
        target = ToyModel(target, vocab_size=width, **model)
    if callable(drafter):
        drafter = ModelDrafter("toy", model=ToyModel(drafter, vocab_size=width, **model))
    return LocalGenerator(target, tokenizer or letters(width), drafter)


def ask(
    made: LocalGenerator,
    prompt: Sequence[int],
    params: SamplingParams | None = None,
    *,
    k: int = 4,
    rule: Rule = Rule.COUPLED,
    **changes: object,
) -> GenerationResult:
    params = dataclasses.replace(params or SamplingParams(), **changes)
    request = GenerationRequest(
        prompt_ids=tuple(prompt),
        params=params,
        draft_length=k,
        rule=rule,
        relaxation=Relaxation() if rule is Rule.RELAXED else None,
    )
    return made.generate(request)


def drafters(law: Law, width: int, own: Sequence[int], **model: object) -> dict[str, Drafter]:
    """Drafters of every kind for a target of this law whose own ids (prompt included) are
    `own`. Laws may look at the last two ids."""

    def toy(of: Law, **more: object) -> ToyModel:
        return ToyModel(of, vocab_size=width, **{**model, **more})

    def ahead(wrong: Callable[[int], bool]) -> Saying:
        def guess(committed: Sequence[int], count: int) -> list[int]:
            at = range(len(committed), min(len(committed) + count, len(own)))
            return [(own[i] + wrong(i)) % width for i in at]

        return Saying(guess)

    half = blend_law(law, remember(random_law(77, width, order=1), 1), 0.5, 5)
    return {
        "same": ModelDrafter("same", model=toy(law)),
        "random": ModelDrafter("random", model=toy(remember(random_law(99, width, order=1), 1))),
        "half right": ModelDrafter("half", model=toy(half)),
        "always wrong": ahead(lambda i: True),
        "right then wrong": ahead(lambda i: i % 3 == 0),
        "lookup": ModelDrafter("lookup", lookup=True),
        "lookup+model": ModelDrafter("both", model=toy(half), lookup=True),
        "reduced": ModelDrafter(
            "reduced", model=toy(law, support=np.arange(0, width, 2, dtype=np.int64))
        ),
    }


KINDS = tuple(drafters(lambda c: np.zeros(4, dtype=np.float32), 4, ()))
