"""Statistics of a loaded verifier, in literals; arrivals; the driver with edges of known speed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from live import run
from outrider.bench.arrivals import Arrivals, parse_arrivals
from outrider.bench.load import (
    CloudCount,
    Outcome,
    Served,
    Traffic,
    jain,
    percentile,
    rate,
    summary,
)
from outrider.bench.loadrun import LoadPlan, LoadRun, prompted_jobs
from outrider.core.tokens import Origin, ParameterError, SamplingParams
from outrider.runtime.edgerequest import EdgeRequest
from outrider.runtime.linkuse import LinkUse
from outrider.session.generation import Round, Step
from outrider.session.schedules import Schedule

# ---------------------------------------------------------------- pure


def served(**changes: Any) -> Served:
    facts: dict[str, Any] = {
        "edge": 0,
        "tenant": "a",
        "due": 0.0,
        "first": 0.5,
        "last": 1.4,
        "tokens": 40,
        "first_tokens": 4,
        "forwards": 10,
        "rows": 40,
        "drafted": 30,
        "accepted": 24,
        "wasted": 3,
        "queue": (0.002, 0.004),
        "step": (0.03,),
    }
    return Served(**(facts | changes))


def test_tokens_are_counted_and_not_frames():
    """Field case 38: 40 tokens as 10 frames of 4, 100 ms apart, the first after 500 ms."""
    one = served()
    assert one.ttft == 0.5
    assert one.seconds_per_token == pytest.approx(1 / 40)
    assert served(tokens=4).seconds_per_token is None, "all at once: nothing to divide by"


@pytest.mark.parametrize(
    ("values", "share", "found"),
    [
        ((), 0.5, None),
        ((3.0,), 0.99, 3.0),
        ((4.0, 1.0, 3.0, 2.0), 0.5, 2.0),
        ((4.0, 1.0, 3.0, 2.0), 0.51, 3.0),
        ((4.0, 1.0, 3.0, 2.0), 0.95, 4.0),
        (tuple(float(i) for i in range(1, 101)), 0.95, 95.0),
        (tuple(float(i) for i in range(1, 101)), 0.99, 99.0),
        ((1.0, 2.0), 0.0, 1.0),
    ],
)
def test_percentiles(values: tuple[float, ...], share: float, found: float | None):
    assert percentile(values, share) == found


def test_fairness():
    assert jain([5.0, 5.0, 5.0]) == pytest.approx(1.0)
    assert jain([9.0, 0.0, 0.0]) == pytest.approx(1 / 3)
    assert jain([2.0, 1.0]) == pytest.approx(0.9)
    assert jain([0.0, 0.0]) is None
    assert jain([]) is None


def test_a_rate_is_over_the_time_that_was_asked_for():
    assert rate([served(due=1.0, last=3.0), served(due=2.0, last=5.0)]) == 20.0
    assert rate([]) is None


def outcome(*answers: Served, **changes: Any) -> Outcome:
    facts: dict[str, Any] = {
        "served": list(answers),
        "asked": len(answers),
        "warm_up_answers": 2,
        "seconds": 2.0,
        "busy": 0.5,
        "traffic": [Traffic(up=100, down=200), Traffic(up=60, down=40, reconnects=1)],
    }
    return Outcome(**(facts | changes))


def test_a_summary_in_literals():
    slow = served(edge=1, tenant="b", due=0.5, first=1.0, last=2.0, tokens=14, drafted=0)
    facts = summary(outcome(served(), slow))
    assert facts["tokens"] == 54
    assert facts["tokens_per_s"] == 27.0
    assert facts["ttft_ms"] == {"p50": 500.0, "p95": 500.0, "p99": 500.0}
    assert facts["ms_per_token"]["p50"] == pytest.approx(25.0)
    assert facts["ms_per_token"]["p95"] == pytest.approx(100.0)
    assert facts["queue_ms"] == {"p50": 2.0, "p95": 4.0}
    assert facts["forwards_per_token"] == pytest.approx(20 / 54)
    assert facts["rows_per_forward"] == 4.0
    assert facts["acceptance"] == pytest.approx(48 / 30)
    assert facts["bytes_up_per_token"] == pytest.approx(160 / 54)
    assert facts["bytes_down_per_token"] == pytest.approx(240 / 54)
    assert facts["reconnects"] == 1
    assert facts["edges_cpu"] == 0.25
    first, second = facts["edges"]
    assert (first["tokens"], first["bytes_up"], second["bytes_down"]) == (40, 100, 40)
    rates = [40 / 1.4, 14 / 1.5]
    assert [e["tokens_per_s"] for e in facts["edges"]] == pytest.approx(rates)
    assert facts["fairness"] == pytest.approx(sum(rates) ** 2 / (2 * sum(r * r for r in rates)))
    assert set(facts["tenants"]) == {"a", "b"}
    assert facts["tenants"]["b"]["answers"] == 1
    assert not facts["cold"]


def test_nothing_is_null_and_never_nan():
    """Field case 37: no drafts, or no answers at all."""
    none = summary(outcome(served(drafted=0, accepted=0, rows=None, tokens=4)))
    assert none["acceptance"] is None
    assert none["rows_per_forward"] is None
    assert none["ms_per_token"] == {"p50": None, "p95": None, "p99": None}
    empty = summary(Outcome(asked=3, failures=Counter(busy=2), failure="full", seconds=0.0))
    assert (empty["tokens_per_s"], empty["fairness"], empty["cold"]) == (None, None, True)
    assert (empty["unfinished"], empty["errors"], empty["first_error"]) == (1, {"busy": 2}, "full")
    json.dumps([none, empty], allow_nan=False)


def test_what_the_verifier_counted():
    before = {"forwards": 10, "rows": 40, "evictions": 1}
    after = {"forwards": 30, "rows": 140, "evictions": 4, "queue_ms": 1.0}
    found = CloudCount.between(before, after)
    assert found == CloudCount(forwards=20, rows=100, evictions=3)
    facts = summary(outcome(served(), cloud=found))
    assert (facts["cloud_forwards"], facts["cloud_rows_per_forward"]) == (20, 5.0)
    assert (facts["cloud_forwards_per_token"], facts["cloud_evictions"]) == (0.5, 3)
    assert CloudCount.between(None, after) is None
    assert CloudCount.between(before, None) is None
    assert CloudCount.between(after, before) is None, "it was restarted"
    assert CloudCount.between({"forwards": 1}, after) is None
    assert CloudCount.between(before | {"rows": "x"}, after) is None
    assert summary(outcome(served()))["cloud_rows_per_forward"] is None


def test_arrivals_are_seeded():
    assert parse_arrivals("closed").times(3, 1) == (None, None, None)
    found = parse_arrivals("poisson:4").times(3, 7)
    assert found == pytest.approx((0.0978287, 0.1387083, 0.4018322), abs=1e-6)
    assert parse_arrivals("poisson:4").times(5, 7)[:3] == found
    assert parse_arrivals("poisson:4").times(3, 8) != found
    many = parse_arrivals("poisson:4").times(20_000, 1)
    assert many[-1] == pytest.approx(5000.0, rel=0.02), "20,000 requests at 4 a second"
    assert list(many) == sorted(many)  # type: ignore[type-var]
    assert (str(Arrivals()), str(parse_arrivals("poisson:.5"))) == ("closed", "poisson:0.5")


@pytest.mark.parametrize(
    "text", ["", "open", "poisson", "poisson:", "poisson:0", "poisson:-1", "poisson:nan",
             "poisson:inf", "poisson:1e9", "closed:2"]
)  # fmt: skip
def test_other_arrivals_are_refused(text: str):
    with pytest.raises(ParameterError, match="arrivals: must be closed, or poisson:RATE"):
        parse_arrivals(text)


# ---------------------------------------------------------------- the driver


@dataclass(slots=True)
class Clock:
    now: float = 100.0


@dataclass(slots=True)
class Edge:
    """An edge whose answers take a known time: 10 tokens a frame, 4 frames. The first `slow`
    answers take three times as long."""

    clock: Clock
    slow: int = 0
    asked: list[EdgeRequest] = field(default_factory=list)
    use: int = 0

    @property
    def link_use(self) -> LinkUse:
        return LinkUse(
            payload_up=self.use, payload_down=3 * self.use, bytes_up=0, bytes_down=0, reconnects=0
        )

    async def stream(self, request: EdgeRequest) -> Stream:
        self.asked.append(request)
        self.use += 7
        return Stream(self, request, 3.0 if len(self.asked) <= self.slow else 1.0)


@dataclass(slots=True)
class Stream:
    edge: Edge
    request: EdgeRequest
    factor: float

    async def __aiter__(self) -> AsyncIterator[Step]:
        known = Round(drafted=3, accepted=2, strict=2, window=4, queue_s=0.002, step_s=0.03)
        for _ in range(4):
            self.edge.clock.now += 0.1 * self.factor
            yield Step(
                tokens=(1,) * 10,
                origins=(Origin.DRAFT,) * 10,
                pieces=("x",) * 10,
                round=known,
            )

    @property
    def result(self) -> Any:
        counters = SimpleNamespace(drafted=12, accepted=8)
        done = SimpleNamespace(
            completion_tokens=40, target_forwards=4, counters=counters, token_ids=(1,) * 40
        )
        return SimpleNamespace(generation=done, wasted=5)


def loaded(edge: Edge, plan: LoadPlan, **more: Any) -> Outcome:
    like = EdgeRequest(
        prompt_ids=(0,), params=SamplingParams(seed=50, max_tokens=40), schedule=Schedule.SYNC
    )
    driver = LoadRun(
        [edge],  # type: ignore[list-item]
        prompted_jobs([(1,), (2,), (3,)], like),
        plan,
        clock=lambda: edge.clock.now,
        **more,
    )
    return run(driver.run())


def test_a_slow_start_is_warmed_up_and_not_counted():
    """Field case 39: the first 4 answers take three times as long."""
    told: list[int] = []
    edge = Edge(Clock(), slow=4)
    warm = summary(loaded(edge, LoadPlan(requests=10, warm_up=8), told=told.append))
    assert warm["ms_per_token"]["p99"] == pytest.approx(10.0)
    assert warm["tokens_per_s"] == pytest.approx(100.0)
    assert (warm["warm_up_answers"], warm["cold"], warm["answers"]) == (8, False, 10)
    assert warm["bytes_up_per_token"] == pytest.approx(70 / 400)
    assert warm["bytes_down_per_token"] == pytest.approx(210 / 400)
    assert told == list(range(1, 11))
    cold = summary(loaded(Edge(Clock(), slow=4), LoadPlan(requests=10, warm_up=0)))
    assert cold["cold"]
    assert cold["ms_per_token"]["p95"] == pytest.approx(30.0)


def test_the_verifier_is_asked_behind_the_warm_up_and_at_the_end():
    edge = Edge(Clock())
    asked: list[int] = []

    async def status() -> dict[str, int]:
        asked.append(len(edge.asked))
        return {"forwards": 5 * len(edge.asked), "rows": 20 * len(edge.asked), "evictions": 0}

    counted = loaded(edge, LoadPlan(requests=3, warm_up=2), status=status).cloud
    assert asked == [2, 5]
    assert counted == CloudCount(forwards=15, rows=60, evictions=0)


def test_requests_have_their_own_prompts_and_seeds():
    edge = Edge(Clock())
    loaded(edge, LoadPlan(requests=4, warm_up=1))
    asked = [(request.prompt_ids, request.params.seed) for request in edge.asked]
    assert asked == [
        ((2,), 54),  # the warm-up, behind the last
        ((1,), 50),
        ((2,), 51),
        ((3,), 52),
        ((1,), 53),
    ]
    assert [request.params.max_tokens for request in edge.asked] == [8, 40, 40, 40, 40]


def test_what_an_answer_came_to():
    (one,) = loaded(Edge(Clock()), LoadPlan(requests=1, warm_up=0), tenants=["me"]).served
    assert (one.due, one.first, one.last) == pytest.approx((0.0, 0.1, 0.4))
    assert (one.tokens, one.first_tokens, one.forwards, one.rows) == (40, 10, 4, 16)
    assert (one.drafted, one.accepted, one.wasted, one.tenant) == (12, 8, 5, "me")
    assert one.queue == (0.002,) * 4


def test_a_request_that_waited_for_its_place_says_so():
    """Ten arrive at once, one place: each waits for those before it."""
    edge = Edge(Clock())
    plan = LoadPlan(requests=10, warm_up=0, arrivals=Arrivals(rate=1e4), seed=1)
    answers = loaded(edge, plan).served
    assert [a.ttft for a in answers] == pytest.approx([0.1 + 0.4 * i for i in range(10)], abs=0.01)
