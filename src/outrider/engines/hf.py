"""The engine for decoder-only transformers models on torch, CPU or CUDA.

All arithmetic of the model is transformers' own class; ours are the cache (`slots.py`), the
attention over it, and which rows share a pass (`passes.py`).

Two settings (docs/architecture.md, Numerics):

* deterministic: every pass has exactly `rows` rows, padded with filler, and every row attends
  over a span that depends on its own position only. The logits of a position are then the
  same bits whatever else is in the pass, whichever row it stands at, and however the slot
  came to hold its ids (block by block, after a rollback, rebuilt elsewhere, copied).
* otherwise: shapes as they come, which is cheaper.

Rules of state: those of `slotbook.py`, and a failed `forward` wipes what it may have written
behind the ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from outrider.engines import kernels  # noqa: F401  it speaks to MKL before the first product
from outrider.engines.base import (
    Block,
    EngineError,
    FloatRow,
    IdArray,
    ModelInfo,
    UnsupportedModelError,
)
from outrider.engines.hf_config import usable_context
from outrider.engines.hf_support import (
    Probe,
    cache_keyword,
    probe,
    require_supported,
)
from outrider.engines.passes import Pass, plan_bucketed, plan_plain, wanted_rows
from outrider.engines.rowwise import make_rowwise
from outrider.engines.slotbook import SlotBook
from outrider.engines.slots import (
    ATTENTION,
    STEP,
    Slot,
    SlotCache,
    SlotStore,
    Step,
    make_step,
    slot_attention,
)

DEFAULT_ROWS: Final = 8
"""Rows of a deterministic pass: a draft of 7 and its head in one pass, at about 1.2 times the
price of a single row on a CPU."""
DEFAULT_SLOTS: Final = 16
PLAIN_ROWS: Final = 512
"""Most rows of a pass with deterministic off: bounds activations during a long prefill."""


class HFModel(SlotBook[Slot]):
    """A transformers causal language model behind the LanguageModel protocol."""

    def __init__(
        self,
        model: Any,
        *,
        name: str,
        fingerprint: str = "",
        vocab_size: int | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        deterministic: bool = True,
        rows: int = DEFAULT_ROWS,
        max_slots: int = DEFAULT_SLOTS,
        context_length: int | None = None,
        gather: bool | None = None,
    ) -> None:
        """`model`: an instantiated ...ForCausalLM; it is put in eval mode and keeps our
        attention function from here on. `vocab_size`: ids the tokenizer can produce; None
        takes the model's whole width. `gather`: deterministic attention in one call over
        copied spans instead of one call a slot; None: on GPUs."""
        if rows < 1:
            raise EngineError(f"rows={rows} must be at least 1")
        require_supported(model.config, type(model), deterministic=deterministic)
        weight = model.get_input_embeddings().weight
        super().__init__(
            max_slots=max_slots,
            context_length=usable_context(model.config, context_length),
            id_count=int(weight.shape[0]),
        )
        self._model = model.eval()
        probed = probe(model)
        AttentionInterface.register(ATTENTION, slot_attention)
        model.set_attn_implementation(ATTENTION)
        if deterministic:
            make_rowwise(model)
        self._cache = SlotCache(len(probed.shapes))
        self._cache_keyword = cache_keyword(model)
        self._like: Tensor = weight
        self._gather = bool(weight.is_cuda) if gather is None else gather
        self._store = SlotStore(
            probed.shapes, context=self._context, dtype=weight.dtype, device=weight.device
        )
        self._rows = rows
        self._passes = 0
        width = int(model.get_output_embeddings().weight.shape[0])
        if vocab_size is not None and not 0 < vocab_size <= width:
            raise UnsupportedModelError(
                f"the tokenizer has {vocab_size} ids but the model's output only {width}"
            )
        self._info = ModelInfo(
            name=name,
            vocab_size=vocab_size or width,
            logits_width=width,
            context_length=self._context,
            fingerprint=fingerprint,
            dtype=str(weight.dtype).removeprefix("torch."),
            device=str(weight.device),
            deterministic=deterministic,
            eos_token_ids=eos_token_ids,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
        )
        self._try_out(probed)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def support(self) -> IdArray | None:
        return None

    @property
    def passes(self) -> int:
        return self._passes

    @property
    def rows(self) -> int:
        """Rows of a deterministic pass."""
        return self._rows

    def _compute(self, blocks: Sequence[Block], slots: Sequence[Slot]) -> list[FloatRow]:
        out = [np.empty((block.rows, self._info.vocab_size), np.float32) for block in blocks]
        if self._info.deterministic:
            passes = plan_bucketed(blocks, rows=self._rows, context=self._context)
        else:
            passes = plan_plain(blocks, rows=PLAIN_ROWS)
        finished = False
        try:
            with torch.inference_mode():
                for slot, block in zip(slots, blocks, strict=True):
                    self._store.reserve(slot, block.start + len(block.tokens))
                for each in passes:
                    self._run(each, blocks, slots, out)
            finished = True
        finally:
            if not finished:
                self._undo(slots)
        return out

    def _run(
        self, each: Pass, blocks: Sequence[Block], slots: Sequence[Slot], out: list[FloatRow]
    ) -> None:
        """One pass through the model; wanted rows of logits are written into `out`."""
        fixed = self._info.deterministic
        rows = self._rows if fixed else each.rows
        ids = [token for s in each.segments for token in s.tokens(blocks)]
        positions = [s.position + i for s in each.segments for i in range(s.count)]
        # Filler repeats the last row: always a valid id at a valid position; never stored.
        ids += ids[-1:] * (rows - len(ids))
        positions += positions[-1:] * (rows - len(positions))
        step = make_step(
            [(slots[s.block], s.position, s.count) for s in each.segments],
            span=each.span,
            rows=rows,
            like=self._like,
            gather=self._gather,
        )
        wanted = list(wanted_rows(each, blocks))
        keep = [row for row, _, _ in wanted]
        # The head belongs to the fixed shape too: all rows or, with nothing wanted, none.
        logits = self._logits(ids, positions, step, keep if not (fixed and keep) else None)
        if not keep:
            return
        found = self._rows_of(logits, keep if fixed else None)
        for row, (_, block, target) in zip(found, wanted, strict=True):
            out[block][target] = row

    def _logits(
        self, ids: list[int], positions: list[int], step: Step, keep: list[int] | None
    ) -> Tensor:
        """Logits [kept rows, logits_width] of one pass; `keep` None: of all its rows."""
        device = self._like.device
        self._cache.begin(step)
        self._passes += 1
        result = self._model(
            input_ids=torch.tensor([ids], device=device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=True,
            logits_to_keep=0 if keep is None else torch.tensor(keep, device=device).long(),
            **{self._cache_keyword: self._cache, STEP: step},
        )
        logits: Tensor = result.logits[0]
        return logits

    def _rows_of(self, logits: Tensor, keep: list[int] | None) -> FloatRow:
        """float32 [rows, vocab_size] on the host: padding columns cut, never NaN."""
        if keep is not None and len(keep) < len(logits):
            logits = logits[torch.tensor(keep, device=logits.device)]
        rows: FloatRow = logits[:, : self._info.vocab_size].float().cpu().numpy()
        # One reduction finds every unusable row: NaN and +inf survive max, and -inf there
        # means that no id is possible at all.
        if not np.isfinite(rows.max(axis=1)).all():
            raise EngineError(
                f"{self._info.name} returned logits that are not numbers; damaged weights, or "
                f"values too large for {self._info.dtype} (try dtype float32)"
            )
        return rows

    def _new(self) -> Slot:
        return Slot()

    def _copy(self, source: Slot, target: Slot, length: int) -> None:
        with torch.inference_mode():
            self._store.copy(source, target, length)

    def _undo(self, slots: Sequence[Slot]) -> None:
        with torch.inference_mode():
            for slot in slots:
                slot.wipe(len(slot.ids))

    def _try_out(self, probed: Probe) -> None:
        """Run the probe's tokens through a slot: a model that goes around our cache or our
        attention function must be found out at loading, not in the first answer."""
        slot = self.open()
        ids = probed.ids[: self._context]
        block = Block(slot=slot, start=0, tokens=ids, rows=len(ids))
        try:
            rows = self.forward([block])[0]
        except (RuntimeError, TypeError, ValueError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UnsupportedModelError(
                f"{type(self._model).__name__} does not run on this cache: {reason}"
            ) from error
        self.close(slot)
        if len(ids) == len(probed.ids) and not probed.agrees(torch.from_numpy(rows[-1])):
            raise UnsupportedModelError(
                f"{type(self._model).__name__} gives other logits through this cache than "
                "through its own"
            )
        if self._info.deterministic:
            self._require_same_bits(ids[:2], rows[:2])
        self._passes = 0

    def _require_same_bits(self, ids: tuple[int, ...], expected: FloatRow) -> None:
        """The promise of the deterministic setting, tried on this model and this machine:
        the same tokens, one a pass, at all rows at once, must give the bits they gave as one
        block. Kernels differ between processors, so tests elsewhere do not settle it."""
        slots = [Slot() for _ in range(self._rows)]
        for position, token in enumerate(ids):
            blocks = [
                Block(slot=i, start=position, tokens=(token,), rows=1) for i in range(self._rows)
            ]
            rows = self._compute(blocks, slots)
            self._extend(slots, blocks)
            for row in rows:
                if not np.array_equal(row[0], expected[position]):
                    raise UnsupportedModelError(
                        f"{self._info.name} in {self._info.dtype} does not give the same bits at "
                        "every row of a pass here; load it with deterministic off"
                    )
