"""Fixed-shape passes: the bits of a row depend on the slot's ids and on nothing else (I9).

Every comparison here is `==` on float32, no tolerance.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import tiny
from bits import Oracle, texts_of, wander
from outrider.engines import builtin
from outrider.engines.base import Block, UnsupportedModelError
from outrider.engines.desk import DeskJob, SlotDesk
from outrider.engines.hf import HFModel
from tiny import CONTEXT, FAMILIES, FloatRows, feed, fresh_rows, torch

DTYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
FAMILY = pytest.mark.parametrize("family", sorted(FAMILIES))


def engine(family: str, dtype: str, **options: Any) -> HFModel:
    model = FAMILIES[family]().to(getattr(torch, dtype))
    return HFModel(model, name=family, **options)


@FAMILY
@DTYPES
def test_bits_by_any_way(family: str, dtype: str) -> None:
    model = engine(family, dtype)
    oracle = Oracle()
    texts = texts_of(2)
    for text in texts:  # the plainest way first: one session, one token a forward
        for i, row in enumerate(fresh_rows(model, text)):
            oracle.check(tuple(text[: i + 1]), row)
    wander(model, texts, oracle, steps=60, seed=2)
    assert oracle.repeats > 2 * CONTEXT


@DTYPES
@pytest.mark.parametrize("rows", [1, 3, 5, 16])
def test_bits_for_other_row_counts(dtype: str, rows: int) -> None:
    """Row counts differ from each other in the last bits; each agrees with itself."""
    model = engine("llama", dtype, rows=rows)
    oracle = Oracle()
    texts = texts_of(2, 140)
    for text in texts:
        for i, row in enumerate(fresh_rows(model, text)):
            oracle.check(tuple(text[: i + 1]), row)
    wander(model, texts, oracle, steps=40, seed=rows)


@DTYPES
def test_bits_on_two_threads(dtype: str) -> None:
    with tiny.threads(2):
        model = engine("llama", dtype)
        oracle = Oracle()
        wander(model, texts_of(2, 140), oracle, steps=40, seed=5)


@DTYPES
def test_bits_with_gathered_spans(dtype: str) -> None:
    model = engine("llama", dtype, gather=True)
    oracle = Oracle()
    wander(model, texts_of(2, 140), oracle, steps=40, seed=6)


@DTYPES
def test_bits_with_rows_attended_one_by_one(dtype: str) -> None:
    """Very many queries a key head (slots._PACKING_QUERIES)."""
    changes = {"hidden_size": 64, "num_attention_heads": 64, "num_key_value_heads": 1}
    wide = tiny.llama(**changes, head_dim=4).to(getattr(torch, dtype))
    oracle = Oracle()
    wander(HFModel(wide, name="wide"), texts_of(2, 140), oracle, steps=30, seed=7)


@DTYPES
def test_bits_where_threads_cut_activations(dtype: str) -> None:
    """8 rows of 4400 are shared out to three threads, in pieces that end inside vectors."""
    with tiny.threads(3):
        model = tiny.llama(intermediate_size=4400).to(getattr(torch, dtype))
        oracle = Oracle()
        wander(HFModel(model, name="long"), texts_of(2, 100), oracle, steps=30, seed=8)


def test_a_machine_that_mixes_rows_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def tilted(self: HFModel, *args: Any) -> Any:
        logits = plain(self, *args)
        return logits * torch.linspace(1.0, 1.0 + 1e-5, len(logits))[:, None]

    plain = HFModel._logits
    monkeypatch.setattr(HFModel, "_logits", tilted)
    with pytest.raises(UnsupportedModelError, match="deterministic off"):
        engine("llama", "float32")
    engine("llama", "float32", deterministic=False)


@DTYPES
def test_two_engines_agree(dtype: str) -> None:
    """A replica rebuilds a session to the bit: other object, other slot, other blocks."""
    text = texts_of(1)[0]
    one, two = engine("qwen2", dtype), engine("qwen2", dtype)
    expected = fresh_rows(one, text)
    for _ in range(3):
        two.open()
    assert (feed(two, two.open(), text) == expected).all()


@pytest.mark.parametrize("row", range(8))
def test_bits_at_every_row(row: int) -> None:
    """One row of a session at each place of a pass, the others taken by strangers."""
    model = engine("llama", "bfloat16")
    text, rng = texts_of(1)[0][:40], random.Random(row)
    expected = fresh_rows(model, text)[-1]
    slot, strangers = model.open(), [model.open() for _ in range(7)]
    feed(model, slot, text[:-1])
    for stranger in strangers:
        feed(model, stranger, [rng.randrange(60) for _ in range(rng.randint(1, 60))])
    blocks = [
        Block(slot=each, start=model.length(each), tokens=(rng.randrange(60),), rows=1)
        for each in strangers
    ]
    blocks.insert(row, Block(slot=slot, start=39, tokens=(text[-1],), rows=1))
    assert (model.forward(blocks)[row][0] == expected).all()


# --- the built-in target -----------------------------------------------------------------

needs_weights = pytest.mark.skipif(
    builtin.find_gguf() is None,
    reason="the built-in target's weights are not installed (outrider pull)",
)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    words = builtin.load_tokenizer()
    questions = ("Write a short story about a fox.", "What is 17 * 23?", "List ten rivers.")
    return [words.chat([{"role": "user", "content": text}]) for text in questions]


def _continued(model: HFModel, prompt: list[int], count: int) -> tuple[list[int], FloatRows]:
    """Greedy text behind a prompt, one token a forward, with the rows of its positions."""
    slot = model.open()
    row = feed(model, slot, prompt)[-1]
    ids, rows = list(prompt), []
    for _ in range(count):
        ids.append(int(row.argmax()))
        row = feed(model, slot, ids[-1:])[0]
        rows.append(row)
    model.close(slot)
    return ids, np.array(rows)


@needs_weights
@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [1, 2], ids=["1-thread", "2-threads"])
@DTYPES
def test_built_in_target_bits(dtype: str, count: int, prompts: list[list[int]]) -> None:
    """Across the border at 64: blocks with wrong guesses and rollback, four sessions mixed,
    a rebuild in one block, a copied prefix; one-token decoding is the reference."""
    length = 40 if count == 1 else 10  # threads that wait for each other are slow where busy
    with tiny.threads(count):
        model = HFModel(builtin.load_model(dtype), name="target")
        told = [_continued(model, prompt, length) for prompt in prompts]
        rng = random.Random(8)
        sessions = [(model.open(), *told[i % 3], len(prompts[i % 3])) for i in range(4)]
        for slot, ids, _, known in sessions:
            feed(model, slot, ids[:known])
        compared = 0
        while any(model.length(slot) < len(ids) for slot, ids, _, _ in sessions):
            going = [s for s in sessions if model.length(s[0]) < len(s[1]) and rng.random() < 0.8]
            blocks, good = [], []
            for slot, ids, _, _ in going:
                at = model.length(slot)
                right = ids[at : at + rng.randint(1, 6)]
                wrong = [rng.randrange(49152) for _ in range(rng.randint(0, 3))]
                block = Block(slot=slot, start=at, tokens=(*right, *wrong), rows=len(right + wrong))
                blocks.append(block)
                good.append(len(right))
            for (slot, _, rows, known), block, out, right in zip(
                going, blocks, model.forward(blocks), good, strict=True
            ):
                at = block.start - known
                assert (out[:right] == rows[at : at + right]).all()
                compared += right
                model.truncate(slot, block.start + right)
        assert compared == sum(len(ids) - known for _, ids, _, known in sessions)
        ids, rows = told[0]
        known = len(prompts[0])
        assert (feed(model, model.open(), ids)[known:] == rows).all()
        copied = model.open()
        model.copy_prefix(sessions[0][0], copied, known)
        assert (feed(model, copied, ids[known:]) == rows).all()


@needs_weights
@pytest.mark.model
def test_built_in_target_bits_in_short(prompts: list[list[int]]) -> None:
    """The same in a few forwards, for every run: bf16, a block against single tokens."""
    model = HFModel(builtin.load_model("bfloat16"), name="target")
    ids, rows = _continued(model, prompts[0][-12:], 5)
    slot, other = model.open(), model.open()
    blocks = [
        Block(slot=other, start=0, tokens=tuple(prompts[1][:3]), rows=1),
        Block(slot=slot, start=0, tokens=tuple(ids), rows=5),
    ]
    assert (model.forward(blocks)[1] == rows).all()
    model.truncate(slot, 13)
    assert (feed(model, slot, ids[13:]) == rows[1:]).all()


@DTYPES
@FAMILY
def test_a_prompt_fed_in_pieces_gives_the_same_bits(family: str, dtype: str):
    """Field case 33 and I9: rows=0 blocks of any size, another session's rows in between."""
    rng = random.Random(3)
    prompt = tuple(rng.randrange(60) for _ in range(150))
    (whole,) = SlotDesk(engine(family, dtype)).run(
        [DeskJob(key=1, committed=prompt, drafts=(5, 6))]
    )
    for chunk in (13, 64):
        desk = SlotDesk(engine(family, dtype), chunk=chunk)
        beside = list(prompt[:9])
        pieces = 0
        rows = np.empty((0, 0), dtype=np.float32)
        while not len(rows):
            beside.append(rng.randrange(60))
            jobs = [
                DeskJob(key=2, committed=tuple(beside)),
                DeskJob(key=1, committed=prompt, drafts=(5, 6)),
            ]
            rows = desk.run(jobs)[1].rows
            pieces += 1
        assert pieces >= 150 // chunk
        np.testing.assert_array_equal(rows, whole.rows)
