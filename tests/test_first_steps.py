"""What a first try meets: a cloud that is not there, a narrow terminal, a model that is none."""

from __future__ import annotations

import dataclasses
import re
import socket
from pathlib import Path

import pytest
from rich.console import Console

from outrider import cli
from outrider.commands import doctor, remote
from outrider.diagnose import examine

TOYS = ("--target", "toy:1", "--draft", "toy:1:0.4")


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_a_cloud_that_is_not_there_asks_whether_it_runs(
    as_json: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(remote, "PATIENCE_S", 0.3)
    with socket.socket() as held:  # bound and not listening: nobody answers there
        held.bind(("127.0.0.1", 0))
        url = f"ws://127.0.0.1:{held.getsockname()[1]}"
        words = ["generate", "hi", *TOYS, "--cloud", url, *(["--json"] if as_json else [])]
        assert cli.run(words) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(
        rf"error: no verifier has answered for 0\.3 s: cannot reach {url}: .*; "
        r"is outrider cloud running there\?\n",
        said.err,
    )


def test_a_narrow_doctor_cuts_no_path(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    folder = "/a-folder/with-a-name/that-is/longer-than-the-terminal/is-wide/weights.gguf"
    report = examine()
    weights = dataclasses.replace(report.weights, file=folder, cache=folder)
    torch = {"cuda_build": None, "cpu_kernels": "X", "threads": 1, "devices": ["cpu"]}
    report = dataclasses.replace(report, weights=weights, torch=torch)
    monkeypatch.setattr(doctor, "examine", lambda: report)
    monkeypatch.setattr(doctor.console, "facts", lambda: Console(highlight=False, width=48))
    cli.run(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.endswith(f" {folder}")] == [
        "weights",
        "cache",
    ]
    assert any(line.endswith("X kernels, 1 thread") for line in lines)
    packages = [line for line in lines if "numpy" in line or "rich" in line]
    assert packages
    assert all(len(line) <= 48 for line in packages)


@pytest.mark.parametrize("target", ["./no-such-model", "nonsense"])
def test_distill_refuses_a_model_that_is_none_as_generate_does(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    said = []
    cloud = ("--cloud", "ws://127.0.0.1:1")  # there, too, a bare word is refused
    for words in (["distill", "work"], ["generate", "hi", *cloud]):
        assert cli.run([*words, "--target", target]) == 2
        said.append(capsys.readouterr().err)
    assert said[0] == said[1]
    assert len(said[0].splitlines()) == 1
    assert not (tmp_path / "work").exists()
