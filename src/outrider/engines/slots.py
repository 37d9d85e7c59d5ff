"""Key/value storage of the hf engine: slots, the cache object, the attention function.

How one row travels (row = one token at one position of one slot):

    ids, position_ids [1, N] -> stock model -> per layer:
        SlotLayer.update   writes the new key and value at (slot, position)
        slot_attention     reads each row's own slot over the step's span

The model sees a batch of one sequence of N unrelated tokens, so its linear layers run as one
[N, D] product; only attention knows that rows belong to slots. What the two halves need is a
`Step`, handed to the model as an extra keyword that stock models pass on to the attention
function (transformers' documented way for custom attention).

Key/value heads are never expanded to query heads: queries are grouped by key/value head
instead, as extra query rows. Expanding would copy the whole span once per group and layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache, CacheLayerMixin

from outrider.engines.base import UnsupportedModelError
from outrider.engines.passes import bucket
from outrider.engines.slotbook import SlotRecord

ATTENTION: Final = "outrider_slots"
"""Name under which `slot_attention` is registered with transformers."""
STEP: Final = "outrider_step"
"""Keyword that carries the Step from the engine to the attention function."""
_NEUTRAL: Final = ("softcap", "position_bias", "s_aux", "head_mask", "sliding_window")
"""Keywords of other attention functions that change the result; only None is served."""
_PACKING_QUERIES: Final = 64
"""From this many query rows a head on, torch's CPU kernel chooses whether to repack keys by
looking at the batch size; fixed-shape attention must then go row by row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Shape of one layer's cache entries for one token."""

    heads: int
    key_dim: int
    value_dim: int


@dataclass(slots=True, kw_only=True)
class Slot(SlotRecord):
    """One sequence: its ids, and keys and values per layer as [heads, capacity, dim]."""

    capacity: int = 0
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def wipe(self, length: int) -> None:
        """Zero everything from `length` on: masked places must hold finite numbers, since
        the attention weight 0 times NaN is NaN."""
        for tensor in (*self.keys, *self.values):
            tensor[:, length:].zero_()


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows of one step that share a slot: `count` rows from `row`, at `start` and on."""

    slot: Slot
    row: int
    count: int
    start: int
    span: int
    mask: Tensor | None
    """Additive, [count, span], 0 where a row may look and -inf elsewhere; None: everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One pass through the model, as the cache and the attention function need it."""

    groups: tuple[Group, ...]
    rows: int
    """Rows of the pass; those behind the last group are filler and are never stored."""
    fixed: bool
    """Every row attended to by itself in a shape that depends on its position alone."""
    gather: Tensor | None = None
    """Mask of all rows, [rows, span]: copy every row's span into one batch, one kernel call
    for all slots, instead of one call a slot. For GPUs, where launches cost more than copies
    and one shape means one kernel. None: a call a slot."""


def make_step(
    parts: Sequence[tuple[Slot, int, int]],
    *,
    span: int | None,
    rows: int,
    like: Tensor,
    gather: bool,
) -> Step:
    """The step of a pass. `parts`: slot, first position and count of each segment, in row
    order; `rows` includes filler; masks take dtype and device of `like`."""
    groups: list[Group] = []
    row = 0
    for slot, start, count in parts:
        reach = span or start + count
        alone = span is None and count == 1
        mask = None if alone else _causal(start, count, reach, like)
        groups.append(Group(slot=slot, row=row, count=count, start=start, span=reach, mask=mask))
        row += count
    whole = None
    if gather and span is not None:
        filler = like.new_full((rows - row, span), float("-inf"))
        filler[:, 0] = 0.0  # something to look at, so that the softmax is defined
        whole = torch.cat([group.mask for group in groups if group.mask is not None] + [filler])
    return Step(groups=tuple(groups), rows=rows, fixed=span is not None, gather=whole)


def _causal(start: int, count: int, span: int, like: Tensor) -> Tensor:
    """[count, span]: row i, at position start + i, sees places 0 .. start + i."""
    places = torch.arange(span, device=like.device)
    positions = torch.arange(start, start + count, device=like.device)
    mask = like.new_zeros(count, span)
    return mask.masked_fill_(places[None, :] > positions[:, None], float("-inf"))


class SlotStore:
    """Allocates and grows the slots' tensors."""

    def __init__(
        self,
        shapes: tuple[LayerShape, ...],
        *,
        context: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._shapes = shapes
        self._context = context
        self._dtype = dtype
        self._device = device

    def reserve(self, slot: Slot, length: int) -> None:
        """Make room for `length` positions. Storage doubles with the buckets, so a short
        session never pays for the whole context and growing costs O(1) a token."""
        capacity = bucket(max(length - 1, 0), self._context)
        if capacity <= slot.capacity:
            return
        slot.keys = [
            self._grown(old, shape.heads, capacity, shape.key_dim)
            for old, shape in zip(slot.keys or self._none(), self._shapes, strict=True)
        ]
        slot.values = [
            self._grown(old, shape.heads, capacity, shape.value_dim)
            for old, shape in zip(slot.values or self._none(), self._shapes, strict=True)
        ]
        slot.capacity = capacity

    def copy(self, source: Slot, target: Slot, length: int) -> None:
        """Copy the first `length` positions of `source` over those of `target`."""
        self.reserve(target, length)
        pairs = zip((*source.keys, *source.values), (*target.keys, *target.values), strict=True)
        for old, new in pairs:
            new[:, :length].copy_(old[:, :length])

    def _none(self) -> list[None]:
        return [None] * len(self._shapes)

    def _grown(self, old: Tensor | None, heads: int, capacity: int, dim: int) -> Tensor:
        new = torch.zeros(heads, capacity, dim, dtype=self._dtype, device=self._device)
        if old is not None:
            new[:, : old.shape[1]].copy_(old)
        return new


class SlotLayer(CacheLayerMixin):  # type: ignore[misc, no-untyped-call, unused-ignore]
    """One layer of the cache: stores the rows of the current step, returns them unchanged."""

    def __init__(self, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._index = index
        self._step: Step | None = None
        self.is_initialized = True

    def begin(self, step: Step) -> None:
        self._step = step

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """key_states [1, heads, N, key_dim], value_states [1, heads, N, value_dim]."""
        if self._step is None:
            raise UnsupportedModelError("the model used its cache outside a forward pass")
        for group in self._step.groups:
            rows = slice(group.row, group.row + group.count)
            places = slice(group.start, group.start + group.count)
            group.slot.keys[self._index][:, places].copy_(key_states[0, :, rows])
            group.slot.values[self._index][:, places].copy_(value_states[0, :, rows])
        return key_states, value_states

    # The rest of the interface serves transformers' own masks and generation loops. None of
    # it applies: positions are always explicit and slot_attention makes its own masks.
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:  # noqa: ARG002
        return None

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):  # type: ignore[misc, unused-ignore]
    """The cache handed to the model; all state lives in the slots of the current step."""

    def __init__(self, layers: int) -> None:
        self._slot_layers = [SlotLayer(index) for index in range(layers)]
        super().__init__(layers=list(self._slot_layers))

    def begin(self, step: Step) -> None:
        for layer in self._slot_layers:
            layer.begin(step)


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,  # noqa: ARG001 - called by position; the slots hold what is attended to
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers attention function: query [1, heads, N, dim] -> [1, N, heads, value_dim].

    `key` and `value` are this step's new rows, already stored by SlotLayer.update; what is
    attended to comes from the slots.
    """
    step = kwargs.get(STEP)
    index = getattr(module, "layer_idx", None)
    if not isinstance(step, Step) or not isinstance(index, int):
        raise UnsupportedModelError(
            f"{type(module).__name__} does not pass its keywords on to the attention function"
        )
    for name in _NEUTRAL:
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(f"attention with {name!r} is not supported")
    queries = query[0].transpose(0, 1)  # [N, heads, dim]
    if step.gather is not None:
        return _gathered(step, step.gather, index, queries, scaling)[None], None
    heads, dim = queries.shape[1], value.shape[-1]
    parts = [
        (_row_by_row if step.fixed else _together)(group, index, queries, scaling)
        for group in step.groups
    ]
    filler = step.rows - sum(group.count for group in step.groups)
    if filler:
        parts.append(queries.new_zeros(filler, heads, dim))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out[None], None


def _row_by_row(group: Group, index: int, queries: Tensor, scaling: float | None) -> Tensor:
    """Each row a batch entry of its own, [kv_heads, group, dim] against [kv_heads, span, dim].

    The rows share the slot's storage through a stride of 0: nothing is copied. The kernel
    computes batch entries apart from each other, so how many there are changes no bit
    (tests/engines/test_hf_deterministic.py holds it)."""
    keys = group.slot.keys[index][None, :, : group.span]
    values = group.slot.values[index][None, :, : group.span]
    rows = queries[group.row : group.row + group.count]
    count, heads, dim = rows.shape
    shared = keys.shape[1]
    grouped = rows.reshape(count, shared, heads // shared, dim)
    mask = None if group.mask is None else group.mask[:, None, None, :]
    step = 1 if heads // shared >= _PACKING_QUERIES else count
    parts = [
        scaled_dot_product_attention(
            grouped[i : i + step],
            keys.expand(step, -1, -1, -1),
            values.expand(step, -1, -1, -1),
            attn_mask=None if mask is None else mask[i : i + step],
            scale=scaling,
        )
        for i in range(0, count, step)
    ]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.reshape(count, heads, -1)


def _together(group: Group, index: int, queries: Tensor, scaling: float | None) -> Tensor:
    """All rows of the group as one batch entry, [kv_heads, group * count, dim]: cheapest."""
    keys = group.slot.keys[index][None, :, : group.span]
    values = group.slot.values[index][None, :, : group.span]
    rows = queries[group.row : group.row + group.count]
    count, heads, dim = rows.shape
    shared = keys.shape[1]
    folded = rows.transpose(0, 1).reshape(1, shared, heads // shared * count, dim)
    mask = None if group.mask is None else group.mask.repeat(heads // shared, 1)
    out = scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scaling)
    return out.reshape(heads, count, -1).transpose(0, 1)


def _gathered(
    step: Step, mask: Tensor, index: int, queries: Tensor, scaling: float | None
) -> Tensor:
    """All rows of the step in one call over copied spans, filler rows included."""
    owners = [group for group in step.groups for _ in range(group.count)]
    owners += [step.groups[0]] * (step.rows - len(owners))
    keys = torch.stack([group.slot.keys[index][:, : group.span] for group in owners])
    values = torch.stack([group.slot.values[index][:, : group.span] for group in owners])
    rows, heads, dim = queries.shape
    shared = keys.shape[1]
    out = scaled_dot_product_attention(
        queries.reshape(rows, shared, heads // shared, dim),
        keys,
        values,
        attn_mask=mask[:, None, None, :],
        scale=scaling,
    )
    return out.reshape(rows, heads, -1)
