"""All sessions of one verifier, sans I/O: who is connected, what runs next, who is answered.

Rules:

1. A session belongs to a tenant. Nobody reaches another tenant's session, by number or by uid.
2. A connection that is lost detaches its sessions; they wait `grace` seconds for RESUME, then go.
   Whoever comes later opens anew with the committed tokens (I4).
3. Who shares a forward, and with how many rows, is `session.batching`'s to say.
   A session is in at most one batch; results are matched by key, never by place (field case 11).
   One whose prompt is only partly in (no rows came) runs again, behind those that became ready
   meanwhile (field case 33).
4. At a limit the answer is `busy`, before anything is registered (I7): of sessions in all, of a
   tenant's, of how fast it opens them, of what a token may take. Registering and freeing are one
   unit each: there is no path on which one half happens (field case 32).
5. Hot frames for a session that is gone are dropped and counted: they crossed its end on the
   wire.
6. OPEN and RESUME are idempotent: a repeated one for a session that already runs under that
   number is answered like the first. Another session under a number in use is refused with
   `duplicate-session`, and the one that runs is not touched.
7. Where sessions share forwards, each is told how many drafts are still of use
   (`session.pressure`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from outrider.control.costs import RowCosts, SharedCosts, share_rows
from outrider.core.grammar import Constraint, Grammars
from outrider.core.sampling import DeadEndError, RowError
from outrider.core.tokens import Rule, SamplingParams
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
from outrider.proto.messages import Pressure as PressureMessage
from outrider.session.batching import DUE_S, FairShare, Ready, Share, enough
from outrider.session.cloud import CloudSession
from outrider.session.generation import TextStream
from outrider.session.opening import MAX_CLOUD_DRAFT, UID_BYTES, checked, opened
from outrider.session.pressure import EVERY_S, PROBE, Pressure
from outrider.session.quotas import NO_LIMITS, Bucket, TenantLimits
from outrider.session.verifier import Judgement, OpenRejection
from outrider.session.work import MAX_SESSIONS, Done, Outgoing, ServiceConfig, Work

__all__ = [
    "MAX_CLOUD_DRAFT",
    "MAX_SESSIONS",
    "UID_BYTES",
    "CloudService",
    "Done",
    "Judging",
    "LoadMeans",
    "Outgoing",
    "ServiceConfig",
    "Work",
]

OPENS_PER_S: Final = 16.0
"""Sessions a second that one tenant may open for ever (our default): many more than it can have
answered. Before that it may open as many at once as it may hold; with a rate of its own, a
second's worth."""
BUSY_S: Final = 2.0
"""A session that waits for its edge counts as under way so long after its last forward."""
LOAD_RATE: Final = 0.1
"""Weight of a new forward in the running means of the load."""


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
    own_constraint: Constraint | None
    """For drafts made here."""
    ran_at: float
    """When a forward of it ended last, or it was opened (seconds)."""
    lost_at: float = 0.0
    due_s: float = DUE_S
    """Seconds within which its next token is wanted."""
    fed_at: float = 0.0
    """When a piece of its prompt was last taken in (seconds)."""
    pressure: Pressure = field(default_factory=Pressure)
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


@dataclass(slots=True)
class Judging:
    """One session's rows, of which judging may take long: `run` on any thread, then hand it to
    `CloudService.judged`."""

    entry: _Entry
    result: Done
    started: float
    ended: float
    """Seconds, when its forward began and ended."""
    outcome: Judgement | OpenRejection | RowError | None = None

    @property
    def tenant(self) -> str:
        return self.entry.tenant

    def run(self) -> None:
        if self.entry.dead:
            return
        try:
            self.outcome = self.entry.session.judge(self.result.rows, self.result.draft)
        except RowError as error:
            self.outcome = error


@dataclass(slots=True)
class LoadMeans:
    """Facts of the forwards so far, for people: counts, and running means of the newest."""

    forwards: int = 0
    rows: int = 0
    """Judged: one for each token of the target, drafts included."""
    fed: int = 0
    """Ids appended to caches, prompts included."""
    sessions: float = 0.0
    """Sharing a forward, in the mean."""
    queue_s: float = 0.0
    step_s: float = 0.0
    shares: int = 0
    """Sessions in forwards, summed over the forwards."""
    queued_s: float = 0.0
    """The same of their waiting."""
    forward_s: float = 0.0
    """Time in forwards."""

    def note(self, *, rows: int, fed: int, queues: Sequence[float], seconds: float) -> None:
        """A forward over `rows` rows is done; `queues`: seconds that its sessions waited for it."""
        rate = LOAD_RATE if self.forwards else 1.0
        self.forwards += 1
        self.rows += rows
        self.fed += fed
        self.shares += len(queues)
        self.queued_s += sum(queues)
        self.forward_s += seconds
        self.sessions += rate * (len(queues) - self.sessions)
        self.queue_s += rate * (sum(queues) / len(queues) - self.queue_s)
        self.step_s += rate * (seconds - self.step_s)


class CloudService:
    """See the module docstring."""

    def __init__(
        self,
        config: ServiceConfig,
        text: Callable[[], TextStream],
        costs: RowCosts | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """`text`: makes a fresh text stream of the target's tokenizer, for stop strings.
        `grammars`: reads grammars; whoever drives has it read them before it hands an OPEN over,
        where reading would hold others up. None: there are no grammars here."""
        self._grammars = grammars
        self.config = config
        self.costs = costs or RowCosts()
        """Of one session alone in a forward."""
        self._sharing = SharedCosts()
        self._shares = FairShare(
            budget=config.max_batch_rows, most=config.max_under_way, stretch=config.stretch
        )
        self.tenant_limits: Mapping[str, TenantLimits] = {}
        """Of logins that have their own; may be replaced at any time."""
        self._opens: dict[str, Bucket] = {}
        self._pressed_at = -math.inf
        self.late_frames = 0
        """Hot frames that came for sessions already gone."""
        self.load = LoadMeans()
        self.opened = 0
        """Sessions let in."""
        self.refused: Counter[str] = Counter()
        """Sessions refused or ended with an error, by code."""
        self.released: list[int] = []
        """Keys whose cache slot the driver may free; it empties the list."""
        self.judging: list[Judging] = []
        """What is left to judge of batches finished `apart`; the driver empties the list."""
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

    @property
    def forwards(self) -> int:
        """Batches run."""
        return self.load.forwards

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
        self.refused[error.code.value] += 1
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
        wishes = checked(message, config)
        if previous is None:
            self._let_in(peer.tenant, number, now)
        session, own_constraint = opened(
            message,
            wishes,
            config,
            text=self._text,
            grammars=self._grammars,
            tenant=peer.tenant,
            now=now,
        )
        if previous is not None:
            self._free(self._entries[previous])
        self._next_key += 1
        self.opened += 1
        entry = _Entry(
            key=self._next_key,
            tenant=peer.tenant,
            uid=message.uid,
            session=session,
            connection=connection,
            params=wishes.params,
            rule=wishes.rule,
            cloud_draft=message.cloud_draft,
            own_constraint=own_constraint,
            ran_at=now,
            due_s=message.due_ms / 1e3 if message.due_ms else DUE_S,
        )
        self._entries[entry.key] = entry
        self._by_uid[(peer.tenant, message.uid)] = entry.key
        return entry

    def _let_in(self, tenant: str, number: int, now: float) -> None:
        """Refuse one session more than this tenant, or everybody together, may have."""
        config = self.config
        own = self.tenant_limits.get(tenant, NO_LIMITS)
        most = config.max_sessions_per_tenant if own.sessions is None else own.sessions
        if sum(e.tenant == tenant for e in self._entries.values()) >= most:
            raise RemoteError(Code.BUSY, f"{most} sessions of this login are running", number)
        under_way = len(self._under_way(now))
        if under_way >= config.max_under_way:
            raise RemoteError(
                Code.BUSY, f"answers under way: {under_way}, as many as there are caches", number
            )
        token_s = self._token_s(under_way + 1)
        # Alone it makes nobody slower, and refused for ever nothing better would be measured.
        if under_way and token_s > config.max_token_s:
            raise RemoteError(
                Code.BUSY,
                f"with one more answer a token would take {1e3 * token_s:.0f} ms; the limit is "
                f"{1e3 * config.max_token_s:.0f}",
                number,
            )
        rate = OPENS_PER_S if own.rate is None else own.rate
        burst = float(most) if own.rate is None else min(most, max(1.0, own.rate))
        opens = self._opens.setdefault(tenant, Bucket(burst, now))
        if opens.take(1.0, rate=rate, burst=burst, now=now):
            raise RemoteError(
                Code.BUSY, f"this login opens more than {rate:g} sessions a second", number
            )

    def _token_s(self, sessions: int) -> float:
        """Seconds between two tokens of a session while so many are under way: a forward over all
        of them, in as many batches as the row budget makes of it."""
        if not self.costs:
            return 0.0
        rows = min(sessions, self.config.max_batch_rows)
        seconds = self._sharing.of(rows, self.costs).seconds(rows)
        return seconds * math.ceil(sessions / self.config.max_batch_rows)

    def _under_way(self, now: float) -> list[_Entry]:
        """Sessions at work, or waiting for a forward however long that takes."""
        return [
            e
            for e in self._entries.values()
            if now - e.ran_at <= BUSY_S or e.session.busy or self._may_run(e)
        ]

    def _same(self, peer: _Peer, number: int, uid: bytes) -> _Entry:
        """The session that runs under `number`, which must be the one `uid` names."""
        entry = self._entries[peer.keys[number]]
        if entry.uid != uid:
            raise RemoteError(Code.DUPLICATE, f"session {number} is already open", number)
        return entry

    def _full(self, number: int) -> RemoteError:
        limit = self.config.max_sessions_per_connection
        return RemoteError(Code.BUSY, f"{limit} sessions on this connection", number)

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
        entry.pressure = Pressure()  # the edge forgets what was said on the old connection
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

    def batch(self, now: float) -> list[Work]:
        """The next batch (session.batching), the engine's order. Empty: nobody is ready."""
        ready = {e.key: self._ready(e) for e in self._entries.values() if self._may_run(e)}
        costs = partial(self._sharing.of, base=self.costs)
        shares = self._shares.batch(list(ready.values()), costs, now, alone=len(self._entries) == 1)
        # The engine takes prompts in in this order (field case 33).
        work = [self._work(self._entries[share.key], share) for share in shares]
        self._running.update({w.key: self._entries[w.key] for w in work})
        return work

    def _ready(self, entry: _Entry) -> Ready:
        session = entry.session
        here = min(entry.cloud_draft, session.generation.tokens_left - 1)
        return Ready(
            key=entry.key,
            tenant=entry.tenant,
            due=entry.turn + entry.due_s,
            most=here if entry.cloud_draft else session.usable,
            chooses=session.chooses,
            survival=session.curve.survival,
        )

    def _work(self, entry: _Entry, share: Share) -> Work:
        session, own = entry.session, entry.cloud_draft > 0
        return Work(
            key=entry.key,
            job=session.next_job(0 if own else share.drafts),
            params=entry.params,
            rule=entry.rule,
            prompt_length=session.generation.sequence.prompt_length,
            cloud_draft=share.drafts if own else 0,
            room=share.room,
            tenant=entry.tenant,
            constraint=entry.own_constraint,
        )

    def _may_run(self, entry: _Entry) -> bool:
        here = entry.connection is not None and entry.connection not in self._blocked
        return here and entry.session.wants

    def finished(
        self, results: Sequence[Done], *, started: float, now: float, apart: bool = False
    ) -> list[Outgoing]:
        """A batch is done. `started`, `now`: seconds, when its forward began and ended. `apart`:
        what may take long to judge is put into `judging`, and the others are answered."""
        rows, fed = sum(len(r.rows) for r in results), sum(r.fed for r in results)
        queues = [max(0.0, started - self._running[r.key].session.ready_at) for r in results]
        self.load.note(rows=rows, fed=fed, queues=queues, seconds=now - started)
        self._charge(results, fed, now - started, now)
        self._shares.took(fed - rows, now - started - self._step_s(len(results), rows))
        if rows == fed:  # a prefill says nothing about a step's cost
            sessions = sum(r.fed > 0 for r in results)
            if sessions == 1:
                self.costs.observe(rows, now - started)
            self._sharing.observe(rows, sessions, now - started, self.costs)
        out: list[Outgoing] = []
        for result in results:
            entry = self._running.pop(result.key)
            labour = Judging(entry=entry, result=result, started=started, ended=now)
            if apart and entry.session.laborious and len(result.rows) and not entry.dead:
                self.judging.append(labour)
            else:
                out += self._finish_one(labour, now)
        return [*out, *self._press(now)]

    def judged(self, labour: Judging, now: float) -> list[Outgoing]:
        """What was left to judge is judged, or not (`outcome` None) and never will be: then its
        session ends with an error. `now`: seconds."""
        if labour.outcome is None:
            labour.outcome = RowError("the rows could not be judged")
        return self._finish_one(labour, now)

    def _step_s(self, sessions: int, rows: int) -> float:
        """What a forward over so many rows takes as far as is known (seconds)."""
        return self._sharing.of(sessions, self.costs).seconds(rows) if self.costs and rows else 0.0

    def _charge(self, results: Sequence[Done], fed: int, seconds: float, now: float) -> None:
        """To each tenant what it was given."""
        others = len({e.tenant for e in self._entries.values()}) > 1
        for result in results:
            entry = self._running[result.key]
            prompt = result.fed - len(result.rows)
            self._shares.charge(
                entry.tenant,
                rows=len(result.rows),
                fed=prompt,
                seconds=seconds * prompt / fed if fed else 0.0,
                others=others,
                now=now,
            )

    def _press(self, now: float) -> list[Outgoing]:
        """Tell sessions how many drafts are of use, now and then."""
        if now - self._pressed_at < EVERY_S:
            return []
        self._pressed_at = now
        active = self._under_way(now)
        out: list[Outgoing] = []
        for entry, worth in zip(active, self._worths(active), strict=True):
            told = entry.session.drafts_come and entry.pressure.judge(worth, now)
            if told and entry.connection is not None:
                limit = entry.pressure.limit
                message = PressureMessage(session=entry.session.number, window=limit)
                out.append(Outgoing(connection=entry.connection, message=message))
        return out

    def _worths(self, active: Sequence[_Entry]) -> list[float]:
        """How many drafts of each session would be judged, if each had `PROBE`, in forwards that
        as many share as would if all streamed: what drafts have to be better than. One session
        alone is nobody's load."""
        count = len(active)
        if count < 2:
            return [float(PROBE)] * count
        costs = partial(self._sharing.of, base=self.costs)
        together = enough([n / costs(n).seconds(n) for n in range(1, count + 1)])
        worths = [0.0] * count
        for first in range(0, count, together):
            group = [(first + i) % count for i in range(together)]
            survivals = [active[i].session.curve.survival(PROBE) for i in group]
            for i, number in zip(group, share_rows(survivals, costs(together)), strict=True):
                worths[i] = float(number)
        return worths

    def _finish_one(self, labour: Judging, now: float) -> list[Outgoing]:
        entry, result = labour.entry, labour.result
        session = entry.session
        if entry.dead:
            session.abandon()
            self.released.append(entry.key)
            return []
        if not len(result.rows):
            session.abandon()
            if result.fed:  # whoever got nothing keeps its place
                entry.fed_at = entry.ran_at = now
            return []
        entry.ran_at = now
        if labour.outcome is None:
            labour.run()
        if isinstance(labour.outcome, RowError):  # its own affair: the others go on
            session.abandon()
            return self._fail(entry, labour.outcome)
        load = Load(
            queue_us=int(max(0.0, labour.started - session.ready_at) * 1e6),
            step_us=int((labour.ended - labour.started) * 1e6),
        )
        messages = session.complete(
            result.rows, load, now, own_draft=result.draft, outcome=labour.outcome
        )
        target = entry.connection
        if session.finish is not None and target is not None:
            self._free(entry)
        if target is None:
            return []
        return [Outgoing(connection=target, message=m) for m in messages]

    def _fail(self, entry: _Entry, error: RowError) -> list[Outgoing]:
        """Nothing can be drawn for a session: it ends here."""
        code = Code.GRAMMAR if isinstance(error, DeadEndError) else Code.ENGINE
        self._free(entry)
        if entry.connection is None:
            return []
        told = Error(code=code, message=str(error), session=entry.session.number)
        return [Outgoing(connection=entry.connection, message=told)]

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
                self.refused[Code.ENGINE.value] += 1
                error = Error(code=Code.ENGINE, message=reason, session=entry.session.number)
                out.append(Outgoing(connection=entry.connection, message=error))
            self._free(entry)
        return out

    def status(self, now: float) -> dict[str, object]:
        """Facts for an operator: JSON values, no prompt, no id."""
        load, service = self.load, self._shares.service()
        held: dict[str, int] = {}
        for entry in self._entries.values():
            held[entry.tenant] = held.get(entry.tenant, 0) + 1
        return {
            "sessions": self.sessions,
            "under_way": len(self._under_way(now)),
            "draining": self._draining,
            "opened": self.opened,
            "refused": dict(sorted(self.refused.items())),
            "forwards": load.forwards,
            "rows": load.rows,
            "fed": load.fed,
            "shares": load.shares,
            "queued_s": load.queued_s,
            "forward_s": load.forward_s,
            "sessions_per_forward": load.sessions,
            "queue_ms": 1e3 * load.queue_s,
            "step_ms": 1e3 * load.step_s,
            "row_ms": [[rows, 1e3 * seconds] for rows, seconds in self.costs.curve()],
            "late_frames": self.late_frames,
            "limited": sum(e.pressure.limit is not None for e in self._entries.values()),
            "tenants": {
                name: {"sessions": held.get(name, 0), "rows": service.get(name, 0.0)}
                for name in sorted({*held, *service})
            },
        }

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
