"""An engine that promises its bits is tried before it is believed."""

from __future__ import annotations

import numpy as np
import pytest

import tiny
from outrider.engines.base import EngineError
from outrider.engines.hf import HFModel
from outrider.engines.selfcheck import keeps_bits, require_bits
from outrider.engines.toy import ToyModel, random_law


class Wobbly(ToyModel):
    """Its last bit depends on how many rows are asked for."""

    def forward(self, blocks):  # type: ignore[no-untyped-def]
        rows = super().forward(blocks)
        return [
            np.nextafter(r, np.inf) if b.rows > 1 else r for r, b in zip(rows, blocks, strict=True)
        ]


def test_an_engine_that_wobbles_is_refused_with_what_to_do():
    model = Wobbly(random_law(1, 30), vocab_size=30, name="wobbly")
    assert not keeps_bits(model)
    with pytest.raises(EngineError, match=r"wobbly in float32 .* --threads 1"):
        require_bits(model)
    assert model.open_slots == 0


@pytest.mark.parametrize("context", [2, 5, 30, 4096])
def test_one_that_keeps_them_is_believed(context: int):
    model = ToyModel(random_law(1, 30), vocab_size=30, context_length=context)
    require_bits(model)
    assert model.open_slots == 0


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_real_engines_keep_their_bits(dtype: str, threads: int):
    import torch

    with tiny.threads(threads):
        require_bits(HFModel(tiny.llama().to(getattr(torch, dtype)), name="tiny"))


def test_free_shapes_promise_nothing_and_are_not_asked():
    free = HFModel(tiny.llama(), name="free", deterministic=False)
    require_bits(free)
    assert free.passes == 0
