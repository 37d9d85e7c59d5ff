"""`outrider plan` as a command."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from outrider import cli
from outrider.diagnose import examine
from outrider.runtime.process import CloudProcess

HERE = ("plan", "--alpha", ".8", "--t-draft", "5", "--t-verify", "60")
QUESTIONS = '"tell me a story"\n{"prompt": "what is a tree?"}\n"count to ten"\n'
KEYS = """name length same_text ms_per_token ms_per_token_shared speedup forwards_per_token
cloud_ms_per_token drafted_per_token bytes_up_per_token bytes_down_per_token
money_per_1000_tokens joules_per_token tokens_per_second_per_verifier
requests_that_fill_the_edge rtt_ceiling_ms""".split()


def facts(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert cli.run([*words, "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.run(list(words)) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    return shown.err


def test_a_plan_from_numbers(capsys):
    found = facts(capsys, *HERE, "--rtt", "100ms")
    rows = {row["name"]: row for row in found["rows"]}
    names = "cloud-only sync pearl plc stream hybrid freerun colocated edge-only"
    assert list(rows) == names.split()
    assert all(list(row) == KEYS for row in found["rows"])
    assert rows["sync"]["ms_per_token"] == pytest.approx(45.9, abs=0.1)
    assert rows["cloud-only"]["speedup"] == 1.0
    assert rows["edge-only"]["same_text"] is False
    latency = found["recommendations"]["latency"]
    assert latency["best"]["schedule"] == "colocated"
    assert latency["best"]["draft_at_the_edge"] is False
    assert latency["without_a_draft_in_the_cloud"]["schedule"] == "freerun"
    assert found["facts"]["sources"]["cloud_draft"] == "assumed"
    assert found["facts"]["sources"]["draft"] == "given"
    assert [i["number"] for i in found["inequalities"]][:7] == list("1234567")


def test_how_many_verifiers(capsys, monkeypatch):
    wanted = ("--rtt", "50ms", "--t-verify", "1:60,9:72,65:200", "--edges", "500")
    found = facts(capsys, *HERE, *wanted, "--per-token-ms", "90")
    assert found["facts"]["edges"] == 1, "the table is of an edge alone"
    ways = {way["name"]: way for way in found["verifiers"]["ways"]}
    assert set(ways) == {"cloud-only", "sync", "colocated"}
    for way in ways.values():
        assert way["ms_per_token"] <= 90.0
        assert way["verifiers"] * way["edges_per_verifier"] >= 500
    # 16 rows take 60 + ... = 88 ms, 17 take 90.3; 12 + sqrt(12) are 16.
    plain = ways["cloud-only"]
    assert (plain["edges_per_verifier"], plain["verifiers"]) == (12, 42)
    assert plain["ms_per_token"] == pytest.approx(88.0)
    monkeypatch.setenv("COLUMNS", "140")
    assert cli.run([*HERE, *wanted, "--per-token-ms", "90", "--explain"]) == 0
    out = capsys.readouterr().out
    assert "    42  cloud-only: up to 12 edges each, 16.0 answers in a forward of 88 ms" in out
    assert "one edge more: 90.29 x 1 = 90.29" in out
    assert cli.run([*HERE, *wanted, "--per-token-ms", "2"]) == 0
    assert (
        "500 edges at 2 ms per token: no number of verifiers is enough" in capsys.readouterr().out
    )


def test_what_it_says_to_people(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    assert cli.run([*HERE, "--rtt", "100ms", "--explain", "--price-second", ".001"]) == 0
    out = capsys.readouterr().out
    assert "don't draft at the edge: let the cloud draft" in out
    assert "if it cannot: draft at the edge, --schedule freerun" in out
    assert "100 < 4.46 x 60 - 60 - 9 x 5 = 162.8" in out
    assert "price: per 1000 tokens" in out
    assert " J " not in out  # nobody gave a power


def test_a_draft_that_cannot_pay(capsys):
    slow = facts(
        capsys,
        *HERE[:3],
        "--t-draft",
        "60",
        "--t-verify",
        "60",
        "--rtt",
        "50",
        "--t-draft-cloud",
        "none",
    )
    for objective in ("latency", "cost"):
        assert slow["recommendations"][objective]["best"]["schedule"] == "cloud-only"
    ceilings = {row["name"]: row["rtt_ceiling_ms"] for row in slow["rows"]}
    assert ceilings["sync"] == "never"
    assert "colocated" not in ceilings


def test_units(capsys):
    for times in (("50ms", "5ms", "60ms"), ("50", "5", "60"), (".05s", "5000us", ".06 s")):
        words = ("--rtt", "--t-draft", "--t-verify")
        given = [w for pair in zip(words, times, strict=True) for w in pair]
        found = facts(capsys, "plan", "--alpha", ".8", *given)["facts"]
        assert found["round_trip_ms"] == pytest.approx(50)
        assert found["t_draft_ms"] == pytest.approx(5)
        assert found["t_verify_ms"] == [[1, pytest.approx(60)]]


def test_jitter_loss_and_rates_of_a_link(capsys):
    found = facts(capsys, *HERE, "--link", "rtt=50ms,up=1mbit,jitter=4ms,loss=1%")["facts"]
    # Jitter at its mean both ways; a loss costs a timeout, 250 ms here.
    assert found["round_trip_ms"] == pytest.approx(50 + 4 + 2 * 250 * 0.01 / 0.99)
    assert found["up_bps"] == 1e6
    assert found["down_bps"] is None


def test_a_curve_from_a_file(capsys, tmp_path):
    base = ("plan", "--t-draft", "5", "--t-verify", "60", "--rtt", "50ms", "--curve")
    for text in (".5 .4 .36", ".5, .4\n.36  # the third", "[0.5, 0.4, 0.36]"):
        path = tmp_path / "curve.txt"
        path.write_text(text)
        assert facts(capsys, *base, str(path))["facts"]["survival"][:4] == pytest.approx(
            [0.5, 0.4, 0.36, 0.324]
        )
    for text, words in ((".5 .6", "must fall"), ("half", "as numbers"), ("", "one point")):
        path.write_text(text)
        assert words in complaint(capsys, *base, str(path))
    path.write_text(" ".join(["1"] * 65))
    assert "at most 64" in complaint(capsys, *base, str(path))


WRONG = {
    "a wrong unit": (("--rtt", "50m"), "milliseconds, or a number with its unit us, ms or s"),
    "no link": ((), "give the link: --rtt 50ms"),
    "the link twice": (("--rtt", "5ms", "--link", "rtt=5ms"), "keep one"),
    "a rate without unit": (("--rtt", "5ms", "--link", "up=5"), "one of bit, kbit, mbit, gbit"),
    "a trace": (("--link", "up-trace=x"), "a plan needs rates"),
    "no rows": (("--rtt", "5ms", "--t-verify", "1:60,x:5"), "times by rows"),
    "rows twice": (("--rtt", "5ms", "--t-verify", "1:60,1:5"), "once"),
    "nothing at all": (("--rtt", "5ms", "--t-draft", "0"), "--t-draft 0: must be above 0"),
    "a forward in no time": (("--rtt", "5ms", "--t-verify", "1:60,9:0ms"), "--t-verify 0ms: must"),
    "a draft that takes a day": (("--rtt", "5ms", "--t-draft", "86400s"), "86400s: at most 60 s"),
    "a link to the moon and back": (("--rtt", "90000"), "--rtt 90000: at most 60 s"),
    "acceptance": (("--rtt", "5ms", "--alpha", "80"), "--alpha"),
    "both ways to measure": (("--measure", "--cloud", "ws://x:1", "--rtt", "5"), "keep one"),
    "a picture of another kind": (("--rtt", "5ms", "--heatmap", "x.doc"), ".png, .svg or .html"),
    "no folder": (("--rtt", "5ms", "--heatmap", "/no/x.svg"), "no folder"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input(case, capsys):
    words, message = WRONG[case]
    assert message in complaint(capsys, *HERE, *words)


def test_what_is_missing_is_named(capsys):
    said = complaint(capsys, "plan", "--rtt", "50ms", "--alpha", ".8")
    assert "--t-draft 5ms" in said
    assert "--t-verify 60ms" in said
    assert "--alpha" not in said
    assert "--measure" in said
    assert "keep one" in complaint(capsys, *HERE, "--rtt", "5", "--curve", __file__)


@pytest.mark.parametrize("ending", ["png", "svg", "html"])
def test_a_heat_map(ending, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("outrider.commands.planpicture.TRIPS", 3)
    monkeypatch.setattr("outrider.commands.planpicture.ALPHAS", (0.5, 0.9))
    path = tmp_path / f"plan.{ending}"
    found = facts(capsys, *HERE, "--rtt", "50ms", "--heatmap", str(path))
    assert found["picture"] == str(path)
    assert list(tmp_path.iterdir()) == [path]
    start = path.read_bytes()[:300]
    assert start.startswith({"png": b"\x89PNG", "svg": b"<?xml", "html": b"<!doctype"}[ending])
    if ending == "html":
        text = path.read_text()
        assert "<svg" in text
        assert "src=" not in text


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plan") / "questions.jsonl"
    path.write_text(QUESTIONS)
    return str(path)


def test_measured_models(capsys, prompts, tmp_path):
    traces = tmp_path / "traces.jsonl"
    toys = ("--target", "toy:3", "--draft", "toy:3:0.4", "--prompts", prompts)
    words = (*toys, "--temperature", "1", "--rtt", "20ms", "--traces", str(traces))
    found = facts(capsys, "plan", "--measure", *words)["facts"]
    assert found["sources"]["draft"] == found["sources"]["curve"] == "measured"
    assert 0.0 < found["survival"][0] < 1.0
    assert found["survival"] == sorted(found["survival"], reverse=True)
    # What was given wins, and recorded traces are used again.
    again = facts(capsys, "plan", "--traces", str(traces), "--rtt", "20ms", "--t-draft", "7")
    assert again["facts"]["t_draft_ms"] == pytest.approx(7)
    assert again["facts"]["survival"] == found["survival"]


def test_answers_too_short_to_learn_from(capsys, prompts, tmp_path):
    toys = ("--target", "toy:3", "--draft", "toy:3:0.4", "--prompts", prompts)
    words = (*toys, "--rtt", "20ms", "--samples", "1", "--max-tokens", "4", "--temperature", "1")
    assert "too short" in complaint(capsys, "plan", "--measure", *words)


def test_a_verifier_tells(capsys):
    """Row costs by its greeting; round trip, draft and acceptance from a few answers."""

    async def go() -> dict[str, Any]:
        async with CloudProcess(["--model", "toy:1"]) as cloud:
            words = ("--target", "toy:1", "--draft", "toy:1:0.4", "--temperature", "1")
            asked = ("--cloud", cloud.url, "--samples", "2", "--link", "rtt=20ms")
            return await asyncio.to_thread(facts, capsys, "plan", *words, *asked)

    found = asyncio.run(go())
    assert found["facts"]["sources"] == {
        **{"up_bps": "given", "down_bps": "given", "requests": "given", "edges": "given"},
        **{"verify": "measured", "round_trip": "measured", "draft": "measured"},
        **{"curve": "measured", "cloud_draft": "assumed"},
    }
    assert found["facts"]["round_trip_ms"] >= 20.0
    assert len(found["facts"]["t_verify_ms"]) > 1
    assert 0.0 < found["facts"]["survival"][0] < 1.0


@pytest.mark.slow
@pytest.mark.model
def test_the_built_in_pair_is_timed_and_planned(capsys):
    if examine().weights.file is None:
        pytest.skip("the target's weights are not installed (outrider pull)")
    words = ("--measure", "--rtt", "50ms", "--samples", "1", "--max-tokens", "32", "--threads", "1")
    found = facts(capsys, "plan", *words)
    assert 0.2 < found["facts"]["alpha"] < 0.99
    assert found["facts"]["t_draft_ms"] < found["facts"]["t_plain_ms"]


def test_help_teaches(capsys):
    assert cli.run(["plan", "--help"]) == 0
    out = capsys.readouterr().out
    assert "outrider plan --rtt 50ms --alpha .8 --t-draft 5 --t-verify 60" in out
    assert "bare number is in milliseconds" in out
