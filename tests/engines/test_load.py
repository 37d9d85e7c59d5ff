"""From spec strings to models: what each names, and what is said when it names nothing."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from outrider.core.tokens import SamplingParams
from outrider.engines import builtin, load, loaded
from outrider.engines.base import (
    EngineError,
    IncompatibleModelsError,
    MissingExtraError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from outrider.engines.load import (
    Loaded,
    load_draft_model,
    load_drafter,
    load_target,
    load_vocabulary,
)
from outrider.runtime.local import GenerationRequest, LocalGenerator
from words import trained


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder as save_pretrained leaves it: padded Llama and a byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    words = trained("byte-level")
    model = tiny.llama(vocab_size=len(words) + 20)
    model.generation_config.eos_token_id = [0, 1]
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return str(folder)


def write_config(folder: Path, name: str, **settings: Any) -> str:
    """A folder with a config and no weights."""
    import transformers

    getattr(transformers, name)(**settings).save_pretrained(folder)
    return str(folder)


def test_a_folder(checkpoint: str, capfd: pytest.CaptureFixture[str]) -> None:
    loaded = load_target(checkpoint, threads=1, max_slots=2, rows=4, context_length=100)
    info = loaded.model.info
    assert info.name == checkpoint
    assert info.deterministic
    assert (info.dtype, info.device, info.context_length) == ("float32", "cpu", 100)
    assert info.vocab_size == loaded.tokenizer.vocab_size == info.logits_width - 20
    assert info.fingerprint == loaded.tokenizer.fingerprint
    assert info.eos_token_ids == loaded.tokenizer.eos_token_ids == {0, 1}
    ids = loaded.tokenizer.encode("the quick fox")
    rows = tiny.feed(loaded.model, loaded.model.open(), ids)
    expected = tiny.full_rows(tiny.llama(vocab_size=info.logits_width), ids)
    np.testing.assert_allclose(rows, expected[:, : info.vocab_size], rtol=2e-4, atol=2e-4)
    assert capfd.readouterr() == ("", ""), "loading is quiet"


def test_dtypes(checkpoint: str) -> None:
    assert load_target(checkpoint, dtype="bfloat16").model.info.dtype == "bfloat16"
    with pytest.raises(EngineError, match="auto, bfloat16, float16, float32"):
        load_target(checkpoint, dtype="int7")


def test_other_wrong_options(checkpoint: str) -> None:
    with pytest.raises(EngineError, match="use auto, cpu, cuda or cuda:N"):
        load_target(checkpoint, device="tpu")
    with pytest.raises(EngineError, match="threads must be at least 1"):
        load_target(checkpoint, threads=0)
    if not tiny.torch.cuda.is_available():
        with pytest.raises(EngineError, match="no CUDA device"):
            load_target(checkpoint, device="cuda")


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("builtin:other", "there is builtin:smollm2"),
        ("toy:x", "toy:SEED"),
        ("./nowhere", "neither a folder nor a model id"),
        ("", "neither a folder nor a model id"),
        ("two words", "neither a folder nor a model id"),
    ],
)
def test_specs_that_name_nothing(spec: str, reason: str) -> None:
    with pytest.raises(ModelNotFoundError, match=reason) as caught:
        load_target(spec)
    assert "\n" not in str(caught.value)


def test_an_unknown_hub_id(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match=r"no model 'nobody/nothing'.*no connection"):
        load_target("nobody/nothing")


def test_folders_that_are_no_checkpoints(tmp_path: Path, checkpoint: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        load_target(str(tmp_path))
    tiny.llama().save_pretrained(tmp_path)
    with pytest.raises(EngineError) as caught:
        load_target(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_refused_before_any_weights_are_read(tmp_path: Path) -> None:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    folder = write_config(tmp_path / "m", "MistralConfig", sliding_window=8, **small)
    with pytest.raises(UnsupportedModelError, match="sliding-window"):
        load_target(folder)
    folder = write_config(tmp_path / "r", "MambaConfig", **small)
    with pytest.raises(UnsupportedModelError, match="recurrent"):
        load_target(folder)
    folder = write_config(tmp_path / "t", "T5Config", d_model=16, num_layers=1)
    with pytest.raises(UnsupportedModelError, match=r"not a causal language model|encoder"):
        load_target(folder)


def test_missing_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else find(name)
    )
    for spec in ("builtin:smollm2", "some/model"):
        with pytest.raises(MissingExtraError, match=r"pip install 'outrider\[torch\]'"):
            load_target(spec)
    with pytest.raises(MissingExtraError):
        load_draft_model("small", load_target("toy"))
    assert load_target("toy").model.info.vocab_size == 257


def test_toys() -> None:
    one, two = load_target("toy:3"), load_target("toy:3:0.4")
    ids = (1, 2, 3, 4, 5, 6)
    rows = [tiny.feed(each.model, each.model.open(), ids) for each in (one, two)]
    same = (rows[0] == rows[1]).all(axis=1)
    assert same.any()
    assert not same.all()
    assert load_draft_model("toy:3", one).info.name == "toy:3"


def test_drafts(checkpoint: str) -> None:
    target = load_target(checkpoint)
    draft = load_draft_model(checkpoint, target)
    assert not draft.info.deterministic
    with pytest.raises(IncompatibleModelsError, match="draft and target differ at id 0"):
        load_draft_model("toy", target)


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks transformers for a model by name fails the test."""
    import transformers

    def asked(source: Any, **_options: Any) -> Any:
        raise AssertionError(f"the hub was asked for {source!r}")

    for name in ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM", "GenerationConfig"):
        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", asked)


OTHERS = (
    "toy", "toy:1", "gguf:none", "./none.gguf", "builtin:none", "vllm:http://127.0.0.1:9#toy",
    "openai:http://127.0.0.1:9#./none.gguf", "sglang:http://127.0.0.1:9#builtin:none",
)  # fmt: skip
"""Specs of every engine but transformers."""


@pytest.mark.parametrize("spec", OTHERS)
def test_only_a_checkpoint_is_looked_for_on_the_hub(spec: str, no_hub: None) -> None:
    for load_it in (load_target, load_vocabulary):
        with contextlib.suppress(EngineError):  # some load, and none asks the hub
            load_it(spec)
    with pytest.raises(UnsupportedModelError, match="no checkpoint"):
        load.load_checkpoint(spec)


def test_a_gguf_file_that_is_none_is_told_with_or_without_llama_cpp(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"PK\3\4 something else")
    told = {
        f"gguf:{tmp_path / 'none'}": f"no file {tmp_path / 'none'}",
        str(wrong): f"{wrong} is not a GGUF file",
        f"gguf:{tmp_path}": f"cannot read {tmp_path}: Is a directory",
    }
    for load_it in (load_target, load_vocabulary):
        for spec, why in told.items():
            with pytest.raises(ModelNotFoundError) as caught:
                load_it(spec)
            assert str(caught.value) == why


@pytest.mark.parametrize("name", ["toy:1", "gguf:some.gguf", "./some.gguf", "vllm#toy:1"])
def test_a_draft_that_borrows_weights_says_who_lends_none(name: str, no_hub: None) -> None:
    target = loaded.absent(name, load_target("toy").tokenizer, width=257, context=64)
    with pytest.raises(UnsupportedModelError, match=r"'small' borrows weights .*--draft lookup"):
        load_drafter("small", target)


@pytest.mark.parametrize(
    "name", ["builtin:smollm2", "builtin:smollm2-gguf", "vllm#builtin:smollm2-gguf"]
)
def test_the_built_in_weights_are_lent_whoever_runs_them(
    name: str, no_hub: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builtin, "load_state", lambda dtype: {"dtype": dtype})
    monkeypatch.setattr(builtin, "load_config", lambda: "config")
    assert load._lent_weights("small", name) == ({"dtype": "bfloat16"}, "config")


def test_a_checkpoint_lends_its_weights(checkpoint: str) -> None:
    state, config = load._lent_weights("mine.safetensors", checkpoint)
    assert config.vocab_size == state["lm_head.weight"].shape[0]
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        load.load_checkpoint(str(Path(checkpoint).parent))


def test_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_target("toy")
    asked: list[str] = []

    def model(spec: str, _target: Loaded, **_options: Any) -> Any:
        asked.append(spec)
        return load_target("toy:1").model

    monkeypatch.setattr(load, "load_draft_model", model)
    assert load_drafter("none", target) is None
    names = [load_drafter(spec, target) for spec in ("lookup", "small", "lookup+small")]
    assert [each.name for each in names if each] == ["lookup", "small", "lookup+small"]
    assert asked == ["small", "small"]


def test_an_edge_knows_the_end_ids_and_the_context_of_the_target(
    checkpoint: str, tmp_path: Path
) -> None:
    """Where the two differ, the cloud ends an answer where the edge goes on, or the reverse."""
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    for end_ids in ([0, 1], None):
        settings = json.loads((folder / "config.json").read_text())
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        rope["original_max_position_embeddings"] = 77
        settings |= {"eos_token_id": 2, "rope_parameters": rope}
        (folder / "config.json").write_text(json.dumps(settings))
        if end_ids is None:
            (folder / "generation_config.json").unlink()
        cloud = load_target(str(folder)).model.info
        edge = load_vocabulary(str(folder))
        assert edge.tokenizer.eos_token_ids == edge.model.info.eos_token_ids
        assert edge.tokenizer.eos_token_ids == cloud.eos_token_ids == set(end_ids or [1, 2])
        assert edge.model.info.context_length == cloud.context_length == 77
        assert edge.model.info.logits_width == cloud.logits_width
        assert edge.model.info.fingerprint == cloud.fingerprint


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_a_toys_share_holds_in_its_own_text(share: float) -> None:
    """Where it did not, a draft `toy:1:0.8` of `toy:1` was accepted without fail."""
    found = []
    for seed in range(4):
        target = load_target(f"toy:{seed}")
        drafter = load_drafter(f"toy:{seed}:{share}", target)
        made = LocalGenerator(target.model, target.tokenizer, drafter)
        params = SamplingParams(temperature=0.7, max_tokens=150, ignore_eos=True, seed=seed)
        request = GenerationRequest(prompt_ids=(1, 2, 3), params=params, draft_length=1)
        found.append(made.generate(request).counters.acceptance)
    # 75 drafts a seed: four standard errors of the mean are at most .12.
    assert abs(float(np.mean(found)) - (1 - share)) < 0.15
