"""The coarse simulation against the fine one and against closed forms."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from outrider.session.schedules import Schedule
from outrider.sim.lockstep import SCHEDULES
from outrider.sim.run import play
from outrider.sim.scale import Crowd, crowd, crowds
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
    "an instant draft": {"edge.draft": "0ms"},
    "all that costs": {
        "edge.start": "1ms",
        "edge.prefill": "50us",
        "cloud.start": "2ms",
        "cloud.session": "3ms",
        "cloud.context": "20ms",
        "cloud.prefill": "200us",
    },
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


@pytest.mark.parametrize(
    "schedule", [Schedule.SYNC, pytest.param(Schedule.FREERUN, marks=pytest.mark.slow)]
)
def test_losses_cost_time(schedule: Schedule):
    """A stream of single drafts suffers more of them than the coarse simulation knows."""
    made = scenario(**{"link.loss": "0.01"})
    fine = play(made, next(a for a in made.arms if a.schedule is schedule)).per_token
    assert 0.85 * fine < crowd(made, schedule).per_token < fine
    many, none = (crowd(scenario(**{"link.loss": loss}), schedule) for loss in ("0.1", "0"))
    assert many.per_token > 1.1 * none.per_token


def test_a_full_forward_divides_what_it_can():
    """Fair: nobody's drafts wait for ever, and no forward has more rows than it may."""
    crowded = {"edge.count": "40", "workload.rate": "0.1", "cloud.batch-rows": "12"}
    for schedule in SCHEDULES:
        found = crowd(scenario(**crowded, **{"scale.duration": "30s"}), schedule)
        blocks = schedule in (Schedule.SYNC, Schedule.COLOCATED)
        assert found.rows <= found.forwards * (12 + (4 if blocks else 0))
        assert found.rows >= 11 * found.forwards
        assert found.busy > 0.95


def test_each_verifier_goes_at_its_own_pace():
    """Two edges of three verifiers: one has nothing to do, and the others' answers are complete."""
    made = scenario(**{"edge.count": "2", "cloud.count": "3"})
    shares: list[float] = []
    for schedule in SCHEDULES:
        found = crowd(made, schedule, told=shares.append)
        assert found.asked > 10
        assert found.answers >= found.asked - 2
        assert found.busy < 2 / 3
        alone = crowd(replace(made, clouds=1, edges=1), schedule)
        assert found.per_token == pytest.approx(alone.per_token, rel=0.05)
    assert 0.0 <= min(shares) < max(shares) <= 1.0


def test_multiplex_judges_of_a_block_what_pays():
    """Where rows cost, a loaded verifier takes fewer of a block at once, and judges fewer in all
    than `sync`, as what stands behind a guess that fell is never judged."""
    loaded = {
        "edge.count": "40",
        "workload.rate": "0.05",
        "cloud.verify": '[[1,"30ms"],[64,"300ms"]]',
        "scale.duration": "120s",
    }
    sync, taken = (crowd(scenario(**loaded), s) for s in (Schedule.SYNC, Schedule.MULTIPLEX))
    assert taken.rows / taken.tokens < 0.95 * sync.rows / sync.tokens


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


def test_a_run_does_not_depend_on_the_processor():
    """The same hash from numpy's plain loops as from the vector instructions of this machine."""
    code = (
        "from outrider.sim.scale import crowds; from outrider.sim.scenario import parse\n"
        "sets = ['workload.rate=0.2', 'edge.count=20', 'cloud.count=3', 'link.jitter=7ms',"
        " 'link.loss=0.01', 'cloud.batch-rows=9', 'cloud.context=13ms', 'scale.duration=15s']\n"
        "print([c.fingerprint for c in crowds(parse('', overrides=sets))])"
    )
    umath = np._core._multiarray_umath
    wide = [name for name in umath.__cpu_dispatch__ if umath.__cpu_features__.get(name)]
    hashes = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "NPY_DISABLE_CPU_FEATURES": " ".join(without)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for without in ([], wide)
    }
    assert len(hashes) == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"acceptance.spread": "0.1", "acceptance.memory": "20"}, "alpha or a curve"),
        ({"link.outages": '[["1s","1s"]]'}, "must not change"),
        ({"workload.rate": "1000", "edge.count": "10000"}, "questions: at most"),
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
