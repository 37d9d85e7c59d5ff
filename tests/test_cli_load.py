"""`outrider load` and `outrider record` as commands, on toy models and a verifier of their own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from outrider import cli
from outrider.bench import loadrun
from outrider.runtime.process import CloudProcess

QUESTIONS = '"tell me a story"\n{"prompt": "what is a tree?"}\n"count to ten"\n'
TOYS = ("--target", "toy:1", "--draft", "toy:1:0.4")
KEYS = """machine cloud settings answers asked unfinished errors first_error interrupted
warm_up_answers cold seconds edges_cpu tokens tokens_per_s ttft_ms ms_per_token queue_ms step_ms
forwards forwards_per_token rows_per_forward cloud_forwards cloud_rows_per_forward
cloud_evictions cloud_forwards_per_token drafted accepted acceptance wasted bytes_up_per_token
bytes_down_per_token reconnects fairness edges tenants""".split()


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafts")
    (folder / "questions.jsonl").write_text(QUESTIONS)
    path = folder / "drafts.jsonl"
    words = ["record", str(path), *TOYS, "--prompts", str(folder / "questions.jsonl")]
    assert cli.run([*words, "--max-tokens", "20", "--temperature", "1", "--ignore-eos"]) == 0
    return path


@pytest.fixture(autouse=True)
def unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test's process stays where it is."""
    monkeypatch.setattr("outrider.runtime.cores.pin", lambda *_: False)


def load(*words: str) -> int:
    return cli.run(["load", "--target", "toy:1", *words])


def facts(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert load(*words, "--json") == 0
    found = capsys.readouterr()
    assert found.out.count("\n") == 1
    result: dict[str, Any] = json.loads(found.out)
    return result


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert load(*words) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith("error: ")
    assert found.err.count("\n") == 1
    return found.err


def test_a_verifier_of_its_own_and_replayed_edges(drafts: Path, capsys):
    words = ("--draft", f"replay:{drafts}", "--edges", "3", "--requests", "2")
    found = facts(
        capsys,
        *words,
        "--schedule",
        "sync",
        "--draft-length",
        "3",
        "--link",
        "5/20",
        "--cloud-options",
        "--slots 8",
    )
    assert list(found) == KEYS
    assert (found["answers"], found["tokens"]) == (6, 120)
    assert 0.0 < found["acceptance"] < 1.0
    assert found["cloud"] == {
        "started_here": True,
        "target": "toy:1",
        "deterministic": True,
        "target_pace_ms": 0.0,
        "options": "--slots 8",
    }
    settings = found["settings"]
    assert settings["recorded_draft"] == "toy:1:0.4"
    assert (settings["prompts"], settings["max_tokens"], settings["link"]) == (3, 20, "5/20")
    assert found["machine"]["cores"] >= 1
    assert 0 < found["cloud_forwards"] <= found["forwards"], "it counts a shared forward once"
    rows = found["cloud_rows_per_forward"] * found["cloud_forwards"]
    assert rows == pytest.approx(found["rows_per_forward"] * found["forwards"])


def test_the_table_says_what_to_mind(drafts: Path, capsys):
    words = ("--draft", f"replay:{drafts}?pace=0", "--edges", "2", "--requests", "2")
    assert load(*words, "--warmup", "0", "--schedule", "colocated", "--target-pace", "1") == 0
    out = capsys.readouterr().out
    assert "toy:1 with toy:1:0.4 (replayed), colocated/fixed" in out
    assert "cold: nothing was warmed up" in out
    assert "4 answers of 3 prompts" in out
    assert "1 ms added to a forward" in out
    assert "of - rows" in out, "rows of the cloud's own drafts are not known here"
    assert "nan" not in out.lower()


def test_ctrl_c_shows_what_there_is(drafts: Path, capsys, monkeypatch):
    answer = loadrun.LoadRun._answer

    async def third_interrupts(self: loadrun.LoadRun, edge: int, number: int, due: float) -> Any:
        if number == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return await answer(self, edge, number, due)

    monkeypatch.setattr(loadrun.LoadRun, "_answer", third_interrupts)
    words = ("--draft", f"replay:{drafts}", "--edges", "1", "--requests", "9", "--schedule", "sync")
    assert load(*words, "--json") == 130
    found = json.loads(capsys.readouterr().out)
    assert (found["interrupted"], found["answers"], found["unfinished"]) == (True, 2, 7)


def test_prompts_and_models_of_ones_own(tmp_path: Path, capsys):
    path = tmp_path / "mine.jsonl"
    path.write_text(QUESTIONS)
    found = facts(
        capsys,
        *("--draft", "toy:1:0.4", "--prompts", str(path), "--max-tokens", "8", "--seed", "3"),
        *("--edges", "2", "--requests", "2", "--per-edge", "2", "--arrivals", "poisson:500"),
    )
    assert found["settings"]["prompts"] == 3
    assert found["settings"]["arrivals"] == "poisson:500"
    assert found["answers"] == 4
    assert 4 <= found["tokens"] <= 32


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--schedule", "edge-only"), "asks no verifier"),
        (("--arrivals", "often"), "--arrivals: must be closed"),
        (("--draft", "nonsense"), "no model 'nonsense'"),
        (("--draft", "replay:none.jsonl"), "cannot read the recording none.jsonl"),
        (("--draft", "toy:2", "--edges", "9"), "outrider record"),
        (("--link", "fast"), "--link: 'fast' is not name=value"),
        (("--draft-length", "99"), "--draft-length: must be in"),
        (("--cloud", "http://x"), "must be ws://HOST:PORT"),
        (("--cloud", "ws://127.0.0.1:1", "--target-pace", "5"), "give them to outrider cloud"),
        (("--controller", "magic"), "magic"),
        (("--cloud-options", "'"), "--cloud-options: No closing quotation"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(words, why: str, capsys, monkeypatch):
    monkeypatch.setattr(CloudProcess, "start", lambda _: pytest.fail("a verifier was started"))
    assert why in refusal(capsys, *words)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--temperature", "0.5"), "--temperature: a recording has its own"),
        (("--max-tokens", "21"), "recorded with --max-tokens 20, not 21"),
        (("--window", "17"), "up to 17 guesses under way, and drafts.jsonl was recorded with"),
        (("--schedule", "sync", "--draft-length", "20"), "recorded with --window 16"),
        (("--target", "toy:2"), "recorded with --target toy:1, not toy:2"),
    ],
)
def test_what_was_not_recorded_is_refused_first(words, why: str, drafts, capsys, monkeypatch):
    monkeypatch.setattr(CloudProcess, "start", lambda _: pytest.fail("a verifier was started"))
    assert why in refusal(capsys, "--draft", f"replay:{drafts}", *words)


def test_a_verifier_that_does_not_start(drafts: Path, capsys):
    words = ("--draft", f"replay:{drafts}", "--cloud-options", "--slots none")
    assert "the verifier did not start: " in refusal(capsys, *words)


def test_a_cloud_with_another_target_is_found_out(drafts: Path, capsys):
    """Its tokenizer is the same; its text is not."""

    async def work() -> int:
        async with CloudProcess(["--model", "toy:2"]) as cloud:
            words = ("--cloud", cloud.url, "--draft", f"replay:{drafts}", "--requests", "1")
            return await asyncio.to_thread(load_in_thread, *words)

    def load_in_thread(*words: str) -> int:
        # No signal handler outside the main thread; nobody presses Ctrl-C here.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("outrider.commands.loading._stopped_by_ctrl_c", asyncio.Event)
            return load(*words)

    assert asyncio.run(work()) == 2
    found = capsys.readouterr()
    assert "the verifier serves toy:2, not --target toy:1: the text leaves" in found.err
    assert found.out == ""


def test_nobody_there(capsys, monkeypatch):
    monkeypatch.setattr("outrider.commands.remote.PATIENCE_S", 0.3)
    assert load("--cloud", "ws://127.0.0.1:1", "--draft", "lookup", "--edges", "1") == 1
    assert "cannot reach ws://127.0.0.1:1" in capsys.readouterr().err


def test_every_answer_has_a_cache(capsys):
    """More answers at once than a verifier has caches by default: it would refuse the others."""
    words = ["--draft", "none", "--edges", "13", "--per-edge", "5", "--requests", "5"]
    found = facts(capsys, *words, "--max-tokens", "2", "--ignore-eos")
    assert (found["answers"], found["errors"], found["cloud_evictions"]) == (65, {}, 0)
    small = facts(
        capsys, *words, "--max-tokens", "2", "--warmup", "0", "--cloud-options", "--slots 1"
    )
    assert "busy" in small["errors"], "the user's own word holds"
