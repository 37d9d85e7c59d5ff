"""The simulator against life: what is measured, the twin of an answer, what is said of both."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.bench.experiment import System, parse
from outrider.bench.journal import Answer, Cell, Key, Twin
from outrider.bench.page import run_page
from outrider.bench.validation import Case, Costs, Meter, held, rising, standing, twin, verdict
from outrider.cli import run
from outrider.commands import bench as bench_command
from outrider.core.link import Link
from outrider.core.tokens import Origin, Rule, SamplingParams
from outrider.engines.drafters import ModelDrafter
from outrider.engines.toy import ToyModel, random_law
from outrider.session.generation import Round, Step
from outrider.session.schedules import Schedule
from outrider.sim.scenario import ScenarioError

COSTS = Costs(
    verify=((1, 0.060), (9, 0.100)),
    draft=0.005,
    edge_start=0.001,
    edge_turn=0.0,
    edge_prompt=0.0,
    cloud_start=0.002,
    round_trip=0.003,
)


def told(**changes: float | None) -> Step:
    values = {"drafted": 0, "accepted": 0, "queue_s": 0.0, "step_s": 0.06, **changes}
    found = Round(strict=0, window=8, **values)  # type: ignore[arg-type]
    return Step(tokens=(1,), origins=(Origin.CORRECTION,), pieces=("",), round=found)


def metered() -> Meter:
    meter = Meter()
    # A token each 63 ms, of which 60 are the forward.
    meter.alone([(0.1 + 0.063 * i, told()) for i in range(5)])
    block = told(drafted=4, accepted=2, queue_s=0.001, network_s=0.004, step_s=0.080)
    # 22 ms of drafting, 5 on the way, 80 in the forward: 3 ms are the edge's own.
    meter.synchronous(
        [(0.1, told()), *((0.2 + 0.110 * i, block) for i in range(4))],
        [(4, 0.222), *[(4, 0.022)] * 3],
        prompt=50,
    )
    return meter


def test_what_machines_take_is_read_from_calibration_answers():
    found = metered().costs(beside=False)
    assert dict(found.verify) == pytest.approx({1: 0.060, 5: 0.080})
    assert found.cloud_start == pytest.approx(0.003)
    assert found.round_trip == pytest.approx(0.002), "5 ms less what a forward begins with"
    assert found.edge_start + 4 * found.draft == pytest.approx(0.022)
    assert found.edge_turn == pytest.approx(0.003)
    assert found.edge_prompt == pytest.approx(0.200 / 50), "the first job read it"


def test_both_sides_at_work_are_measured_apart():
    meter = metered()
    steps = [(0.1 * i, told(drafted=4, step_s=0.100)) for i in range(4)]
    meter.streamed(steps, [(4, 0.9), *[(4, 0.033)] * 3])
    assert dict(meter.costs(beside=True).verify)[5] == pytest.approx(0.100)
    assert dict(meter.costs(beside=False).verify)[5] == pytest.approx(0.080)
    beside = meter.costs(beside=True)
    assert beside.edge_start + 4 * beside.draft == pytest.approx(0.033)


def test_an_answers_own_times_replace_those_of_its_neighbours():
    steps = [(0.1 * i, told(drafted=4, step_s=0.160)) for i in range(3)]
    own = metered().costs(beside=False).own(steps, [(4, 0.544), (4, 0.044), (4, 0.044)], 50)
    assert own.edge_prompt == pytest.approx(0.010)
    assert dict(own.verify) == pytest.approx({1: 0.120, 5: 0.160}), "others as much slower"
    assert own.edge_start + 4 * own.draft == pytest.approx(0.044)


def test_row_costs_in_the_wrong_order_share_their_mean():
    found = rising([(1, 0.3, 1.0), (2, 0.5, 1.0), (5, 0.4, 3.0), (9, 0.6, 1.0)])
    assert dict(found) == pytest.approx({1: 0.3, 2: 0.425, 5: 0.425, 9: 0.6})


def test_nothing_measured_is_no_figure():
    with pytest.raises(ValueError, match="calibrate first"):
        Meter().costs(beside=False)


def case(schedule: Schedule, stands: tuple[bool, ...], **changes: object) -> Case:
    made = Case(
        arm=schedule.value,
        schedule=schedule,
        rule=Rule.COUPLED,
        link=Link(rtt_s=0.1),
        prompt=20,
        stands=stands,
        draft_length=4,
        window=8,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_a_twin_pays_each_measured_term():
    alone = twin(case(Schedule.CLOUD_ONLY, (True,) * 10), COSTS, COSTS)
    assert (alone.forwards, alone.later) == (10, 9)
    assert alone.rest == pytest.approx(9 * (0.060 + 0.002))
    # Prefill's token, then blocks of four that fall at once: 4 drafts, both ways, a forward.
    found = twin(case(Schedule.SYNC, (False,) * 12, draft_length=2), COSTS, COSTS)
    drafting, forward = 0.001 + 2 * 0.005, 0.002 + COSTS.verify[0][1] + 2 * 0.005
    assert found.marks[1].at - found.marks[0].at == pytest.approx(drafting + 0.103 + forward)
    assert (found.forwards, found.accepted) == (12, 0)
    read = twin(
        case(Schedule.SYNC, (False,) * 12, draft_length=2), replace(COSTS, edge_prompt=0.01), COSTS
    )
    assert read.rest - read.own_rest == pytest.approx(20 * 0.01), "once, behind the prefill's token"


def test_a_twin_meets_the_guesses_that_stood():
    stands = (True, True, True, False, True, True, True, True, True, True, True, True)
    found = twin(case(Schedule.SYNC, stands), COSTS, COSTS)
    # Prefill, three of {1..4} with a correction at 3, then 4 + 1, then what is left.
    assert [mark.tokens for mark in found.marks] == [1, 3, 5, 3]
    assert found.forwards == 4


@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.RATIO])
def test_which_guesses_stand_is_what_the_draft_says_again(rule: Rule):
    model = ToyModel(random_law(3, 16), vocab_size=16)
    drafter = ModelDrafter("toy", model=model)
    params = SamplingParams(seed=5, temperature=1.0, max_tokens=8)
    prompt = (1, 2, 3)
    session = drafter.session(len(prompt), params, rule)
    said = session.propose(prompt, 8).tokens
    session.close()
    output = (*said[:3], (said[3] + 1) % 16)
    assert standing(drafter, prompt, output, params, rule) == (True, True, True, False)


def cell(arm: str, seed: int, live: float, simulated: float, forwards: int = 8) -> Cell:
    found = twin(case(Schedule.CLOUD_ONLY, (True,) * 10), COSTS, COSTS)
    return Cell(
        key=Key(point="near", data="built-in", item="0", arm=arm, seed=seed),
        answers=(
            Answer(
                tokens=10, first=0.1, rest=9 * live, later=9, finish="length", drafted=0, accepted=0
            ),
        ),
        forwards=forwards,
        busy=0.5,
        seconds=1.0,
        bytes_up=1,
        bytes_down=1,
        marks=found.marks,
        twin=replace(
            found, rest=9 * simulated, later=9, own_rest=9 * live, own_later=9, forwards=8
        ),
    )


CELLS = [
    *(cell("cloud-only", seed, 0.060, 0.062) for seed in range(4)),
    *(cell("sync", seed, 0.060, 0.048) for seed in range(4)),
    *(cell("freerun", seed, 0.060, 0.060, forwards=10) for seed in range(4)),
]


def test_cells_beyond_the_limit_are_said_to_be():
    plain, sync, free = held(CELLS)
    assert plain.error.value == pytest.approx(1 / 30)
    assert plain.own == pytest.approx(0.0)
    assert not plain.beyond
    assert sync.error.value == pytest.approx(-0.2)
    assert sync.beyond
    assert free.forwards_error == pytest.approx(-0.2), "forwards count as time does"
    assert free.beyond
    said = verdict([plain, sync, free])
    assert said.startswith("1 of 3 cells within 10 %")
    assert "-20.0 % (sync, near)" in said


def test_a_cell_and_its_twin_survive_the_file():
    found = CELLS[0]
    again = Cell.of(json.loads(json.dumps(found.as_dict())))
    assert again == found
    assert isinstance(again.twin, Twin)
    assert again.twin.marks == found.marks


def test_the_page_shows_both():
    header = bench_command.header_of("validate.toml", (), quick=True, run_code=False)
    experiment = bench_command.load(header)
    page = run_page(experiment, header, CELLS)
    assert "The simulator against life" in page
    assert page.count('class="miss"') == 1, "time beyond the band"
    assert page.count('<tr class="off">') == 2
    assert "sync, simulated" in page


def test_our_own_scenario_says_what_it_is():
    header = bench_command.header_of("validate.toml", (), quick=False, run_code=False)
    found = bench_command.load(header)
    assert found.system is System.VALIDATE
    assert found.arms[0] == "cloud-only"
    assert "edge-only" not in found.arms, "nothing in it to simulate"
    assert {p.link.rtt_s for p in found.points if p.link} == {0.01, 0.05, 0.15}
    assert len(found.seeds) == 2


@pytest.mark.parametrize("arm", ["sync/auto", "sync/relaxed", "colocated", "sync/top-k"])
def test_what_cannot_be_played_again_is_refused(arm: str):
    with pytest.raises(ScenarioError, match="a validation knows"):
        parse(f'[bench]\nsystem = "validate"\n[schedule]\nnames = ["{arm}"]')


def test_validate_has_a_scenario_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "s.toml").write_text("")
    assert run(["bench", str(tmp_path / "s.toml"), "--validate"]) != 0
    assert "--validate runs a scenario of its own" in capsys.readouterr().err
