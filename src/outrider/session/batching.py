"""Who shares the next forward: fair between tenants, by deadline within one, as many rows as pay.

Rules:

1. A tenant's *service* is the rows it was given. Whoever has least comes first; one that comes
   back after a pause starts at the least of those that are active, so nobody saves service up,
   and nobody sheds what it used by closing its sessions.
2. Within a tenant the session that is due first comes first: it says how soon it wants a token,
   or counts as wanting one within `DUE_S`.
3. A tenant more than `QUANTUM_ROWS` beyond the least is *over its share*. While others are active
   it rides along only in rows that make the forward at most `stretch` longer. So a tenant with
   many sessions fills what would be empty, and cannot slow down one with few. While the others
   wait for their networks it may have forwards `AWAY_STRETCH` longer than the shortest: long
   enough to work well, short enough that whoever comes back waits little.
4. The row budget is chosen from t_v: the fewest sessions whose tokens a second reach `ENOUGH` of
   the best there is. Where rows are free that is everybody; where they come in steps, a full step.
5. While several tenants are active no session has rows judged that do not pay, whatever it asked
   for: a block of drafts is then judged as far as its likely tokens are worth the time.
6. Prompts are taken in beside the others' rows, for `INTAKE_STRETCH` times their time at most, or
   `SHARED_INTAKE_STRETCH` where tenants compete, by
   what an id of a prompt was seen to take: t_v, which is measured over a few rows, says nothing
   about hundreds. A tenant may stretch forwards for prompts for `INTAKE_SHARE` of the time, with
   `INTAKE_BURST_S` in hand; beyond that its prompts ride along, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from outrider.control.costs import Costs, share_rows

DUE_S: Final = 1.0
"""Seconds within which a session that says nothing wants its next token (our default)."""
QUANTUM_ROWS: Final = 16.0
"""Rows by which a tenant may be ahead of another before it is over its share (our default): a
block of drafts or two, so that tenants alike never are."""
ACTIVE_S: Final = 2.0
"""A tenant counts as active so long after its last forward: it may wait for its network. Longer,
and a session that hangs would hold everybody else back."""
REMEMBER_S: Final = 30.0
"""What a tenant has used is held against it so long after it was seen last (our default)."""
DEFAULT_STRETCH: Final = 0.05
"""How much longer a forward may become for tenants over their share (our default)."""
AWAY_STRETCH: Final = 1.0
"""How much longer than over one row a forward of tenants over their share may be while nobody else
is ready (our default)."""
ENOUGH: Final = 0.98
"""A smaller forward is taken when it loses no more throughput than this: its sessions have their
tokens sooner (our default)."""
WHOLE_PROMPT: Final = 512
"""Ids of prompts that a forward takes in while nobody else is served (our default)."""
INTAKE_STRETCH: Final = 3.0
"""How many times its length a forward gives to prompts (our default): a running answer pauses a
little, a prompt is in after a few forwards."""
SHARED_INTAKE_STRETCH: Final = 1.0
"""The same while other tenants are active: what a row in a pass of its own would cost them."""
INTAKE_RATE: Final = 0.3
"""Weight of a new forward in what an id of a prompt takes."""
RIDING_IDS: Final = 8
"""Most ids of a prompt that ride along."""
GUESS_ROWS: Final = 16
"""Before a prompt was taken in, an id counts as a row among so many."""
INTAKE_SHARE: Final = 0.05
"""Engine time, as a part of all time, that one tenant's prompts may take from others for ever
(our default)."""
INTAKE_BURST_S: Final = 4.0
"""Seconds of that which a tenant may use at once: a long prompt or two (our default)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A session that could take part in the next forward."""

    key: int
    tenant: str
    due: float
    """Seconds: when its next token is wanted."""
    most: int
    """Drafts that could be judged (or made here, co-located)."""
    chooses: bool
    """As many of them as pay; otherwise all, where rule 5 does not apply."""
    survival: Callable[[int], Sequence[float]]
    """S(1), ..., S(n) of its drafts."""


class Share(NamedTuple):
    """A session's part of a forward."""

    key: int
    drafts: int
    room: int
    """Most ids of its prompt that are taken in."""


@dataclass(slots=True)
class _Tenant:
    service: float = 0.0
    seen: float = 0.0
    """Seconds: when it last had a session ready or served."""
    intake: float = INTAKE_BURST_S
    """Engine seconds that its prompts may still take."""
    filled: float = 0.0
    """Seconds: when `intake` was brought up to date."""


class FairShare:
    """See the module docstring."""

    def __init__(
        self, *, budget: int, most: int | None = None, stretch: float = DEFAULT_STRETCH
    ) -> None:
        """`budget`: most rows of a forward. `most`: sessions; None: as many as rows."""
        self._budget = budget
        self._most = budget if most is None else most
        self._stretch = stretch
        self._tenants: dict[str, _Tenant] = {}
        self._id_s: float | None = None
        """Seconds that an id of a prompt takes; None: none was seen yet."""

    def batch(
        self, ready: Sequence[Ready], costs: Callable[[int], Costs], now: float, *, alone: bool
    ) -> list[Share]:
        """The next forward's sessions. `costs(n)`: t_v of a forward that n sessions share.
        `alone`: there is only one session in all."""
        if not ready:
            return []
        self._arrive({r.tenant for r in ready}, now)
        active = self._active(now)
        contended = len(active) > 1
        order, over = self._order(ready, active if contended else set())
        taken = self._enough(self._fitting(order, over, costs, contended), costs)
        return self._filled(taken, over, costs, contended, now, alone=alone)

    def charge(
        self, tenant: str, *, rows: int, fed: int, seconds: float, others: bool, now: float
    ) -> None:
        """A session was given `rows` rows and had `fed` ids of its prompt taken in, which took
        `seconds` of the engine. `others`: sessions of other tenants waited or shared it."""
        record = self._tenants.setdefault(tenant, _Tenant(seen=now, filled=now))
        record.service += rows
        record.seen = max(record.seen, now)
        if fed and others:
            record.intake -= seconds

    def took(self, ids: int, seconds: float) -> None:
        """A forward took `seconds` longer for `ids` ids of prompts."""
        if ids > 0:
            each, known = max(0.0, seconds) / ids, self._id_s
            self._id_s = each if known is None else known + INTAKE_RATE * (each - known)

    def service(self) -> dict[str, float]:
        """Rows each known tenant was given, counted as rule 1 says: to look at."""
        return {name: record.service for name, record in self._tenants.items()}

    # ---------------------------------------------------------------- tenants

    def _arrive(self, names: set[str], now: float) -> None:
        active = self._active(now)
        known = active or {n for n in names if n in self._tenants}
        floor = min((self._tenants[n].service for n in known), default=0.0)
        for name in names:
            record = self._tenants.get(name)
            if record is None:
                record = self._tenants[name] = _Tenant(service=floor, filled=now)
            elif name not in active:
                record.service = max(record.service, floor)
            record.seen = now
        # What a tenant that is gone has used says nothing once everybody has used as much.
        for name in [n for n in self._tenants if n not in active | names]:
            record = self._tenants[name]
            if record.service <= floor or now - record.seen > REMEMBER_S:
                del self._tenants[name]

    def _active(self, now: float) -> set[str]:
        return {n for n, record in self._tenants.items() if now - record.seen <= ACTIVE_S}

    def _order(
        self, ready: Sequence[Ready], active: set[str]
    ) -> tuple[list[Ready], dict[int, bool]]:
        """The sessions in turn, and whether each one's tenant is then over its share: each row
        given counts at once, or a tenant's hundred sessions would all come first."""
        queues: dict[str, list[Ready]] = {}
        for item in sorted(ready, key=lambda r: (r.due, r.key), reverse=True):
            queues.setdefault(item.tenant, []).append(item)
        given = {name: self._tenants[name].service for name in {*queues, *active}}
        order: list[Ready] = []
        over: dict[int, bool] = {}
        while queues:
            name = min(queues, key=lambda n: (given[n], queues[n][-1].due, queues[n][-1].key))
            item = queues[name].pop()
            if not queues[name]:
                del queues[name]
            least = min((given[n] for n in active), default=given[name])
            over[item.key] = given[name] - least > QUANTUM_ROWS
            order.append(item)
            given[name] += 1.0
        order.sort(key=lambda r: over[r.key])  # stable: who is over its share comes last
        return order, over

    # ---------------------------------------------------------------- rows

    def _fitting(
        self,
        order: Sequence[Ready],
        over: dict[int, bool],
        costs: Callable[[int], Costs],
        contended: bool,  # noqa: FBT001
    ) -> list[tuple[Ready, int, bool]]:
        """(session, drafts judged whatever they are worth, it chooses), within the budget."""
        taken: list[tuple[Ready, int, bool]] = []
        rows, seconds = 0, None
        for item in order:
            if rows >= self._budget or len(taken) >= self._most:
                break
            if over[item.key]:
                if seconds is None:
                    seconds = self._allowed(rows, costs(max(len(taken), 1)))
                if taken and costs(len(taken) + 1).seconds(rows + 1) > seconds:
                    break
            chooses = item.chooses or contended
            fixed = 0 if chooses else min(item.most, self._budget - rows - 1)
            taken.append((item, fixed, chooses))
            rows += 1 + fixed
        return taken

    def _allowed(self, rows: int, costs: Costs) -> float:
        """Seconds of a forward with tenants over their share beside `rows` rows of others. One more
        session may cost more than its rows: an engine may need a pass of its own for it."""
        stretch = self._stretch if rows else max(self._stretch, AWAY_STRETCH)
        return (1.0 + stretch) * costs.seconds(max(rows, 1))

    def _free(self, rows: int, costs: Costs) -> int:
        """Rows of a forward that is at most `stretch` longer than one over `rows`; at least 1."""
        return most_rows(costs, self._allowed(rows, costs), self._budget)

    def _enough(
        self, taken: list[tuple[Ready, int, bool]], costs: Callable[[int], Costs]
    ) -> list[tuple[Ready, int, bool]]:
        """As many of them as the row budget has (rule 4)."""
        rates: list[float] = []
        rows, tokens = 0, 0.0
        for item, fixed, _ in taken:
            rows += 1 + fixed
            tokens += 1.0 + sum(item.survival(fixed))
            rates.append(tokens / costs(len(rates) + 1).seconds(rows))
        return taken[: enough(rates)]

    def _filled(
        self,
        taken: list[tuple[Ready, int, bool]],
        over: dict[int, bool],
        costs: Callable[[int], Costs],
        contended: bool,  # noqa: FBT001
        now: float,
        *,
        alone: bool,
    ) -> list[Share]:
        """Drafts of those that choose, and how much of their prompts is taken in."""
        shared = costs(len(taken))
        rows = len(taken) + sum(fixed for _, fixed, _ in taken)
        tokens = sum(1.0 + sum(item.survival(fixed)) for item, fixed, ch in taken if not ch)
        choosing = [item for item, _, chooses in taken if chooses]
        room = self._budget - rows
        survivals = []
        for item in choosing:
            most = 0 if over[item.key] else min(item.most, room)
            survivals.append(item.survival(most))
            room -= most
        counts = share_rows(survivals, shared, rows=rows - len(choosing), tokens=tokens)
        drafts = {item.key: fixed for item, fixed, _ in taken}
        drafts |= {item.key: count for item, count in zip(choosing, counts, strict=True)}
        rows = len(taken) + sum(drafts.values())
        if alone:
            whole = free = WHOLE_PROMPT
        else:
            stretch = SHARED_INTAKE_STRETCH if contended else INTAKE_STRETCH
            whole = self._intake(stretch * shared.seconds(rows), shared)
            free = min(max(1, self._free(rows, shared) - rows), RIDING_IDS)
        return [
            Share(
                item.key,
                drafts[item.key],
                max(whole, free) if not contended or self._may_stretch(item.tenant, now) else free,
            )
            for item, _, _ in taken
        ]

    def _intake(self, seconds: float, costs: Costs) -> int:
        """Ids of prompts that take `seconds`; at least 1."""
        each = costs.seconds(GUESS_ROWS) / GUESS_ROWS if self._id_s is None else self._id_s
        return WHOLE_PROMPT if each * WHOLE_PROMPT <= seconds else max(1, int(seconds / each))

    def _may_stretch(self, tenant: str, now: float) -> bool:
        record = self._tenants[tenant]
        gained = INTAKE_SHARE * (now - record.filled)
        record.intake = min(INTAKE_BURST_S, record.intake + gained)
        record.filled = now
        return record.intake > 0.0


def enough(rates: Sequence[float]) -> int:
    """The fewest sessions, from 1, that reach `ENOUGH` of the best rate; `rates[i]`: of i + 1."""
    best = max(rates)
    return 1 + next(i for i, rate in enumerate(rates) if rate >= ENOUGH * best)


def most_rows(costs: Costs, seconds: float, most: int) -> int:
    """The most rows, in [1, most], whose forward takes at most `seconds`; the curve never falls."""
    low, high = 1, max(1, most)
    while low < high:
        middle = (low + high + 1) // 2
        if costs.seconds(middle) <= seconds:
            low = middle
        else:
            high = middle - 1
    return low
