"""The edge's side of residual dialogues (ratio rule; the rules stand in session.dialogue).

Of one session at most one rejection is open, and what it comes to is a token, drawn here.
"""

from __future__ import annotations

from outrider.core.residual import TopKReply
from outrider.core.tokens import Origin
from outrider.core.verify import ResidualStep, proposal_step
from outrider.proto.codec import encode
from outrider.proto.errors import RemoteError
from outrider.proto.messages import Code, Correct, Proposals, Row, TopK
from outrider.session.dialogue import Call, Choice, EdgeDialogue
from outrider.session.generation import Generation
from outrider.session.outbox import Outbox


class Corrections:
    """Of one session."""

    def __init__(
        self, number: int, generation: Generation, outbox: Outbox, reply: TopKReply
    ) -> None:
        self.tv = reply.ledger
        """What truncated residuals have cost, of the tokens committed here."""
        self.open: EdgeDialogue | None = None
        self.chosen: Choice | None = None
        """The token that the open dialogue came to."""
        self._number = number
        self._generation = generation
        self._outbox = outbox
        self._reply = reply

    def hear(self, frame: Proposals | TopK | Row) -> Correct | None:
        """A frame of the dialogue; the answer to it, and `chosen` where that is a token. None: it
        repeats what is known."""
        match frame:
            case Row():
                dialogue = self.open
                if dialogue is None or frame.position != dialogue.position:
                    return None
                step: ResidualStep = ResidualStep.FULL_ROW
                found: Choice | Call | None = dialogue.on_row(frame)
            case TopK():
                dialogue = self._begun(frame)
                step = ResidualStep.LARGER_K if frame.first else ResidualStep.TOP_K
                found = dialogue.on_list(frame, self.tv)
            case Proposals():
                dialogue = self._begun(frame)
                step = proposal_step(frame.first)
                found = dialogue.on_proposals(frame)
        if found is None:
            return None
        answer = self._answer(dialogue, found)
        self._generation.counters.exchanged(
            step.value, down=len(encode(frame)), up=len(encode(answer))
        )
        if isinstance(found, Choice):
            self.chosen = found
        return answer

    def require_wish(self) -> None:
        """Raises RemoteError where no lists were wished for."""
        if not self._reply.k:
            raise RemoteError(Code.STATE, "a list nobody asked for", self._number)

    def _begun(self, frame: Proposals | TopK) -> EdgeDialogue:
        """The dialogue that the frame is of."""
        sequence = self._generation.sequence
        sent = frame.epoch == sequence.epoch and frame.accepted < len(sequence.tail)
        if not sent or not self._outbox.needs_q:
            raise RemoteError(Code.STATE, "rejection of a draft that was never sent", self._number)
        known = self.open
        if known is None or known.accepted != frame.accepted:
            known = self.open = EdgeDialogue(
                start=frame.start,
                drafted=frame.drafted,
                accepted=frame.accepted,
                load=frame.load,
                q=self._outbox.row(frame.accepted),
                seed=self._generation.params.seed,
            )
        # A verifier that rebuilt the session may have judged a longer block.
        known.drafted, known.load = frame.drafted, frame.load
        return known

    def _answer(self, dialogue: EdgeDialogue, found: Choice | Call) -> Correct:
        number, position = self._number, dialogue.position
        if isinstance(found, Call):
            return Correct(session=number, position=position, have=found.have, listed=found.listed)
        left = self.tv.charged(found.charge).left if found.charge else None
        return Correct(session=number, position=position, token=found.token, left=left)

    def again(self) -> Correct | None:
        """The token that was chosen and has not come back yet, as it was said."""
        if self.open is None or self.chosen is None:
            return None
        return self._answer(self.open, self.chosen)

    def tokens(self) -> tuple[tuple[int, ...], tuple[Origin, ...]]:
        """What is committed by the choice: the drafts that stand, and the token in place of the
        one that fell."""
        assert self.open is not None, "a choice is made in a dialogue"
        assert self.chosen is not None, "it has been made"
        accepted, choice = self.open.accepted, self.chosen
        last = Origin.TRUNCATED if choice.charge else Origin.CORRECTION
        drafts = self._generation.sequence.tail[:accepted]
        return (*drafts, choice.token), (*[Origin.DRAFT] * accepted, last)

    def close(self) -> None:
        """Tokens were committed: whatever was open is settled."""
        self.open = self.chosen = None
