"""The llama.cpp engine against the plain model; how it forgets, its bits, what it refuses."""

from __future__ import annotations

import functools
import importlib.util
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
import tinygguf
from bits import Oracle, texts_of, wander
from outrider.engines import builtin, llama_native
from outrider.engines.base import (
    Block,
    ContextOverflowError,
    EngineError,
    LanguageModel,
    MissingExtraError,
    SlotError,
    UnsupportedModelError,
)
from outrider.engines.llama_native import NativeContext, NativeModel
from outrider.engines.llamacpp import PASS_ROWS, LlamaCppModel
from outrider.engines.load import load_draft_model, load_target, load_vocabulary
from outrider.engines.selfcheck import keeps_bits, require_bits
from tiny import CONTEXT, feed, fresh_rows, full_rows

WHOLE = ("Q8_0", "Q4_1", "Q4_0")
"""Weights in whole numbers: those whose bits do not depend on the shape of a pass."""
FAMILIES = {
    "llama": functools.partial(tiny.llama, **tinygguf.WIDE),
    "qwen2": functools.partial(tiny.qwen2, **tinygguf.WIDE),
    "qwen3": functools.partial(tiny.qwen3, hidden_size=64, intermediate_size=96),
}
FAMILY = pytest.mark.parametrize("family", sorted(FAMILIES))


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@functools.cache
def file(family: str = "llama", kind: str = "Q8_0", **changes: Any) -> Path:
    """Written once a test run."""
    path = Path(_folder().name) / f"{family}-{kind}-{len(changes)}-{hash(str(changes))}.gguf"
    return tinygguf.write(path, FAMILIES[family](), kind=kind, **changes)


def engine(family: str = "llama", kind: str = "Q8_0", **options: Any) -> LlamaCppModel:
    return LlamaCppModel(
        NativeModel(file(family, kind)), name=family, threads=options.pop("threads", 1), **options
    )


def ids_of(count: int, *, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(60) for _ in range(count)]


@FAMILY
def test_rows_equal_the_plain_models(family: str) -> None:
    """Weights in float32; keys and values are stored in 16 bits."""
    model = engine(family, "F32")
    ids = ids_of(CONTEXT)
    rows = np.concatenate([feed(model, slot, ids[:90]) for slot in [model.open()]])
    expected = full_rows(FAMILIES[family](), ids[:90])
    assert rows.dtype == np.float32
    scale = float(expected.std())
    np.testing.assert_allclose(rows, expected, rtol=0, atol=0.05 * scale)


@pytest.mark.parametrize("kind", WHOLE)
@FAMILY
def test_bits_by_any_way(family: str, kind: str) -> None:
    """Blocks of 1 to 128 rows, rollbacks, several slots in a pass, copies: always `==`."""
    model = engine(family, kind)
    oracle = Oracle()
    texts = texts_of(2)
    for text in texts:
        for i, row in enumerate(fresh_rows(model, text)):
            oracle.check(tuple(text[: i + 1]), row)
        whole = feed(model, slot := model.open(), text)
        model.close(slot)
        for i, row in enumerate(whole):
            oracle.check(tuple(text[: i + 1]), row)
    wander(model, texts, oracle, steps=60, seed=2)
    assert oracle.repeats > 4 * CONTEXT


@pytest.mark.parametrize("threads", [1, 2])
def test_bits_beyond_the_length_at_which_llama_cpp_shares_a_row_among_threads(
    threads: int,
) -> None:
    """From 512 cells on, and one row alone: the case that stored types must rule out."""
    made = functools.partial(tiny.llama, **tinygguf.WIDE, max_position_embeddings=700)
    path = tinygguf.write(Path(_folder().name) / f"long{threads}.gguf", made())
    model = LlamaCppModel(NativeModel(path), name="long", threads=threads, max_slots=2)
    text = ids_of(640)
    slot = model.open()
    whole = feed(model, slot, text)
    model.truncate(slot, 600)
    assert (
        np.concatenate([feed(model, slot, [token]) for token in text[600:]]) == whole[600:]
    ).all()
    model.truncate(slot, 560)
    assert (feed(model, slot, text[560:570]) == whole[560:570]).all()


def test_growing_copies_what_the_slots_hold() -> None:
    """The context of 200 ids fits the first allocation; here it is made of 3 steps."""
    made = functools.partial(tiny.llama, **tinygguf.WIDE, max_position_embeddings=1000)
    path = tinygguf.write(Path(_folder().name) / "growing.gguf", made())
    model = LlamaCppModel(NativeModel(path), name="growing", threads=1, max_slots=3)
    other, slot = model.open(), model.open()
    beside = feed(model, other, ids_of(30, seed=4))
    feed(model, other, [1, 2])
    model.truncate(other, 30)
    text = ids_of(900)
    rows = np.concatenate([feed(model, slot, text[i : i + 90]) for i in range(0, 900, 90)])
    assert model._capacity == 1000
    again = model.open()
    assert (feed(model, again, text) == rows).all()
    model.truncate(other, 29)
    assert (feed(model, other, [ids_of(30, seed=4)[-1]])[0] == beside[-1]).all()


def test_no_room_to_grow_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    made = functools.partial(tiny.llama, **tinygguf.WIDE, max_position_embeddings=1000)
    path = tinygguf.write(Path(_folder().name) / "full.gguf", made())
    model = LlamaCppModel(NativeModel(path), name="full", threads=1, max_slots=2)
    slot, other = model.open(), model.open()
    ids = ids_of(60)
    rows = feed(model, slot, ids)
    with monkeypatch.context() as full:
        full.setattr(llama_native.api, "llama_init_from_model", lambda *_: None)
        with pytest.raises(EngineError, match=r"no room for .* fewer slots or a shorter context"):
            feed(model, slot, ids_of(500))
    assert model.tokens(slot) == tuple(ids)
    feed(model, other, ids[:5])
    model.truncate(slot, 20)
    assert (feed(model, slot, ids[20:]) == rows[20:]).all()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *WHOLE])
def test_only_what_keeps_its_bits_is_called_deterministic(kind: str) -> None:
    """Float weights do not on the processors known to us: a lone row takes another kernel."""
    kept = keeps_bits(engine(kind=kind))
    assert kept or kind not in WHOLE
    if kept:
        assert load_target(str(file(kind=kind)), threads=1).model.info.deterministic
        return
    with pytest.raises(EngineError, match=rf"in {kind.lower()} .*Q8_0 or Q4_1"):
        load_target(str(file(kind=kind)), threads=1)
    loose = load_target(str(file(kind=kind)), threads=1, deterministic=False)
    assert not loose.model.info.deterministic


def test_what_cannot_be_held_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = NativeContext.decode

    def wobbly(self: NativeContext, parts: Any, columns: int) -> Any:
        rows = decode(self, parts, columns)
        return [np.nextafter(row, np.float32(len(rows))) for row in rows]

    monkeypatch.setattr(NativeContext, "decode", wobbly)
    with pytest.raises(EngineError, match=r"in q8_0 .*Q8_0 or Q4_1.*--no-deterministic"):
        load_target(str(file()), threads=1)
    loose = load_target(str(file()), threads=1, deterministic=False)
    assert not loose.model.info.deterministic


def test_info_and_protocol() -> None:
    model = engine("qwen2", fingerprint="f", vocab_size=290, eos_token_ids=frozenset({1}))
    assert isinstance(model, LanguageModel)
    info = model.info
    assert (info.name, info.vocab_size, info.logits_width) == ("qwen2", 290, 300)
    assert (info.context_length, info.dtype, info.device) == (CONTEXT, "q8_0", "cpu")
    assert (info.deterministic, info.fingerprint, info.eos_token_ids) == (True, "f", {1})
    assert info.parameters > 0
    assert model.support is None
    assert feed(model, model.open(), [1, 2, 3]).shape == (3, 290)


def test_only_the_rows_asked_for() -> None:
    model = engine()
    ids = tuple(ids_of(PASS_ROWS + 20))
    (whole,) = model.forward([Block(slot=model.open(), start=0, tokens=ids, rows=len(ids))])
    for rows in (0, 1, 19, 20, 21, len(ids) - 1):
        slot = model.open()
        (some,) = model.forward([Block(slot=slot, start=0, tokens=ids, rows=rows)])
        assert some.shape == (rows, model.info.vocab_size)
        assert (some == whole[len(ids) - rows :]).all()
        model.close(slot)


def test_passes_are_counted() -> None:
    model = engine()
    a, b, c = (model.open() for _ in range(3))
    feed(model, a, ids_of(PASS_ROWS + 1))
    assert model.passes == 2
    model.forward([Block(slot=s, start=model.length(s), tokens=(1, 2), rows=1) for s in (c, b, a)])
    assert model.passes == 3, "neighbours with as many rows share one"
    blocks = [Block(slot=b, start=2, tokens=(1,) * 5, rows=1)]
    model.forward([*blocks, Block(slot=a, start=model.length(a), tokens=(1,), rows=1)])
    assert model.passes == 5, "one row of both, then what is left of one"


def test_a_failed_pass_leaves_lengths_and_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = engine()
    slot = model.open()
    ids = ids_of(40)
    rows = feed(model, slot, ids)
    decode = NativeContext.decode
    calls = []

    def failing(self: NativeContext, parts: Any, columns: int) -> Any:
        calls.append(len(calls))
        if len(calls) == 2:
            raise EngineError("llama.cpp failed")
        return decode(self, parts, columns)

    model.truncate(slot, 10)
    monkeypatch.setattr(NativeContext, "decode", failing)
    with pytest.raises(EngineError, match="failed"):
        feed(model, slot, ids_of(PASS_ROWS + 5, seed=7))
    assert len(calls) == 2
    assert model.tokens(slot) == tuple(ids[:10])
    assert (feed(model, slot, ids[10:]) == rows[10:]).all()


def test_nan_is_an_error() -> None:
    broken = FAMILIES["llama"]()
    with tiny.torch.no_grad():
        broken.model.embed_tokens.weight[1] = float("nan")
    path = tinygguf.write(Path(_folder().name) / "nan.gguf", broken, kind="F32")
    model = LlamaCppModel(NativeModel(path), name="nan", threads=1)
    slot = model.open()
    with pytest.raises(EngineError, match="not numbers"):
        feed(model, slot, [1, 2])
    assert model.length(slot) == 0


def test_overflow_and_slots() -> None:
    model = engine(max_slots=2)
    full, other = model.open(), model.open()
    with pytest.raises(EngineError, match="all 2 slots"):
        model.open()
    ids = ids_of(CONTEXT)
    feed(model, full, ids[:-1])
    blocks = [
        Block(slot=other, start=0, tokens=(5,), rows=1),
        Block(slot=full, start=CONTEXT - 1, tokens=(1, 2), rows=1),
    ]
    with pytest.raises(ContextOverflowError):
        model.forward(blocks)
    assert (model.length(full), model.length(other)) == (CONTEXT - 1, 0)
    feed(model, full, ids[-1:])
    with pytest.raises(SlotError):
        feed(model, other, [97])
    model.close(other)
    with pytest.raises(SlotError):
        model.close(other)
    fresh = model.open()
    assert (feed(model, fresh, ids[:50]) == fresh_rows(engine(), ids[:50])).all()


def test_a_shorter_context_and_nonsense() -> None:
    assert engine(context_length=70).info.context_length == 70
    assert engine(context_length=7000).info.context_length == CONTEXT
    for options in ({"threads": 0}, {"max_slots": 0}):
        with pytest.raises(EngineError, match="at least 1"):
            engine(**options)


# --- specs -------------------------------------------------------------------------------


def test_specs(capfd: pytest.CaptureFixture[str]) -> None:
    path = str(file())
    for spec in (path, f"gguf:{path}"):
        loaded = load_target(spec, threads=1, max_slots=2, context_length=100)
        assert (loaded.model.info.name, loaded.model.info.context_length) == (spec, 100)
        assert loaded.model.info.deterministic
        vocabulary = load_vocabulary(spec)
        told, known = loaded.model.info, vocabulary.model.info
        assert (told.fingerprint, told.logits_width, told.eos_token_ids) == (
            known.fingerprint,
            known.logits_width,
            known.eos_token_ids,
        )
        assert known.context_length == CONTEXT
        with pytest.raises(EngineError, match="was not loaded here"):
            vocabulary.model.open()
    draft = load_draft_model(path, loaded, threads=1)
    assert not draft.info.deterministic
    assert capfd.readouterr() == ("", ""), "loading is quiet"


def test_a_file_may_lie_anywhere(tmp_path: Path) -> None:
    """Whatever its name ends in, once it is called gguf:; a home folder is understood."""
    other = tmp_path / "weights with blanks.bin"
    os.link(file(), other)
    assert load_target(f"gguf:{other}", threads=1).model.info.dtype == "q8_0"


def refused(spec: str, kind: type[EngineError], match: str, **options: Any) -> None:
    for load in (load_target, load_vocabulary) if not options else (load_target,):
        with pytest.raises(kind, match=match) as caught:
            load(spec, **options)
        assert "\n" not in str(caught.value)


def test_a_file_cut_short(tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    short.write_bytes(file().read_bytes()[:2000])
    refused(str(short), UnsupportedModelError, r"llama\.cpp cannot load .*short")


def test_a_download_that_was_cut_short(tmp_path: Path) -> None:
    """The header is whole, weights are missing."""
    data = file().read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[: len(data) - 3000])
    with pytest.raises(UnsupportedModelError, match=r"llama\.cpp cannot load"):
        load_target(str(cut))


def test_architectures_that_llama_cpp_does_not_know(tmp_path: Path) -> None:
    model = FAMILIES["llama"]()
    model.config.model_type = "martian"
    path = tinygguf.write(tmp_path / "martian.gguf", model)
    refused(str(path), UnsupportedModelError, "unknown model architecture: 'martian'")


def test_options_that_mean_nothing_here() -> None:
    spec = str(file())
    with pytest.raises(EngineError, match="leave --dtype at auto"):
        load_target(spec, dtype="float32")
    with pytest.raises(EngineError, match="runs on the CPU"):
        load_target(spec, device="cuda")


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "llama_cpp" else find(name)
    )
    match = r"llama-cpp-python not installed; run: pip install 'outrider\[llamacpp\]'"
    refused(str(file()), MissingExtraError, match)


def test_an_edge_without_torch_knows_the_built_in_target(monkeypatch: pytest.MonkeyPatch) -> None:
    if builtin.find_gguf() is None:
        pytest.skip("the built-in weights are not here: outrider pull")
    whole = load_vocabulary(builtin.SPEC)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in ("torch", "transformers") else find(name),
    )
    bare = load_vocabulary(builtin.SPEC)
    assert type(bare.tokenizer).__name__ == "GGUFTokenizer"
    told, known = whole.model.info, bare.model.info
    assert (told.fingerprint, told.logits_width, told.vocab_size, told.context_length) == (
        known.fingerprint,
        known.logits_width,
        known.vocab_size,
        known.context_length,
    )
    assert told.eos_token_ids == known.eos_token_ids


def test_tried_on_this_machine() -> None:
    model = engine()
    require_bits(model)
    assert model.open_slots == 0
