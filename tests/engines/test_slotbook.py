"""The bookkeeping of slots that all engines share: literal refusals, and a model of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outrider.engines.base import (
    Block,
    ContextOverflowError,
    EngineError,
    FloatRow,
    LanguageModel,
    ModelInfo,
    NoMemoryError,
    SlotError,
)
from outrider.engines.slotbook import SlotBook, SlotRecord
from outrider.engines.toy import ToyModel

WIDTH = 97
CONTEXT = 200


@dataclass(slots=True, kw_only=True)
class Page(SlotRecord):
    stored: tuple[int, ...] = ()


class Copier(SlotBook[Page]):
    """Stores ids a second time, as a cache would, and never cuts what it stored."""

    def __init__(self, *, max_slots: int = 3, context_length: int = 8, id_count: int = 10) -> None:
        super().__init__(max_slots=max_slots, context_length=context_length, id_count=id_count)
        self.copied: list[tuple[Page, Page, int, tuple[int, ...]]] = []
        self.broken: Exception | None = None

    @property
    def info(self) -> ModelInfo:
        return ToyModel(lambda _: np.zeros(1), vocab_size=10, name="copier").info

    def _new(self) -> Page:
        return Page()

    def _copy(self, source: Page, target: Page, length: int) -> None:
        self.copied.append((source, target, length, tuple(target.ids)))
        if self.broken:
            raise self.broken
        target.stored = source.stored[:length]

    def _compute(self, blocks: Sequence[Block], slots: Sequence[Page]) -> list[FloatRow]:
        for slot, block in zip(slots, blocks, strict=True):
            slot.stored = (*slot.stored[: block.start], *block.tokens)
        if self.broken:
            raise self.broken
        return []

    def append(self, *blocks: Block) -> None:
        self.forward(blocks)


def block(slot: int, start: int, tokens: Sequence[int]) -> Block:
    return Block(slot=slot, start=start, tokens=tuple(tokens), rows=0)


def holding(book: Copier, ids: Sequence[int]) -> int:
    slot = book.open()
    if ids:
        book.append(block(slot, 0, ids))
    return slot


def test_the_copy_hook_comes_before_the_ids_and_not_for_nothing() -> None:
    book = Copier()
    source, target = holding(book, [4, 5, 6]), book.open()
    book.copy_prefix(source, target, 0)
    assert book.copied == []
    assert book.tokens(target) == ()
    book.copy_prefix(source, target, 2)
    assert [(length, ids) for _, _, length, ids in book.copied] == [(2, ())]
    assert (book.copied[0][0], book.copied[0][1]) == (book._slots[source], book._slots[target])
    assert book.tokens(target) == (4, 5)
    book.append(block(target, 2, [7]))
    assert (book.tokens(source), book.tokens(target)) == ((4, 5, 6), (4, 5, 7))


def test_a_copy_that_fails_leaves_the_target_empty() -> None:
    book = Copier()
    source, target = holding(book, [4, 5, 6]), book.open()
    book.broken = MemoryError()
    with pytest.raises(NoMemoryError, match=r"^copier ran out of memory; "):
        book.copy_prefix(source, target, 2)
    assert (book.tokens(source), book.tokens(target)) == ((4, 5, 6), ())


def torchs_own() -> RuntimeError:
    torch = pytest.importorskip("torch")
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 50)
    return refused.value


def numpys_own() -> MemoryError:
    with pytest.raises(MemoryError) as refused:
        np.empty(1 << 55)
    return refused.value


CUDAS = (  # as torch words them; no GPU is needed to read them
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.80 GiB of "
    "which 1.10 GiB is free.",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
)


@pytest.mark.parametrize(
    ("raised", "asked"),
    [
        (torchs_own, " (it asked for 4503599627370496 bytes more)"),
        (numpys_own, " (it asked for 256 PiB more)"),
        (lambda: RuntimeError(CUDAS[0]), " (it asked for 2.50 GiB more)"),
        (lambda: RuntimeError(CUDAS[1]), ""),
    ],
)
def test_memory_that_ran_out_in_a_forward_is_named_and_what_to_do(
    raised: Callable[[], Exception], asked: str
) -> None:
    book = Copier()
    slot = holding(book, [4, 5])
    book.broken = raised()
    with pytest.raises(NoMemoryError) as told:
        book.append(block(slot, 2, [6]))
    assert str(told.value) == (
        f"copier ran out of memory{asked}; shorter prompts need less, and so do fewer answers at "
        "once (outrider cloud --slots)"
    )
    assert book.tokens(slot) == (4, 5)


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), KeyError("out of memory")])
def test_another_failure_keeps_its_own_name(error: Exception) -> None:
    book = Copier()
    slot = holding(book, [4, 5])
    book.broken = error
    with pytest.raises(type(error)) as told:
        book.append(block(slot, 2, [6]))
    assert told.value is error


def test_what_a_failed_pass_held_is_free_for_the_next_try() -> None:
    """Its frames would keep its tensors for as long as somebody looks at the error."""

    class Tensor:
        pass

    held: list[weakref.ref[Tensor]] = []

    class Full(Copier):
        def _compute(self, blocks: Sequence[Block], slots: Sequence[Page]) -> list[FloatRow]:
            activations = Tensor()
            held.append(weakref.ref(activations))
            raise MemoryError

    book = Full()
    slot = book.open()
    with pytest.raises(NoMemoryError) as told:
        book.append(block(slot, 0, [6]))
    assert told.value.__context__ is not None
    assert held[0]() is None


def test_a_number_is_never_given_twice() -> None:
    book = Copier(max_slots=1)
    seen = []
    for _ in range(5):
        seen.append(book.open())
        assert book.open_slots == 1
        book.close(seen[-1])
        assert book.open_slots == 0
    assert len(set(seen)) == 5
    book.open()
    for old in seen:
        with pytest.raises(SlotError, match=f"^no open slot {old}$"):
            book.close(old)
    assert book.open_slots == 1


def test_no_slots_at_all_are_refused() -> None:
    with pytest.raises(EngineError, match=r"^max_slots=0 must be at least 1$"):
        Copier(max_slots=0)


def test_the_callers_fault_is_named_before_the_full_context() -> None:
    book = Copier(context_length=4)
    long, other = book.open(), book.open()
    with pytest.raises(SlotError, match="starts at 1"):
        book.append(block(long, 0, [1] * 5), block(other, 1, [1]))
    with pytest.raises(ContextOverflowError):
        book.append(block(long, 0, [1] * 5), block(other, 0, [1]))


class Walk(RuleBasedStateMachine):
    """Any order of calls, against a plain dictionary; refused calls change nothing."""

    @initialize()
    def start(self) -> None:
        self.book = Copier()
        self.ids: dict[int, list[int]] = {}
        self.gone: set[int] = set()

    def one(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.ids)))

    @rule()
    def open(self) -> None:
        if len(self.ids) == 3:
            with pytest.raises(EngineError, match="all 3 slots are taken"):
                self.book.open()
            return
        slot = self.book.open()
        assert slot not in self.ids
        assert slot not in self.gone
        self.ids[slot] = []

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        slot = self.one(data)
        self.book.close(slot)
        del self.ids[slot]
        self.gone.add(slot)

    @precondition(lambda self: self.ids)
    @rule(data=st.data(), tokens=st.lists(st.integers(-1, 10), min_size=1, max_size=9))
    def append(self, data: st.DataObject, tokens: list[int]) -> None:
        slot = self.one(data)
        start = len(self.ids[slot]) + data.draw(st.sampled_from([0, 0, 0, 1]))
        if start == len(self.ids[slot]) and set(tokens) <= set(range(10)) and start <= 8:
            if start + len(tokens) <= 8:
                self.book.append(block(slot, start, tokens))
                self.ids[slot] += tokens
                return
            with pytest.raises(ContextOverflowError):
                self.book.append(block(slot, start, tokens))
            return
        with pytest.raises(SlotError):
            self.book.append(block(slot, start, tokens))

    @precondition(lambda self: self.ids)
    @rule(data=st.data(), length=st.integers(-1, 9))
    def truncate(self, data: st.DataObject, length: int) -> None:
        slot = self.one(data)
        if 0 <= length <= len(self.ids[slot]):
            self.book.truncate(slot, length)
            del self.ids[slot][length:]
            return
        with pytest.raises(SlotError):
            self.book.truncate(slot, length)

    @precondition(lambda self: self.ids)
    @rule(data=st.data(), length=st.integers(-1, 9))
    def copy(self, data: st.DataObject, length: int) -> None:
        source, target = self.one(data), self.one(data)
        if self.ids[target] or not 0 <= length <= len(self.ids[source]):
            with pytest.raises(SlotError):
                self.book.copy_prefix(source, target, length)
            return
        self.book.copy_prefix(source, target, length)
        self.ids[target] = self.ids[source][:length]

    @invariant()
    def the_book_says_what_the_dictionary_says(self) -> None:
        book = self.book
        assert book.open_slots == len(self.ids)
        for slot, ids in self.ids.items():
            assert book.tokens(slot) == tuple(ids)
            assert book.length(slot) == len(ids)
            assert book._slots[slot].stored[: len(ids)] == tuple(ids)
        for slot in self.gone:
            with pytest.raises(SlotError):
                book.length(slot)


TestWalk = Walk.TestCase


# ------------------------------------------------------------------ the engines themselves


def toy() -> Any:
    def law(context: tuple[int, ...]) -> FloatRow:
        return np.full(WIDTH, context[-1], dtype=np.float32)

    return ToyModel(law, vocab_size=WIDTH, context_length=CONTEXT, max_slots=2)


def hf() -> Any:
    pytest.importorskip("torch", reason="the torch extra is not installed")
    from outrider.engines.hf import HFModel
    from tiny import llama

    return HFModel(llama(), name="hf", max_slots=2)


def distilled() -> Any:
    pytest.importorskip("torch", reason="the torch extra is not installed")
    from test_distilled import engine

    from tiny import llama

    return engine(llama(), max_slots=2)


@pytest.mark.parametrize("make", [toy, hf, distilled])
def test_every_engine_refuses_in_the_same_words_and_changes_nothing(make: Any) -> None:
    model: LanguageModel = make()
    assert isinstance(model, LanguageModel)
    a, b = model.open(), model.open()
    model.forward([block(a, 0, [1, 2, 3])])
    passes = model.passes
    calls = [
        (lambda: model.open(), EngineError, "all 2 slots are taken; close one or raise max_slots"),
        (lambda: model.close(99), SlotError, "no open slot 99"),
        (lambda: model.tokens(99), SlotError, "no open slot 99"),
        (lambda: model.length(99), SlotError, "no open slot 99"),
        (lambda: model.forward([block(99, 0, [1])]), SlotError, "no open slot 99"),
        (lambda: model.truncate(a, 4), SlotError, f"cannot truncate slot {a} of 3 ids to 4"),
        (lambda: model.truncate(a, -1), SlotError, f"cannot truncate slot {a} of 3 ids to -1"),
        (lambda: model.copy_prefix(b, a, 0), SlotError, f"slot {a} is not empty"),
        (lambda: model.copy_prefix(a, b, 4), SlotError, f"slot {a} holds 3 ids, not 4"),
        (lambda: model.copy_prefix(a, b, -1), SlotError, f"slot {a} holds 3 ids, not -1"),
        (
            lambda: model.forward([block(b, 0, [1]), block(b, 0, [1])]),
            SlotError,
            "a slot may occur in one block of a forward only",
        ),
        (
            lambda: model.forward([block(b, 0, [1]), block(a, 2, [1])]),
            SlotError,
            f"block starts at 2, but slot {a} holds 3 ids",
        ),
        (
            lambda: model.forward([block(b, 0, [1]), block(a, 3, [1, 97])]),
            SlotError,
            "token ids must be in 0..96",
        ),
        (lambda: model.forward([block(b, 0, [5, -1])]), SlotError, "token ids must be in 0..96"),
        (
            lambda: model.forward([block(b, 0, [1]), block(a, 3, [1] * 198)]),
            ContextOverflowError,
            "201 tokens exceed the context of 200",
        ),
    ]
    for call, kind, message in calls:
        with pytest.raises(EngineError) as caught:
            call()
        assert type(caught.value) is kind
        assert str(caught.value) == message
        assert (model.tokens(a), model.tokens(b)) == ((1, 2, 3), ())
    assert model.passes == passes
    model.forward([block(a, 3, [1] * 197)])
    assert model.length(a) == 200


def test_a_toy_whose_law_fails_holds_what_it_held() -> None:
    """Like the engines on torch: the first block was done by then, and does not count."""

    def law(context: tuple[int, ...]) -> FloatRow:
        if context[-1] == 7:
            raise ArithmeticError
        return np.zeros(WIDTH, dtype=np.float32)

    model = ToyModel(law, vocab_size=WIDTH)
    a, b = model.open(), model.open()
    blocks = [Block(slot=s, start=0, tokens=(t,), rows=1) for s, t in ((a, 1), (b, 7))]
    with pytest.raises(ArithmeticError):
        model.forward(blocks)
    assert (model.tokens(a), model.tokens(b)) == ((), ())
