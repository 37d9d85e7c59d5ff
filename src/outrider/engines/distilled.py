"""The run-time of a distilled draft (`draftfile`): a few layers, int8 weights, a small head.

A draft is called once per guessed token with a single row a request, so what counts is the time
of that call: weights are int8 (a third of the memory traffic of bfloat16), query/key/value and
gate/up are one product each, keys and values go into storage that is already there, one row needs
no mask, and the head covers the `support` ids only. Short blocks of several requests share a pass
(`SHARED_ROWS`): the products see all rows, attention each request's own. More rows (a prompt, a
correction) take the same path with a mask; a long prompt goes through in pieces of bounded size.

int8 products come from torch's own operator where the CPU build has it; elsewhere (CUDA, other
builds) the same weights are kept in bfloat16 or float32 and multiplied plainly. A draft's bits
never change the text, only how often a guess is right (docs/architecture.md, Acceptance), so this
engine promises no bit-identity.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from outrider.engines.base import (
    Block,
    FloatRow,
    IdArray,
    ModelInfo,
    SlotError,
    UnsupportedModelError,
)
from outrider.engines.decoder import (
    MATRICES,
    Layer,
    State,
    embedding_of,
    geometry_of,
    head_of,
    layer_of,
    target_fingerprint,
)
from outrider.engines.draftfile import DraftFile, difference, read
from outrider.engines.products import INT8_ROWS, Product, make_product, resolve
from outrider.engines.slotbook import SlotBook
from outrider.engines.slots import LayerShape, Slot, SlotStore

if TYPE_CHECKING:
    from outrider.engines.loaded import Loaded

DEFAULT_SLOTS: Final = 16
PREFILL_ROWS: Final = 256
"""Most rows of one pass: bounds the activations and the mask of a long prompt."""
SHARED_ROWS: Final = INT8_ROWS
"""Most rows of a pass that several blocks share: beyond, the narrow products are not the faster
ones (`bench/draft_batch.py` measures what sharing gains)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """The rows of one block in a pass: `count` from `row` on, at positions from `start` on."""

    slot: DraftSlot
    row: int
    count: int
    start: int
    mask: Tensor | None

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.count)

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(slots=True, kw_only=True)
class DraftSlot(Slot):
    """A slot, and what `DistilledModel.hidden` shows of it."""

    last: tuple[int, Tensor] | None = None
    """Ids held when it was computed, and the residual stream [1, hidden] of the last of them."""


class DistilledModel(SlotBook[DraftSlot]):
    """A distilled draft behind the LanguageModel protocol."""

    def __init__(
        self,
        draft: DraftFile,
        state: State,
        *,
        name: str,
        fingerprint: str = "",
        vocab_size: int | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        compute: str = "auto",
        device: str = "cpu",
        max_slots: int = DEFAULT_SLOTS,
        context_length: int | None = None,
    ) -> None:
        """`state`: the target's weights by transformers' names (only the layers the draft is
        made of, the embedding and the head are read). `fingerprint`, `vocab_size`,
        `eos_token_ids`: of the target's tokenizer, which the draft shares."""
        geometry = draft.header.geometry
        embedding = embedding_of(state)
        super().__init__(
            max_slots=max_slots,
            context_length=min(context_length or geometry.context, geometry.context),
            id_count=len(embedding),
        )
        self._geometry = geometry
        self._kind = resolve(compute, device, draft.header.precision)
        dtype = torch.float32 if self._kind == "float32" else torch.bfloat16
        self._dtype, self._device = dtype, torch.device(device)

        def make(weight: Tensor) -> Product:
            return make_product(weight.to(self._device), dtype, self._kind)

        support = draft.support.long()
        vocab = vocab_size or geometry.vocab
        if int(support[-1]) >= vocab:
            raise UnsupportedModelError(f"{name} guesses ids that the tokenizer does not have")
        self._support: IdArray = support.numpy().astype(np.int64)
        self._embedding = embedding.to(self._device, dtype)
        head = head_of(state)[support].float().to(self._device)
        # Four bits are too few where single rows decide which id comes first.
        self._head = make_product(head, dtype, "int8" if self._kind == "int4" else self._kind)
        self._norm = draft.final_norm.to(self._device, dtype)
        self._layers = [
            {n: make(t) if n in MATRICES else t.to(self._device, dtype) for n, t in layer.items()}
            for layer in (merged_layer(draft, state, i) for i in range(len(draft.header.layers)))
        ]
        self._cos, self._sin = _rotary(geometry.rope, self._context, dtype, self._device)
        shape = LayerShape(
            heads=geometry.kv_heads, key_dim=geometry.head_dim, value_dim=geometry.head_dim
        )
        self._store = SlotStore(
            (shape,) * len(self._layers), context=self._context, dtype=dtype, device=self._device
        )
        self._passes = 0
        self._info = ModelInfo(
            name=name,
            vocab_size=vocab,
            logits_width=geometry.vocab,
            context_length=self._context,
            fingerprint=fingerprint,
            dtype=self._kind,
            device=str(self._device),
            eos_token_ids=eos_token_ids,
            parameters=self._head.parameters
            + sum(w[name].parameters for w in self._layers for name in MATRICES),
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def support(self) -> IdArray | None:
        return self._support

    @property
    def passes(self) -> int:
        return self._passes

    def _compute(self, blocks: Sequence[Block], slots: Sequence[DraftSlot]) -> list[FloatRow]:
        """A pass for as many short blocks as it holds, and one per PREFILL_ROWS rows of a long
        one. A block is never cut to fill a pass: it meets the shapes it meets alone."""
        out: list[FloatRow] = []
        with torch.inference_mode():
            for slot, block in zip(slots, blocks, strict=True):
                # Rows behind the ids a slot claims are never looked at, so a failure halfway
                # needs no clean-up: the ids are extended last.
                self._store.reserve(slot, block.start + len(block.tokens))
            for first, end in _passes([len(block.tokens) for block in blocks]):
                out += self._run(slots[first:end], blocks[first:end])
        return out

    def hidden(self, slot: int) -> FloatRow:
        """The last hidden state behind the final norm, float32 [hidden], at the slot's newest
        position (`drafters.ShowsHidden`). Costs a norm and a copy, and nothing when unused.

        Raises SlotError when the newest position was not the last one computed: after
        `truncate` or `copy_prefix`, or in an empty slot."""
        held = self._slot(slot)
        length, state = held.last or (0, None)
        if state is None or length != len(held.ids):
            raise SlotError(f"slot {slot} has no state at position {len(held.ids) - 1}")
        with torch.inference_mode():
            row: FloatRow = self._normed(state)[0].float().cpu().numpy()
        return row

    def _run(self, slots: Sequence[DraftSlot], blocks: Sequence[Block]) -> list[FloatRow]:
        """Rows of logits [block.rows, len(support)] of each block."""
        if len(blocks) == 1:
            return [self._run_alone(slots[0], blocks[0])]
        segments, row = [], 0
        for slot, block in zip(slots, blocks, strict=True):
            segments.append(self._segment(slot, row, len(block.tokens), block.start))
            row += len(block.tokens)
        hidden = self._pass(segments, [t for block in blocks for t in block.tokens])
        wanted: list[Tensor] = []
        for segment, block in zip(segments, blocks, strict=True):
            last = segment.row + segment.count
            wanted.append(hidden[last - block.rows : last])
            segment.slot.last = (segment.end, hidden[last - 1 : last].clone())
        ends = np.cumsum([block.rows for block in blocks])
        if not ends[-1]:
            return [np.empty((0, len(self._support)), np.float32)] * len(blocks)
        rows = self._logits(torch.cat(wanted)).float().cpu().numpy()
        return np.split(rows, ends[:-1])

    def _run_alone(self, slot: DraftSlot, block: Block) -> FloatRow:
        """The same of one block, however long."""
        found: list[Tensor] = []
        skip = len(block.tokens) - block.rows
        for at in range(0, len(block.tokens), PREFILL_ROWS):
            piece = block.tokens[at : at + PREFILL_ROWS]
            wanted = min(len(piece), max(0, at + len(piece) - skip))
            segment = self._segment(slot, 0, len(piece), block.start + at)
            hidden = self._pass([segment], piece)
            if wanted:
                found.append(self._logits(hidden[len(piece) - wanted :]))
        # A copy of one row, or a long prompt's activations would stay alive behind it.
        last = hidden if len(hidden) == 1 else hidden[-1:].clone()
        slot.last = (block.start + len(block.tokens), last)
        if not found:
            return np.empty((0, len(self._support)), np.float32)
        rows = found[0] if len(found) == 1 else torch.cat(found)
        result: FloatRow = rows.float().cpu().numpy()
        return result

    def _segment(self, slot: DraftSlot, row: int, count: int, start: int) -> _Segment:
        mask = None if count == 1 else _mask(start, count, self._groups, self._device)
        return _Segment(slot=slot, row=row, count=count, start=start, mask=mask)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._head(self._normed(hidden))

    def _normed(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self._norm.shape, self._norm, self._geometry.norm_eps)

    def _pass(self, segments: Sequence[_Segment], tokens: Sequence[int]) -> Tensor:
        """The residual stream [n, hidden] behind the last layer; fills the slots' caches."""
        self._passes += 1
        x = self._embedding[torch.tensor(tokens, device=self._device)]
        angles = [(self._cos[s.start : s.end], self._sin[s.start : s.end]) for s in segments]
        cos, sin = (_joined(part) for part in zip(*angles, strict=True))
        for index, layer in enumerate(self._layers):
            x = self._layer(layer, index, x, segments, cos, sin)
        return x

    @property
    def _groups(self) -> int:
        """Query heads that share a key/value head."""
        return self._geometry.heads // self._geometry.kv_heads

    def _layer(
        self,
        layer: dict[str, Any],
        index: int,
        x: Tensor,
        segments: Sequence[_Segment],
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        g = self._geometry
        count = len(x)
        h = rms_norm(x, (g.hidden,), layer["attention_norm"], g.norm_eps)
        qkv = layer["qkv"](h)
        if "qkv_bias" in layer:
            qkv = qkv + layer["qkv_bias"]
        qkv = qkv.view(count, g.heads + 2 * g.kv_heads, g.head_dim).transpose(0, 1)
        both = qkv[: g.heads + g.kv_heads]  # queries and keys turn by the same angles
        if "q_norm" in layer:
            both = torch.cat(
                [
                    rms_norm(both[: g.heads], (g.head_dim,), layer["q_norm"], g.norm_eps),
                    rms_norm(both[g.heads :], (g.head_dim,), layer["k_norm"], g.norm_eps),
                ]
            )
        half = g.head_dim // 2
        both = both * cos + torch.cat([-both[..., half:], both[..., :half]], -1) * sin
        values = qkv[g.heads + g.kv_heads :]
        seen = _joined(
            [self._attend(s, index, both[:, s.rows], values[:, s.rows]) for s in segments]
        )
        x = x + layer["out"](seen)
        h = rms_norm(x, (g.hidden,), layer["mlp_norm"], g.norm_eps)
        gate, up = layer["gate_up"](h).chunk(2, -1)
        result: Tensor = x + layer["down"](silu(gate) * up)
        return result

    def _attend(self, segment: _Segment, index: int, both: Tensor, fresh: Tensor) -> Tensor:
        """Stores a block's keys and values and looks at its slot: [count, heads * head_dim].
        `both` [heads + kv_heads, count, head_dim]: queries, then keys; `fresh`: values."""
        g, count = self._geometry, segment.count
        keys, values = segment.slot.keys[index], segment.slot.values[index]
        keys[:, segment.start : segment.end] = both[g.heads :]
        values[:, segment.start : segment.end] = fresh
        # Query heads of one key/value head become extra query rows: nothing is expanded.
        queries = both[: g.heads].reshape(1, g.kv_heads, self._groups * count, g.head_dim)
        seen = scaled_dot_product_attention(
            queries,
            keys[None, :, : segment.end],
            values[None, :, : segment.end],
            attn_mask=segment.mask,
        )
        return seen.view(g.heads, count, g.head_dim).transpose(0, 1).reshape(count, -1)

    def _new(self) -> DraftSlot:
        return DraftSlot()

    def _copy(self, source: DraftSlot, target: DraftSlot, length: int) -> None:
        target.last = None
        with torch.inference_mode():
            self._store.copy(source, target, length)


def merged_layer(draft: DraftFile, state: State, index: int) -> Layer:
    """Layer `index` of the draft in float32: the target's, with the stored difference."""
    header = draft.header
    plan = header.layers[index]
    layer = {n: t.float() for n, t in layer_of(state, header.geometry, plan.source).items()}
    for name, matrix in draft.matrices[index].items():
        base = layer[name] * plan.factor(name)
        layer[name] = base + difference(matrix, header, plan.bits, tuple(base.shape))
    for name, vector in draft.vectors[index].items():
        layer[name] = vector.float()
    return layer


def shipped(name: str) -> Path:
    """The file of a draft that comes with the package ('small', 'large')."""
    path = Path(str(resources.files("outrider"))) / "data" / "drafts" / f"{name}.safetensors"
    if not path.is_file():
        raise UnsupportedModelError(f"this build ships no draft {name!r}")
    return path


def load_draft(
    spec: str,
    *,
    target: Loaded,
    weights: tuple[State, Any],
    dtype: str = "auto",
    device: str = "auto",
    max_slots: int = DEFAULT_SLOTS,
) -> DistilledModel:
    """A distilled draft for `target`: a shipped one by name, or a file of `outrider distill`.

    `weights`: the target's, and its config: layers that the draft does not hold are read from
    them. `dtype` 'auto' means int8 where torch can, else bfloat16. Refused with the reason when
    the draft was made for another target."""
    info = target.model.info
    path = Path(spec).expanduser() if spec.endswith(".safetensors") else shipped(spec)
    state, config = weights
    geometry = geometry_of(config)
    draft = read(path, fingerprint=target_fingerprint(state, geometry))
    return DistilledModel(
        draft,
        state,
        name=spec,
        fingerprint=info.fingerprint,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        compute=dtype,
        device="cpu" if device == "auto" else device,
        max_slots=max_slots,
        context_length=info.context_length,
    )


def _rotary(
    frequencies: Sequence[float], context: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin [context, head_dim], the angles in the half-split order of transformers."""
    places = torch.arange(context, dtype=torch.float32)[:, None]
    angles = places * torch.tensor(frequencies, dtype=torch.float32)[None]
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def _passes(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs [first, end) of blocks of so many rows that share a pass."""
    first, rows = 0, 0
    for i, length in enumerate(lengths):
        if i > first and rows + length > SHARED_ROWS:
            yield first, i
            first, rows = i, 0
        rows += length
    if lengths:
        yield first, len(lengths)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _mask(start: int, count: int, groups: int, device: torch.device) -> Tensor:
    """bool [groups * count, start + count]: row i, at start + i, sees places 0 .. start + i."""
    mask = torch.ones(count, start + count, dtype=torch.bool, device=device).tril(start)
    return mask.repeat(groups, 1)
