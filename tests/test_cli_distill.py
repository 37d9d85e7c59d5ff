"""`outrider distill` from the command line to a draft that `generate` uses, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tiny
from words import trained

pytest.importorskip("torch", reason="the torch extra is not installed")

from outrider.cli import run
from outrider.commands.distill import settings
from outrider.commands.errors import CommandError

CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("target")
    words = trained("byte-level")
    words.chat_template = CHAT
    tiny.llama(vocab_size=len(words)).save_pretrained(folder)
    words.save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_draft_is_made_and_used(
    target: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "work"
    assert run(["distill", str(work), "--target", target, "--quick", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert Path(report["path"]) == work / "draft.safetensors"

    def answer(draft: str) -> dict[str, object]:
        asked = ["generate", "the quick", "--raw", "--target", target, "--draft", draft]
        assert run([*asked, "--seed", "5", "--max-tokens", "24", "--ignore-eos", "--json"]) == 0
        facts: dict[str, object] = json.loads(capfd.readouterr().out)
        return facts

    drafted, alone = answer(report["path"]), answer("none")
    assert drafted["token_ids"] == alone["token_ids"]
    assert drafted["drafted"] > 0


def test_all_options_reach_the_run(tmp_path: Path) -> None:
    """Sizes were once given twice, and nothing ran without --quick."""
    sizes = {"corpus_tokens": 600, "layers": 2, "support": 128, "steps": 3}
    config = settings(tmp_path, {"seed": 4}, sizes, quick=False)
    assert (config.corpus_tokens, config.layers, config.support, config.steps) == (600, 2, 128, 3)
    assert config.seed == settings(tmp_path, {"seed": 4}, sizes, quick=True).seed == 4
    with pytest.raises(CommandError, match="at least 1"):
        settings(tmp_path, {}, {**sizes, "layers": 0}, quick=False)
