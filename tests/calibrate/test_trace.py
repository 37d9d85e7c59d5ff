"""Trace files, questions, and a recording of toy models checked against the coupled rule."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from outrider.calibrate.questions import questions
from outrider.calibrate.record import record
from outrider.calibrate.trace import Answer, TraceHeader, read, write
from outrider.control.base import CalibrationError
from outrider.core.tokens import SamplingParams
from outrider.engines.drafters import ModelDrafter
from outrider.engines.load import Loaded, load_target
from outrider.runtime.local import GenerationRequest, LocalGenerator

ASKED = [("a", "one"), ("b", "two"), ("a", "three")]


def pair() -> tuple[Loaded, Loaded]:
    return load_target("toy:3"), load_target("toy:3:0.4")


def recorded() -> tuple[TraceHeader, list[Answer]]:
    target, draft = pair()
    return record(target, draft.model, ASKED, temperature=0.5, max_tokens=40, seed=11)


def test_the_text_is_the_target_s_own() -> None:
    header, answers = recorded()
    target, _ = pair()
    assert [a.task for a in answers] == ["a", "b", "a"]
    for number, ((_, text), found) in enumerate(zip(ASKED, answers, strict=True)):
        prompt = tuple(target.tokenizer.chat([{"role": "user", "content": text}]))
        params = SamplingParams(temperature=0.5, max_tokens=40, seed=11 + number)
        alone = LocalGenerator(target.model, target.tokenizer).generate(
            GenerationRequest(prompt_ids=prompt, params=params, draft_length=0)
        )
        assert found.tokens == list(alone.token_ids)
    assert header.data == {"a": 2, "b": 1}
    assert header.target.name == "toy:3"
    assert header.draft.name == "toy:3:0.4"


def test_verdicts_of_blocks_can_be_read_off() -> None:
    """Accepted drafts of real speculation equal the leading matches of the record, block for
    block: the claim that the sweep rests on."""
    _, answers = recorded()
    target, draft = pair()
    for number, ((_, text), found) in enumerate(zip(ASKED, answers, strict=True)):
        prompt = tuple(target.tokenizer.chat([{"role": "user", "content": text}]))
        params = SamplingParams(temperature=0.5, max_tokens=40, seed=11 + number)
        generator = LocalGenerator(
            target.model, target.tokenizer, ModelDrafter("d", model=draft.model)
        )
        for length in (1, 3, 8):
            made = generator.generate(
                GenerationRequest(prompt_ids=prompt, params=params, draft_length=length)
            )
            start = accepted = rounds = 0
            while start < len(found):
                room = min(length, 40 - start - 1)
                part = found.strict[start : start + room]
                stood = int(np.append(part, False).argmin())
                accepted += stood
                rounds += 1
                start += stood + 1
            assert (made.counters.accepted, made.counters.rounds) == (accepted, rounds)


def test_divergence_is_zero_where_the_laws_agree_and_then_the_draft_is_right() -> None:
    _, answers = recorded()
    jsd = np.concatenate([a.jsd for a in answers])
    strict = np.concatenate([a.strict for a in answers])
    assert 0 < (jsd == 0).sum() < len(jsd)
    assert strict[jsd == 0].all()
    assert not strict.all()
    assert jsd.max() <= 0.6931472


def test_what_is_written_is_read(tmp_path: Path) -> None:
    header, answers = recorded()
    path = tmp_path / "traces.jsonl"
    write(path, header, answers)
    found = read(path)
    assert found.header == header
    assert list(found.answers) == answers
    assert found.positions == sum(len(a) for a in answers)
    assert [p.name for p in tmp_path.iterdir()] == ["traces.jsonl"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    header, answers = recorded()
    path = tmp_path / "traces.jsonl"
    path.write_bytes(b"old")
    with pytest.raises(TypeError):
        write(path, header, [*answers, object()])  # type: ignore[list-item]
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["traces.jsonl"]


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    header, answers = recorded()
    path = tmp_path / "traces.jsonl"
    for content, message in (
        (b"", "no trace file"),
        (b"# words\n", "no trace file"),
        (msgspec.json.encode(msgspec.structs.replace(header, version=9)), "version 9; this"),
        (msgspec.json.encode(header) + b"\n\n{}\n", "line 3"),
        (
            msgspec.json.encode(header)
            + b"\n"
            + msgspec.json.encode(answers[0]).replace(b'"drafts":[', b'"drafts":[1,'),
            "line 2: lists of",
        ),
    ):
        path.write_bytes(content)
        with pytest.raises(CalibrationError, match=message):
            read(path)


def test_questions_take_turns(tmp_path: Path) -> None:
    first, second = tmp_path / "sums.jsonl", tmp_path / "code.jsonl"
    first.write_text("\n".join(f'{{"prompt": "s{i}"}}' for i in range(6)))
    second.write_text('"c0"\n')
    assert questions(5, [first, second]) == [
        ("sums", "s0"),
        ("code", "c0"),
        ("sums", "s2"),
        ("sums", "s4"),
    ]
    second.write_text("{}")
    with pytest.raises(CalibrationError, match=r"code.jsonl, line 1: no prompt"):
        questions(1, [second])
    second.write_text("")
    with pytest.raises(CalibrationError, match="no prompt in the files"):
        questions(1, [second])


def test_without_question_sets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for value in ("", str(tmp_path)):
        monkeypatch.setenv("OUTRIDER_DATA", value)
        with pytest.raises(CalibrationError, match=r"set OUTRIDER_DATA .* --prompts"):
            questions(3)
