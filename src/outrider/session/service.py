"""All sessions of one verifier, sans I/O: who is connected, what runs next, who is answered.

Rules:

1. A session belongs to a tenant. Nobody reaches another tenant's session, by number or by uid.
2. A connection that is lost detaches its sessions; they wait `grace` seconds for RESUME, then go.
   Whoever comes later opens anew with the committed tokens (I4).
3. A batch takes ready sessions in the order in which they became ready, up to a row budget.
   A session is in at most one batch; results are matched by key, never by place (field case 11).
   One whose prompt is only partly in (no rows came) runs again, behind those that became ready
   meanwhile (field case 33).
4. At a limit the answer is `busy`, before anything is registered (I7). Registering and freeing
   are one unit each: there is no path on which one half happens (field case 32).
5. Hot frames for a session that is gone are dropped and counted: they crossed its end on the
   wire.
6. OPEN and RESUME are idempotent: a repeated one for a session that already runs under that
   number is answered like the first. Another session under a number in use is refused with
   `duplicate-session`, and the one that runs is not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from outrider.control.costs import RowCosts, SharedCosts, share_rows
from outrider.core.draft import Draft as CoreDraft
from outrider.core.ledger import Ledger
from outrider.core.relaxed import Policy
from outrider.core.tokens import ParameterError, Rule, SamplingParams
from outrider.proto.errors import RemoteError
from outrider.proto.messages import (
    Cancel,
    Code,
    Correct,
    Draft,
    Error,
    Load,
    Message,
    Open,
    Opened,
    Resume,
    Steer,
)
from outrider.session.cloud import CloudSession, StepPolicy, Take, VerifyJob
from outrider.session.generation import Generation, TextStream
from outrider.session.verifier import Verifier
from outrider.session.wire import from_wire, relax_from_wire, reply_from_wire

MAX_CLOUD_DRAFT: Final = 64
"""Most drafts a block that a co-located session may ask for."""
UID_BYTES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """Facts of the target and limits of the service. Every limit has a name (I7)."""

    vocab_size: int
    context_length: int
    eos: frozenset[int]
    deterministic: bool
    rules: frozenset[Rule] = frozenset(Rule)
    max_sessions: int = 256
    max_sessions_per_connection: int = 64
    max_window: int = 256
    max_prompt_tokens: int = 1_000_000
    max_batch_rows: int = 64
    """Most rows in one batch: bounds how long everybody waits for one forward."""
    grace: float = 30.0
    """Seconds a detached session is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A message for a connection."""

    connection: int
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One session's part of a batch, for the engine side."""

    key: int
    """Names the session's cache slot for as long as the session lives."""
    job: VerifyJob
    params: SamplingParams
    rule: Rule
    prompt_length: int
    cloud_draft: int
    """Draft this many here first (co-located speculation); 0: judge job.drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The engine's answer to one Work: rows, float32 [drafts + 1, vocab], and drafts made here.
    Rows of shape [0, ...]: committed ids are still missing in the slot, the work is to be run
    again."""

    key: int
    rows: npt.NDArray[np.float32]
    fed: int
    """Tokens the forward appended for this session: more than rows in a prefill or rebuild."""
    draft: CoreDraft | None = None


@dataclass(slots=True)
class _Entry:
    key: int
    tenant: str
    uid: bytes
    session: CloudSession
    connection: int | None
    params: SamplingParams
    rule: Rule
    cloud_draft: int
    lost_at: float = 0.0
    fed_at: float = 0.0
    """When a piece of its prompt was last taken in (seconds)."""
    dead: bool = False

    @property
    def turn(self) -> float:
        """Since when (seconds) it has waited for the forward that comes."""
        return max(self.session.ready_at, self.fed_at)


@dataclass(slots=True)
class _Peer:
    tenant: str
    keys: dict[int, int] = field(default_factory=dict)
    """Session number to key."""


class CloudService:
    """See the module docstring."""

    def __init__(
        self, config: ServiceConfig, text: Callable[[], TextStream], costs: RowCosts | None = None
    ) -> None:
        """`text`: makes a fresh text stream of the target's tokenizer, for stop strings."""
        self.config = config
        self.costs = costs or RowCosts()
        """Of one session alone in a forward."""
        self._sharing = SharedCosts()
        self.late_frames = 0
        """Hot frames that came for sessions already gone."""
        self.forwards = 0
        self.released: list[int] = []
        """Keys whose cache slot the driver may free; it empties the list."""
        self._text = text
        self._peers: dict[int, _Peer] = {}
        self._entries: dict[int, _Entry] = {}
        self._by_uid: dict[tuple[str, bytes], int] = {}
        self._next_key = 0
        self._running: dict[int, _Entry] = {}
        self._blocked: set[int] = set()
        self._draining = False

    # ---------------------------------------------------------------- connections

    @property
    def sessions(self) -> int:
        """Sessions held, detached ones included."""
        return len(self._entries)

    @property
    def unfinished(self) -> int:
        return sum(e.session.finish is None for e in self._entries.values())

    def connected(self, connection: int, tenant: str) -> None:
        self._peers[connection] = _Peer(tenant=tenant)

    def disconnected(self, connection: int, now: float) -> None:
        """The link went: its sessions are detached, finished ones too (DONE may be lost)."""
        self._blocked.discard(connection)
        peer = self._peers.pop(connection, None)
        for key in peer.keys.values() if peer else ():
            entry = self._entries[key]
            entry.connection = None
            entry.lost_at = now

    def block(self, connection: int, *, blocked: bool) -> None:
        """A reader does not keep up: no forwards for its sessions until it does (I7)."""
        if blocked:
            self._blocked.add(connection)
        else:
            self._blocked.discard(connection)

    def drain(self) -> None:
        """Refuse new sessions; running ones go on."""
        self._draining = True

    def stop(self) -> None:
        """Forget every session: the verifier goes. Edges open anew elsewhere (I4)."""
        self._draining = True
        for entry in list(self._entries.values()):
            self._free(entry)

    # ---------------------------------------------------------------- messages

    def receive(self, connection: int, message: Message, now: float) -> list[Outgoing]:
        """One message of a connected peer. Session faults are answered, not raised."""
        try:
            replies = self._dispatch(self._peers[connection], connection, message, now)
        except RemoteError as error:
            if error.session is None:
                raise
            return self.refuse(connection, error)
        return [Outgoing(connection=connection, message=m) for m in replies]

    def refuse(self, connection: int, error: RemoteError) -> list[Outgoing]:
        """End one session with an error; the connection and the other sessions go on.

        `duplicate-session` is about the newcomer: the session that has the number goes on too.
        """
        number = error.session
        assert number is not None, "an error of the whole connection is raised, not answered"
        if error.code is not Code.DUPLICATE:
            self._forget(self._peers[connection], number)
        answer = Error(code=error.code, message=error.message, session=number)
        return [Outgoing(connection=connection, message=answer)]

    def _dispatch(
        self, peer: _Peer, connection: int, message: Message, now: float
    ) -> Sequence[Message]:
        match message:
            case Open():
                return self._open(peer, connection, message, now)
            case Resume():
                return self._resume(peer, connection, message, now)
            case Cancel():
                self._forget(peer, message.session)
                return ()
            case Draft() | Correct() | Steer():
                key = peer.keys.get(message.session)
                if key is None:
                    self.late_frames += 1
                    return ()
                return self._session_message(key, message, now)
            case _:
                return ()

    def _session_message(
        self, key: int, message: Draft | Correct | Steer, now: float
    ) -> Sequence[Message]:
        session = self._entries[key].session
        match message:
            case Correct():
                return self._closed(key, session.on_correct(message, now))
            case Steer():
                session.on_steer(message, now)
            case Draft():
                session.on_draft(message, now)
        return ()

    def _open(self, peer: _Peer, connection: int, message: Open, now: float) -> Sequence[Message]:
        number = message.session
        if number in peer.keys:
            running = self._same(peer, number, message.uid)
            return (Opened(session=number, base=running.session.generation.sequence.base),)
        entry = self._admit(peer, connection, message, now)
        peer.keys[number] = entry.key
        replies: list[Message] = [
            Opened(session=number, base=entry.session.generation.sequence.base)
        ]
        if entry.session.finish is not None:
            replies.append(entry.session.done())
            self._free(entry)
        return replies

    def _admit(self, peer: _Peer, connection: int, message: Open, now: float) -> _Entry:
        """Check everything, then register: nothing is held by a refused OPEN."""
        number, config = message.session, self.config
        if self._draining:
            raise RemoteError(Code.DRAINING, "no new sessions here", number)
        previous = self._by_uid.get((peer.tenant, message.uid))
        if previous is None and len(self._entries) >= config.max_sessions:
            raise RemoteError(Code.BUSY, f"all {config.max_sessions} sessions are taken", number)
        if len(peer.keys) >= config.max_sessions_per_connection:
            raise self._full(number)
        params, rule, policy, take = self._checked(message)
        relax = self._relaxation(message, rule)
        reply = reply_from_wire(message, rule)
        generation = self._generation(message, params)
        verifier = Verifier(
            params,
            rule,
            prompt=message.prompt,
            vocab_size=config.vocab_size,
            end_ids=frozenset() if params.ignore_eos else config.eos,
            watch_ties=not config.deterministic,
            policy=relax and relax[0],
            ledger=relax and relax[1],
        )
        session = CloudSession(
            number,
            generation,
            verifier,
            rule=rule,
            policy=policy,
            take=take,
            vocab_size=config.vocab_size,
            window=config.max_window,
            now=now,
            held=message.held,
            reply=reply,
        )
        session.restore(message.committed)
        if previous is not None:
            self._free(self._entries[previous])
        self._next_key += 1
        entry = _Entry(
            key=self._next_key,
            tenant=peer.tenant,
            uid=message.uid,
            session=session,
            connection=connection,
            params=params,
            rule=rule,
            cloud_draft=message.cloud_draft,
        )
        self._entries[entry.key] = entry
        self._by_uid[(peer.tenant, message.uid)] = entry.key
        return entry

    def _same(self, peer: _Peer, number: int, uid: bytes) -> _Entry:
        """The session that runs under `number`, which must be the one `uid` names."""
        entry = self._entries[peer.keys[number]]
        if entry.uid != uid:
            raise RemoteError(Code.DUPLICATE, f"session {number} is already open", number)
        return entry

    def _full(self, number: int) -> RemoteError:
        limit = self.config.max_sessions_per_connection
        return RemoteError(Code.BUSY, f"{limit} sessions on this connection", number)

    def _checked(self, message: Open) -> tuple[SamplingParams, Rule, StepPolicy, Take]:
        number, config = message.session, self.config
        params = from_wire(message.sampling, number)
        if len(message.uid) != UID_BYTES:
            raise RemoteError(Code.MALFORMED, f"uid must have {UID_BYTES} bytes", number)
        ids = (*message.prompt, *message.committed)
        if len(ids) > config.max_prompt_tokens:
            raise RemoteError(Code.TOO_LARGE, f"{len(ids)} ids in OPEN", number)
        if any(not 0 <= t < config.vocab_size for t in ids):
            raise RemoteError(Code.MALFORMED, "token id outside the vocabulary", number)
        for name, named in (
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
        ):
            if any(t >= config.vocab_size for t in named):
                raise RemoteError(Code.PARAMETER, f"{name}: id outside the vocabulary", number)
        if not 0 <= message.cloud_draft <= MAX_CLOUD_DRAFT:
            raise RemoteError(Code.PARAMETER, f"cloud_draft above {MAX_CLOUD_DRAFT}", number)
        try:
            rule, policy = Rule(message.rule), StepPolicy(message.step)
            take = Take(message.take)
        except ValueError as error:
            raise RemoteError(Code.PARAMETER, str(error), number) from None
        if rule not in config.rules:
            raise RemoteError(Code.PARAMETER, f"this target cannot do {rule.value}", number)
        return params, rule, policy, take

    def _relaxation(self, message: Open, rule: Rule) -> tuple[Policy, Ledger] | None:
        if (message.relax is not None) != (rule is Rule.RELAXED):
            raise RemoteError(
                Code.PARAMETER, "the relaxed rule, and no other, needs `relax`", message.session
            )
        if message.relax is None:
            return None
        return relax_from_wire(message.relax, message.session)

    def _generation(self, message: Open, params: SamplingParams) -> Generation:
        try:
            return Generation(
                message.prompt,
                params,
                context_length=self.config.context_length,
                eos=self.config.eos,
                text=self._text(),
            )
        except ParameterError as error:
            raise RemoteError(Code.CONTEXT, str(error), message.session) from None

    def _resume(
        self, peer: _Peer, connection: int, message: Resume, now: float
    ) -> Sequence[Message]:
        number = message.session
        if number in peer.keys:
            self._same(peer, number, message.uid)
        elif len(peer.keys) >= self.config.max_sessions_per_connection:
            raise self._full(number)
        key = self._by_uid.get((peer.tenant, message.uid))
        if key is None:
            return [Error(code=Code.UNKNOWN, message="open the session anew", session=number)]
        entry = self._entries[key]
        self._detach(entry)
        entry.connection = connection
        entry.session.number = number
        peer.keys[number] = key
        replay = entry.session.replay(message.base, message.digest, now)
        opened = Opened(session=number, base=entry.session.generation.sequence.base)
        return self._closed(key, (opened, *replay))

    def _detach(self, entry: _Entry) -> None:
        """A half-dead connection may still hold the session: the newest one wins."""
        if entry.connection is not None and (old := self._peers.get(entry.connection)):
            old.keys.pop(entry.session.number, None)

    def _closed(self, key: int, replies: Sequence[Message]) -> Sequence[Message]:
        """Free a session whose DONE is among the replies."""
        entry = self._entries[key]
        if entry.session.finish is not None and not entry.session.busy:
            self._free(entry)
        return replies

    def _forget(self, peer: _Peer, number: int) -> None:
        key = peer.keys.get(number)
        if key is not None:
            self._free(self._entries[key])

    def _free(self, entry: _Entry) -> None:
        """Everything a session holds, in one place. Its slot goes when no forward uses it."""
        del self._entries[entry.key]
        self._by_uid.pop((entry.tenant, entry.uid), None)
        self._detach(entry)
        entry.dead = True
        if not entry.session.busy:
            self.released.append(entry.key)

    # ---------------------------------------------------------------- batches

    def batch(self) -> list[Work]:
        """The next batch: ready sessions, oldest first, within the row budget. Those that choose
        how many drafts to judge share what rows are worth (control.costs.share_rows)."""
        ready = [e for e in self._entries.values() if self._may_run(e)]
        ready.sort(key=lambda e: e.turn)
        work: list[Work] = []
        # The engine takes prompts in in this order (field case 33).
        for entry, count in sorted(self._shares(ready), key=lambda share: share[0].turn):
            session = entry.session
            work.append(
                Work(
                    key=entry.key,
                    job=session.next_job(count),
                    params=entry.params,
                    rule=entry.rule,
                    prompt_length=session.generation.sequence.prompt_length,
                    cloud_draft=min(entry.cloud_draft, session.generation.tokens_left - 1),
                )
            )
        self._running.update({w.key: self._entries[w.key] for w in work})
        return work

    def _shares(self, ready: Sequence[_Entry]) -> list[tuple[_Entry, int]]:
        """The sessions of the next forward, and how many drafts of each it judges."""
        budget = self.config.max_batch_rows
        taken: list[tuple[_Entry, int]] = []
        choosing: list[_Entry] = []
        rows, tokens = 0, 0.0
        for entry in ready:
            if rows + len(choosing) >= budget:
                break
            session = entry.session
            if session.chooses:
                choosing.append(entry)
                continue
            count = session.usable
            taken.append((entry, count))
            rows += 1 + max(count, entry.cloud_draft)
            tokens += 1.0 + sum(session.curve.survival(count))
        survivals = []
        room = budget - rows - len(choosing)
        for entry in choosing:
            most = min(entry.session.usable, max(0, room))
            survivals.append(entry.session.curve.survival(most))
            room -= most
        costs = self._sharing.of(len(taken) + len(choosing), self.costs)
        counts = share_rows(survivals, costs, rows=rows, tokens=tokens)
        return [*taken, *zip(choosing, counts, strict=True)]

    def _may_run(self, entry: _Entry) -> bool:
        here = entry.connection is not None and entry.connection not in self._blocked
        return here and entry.session.wants

    def finished(self, results: Sequence[Done], *, started: float, now: float) -> list[Outgoing]:
        """A batch is done. `started`, `now`: seconds, when its forward began and ended."""
        self.forwards += 1
        rows = sum(len(r.rows) for r in results)
        if rows == sum(r.fed for r in results):  # a prefill says nothing about a step's cost
            sessions = sum(r.fed > 0 for r in results)
            if sessions == 1:
                self.costs.observe(rows, now - started)
            self._sharing.observe(rows, sessions, now - started, self.costs)
        out: list[Outgoing] = []
        for result in results:
            entry = self._running.pop(result.key)
            out += self._finish_one(entry, result, started, now)
        return out

    def _finish_one(
        self, entry: _Entry, result: Done, started: float, now: float
    ) -> list[Outgoing]:
        session = entry.session
        if entry.dead:
            session.abandon()
            self.released.append(entry.key)
            return []
        if not len(result.rows):
            session.abandon()
            if result.fed:  # whoever got nothing keeps its place
                entry.fed_at = now
            return []
        load = Load(
            queue_us=int(max(0.0, started - session.ready_at) * 1e6),
            step_us=int((now - started) * 1e6),
        )
        messages = session.complete(result.rows, load, now, own_draft=result.draft)
        target = entry.connection
        if session.finish is not None and target is not None:
            self._free(entry)
        if target is None:
            return []
        return [Outgoing(connection=target, message=m) for m in messages]

    def failed(self, work: Sequence[Work], reason: str) -> list[Outgoing]:
        """The engine could not run a batch: its sessions end with an error, others go on."""
        out: list[Outgoing] = []
        for item in work:
            entry = self._running.pop(item.key)
            entry.session.abandon()
            if entry.dead:
                self.released.append(entry.key)
                continue
            if entry.connection is not None:
                error = Error(code=Code.ENGINE, message=reason, session=entry.session.number)
                out.append(Outgoing(connection=entry.connection, message=error))
            self._free(entry)
        return out

    # ---------------------------------------------------------------- time

    def tick(self, now: float) -> None:
        """Free sessions nobody came back for."""
        for entry in list(self._entries.values()):
            if entry.connection is None and now - entry.lost_at >= self.config.grace:
                self._free(entry)

    @property
    def deadline(self) -> float | None:
        """When `tick` is due; None when nothing is detached."""
        lost = [e.lost_at for e in self._entries.values() if e.connection is None]
        return min(lost) + self.config.grace if lost else None
