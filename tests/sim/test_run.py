"""The simulator against closed forms, and its own promises: luck, order, the same run twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from outrider.core.tokens import FinishReason
from outrider.session.schedules import Schedule
from outrider.sim.run import Measured, play
from outrider.sim.scenario import Scenario, parse

NAMES = [s.value for s in Schedule]


def scenario(**changes: object) -> Scenario:
    values: dict[str, object] = {
        "link.rtt": "100ms",
        "edge.draft": "5ms",
        "cloud.verify": "60ms",
        "acceptance.alpha": 0.8,
        "workload.requests": 4,
        "workload.max-tokens": 100,
        **changes,
    }
    given = {key: value for key, value in values.items() if value is not None}
    return parse("", overrides=[f"{key}={json.dumps(value)}" for key, value in given.items()])


def measured(name: str, **changes: object) -> Measured:
    made = scenario(**{"schedule.names": [name], **changes})
    return play(made, next(arm for arm in made.arms if arm.name == name))


def tokens_per_round(alpha: float, count: int) -> float:
    return sum(alpha**i for i in range(count + 1))


# ------------------------------------------------------------------------------ closed forms


def test_cloud_only_is_a_step_a_token():
    """Field case 40: n tokens cost TTFT + (n - 1) x the time between two."""
    found = measured("cloud-only")
    for sample in found.samples:
        assert sample.first == pytest.approx(0.100 + 0.060)
        assert sample.rest == pytest.approx(99 * 0.060)
    assert found.forwards == found.tokens == 400
    assert found.per_token == pytest.approx(0.060)


@pytest.mark.parametrize("alpha", [0.6, 0.8])
@pytest.mark.parametrize("count", [1, 4, 7])
def test_the_synchronous_loop(alpha: float, count: int):
    """A round takes K t_d + R + t_v and brings (1 - alpha^(K+1)) / (1 - alpha) tokens."""
    found = measured(
        "sync",
        **{
            "acceptance.alpha": alpha,
            "schedule.draft-length": count,
            "workload.max-tokens": 400,
            "workload.requests": 5,
        },
    )
    a_round = 5e-3 * count + 0.100 + 0.060
    assert found.per_token == pytest.approx(a_round / tokens_per_round(alpha, count), rel=0.05)
    assert found.tokens / found.forwards == pytest.approx(tokens_per_round(alpha, count), rel=0.05)


def test_colocated_pays_no_round_trip_between_blocks():
    near, far = (
        measured("colocated", **{"link.rtt": rtt, "workload.max-tokens": 500})
        for rtt in ("1ms", "500ms")
    )
    assert near.per_token == pytest.approx(far.per_token)
    expected = (4 * 5e-3 + 0.060) / tokens_per_round(0.8, 4)
    assert near.per_token == pytest.approx(expected, rel=0.05)


def test_edge_only_knows_no_link():
    found = measured("edge-only", **{"link.rtt": "9s", "edge.start": "2ms"})
    assert found.samples[0].first == pytest.approx(0.007)
    assert found.per_token == pytest.approx(0.005)


def test_without_a_link_streaming_is_bound_by_the_draft_or_the_target():
    """Zero latency: never slower than the target alone, never faster than the draft."""
    for name in ("stream", "freerun"):
        found = measured(name, **{"link.rtt": "0ms"})
        assert 0.005 < found.per_token < 0.060
        better = measured(name, **{"link.rtt": "0ms", "edge.draft": "0ms"})
        assert better.per_token < found.per_token


def test_far_away_free_run_is_cloud_only_and_sync_is_the_round_trip():
    """Infinite latency: drafts never come in time."""
    far = {"link.rtt": "8s", "workload.max-tokens": 60, "workload.requests": 2}
    assert measured("freerun", **far).per_token <= 0.060 * 1.03
    sync = measured("sync", **far)
    blocks = sync.forwards - 2  # without the prefills
    assert sync.per_token * 2 * 59 == pytest.approx(8.08 * blocks, rel=0.01)


def test_certain_drafts_and_hopeless_ones():
    sure = measured("sync", **{"acceptance.alpha": 1.0, "workload.max-tokens": 101})
    # The first token is the prefill's, the rest comes in whole blocks of K + 1.
    assert sure.forwards == 4 * (1 + 20)
    none = measured("sync", **{"acceptance.alpha": 0.0})
    assert none.forwards == none.tokens


@pytest.mark.parametrize("name", NAMES)
def test_max_tokens_ends_an_answer(name: str):
    """Field case 40: the simulator obeys the end rules of the engine."""
    found = measured(name, **{"workload.max-tokens": 7, "link.rtt": "20ms"})
    assert [s.tokens for s in found.samples] == [7] * 4
    assert {s.finish for s in found.samples} == {FinishReason.LENGTH.value}


def test_the_line_costs_what_it_carries():
    """A slow uplink delays drafts by their bytes: an id counts as in a real vocabulary."""
    fast, slow = (
        measured("sync", **{"link.up": up, "acceptance.alpha": 1.0}) for up in ("1gbit", "64kbit")
    )
    opening = measured("cloud-only").bytes_up
    blocks = fast.forwards - 4  # without the prefills
    drafts = (fast.bytes_up - opening) / blocks
    assert 4 * 3 + 4 < drafts < 4 * 3 + 8
    each = 8 * (drafts + 58) / 64e3  # a frame with its headers
    delay = (slow.per_token - fast.per_token) * 4 * 99 / blocks
    assert delay == pytest.approx(each, rel=0.1)


def test_sessions_share_forwards():
    alone = measured("cloud-only")
    shared = measured("cloud-only", **{"edge.count": 4, "cloud.session": "2ms"})
    assert shared.per_token == pytest.approx(0.066, rel=0.02)
    assert shared.forwards < 1.1 * alone.forwards
    apart = measured("cloud-only", **{"edge.count": 4, "cloud.count": 4, "cloud.session": "2ms"})
    assert apart.per_token == pytest.approx(0.060)


def test_context_and_prompts_cost_time():
    plain = measured("cloud-only", **{"workload.prompt": 1000})
    long = measured("cloud-only", **{"workload.prompt": 1000, "cloud.context": "10ms"})
    assert long.per_token - plain.per_token == pytest.approx(0.0105, rel=0.05)
    fed = measured("cloud-only", **{"workload.prompt": 1000, "cloud.prefill": "100us"})
    assert fed.samples[1].first - plain.samples[1].first > 0.0999
    assert fed.per_token == pytest.approx(plain.per_token)


def test_arrivals_queue_for_the_edge_alone():
    found = measured("edge-only", **{"workload.rate": 2.0, "workload.requests": 200})
    # 100 tokens of 5 ms at 2 a second: the draft engine is busy all the time, and a queue grows.
    assert found.samples[-1].queued > found.samples[0].queued
    idle = measured("edge-only", **{"workload.rate": 0.01, "workload.requests": 50})
    assert max(s.queued for s in idle.samples) < 0.5


# ------------------------------------------------------------------------------ what happens


def test_an_outage_is_a_pause_and_a_cut_a_reconnect():
    calm = measured("freerun")
    held = measured("freerun", **{"link.outages": [["2s", "1s"]]})
    assert held.tokens == calm.tokens == 400
    assert held.seconds - calm.seconds > 0.5
    cut = measured("freerun", **{"link.cuts": ["1s", "3s"]})
    assert cut.tokens == 400
    assert cut.reconnects == 2


def test_a_link_of_two_levels():
    jumps = measured(
        "sync", **{"link.levels": ["20ms", "180ms"], "link.rtt": None, "workload.requests": 20}
    )
    low, high = (measured("sync", **{"link.rtt": rtt}) for rtt in ("20ms", "180ms"))
    assert low.per_token < jumps.per_token < high.per_token


def test_a_controller_finds_the_length():
    fixed = measured("sync", **{"schedule.draft-length": 1, "link.rtt": "150ms"})
    found = measured("sync/auto", **{"schedule.draft-length": 1, "link.rtt": "150ms"})
    assert found.per_token < fixed.per_token


def test_the_ratio_rule_pays_for_its_dialogue():
    """In bytes: every draft carries its probability, every rejection the edge's choice. Not in
    time: the choice travels with the drafts behind it."""
    coupled, ratio = measured("sync"), measured("sync/ratio")
    assert ratio.per_token == pytest.approx(coupled.per_token)
    assert ratio.bytes_up > coupled.bytes_up + 8 * ratio.tokens / 2


# ------------------------------------------------------------------------------ the same twice

PROBE = """
import json
from outrider.sim.run import compare
from outrider.sim.scenario import parse
made = parse("", overrides=["workload.requests=2", "workload.max-tokens=30", "edge.count=3",
    "link.jitter=5ms", "link.loss=2%", "link.cuts=[\\"1s\\"]", "workload.rate=1.0"])
print(json.dumps([m.fingerprints for m in compare(made)]))
"""


def test_a_run_is_a_function_of_scenario_and_seed():
    prints = set()
    for hash_seed in ("0", "77"):
        done = subprocess.run(
            [sys.executable, "-c", PROBE],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        prints.add(done.stdout)
    assert len(prints) == 1
    assert len(set(map(str, json.loads(prints.pop())))) == len(NAMES)  # and the arms differ


def test_another_seed_is_another_run():
    one, two = (measured("sync", seed=seed) for seed in (1, 2))
    assert one.fingerprints != two.fingerprints
    both = measured("sync", seed=1, seeds=2)
    assert both.fingerprints == [*one.fingerprints, *two.fingerprints]
    assert both.tokens == one.tokens + two.tokens


def test_every_way_to_decode_meets_the_same_luck():
    """What stands is decided by request and place: blocks of one look at every place once."""
    sync = measured("sync", **{"schedule.draft-length": 1})
    pearl = measured("pearl", **{"schedule.draft-length": 1})
    assert sync.tokens == pearl.tokens
    assert abs(sync.samples[0].accepted - pearl.samples[0].accepted) < 20
