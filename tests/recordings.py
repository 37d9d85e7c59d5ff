"""Recordings of the toy pair of `live`, in memory."""

from __future__ import annotations

import functools
from pathlib import Path

from live import PROMPT, TARGET, TOKENIZER, drafter, toy
from outrider.bench import recording
from outrider.core.tokens import SamplingParams
from outrider.engines.load import Loaded
from outrider.engines.replay import Recorded, Shape, encoded

LENGTH = 40
SEEDS = range(5, 11)


def shape(**changes: object) -> Shape:
    facts = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "max_tokens": LENGTH,
        "ignore_eos": True,
    }
    return Shape(**(facts | changes))  # type: ignore[arg-type]


@functools.cache
def recorded(*, window: int = 8, share: float = 0.3, ignore_eos: bool = True) -> Recorded:
    """Answers to PROMPT with SEEDS, and what the toy draft says along them."""
    target = Loaded(model=toy(TARGET), tokenizer=TOKENIZER)
    wanted = shape(ignore_eos=ignore_eos)
    answers = recording.record(
        target,
        drafter(share),
        [(seed, ("toy", PROMPT)) for seed in SEEDS],
        wanted,
        window=window,
    )
    header = recording.header(
        target, "toy-draft", wanted, seed=SEEDS[0], window=window, spent=0.002
    )
    return Recorded(name="toy.jsonl", header=header, answers=tuple(answers))


def params(seed: int, **changes: object) -> SamplingParams:
    return recorded().header.sampling.params(seed) if not changes else _changed(seed, changes)


def _changed(seed: int, changes: dict[str, object]) -> SamplingParams:
    facts = {"temperature": 1.0, "max_tokens": LENGTH, "ignore_eos": True, "seed": seed}
    return SamplingParams(**(facts | changes))  # type: ignore[arg-type]


def written(path: Path, what: Recorded) -> Path:
    path.write_bytes(b"".join(encoded(row) for row in (what.header, *what.answers)))
    return path
