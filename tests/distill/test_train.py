"""Training: it learns, it resumes to the same weights, and what it learned is what is stored."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the torch extra is not installed")

from outrider.distill.corpus import Lesson, Teacher, Text, sample, teach  # noqa: E402
from outrider.distill.export import export  # noqa: E402
from outrider.distill.loss import Weights, distill_loss  # noqa: E402
from outrider.distill.optimizer import Muon, orthogonal  # noqa: E402
from outrider.distill.student import Quantizer, Student, spread_layers  # noqa: E402
from outrider.distill.train import Batches, TrainConfig, Trainer  # noqa: E402
from outrider.engines.base import Block  # noqa: E402
from outrider.engines.decoder import geometry_of  # noqa: E402
from outrider.engines.distilled import DistilledModel  # noqa: E402
from outrider.engines.draftfile import LayerPlan, bell_levels  # noqa: E402
from tiny import llama, qwen2, qwen3  # noqa: E402

SOFT = {"initializer_range": 0.08}
"""Weights that leave the target predictable enough to be learned in seconds."""


def teacher_of(model: Any) -> Teacher:
    return Teacher(model=model, end_ids=frozenset(), vocab=model.config.vocab_size)


def lessons_of(model: Any, count: int = 48) -> list[Lesson]:
    prompts = [[(i * 5 + j) % 60 for j in range(3 + i % 4)] for i in range(count)]
    heat = [(0.0, 0.5, 1.0)[i % 3] for i in range(count)]
    noise = torch.Generator().manual_seed(3)
    answers = sample(teacher_of(model), prompts, heat, 12, noise)
    texts = [
        Text(prompt=tuple(p), answer=tuple(a), temperature=t)
        for p, a, t in zip(prompts, answers, heat, strict=True)
    ]
    return teach(teacher_of(model), texts)


def student_of(model: Any, *, bits: int = 4, frozen: int = 0, support: Any = None) -> Student:
    geometry = geometry_of(model.config)
    if support is None:
        support = torch.arange(geometry.vocab)
    plans = [LayerPlan(source=i, bits=0 if i < frozen else bits) for i in range(geometry.layers)]
    quantizer = Quantizer(levels={bits: bell_levels(bits)}, group=8)
    return Student(
        geometry,
        model.state_dict(),
        plans,
        support,
        quantizer=quantizer,
        dtype=torch.float32,
        norm_scale=1.0,
    )


@pytest.mark.parametrize("make", [llama, qwen2, qwen3])
def test_an_untrained_student_of_all_layers_is_the_target(make: Any) -> None:
    model = make()
    student = student_of(model)
    ids = torch.tensor([[5, 9, 2, 40, 7]])
    ours = student.logits(student(ids)[0])
    theirs = model(input_ids=ids).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_lessons_hold_the_targets_own_distribution() -> None:
    model = llama()
    lesson = lessons_of(model, 5)[0]
    logits = model(input_ids=lesson.ids[None, :-1].long()).logits[0, lesson.prompt - 1 :]
    p = logits.softmax(-1).gather(1, lesson.top_ids.long())
    torch.testing.assert_close(p, lesson.top_p.float(), atol=2e-3, rtol=2e-3)


def test_batches_map_ids_to_columns_and_keep_to_their_budget() -> None:
    model = llama()
    lessons = lessons_of(model)
    support = torch.arange(0, 97, 2)
    batches = Batches(lessons, support, 97, budget=128)
    for chosen in batches.epoch(1, 0):
        batch = batches.build(chosen)
        assert batch.ids.numel() <= 128
        expected = [x for i in chosen for x in lessons[i].ids[lessons[i].prompt - 1 : -1].tolist()]
        assert batch.ids.view(-1)[batch.rows].tolist() == expected
        top = torch.cat([lessons[i].top_ids for i in chosen])
        inside = batch.teacher.p > 0
        assert torch.equal(support[batch.teacher.columns[inside]], top[inside].long())
        assert not (batch.teacher.p[top % 2 == 1]).any()
    whole = sorted(i for chosen in batches.epoch(1, 0) for i in chosen)
    assert whole == list(range(len(lessons)))
    assert batches.epoch(1, 0) == batches.epoch(1, 0) != batches.epoch(1, 1)


def test_training_raises_agreement() -> None:
    model = llama(num_hidden_layers=3)
    lessons = lessons_of(model)
    geometry = geometry_of(model.config)
    plans = [LayerPlan(source=0, bits=4)]
    student = Student(
        geometry,
        model.state_dict(),
        plans,
        torch.arange(97),
        quantizer=Quantizer(levels={4: bell_levels(4)}, group=8),
        dtype=torch.float32,
    )
    config = TrainConfig(steps=60, batch_tokens=256, learning_rate=1e-2, warmup=5)
    trainer = Trainer(student, lessons, 97, config)
    before = acceptance_of(student, lessons)
    trainer.run()
    assert acceptance_of(student, lessons) > before + 0.1


def acceptance_of(student: Student, lessons: list[Lesson]) -> float:
    """Mean sum of min(p, q) at temperature 1 over all lessons."""
    batches = Batches(lessons, student.support, 97, budget=100_000)
    batch = batches.build(range(len(lessons)))
    with torch.no_grad():
        rows = student(batch.ids).flatten(0, 1)[batch.rows]
        heat = torch.ones(len(rows), 1)
        weights = Weights(cross_entropy=1.0, rejection=0.0)
        _, scores = distill_loss(student.logits(rows), batch.teacher, weights, heat)
    return scores.acceptance


def test_resuming_gives_the_weights_of_an_uninterrupted_run(tmp_path: Path) -> None:
    model = llama(**SOFT)
    lessons = lessons_of(model, 20)
    config = TrainConfig(steps=12, batch_tokens=96, warmup=2, checkpoint_every=5)

    def fresh() -> Trainer:
        return Trainer(student_of(model, frozen=1), lessons, 97, config)

    whole = fresh()
    whole.run(tmp_path / "whole.safetensors")
    broken = fresh()
    for _ in range(5):
        broken.advance()
    broken.save(tmp_path / "part.safetensors")
    resumed = fresh()
    resumed.run(tmp_path / "part.safetensors")
    for (name, a), (_, b) in zip(
        whole.student.named_parameters(), resumed.student.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name
    assert resumed.tokens == whole.tokens


def test_a_checkpoint_of_another_student_is_refused(tmp_path: Path) -> None:
    model = llama(**SOFT)
    lessons, config = lessons_of(model, 6), TrainConfig(steps=2, batch_tokens=96)
    Trainer(student_of(model), lessons, 97, config).save(tmp_path / "a.safetensors")
    other = Trainer(student_of(llama(hidden_size=96)), lessons, 97, config)
    with pytest.raises(ValueError, match="another draft"):
        other.restore(tmp_path / "a.safetensors")


def test_what_runs_is_what_was_trained_quantised() -> None:
    model = qwen3(**SOFT)
    student = student_of(model, bits=3)
    noise = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for matrix in student.matrices():
            matrix += torch.randn(matrix.shape, generator=noise) * 0.02
    student.quantized = True
    made = export(student, target="tiny", fingerprint="0", provenance={})
    engine = DistilledModel(made, model.state_dict(), name="draft", compute="float32")
    ids = (5, 9, 2, 40, 7)
    rows = engine.forward([Block(slot=engine.open(), start=0, tokens=ids, rows=5)])[0]
    with torch.no_grad():
        expected = student.logits(student(torch.tensor([ids]))[0])
    torch.testing.assert_close(torch.from_numpy(rows), expected, atol=5e-3, rtol=1e-2)


def test_gradients_pass_straight_through_the_quantiser() -> None:
    student = student_of(llama(**SOFT))
    student.quantized = True
    student.logits(student(torch.tensor([[1, 2, 3]]))[0]).square().mean().backward()
    assert all(float(m.grad.abs().sum()) > 0 for m in student.matrices())


def test_orthogonal_updates() -> None:
    for shape in ((12, 30), (30, 12)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(4))
        values = torch.linalg.svdvals(orthogonal(matrix))
        assert 0.5 < float(values.min()) <= float(values.max()) < 1.3
    weight = torch.nn.Parameter(torch.zeros(4, 4))
    weight.grad = torch.eye(4)
    Muon([weight], lr=0.1, dtype=torch.float32).step()
    assert float(weight.detach().diagonal().max()) < -0.02


def test_layers_come_from_both_ends() -> None:
    assert spread_layers(30, 5) == (0, 1, 2, 28, 29)
    assert spread_layers(3, 3) == (0, 1, 2)
    with pytest.raises(ValueError):
        spread_layers(3, 4)
    assert dataclasses.is_dataclass(TrainConfig)
