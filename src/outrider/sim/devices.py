"""Machines of a simulation: how long their engines take, and engines that need no weights.

The scripted pair is the cheapest one there is: the target's token is a function of its position,
and a guess equals it when a model of acceptance says so. Everything between the two engines is the
real thing, so what is simulated is time and luck, not the protocol.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from outrider.control.costs import RowCosts
from outrider.core import rng
from outrider.core.draft import Draft, StopRule
from outrider.core.grammar import Constraint
from outrider.core.relaxation import DEFAULT_SKETCH
from outrider.core.sampling import Distribution
from outrider.core.tokens import Rule, SamplingParams
from outrider.engines.base import Block, FloatRow
from outrider.engines.slotbook import SlotRecord
from outrider.engines.toy import ToyModel
from outrider.sim.acceptance import Acceptance

VOCABULARY: Final = 64
"""Ids of the scripted pair: each is one byte on the wire, which is corrected for (sim.world)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a forward had to do."""

    rows: int
    sessions: int
    context: int
    """Ids held by all its sessions together."""
    taken_in: int = 0
    """Ids fed that no row was asked for: prompts, rebuilds."""
    drafted: int = 0
    """Drafts the cloud made first: those of the longest block, as blocks are made side by side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudTimes:
    """t_v(rows, sessions, context), and what else a verifier's engine spends. Seconds."""

    verify: tuple[tuple[int, float], ...]
    """(rows, seconds) of one session's forward: a table, linear in between and beyond."""
    session: float = 0.0
    """For each further session of a forward."""
    context: float = 0.0
    """For each id of context."""
    prefill: float = 0.0
    """For each id taken in."""
    draft: float = 0.0
    """t_d' of a draft of the cloud's own."""
    start: float = 0.0
    """Before a forward begins: event loop, frames, the engine's thread."""
    _rows: dict[int, float] = field(default_factory=dict, repr=False)

    def rows(self, rows: int) -> float:
        """t_v(rows) of one session."""
        known = self._rows.get(rows)
        if known is None:
            known = self._rows[rows] = RowCosts(self.verify).seconds(rows)
        return known

    def seconds(self, load: Load) -> float:
        return (
            self.rows(max(1, load.rows))
            + self.session * max(0, load.sessions - 1)
            + self.context * load.context
            + self.prefill * load.taken_in
            + self.draft * load.drafted
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeTimes:
    """What a drafting job takes. Seconds."""

    draft: float
    """t_d: one token."""
    start: float = 0.0
    """Before the first token of a job."""
    prefill: float = 0.0
    """For each id of a prompt, once."""
    beside: float | None = None
    """For each further session that drafts in step; None: as much as alone, so company gains
    nothing."""

    def seconds(self, count: int, prompt: int = 0) -> float:
        """`count` tokens of one session; `prompt`: ids that the job has to read first."""
        return self.start + self.draft * count + self.prefill * prompt

    def step(self, sessions: int) -> float:
        """One token of each of so many sessions, in step."""
        beside = self.draft if self.beside is None else self.beside
        return self.draft + beside * (sessions - 1)


def fit_line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(seconds, seconds a row) of the line nearest to measured (rows, seconds), neither below 0.
    Raises ValueError without points."""
    if not points:
        raise ValueError("nothing to fit")
    rows, times = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    spread = float(((rows - rows.mean()) ** 2).sum())
    slope = float(((rows - rows.mean()) * times).sum()) / spread if spread else 0.0
    slope = max(0.0, slope)
    base = float(times.mean() - slope * rows.mean())
    if base < 0.0:  # through the origin
        return 0.0, float((rows * times).sum() / (rows * rows).sum())
    return base, slope


# ------------------------------------------------------------------------- the scripted pair


@functools.cache
def scripted(position: int) -> int:
    """The target's token at a position."""
    return rng.mix(position * rng.GOLDEN & rng.MASK) % VOCABULARY


_CERTAIN: Final = np.where(np.eye(VOCABULARY, dtype=bool), 30.0, -30.0).astype(np.float32)
"""Rows of logits, one for each token that is certain."""


class ScriptedTarget(ToyModel):
    """Certain of `scripted(n)` at every position n, whatever the text."""

    def __init__(self, *, context_length: int) -> None:
        super().__init__(
            lambda context: _CERTAIN[scripted(len(context))],
            vocab_size=VOCABULARY,
            name="scripted",
            context_length=context_length,
        )

    def _rows(self, slot: SlotRecord, block: Block) -> FloatRow:
        """Without looking at the ids."""
        end = len(slot.ids) + len(block.tokens)
        return _CERTAIN[[scripted(n) for n in range(end - block.rows + 1, end + 1)]]


@functools.cache
def _certain(token: int) -> Distribution:
    ids = np.array([token], dtype=np.int64)
    return Distribution(ids, np.zeros(1, dtype=np.float32), rng.token_offsets(ids))


class ScriptedDrafter:
    """Guesses that stand as a model of acceptance says. The seed of a request is its number."""

    name = "model"

    def __init__(self, acceptance: Acceptance) -> None:
        self._acceptance = acceptance

    def session(
        self,
        prompt_length: int,
        params: SamplingParams,
        rule: Rule,
        *,
        sketch: int = DEFAULT_SKETCH,  # noqa: ARG002
        constraint: Constraint | None = None,  # noqa: ARG002
    ) -> ScriptedDrafts:
        return ScriptedDrafts(
            self._acceptance, params.seed, prompt_length, needs_q=rule is Rule.RATIO
        )


class ScriptedDrafts:
    """A draft session of one request."""

    def __init__(
        self, acceptance: Acceptance, request: int, prompt_length: int, *, needs_q: bool
    ) -> None:
        self.depth = 0
        """Guesses not judged yet at the end of the context of the next job; its driver knows."""
        self._acceptance = acceptance
        self._request = request
        self._prompt = prompt_length
        self._needs_q = needs_q

    def propose(self, committed: Sequence[int], count: int, stop: StopRule | None = None) -> Draft:
        """All `count` of them: a stop rule has nothing to look at here."""
        del stop
        first = len(committed)
        tokens = tuple(self._guess(first + i, self.depth + i) for i in range(max(0, count)))
        if not self._needs_q:
            return Draft(tokens=tokens)
        return Draft(tokens=tokens, q=(1.0,) * len(tokens), rows=tuple(map(_certain, tokens)))

    def _guess(self, position: int, depth: int) -> int:
        right = self._acceptance.stands(self._request, position - self._prompt, depth)
        return scripted(position) if right else (scripted(position) + 1) % VOCABULARY

    def close(self) -> None:
        """It holds nothing."""
