"""The whole path on a tiny model, and its parts that need no training."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the torch extra is not installed")

from outrider.distill.corpus import load_lessons, read_texts  # noqa: E402
from outrider.distill.evaluate import read_tasks  # noqa: E402
from outrider.distill.prompts import PromptSource, read_prompts  # noqa: E402
from outrider.distill.run import (  # noqa: E402
    DistillConfig,
    Progress,
    Target,
    distill,
    quick,
    rank_support,
)
from outrider.engines.base import EngineError  # noqa: E402
from outrider.engines.draftfile import read  # noqa: E402
from tiny import llama  # noqa: E402

VOCAB = 256


def target() -> Target:
    model = llama(vocab_size=VOCAB, initializer_range=0.08, num_hidden_layers=3)
    return Target(
        name="tiny",
        model=model,
        encode=lambda text: list(text.encode()[-60:]),
        decode=lambda ids: bytes(ids).decode("latin-1"),
        end_ids=frozenset({0}),
        vocab=VOCAB,
    )


def small(work: Path, **changes: Any) -> DistillConfig:
    return quick(work, corpus_tokens=400, steps=24, layers=2, **changes)


def test_distill_makes_a_draft_better_than_it_began(tmp_path: Path) -> None:
    told: list[Progress] = []
    report = distill(target(), small(tmp_path / "work"), told.append)
    assert {each.stage for each in told} == {"corpus", "train", "evaluate"}
    assert all(0 <= each.done <= each.whole for each in told)
    before, after = report.before[-1], report.after[-1]
    assert before.task == after.task == "mean"
    assert after.overlap["1.0"] > before.overlap["1.0"]
    assert after.greedy >= before.greedy
    draft = read(report.path)
    assert draft.header.provenance["steps"] == 24
    assert draft.header.provenance["acceptance"][-1]["greedy"] == after.greedy
    json.dumps(report.as_dict())
    assert report.seconds_per_token_after > 0

    # Again: everything is there, and the result is the same.
    shards = {p: p.stat().st_mtime_ns for p in (tmp_path / "work").glob("lessons-*")}
    content = report.path.read_bytes()
    again = distill(target(), small(tmp_path / "work"))
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "work").glob("lessons-*")} == shards
    assert again.path.read_bytes() == content
    with pytest.raises(EngineError, match=r"other settings \(seed\)"):
        distill(target(), small(tmp_path / "work", seed=4))


def test_ready_made_texts_and_prompt_files(tmp_path: Path) -> None:
    corpus = tmp_path / "texts.jsonl.gz"
    rows = [{"p": [7, 8], "y": [9 + i % 50, 10, 11, 12], "t": 0.5} for i in range(110)]
    with gzip.open(corpus, "wt") as file:
        file.write("\n".join(map(json.dumps, rows)))
    assert read_texts(corpus)[1].answer == (10, 10, 11, 12)
    config = small(tmp_path / "work", corpus_files=(corpus,))
    distill(target(), config)
    lessons = load_lessons(tmp_path / "work" / "lessons-0000.safetensors")
    assert len(lessons) == 110
    assert {x.temperature for x in lessons} == {0.5}
    corpus.write_bytes(gzip.compress(b'{"p": [1]}'))
    with pytest.raises(ValueError, match="expected objects"):
        read_texts(corpus)


def test_settings_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="has 3 layers, not 9"):
        distill(target(), quick(tmp_path, layers=9))
    for bad in ({"layers": 0}, {"frozen": 2}, {"bits": 1}, {"steps": 0}):
        with pytest.raises(ValueError):
            quick(tmp_path, **bad)


def test_prompts_follow_the_seed_and_vary() -> None:
    source = PromptSource(files=("from a file",), file_share=0.2)

    def drawn(seed: int) -> list[str]:
        draw = random.Random(seed)
        return [source.draw(draw, ("A passage.",)) for _ in range(200)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert len(set(drawn(1))) > 120
    assert any("A passage." in prompt for prompt in drawn(1))
    assert any(prompt.startswith("def ") for prompt in drawn(1))
    assert any(prompt.startswith("from a file") for prompt in drawn(1))
    assert not any("{" in prompt or "}" in prompt for prompt in drawn(1))
    assert not any("passage." in PromptSource().draw(random.Random(i)) for i in range(100))


def test_prompts_from_files(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "one", "task": "a"}\n\n{"turns": ["two", "x"]}\n"three"\n')
    assert read_prompts([path]) == ("one", "two", "three")
    assert read_tasks([path]) == {"a": ["one"], "p": ["two", "three"]}
    path.write_text('{"answer": "no"}\n')
    with pytest.raises(ValueError, match=r"p.jsonl, line 1: no prompt"):
        read_prompts([path])


def test_the_head_names_the_frequent_ids_and_the_ends(tmp_path: Path) -> None:
    distill(target(), small(tmp_path))
    lessons = load_lessons(tmp_path / "lessons-0000.safetensors")
    support = rank_support(lessons, 10, VOCAB, frozenset({255})).tolist()
    assert len(support) == 10
    assert 255 in support
    assert support == sorted(support)
    assert len(rank_support(lessons, 9999, VOCAB, frozenset())) == VOCAB
