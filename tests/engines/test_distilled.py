"""The run-time of distilled drafts, against the models they are cut out of."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the torch extra is not installed")

from safetensors.torch import load_file, save_file  # noqa: E402

from outrider.engines import draftfile  # noqa: E402
from outrider.engines.base import (  # noqa: E402
    Block,
    ContextOverflowError,
    EngineError,
    IncompatibleModelsError,
    LanguageModel,
    SlotError,
    UnsupportedModelError,
)
from outrider.engines.decoder import (  # noqa: E402
    FINAL_NORM,
    MATRICES,
    geometry_of,
    target_fingerprint,
)
from outrider.engines.distilled import DistilledModel, merged_layer  # noqa: E402
from outrider.engines.drafters import ShowsHidden  # noqa: E402
from outrider.engines.draftfile import (  # noqa: E402
    DraftFile,
    DraftHeader,
    LayerPlan,
    QuantizedMatrix,
    bell_levels,
    dequantize,
    pack,
    quantize,
    read,
    save,
    unpack,
)
from outrider.engines.products import (  # noqa: E402
    Int4Linear,
    Int8Linear,
    Linear,
    make_product,
)
from tiny import CONTEXT, FAMILIES, feed, fresh_rows, full_rows  # noqa: E402

IDS = tuple((7 * i + 3) % 60 for i in range(40))
COVERED = ("llama", "qwen2", "qwen3")


def make_draft(
    model: Any, *, bits: int = 0, support: Any = None, residual: float = 1.0, spread: float = 0.02
) -> DraftFile:
    """A draft of all layers of `model`; with bits, its differences are seeded noise."""
    geometry, state = geometry_of(model.config), model.state_dict()
    noise = torch.Generator().manual_seed(5)
    levels = {bits: bell_levels(bits)} if bits else {}
    matrices: list[Mapping[str, QuantizedMatrix]] = []
    vectors: list[Mapping[str, Any]] = []
    for _ in range(geometry.layers):
        stored = {}
        for name in MATRICES if bits else ():
            difference = torch.randn(geometry.shape(name), generator=noise) * spread
            codes, scales = quantize(difference, levels[bits], 8)
            stored[name] = QuantizedMatrix(codes=pack(codes, bits), scales=scales)
        matrices.append(stored)
        names = geometry.vectors if bits else ()
        vectors.append({name: torch.ones(geometry.shape(name)).half() for name in names})
    if support is None:
        support = torch.arange(geometry.vocab)
    header = DraftHeader(
        geometry=geometry,
        layers=tuple(
            LayerPlan(source=i, bits=bits, residual=residual) for i in range(geometry.layers)
        ),
        group=8,
        levels=levels,
        target="tiny",
        fingerprint=target_fingerprint(state, geometry),
        provenance={"seed": 5},
    )
    return DraftFile(
        header=header,
        support=support.to(torch.int32),
        final_norm=state[FINAL_NORM].half(),
        vectors=tuple(vectors),
        matrices=tuple(matrices),
    )


def engine(model: Any, draft: DraftFile | None = None, **options: Any) -> DistilledModel:
    settings = {"name": "draft", "compute": "float32"} | options
    return DistilledModel(draft or make_draft(model), model.state_dict(), **settings)


@pytest.mark.parametrize("family", COVERED)
def test_unchanged_layers_are_the_target_itself(family: str) -> None:
    model = FAMILIES[family]()
    draft = engine(model)
    assert isinstance(draft, LanguageModel)
    rows = feed(draft, draft.open(), IDS)
    np.testing.assert_allclose(rows, full_rows(model, IDS), atol=2e-3)


@pytest.mark.parametrize("family", COVERED)
def test_one_row_at_a_time_and_all_at_once_agree(family: str) -> None:
    draft = engine(FAMILIES[family]())
    together = feed(draft, draft.open(), IDS)
    np.testing.assert_allclose(fresh_rows(draft, IDS), together, atol=1e-4)


def test_a_long_block_goes_through_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = engine(FAMILIES["llama"]())
    whole = feed(draft, draft.open(), IDS)
    monkeypatch.setattr("outrider.engines.distilled.PREFILL_ROWS", 7)
    before = draft.passes
    slot = draft.open()
    block = Block(slot=slot, start=0, tokens=IDS, rows=12)
    np.testing.assert_allclose(draft.forward([block])[0], whole[-12:], atol=1e-4)
    assert draft.passes - before == 6
    assert draft.tokens(slot) == IDS


@pytest.mark.skipif(not hasattr(torch, "_weight_int8pack_mm"), reason="no int8 operator here")
@pytest.mark.parametrize("family", COVERED)
def test_int8_stays_close_to_float32(family: str) -> None:
    model = FAMILIES[family]()
    exact = fresh_rows(engine(model), IDS)
    small = engine(model, compute="int8")
    assert small.info.dtype == "int8"
    for rows in (fresh_rows(small, IDS), feed(small, small.open(), IDS)):
        correlation = np.corrcoef(rows.ravel(), exact.ravel())[0, 1]
        assert correlation > 0.99


@pytest.mark.skipif(not hasattr(torch, "_weight_int4pack_mm_for_cpu"), reason="no int4 here")
def test_int4_products() -> None:
    noise = torch.Generator().manual_seed(3)
    codes = torch.randint(16, (128, 64), generator=noise).float()
    codes[:, ::32], codes[:, 1::32] = 0, 15  # both ends occur, as in a Q4_1 file
    weight = codes * 0.02 - 0.13
    product = make_product(weight, torch.bfloat16, "int4")
    assert isinstance(product, Int4Linear)
    x = torch.randn(12, 64, generator=noise).bfloat16()
    expected = x.float() @ weight.T
    for rows in (1, 8, 12):
        error = product(x[:rows]).float() - expected[:rows]
        assert float(error.std() / expected.std()) < 0.02
    narrow = make_product(weight[:48], torch.bfloat16, "int4")  # no multiple of 64 outputs
    assert isinstance(narrow, Int8Linear)
    assert isinstance(make_product(weight[:, :40], torch.bfloat16, "int8"), Linear)


def test_the_file_says_what_to_run_it_in() -> None:
    model = FAMILIES["qwen2"]()
    draft = make_draft(model)
    header = dataclasses.replace(draft.header, precision="int4")
    other = dataclasses.replace(draft, header=header)
    assert engine(model, draft, compute="auto").info.dtype == "int8"
    small = engine(model, other, compute="auto")
    assert small.info.dtype == "int4"
    exact = fresh_rows(engine(model), IDS)
    assert np.corrcoef(fresh_rows(small, IDS).ravel(), exact.ravel())[0, 1] > 0.9


def test_rollback_equals_fresh() -> None:
    draft = engine(FAMILIES["llama"]())
    slot = draft.open()
    feed(draft, slot, IDS)
    draft.truncate(slot, 11)
    again = feed(draft, slot, IDS[20:26])
    np.testing.assert_allclose(again, fresh_rows(draft, IDS[:11] + IDS[20:26])[11:], atol=1e-4)
    assert draft.tokens(slot) == IDS[:11] + IDS[20:26]


def test_slots_do_not_touch_each_other_and_copies_are_copies() -> None:
    draft = engine(FAMILIES["llama"]())
    one, two, three = draft.open(), draft.open(), draft.open()
    feed(draft, one, IDS[:10])
    draft.copy_prefix(one, two, 6)
    blocks = [
        Block(slot=one, start=10, tokens=IDS[10:12], rows=1),
        Block(slot=two, start=6, tokens=IDS[20:23], rows=2),
        Block(slot=three, start=0, tokens=IDS[30:31], rows=0),
    ]
    first, second, third = draft.forward(blocks)
    np.testing.assert_allclose(first, fresh_rows(draft, IDS[:12])[-1:], atol=1e-4)
    np.testing.assert_allclose(second, fresh_rows(draft, IDS[:6] + IDS[20:23])[-2:], atol=1e-4)
    assert third.shape == (0, draft.info.vocab_size)


def test_caller_mistakes_change_nothing() -> None:
    draft = engine(FAMILIES["llama"](), max_slots=1)
    slot = draft.open()
    feed(draft, slot, IDS[:4])
    with pytest.raises(EngineError, match="slots are taken"):
        draft.open()
    with pytest.raises(SlotError, match="starts at 3"):
        draft.forward([Block(slot=slot, start=3, tokens=(1,), rows=1)])
    with pytest.raises(SlotError, match="token ids"):
        draft.forward([Block(slot=slot, start=4, tokens=(97,), rows=1)])
    with pytest.raises(ContextOverflowError):
        draft.forward([Block(slot=slot, start=4, tokens=(1,) * CONTEXT, rows=1)])
    with pytest.raises(SlotError):
        draft.truncate(slot, 5)
    assert draft.tokens(slot) == IDS[:4]
    draft.close(slot)
    with pytest.raises(SlotError):
        draft.close(slot)


def test_the_last_hidden_state_is_what_the_row_was_made_from() -> None:
    model = FAMILIES["llama"]()
    draft = engine(model)
    assert isinstance(draft, ShowsHidden)
    with torch.no_grad():
        states = model.model(torch.tensor([IDS])).last_hidden_state[0].numpy()
    one, two = draft.open(), draft.open()
    for slot, cuts in ((one, (0, 7, 8, 40)), (two, (0, 40))):  # one row, several rows
        for start, end in itertools.pairwise(cuts):
            feed(draft, slot, IDS[start:end])
            shown = draft.hidden(slot)
            assert shown.dtype == np.float32
            np.testing.assert_allclose(shown, states[end - 1], atol=2e-3)


def test_a_hidden_state_of_another_position_is_never_shown() -> None:
    draft = engine(FAMILIES["llama"]())
    one, two = draft.open(), draft.open()
    with pytest.raises(SlotError, match="no state at position -1"):
        draft.hidden(one)
    feed(draft, one, IDS[:10])
    feed(draft, two, IDS[20:26])
    draft.truncate(two, 0)
    draft.copy_prefix(one, two, 6)  # as long as the slot was when its state was kept
    with pytest.raises(SlotError, match="no state at position 5"):
        draft.hidden(two)
    draft.truncate(one, 9)
    with pytest.raises(SlotError, match="no state at position 8"):
        draft.hidden(one)
    feed(draft, one, IDS[9:10])
    draft.hidden(one)
    draft.close(one)
    reopened = draft.open()
    with pytest.raises(SlotError, match="no state"):
        draft.hidden(reopened)


def test_a_reduced_head_names_its_ids() -> None:
    model = FAMILIES["qwen2"]()
    support = torch.tensor([3, 5, 60, 289])
    draft = engine(model, make_draft(model, support=support), vocab_size=290)
    assert draft.support is not None
    assert draft.support.tolist() == [3, 5, 60, 289]
    rows = feed(draft, draft.open(), IDS)
    np.testing.assert_allclose(rows, full_rows(model, IDS)[:, [3, 5, 60, 289]], atol=2e-3)
    with pytest.raises(UnsupportedModelError, match="tokenizer does not have"):
        engine(model, make_draft(model, support=support), vocab_size=289)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codes_survive_packing(bits: int) -> None:
    codes = torch.randint(2**bits, (6, 40), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert len(packed) == 6 * 40 * bits // 8
    assert torch.equal(unpack(packed, bits, (6, 40)), codes)


@pytest.mark.parametrize(("bits", "most"), [(2, 0.14), (3, 0.045), (4, 0.013)])
def test_quantisation_error_of_bell_shaped_entries(bits: int, most: float) -> None:
    matrix = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    codes, scales = quantize(matrix, bell_levels(bits), 64)
    error = (dequantize(codes, scales, bell_levels(bits)) - matrix).square().mean()
    assert float(error) < most


@pytest.mark.parametrize("family", COVERED)
def test_a_file_gives_back_what_was_saved(family: str, tmp_path: Path) -> None:
    model = FAMILIES[family]()
    draft = make_draft(model, bits=3, residual=0.5)
    path = tmp_path / "a.safetensors"
    save(path, draft)
    found = read(path, fingerprint=draft.header.fingerprint)
    assert found.header == draft.header
    rows = [fresh_rows(engine(model, each), IDS) for each in (draft, found)]
    assert np.array_equal(*rows)
    merged = merged_layer(found, model.state_dict(), 0)
    base = model.state_dict()["model.layers.0.mlp.down_proj.weight"]
    assert float((merged["down"] - 0.5 * base).std()) == pytest.approx(0.02, rel=0.2)


def test_a_draft_of_another_target_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save(path, make_draft(FAMILIES["llama"]()))
    other = FAMILIES["llama"](vocab_size=98)
    with pytest.raises(IncompatibleModelsError, match="another target"):
        read(path, fingerprint=target_fingerprint(other.state_dict(), geometry_of(other.config)))


def test_the_fingerprint_is_of_the_weights_not_of_their_dtype() -> None:
    model = FAMILIES["llama"]()
    geometry = geometry_of(model.config)
    first = target_fingerprint(model.state_dict(), geometry)
    assert target_fingerprint(model.to(torch.bfloat16).state_dict(), geometry) == first
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[0, 0] += 1
    assert target_fingerprint(model.state_dict(), geometry) != first


def rewritten(path: Path, change: Any) -> Path:
    """The file with other metadata."""
    with draftfile._opened(path) as file:
        metadata = dict(file.metadata())
    tensors = load_file(path)
    change(metadata, tensors)
    save_file(tensors, path, metadata=metadata)
    return path


def _edit(**changes: Any) -> Any:
    def change(metadata: dict[str, str], _tensors: Any) -> None:
        metadata["draft"] = json.dumps(json.loads(metadata["draft"]) | changes)

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m, t: m.pop("format"), "not a draft"),
        (lambda m, t: m.update(version="99"), "format 99"),
        (lambda m, t: m.update(draft="{"), "unreadable metadata"),
        (lambda m, t: m.update(draft="[]"), "unreadable metadata"),
        (_edit(layers=[{"source": 7, "bits": 3}]), "no layer 7"),
        (_edit(group=5), "do not divide"),
        (_edit(levels={}), "no table of 3-bit"),
        (lambda m, t: t.pop("final_norm"), "'final_norm' is missing"),
        (lambda m, t: t.update(final_norm=torch.ones(3).half()), "is torch.float16"),
        (lambda m, t: t.update(support=torch.tensor([5, 3]).int()), "not ascending"),
        (lambda m, t: t.update(support=torch.tensor([5, 97]).int()), "not ascending"),
    ],
)
def test_bad_files_are_refused_in_one_line(change: Any, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    save(path, make_draft(FAMILIES["llama"](), bits=3))
    rewritten(path, change)
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_damaged_and_missing_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    with pytest.raises(UnsupportedModelError, match="no draft file"):
        read(path)
    path.write_bytes(b"\x80\x04not safetensors at all")
    with pytest.raises(UnsupportedModelError, match="no safetensors file"):
        read(path)


def test_unsupported_targets_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="gemma"):
        geometry_of(FAMILIES["gemma"]().config)
    with pytest.raises(UnsupportedModelError, match="biases"):
        geometry_of(FAMILIES["llama"](attention_bias=True).config)
    draft = make_draft(FAMILIES["llama"]())
    with pytest.raises(EngineError, match="unknown dtype"):
        engine(FAMILIES["llama"](), draft, compute="int3")
    wrong = dataclasses.replace(draft, header=dataclasses.replace(draft.header, layers=()))
    assert not wrong.header.layers
