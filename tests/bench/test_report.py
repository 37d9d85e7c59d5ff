"""The report: one valid page that loads nothing; two runs beside each other; papers' tables."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from outrider.bench.comparison import changes
from outrider.bench.drawing import ticks
from outrider.bench.experiment import BASELINES, System, parse
from outrider.bench.figures import rows
from outrider.bench.journal import Answer, Cell, Key, read
from outrider.bench.page import run_page
from outrider.bench.papertable import markdown, paper_table
from outrider.cli import run
from outrider.commands.bench import header_of, load

TABLES = sorted((Path(__file__).parents[2] / "scenarios" / "papers").glob("*.toml"))
RESULTS = Path(__file__).parents[2] / "docs" / "results.md"
SCENARIO = """
title = "a <small> run & more"
[points]
"near" = ["link.rtt=10ms"]
"far" = ["link.rtt=90ms"]
[workload]
requests = 4
max-tokens = 16
[paper]
source = "a paper"
table = "Table 1"
figure = "mean_ms_per_token"
left-out = "streaming"
[labels]
sync = "SD"
[published]
sync = { near = 20.0 }
[unmatched]
Other = { far = 31.5 }
"""
VOID = {"meta", "rect", "line", "circle"}


class Checker(HTMLParser):
    """Tags that open and close as they should; what is loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.seen: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        self.loads += [f"{k}={v}" for k, v in attrs if k in ("src", "href", "xlink:href", "data")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(page: str) -> Checker:
    assert page.startswith("<!DOCTYPE html>")
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert checker.loads == []
    assert not re.search(r"https?:|@import|url\(|<script", page)
    assert len(page.encode()) < 2_000_000
    return checker


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "s.toml").write_text(SCENARIO)
    assert run(["bench", str(folder / "s.toml"), "-o", str(folder / "run.jsonl"), "--json"]) == 0
    return folder / "run.jsonl"


def test_the_page_stands_alone(done: Path, tmp_path: Path):
    assert run(["report", str(done), "-o", str(tmp_path / "r.html")]) == 0
    page = (tmp_path / "r.html").read_text()
    checker = checked(page)
    assert "a &lt;small&gt; run &amp; more" in page
    assert checker.seen["svg"] == 4, "a plot and a timeline at each point"
    assert "2 cores" in page or "cores" in page
    for lane in ("edge", "link", "cloud"):
        assert f">{lane}</text>" in page
    assert page.count('class="step"') > 2 * len(BASELINES)
    assert "SD (sync)" in page


def test_figures_as_csv_and_json(done: Path, tmp_path: Path):
    assert run(["report", str(done), "-o", str(tmp_path / "r.csv")]) == 0
    with (tmp_path / "r.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 2 * 8
    plain = next(line for line in lines if line["arm"] == "cloud-only" and line["point"] == "far")
    assert float(plain["ms_per_token"]) == pytest.approx(60.0)
    assert plain["ms_per_token_low"] != ""
    assert plain["score"] == ""
    assert run(["report", str(done), "-o", str(tmp_path / "r.json")]) == 0
    facts = json.loads((tmp_path / "r.json").read_text())
    assert [row["arm"] for row in facts["rows"]] == [line["arm"] for line in lines]


def answers(arm: str, times: list[float]) -> Cell:
    made = tuple(
        Answer(tokens=11, first=0.1, rest=t, later=10, finish="stop", drafted=0, accepted=0)
        for t in times
    )
    key = Key(point="p", data="", item="", arm=arm, seed=0)
    return Cell(key=key, answers=made, forwards=1, busy=1.0, seconds=1.0, bytes_up=1, bytes_down=1)


def test_what_is_beyond_noise():
    steady, wild = [1.0 + 0.001 * i for i in range(12)], [0.5, 2.0] * 6
    first = [answers("sync", steady), answers("pearl", steady), answers("plc", steady)]
    second = [answers("sync", [t / 1.2 for t in steady]), answers("pearl", wild)]
    found, only = changes(first, second)
    assert [c.arm for c in found] == ["sync", "pearl"]
    assert found[0].ratio is not None
    assert found[0].ratio.value == pytest.approx(1.2)
    assert [c.beyond_noise for c in found] == [True, False]
    assert only == [("p", "", "plc")]
    few, _ = changes([answers("sync", [1.0])], [answers("sync", [9.0])])
    assert not few[0].beyond_noise, "one answer says nothing"


def test_two_runs(done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = tmp_path / "two.html"
    assert run(["report", str(done), str(done), "-o", str(page)]) == 0
    checked(page.read_text())
    assert run(["report", str(done), str(done), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert all(row["ratio"]["value"] == 1.0 for row in facts["rows"])
    assert not any(row["beyond_noise"] for row in facts["rows"])
    assert run(["report", str(done), str(done)]) == 0
    assert "times as fast" in capsys.readouterr().out


def test_a_cold_run_is_called_cold(done: Path):
    header = read(done).header
    cold = run_page(load(header), header, [answers("cloud-only", [0.5] * 3)])
    assert "cold: no warm-up" in cold
    assert "cold:" not in run_page(load(header), header, read(done).cells)
    fetched = replace(header, pins={"gsm8k": "abc123"})
    assert "from the hub: gsm8k at abc123." in run_page(load(header), fetched, read(done).cells)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["RUN", "-o", "page.pdf"], "must end in .html, .json, .csv, .md"),
        (["RUN", "RUN", "-o", "two.csv"], "two runs go into a .html or a .json file"),
        (["nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_bad_input(words: list[str], says: str, done: Path, capsys: pytest.CaptureFixture[str]):
    assert run(["report", *(str(done) if w == "RUN" else w for w in words)]) in (1, 2)
    assert says in capsys.readouterr().err


def test_a_published_table_beside_ours():
    experiment = parse(SCENARIO)
    cells = [answers("sync", [0.25] * 4)]
    cells = [
        Cell(
            **{
                **{f: getattr(c, f) for f in c.__slots__},
                "key": Key(point="near", data="", item="", arm="sync", seed=0),
            }
        )
        for c in cells
    ]
    made = paper_table(experiment, rows(cells, base="cloud-only"))
    lines = {line.name: line for line in made.lines}
    assert lines["SD (sync)"].published == (20.0, None)
    assert lines["SD (sync)"].ours == (pytest.approx(25.0), None)
    assert not lines["SD (sync)"].left_out
    assert lines["cloud-only"].left_out
    assert lines["Other (not run)"].published == (None, 31.5)
    text = markdown(experiment, rows(cells, base="cloud-only"), "s.toml")
    assert "| SD (sync) | 20 / 25 | - / - |" in text
    assert "| **cloud-only** |" in text
    assert "*Left out there*: streaming." in text


def test_ticks_are_round():
    assert ticks(60.0) == [0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0]
    assert ticks(0.0) == [0.0]


@pytest.mark.parametrize("path", TABLES, ids=lambda p: p.stem)
def test_every_papers_scenario(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    experiment = load(header_of(path, (), quick=True, run_code=False))
    assert experiment.paper is not None
    assert set(BASELINES) <= set(experiment.arms)
    assert f"`scenarios/papers/{path.name}`" in RESULTS.read_text("utf-8")
    if experiment.system is System.LIVE:
        return
    out = tmp_path / "run.jsonl"
    few = ["--set", "workload.requests=2"]
    assert run(["bench", str(path), "--quick", *few, "-o", str(out), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert len(facts["rows"]) == len(experiment.arms) * len(experiment.points)
    assert all(row["unfinished"] == 0 and row["tokens"] > 0 for row in facts["rows"])
