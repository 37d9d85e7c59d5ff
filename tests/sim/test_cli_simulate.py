"""`outrider simulate` as people type it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.calibrate.trace import Answer, TraceHeader, write
from outrider.cli import run
from outrider.control.calibration import ModelFacts

SCENARIOS = Path(__file__).parents[2] / "scenarios"
SMALL = ["--set", "workload.requests=2", "--set", "workload.max-tokens=20"]


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert run(["simulate", *words, "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)  # type: ignore[no-any-return]


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.toml")), ids=lambda p: p.stem)
def test_every_example_runs(path: Path, capsys: pytest.CaptureFixture[str]):
    small = [*SMALL, "--set", "edge.count=2", "--set", "cloud.count=1"]
    facts = told(capsys, str(path), *small)
    rows = {row["name"]: row for row in facts["rows"]}  # type: ignore[attr-defined]
    assert {"cloud-only", "colocated", "sync", "edge-only"} <= rows.keys()
    assert rows["cloud-only"]["speedup"] == 1.0
    assert all(row["unfinished"] == 0 for row in rows.values())


def test_the_table_and_the_event_hash(capsys: pytest.CaptureFixture[str]):
    assert run(["simulate", *SMALL]) == 0
    first = capsys.readouterr().out
    assert "freerun" in first
    assert "event hash" in first
    assert run(["simulate", *SMALL]) == 0
    assert capsys.readouterr().out == first
    assert run(["simulate", *SMALL, "--seed", "5"]) == 0
    assert capsys.readouterr().out != first


def test_many_edges(capsys: pytest.CaptureFixture[str]):
    words = [str(SCENARIOS / "campus.toml"), "--scale", "--set", "edge.count=20"]
    words += ["--set", "cloud.count=2", "--set", "scale.duration=60s"]
    asked = [*words, "--set", 'schedule.names=["pearl", "stream"]']
    assert run(["simulate", *asked]) == 2
    assert "pearl needs the fine simulation" in capsys.readouterr().err
    words += ["--set", 'schedule.names=["stream"]']
    facts = told(capsys, *words)
    names = [row["name"] for row in facts["rows"]]  # type: ignore[attr-defined]
    assert names == ["cloud-only", "colocated", "sync", "stream"]
    assert facts["left_out"] == ["edge-only"]
    assert facts["edges"] == 20
    assert all(row["tokens"] > 0 for row in facts["rows"])  # type: ignore[attr-defined]
    assert run(["simulate", *words]) == 0
    assert "virtual seconds" in capsys.readouterr().out


def test_a_campaign_and_a_replay(capsys: pytest.CaptureFixture[str]):
    facts = told(capsys, "--faults", "12", "--seed", "3")
    assert (facts["cases"], facts["passed"], facts["failed"]) == (12, True, [])
    again = told(capsys, "--replay", "4")
    assert again["passed"]
    assert run(["simulate", "--replay", "4"]) == 0
    assert again["event_hash"] in capsys.readouterr().out


def test_a_failure_names_its_seed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from outrider.core.sequence import SpeculativeSequence

    monkeypatch.setattr(SpeculativeSequence, "rollback", lambda _self: 0)
    assert run(["simulate", "--faults", "12"]) == 1
    out = capsys.readouterr().out
    assert "FAILED" in out
    seed = out.rpartition("outrider simulate --replay ")[2].split()[0]
    assert run(["simulate", "--replay", seed]) == 1


def test_a_recorded_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    facts = ModelFacts(name="m", dtype="float32", vocabulary="v", parameters=1)
    header = TraceHeader(
        outrider="0",
        target=facts,
        draft=facts,
        temperature=0.7,
        seed=0,
        max_tokens=4,
        data={},
        data_digest="",
        draft_seconds=0.004,
        verify_seconds=[(1, 0.03), (9, 0.03)],
    )
    n = 40
    answer = Answer(
        task="t",
        tokens=[1] * n,
        drafts=[1, 1, 1, 2] * (n // 4),
        jsd=[0.0] * n,
        tv=[0.0] * n,
        p=[1.0] * n,
        q=[1.0] * n,
    )
    write(tmp_path / "pair.jsonl", header, [answer])
    scenario = tmp_path / "s.toml"
    scenario.write_text('[acceptance]\ntrace = "pair.jsonl"\n[schedule]\nnames = ["sync"]\n')
    rows = told(capsys, str(scenario), "--set", "workload.max-tokens=40")["rows"]
    by_name = {row["name"]: row for row in rows}  # type: ignore[attr-defined]
    assert by_name["cloud-only"]["ms_per_token"] == pytest.approx(30.0)
    assert by_name["edge-only"]["ms_per_token"] == pytest.approx(4.0)
    # Three stand, one falls: blocks of four begin behind the one that fell.
    assert by_name["sync"]["acceptance"] == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere.toml"], "cannot read the scenario nowhere.toml"),
        (["--set", "link.rtt=50"], "--set link.rtt: means nothing: rtt=50"),
        (["--set", "acceptance.trace=nowhere"], "acceptance.trace: "),
        (["--scale"], "workload.rate must say"),
        (["--faults", "3", "--set", "seed=1"], "have scenarios of their own"),
        (["--faults", "3", "--replay", "1"], "give one of them"),
        (["--faults", "0"], "--faults"),
    ],
)
def test_bad_input_is_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    assert run(["simulate", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert says in captured.err
