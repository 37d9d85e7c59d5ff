"""From a trained student to the file that `engines.distilled` runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.distill.student import Student
from outrider.engines.decoder import MATRICES
from outrider.engines.draftfile import (
    DraftFile,
    DraftHeader,
    QuantizedMatrix,
    pack,
    quantize,
)


def export(
    student: Student, *, target: str, fingerprint: str, provenance: Mapping[str, Any]
) -> DraftFile:
    """The student as it will be stored; `fingerprint` is the target's."""
    quantizer = student.quantizer
    matrices: list[dict[str, QuantizedMatrix]] = []
    vectors: list[dict[str, Tensor]] = []
    for layer in student.layers:
        bits = layer.plan.bits
        stored: dict[str, QuantizedMatrix] = {}
        if bits:
            for name in MATRICES:
                difference = getattr(layer, name).detach().cpu()
                codes, scales = quantize(difference, quantizer.levels[bits], quantizer.group)
                stored[name] = QuantizedMatrix(codes=pack(codes, bits), scales=scales)
        matrices.append(stored)
        names = student.geometry.vectors if bits else ()
        vectors.append({name: getattr(layer, name).detach().cpu().half() for name in names})
    header = DraftHeader(
        geometry=student.geometry,
        layers=student.plans,
        group=quantizer.group,
        levels=quantizer.levels,
        target=target,
        fingerprint=fingerprint,
        provenance=provenance,
    )
    return DraftFile(
        header=header,
        support=student.support.cpu().to(torch.int32),
        final_norm=student.final_norm.detach().cpu().half(),
        vectors=tuple(vectors),
        matrices=tuple(matrices),
    )
