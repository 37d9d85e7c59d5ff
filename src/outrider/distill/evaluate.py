"""What a draft is worth: acceptance on held-out prompts by task, and its cost per token.

The target answers every prompt at each temperature; along its own text, at every position, the
draft's distribution q (as the run-time computes it, int8 and all) is compared with the target's p:

    temperature 0   share of positions where both like the same id best, for the draft alone and
                    with prompt lookup in front, as `lookup+MODEL` would guess
    above           sum over ids of min(p, q), the acceptance of the ratio rule
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from outrider.distill.corpus import Encode, Teacher, sample
from outrider.distill.prompts import read_prompts
from outrider.engines.base import Block, LanguageModel
from outrider.engines.lookup import NgramIndex

_BATCH: Final = 16
_WARMUP: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateConfig:
    prompts_per_task: int = 20
    max_new_tokens: int = 96
    max_prompt_tokens: int = 700
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    seed: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """One task, or the mean over tasks."""

    task: str
    positions: int
    """Tokens of the target the figures rest on, all temperatures together."""
    greedy: float
    """At temperature 0, the draft alone."""
    with_lookup: float
    """At temperature 0, prompt lookup first."""
    covered: float
    """Share of the target's greedy choices that the draft's head can name at all."""
    overlap: Mapping[str, float]
    """sum min(p, q) by temperature ('0.7', '1.0')."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    task: str
    temperature: float
    prompt: list[int]
    answer: list[int]


class _Tally:
    """Running sums of one task."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}

    def add(self, name: str, amount: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + amount

    def mean(self, name: str, count: str) -> float:
        return self.sums.get(name, 0.0) / max(self.sums.get(count, 0.0), 1.0)


def read_tasks(paths: Sequence[Path]) -> dict[str, list[str]]:
    """Prompts by task: a row's `task` (and `subtask`) fields, else the file's name."""
    tasks: dict[str, list[str]] = {}
    for path in paths:
        prompts = read_prompts([path])
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        for line, prompt in zip(lines, prompts, strict=True):
            row = json.loads(line)
            names = (row.get("task"), row.get("subtask")) if isinstance(row, dict) else ()
            task = "/".join(str(name) for name in names if name) or path.stem
            tasks.setdefault(task, []).append(prompt)
    return tasks


def answer(
    teacher: Teacher,
    tasks: Mapping[str, Sequence[str]],
    encode: Encode,
    config: EvaluateConfig,
    advance: Callable[[int], None] = lambda _count: None,
) -> list[_Sample]:
    """The target's answers to the first prompts of every task, at every temperature."""
    asked: list[tuple[str, float, list[int]]] = []
    for task, texts in sorted(tasks.items()):
        short = [ids for ids in map(encode, texts) if len(ids) <= config.max_prompt_tokens]
        for ids in short[: config.prompts_per_task]:
            asked += [(task, temperature, ids) for temperature in config.temperatures]
    asked.sort(key=lambda item: len(item[2]))
    noise = torch.Generator().manual_seed(config.seed)
    found: list[_Sample] = []
    for at in range(0, len(asked), _BATCH):
        batch = asked[at : at + _BATCH]
        prompts, heat = [ids for _, _, ids in batch], [t for _, t, _ in batch]
        answers = sample(teacher, prompts, heat, config.max_new_tokens, noise)
        for (task, temperature, ids), tokens in zip(batch, answers, strict=True):
            found.append(_Sample(task=task, temperature=temperature, prompt=ids, answer=tokens))
        advance(len(batch))
    return found


def acceptance(
    draft: LanguageModel, teacher: Teacher, samples: Sequence[_Sample]
) -> list[Acceptance]:
    """One entry a task, and last the mean over tasks under the name 'mean'."""
    tallies: dict[str, _Tally] = {}
    for each in samples:
        _compare(draft, teacher, each, tallies.setdefault(each.task, _Tally()))
    rows = [_summary(task, tally) for task, tally in sorted(tallies.items())]
    return [*rows, _mean(rows)] if rows else []


def _compare(draft: LanguageModel, teacher: Teacher, each: _Sample, tally: _Tally) -> None:
    support = torch.arange(teacher.vocab)
    if draft.support is not None:
        support = torch.from_numpy(draft.support)
    count = len(each.answer)
    context = each.prompt + each.answer[:-1]
    slot = draft.open()
    try:
        block = Block(slot=slot, start=0, tokens=tuple(context), rows=count)
        q = torch.from_numpy(draft.forward([block])[0])
    finally:
        draft.close(slot)
    p = _teacher_logits(teacher, context, count)
    best = p.argmax(-1)
    tally.add("positions", count)
    if each.temperature == 0:
        guessed = support[q.argmax(-1)]
        tally.add("greedy positions", count)
        tally.add("greedy", float((guessed == best).sum()))
        tally.add("covered", float(torch.isin(best, support).sum()))
        tally.add("with lookup", _with_lookup(each.prompt, best.tolist(), guessed.tolist()))
        return
    heat = each.temperature
    overlap = torch.minimum((p / heat).softmax(-1)[:, support], (q / heat).softmax(-1)).sum()
    tally.add(f"positions at {heat}", count)
    tally.add(f"overlap at {heat}", float(overlap))


@torch.inference_mode()
def _teacher_logits(teacher: Teacher, context: Sequence[int], count: int) -> Tensor:
    """float32 [count, vocab]: before each token of the answer."""
    ids = torch.tensor([context], device=teacher.model.device)
    logits: Tensor = teacher.model(input_ids=ids, logits_to_keep=count).logits[0]
    return logits[:, : teacher.vocab].float().cpu()


def _with_lookup(prompt: Sequence[int], truth: Sequence[int], guessed: Sequence[int]) -> int:
    """How many greedy ids are guessed by lookup or, where it is silent, by the draft."""
    index, context, right = NgramIndex(), list(prompt), 0
    for wanted, model_guess in zip(truth, guessed, strict=True):
        index.update(context)
        copied = index.guess()
        right += wanted == (model_guess if copied is None else copied)
        context.append(wanted)
    return right


def _summary(task: str, tally: _Tally) -> Acceptance:
    heats = [name.split()[-1] for name in tally.sums if name.startswith("overlap at ")]
    return Acceptance(
        task=task,
        positions=int(tally.sums.get("positions", 0)),
        greedy=round(tally.mean("greedy", "greedy positions"), 4),
        with_lookup=round(tally.mean("with lookup", "greedy positions"), 4),
        covered=round(tally.mean("covered", "greedy positions"), 4),
        overlap={
            heat: round(tally.mean(f"overlap at {heat}", f"positions at {heat}"), 4)
            for heat in sorted(heats)
        },
    )


def _mean(rows: Sequence[Acceptance]) -> Acceptance:
    heats = sorted({heat for row in rows for heat in row.overlap})
    return Acceptance(
        task="mean",
        positions=sum(row.positions for row in rows),
        greedy=round(statistics.fmean(row.greedy for row in rows), 4),
        with_lookup=round(statistics.fmean(row.with_lookup for row in rows), 4),
        covered=round(statistics.fmean(row.covered for row in rows), 4),
        overlap={
            heat: round(statistics.fmean(row.overlap.get(heat, 0.0) for row in rows), 4)
            for heat in heats
        },
    )


def seconds_per_token(model: LanguageModel, *, context: int = 128, repeats: int = 25) -> float:
    """Median time of one forward of one row behind `context` tokens."""
    tokens = [7 % model.info.vocab_size] * min(context, model.info.context_length // 2)
    slot = model.open()
    times: list[float] = []
    try:
        model.forward([Block(slot=slot, start=0, tokens=tuple(tokens), rows=0)])
        for _ in range(_WARMUP + repeats):
            begin = time.perf_counter()
            block = Block(slot=slot, start=model.length(slot), tokens=(tokens[0],), rows=1)
            model.forward([block])
            times.append(time.perf_counter() - begin)
            model.truncate(slot, len(tokens))
    finally:
        model.close(slot)
    return statistics.median(times[_WARMUP:])
