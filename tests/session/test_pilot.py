"""Controllers in their seat: edge and cloud in virtual time, where all costs are known."""

from __future__ import annotations

import itertools

import pytest

from outrider.control.base import ControllerFacts, Decision, Observation, Outcome
from outrider.control.estimators import Estimators
from outrider.control.registry import CONTROLLERS, make
from outrider.core.draft import StopRule
from outrider.core.tokens import SamplingParams
from outrider.proto.messages import Load
from outrider.session.events import Ended
from outrider.session.pilot import ControlledPilot, Judged
from outrider.session.schedules import STREAMING, Schedule
from toys import TARGET, VOCAB, draft
from world import Answer, World, alone

PROMPT = (1, 2, 3)
WIRED = (
    Schedule.SYNC,
    Schedule.PEARL,
    Schedule.PLC,
    Schedule.STREAM,
    Schedule.MULTIPLEX,
    Schedule.HYBRID,
    Schedule.FREERUN,
)
NAMES = [name for name in CONTROLLERS if name != "specdecpp"]  # wants a draft that shows its state


class Seat:
    """A world with one controller that stays from answer to answer."""

    def __init__(self, name: str, schedule: Schedule, *, share: float = 0.2, **world: object):
        self.world = World(TARGET, draft(share), vocab_size=VOCAB, **world)  # type: ignore[arg-type]
        facts = ControllerFacts(max_length=10, fixed_length=4)
        self.controller = make(name, facts)
        self.estimators = Estimators()
        self.schedule = schedule

    def ask(self, seed: int, tokens: int = 40) -> Answer:
        edge = self.world.edges[0]
        pilot = ControlledPilot(
            self.controller,
            self.estimators,
            streaming=self.schedule in STREAMING,
            free=self.schedule is Schedule.FREERUN,
            now=self.world.now,
        )
        number = edge.ask(
            PROMPT,
            SamplingParams(seed=seed, max_tokens=tokens),
            schedule=self.schedule,
            draft_length=10,
            window=10,
            pilot=pilot,
        )
        self.world.run()
        return edge.answers[number]


def pace(answer: Answer) -> float:
    """Seconds a token, behind the first."""
    return (answer.times[-1] - answer.times[0]) / (len(answer.times) - 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("schedule", WIRED)
def test_every_controller_by_name_leaves_the_text_alone(name: str, schedule: Schedule):
    seat = Seat(name, schedule, jitter=0.02)
    for seed in range(2):  # the second with what it learned from the first
        answer = seat.ask(seed)
        params = SamplingParams(seed=seed, max_tokens=40)
        assert tuple(answer.ids) == alone(TARGET, PROMPT, params, vocab_size=VOCAB)
        assert isinstance(answer.end, Ended)
        assert answer.end.confirmed


def test_the_estimates_are_what_the_world_is():
    """R, t_d, t_v(rows) and acceptance of a world that never changes."""
    seat = Seat("fixed", Schedule.SYNC, rtt=0.08, draft_time=0.007)
    for seed in range(6):
        seat.ask(seed)
    known = seat.estimators.snapshot(seat.world.now)
    bytes_time = 30 * known.byte_up  # what a frame's bytes are taken to have cost
    assert known.round_trip == pytest.approx(0.08, abs=bytes_time + 1e-4)
    assert known.draft_start + 4 * known.draft == pytest.approx(0.028, rel=0.05)
    assert known.verify.seconds(5) == pytest.approx(0.03 + 0.0005 * 5, rel=0.02)
    assert known.queue == pytest.approx(0.0, abs=1e-6)
    assert 0.6 < known.curve.acceptance(0) < 0.95
    assert known.rounds > 40


def test_the_prefill_is_no_step():
    """Its forward is as long as the prompt: it must not teach what one row costs."""
    estimators = Estimators()
    pilot = ControlledPilot(make("fixed", ControllerFacts()), estimators, streaming=False, now=0.0)
    pilot.streamed(1, Load(step_us=900_000), 1.0)
    assert not estimators.verify
    pilot.streamed(1, Load(step_us=30_000), 1.1)
    assert estimators.verify.seconds(1) == pytest.approx(0.03)


class Recorder:
    """Says what it was asked and told."""

    name = "recorder"

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = itertools.cycle(lengths)
        self.asked: list[Observation] = []
        self.told: list[Outcome] = []

    def decide(self, observation: Observation) -> Decision:
        self.asked.append(observation)
        return Decision(length=min(next(self.lengths), observation.room), threshold=0.125)

    def observe(self, outcome: Outcome, now: float) -> None:
        self.told.append(outcome)

    def stop_rule(self) -> StopRule | None:
        return None


def test_one_question_a_round_and_its_answer_comes_back_with_the_outcome():
    controller = Recorder([3, 1])
    pilot = ControlledPilot(controller, Estimators(), streaming=False, now=0.0)
    load = Load(queue_us=2_000, step_us=30_000)
    assert [pilot.length(1.0, 9), pilot.length(1.1, 9), pilot.length(1.2, 2)] == [3, 3, 2]
    assert len(controller.asked) == 1
    assert pilot.threshold == 0.125
    pilot.sent(13, 20, 1.3)
    pilot.verdict(Judged(start=10, drafted=3, accepted=2, strict=1, tokens=3, load=load), 1.4)
    (outcome,) = controller.told
    assert outcome.decision.length == 3
    assert (outcome.drafted, outcome.accepted, outcome.strict, outcome.tokens) == (3, 2, 1, 3)
    assert outcome.seconds == pytest.approx(0.4)
    assert pilot.network == pytest.approx(0.1 - 0.032)
    assert pilot.length(1.5, 9) == 1
    assert len(controller.asked) == 2
    assert pilot.length(1.6, 0) == 0, "no room is no question"


def test_far_away_and_slow_to_draft_it_lets_the_cloud_stream():
    """I8 for the synchronous loop: where no round pays, `auto` is as good as cloud-only but for
    its probes; where they pay, it is well below both."""

    def mean_pace(name: str, schedule: Schedule, **costs: float) -> float:
        seat = Seat(name, schedule, **costs)  # type: ignore[arg-type]
        for seed in range(5):  # what it learns from
            seat.ask(seed, tokens=120)
        return sum(pace(seat.ask(seed, tokens=150)) for seed in range(50, 54)) / 4

    far = {"rtt": 0.4, "share": 0.6}
    plain = mean_pace("never", Schedule.CLOUD_ONLY, **far)
    assert mean_pace("auto", Schedule.SYNC, **far) < 1.05 * plain
    assert mean_pace("fixed", Schedule.SYNC, **far) > 3 * plain
    near = {"rtt": 0.004, "share": 0.05, "draft_time": 0.001}
    plain = mean_pace("never", Schedule.CLOUD_ONLY, **near)
    assert mean_pace("auto", Schedule.SYNC, **near) < 0.4 * plain


@pytest.mark.parametrize(("rtt", "most"), [(0.1, 1.2), (0.4, 1.08)])
def test_the_first_answer_needs_no_lessons(rtt: float, most: float):
    """Told the target's costs by the greeting and the link by OPENED, `auto` streams from the
    cloud at once where no round can pay, and soon where that depends on what a draft token costs,
    which nobody has told it: an edge that answers one question is nearly as good as another."""
    plain = Seat("never", Schedule.CLOUD_ONLY, rtt=rtt, share=0.6, draft_time=0.02)
    seat = Seat("auto", Schedule.SYNC, rtt=rtt, share=0.6, draft_time=0.02)
    costs = [(rows, 0.03 + 0.0005 * rows) for rows in (1, 2, 4, 8, 16)]
    seat.estimators.target(costs)
    assert not seat.estimators.snapshot(0.0).informed
    ratio = pace(seat.ask(1, tokens=60)) / pace(plain.ask(1, tokens=60))
    assert seat.estimators.snapshot(seat.world.now).informed
    assert ratio < most


def test_what_the_target_says_of_itself_is_checked():
    estimators = Estimators()
    estimators.target([(0, 0.1), (4, -1.0), (4, float("nan")), (2, float("inf"))])
    assert not estimators.verify
    estimators.target([(1, 0.03), (8, 0.04)])
    estimators.target([(1, 9.0)])
    assert estimators.verify.seconds(1) == pytest.approx(0.03), "the first word stands"
    estimators.greeting(network=float("nan"), now=1.0)
    assert not estimators.snapshot(1.0).informed
    estimators.greeting(network=0.08, now=2.0)
    assert estimators.snapshot(2.0).informed


@pytest.mark.parametrize("name", ["auto", "specstop", "markov"])
def test_in_free_run_nobody_stops_guessing(name: str):
    """Late drafts cost no time there: a model of rounds that wait once turned them off, and gave
    away a third of the speed."""
    costs = {"rtt": 0.05, "share": 0.2, "step_time": lambda rows: 0.09 + 0.0005 * rows}
    fixed, chosen = (Seat(n, Schedule.FREERUN, **costs) for n in ("fixed", name))
    for seed in range(4):
        fixed.ask(seed, tokens=60)
        chosen.ask(seed, tokens=60)
    plain = pace(Seat("never", Schedule.CLOUD_ONLY, **costs).ask(9, tokens=80))
    assert pace(chosen.ask(9, tokens=80)) < 1.03 * pace(fixed.ask(9, tokens=80)) < 0.9 * plain


def test_a_verdict_is_not_timed_by_a_frame_of_a_dropped_chain():
    """After a rejection the next block lies at the same places as the lost one: R was once taken
    for the time since the block before."""
    estimators = Estimators()
    pilot = ControlledPilot(Recorder([4]), estimators, streaming=False, now=0.0)
    load = Load(step_us=30_000)
    pilot.streamed(1, Load(), 0.0)
    for n in range(6):
        at = float(n)
        pilot.length(at, 9)
        pilot.sent(14 + n, 20, at)
        pilot.dropped()
        judged = Judged(start=10 + n, drafted=4, accepted=0, strict=0, tokens=1, load=load)
        pilot.verdict(judged, at + 0.08)
        assert pilot.network == pytest.approx(0.05)
    assert estimators.snapshot(6.0).round_trip == pytest.approx(0.05, abs=1e-3)


def test_the_drafts_prefill_is_no_draft_token():
    estimators = Estimators()
    pilot = ControlledPilot(Recorder([4]), estimators, streaming=False, now=0.0)
    pilot.drafted(4, 0.9)
    assert estimators.snapshot(0.0).draft == Estimators().snapshot(0.0).draft
    pilot.drafted(4, 0.02)
    assert estimators.snapshot(0.0).draft == pytest.approx(0.005)


@pytest.mark.parametrize("schedule", WIRED)
def test_r_is_r_in_a_world_of_rejections(schedule: Schedule):
    seat = Seat("fixed", schedule, rtt=0.08, share=0.6)
    for seed in range(5):
        seat.ask(seed)
    assert seat.estimators.snapshot(seat.world.now).round_trip == pytest.approx(0.08, abs=0.012)
