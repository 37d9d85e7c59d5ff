"""Recording a draft: what is written, and going on where it stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec import structs

from live import PROMPT, TARGET, TOKENIZER, alone, drafter, toy
from outrider import cli
from outrider.bench import recording
from outrider.engines.base import EngineError
from outrider.engines.load import Loaded
from outrider.engines.replay import encoded, read
from outrider.engines.tokenizer import ByteTokenizer
from pair import Saying
from recordings import SEEDS, recorded, shape, written

QUESTIONS = '"tell me a story"\n{"prompt": "what is a tree?"}\n"count to ten"\n'
TOYS = ("--target", "toy:1", "--draft", "toy:1:0.4", "--ignore-eos", "--temperature", "1")


def test_the_text_is_the_targets_own():
    held = recorded()
    for answer in held.answers:
        assert answer.output == alone(held.header.sampling.params(answer.seed)).token_ids
        wrong = [at for at, chain in answer.chains.items() if chain]
        assert all(answer.chains[at][0] != answer.output[at] for at in wrong)
        assert all(len(chain) <= held.header.window for chain in answer.chains.values())
    assert any(answer.chains for answer in held.answers)


def test_a_full_draft_window_is_recorded_as_silence():
    """Field case 13: a draft whose window is full says nothing, recorded or not."""
    target = Loaded(model=toy(TARGET), tokenizer=TOKENIZER)
    small = drafter(context_length=20)
    (answer,) = recording.record(target, small, [(5, ("t", PROMPT))], shape(), window=4)
    silent = [at for at, chain in answer.chains.items() if not chain]
    assert silent == list(range(18, 39)), "20 ids fit, of which 3 are the prompt's"
    assert set(silent) <= set(answer.ended)


def test_a_chain_that_an_end_closes_is_whole():
    """A guessed end in the window's last place: the draft would say no more, whatever is asked."""
    wrong, end = 7, ByteTokenizer.END
    pattern = Saying(lambda committed, count: (wrong, end)[committed[-1] == wrong :])
    target = Loaded(model=toy(TARGET), tokenizer=TOKENIZER)
    kind = shape(ignore_eos=False, max_tokens=12)
    (answer,) = recording.record(target, pattern, [(5, ("t", PROMPT))], kind, window=2)
    assert len(answer.output) > 2
    assert answer.chains[0] == (wrong, end)
    assert 0 in answer.ended
    assert answer.guesses((), 9, 2) == (wrong, end)
    assert pattern.open_sessions == 0


def test_the_time_of_a_guess_leaves_the_prompt_out():
    ticks = iter([0.0, 9.0, *[t for i in range(9) for t in (10.0 * (i + 1), 10.0 * (i + 1) + 0.8)]])
    spent = recording.token_seconds(drafter(), PROMPT, shape().params(5), clock=lambda: next(ticks))
    assert spent == pytest.approx(0.2), "0.8 s for 4 guesses"


def record(path: Path, *more: str, questions: Path) -> int:
    return cli.run(
        ["record", str(path), *TOYS, "--prompts", str(questions), "--max-tokens", "20", *more]
    )


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text(QUESTIONS)
    return path


def test_a_recording_goes_on_where_it_stopped(tmp_path: Path, questions: Path, capsys):
    whole, path = tmp_path / "whole.jsonl", tmp_path / "drafts.jsonl"
    assert record(whole, "--json", questions=questions) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["answers"], facts["made_now"], facts["draft"]) == (3, 3, "toy:1:0.4")
    # Stopped in the middle of writing the third answer.
    lines = whole.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]) + lines[3][:40])
    assert record(path, "--json", questions=questions) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["answers"], facts["made_now"]) == (3, 1)

    def timeless(file: Path) -> list[object]:
        return [structs.replace(a, prefill_seconds=0.0) for a in read(file).answers]

    assert timeless(path) == timeless(whole)
    assert path.read_bytes().startswith(b"".join(lines[:3])), "what was written stays"


def test_ctrl_c_keeps_whole_answers(tmp_path: Path, questions: Path, monkeypatch, capsys):
    path = tmp_path / "drafts.jsonl"
    add = recording.RecordFile.add

    def interrupted(self: recording.RecordFile, answer: object) -> None:
        if self.done:
            raise KeyboardInterrupt
        add(self, answer)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(recording.RecordFile, "add", interrupted)
        assert record(path, questions=questions) == 130
    assert len(read(path).answers) == 1
    assert record(path, questions=questions) == 0
    assert [answer.seed for answer in read(path).answers] == [0, 1, 2]


def test_one_recording_at_a_time_writes_a_file(tmp_path: Path, questions: Path, capsys):
    """A second one that begins the same file would throw away what the first has written."""
    path = tmp_path / "drafts.jsonl"
    assert record(path, "--samples", "1", questions=questions) == 0
    before = path.read_bytes()
    with recording.alone_in(path):
        assert record(path, questions=questions) == 2
    assert "another outrider record is writing drafts.jsonl" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert record(path, questions=questions) == 0, "the file is free again"


def test_other_options_do_not_go_on_in_a_file(tmp_path: Path, questions: Path, capsys):
    path = tmp_path / "drafts.jsonl"
    assert record(path, questions=questions) == 0
    before = path.read_bytes()
    capsys.readouterr()
    assert record(path, "--window", "4", "--top-k", "9", questions=questions) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "--window 16, not 4; --top-k 0, not 9: name another file" in said
    assert path.read_bytes() == before


def test_a_file_of_something_else_is_left_alone(tmp_path: Path, questions: Path, capsys):
    path = tmp_path / "notes.txt"
    path.write_text("my notes\n")
    assert record(path, questions=questions) == 2
    assert "no recording of drafts" in capsys.readouterr().err
    assert path.read_text() == "my notes\n"


@pytest.mark.parametrize("draft", ["none", "lookup", "lookup+small", "replay:x"])
def test_drafts_that_need_no_recording(draft: str, tmp_path: Path, questions: Path, capsys):
    path = tmp_path / "drafts.jsonl"
    assert record(path, "--draft", draft, questions=questions) == 2
    assert "--draft must be a model" in capsys.readouterr().err
    assert not path.exists()


def test_differences_in_words(tmp_path: Path):
    held = recorded().header
    assert recording.differences(held, structs.replace(held, token_seconds=9.0)) == []
    other = structs.replace(held.target, dtype="bfloat16")
    assert recording.differences(held, structs.replace(held, target=other, seed=1)) == [
        "--target toy (float32), not toy (bfloat16)",
        f"--seed {SEEDS[0]}, not 1",
    ]
    path = written(tmp_path / "toy.jsonl", recorded())
    with pytest.raises(EngineError, match=r"toy\.jsonl was recorded with --seed 5, not 1"):
        recording.RecordFile(path, structs.replace(held, seed=1))
    assert path.read_bytes().endswith(encoded(recorded().answers[-1]))
