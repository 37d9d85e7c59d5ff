"""From traces to a calibration that the controller runs, and the two commands on toy models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from test_sweep import answer

from outrider.calibrate.costs import Pipeline
from outrider.calibrate.run import Settings, calibrate, comparison, save, split
from outrider.calibrate.trace import TraceHeader, Traces
from outrider.cli import run
from outrider.control.base import CalibrationError, ControllerFacts
from outrider.control.calibration import Calibration, ModelFacts, load
from outrider.control.credit import Credit
from outrider.control.predictor import Predictor

pytest.importorskip("torch", reason="the torch extra is not installed")

SETTINGS = Settings(round_trip=0.1, draft_seconds=0.01, verify_seconds=0.05, k=1, beta=0.5)


def traces(texts: list[str]) -> Traces:
    model = ModelFacts(name="m", vocabulary="00", dtype="f", parameters=1)
    header = TraceHeader(
        outrider="0",
        target=model,
        draft=model,
        temperature=0.7,
        seed=0,
        max_tokens=400,
        data={"t": len(texts)},
        data_digest="00",
        draft_seconds=0.002,
        verify_seconds=[(1, 0.03), (8, 0.04)],
    )
    return Traces(header=header, answers=tuple(answer(text) for text in texts))


def two_worlds() -> Traces:
    return traces([("1" * 200 + "0" * 60) * 2] * 4)


@pytest.fixture(scope="module")
def made() -> Calibration:
    return calibrate(two_worlds(), SETTINGS, seed=1)


def test_the_predictor_learns_the_window_s_direction(made: Calibration) -> None:
    assert made.predictor is not None
    network = Predictor(made.predictor)
    assert network(0.98, 0.0)[1] > 12
    assert network(0.02, 0.0)[1] < 4


def test_provenance_tells_what_it_rests_on(made: Calibration) -> None:
    found = made.provenance
    assert (found.positions, found.data, found.seed) == (4 * 520, {"t": 4}, 1)
    assert (found.draft_seconds, found.verify_seconds) == (0.01, [(1, 0.05)])
    assert (found.schedule, found.k, found.beta, found.delta) == ("sync", 1, 0.5, 0.8)
    assert 0.0 < made.law.tau_credit < 1.0
    assert made.law.t_max == max(made.table.best_threshold)


def test_the_same_traces_and_seed_give_the_same_network(made: Calibration) -> None:
    assert calibrate(two_worlds(), SETTINGS, seed=1) == made
    assert calibrate(two_worlds(), SETTINGS, seed=2).predictor != made.predictor


def test_costs_are_the_recording_s_unless_given() -> None:
    header = two_worlds().header
    measured = Settings(pipeline=Pipeline.PLC).costs(header)
    assert (measured.draft, measured.verify.seconds(8)) == (0.002, 0.04)
    given = SETTINGS.costs(header)
    assert (given.draft, given.verify.seconds(1), given.verify.seconds(9)) == (0.01, 0.05, 0.05)


def test_every_fourth_answer_is_held_out() -> None:
    kept, held = split(traces(["1" * n for n in range(1, 10)]).answers)
    assert [len(a) for a in held] == [4, 8]
    assert [len(a) for a in kept] == [1, 2, 3, 5, 6, 7, 9]


def test_stored_loaded_and_better_than_any_fixed_length(made: Calibration, tmp_path: Path) -> None:
    path = save(tmp_path / "new" / "folder", made)
    assert [p.name for p in path.parent.iterdir()] == ["calibration.json"]
    assert load(path.parent) == made
    controller = Credit(ControllerFacts(calibration=str(path.parent)))
    assert controller.calibration == made
    rows = {row["name"]: row for row in comparison(two_worlds(), path.parent, SETTINGS)}
    best = next(row for name, row in rows.items() if name.startswith("best fixed"))
    for name in ("window only, table", "window only, predictor"):
        assert rows[name]["ms_per_token"] < best["ms_per_token"]
        assert rows[name]["tokens"] == 520
        assert rows[name]["right"] == 1.0


def test_too_little_text() -> None:
    with pytest.raises(CalibrationError, match="record more or longer answers"):
        calibrate(traces(["101"] * 4), SETTINGS)


# -- commands -----------------------------------------------------------------------------------


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "things.jsonl"
    path.write_text("\n".join(f'{{"prompt": "question {i}"}}' for i in range(8)))
    return str(path)


def test_both_commands_from_one_recording(
    prompts: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "traces.jsonl", tmp_path / "calibration"
    shared = ["--traces", str(file), "--json"]
    record = ["--target", "toy:3", "--draft", "toy:3:0.4", "--prompts", prompts]
    sizes = ["--samples", "8", "--max-tokens", "60", "--temperature", "0.5"]
    assert run(["inertia", *record, *sizes, *shared, "--window", "2"]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert facts["groups"][0]["group"] == "things"
    assert facts["groups"][0]["windows"] > 50
    written = file.read_bytes()

    assert run(["calibrate", str(folder), *shared, "--round-trip", "80"]) == 0
    out = capfd.readouterr().out
    made = json.loads(out)
    assert file.read_bytes() == written
    stored = load(folder)
    assert made["gamma_ms"] == pytest.approx(1e3 * stored.provenance.gamma)
    assert stored.provenance.round_trip == pytest.approx(0.08)
    assert stored.provenance.target.name == "toy:3"
    assert [row["windows_seen"] for row in made["table"]] == stored.table.visits
    rates = [row["acceptance"] for row in made["held_out"]]
    assert all(np.isfinite(rates))

    assert run(["inertia", "--traces", str(file), "--draft", "toy:4"]) == 2
    assert "recorded with --draft toy:3:0.4, not toy:4" in capfd.readouterr().err
    assert run(["inertia", "--traces", str(file)]) == 0
    assert "shuffled" in capfd.readouterr().out
    assert run(["calibrate", str(folder), "--traces", str(file)]) == 0
    assert "labels by credit" in capfd.readouterr().out


def test_pictures(prompts: str, tmp_path: Path, made: Calibration) -> None:
    pytest.importorskip("matplotlib", reason="the plots extra is not installed")
    from outrider.calibrate.plot import draw_surface

    draw_surface(made, tmp_path / "surface.png")
    assert (tmp_path / "surface.png").read_bytes().startswith(b"\x89PNG")
    asked = ["inertia", "--target", "toy:3", "--draft", "toy:3:0.4", "--prompts", prompts]
    picture = tmp_path / "inertia.svg"
    assert run([*asked, "--samples", "6", "--max-tokens", "40", "--plot", str(picture)]) == 0
    assert "<svg" in picture.read_text()
    assert {p.name for p in tmp_path.iterdir()} == {"surface.png", "inertia.svg", "things.jsonl"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tau-low", "0.9"], "--tau-low must be less than --tau-high"),
        (["--plot", "x.jpeg"], "--plot must end in one of .png"),
        (["--plot", "none/x.png"], "there is no folder none"),
        (["--draft", "lookup"], "--draft must be a model"),
        (["--max-tokens", "3"], "no answer has two windows"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], message: str, prompts: str, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = ["inertia", "--target", "toy:3", "--prompts", prompts, "--samples", "1"]
    assert run([*asked, "--draft", "toy:3:0.4", *words]) == 2
    assert message in capfd.readouterr().err
