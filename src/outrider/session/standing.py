"""How one session of an edge stands with the cloud that the present connection leads to: what that
cloud knows of it, whether it can have it at all, and how it is put to it."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace
from typing import Final

from outrider.core.tokens import ParameterError, Rule
from outrider.proto.connection import Connection
from outrider.proto.messages import Code, Open, Resume
from outrider.session.cloud import StepPolicy
from outrider.session.edge import RETRY_AFTER, EdgeSession
from outrider.session.schedules import Plan
from outrider.session.wire import relax_to_wire, to_wire

STALLED_AFTER: Final = 3 * RETRY_AFTER
"""Seconds without a word about a session after which the connection is doubted, however alive it
looks. A prefill that takes longer costs a RESUME now and then, nothing else."""


class Phase(enum.Enum):
    """What the present connection's cloud knows of a session."""

    NEW = "new"
    """Nothing, on any connection."""
    LOST = "lost"
    """Perhaps: an earlier connection carried it."""
    STALE = "stale"
    """It said that it does not: OPEN with the committed tokens."""
    RESUMING = "resuming"
    RUNNING = "running"
    """OPEN was sent, or RESUME was answered."""


PHASES: Final[dict[Phase, dict[str, Phase]]] = {
    Phase.NEW: {"OPEN sent": Phase.RUNNING},
    Phase.LOST: {"RESUME sent": Phase.RESUMING},
    Phase.STALE: {"OPEN sent": Phase.RUNNING},
    Phase.RESUMING: {
        "OPENED": Phase.RUNNING,
        "refused": Phase.STALE,
        "cut": Phase.LOST,
    },
    Phase.RUNNING: {"OPENED": Phase.RUNNING, "refused": Phase.STALE, "cut": Phase.LOST},
}
"""What moves a session at the edge from phase to phase; anything else leaves it where it is.
refused: ERROR `unknown-session` or `digest`, `draining`, or `busy` once text was shown."""


@dataclass(slots=True)
class Standing:
    """One session of an edge, and how it stands with the cloud."""

    session: EdgeSession
    plan: Plan
    rule: Rule
    uid: bytes
    due_ms: int = 0
    phase: Phase = Phase.NEW
    accepted: bool = False
    """Some cloud answered OPENED."""
    faults: int = 0
    """Refusals in a row without a committed token."""
    heard: float = 0.0
    """Seconds: when this connection last said something about the session, or it joined."""
    not_before: float = 0.0
    """Seconds: when a busy cloud may be asked again."""
    complete_at: float | None = None
    """Seconds: when the last token was committed."""
    steered: StepPolicy | None = None
    """The step policy that the present connection's cloud was told last; None: not known."""

    opened_at: float | None = None
    """Seconds: when OPEN was sent on a connection that was up."""
    swayed: bool = False
    """A STEER was ever sent."""
    turn: int = 0
    """Of its last drafting job, or of its arrival (session.turns)."""
    drafted: bool = False
    """It had a drafting job."""

    @property
    def step(self) -> StepPolicy:
        """The step policy wanted now."""
        if self.session.paused:
            return StepPolicy.WAIT
        return StepPolicy.STEP if self.session.window.alone else self.plan.step

    def move(self, event: str) -> None:
        self.phase = PHASES[self.phase].get(event, self.phase)

    @property
    def joined(self) -> bool:
        """The present connection carries it."""
        return self.phase in (Phase.RESUMING, Phase.RUNNING)

    @property
    def stalls_at(self) -> float:
        """When (seconds) its silence is too long."""
        silent = self.joined and not self.session.paused
        return self.heard + STALLED_AFTER if silent else math.inf

    def hindrance(self, connection: Connection) -> tuple[Code, str] | None:
        """Why it cannot be opened on this connection; None: it can."""
        sequence, limit = self.session.generation.sequence, connection.limits.prompt_tokens
        if sequence.base > limit:
            return Code.TOO_LARGE, f"{sequence.base} ids, the verifier takes {limit}"
        peer = connection.peer
        if peer is None:
            return None
        if self.plan.cloud_draft and not peer.drafts:
            return (
                Code.PARAMETER,
                "this verifier has no draft of its own for the colocated schedule: start it with "
                "--draft, or choose another schedule",
            )
        grammar = self.session.generation.params.grammar
        if grammar is not None and grammar.kind not in peer.grammars:
            return (
                Code.GRAMMAR,
                "this verifier cannot hold an answer to a grammar: install outrider[grammar] there",
            )
        try:
            self.session.generation.fit(peer.context_length)
        except ParameterError as error:
            return Code.CONTEXT, str(error)
        return None

    def opening(self) -> Open:
        """Put to a cloud that does not know it, with what is committed."""
        session, sequence = self.session, self.session.generation.sequence
        relaxation = session.relaxation
        return Open(
            session=session.number,
            uid=self.uid,
            prompt=sequence.committed[: sequence.prompt_length],
            committed=sequence.output,
            sampling=to_wire(session.generation.params),
            rule=self.rule.value,
            step=self.step.value,
            take=self.plan.take.value,
            cloud_draft=self.plan.cloud_draft,
            held=bool(sequence.tail),
            relax=relax_to_wire(relaxation.policy, session.ledger) if relaxation else None,
            top_k_reply=session.reply.k,
            tv_left=session.tv.left,
            due_ms=self.due_ms,
        )

    def resuming(self) -> Resume:
        """Put to a cloud that may know it."""
        session = self.session
        return Resume(
            session=session.number,
            uid=self.uid,
            base=session.generation.sequence.base,
            digest=session.prefix_digest,
        )

    def shrink(self, limit: int) -> None:
        """Its window to what both sides hold."""
        policy = self.plan.window
        window = min(policy.window, limit)
        self.session.window.policy = replace(
            policy,
            window=window,
            chunk=max(1, min(policy.chunk, window)),
            reach=min(policy.reach, limit),
        )
