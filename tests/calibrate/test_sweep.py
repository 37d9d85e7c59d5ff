"""Costs, sweep and labels on text whose best window and threshold are known."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.calibrate.costs import Pipeline, SegmentCosts
from outrider.calibrate.sweep import MIN_VISITS, Surfaces, label, replay_visits, surfaces, sweep
from outrider.calibrate.trace import Answer, leading, runs
from outrider.control.costs import RowCosts
from outrider.control.credit import CreditHistory


def answer(strict: str, jsd: list[float] | None = None, task: str = "t") -> Answer:
    """'1': the draft is the target's token. jsd: else 0 where it is and .6 where it is not."""
    n = len(strict)
    far = jsd or [0.0 if c == "1" else 0.6 for c in strict]
    drafts = [7 if c == "1" else 8 for c in strict]
    return Answer(
        task=task, tokens=[7] * n, drafts=drafts, jsd=far, tv=far, p=[0.5] * n, q=[0.5] * n
    )


def costs(
    pipeline: Pipeline = Pipeline.SYNC, rtt: float = 0.1, draft: float = 0.01
) -> SegmentCosts:
    return SegmentCosts(
        pipeline=pipeline, round_trip=rtt, draft=draft, verify=RowCosts([(1, 0.05), (11, 0.1)])
    )


def test_runs_and_leading() -> None:
    stands = np.array([True, True, False, True])
    assert runs(stands).tolist() == [2, 1, 0, 1]
    assert leading(stands) == 2
    assert leading(stands[:2]) == 2
    assert leading(stands[:0]) == 0


def test_sync_segments_by_hand() -> None:
    sync = costs()
    assert sync.seconds(0, 0.0) == pytest.approx(0.15)
    assert sync.seconds(5, 0.0) == sync.seconds(5, 1.0) == pytest.approx(0.05 + 0.1 + 0.075)
    assert sync.tokens(3, 0.0) == 4
    assert sync.tokens(5, 1.0) == 6


def test_plc_segments_by_hand() -> None:
    """T_edge = .05, T_cloud = .175: in parallel when all stand, one after the other when not."""
    plc = costs(Pipeline.PLC)
    assert plc.seconds(5, 1.0) == pytest.approx(0.175)
    assert plc.seconds(5, 0.0) == pytest.approx(0.225)
    assert plc.seconds(5, 0.5) == pytest.approx(0.2)
    assert plc.tokens(5, 1.0) == 5
    assert plc.tokens(3, 0.0) == 4


def test_segments_begin_behind_the_last_verdict_s_token() -> None:
    history = CreditHistory(k=1, beta=1.0, start=0.5)
    seen = replay_visits([answer("1101100")], lambda r, d: (0.0, 2), Pipeline.SYNC, history)
    assert [v.start for v in seen] == [0, 3, 6]
    assert [v.credit for v in seen] == [0.5, 1.0, 1.0]
    history = CreditHistory(k=1, beta=1.0, start=0.5)
    seen = replay_visits([answer("1101100")], lambda r, d: (0.0, 2), Pipeline.PLC, history)
    assert [v.start for v in seen] == [0, 2, 3, 5, 6]
    assert [v.credit for v in seen] == [0.5, 1.0, 0.0, 1.0, 0.0]


def test_a_threshold_changes_the_cut_but_not_the_credit() -> None:
    history = CreditHistory(k=1, beta=1.0)
    text = answer("10100", [0.0, 0.1, 0.0, 0.6, 0.6])
    seen = replay_visits([text], lambda r, d: (0.1, 3), Pipeline.SYNC, history)
    assert [v.start for v in seen] == [0, 4]
    assert seen[1].credit == pytest.approx(1 / 3)


def test_surfaces_by_hand() -> None:
    text = answer("110101", [0.0, 0.0, 0.1, 0.0, 0.6, 0.0])
    history = CreditHistory(k=1, beta=1.0, start=0.5)
    seen = replay_visits([text], lambda r, d: (0.0, 2), Pipeline.SYNC, history)
    assert [v.start for v in seen] == [0, 3, 5]
    found = surfaces([text], seen, costs(), [], [0.0, 0.2], [1, 3])
    assert found.visits == (2,), "three drafts behind position 5 are not on record"
    # theta 0: 2 of 3, then 1; theta .2: 3 of 3, then 1.
    assert found.tokens[0].tolist() == [[2.0, 2.5], [2.0, 3.0]]
    assert found.quality[0].tolist() == [[1.0, 1.0], [1.0, 3 / 4]]
    assert found.seconds[0, 0].tolist() == pytest.approx([0.165, 0.195])


def test_labels_minimise_seconds_a_token_within_the_quality() -> None:
    text = answer("110101", [0.0, 0.0, 0.1, 0.0, 0.6, 0.0])
    history = CreditHistory(k=1, beta=1.0, start=0.5)
    seen = replay_visits([text], lambda r, d: (0.0, 2), Pipeline.SYNC, history)
    found = surfaces([text], seen, costs(), [], [0.0, 0.2], [1, 3])
    best, gamma = label(found, [0.0, 0.2], [1, 3], delta=0.7)
    assert best == [(0.2, 3)]
    assert gamma == pytest.approx(0.195 / 3)
    best, gamma = label(found, [0.0, 0.2], [1, 3], delta=0.8)
    assert best == [(0.0, 3)], "T = .2 falls short of .8, T = 0 never does"
    assert gamma == pytest.approx(0.195 / 2.5)
    best, gamma = label(found, [0.0, 0.2], [1, 3], delta=0.7, gamma=0.001)
    assert best == [(0.0, 1)], "where a token is worth nothing the cheapest segment wins"
    assert gamma == 0.001


def test_no_gamma_gives_the_least_ratio_of_all_policies() -> None:
    """Dinkelbach against trying every pair of labels."""
    random = np.random.default_rng(2)
    shape = (2, 2, 3)
    found = Surfaces(
        visits=(3, 5),
        seconds=random.uniform(1, 2, shape),
        tokens=random.uniform(1, 4, shape),
        quality=np.ones(shape),
    )
    _, gamma = label(found, [0.0, 0.1], [1, 2, 3], delta=0.5)
    cells = list(np.ndindex(2, 3))
    ratios = [
        (3 * found.seconds[0][a] + 5 * found.seconds[1][b])
        / (3 * found.tokens[0][a] + 5 * found.tokens[1][b])
        for a in cells
        for b in cells
    ]
    assert gamma == pytest.approx(min(ratios))


def two_worlds(count: int) -> list[Answer]:
    """Long stretches in which all drafts stand, and such in which none does."""
    return [answer(("1" * 200 + "0" * 60) * 2) for _ in range(count)]


def test_the_sweep_finds_long_windows_for_high_credit_and_short_ones_for_low() -> None:
    thresholds = (0.0, 0.3)
    found = sweep(two_worlds(4), costs(), k=1, beta=0.5, delta=0.8, thresholds=thresholds)
    table = found.table
    assert min(table.visits[0], table.visits[-1]) >= MIN_VISITS
    assert table.lookup(0.99)[1] == 16
    assert table.lookup(0.01)[1] == 1
    assert {t for t, _ in map(table.lookup, (0.01, 0.99))} == {0.0}, "no threshold changes a thing"
    assert found.gamma < costs().seconds(16, 1.0) / 4


def test_nearly_right_drafts_are_let_pass_only_where_most_are_right() -> None:
    """Every twentieth draft differs at JSD .1: Acc allows T = .1. Where every second one does,
    leading drafts by the strict rule are too few for delta."""
    good = answer(("1" * 19 + "0") * 20, ([0.0] * 19 + [0.1]) * 20)
    bad = answer("10" * 200, [0.0, 0.1] * 200)
    for text, threshold in ((good, 0.1), (bad, 0.0)):
        found = sweep([text], costs(), k=1, beta=0.5, delta=0.55)
        busiest = int(np.argmax(found.table.visits))
        assert found.table.best_threshold[busiest] == threshold


def test_a_bin_seen_rarely_takes_its_neighbour_s_figures() -> None:
    found = sweep([answer("1" * 400)], costs(), k=1, beta=1.0, delta=0.8).table
    assert found.visits[0] == 0
    assert found.best_window[0] == found.best_window[-1] == 16
    assert found.seconds[0] == found.seconds[-1]


def test_too_short_answers() -> None:
    with pytest.raises(ValueError, match="longer than the largest window of 16"):
        sweep([answer("1" * 10)], costs(), k=5, beta=0.3, delta=0.8)
