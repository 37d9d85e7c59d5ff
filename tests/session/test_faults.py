"""Edge and cloud on a link that breaks, in virtual time: nothing lost, repeated or changed."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from laws import ALARM, fit
from outrider.core import verify
from outrider.core.tokens import Rule, SamplingParams
from outrider.engines.toy import table_law
from outrider.proto.codec import decode, encode
from outrider.proto.messages import (
    Cancel,
    Code,
    Correct,
    Draft,
    Message,
    Open,
    Opened,
    Proposals,
    Relaxed,
    Resume,
    Row,
    Tokens,
    Verdict,
)
from outrider.session.events import Ended, Failed, LinkDown, LinkHeard, LinkQuiet, LinkUp, Progress
from outrider.session.pilot import Pilot
from outrider.session.schedules import Schedule
from outrider.session.service import CloudService
from toys import TARGET, VOCAB, draft
from world import Answer, Pipe, RandomFaults, Whim, World, alone

EOS = frozenset({0})
PROMPT = (1, 2, 3)
SCHEDULES = (
    Schedule.SYNC,
    Schedule.PEARL,
    Schedule.PLC,
    Schedule.STREAM,
    Schedule.FREERUN,
    Schedule.CLOUD_ONLY,
    Schedule.COLOCATED,
)


@dataclass
class Script:
    """One fault, at the n-th message of a type on its way up or down."""

    kind: type
    nth: int
    act: str
    """'lose-and-cut', 'arrive-and-cut', 'restart', 'repeat', 'swap', 'lose', 'hold'."""
    when: object = None
    seen: int = 0
    held: list[bytes] = field(default_factory=list)

    def frames(self, world: World, pipe: Pipe, way: str, frame: bytes) -> list[tuple[float, bytes]]:
        if self.held and way == self.when:
            return [(0.0, frame), (0.0, self.held.pop())]
        if not isinstance(decode(frame), self.kind):
            return [(0.0, frame)]
        self.seen += 1
        if self.seen != self.nth:
            return [(0.0, frame)]
        match self.act:
            case "lose-and-cut":
                world.cut(pipe)
                return []
            case "arrive-and-cut":
                world.at(world.now + world.delay(pipe, way) + 1e-6, lambda: world.cut(pipe))
            case "restart":
                world.at(world.now, world.restart)
                return []
            case "repeat":
                return [(0.0, frame)] * 3
            case "swap":
                self.held, self.when = [frame], way
                return []
            case "lose":
                return []
            case "hold":
                return [(3.0, frame)]
        return [(0.0, frame)]


def run(
    faults: object,
    params: SamplingParams,
    *,
    schedule: Schedule = Schedule.FREERUN,
    rule: Rule = Rule.COUPLED,
    draft_length: int = 4,
    window: int = 8,
    pilot: Pilot | None = None,
    **options: object,
) -> tuple[World, Answer]:
    values: dict[str, object] = {"share": 0.3, "vocab_size": VOCAB, "eos": EOS, **options}
    w = World(TARGET, draft(values.pop("share")), faults=faults, **values)  # type: ignore[arg-type]
    edge = w.edges[0]
    number = edge.ask(
        PROMPT,
        params,
        schedule=schedule,
        rule=rule,
        draft_length=draft_length,
        window=window,
        pilot=pilot,
    )
    w.run()
    return w, edge.answers[number]


def oracle(params: SamplingParams) -> tuple[int, ...]:
    return alone(TARGET, PROMPT, params, vocab_size=VOCAB, eos=EOS)


# ------------------------------------------------------------------------------- any fault at all


@pytest.mark.parametrize(
    "block", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 30))]
)
def test_random_faults_change_nothing(block: int):
    """I1, I2, I4: twenty runs a block, every one with another mix of faults. `World` holds I2: it
    appends what it is told and never asks again."""
    for seed in range(20 * block, 20 * block + 20):
        r = random.Random(seed)
        names = ("cut", "cut_after", "restart", "repeat", "late", "swap", "lose")
        faults = RandomFaults(
            seed, quiet_after=60.0, **{n: r.choice((0.0, 0.01, 0.04)) for n in names}
        )
        params = SamplingParams(
            temperature=r.choice((0.0, 1.0)),
            seed=seed,
            max_tokens=r.randrange(1, 50),
            frequency_penalty=r.choice((0.0, 0.3)),
            logprobs=r.choice((None, 1)),
        )
        rule = r.choice(list(Rule))
        w, answer = run(
            faults,
            params,
            schedule=r.choice(SCHEDULES),
            rule=rule,
            draft_length=r.randrange(1, 8),
            window=r.randrange(1, 20),
            share=r.choice((0.0, 0.3, 1.0)),
            rtt=r.choice((0.001, 0.05, 0.2)),
            jitter=r.choice((0.0, 0.03)),
            seed=seed,
            pilot=r.choice((None, Whim(seed))),
        )
        assert isinstance(answer.end, Ended), (seed, faults, answer.end)
        if rule is not Rule.RATIO or params.temperature == 0.0:
            # `relaxed` has no budget here, so it is exact.
            assert tuple(answer.ids) == oracle(params), (seed, faults)
        # What a cut left behind in the cloud goes after its grace, and no slot stays taken.
        w.run(until=w.now + 100.0, idle=False)
        assert w.service.sessions == 0
        assert w.desk.held == 0
        assert w.model.open_slots == w.desk.parked
        assert w.service.deadline is None


DOWN = (Opened, Tokens, Verdict)
UP = (Open, Draft)


@pytest.mark.parametrize("act", ["lose-and-cut", "arrive-and-cut", "restart", "repeat", "hold"])
@pytest.mark.parametrize("kind", [*DOWN, *UP])
def test_each_fault_at_each_message(kind: type, act: str):
    """A cut before or behind any message, in either direction; 'hold' is TCP mending a loss."""
    params = SamplingParams(seed=3, max_tokens=24)
    for schedule in (Schedule.SYNC, Schedule.FREERUN):
        for nth in (1, 2, 5):
            script = Script(kind, nth, act)
            w, answer = run(script, params, schedule=schedule)
            assert tuple(answer.ids) == oracle(params), (schedule, nth)
            assert isinstance(answer.end, Ended)
            assert w.now < 8.0, "a cut costs a redial, not a timeout"


@pytest.mark.parametrize("kind", [Tokens, Verdict])
def test_swapped_tokens_are_refused_and_resumed(kind: type):
    """TCP never reorders; a peer that does is left, and the next link replays."""
    params = SamplingParams(seed=3, max_tokens=24)
    schedule = Schedule.SYNC if kind is Verdict else Schedule.FREERUN
    w, answer = run(Script(kind, 3, "swap"), params, schedule=schedule, share=0.3)
    assert tuple(answer.ids) == oracle(params)
    if kind is Tokens:
        reasons = [e.reason for _, e in w.edges[0].events if isinstance(e, LinkDown)]
        assert reasons[0].startswith("state: tokens are missing")
        assert w.edges[0].client.tally.resumed == 1


def test_a_lost_draft_is_sent_again_as_it_was():
    sent: list[Draft] = []

    class Watch(Script):
        def frames(self, world: World, pipe: Pipe, way: str, frame: bytes):  # type: ignore[no-untyped-def]
            message = decode(frame)
            if isinstance(message, Draft):
                sent.append(message)
            return super().frames(world, pipe, way, frame)

    params = SamplingParams(seed=3, max_tokens=24)
    _, answer = run(Watch(Draft, 2, "lose"), params, schedule=Schedule.SYNC)
    assert tuple(answer.ids) == oracle(params)
    assert sent[1] == sent[2]
    assert sent[0] != sent[1]


# ------------------------------------------------------------------------------- restarts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_verifier_replaced_in_mid_answer(schedule: Schedule, temperature: float):
    """Field case 28: an empty verifier at the same address, a block in flight at position 37."""
    params = SamplingParams(
        temperature=temperature,
        seed=42,
        max_tokens=60,
        ignore_eos=True,
        frequency_penalty=0.4,  # it counts what the old verifier committed
    )

    class At37:
        done = False

        def frames(self, world: World, pipe: Pipe, way: str, frame: bytes):  # type: ignore[no-untyped-def]
            session = world.edges[0].client.session(1)
            if not self.done and session and session.generation.sequence.base >= 37:
                self.done = True
                world.at(world.now, world.restart)
            return [(0.0, frame)]

    w, answer = run(At37(), params, schedule=schedule)
    assert tuple(answer.ids) == oracle(params)
    client = w.edges[0].client
    assert (client.tally.reopened, client.tally.reconnects, w.restarts) == (1, 1, 1)
    ups = [e for _, e in w.edges[0].events if isinstance(e, LinkUp)]
    assert len(ups) == 2


def test_resume_goes_on_without_a_new_prefill():
    params = SamplingParams(seed=3, max_tokens=24)
    plain, _ = run(None or Script(Tokens, 10_000, "repeat"), params)
    w, answer = run(Script(Tokens, 4, "lose-and-cut"), params)
    assert tuple(answer.ids) == oracle(params)
    assert w.edges[0].client.tally.reopened == 0
    assert w.edges[0].client.tally.resumed == 1
    assert plain.edges[0].client.tally.resumed == 0
    # Everything is computed once: a resumed session has no second prefill of the prompt.
    assert w.model.passes <= plain.model.passes + 4


# ------------------------------------------------------------------------------- ratio and faults

P = {0: (0.1, 0.4, 0.3, 0.2), 1: (0.35, 0.05, 0.25, 0.35), 2: (0.6, 0.2, 0.2), 3: (0.0, 0.3, 0.7)}
Q = {0: (0.4, 0.1, 0.2, 0.3), 1: (0.3, 0.5, 0.1, 0.1), 2: (0.1, 0.1, 0.8), 3: (0.5, 0.25, 0.25)}
JOINT = [P[1][a] * (*P[a], 0.0)[b] for a in range(4) for b in range(4)]


def ratio_law(schedule: Schedule, script: object, runs: int) -> float:
    """p-value of the first two tokens behind (1,), each answer met by the same fault. The first
    is the prefill's, the second the first that meets a draft."""
    seen = Counter[tuple[int, ...]]()
    for seed in range(runs):
        faults = script()  # type: ignore[operator]
        w = World(table_law(P, 4), table_law(Q, 4), vocab_size=4, rtt=0.002, faults=faults)
        edge = w.edges[0]
        params = SamplingParams(seed=seed, max_tokens=3)
        number = edge.ask((1,), params, schedule=schedule, rule=Rule.RATIO, draft_length=1)
        w.run()
        assert isinstance(edge.answers[number].end, Ended)
        seen[tuple(edge.answers[number].ids[:2])] += 1
    return fit([seen[a, b] for a in range(4) for b in range(4)], JOINT)


class RestartWhenAsked:
    """The verifier dies exactly when the edge asks for more proposals: only rejections meet it."""

    done = False

    def frames(self, world: World, pipe: Pipe, way: str, frame: bytes):  # type: ignore[no-untyped-def]
        message = decode(frame)
        if not self.done and isinstance(message, Correct) and message.token is None:
            self.done = True
            world.at(world.now, world.restart)
            return []
        return [(0.0, frame)]


class RestartAtProposals(RestartWhenAsked):
    """As above, at the first proposals: lost on the wire, with the verifier."""

    def frames(self, world: World, pipe: Pipe, way: str, frame: bytes):  # type: ignore[no-untyped-def]
        if not self.done and isinstance(decode(frame), Proposals):
            self.done = True
            world.at(world.now, world.restart)
            return []
        return [(0.0, frame)]


@pytest.mark.parametrize(
    ("schedule", "script", "runs"),
    [
        (Schedule.SYNC, RestartAtProposals, 1000),
        (Schedule.SYNC, RestartWhenAsked, 100),
        (Schedule.FREERUN, RestartAtProposals, 100),
        (Schedule.FREERUN, RestartWhenAsked, 100),
    ],
)
def test_a_rejection_survives_the_verifier(schedule: Schedule, script: object, runs: int):
    """I1, I4: a verifier that dies in the middle of a rejection must not give the position a
    second chance. Without `held` the first case draws rejected positions from p itself, and its
    p-value is below 1e-5."""
    assert ratio_law(schedule, script, runs) > ALARM


@pytest.mark.parametrize("schedule", [Schedule.SYNC, Schedule.FREERUN, Schedule.CLOUD_ONLY])
def test_ratio_replays_the_same_answer(schedule: Schedule):
    """Same seed, same faults: same ids. Under `sync` and lost verdicts also without the faults:
    what is sent again is judged again to the same end."""
    full_rows = 0
    for seed in range(20):
        params = SamplingParams(seed=seed, max_tokens=12, ignore_eos=True)
        plain = run(Script(Verdict, 0, "lose"), params, schedule=schedule, rule=Rule.RATIO)[1]
        found = []
        for _ in range(2):
            script = Script(Proposals, 1 + seed % 2, ("lose-and-cut", "arrive-and-cut")[seed % 2])
            _, answer = run(script, params, schedule=schedule, rule=Rule.RATIO)
            found.append(answer.ids)
            residual = answer.counters.residual  # type: ignore[attr-defined]
            full_rows += residual.get("full-row", 0)
        assert found[0] == found[1]
        if schedule is Schedule.SYNC:
            assert found[0] == plain.ids
    assert full_rows == 0 or schedule is not Schedule.CLOUD_ONLY


def test_the_full_row_is_the_last_resort_and_exact(monkeypatch: pytest.MonkeyPatch):
    """Draft and target nearly alike: few proposals fail mostly, and the row decides."""
    monkeypatch.setattr(verify, "PROPOSAL_BATCHES", (4, 4))
    p, q = (0.26, 0.25, 0.25, 0.24), (0.24, 0.25, 0.25, 0.26)
    seen, rows = Counter[int](), 0
    w = World(table_law(p, 4), table_law(q, 4), vocab_size=4)
    edge = w.edges[0]
    for seed in range(400):
        params = SamplingParams(seed=seed, max_tokens=6)
        number = edge.ask((1,), params, schedule=Schedule.SYNC, rule=Rule.RATIO)
        w.run()
        answer = edge.answers.pop(number)
        seen.update(answer.ids)
        rows += answer.counters.residual.get("full-row", 0)  # type: ignore[attr-defined]
    assert rows > 5
    assert fit([seen[t] for t in range(4)], p) > ALARM


# ------------------------------------------------------------------------------- cancelling


def held_in(service: CloudService) -> int:
    """Entries of every table in which a session has one."""
    tables = (service._entries, service._by_uid, service._running, service.released)
    return sum(map(len, tables)) + sum(len(peer.keys) for peer in service._peers.values())


def test_cancel_storm_leaves_nothing():
    """Field case 32: 500 requests, each cancelled 0-30 ms after sending; 501 works."""
    w = World(TARGET, draft(0.3), vocab_size=VOCAB, rtt=0.01, edges=2)
    r = random.Random(1)
    for i in range(500):
        edge = w.edges[i % 2]
        schedule = SCHEDULES[i % len(SCHEDULES)]

        def begin(edge=edge, i=i, schedule=schedule) -> None:  # type: ignore[no-untyped-def]
            params = SamplingParams(seed=i, max_tokens=400)
            rule = (Rule.COUPLED, Rule.RATIO)[i % 2]
            number = edge.ask(PROMPT, params, schedule=schedule, rule=rule)
            w.later(w.now + 0.03 * r.random(), lambda: edge.cancel(number))

        w.later(0.002 * i, begin)
    w.run()
    w.run(until=w.now + 2.0, idle=False)
    assert w.service.sessions == w.service.unfinished == 0
    assert w.desk.held == w._draft_model.open_slots == 0
    assert w.service.batch(w.now) == []
    assert held_in(w.service) == 0
    assert all(e.client.sessions == 0 for e in w.edges)
    params = SamplingParams(seed=501, max_tokens=20)
    number = w.edges[0].ask(PROMPT, params)
    w.run()
    expected = alone(TARGET, PROMPT, params, vocab_size=VOCAB)
    assert tuple(w.edges[0].answers[number].ids) == expected


@pytest.mark.parametrize("moment", [x * 0.013 for x in range(24)])
def test_cancel_at_any_moment_under_faults(moment: float):
    """Cancelled while dialling, greeting, opening, resuming, in dialogue or at the end."""
    for seed in range(4):
        cancel_at(moment, seed)


def cancel_at(moment: float, seed: int) -> None:
    faults = RandomFaults(seed, cut=0.05, restart=0.03, late=0.02)
    w = World(TARGET, draft(0.3), vocab_size=VOCAB, rtt=0.02, faults=faults, seed=seed)
    edge = w.edges[0]
    number = edge.ask(PROMPT, SamplingParams(seed=seed, max_tokens=30), rule=Rule.RATIO)
    params = SamplingParams(seed=7, max_tokens=10)
    other = edge.ask(PROMPT, params)
    w.later(moment, lambda: edge.cancel(number) if not edge.answers[number].end else None)
    w.run()
    assert tuple(edge.answers[other].ids) == alone(TARGET, PROMPT, params, vocab_size=VOCAB)
    w.run(until=w.now + 100.0, idle=False)
    assert w.service.sessions == held_in(w.service) == 0
    assert w.desk.held == w._draft_model.open_slots == 0


# ------------------------------------------------------------------------------- the link itself


def test_black_hole():
    """Field case 35: the edge reacts within two heartbeats, the cloud stops computing within
    two of its own, and the session goes on once the link heals."""
    params = SamplingParams(seed=9, max_tokens=60, ignore_eos=True)
    w = World(TARGET, draft(0.3), vocab_size=VOCAB, heartbeat=1.0, step_time=lambda _: 0.05)
    edge = w.edges[0]
    number = edge.ask(PROMPT, params, schedule=Schedule.STREAM)
    w.later(1.0, w.darken)
    w.run(until=1.0)
    w.run()
    down = next(at for at, e in edge.events if isinstance(e, LinkDown))
    assert 1.0 < down <= 1.0 + 2.0 + 0.2
    assert tuple(edge.answers[number].ids) == alone(TARGET, PROMPT, params, vocab_size=VOCAB)
    assert edge.client.tally.reconnects == 1


def test_who_waits_is_told_of_silence_long_before_the_link_counts_as_dead():
    params = SamplingParams(seed=9, max_tokens=60, ignore_eos=True)
    w = World(TARGET, draft(0.3), vocab_size=VOCAB, step_time=lambda _: 0.05)
    edge = w.edges[0]
    number = edge.ask(PROMPT, params, schedule=Schedule.SYNC)
    w.run(until=1.0)
    w.darken()
    w.run()
    told = [(at, e) for at, e in edge.events if isinstance(e, LinkQuiet | LinkHeard | LinkDown)]
    (at, quiet), (later, down) = told
    assert isinstance(quiet, LinkQuiet)
    assert at == pytest.approx(quiet.since + 3.0)
    assert quiet.since <= 1.1
    assert isinstance(down, LinkDown)
    assert later == pytest.approx(quiet.dead_at) == pytest.approx(quiet.since + 10.0)
    assert (down.attempts, down.gives_up_at) == (0, pytest.approx(later + 30.0))
    assert tuple(edge.answers[number].ids) == alone(TARGET, PROMPT, params, vocab_size=VOCAB)


@pytest.mark.parametrize("schedule", [Schedule.SYNC, Schedule.CLOUD_ONLY])
def test_a_slow_forward_is_no_silence(schedule: Schedule):
    """The cloud answers a PING while it works, and an idle link needs to say nothing."""
    params = SamplingParams(seed=9, max_tokens=6, ignore_eos=True)
    w = World(TARGET, draft(0.3), vocab_size=VOCAB, step_time=lambda _: 7.0)
    edge = w.edges[0]
    number = edge.ask(PROMPT, params, schedule=schedule)
    w.run()
    w.later(4.5, lambda: edge.ask(PROMPT, params, schedule=schedule))
    w.run()
    assert not [e for _, e in edge.events if isinstance(e, LinkQuiet)]
    assert tuple(edge.answers[number].ids) == alone(TARGET, PROMPT, params, vocab_size=VOCAB)


def test_a_silent_edge_costs_no_forward_and_goes_after_its_grace():
    params = SamplingParams(seed=9, max_tokens=2000, ignore_eos=True)
    w = World(TARGET, draft(0.3), vocab_size=VOCAB, heartbeat=1.0, service={"grace": 3.0})
    edge = w.edges[0]
    edge.ask(PROMPT, params)
    w.run(until=1.0)
    w.darken()
    edge.client = type(edge.client)(w.edge_hello, now=w.now, uid=lambda: b"x" * 16)  # gone
    w.run(until=1.0 + 2.0 + 0.5, idle=False)
    forwards = w.forwards
    assert w.service.sessions == 1
    w.run(until=20.0, idle=False)
    assert w.forwards == forwards
    assert w.service.sessions == 0
    assert w.desk.held == 0
    assert w.model.open_slots == w.desk.parked


def test_a_cloud_that_never_comes_back():
    w = World(TARGET, draft(0.3), vocab_size=VOCAB)
    edge = w.edges[0]
    w.dial_fails = True
    number = edge.ask(PROMPT, SamplingParams())
    w.run()
    end = edge.answers[number].end
    assert isinstance(end, Failed)
    assert end.code is Code.UNREACHABLE
    assert 30.0 <= w.now < 31.0
    assert 8 < edge.client.tally.dials < 20, "back-off, not a storm"
    # The next request starts afresh: a link that was idle while down has failed nobody.
    w.dial_fails = False
    number = edge.ask(PROMPT, SamplingParams(seed=1, max_tokens=3))
    w.run()
    assert isinstance(edge.answers[number].end, Ended)


def test_idle_links_stay_up_and_cost_little():
    w = World(TARGET, draft(0.3), vocab_size=VOCAB)
    edge = w.edges[0]
    edge.ask(PROMPT, SamplingParams(max_tokens=2))
    w.run()
    before = dict(w.wire)
    w.run(until=600.0, idle=False)
    assert edge.client.tally.dials == 1
    assert w.wire["up"] - before["up"] < 600 / 5 * 80
    edge.ask(PROMPT, SamplingParams(max_tokens=2))
    w.run(until=610.0)
    assert edge.client.tally.dials == 1


@pytest.mark.parametrize("asked", [0.38, 0.401, 0.5], ids=["before", "crossing GOAWAY", "after"])
def test_draining_verifier_finishes_what_runs_and_newcomers_go_to_the_next(asked: float):
    """Also who asked before GOAWAY reached it, and was refused: nobody sees an error for that."""
    w = World(TARGET, draft(0.3), vocab_size=VOCAB)
    edge = w.edges[0]
    first = SamplingParams(seed=1, max_tokens=40, ignore_eos=True)
    number = edge.ask(PROMPT, first)
    second: list[int] = []

    def drain() -> None:
        w.dial_fails = True  # 503 is what it answers handshakes with
        w.service.drain()
        for n, connection in w.peers.items():
            connection.drain()
            w._flush(n)

    w.later(0.4, drain)
    newcomer = SamplingParams(seed=2, max_tokens=3)
    w.later(asked, lambda: second.append(edge.ask(PROMPT, newcomer)))

    def takes_over() -> None:
        w.dial_fails = False
        w.restart()  # an empty verifier

    w.later(4.0, takes_over)
    w.run()
    assert tuple(edge.answers[number].ids) == alone(TARGET, PROMPT, first, vocab_size=VOCAB)
    late = edge.answers[second[0]]
    assert isinstance(late.end, Ended)
    assert tuple(late.ids) == alone(TARGET, PROMPT, newcomer, vocab_size=VOCAB)


def test_frames_of_a_cancelled_session_are_counted():
    w = World(TARGET, draft(0.3), vocab_size=VOCAB, rtt=0.2)
    edge = w.edges[0]
    keep = edge.ask(PROMPT, SamplingParams(seed=1, max_tokens=40, ignore_eos=True))
    gone = edge.ask(PROMPT, SamplingParams(seed=2, max_tokens=40))
    w.later(1.0, lambda: edge.cancel(gone))
    w.run()
    assert edge.client.tally.late_frames > 0
    assert w.service.late_frames > 0 or w.service.sessions == 0
    assert isinstance(edge.answers[keep].end, Ended)


def test_only_known_messages_are_sent():
    """The fault scripts above match on types: this list would miss a renamed one."""
    kinds: set[type[Message]] = set()

    class Watch:
        done = False

        def frames(self, world: World, pipe: Pipe, way: str, frame: bytes):  # type: ignore[no-untyped-def]
            kinds.add(type(decode(frame)))
            if Verdict in kinds and not self.done:
                self.done = True
                world.cut(pipe)
            return [(0.0, frame)]

    w = World(TARGET, draft(0.5), vocab_size=VOCAB, faults=Watch())
    edge = w.edges[0]
    for rule in Rule:
        edge.ask(PROMPT, SamplingParams(seed=3, max_tokens=30), rule=rule, schedule=Schedule.SYNC)
    number = edge.ask(PROMPT, SamplingParams(seed=3, max_tokens=300))
    w.later(2.0, lambda: edge.cancel(number))
    w.run()
    w.run(until=w.now + 1.0, idle=False)
    expected = {Open, Opened, Resume, Draft, Verdict, Relaxed, Tokens, Proposals, Correct, Cancel}
    assert expected <= kinds
    assert all(isinstance(e, Progress | LinkUp | LinkDown | Ended) for _, e in edge.events)


def test_a_newcomer_is_not_held_to_what_failed_others():
    """After "no progress over N links" the count begins anew: it once failed every later request
    at its first cut."""

    class CutUntil:
        def __init__(self) -> None:
            self.cuts = 0
            self.calm = False

        def frames(self, world: World, pipe: Pipe, way: str, frame: bytes):  # type: ignore[no-untyped-def]
            if not self.calm and isinstance(decode(frame), Open):
                self.cuts += 1
                world.cut(pipe)
            return [(0.0, frame)]

    faults = CutUntil()
    w = World(TARGET, draft(0.3), vocab_size=VOCAB, faults=faults, client={"give_up": 1e9})
    edge = w.edges[0]
    first = edge.ask(PROMPT, SamplingParams(seed=1, max_tokens=9))
    w.run()
    assert isinstance(edge.answers[first].end, Failed)
    faults.cuts = 0
    second = edge.ask(PROMPT, SamplingParams(seed=1, max_tokens=9))

    def soothe() -> None:
        faults.calm = faults.cuts >= 3
        if not faults.calm:
            w.later(w.now + 0.2, soothe)

    w.later(w.now + 0.2, soothe)
    w.run()
    assert isinstance(edge.answers[second].end, Ended)
    assert faults.cuts >= 3


@pytest.mark.parametrize("ids", [(1, VOCAB), (1, 2**32 - 1), None])
def test_a_row_of_ids_that_are_none_costs_a_link_and_commits_nothing(ids: tuple[int] | None):
    """I5 the other way round: a faulty cloud cannot put such ids into an answer."""
    row = Row(session=1, position=4, ids=ids, weights=bytes(8 if ids else 4 * VOCAB + 4))
    w = World(TARGET, draft(0.3), vocab_size=VOCAB)
    edge = w.edges[0]
    number = edge.ask(PROMPT, SamplingParams(seed=1, max_tokens=30), rule=Rule.RATIO)

    def meddle() -> None:
        edge.client.receive(encode(row), w.now)
        edge.act()

    w.later(0.3, meddle)
    w.run()
    answer = edge.answers[number]
    assert isinstance(answer.end, Ended)
    assert edge.client.tally.reconnects == 1
    assert all(0 <= t < VOCAB for t in answer.ids)
