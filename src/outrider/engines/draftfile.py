"""The file of a distilled draft: what is in it, how it is written, how it is read.

A draft is a few decoder layers, each one *a layer of its target plus a difference*, and shares
the target's embedding and output head. Only the differences are stored, so that a draft of
several layers fits in some ten megabytes:

    weight of the draft's layer i = factor * weight of the target's layer `source` + difference

(the factor is 1 but for the `residual` of a LayerPlan).

A difference is quantised: the last axis is cut in groups, each with one float16 scale, and an
entry is the scale times one of 2**bits levels (a short table kept in the file, since the levels
that fit a bell-shaped difference are not evenly spaced). Codes are packed without gaps.

Everything is safetensors with JSON metadata: reading it runs no code. The metadata say which
target the file was made for; a draft for another target is refused before a tensor is touched.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from outrider.engines.base import IncompatibleModelsError, UnsupportedModelError
from outrider.engines.decoder import FAMILIES, MATRICES, Geometry

FORMAT: Final = "outrider-draft"
VERSION: Final = 1
RESIDUAL: Final = ("out", "down")
"""Matrices that write to the residual stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """One layer of a draft."""

    source: int
    """Index of the target's layer it starts from."""
    bits: int
    """Bits per entry of the difference; 0: the target's layer unchanged, nothing stored."""
    residual: float = 1.0
    """Factor on the target's `out` and `down`, which write to the residual stream. Layers put
    behind an already trained draft start with a small one, so that they first change little."""

    changed: tuple[str, ...] = MATRICES
    """The matrices that have a difference; the others are the target's."""

    def factor(self, name: str) -> float:
        """Factor on the target's matrix `name`."""
        return self.residual if name in RESIDUAL else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHeader:
    """The metadata of a draft file."""

    geometry: Geometry
    layers: tuple[LayerPlan, ...]
    group: int
    """Entries that share a scale; divides the width of every matrix."""
    levels: Mapping[int, tuple[float, ...]]
    """Level tables by number of bits, ascending, to be multiplied by a group's scale."""
    target: str
    """Name of the target, for people."""
    fingerprint: str
    """Content hash of the target (`target_fingerprint`), hex: what decides."""
    precision: str = "int8"
    """What its products are best run in, where the machine can: 'int8' or 'int4'."""
    provenance: Mapping[str, Any]
    """How it was made and what it reached: seed, data, steps, acceptance. Never needed to run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedMatrix:
    """A difference as stored."""

    codes: Tensor
    """uint8 [ceil(rows * columns * bits / 8)]: indices into the level table, low bit first."""
    scales: Tensor
    """float16 [rows, columns / group]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFile:
    """A whole draft in memory, still as differences."""

    header: DraftHeader
    support: Tensor
    """int32 [n], ascending: the ids the output head covers."""
    final_norm: Tensor
    """float16 [hidden]."""
    vectors: tuple[Mapping[str, Tensor], ...]
    matrices: tuple[Mapping[str, QuantizedMatrix], ...]


# ------------------------------------------------------------------------- quantisation


def bell_levels(bits: int) -> tuple[float, ...]:
    """Levels with the least squared error for entries of a normal law, for a scale of 1.

    Lloyd's iteration on a fine grid of quantiles; depends on nothing but `bits`.
    """
    grid = torch.special.ndtri((torch.arange(65536, dtype=torch.float64) + 0.5) / 65536)
    levels = torch.special.ndtri((torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits)
    for _ in range(200):
        nearest = torch.bucketize(grid, (levels[1:] + levels[:-1]) / 2)
        sums = torch.zeros_like(levels).index_add_(0, nearest, grid)
        counts = torch.zeros_like(levels).index_add_(0, nearest, torch.ones_like(grid))
        levels = sums / counts.clamp_min(1)
    levels = (levels - levels.flip(0)) / 2  # exact symmetry: no drift of a matrix's mean
    return tuple(round(float(level), 6) for level in levels)


def quantize(matrix: Tensor, levels: tuple[float, ...], group: int) -> tuple[Tensor, Tensor]:
    """`matrix` [rows, columns] as codes uint8 [rows, columns] and scales float16.

    A group's scale starts at its root mean square and is then the least-squares fit to the
    codes it led to, which costs nothing and removes a good part of the error.
    """
    rows, columns = matrix.shape
    table = torch.tensor(levels)
    entries = matrix.float().reshape(rows, columns // group, group)
    scale = entries.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-8)
    codes = torch.bucketize(entries / scale, (table[1:] + table[:-1]) / 2)
    chosen = table[codes]
    fitted = (entries * chosen).sum(-1) / chosen.square().sum(-1).clamp_min(1e-8)
    return codes.to(torch.uint8).reshape(rows, columns), fitted.half()


def dequantize(codes: Tensor, scales: Tensor, levels: tuple[float, ...]) -> Tensor:
    """float32 [rows, columns] from unpacked codes and scales."""
    rows, groups = scales.shape
    entries = torch.tensor(levels)[codes.long()].reshape(rows, groups, -1)
    return (entries * scales.float()[..., None]).reshape(rows, -1)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes below 2**bits, any shape, as a uint8 vector without gaps, low bit first."""
    flat = codes.reshape(-1).numpy()
    planes = (flat[:, None] >> np.arange(bits, dtype=np.uint8)) & 1
    return torch.from_numpy(np.packbits(planes.reshape(-1), bitorder="little"))


def unpack(packed: Tensor, bits: int, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `pack`: uint8 of `shape`."""
    count = int(np.prod(shape))
    planes = np.unpackbits(packed.numpy(), count=count * bits, bitorder="little")
    weights = (1 << np.arange(bits)).astype(np.uint8)
    return torch.from_numpy((planes.reshape(count, bits) * weights).sum(1, dtype=np.uint8)).reshape(
        shape
    )


def difference(
    matrix: QuantizedMatrix, header: DraftHeader, bits: int, shape: tuple[int, ...]
) -> Tensor:
    """A stored matrix as float32 `shape`."""
    return dequantize(unpack(matrix.codes, bits, shape), matrix.scales, header.levels[bits])


# -------------------------------------------------------------------------------- files


def save(path: Path, draft: DraftFile) -> None:
    """Write `draft`; a reader never sees half a file."""
    tensors: dict[str, Tensor] = {"support": draft.support, "final_norm": draft.final_norm}
    for index, (vectors, matrices) in enumerate(zip(draft.vectors, draft.matrices, strict=True)):
        for name, vector in vectors.items():
            tensors[f"layers.{index}.{name}"] = vector.half()
        for name, matrix in matrices.items():
            tensors[f"layers.{index}.{name}.codes"] = matrix.codes
            tensors[f"layers.{index}.{name}.scales"] = matrix.scales
    body = json.dumps(dataclasses.asdict(draft.header), sort_keys=True)
    metadata = {"format": FORMAT, "version": str(VERSION), "draft": body}
    scratch = path.with_suffix(path.suffix + ".part")
    save_file({k: v.contiguous() for k, v in tensors.items()}, scratch, metadata=metadata)
    _in_order(scratch)
    scratch.replace(path)


def _in_order(path: Path) -> None:
    """Sort the file's metadata: safetensors writes it in an order that changes from call to
    call, and the same draft should be the same bytes."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= length:  # the format allows blanks behind the header
            file.seek(8)
            file.write(text.ljust(length))


def read_header(path: Path) -> DraftHeader:
    """The metadata alone. Raises UnsupportedModelError for anything that is not a draft."""
    with _opened(path) as file:
        return _header(path, file.metadata())


def read(path: Path, *, fingerprint: str | None = None) -> DraftFile:
    """The whole file, every tensor checked against the header.

    `fingerprint`: that of the target it is to serve; another one is refused.
    """
    with _opened(path) as file:
        header = _header(path, file.metadata())
        if fingerprint is not None and fingerprint != header.fingerprint:
            raise IncompatibleModelsError(
                f"{path.name} is a draft for another target ({header.target}, "
                f"{header.fingerprint[:12]}, not {fingerprint[:12]}); make one with "
                "`outrider distill`"
            )
        geometry = header.geometry
        reader = _Reader(path=path, file=file)
        support = reader.take("support", torch.int32, None)
        if support.dim() != 1 or not len(support) or not _ascending(support, geometry.vocab):
            raise UnsupportedModelError(f"{path.name}: the token list is not ascending ids")
        final = reader.take("final_norm", torch.float16, (geometry.hidden,))
        layers = [_read_layer(reader, header, i) for i in range(len(header.layers))]
    return DraftFile(
        header=header,
        support=support,
        final_norm=final,
        vectors=tuple(vectors for vectors, _ in layers),
        matrices=tuple(matrices for _, matrices in layers),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    path: Path
    file: Any

    def has(self, name: str) -> bool:
        return name in self.file.keys()  # noqa: SIM118 - a safetensors handle is no mapping

    def take(self, name: str, dtype: torch.dtype, shape: tuple[int, ...] | None) -> Tensor:
        if not self.has(name):
            raise UnsupportedModelError(f"{self.path.name}: tensor {name!r} is missing")
        tensor: Tensor = self.file.get_tensor(name)
        if tensor.dtype != dtype or (shape is not None and tuple(tensor.shape) != shape):
            raise UnsupportedModelError(
                f"{self.path.name}: tensor {name!r} is {tensor.dtype} {tuple(tensor.shape)}, "
                f"not {dtype} {shape}"
            )
        return tensor


def _read_layer(
    reader: _Reader, header: DraftHeader, index: int
) -> tuple[dict[str, Tensor], dict[str, QuantizedMatrix]]:
    geometry, plan = header.geometry, header.layers[index]
    if not plan.bits:
        return {}, {}
    vectors = {
        name: reader.take(f"layers.{index}.{name}", torch.float16, geometry.shape(name))
        for name in geometry.vectors
    }
    matrices: dict[str, QuantizedMatrix] = {}
    for name in plan.changed:
        rows, columns = geometry.shape(name)
        size = (rows * columns * plan.bits + 7) // 8
        prefix = f"layers.{index}.{name}"
        matrices[name] = QuantizedMatrix(
            codes=reader.take(f"{prefix}.codes", torch.uint8, (size,)),
            scales=reader.take(f"{prefix}.scales", torch.float16, (rows, columns // header.group)),
        )
    return vectors, matrices


def _ascending(support: Tensor, vocab: int) -> bool:
    inside = int(support[0]) >= 0 and int(support[-1]) < vocab
    return inside and bool((support[1:] > support[:-1]).all())


class _opened:
    """safe_open with our errors: a missing or damaged file names itself and the fix."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise UnsupportedModelError(f"no draft file {path.name}")
        try:
            self._file = safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise UnsupportedModelError(f"{path.name} is no safetensors file ({error})") from error

    def __enter__(self) -> Any:
        return self._file.__enter__()

    def __exit__(self, *details: Any) -> None:
        self._file.__exit__(*details)


def _header(path: Path, metadata: Mapping[str, str] | None) -> DraftHeader:
    if not metadata or metadata.get("format") != FORMAT:
        raise UnsupportedModelError(f"{path.name} is not a draft made by `outrider distill`")
    if metadata.get("version") != str(VERSION):
        raise UnsupportedModelError(
            f"{path.name} has draft format {metadata.get('version')}, this build reads {VERSION}"
        )
    try:
        body = json.loads(metadata["draft"])
        shape = body.pop("geometry")
        geometry = Geometry(**{**shape, "rope": tuple(shape["rope"])})
        plans = tuple(
            LayerPlan(**{**plan, "changed": tuple(plan.get("changed", MATRICES))})
            for plan in body.pop("layers")
        )
        levels = {int(k): tuple(v) for k, v in body.pop("levels").items()}
        header = DraftHeader(geometry=geometry, layers=plans, levels=levels, **body)
        problems = list(_problems(header))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnsupportedModelError(f"{path.name}: unreadable metadata ({error})") from error
    if problems:
        raise UnsupportedModelError(f"{path.name}: {problems[0]}")
    return header


def _problems(header: DraftHeader) -> Iterator[str]:
    geometry = header.geometry
    sizes = (geometry.hidden, geometry.intermediate, geometry.heads * geometry.head_dim)
    if geometry.family not in FAMILIES:
        yield f"layers of model type {geometry.family!r}"
    if min(*sizes, geometry.kv_heads, header.group, len(header.layers)) < 1:
        yield "a size is not positive"
    elif geometry.heads % geometry.kv_heads or any(size % header.group for size in sizes):
        yield "sizes do not divide"
    for plan in header.layers:
        if not 0 <= plan.source < geometry.layers:
            yield f"the target has no layer {plan.source}"
        if not set(plan.changed) <= set(MATRICES):
            yield f"unknown matrices {plan.changed}"
        if plan.bits and len(header.levels.get(plan.bits, ())) != 2**plan.bits:
            yield f"no table of {plan.bits}-bit levels"
