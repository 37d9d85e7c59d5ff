"""A controller told by recorded text, with segments counted by hand."""

from __future__ import annotations

import pytest

from outrider.calibrate.costs import Pipeline, SegmentCosts
from outrider.calibrate.replay import replay
from outrider.calibrate.trace import Answer
from outrider.control.base import ControllerFacts
from outrider.control.costs import RowCosts
from outrider.control.credit import Credit
from outrider.control.fixed import Fixed, Never

TEXT = Answer(
    task="t",
    tokens=[7] * 8,
    drafts=[7, 7, 8, 7, 8, 7, 7, 7],
    jsd=[0.0, 0.0, 0.1, 0.0, 0.6, 0.0, 0.0, 0.0],
    tv=[0.0, 0.0, 0.3, 0.0, 0.9, 0.0, 0.0, 0.0],
    p=[0.5] * 8,
    q=[0.5] * 8,
)


def costs(pipeline: Pipeline = Pipeline.SYNC) -> SegmentCosts:
    return SegmentCosts(pipeline=pipeline, round_trip=0.1, draft=0.01, verify=RowCosts([(1, 0.05)]))


def test_the_target_alone() -> None:
    done = replay([TEXT], Never(ControllerFacts()), costs(), relaxed=False)
    assert (done.tokens, done.rounds, done.drafted) == (8, 8, 0)
    assert done.seconds == pytest.approx(8 * 0.15)
    assert done.as_dict()["quality"] == 1.0


def test_fixed_blocks() -> None:
    """11|8, 7 8, then 777 but one: blocks of 3 at 0, 3, 5 (room 2)."""
    done = replay([TEXT], Fixed(ControllerFacts(fixed_length=3)), costs(), relaxed=False)
    assert (done.tokens, done.rounds) == (8, 3)
    assert (done.drafted, done.accepted, done.strict, done.right) == (8, 5, 5, 5)
    assert done.seconds == pytest.approx(3 * 0.15 + 8 * 0.01)
    assert done.as_dict()["ms_per_token"] == pytest.approx(1e3 * 0.53 / 8)


def test_plc_commits_no_bonus() -> None:
    done = replay(
        [TEXT], Fixed(ControllerFacts(fixed_length=2)), costs(Pipeline.PLC), relaxed=False
    )
    # 0: both, 2: none, 3: one, 5: both (room 2), 7: room 0
    assert (done.tokens, done.rounds, done.accepted) == (8, 5, 5)
    assert done.seconds == pytest.approx(2 * 0.15 + 2 * 0.17 + 0.15)


def test_a_threshold_accepts_more_and_says_what_it_changed() -> None:
    options = {"threshold": 0.0, "t_base": 0.1, "window_min": 4.0, "window_max": 4.0}
    done = replay([TEXT], Credit(ControllerFacts(options=options)), costs(), relaxed=True)
    # 0: 11x1 pass, target's own at 4; 5: 11
    assert (done.tokens, done.rounds) == (8, 2)
    assert (done.accepted, done.strict, done.right) == (6, 4, 5)
    facts = done.as_dict()
    assert facts["quality"] == pytest.approx(4 / 6)
    assert facts["right"] == pytest.approx(5 / 6)
    assert facts["relaxed_per_token"] == pytest.approx(1 / 8)
    assert facts["tv_per_token"] == pytest.approx(0.3 / 8)
    strict = replay([TEXT], Credit(ControllerFacts(options=options)), costs(), relaxed=False)
    assert strict.accepted == strict.right == 5
