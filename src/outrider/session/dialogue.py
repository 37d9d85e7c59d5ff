"""The residual dialogue of a rejection (ratio rule), the part of either side.

Rules:

1. The cloud begins: with a TOPK where the edge wished for lists and one may be of use, else with
   PROPOSALS. Every later frame answers a CORRECT without a token.
2. What is asked for depends on p, q, the wish and what is left of the budget, never on a draw that
   is still to be made; every draw has an address. So a dialogue that begins anew (RESUME, another
   verifier) takes the same way to the same token (I4).
3. The cloud keeps p and three small numbers, the edge the ids listed so far (I7): what was sent is
   not remembered but made again.
4. The steps only go down: lists, proposals, the whole row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from outrider.core import draft as core_draft
from outrider.core import rng
from outrider.core.ledger import TvLedger
from outrider.core.residual import (
    Listed,
    ListError,
    Listing,
    TopKReply,
    listed,
    listing,
    next_end,
    worth_sending,
)
from outrider.core.sampling import Distribution, RowError
from outrider.core.verify import (
    Proposal,
    ResidualStep,
    batch_after,
    batch_at,
    choose,
    proposal_step,
    propose,
    residual_draw,
)
from outrider.proto.errors import RemoteError
from outrider.proto.messages import Code, Correct, Load, Proposals, Row, TopK
from outrider.session.verifier import OpenRejection

MAX_CALLS: Final = 256
"""Most answers in one dialogue: a dozen steps on each of the links an edge tries (session.client),
and some. Beyond that nobody asks who means to get a token (I5)."""
_DENSE_FROM: Final = 0.8
"""Share of the vocabulary from which a row goes without its ids: an id costs a byte at least,
beside the four of a weight."""

Reply = TopK | Proposals | Row


class CloudDialogue:
    """A rejection whose residual is being drawn at the edge; see the module docstring."""

    def __init__(
        self,
        opened: OpenRejection,
        draft: core_draft.Draft,
        *,
        start: int,
        epoch: int,
        load: Load,
        seed: int,
        vocab_size: int,
        reply: TopKReply,
    ) -> None:
        """`start`: position of the block. `reply`: K, and what is left of the budget."""
        self.opened = opened
        self.draft = draft
        self.load = load
        self.step = ResidualStep.FIRST_PROPOSALS
        """Which step was sent last."""
        self._start = start
        self._epoch = epoch
        self._seed = seed
        self._vocab_size = vocab_size
        self._reply = reply
        self._calls = 0

    @property
    def position(self) -> int:
        return self.opened.rejection.position

    def first(self, session: int) -> Reply:
        """How the dialogue begins, or begins anew."""
        if self._reply.k:
            part = listing(self.opened.p, 0, self._reply.k)
            if worth_sending(part, self._reply.budget):
                return self._listed(session, 0, part)
        return self._proposals(session, 0)

    def more(self, call: Correct) -> Reply:
        """The answer to a call for more. Raises RemoteError on one that no honest edge makes."""
        self._calls += 1
        if self._calls > MAX_CALLS:
            raise RemoteError(Code.STATE, "this rejection was asked about too often", call.session)
        if call.listed:
            return self._further(call.session, call.listed)
        batch = batch_after(call.have)
        if batch is None:
            return self._row(call.session)
        return self._proposals(call.session, batch)

    def _further(self, session: int, known: int) -> TopK:
        end = next_end(known)
        part = listing(self.opened.p, known, end) if self._reply.k and end > known else None
        if part is None or not len(part.ids):
            raise RemoteError(Code.STATE, f"there is no list behind {known} ids", session)
        return self._listed(session, known, part)

    def _listed(self, session: int, first: int, part: Listing) -> TopK:
        self.step = ResidualStep.LARGER_K if first else ResidualStep.TOP_K
        return TopK(
            session=session,
            epoch=self._epoch,
            start=self._start,
            drafted=self.opened.drafted,
            accepted=self.opened.accepted,
            first=first,
            ids=tuple(part.ids.tolist()),
            weights=part.weights.astype("<f4").tobytes(),
            log_total=part.log_total,
            rest=part.rest,
            load=self.load,
        )

    def _proposals(self, session: int, batch: int) -> Proposals:
        start, count = batch_at(self.opened.rejection, batch)
        self.step = proposal_step(start)
        drawn = propose(
            self.opened.p, seed=self._seed, position=self.position, start=start, count=count
        )
        return Proposals(
            session=session,
            epoch=self._epoch,
            start=self._start,
            drafted=self.opened.drafted,
            accepted=self.opened.accepted,
            first=start,
            tokens=tuple(y.token for y in drawn),
            p=tuple(y.p for y in drawn),
            load=self.load,
        )

    def _row(self, session: int) -> Row:
        self.step = ResidualStep.FULL_ROW
        p = self.opened.p
        possible = np.flatnonzero(p.weights > -np.inf)
        ids, weights = p.ids[possible], p.weights[possible].astype("<f4")
        if len(ids) < _DENSE_FROM * self._vocab_size:
            listed_ids = tuple(ids.tolist())
            return Row(
                session=session, position=self.position, ids=listed_ids, weights=weights.tobytes()
            )
        dense = np.full(int(ids[-1]) + 1, -np.inf, dtype="<f4")
        dense[ids] = weights
        return Row(session=session, position=self.position, ids=None, weights=dense.tobytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A token of the residual, and what the draw is charged."""

    token: int
    step: ResidualStep
    charge: float = 0.0
    """0: drawn from the exact residual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """More is needed."""

    have: int = 0
    listed: int = 0


@dataclass(slots=True)
class EdgeDialogue:
    """A rejection as the edge sees it, and what it knows of p. Each method takes one frame and
    says what comes of it; None: a repetition of what is known."""

    start: int
    drafted: int
    accepted: int
    load: Load
    q: Distribution
    """What the rejected draft was drawn from."""
    seed: int
    known: Listed | None = None

    @property
    def position(self) -> int:
        return self.start + self.accepted

    def on_list(self, frame: TopK, ledger: TvLedger) -> Choice | Call | None:
        """Raises RemoteError for numbers that are no part of a distribution."""
        if frame.first == 0:
            self.known = None
        if frame.first != (len(self.known) if self.known else 0):
            return None
        part = Listing(
            ids=np.array(frame.ids, dtype=np.int64),
            weights=np.frombuffer(frame.weights, dtype="<f4").astype(np.float32),
            log_total=frame.log_total,
            rest=frame.rest,
        )
        try:
            known = self.known = listed(part, self.known)
        except ListError as error:
            raise RemoteError(Code.MALFORMED, str(error), frame.session) from None
        bound = known.bound(self.q)
        if bound is not None and (bound == 0.0 or ledger.fits(bound)):
            step = ResidualStep.LARGER_K if frame.first else ResidualStep.TOP_K
            return Choice(token=self._residual(known.p), step=step, charge=bound)
        if known.after(self.q, ledger) is ResidualStep.LARGER_K:
            return Call(listed=len(known))
        return Call(have=0)

    def on_proposals(self, frame: Proposals) -> Choice | Call:
        batch = [Proposal(token=t, p=p) for t, p in zip(frame.tokens, frame.p, strict=True)]
        token = choose(batch, self.q, seed=self.seed, position=self.position, start=frame.first)
        if token is None:
            return Call(have=frame.first + len(batch))
        return Choice(token=token, step=proposal_step(frame.first))

    def on_row(self, frame: Row) -> Choice:
        """Raises RemoteError for numbers that are no distribution."""
        weights = np.frombuffer(frame.weights, dtype="<f4").astype(np.float32)
        ids = np.arange(len(weights)) if frame.ids is None else np.array(frame.ids, dtype=np.int64)
        try:
            if not len(ids):
                raise RowError("a row of no ids")
            p = Distribution(ids, weights, rng.token_offsets(ids))
        except RowError as error:
            raise RemoteError(Code.MALFORMED, str(error), frame.session) from None
        return Choice(token=self._residual(p), step=ResidualStep.FULL_ROW)

    def _residual(self, p: Distribution) -> int:
        return residual_draw(p, self.q, seed=self.seed, position=self.position)
