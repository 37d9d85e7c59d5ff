"""The coarse simulation against the fine one and against closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.session.schedules import Schedule
from outrider.sim.run import play
from outrider.sim.scale import SCHEDULES, Crowd, crowd, crowds
from outrider.sim.scenario import Scenario, ScenarioError, parse

TOLERANCE = 0.10
"""Of time per token and forwards per token, coarse against fine."""
BASE = {
    "link.rtt": "100ms",
    "edge.draft": "5ms",
    "edge.count": "4",
    "workload.rate": "0.02",
    "workload.requests": "8",
    "workload.max-tokens": "100",
    "scale.duration": "600s",
}
WORLDS = {
    "plain": {},
    "near": {"link.rtt": "20ms", "link.jitter": "4ms"},
    "strange draft": {"acceptance.alpha": "0.6"},
    "rows cost": {"cloud.verify": '[[1,"60ms"],[9,"90ms"]]'},
    "a curve, a slow draft": {"acceptance.curve": "[0.7,0.55,0.45]", "edge.draft": "15ms"},
    "a small window": {"schedule.window": "6"},
}


def scenario(**changes: str) -> Scenario:
    values = {**BASE, **changes}
    return parse("", overrides=[f"{key}={value}" for key, value in values.items()])


@pytest.mark.parametrize(
    ("world", "schedule"),
    [
        # Each world and each schedule is in the default run, all pairs of them in the slow one.
        (world, schedule)
        if i % len(SCHEDULES) == j or world == "plain"
        else pytest.param(world, schedule, marks=pytest.mark.slow)
        for i, world in enumerate(WORLDS)
        for j, schedule in enumerate(SCHEDULES)
    ],
)
def test_coarse_and_fine_agree(world: str, schedule: Schedule):
    made = scenario(**WORLDS[world])
    arm = next(a for a in made.arms if a.schedule is schedule)
    fine = play(made, arm)
    # As many questions in the same time, wherever they fall.
    coarse = crowd(replace(made, duration=fine.seconds), schedule)
    assert coarse.per_token == pytest.approx(fine.per_token, rel=TOLERANCE)
    fine_rows, coarse_rows = fine.rows / fine.tokens, coarse.rows / coarse.tokens
    assert coarse_rows == pytest.approx(fine_rows, rel=TOLERANCE)


def test_tokens_a_round():
    """Field case 40: alpha .8, K = 4: 3.3616 tokens a round within 1 % over 100,000 rounds."""
    found = crowd(
        scenario(
            **{
                "link.rtt": "0ms",
                "edge.draft": "0ms",
                "edge.count": "100",
                "workload.rate": "2",
                "workload.max-tokens": "5000",
                "cloud.verify": "1ms",
                "cloud.batch-rows": "10000",
                "scale.duration": "3s",
            }
        ),
        Schedule.SYNC,
    )
    rounds = (found.rows - found.asked) / 5  # without the prefills
    assert rounds > 100_000
    assert found.tokens / rounds == pytest.approx(3.3616, rel=0.01)


def test_a_verifier_that_is_too_small_falls_behind():
    crowded = {"edge.count": "100", "workload.rate": "0.1", "scale.duration": "120s"}
    small = crowd(scenario(**crowded, **{"cloud.batch-rows": "8"}), Schedule.CLOUD_ONLY)
    large = crowd(scenario(**crowded, **{"cloud.count": "20"}), Schedule.CLOUD_ONLY)
    assert small.busy > 0.99
    assert small.tokens_each_second < 0.5 * large.tokens_each_second
    assert small.first[0] > 10 * large.first[0]
    assert small.answers < large.answers


def test_a_run_is_a_function_of_its_seed():
    def found(seed: str) -> Crowd:
        return crowd(scenario(seed=seed, **{"cloud.count": "2"}), Schedule.FREERUN)

    assert found("3") == found("3")
    assert found("3").fingerprint != found("4").fingerprint


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"acceptance.spread": "0.1", "acceptance.memory": "20"}, "alpha or a curve"),
        ({"link.outages": '[["1s","1s"]]'}, "must not change"),
        ({"schedule.names": '["pearl"]'}, "pearl needs the fine simulation.*known here are cloud-"),
        ({"schedule.names": '["sync/auto"]'}, "sync/auto needs the fine simulation"),
        ({"schedule.names": '["sync/ratio"]'}, "sync/ratio needs the fine simulation"),
    ],
)
def test_what_only_the_fine_simulation_knows_is_refused(change: dict[str, str], says: str):
    with pytest.raises(ScenarioError, match=says):
        crowds(scenario(**change))
    with pytest.raises(ScenarioError, match=r"workload\.rate"):
        crowds(parse(""))
