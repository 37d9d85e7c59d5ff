"""Drafting for several sessions at once: one forward a token over one block of each.

A session that can (`Stepwise`) says which block it needs a row behind and goes on from the row;
those of a batch go in step and leave as they end, others are asked one after the other. What is
drafted is what would be drafted alone as far as rows are the same in company: to the bit with an
engine that says `deterministic`, and where the products do not change with the number of rows
(int8 on a CPU up to `distilled.SHARED_ROWS`; tests hold it for the shipped drafts). No text hangs
on it: coupled, the draft decides nothing; ratio, q is the very row that was drawn from.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from outrider.core.draft import Draft, StopRule
from outrider.engines.base import Block, FloatRow, LanguageModel

if TYPE_CHECKING:
    from outrider.engines.drafters import DraftSession

Steps = Generator[Block, FloatRow, Draft]
"""A block being drafted: yields what to feed, is sent the one row behind it, returns the draft."""


@runtime_checkable
class Stepwise(Protocol):
    """What a draft session may have beside `DraftSession`: going in step with others."""

    @property
    def model(self) -> LanguageModel | None:
        """Runs its blocks; None: it yields none."""
        ...

    def steps(self, committed: Sequence[int], count: int, stop: StopRule | None = None) -> Steps:
        """As `propose`, one forward after the other."""
        ...


class Ask(NamedTuple):
    """One session's part of a batch; the arguments of `DraftSession.propose`."""

    session: DraftSession
    committed: Sequence[int]
    count: int
    stop: StopRule | None = None


def advance(steps: Steps, row: FloatRow | None) -> Block | Draft:
    """The next block, or the draft they end in."""
    try:
        return next(steps) if row is None else steps.send(row)
    except StopIteration as end:
        draft: Draft = end.value
        return draft


def propose_together(asks: Sequence[Ask]) -> Iterator[tuple[int, Draft | Exception]]:
    """Draft for several sessions in lock-step: (place in `asks`, its draft or why there is none),
    each as soon as it is done. A session occurs once. What fails fails alone: where a shared
    forward raises, each block is tried by itself."""
    waiting: dict[int, tuple[LanguageModel, Steps, Block]] = {}
    for i, ask in enumerate(asks):
        session = ask.session
        steps = None
        if len(asks) > 1 and isinstance(session, Stepwise) and session.model is not None:
            steps = session.steps(ask.committed, ask.count, ask.stop)
            outcome = _advanced(steps, None)
            if isinstance(outcome, Block):
                waiting[i] = session.model, steps, outcome
                continue
        else:
            outcome = _tried(ask)
        yield i, outcome
    while waiting:
        rows = _rows({i: (model, block) for i, (model, _, block) in waiting.items()})
        for i, row in rows.items():
            model, steps, _ = waiting.pop(i)
            outcome = row if isinstance(row, Exception) else _advanced(steps, row)
            if isinstance(outcome, Block):
                waiting[i] = model, steps, outcome
            else:
                yield i, outcome


def _tried(ask: Ask) -> Draft | Exception:
    try:
        return ask.session.propose(ask.committed, ask.count, ask.stop)
    except Exception as error:  # noqa: BLE001 - told to whom it concerns, and to nobody else
        return error


def _advanced(steps: Steps, row: FloatRow | None) -> Block | Draft | Exception:
    try:
        return advance(steps, row)
    except Exception as error:  # noqa: BLE001 - as above
        return error


def _rows(blocks: dict[int, tuple[LanguageModel, Block]]) -> dict[int, FloatRow | Exception]:
    """The row behind each block, one forward a model."""
    models = {id(model): model for model, _ in blocks.values()}
    found: dict[int, FloatRow | Exception] = {}
    for model in models.values():
        mine = {i: block for i, (owner, block) in blocks.items() if owner is model}
        found |= _forward(model, mine)
    return found


def _forward(model: LanguageModel, blocks: dict[int, Block]) -> dict[int, FloatRow | Exception]:
    try:
        rows = model.forward(list(blocks.values()))
    except Exception as error:  # noqa: BLE001 - a failed forward leaves every slot as it was
        if len(blocks) == 1:
            return dict.fromkeys(blocks, error)
        alone = [_forward(model, {i: block}) for i, block in blocks.items()]
        return {i: row for part in alone for i, row in part.items()}
    return {i: row[0] for i, row in zip(blocks, rows, strict=True)}
