"""One residual dialogue with both ends at hand, every frame through the codec."""

from __future__ import annotations

from typing import Final

from outrider.core.draft import NO_DRAFT
from outrider.core.ledger import TvLedger
from outrider.core.residual import TopKReply
from outrider.core.sampling import Distribution
from outrider.core.verify import Rejection
from outrider.proto.codec import decode, encode
from outrider.proto.messages import Correct, Load, Message, Proposals, Row, TopK
from outrider.session.dialogue import Call, Choice, CloudDialogue, EdgeDialogue
from outrider.session.verifier import OpenRejection

SESSION: Final = 1


class Talk:
    """A draft `token` of q that p rejected at `position`: who says what, and how long it is."""

    def __init__(
        self,
        p: Distribution,
        q: Distribution,
        token: int,
        reply: TopKReply,
        *,
        seed: int = 1,
        position: int = 9,
        vocab_size: int | None = None,
    ) -> None:
        """`reply`: its budget is all there is for this one rejection."""
        self.ledger: TvLedger = reply.ledger
        self.frames: list[Message] = []
        """What the cloud sent, as the edge decoded it."""
        self.bytes_down = self.bytes_up = 0
        rejection = Rejection(position=position, token=token, p=p.prob(token), q=q.prob(token))
        self.cloud = CloudDialogue(
            OpenRejection(rejection=rejection, drafted=1, accepted=0, p=p),
            NO_DRAFT,
            start=position,
            epoch=0,
            load=Load(),
            seed=seed,
            vocab_size=len(p.ids) if vocab_size is None else vocab_size,
            reply=reply,
        )
        self.edge = EdgeDialogue(start=position, drafted=1, accepted=0, load=Load(), q=q, seed=seed)

    def run(self) -> Choice:
        """To its end."""
        frame: Message = self.cloud.first(SESSION)
        while True:
            found = self.hear(frame)
            if isinstance(found, Choice):
                left = self.ledger.charged(found.charge).left if found.charge else None
                self._call(Correct(session=SESSION, position=0, token=found.token, left=left))
                return found
            assert isinstance(found, Call), "an honest cloud repeats nothing"
            frame = self.cloud.more(
                self._call(
                    Correct(session=SESSION, position=0, have=found.have, listed=found.listed)
                )
            )

    def hear(self, message: Message) -> Choice | Call | None:
        """The edge hears a frame."""
        raw = encode(message)
        self.bytes_down += len(raw)
        frame = decode(raw)
        self.frames.append(frame)
        match frame:
            case TopK():
                return self.edge.on_list(frame, self.ledger)
            case Proposals():
                return self.edge.on_proposals(frame)
            case Row():
                return self.edge.on_row(frame)
        raise ValueError(f"{type(frame).__name__} is of no dialogue")

    def _call(self, call: Correct) -> Correct:
        raw = encode(call)
        self.bytes_up += len(raw)
        frame = decode(raw)
        assert isinstance(frame, Correct), "what was encoded"
        return frame
