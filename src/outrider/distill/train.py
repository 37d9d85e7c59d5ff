"""The training loop.

Three stretches of one run: cross entropy to the target; from `acceptance_from` on, acceptance
itself (with a little cross entropy to keep it steady), at mixed temperatures; from
`quantize_from` on also with the differences as the file will store them. Cosine learning rate.

Where the run stands is a function of the step alone. Batches come from (seed, epoch), per-step
draws from (seed, step), so a run that was interrupted and resumed from a checkpoint ends with the
same weights as one that was not.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from outrider.distill.corpus import Lesson
from outrider.distill.loss import Scores, Teacher, Weights, distill_loss, sharpen
from outrider.distill.optimizer import Muon
from outrider.distill.student import Student

_ROUND: Final = 16
"""Lengths are padded to a multiple of it: fewer distinct shapes."""
_POOL: Final = 50
"""Batches sorted by length together: little padding, and batches still differ by epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    steps: int
    batch_tokens: int = 4096
    """Padded tokens of a batch, prompts included."""
    learning_rate: float = 8e-4
    warmup: int = 40
    final_share: float = 0.02
    """Of the learning rate, at the end."""
    weight_decay: float = 0.02
    """Pulls differences towards 0, that is layers towards the target's."""
    acceptance_from: float = 0.75
    """Share of the steps after which acceptance is trained."""
    cross_entropy: float = 0.1
    """Weight of cross entropy from then on."""
    temperatures: tuple[float, ...] = (1.0, 0.7, 0.4)
    """Drawn from per position from then on."""
    quantize_from: float = 0.85
    clip: float = 1.0
    checkpoint_every: int = 100
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainProgress:
    """One step done."""

    step: int
    steps: int
    tokens: int
    """Answer tokens seen so far in the run."""
    scores: Scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    ids: Tensor
    """int64 [batch, length]."""
    rows: Tensor
    """int64 [n]: places of `ids.view(-1)` whose next token the target is known for."""
    teacher: Teacher


class Batches:
    """Lessons as batches of similar length, in an order that follows from seed and epoch."""

    def __init__(self, lessons: Sequence[Lesson], support: Tensor, vocab: int, budget: int):
        if not lessons:
            raise ValueError("no lessons to train on")
        self._lessons = lessons
        self._budget = budget
        self._column = torch.full((vocab,), -1, dtype=torch.long)
        self._column[support] = torch.arange(len(support))

    def epoch(self, seed: int, number: int) -> list[list[int]]:
        """Indices of lessons, batch by batch."""
        draw = random.Random(f"{seed}/{number}")
        order = list(range(len(self._lessons)))
        draw.shuffle(order)
        mean = sum(len(x.ids) for x in self._lessons) / len(order)
        pool = max(1, int(_POOL * self._budget / mean))
        batches: list[list[int]] = []
        for at in range(0, len(order), pool):
            batches += self._cut(sorted(order[at : at + pool], key=self._length))
        draw.shuffle(batches)
        return batches

    def _cut(self, order: Sequence[int]) -> list[list[int]]:
        batches: list[list[int]] = [[]]
        for index in order:
            if batches[-1] and self._length(index) * (len(batches[-1]) + 1) > self._budget:
                batches.append([])
            batches[-1].append(index)
        return batches

    def _length(self, index: int) -> int:
        return -(-(len(self._lessons[index].ids) - 1) // _ROUND) * _ROUND

    def build(self, chosen: Sequence[int]) -> Batch:
        length = max(map(self._length, chosen))
        ids = torch.zeros(len(chosen), length, dtype=torch.long)
        rows: list[Tensor] = []
        for row, index in enumerate(chosen):
            lesson = self._lessons[index]
            known = len(lesson.ids) - 1
            ids[row, :known] = lesson.ids[:-1]
            rows.append(torch.arange(row * length + lesson.prompt - 1, row * length + known))
        column = self._column[torch.cat([self._lessons[i].top_ids for i in chosen]).long()]
        p = torch.cat([self._lessons[i].top_p for i in chosen]).float()
        outside = column < 0
        teacher = Teacher(columns=column.clamp_min(0), p=p.masked_fill(outside, 0.0))
        return Batch(ids=ids, rows=torch.cat(rows), teacher=teacher)


class Trainer:
    """Student, optimisers and the place in the run."""

    def __init__(
        self, student: Student, lessons: Sequence[Lesson], vocab: int, config: TrainConfig
    ) -> None:
        self.student = student
        self.config = config
        self.step = 0
        self.tokens = 0
        self._batches = Batches(lessons, student.support, vocab, config.batch_tokens)
        self._epoch = -1
        self._queue: list[list[int]] = []
        self._before = 0
        """Steps in all epochs before the current one."""
        self._optimizers: tuple[torch.optim.Optimizer, ...] = (
            Muon(
                student.matrices(),
                lr=0.0,
                weight_decay=config.weight_decay,
                dtype=student.dtype,
            ),
            torch.optim.AdamW(student.vectors(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.0),
        )

    def run(
        self,
        checkpoint: Path | None = None,
        on_step: Callable[[TrainProgress], None] = lambda _progress: None,
    ) -> None:
        """Train to the end, from `checkpoint` where it exists, writing it as it goes."""
        if checkpoint is not None and checkpoint.is_file():
            self.restore(checkpoint)
        while self.step < self.config.steps:
            scores = self.advance()
            on_step(
                TrainProgress(
                    step=self.step, steps=self.config.steps, tokens=self.tokens, scores=scores
                )
            )
            due = self.step % self.config.checkpoint_every == 0 or self.step == self.config.steps
            if checkpoint is not None and due:
                self.save(checkpoint)
        self.student.quantized = True

    def advance(self) -> Scores:
        """One step."""
        config, share = self.config, self.step / self.config.steps
        batch = self._batches.build(self._next())
        late = share >= config.acceptance_from
        self.student.quantized = share >= config.quantize_from
        heat = torch.ones(len(batch.rows), 1)
        if late:
            noise = torch.Generator().manual_seed(config.seed * 1_000_003 + self.step)
            picks = torch.randint(len(config.temperatures), heat.shape, generator=noise)
            heat = torch.tensor(config.temperatures)[picks]
        weights = Weights(
            cross_entropy=config.cross_entropy if late else 1.0, rejection=1.0 if late else 0.0
        )
        device = self.student.head.device
        hidden = self.student(batch.ids.to(device)).flatten(0, 1)[batch.rows.to(device)]
        teacher = sharpen(batch.teacher, heat)
        loss, scores = distill_loss(
            self.student.logits(hidden),
            Teacher(columns=teacher.columns.to(device), p=teacher.p.to(device)),
            weights,
            heat.to(device),
        )
        self._descend(loss, share)
        self.step += 1
        self.tokens += len(batch.rows)
        return scores

    def _descend(self, loss: Tensor, share: float) -> None:
        config = self.config
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(
            [*self.student.matrices(), *self.student.vectors()], config.clip
        )
        cosine = 0.5 * (1 + math.cos(math.pi * share))
        rate = config.learning_rate * min(1.0, (self.step + 1) / config.warmup)
        rate *= config.final_share + (1 - config.final_share) * cosine
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()

    def _next(self) -> list[int]:
        """The lessons of step `self.step`; skips ahead where a checkpoint was loaded."""
        while self.step - self._before >= len(self._queue):
            self._before += len(self._queue)
            self._epoch += 1
            self._queue = self._batches.epoch(self.config.seed, self._epoch)
        return self._queue[self.step - self._before]

    # ------------------------------------------------------------------ checkpoints

    def save(self, path: Path) -> None:
        """Safetensors: weights, optimiser state, place in the run."""
        tensors = {f"student.{k}": v.detach() for k, v in self.student.named_parameters()}
        for number, optimizer in enumerate(self._optimizers):
            for key, state in optimizer.state_dict()["state"].items():
                for name, value in state.items():
                    tensors[f"optimizer.{number}.{key}.{name}"] = torch.as_tensor(value)
        place = {"step": str(self.step), "tokens": str(self.tokens)}
        scratch = path.with_suffix(".part")
        save_file({k: v.contiguous() for k, v in tensors.items()}, scratch, metadata=place)
        scratch.replace(path)

    def restore(self, path: Path) -> None:
        """ValueError where the checkpoint belongs to a student of another shape."""
        with safe_open(path, framework="pt") as file:
            saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            place = file.metadata()
        own = dict(self.student.named_parameters())
        for name, parameter in own.items():
            tensor = saved.get(f"student.{name}")
            if tensor is None or tensor.shape != parameter.shape:
                raise ValueError(f"{path.name} is a checkpoint of another draft ({name})")
            parameter.data.copy_(tensor)
        for number, optimizer in enumerate(self._optimizers):
            optimizer.load_state_dict(
                {**optimizer.state_dict(), "state": _optimizer_state(saved, number)}
            )
        self.step, self.tokens = int(place["step"]), int(place["tokens"])
        self._epoch, self._queue, self._before = -1, [], 0


def _optimizer_state(saved: dict[str, Tensor], number: int) -> dict[int, dict[str, Any]]:
    state: dict[int, dict[str, Any]] = {}
    for name, tensor in saved.items():
        if name.startswith(f"optimizer.{number}."):
            _, _, key, field = name.split(".", 3)
            state.setdefault(int(key), {})[field] = tensor
    return state
