"""The hf engine against the plain model: what it answers, how it forgets, what it refuses."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tiny
from outrider.engines.base import (
    Block,
    ContextOverflowError,
    EngineError,
    LanguageModel,
    SlotError,
    UnsupportedModelError,
    plan_prefix,
)
from outrider.engines.hf import HFModel
from tiny import CONTEXT, FAMILIES, feed, fresh_rows, full_rows, torch

SETTINGS = pytest.mark.parametrize("deterministic", [True, False], ids=["fixed", "free"])
FAMILY = pytest.mark.parametrize("family", sorted(FAMILIES))
TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}


def engine(family: str = "llama", **options: Any) -> HFModel:
    return HFModel(FAMILIES[family](), name=family, **options)


def ids_of(count: int, *, seed: int = 0, width: int = 60) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(width) for _ in range(count)]


@FAMILY
@SETTINGS
def test_rows_equal_the_plain_models(family: str, deterministic: bool) -> None:
    model = engine(family, deterministic=deterministic)
    ids = ids_of(CONTEXT)
    expected = full_rows(FAMILIES[family](), ids)
    slot = model.open()
    got = []
    rng = random.Random(3)
    while model.length(slot) < len(ids):
        at = model.length(slot)
        got.append(feed(model, slot, ids[at : at + rng.randint(1, 20)]))
    rows = np.concatenate(got)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(rows, expected, **TOLERANCE)


@FAMILY
@SETTINGS
def test_rollback_equals_a_fresh_slot(family: str, deterministic: bool) -> None:
    model = engine(family, deterministic=deterministic)
    ids, other = ids_of(90), ids_of(40, seed=1)
    slot = model.open()
    feed(model, slot, ids[:60])
    feed(model, slot, other)
    model.truncate(slot, 50)
    assert model.tokens(slot) == tuple(ids[:50])
    again = feed(model, slot, ids[50:])
    np.testing.assert_allclose(again, full_rows(FAMILIES[family](), ids)[50:], **TOLERANCE)


@FAMILY
@SETTINGS
def test_a_ragged_batch_equals_solo_runs(family: str, deterministic: bool) -> None:
    model = engine(family, deterministic=deterministic)
    texts = [ids_of(count, seed=count) for count in (1, 63, 70, 12, 130)]
    plain = FAMILIES[family]()
    slots = [model.open() for _ in texts]
    rows = [1, 0, 5, 12, 130]
    out = model.forward(
        [
            Block(slot=slot, start=0, tokens=tuple(ids), rows=count)
            for slot, ids, count in zip(slots, texts, rows, strict=True)
        ]
    )
    assert [len(each) for each in out] == rows
    for ids, got, count in zip(texts, out, rows, strict=True):
        np.testing.assert_allclose(got, full_rows(plain, ids)[len(ids) - count :], **TOLERANCE)
    # And a step further, where the sessions stand at different lengths.
    step = [
        Block(slot=slot, start=len(ids), tokens=(7, 8), rows=2)
        for slot, ids in zip(slots, texts, strict=True)
    ]
    for ids, got in zip(texts, model.forward(step[::-1])[::-1], strict=True):
        np.testing.assert_allclose(got, full_rows(plain, [*ids, 7, 8])[-2:], **TOLERANCE)


@SETTINGS
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 100])
def test_copy_prefix(deterministic: bool, length: int) -> None:
    model = engine(deterministic=deterministic)
    ids, tail = ids_of(100), ids_of(20, seed=2)
    source, target = model.open(), model.open()
    feed(model, source, ids)
    model.copy_prefix(source, target, length)
    assert model.tokens(target) == tuple(ids[:length])
    rows = feed(model, target, tail)
    expected = full_rows(tiny.llama(), ids[:length] + tail)[length:]
    np.testing.assert_allclose(rows, expected, **TOLERANCE)
    assert model.tokens(source) == tuple(ids)
    expected = full_rows(tiny.llama(), [*ids, 1])[-1:]
    np.testing.assert_allclose(feed(model, source, [1]), expected, **TOLERANCE)


def test_info_and_protocol() -> None:
    model = HFModel(tiny.qwen2(), name="me", vocab_size=290, fingerprint="f", rows=4)
    assert isinstance(model, LanguageModel)
    info = model.info
    assert (info.name, info.vocab_size, info.logits_width) == ("me", 290, 300)
    assert (info.context_length, info.dtype, info.device) == (CONTEXT, "float32", "cpu")
    assert info.deterministic
    assert info.parameters > 0
    assert model.support is None
    slot = model.open()
    assert feed(model, slot, [1, 2, 3]).shape == (3, 290)
    assert model.rows == 4


def test_passes_are_counted() -> None:
    model = engine(rows=8)
    assert model.passes == 0
    slot = model.open()
    feed(model, slot, ids_of(20))
    assert model.passes == 3
    free = engine(deterministic=False)
    feed(free, free.open(), ids_of(20))
    assert free.passes == 1


def test_slot_errors() -> None:
    model = engine(max_slots=2)
    a, b = model.open(), model.open()
    with pytest.raises(EngineError, match="all 2 slots"):
        model.open()
    feed(model, a, [1, 2, 3])
    calls: list[Callable[[], object]] = [
        lambda: model.forward([Block(slot=9, start=0, tokens=(1,), rows=1)]),
        lambda: model.forward([Block(slot=a, start=2, tokens=(1,), rows=1)]),
        lambda: model.forward([Block(slot=b, start=0, tokens=(1,), rows=1)] * 2),
        lambda: model.forward([Block(slot=b, start=0, tokens=(97,), rows=1)]),
        lambda: model.forward([Block(slot=b, start=0, tokens=(-1,), rows=1)]),
        lambda: model.truncate(a, 4),
        lambda: model.truncate(a, -1),
        lambda: model.copy_prefix(a, a, 1),
        lambda: model.copy_prefix(a, b, 4),
        lambda: model.tokens(7),
        lambda: model.length(7),
        lambda: model.close(7),
    ]
    for call in calls:
        with pytest.raises(SlotError):
            call()
    assert (model.tokens(a), model.tokens(b)) == ((1, 2, 3), ())
    model.close(b)
    with pytest.raises(SlotError):
        model.close(b)
    assert model.length(model.open()) == 0


@SETTINGS
def test_overflow_changes_nothing(deterministic: bool) -> None:
    model = engine(deterministic=deterministic)
    full, other = model.open(), model.open()
    ids = ids_of(CONTEXT)
    feed(model, full, ids[:-1])
    too_long = Block(slot=full, start=CONTEXT - 1, tokens=(1, 2), rows=2)
    with pytest.raises(ContextOverflowError, match="201 tokens exceed the context of 200"):
        model.forward([Block(slot=other, start=0, tokens=(5,), rows=1), too_long])
    assert (model.length(full), model.length(other)) == (CONTEXT - 1, 0)
    last = feed(model, full, ids[-1:])
    np.testing.assert_allclose(last, full_rows(tiny.llama(), ids)[-1:], **TOLERANCE)


def test_context_can_be_shortened() -> None:
    model = engine(context_length=70)
    assert model.info.context_length == 70
    ids = ids_of(70)
    rows = feed(model, model.open(), ids)
    np.testing.assert_allclose(rows, full_rows(tiny.llama(), ids), **TOLERANCE)


def test_storage_grows_with_the_text() -> None:
    model = engine()
    slot = model.open()
    places = []
    for size in (10, 60, 80):
        feed(model, slot, ids_of(size))
        places.append(model._slots[slot].capacity)
    assert places == [64, 128, CONTEXT]


@SETTINGS
def test_nan_is_an_error_and_leaves_no_trace(deterministic: bool) -> None:
    broken = tiny.llama()
    with torch.no_grad():
        broken.get_input_embeddings().weight[5] = float("nan")
    model = HFModel(broken, name="broken", deterministic=deterministic)
    slot = model.open()
    ids = ids_of(20, width=5)
    before = feed(model, slot, ids)
    with pytest.raises(EngineError, match="not numbers"):
        feed(model, slot, [5, 1])
    assert model.tokens(slot) == tuple(ids)
    model.truncate(slot, 0)
    # The failed rows were stored behind these; attention must not meet their NaN.
    np.testing.assert_allclose(feed(model, slot, ids), before, **TOLERANCE)
    # Filling the cache asks for no row, so the damage shows at the next row that is asked for.
    model.forward([Block(slot=slot, start=20, tokens=(5,), rows=0)])
    with pytest.raises(EngineError, match="not numbers"):
        feed(model, slot, [1])


def test_bfloat16_rows_are_close() -> None:
    model = HFModel(tiny.llama().to(torch.bfloat16), name="half")
    assert model.info.dtype == "bfloat16"
    ids = ids_of(100)
    rows = feed(model, model.open(), ids)
    assert rows.dtype == np.float32
    expected = full_rows(tiny.llama(), ids)
    correlation = np.corrcoef(rows.ravel(), expected.ravel())[0, 1]
    assert correlation > 0.99


def test_gathered_attention_equals_the_plain_model() -> None:
    """The way GPUs go, on the CPU."""
    model = engine(gather=True)
    ids, other = ids_of(90), ids_of(70, seed=1)
    a, b = model.open(), model.open()
    out = model.forward(
        [
            Block(slot=a, start=0, tokens=tuple(ids), rows=90),
            Block(slot=b, start=0, tokens=tuple(other), rows=70),
        ]
    )
    np.testing.assert_allclose(out[0], full_rows(tiny.llama(), ids), **TOLERANCE)
    np.testing.assert_allclose(out[1], full_rows(tiny.llama(), other), **TOLERANCE)


def test_many_queries_a_key_head() -> None:
    """From 64 on the rows go through attention one by one."""
    changes = {"hidden_size": 64, "num_attention_heads": 64, "num_key_value_heads": 1}
    model = HFModel(tiny.llama(**changes, head_dim=4), name="wide")
    ids = ids_of(80)
    rows = feed(model, model.open(), ids)
    expected = full_rows(tiny.llama(**changes, head_dim=4), ids)
    np.testing.assert_allclose(rows, expected, **TOLERANCE)


# --- what is refused ---------------------------------------------------------------------


def refused(kind: str, config: str, match: str, *, deterministic: bool = True, **settings: Any):
    import transformers

    base = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": None,
    }
    made = getattr(transformers, config)(**(base | settings))
    with pytest.raises(UnsupportedModelError, match=match) as caught:
        HFModel(getattr(transformers, kind)(made).eval(), name=kind, deterministic=deterministic)
    assert "\n" not in str(caught.value)


def test_sliding_windows_are_refused() -> None:
    refused("MistralForCausalLM", "MistralConfig", "sliding-window", sliding_window=16)
    refused("Gemma2ForCausalLM", "Gemma2Config", "sliding-window", sliding_window=16, head_dim=8)


def test_softcapped_attention_is_refused() -> None:
    refused(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        "softcap",
        layer_types=["full_attention"] * 2,
        head_dim=8,
    )


def test_recurrent_models_are_refused() -> None:
    import transformers

    config = transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1)
    with pytest.raises(UnsupportedModelError, match="recurrent"):
        HFModel(transformers.MambaForCausalLM(config), name="mamba")


def test_encoder_decoders_are_refused() -> None:
    import transformers

    config = transformers.T5Config(vocab_size=64, d_model=16, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        HFModel(transformers.T5ForConditionalGeneration(config), name="t5")


def test_experts_are_refused_only_when_bits_are_promised() -> None:
    import transformers

    settings = {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None}
    refused("MixtralForCausalLM", "MixtralConfig", "experts", **settings)
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **settings,
    )
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).eval()
    ids = ids_of(30)
    expected = full_rows(model, ids)
    engine = HFModel(model, name="mixtral", deterministic=False)
    np.testing.assert_allclose(feed(engine, engine.open(), ids), expected, **TOLERANCE)


def test_a_window_that_is_switched_off_is_no_obstacle() -> None:
    import transformers

    config = transformers.MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        sliding_window=None,
    )
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(config).eval()
    ids = ids_of(30)
    expected = full_rows(model, ids)
    engine = HFModel(model, name="mistral")
    np.testing.assert_allclose(feed(engine, engine.open(), ids), expected, **TOLERANCE)


def test_a_tokenizer_wider_than_the_model_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="98 ids"):
        HFModel(tiny.llama(), name="narrow", vocab_size=98)


def test_nonsense_sizes_are_refused() -> None:
    for options in ({"rows": 0}, {"max_slots": 0}):
        with pytest.raises(EngineError, match="at least 1"):
            HFModel(tiny.llama(), name="none", **options)


def test_rope_that_switches_is_used_up_to_where_it_does() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    settings = {"rope_parameters": rope | {"original_max_position_embeddings": 100}}
    model = HFModel(tiny.llama(**settings), name="switching")
    assert model.info.context_length == 100


# --- field cases at engine level ---------------------------------------------------------


def test_case_10_caches_hold_exactly_what_was_committed() -> None:
    """Draft = target; accepted counts forced at random; no drift in 60 rounds."""
    target = engine(context_length=CONTEXT)
    draft = engine(context_length=CONTEXT, deterministic=False)
    rng = random.Random(4)
    here, there = target.open(), draft.open()
    committed = ids_of(5)
    for _ in range(60):
        if len(committed) > 150:
            committed = committed[:20]  # as after a restart: both sides reconcile
        size = rng.randint(1, 7)
        _reconcile(draft, there, committed)
        context = list(committed)
        while len(context) < len(committed) + size:
            at = draft.length(there)
            block = Block(slot=there, start=at, tokens=tuple(context[at:]), rows=1)
            context.append(int(draft.forward([block])[0][0].argmax()))
        drafted = context[len(committed) :]
        _reconcile(target, here, committed)
        at = target.length(here)
        block = Block(slot=here, start=at, tokens=(*context[at:],), rows=size + 1)
        best = target.forward([block])[0].argmax(axis=1).tolist()
        assert best[:size] == drafted, "draft = target: every guess is right in every round"
        accepted = rng.randint(0, size)
        token = best[accepted] if accepted == size else rng.randrange(60)
        right = len(committed) + accepted
        # Ids behind the differing one, as free-run commits them: length alone says nothing.
        behind = [rng.randrange(60) for _ in range(rng.choice((0, 2, 3, 4)))]
        committed += [*drafted[:accepted], token, *behind]
        for model, slot in ((target, here), (draft, there)):
            _reconcile(model, slot, committed)
            assert model.tokens(slot) == tuple(committed[: model.length(slot)])
            assert model.length(slot) >= right - (model is draft)


def _reconcile(model: LanguageModel, slot: int, committed: list[int]) -> None:
    kept = min(plan_prefix(model.tokens(slot), committed), len(committed) - 1)
    if kept < model.length(slot):
        model.truncate(slot, kept)


@SETTINGS
def test_case_11_sessions_never_mix(deterministic: bool) -> None:
    """8 sessions, blocks of 1..8 tokens, some end, one joins: each equals its solo run."""
    model = engine(deterministic=deterministic, max_slots=9)
    texts = {i: ids_of(60, seed=100 + i) for i in range(9)}
    plain = tiny.llama()
    expected = {i: full_rows(plain, ids) for i, ids in texts.items()}
    slots = {i: model.open() for i in range(8)}
    rng = random.Random(9)
    for step in range(12):
        if step == 6:
            for gone in (2, 5):
                model.close(slots.pop(gone))
            slots[8] = model.open()
        order = rng.sample(sorted(slots), len(slots))
        blocks, ends = [], []
        for i in order:
            start = model.length(slots[i])
            tokens = tuple(texts[i][start : start + rng.randint(1, 8)])
            if tokens:
                blocks.append(Block(slot=slots[i], start=start, tokens=tokens, rows=len(tokens)))
                ends.append((i, start))
        for (i, start), rows in zip(ends, model.forward(blocks), strict=True):
            want = expected[i][start : start + len(rows)]
            np.testing.assert_allclose(rows, want, **TOLERANCE)
            back = rng.randint(0, len(rows) - 1)
            model.truncate(slots[i], start + len(rows) - back)


@pytest.mark.parametrize("shared", [63, 64, 65])
def test_case_14_prefix_reuse_changes_nothing(shared: int) -> None:
    """A prefix copied out of a slot that has seen rejected drafts: bits as without reuse."""
    model = engine()
    prompt, junk, rest = ids_of(shared), ids_of(5, seed=1), ids_of(30, seed=2)
    first, second = model.open(), model.open()
    feed(model, first, prompt + junk)
    model.truncate(first, shared)
    model.copy_prefix(first, second, shared)
    hit = feed(model, second, rest)
    miss = fresh_rows(model, prompt + rest)[shared:]
    assert (hit == miss).all()


def test_case_15_a_shorter_request_after_a_longer_one() -> None:
    model = engine()
    a, b = ids_of(190), ids_of(40, seed=1)
    clean = fresh_rows(model, b)
    slot = model.open()
    first = feed(model, slot, a)
    model.truncate(slot, 0)
    assert (feed(model, slot, b) == clean).all()
    model.truncate(slot, 0)
    assert (feed(model, slot, a) == first).all()
