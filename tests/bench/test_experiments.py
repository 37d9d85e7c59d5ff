"""Scenarios of the bench: errors with their line; runs that are interrupted and go on."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.bench.experiment import BASELINES, parse
from outrider.bench.figures import rows
from outrider.bench.journal import Cell, Journal, JournalError, read
from outrider.bench.runner import Simulator, run
from outrider.cli import run as command
from outrider.commands import bench as bench_command
from outrider.sim.scenario import ScenarioError

SMALL = """
title = "small"
seeds = 2
[points]
"near" = ["link.rtt=10ms"]
"far" = ["link.rtt=90ms"]
[workload]
requests = 3
max-tokens = 12
[schedule]
names = ["sync/auto"]
"""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[bnech]\n", "line 1: [bnech]: no such section; did you mean [bench]?"),
        ("[bench]\nsistem = 'live'\n", "line 2: [bench] sistem: no such key; did you mean system?"),
        ("[bench]\nsystem = 'both'\n", "must be one of simulator, live"),
        ("[bench]\nbase = 'pearls'\n", "line 2: [bench] base: must be one of cloud-only"),
        ("[points]\n'a' = 'link.rtt=1ms'\n", "line 2: [points] a: must be a list of texts"),
        ("[points]\n'a' = ['link.rtt=7']\n", "[points] a: link.rtt: means nothing"),
        ("[points]\n'a' = ['link.rrt=7ms']\n", "link.rrt: no such key; did you mean rtt?"),
        ("[points]\n'a' = ['seed=7']\n", "line 2: [points] a: seed=7: is the same at all points"),
        ("[schedule]\nnames = ['sinc']\n", "no schedule 'sinc'; did you mean sync"),
        ("[controller]\nname = 'auto'\n", "line 1: [controller]: name it with its schedule"),
        ("[bench]\nsystem='live'\n[edge]\ndraft='5ms'\n", "line 3: [edge]: is measured in a live"),
        ("[bench]\nsystem='live'\n[link]\nlevels=['5ms']\n", "line 4: [link] levels: only a simul"),
        ("[bench]\nsystem='live'\n[schedule]\nnames=['x']\n", "line 4: [schedule] names: arm: 'x'"),
        ("[bench]\nsystem='live'\n[link]\nup-trace='x'\n", "line 4: [link] up-trace: "),
        ("[bench]\nsystem='live'\n[workload]\nrate=1\n", "line 4: [workload] rate: means nothing"),
        ("[bench]\nsystem='live'\n[schedule]\nnames=['plc/credit']\n", "needs live.calibration"),
        (
            "[bench]\nsystem='live'\n[live]\ncalibration='c'\n[schedule]\nnames=['plc']\n",
            "line 4: [live] calibration: is for credit",
        ),
        ("[points]\n'a' = ['linkk.rtt=7ms']\n", "line 2: [points] a: [linkk]: no such section"),
        ("[live]\ndata = 'gsm8k'\n", "line 2: [live] data: must be a list of data sets"),
        ("[live]\ndata = ['gsm9k']\n", "line 2: [live] data: no data set 'gsm9k': known are"),
        ("[live]\ndata = []\n", "line 2: [live] data: must name at least one set"),
        ("[live]\npace = -1\n", "line 2: [live] pace: must be a number in [0, 60000]"),
        ("[paper]\nfigure = 'luck'\n", "must be one of ms_per_token"),
        (
            "[paper]\nsource='s'\n[published]\n'x' = {a = 1}\n",
            "line 4: [published] x: is no arm of this file",
        ),
        (
            "[points]\n'a' = []\n[paper]\nsource='s'\n[published]\nsync = {b = 1}\n",
            "line 6: [published] sync: 'b' is none of a",
        ),
        ("[paper]\nsource='s'\n[published]\nsync = 3\n", "must be { POINT = number, ... }"),
    ],
)
def test_what_is_wrong_is_named(text: str, says: str):
    with pytest.raises(ScenarioError) as caught:
        parse(text, name="x.toml")
    assert says in str(caught.value)


def test_what_is_wrong_with_a_quick_run_is_named():
    with pytest.raises(ScenarioError, match=r"line 2: \[bench\] quick: link\.rtt: means nothing"):
        parse("[bench]\nquick = ['link.rtt=5']\n", quick=True)


def test_baselines_are_in_every_table():
    experiment = parse(SMALL)
    assert experiment.arms == (*BASELINES, "sync/auto")
    assert [p.name for p in experiment.points] == ["near", "far"]
    assert experiment.points[1].scenario is not None
    assert experiment.points[1].scenario.conditions.link.rtt_s == pytest.approx(0.09)
    quick = parse(SMALL, quick=True)
    assert quick.seeds == (0,)


def measured(text: str = SMALL) -> list[object]:
    async def all_cells() -> list[object]:
        experiment = parse(text)
        return [cell async for cell in run(experiment, Simulator(experiment))]

    return asyncio.run(all_cells())


def test_a_run_is_written_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "s.toml").write_text(SMALL)
    out = tmp_path / "run.jsonl"
    assert command(["bench", str(tmp_path / "s.toml"), "-o", str(out), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert len(facts["rows"]) == 2 * 6
    assert facts["machine"]["cores"] >= 1
    assert all(row["answers"] == 6 for row in facts["rows"])
    assert all(row["ms_per_token"]["low"] is not None for row in facts["rows"])
    assert list(read(out).cells) == measured()
    assert command(["bench", str(tmp_path / "s.toml"), "-o", str(out)]) == 2
    assert "--resume" in capsys.readouterr().err


def bench_until(last: int, folder: Path, behind: Callable[[int], None] = lambda _: None) -> Path:
    """The file of a bench that Ctrl-C ends behind cell `last`; `behind` hears each before that."""
    (folder / "s.toml").write_text(SMALL)
    out = folder / "run.jsonl"
    append, numbers = Journal.append, itertools.count(1)

    def watched(book: Journal, cell: Cell) -> None:
        append(book, cell)
        number = next(numbers)
        behind(number)
        if number == last:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "append", watched)
        assert command(["bench", str(folder / "s.toml"), "-o", str(out)]) == 130
    return out


def test_an_interrupted_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = bench_until(7, tmp_path)
    assert f"7 cells are in {out}" in capsys.readouterr().err.replace("\n", "")
    with out.open("a") as file:
        file.write('{"cell": {"key": {"poi')  # killed while it wrote
    assert len(read(out).cells) == 7
    assert command(["bench", "--resume", str(out), "--json"]) == 0
    assert list(read(out).cells) == measured(), "each once, and the same as without a break"


@pytest.mark.parametrize("harm", ["deleted", "emptied"])
@pytest.mark.parametrize("last", [3, 24])
def test_a_file_that_is_lost_under_a_run_is_written_anew(
    harm: str, last: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """It came back without its first line, and could neither be resumed nor reported."""
    lost = tmp_path / "run.jsonl"

    def harmed(number: int) -> None:
        if number == 3:
            lost.unlink() if harm == "deleted" else lost.write_text("")

    out = bench_until(last, tmp_path, harmed)
    assert f"{last} cells are in {out}" in capsys.readouterr().err.replace("\n", "")
    assert command(["bench", "--resume", str(out), "--json"]) == 0
    assert list(read(out).cells) == measured()


def test_ctrl_c_is_heard_between_cells(tmp_path: Path):
    """A real signal: asyncio only cancels what waits, and a simulated cell waits for nothing."""
    (tmp_path / "s.toml").write_text(SMALL.replace("seeds = 2", "seeds = 1000"))
    out = tmp_path / "run.jsonl"
    words = ["bench", str(tmp_path / "s.toml"), "-o", str(out)]
    process = subprocess.Popen([sys.executable, "-m", "outrider", *words], stderr=subprocess.PIPE)
    try:
        while not out.exists() or out.read_bytes().count(b"\n") < 3:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert b"go on: outrider bench --resume" in said
    assert 2 <= len(read(out).cells) < 12_000


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["bench"], "say what to compare"),
        (["bench", "nowhere.toml"], "cannot read the scenario nowhere.toml"),
        (["bench", "--resume", "RUN", "--quick"], "give nothing beside it"),
        (["bench", "--resume", "RUN"], "is no run of outrider bench"),
    ],
)
def test_bad_input(words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "other").write_text("{}\n")
    words = [str(tmp_path / "other") if w == "RUN" else w for w in words]
    assert command(words) == 2
    assert says in capsys.readouterr().err


def test_each_figure_of_a_table_stands_under_its_heading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """In a terminal of 80 columns, the narrowest that is common, with nothing cut off."""
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "s.toml").write_text(SMALL.replace("sync/auto", "plc/ucb-specstop"))
    out = tmp_path / "run.jsonl"
    assert command(["bench", str(tmp_path / "s.toml"), "-o", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "\u2026" not in "".join(lines)
    heads = [line.split() for line in lines if "way to decode" in line]
    assert heads[0] == "way to decode token interval speed interval ms wards score".split()
    shown = [line.split() for line in lines]
    for row in rows(read(out).cells, base="cloud-only"):
        figures = []
        for figure, digits in ((row.ms_per_token, 1), (row.speed, 2)):
            assert figure is not None
            ends = (figure.value, figure.low, figure.high)
            value, low, high = (f"{x:.{digits}f}" for x in ends if x is not None)
            figures += [value, f"{low}-{high}"]
        assert row.ttft_ms is not None
        figures += [f"{row.ttft_ms:.0f}", f"{row.forwards_per_token:.2f}", "-"]
        assert [row.arm, *figures] in shown


@pytest.mark.parametrize("content", [b"", b"[link]\nrtt = 5\n", b'{"a": 1}\n', b"[]\n", b"\xff\n"])
@pytest.mark.parametrize("words", [("report", "RUN"), ("bench", "--resume", "RUN")])
def test_a_file_of_another_kind_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], content: bytes
):
    file = tmp_path / "other"
    file.write_bytes(content)
    assert command([str(file) if word == "RUN" else word for word in words]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", f"error: {file} is no run of outrider bench\n")
    assert file.read_bytes() == content


def test_a_line_that_is_broken_is_named(tmp_path: Path):
    (tmp_path / "s.toml").write_text(SMALL)
    out = tmp_path / "run.jsonl"
    assert command(["bench", str(tmp_path / "s.toml"), "-o", str(out), "--json"]) == 0
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join([*lines[:3], "{oops\n", *lines[4:]]))
    with pytest.raises(JournalError, match="line 4: no JSON"):
        read(out)


def test_the_quick_scenario_is_in_the_package():
    header = bench_command.header_of("quick.toml", (), quick=True, run_code=False)
    experiment = bench_command.load(header)
    assert experiment.system == "live"
    assert {"pearl", "stream", "freerun"} <= set(experiment.arms)
