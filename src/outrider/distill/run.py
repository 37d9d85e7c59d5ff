"""`distill(config)`: from a target to the file of a draft, in order, resumable.

The work folder holds what is made on the way; starting again with the same folder and settings
goes on where the last run stopped:

    settings.json           what the folder was made for; another one is refused
    lessons-0000.safetensors ...  texts of the target with its distribution
    checkpoint.safetensors  the training
    draft.safetensors       the result
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from outrider.distill.corpus import (
    CorpusConfig,
    Lesson,
    Teacher,
    Text,
    generate_shard,
    load_lessons,
    read_texts,
    save_lessons,
    teach,
)
from outrider.distill.evaluate import (
    Acceptance,
    EvaluateConfig,
    acceptance,
    answer,
    read_tasks,
    seconds_per_token,
)
from outrider.distill.export import export
from outrider.distill.prompts import PromptSource, read_prompts
from outrider.distill.student import Quantizer, Student, spread_layers
from outrider.distill.train import TrainConfig, Trainer, TrainProgress
from outrider.engines import draftfile
from outrider.engines.base import EngineError
from outrider.engines.decoder import geometry_of, target_fingerprint
from outrider.engines.distilled import DistilledModel
from outrider.engines.draftfile import LayerPlan, bell_levels

TEXTS_PER_SHARD: Final = 256
MAX_GROUP: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The target, as distillation needs it: a transformers model and its words."""

    name: str
    model: Any
    """A ...ForCausalLM of a supported family."""
    encode: Callable[[str], list[int]]
    """A user's prompt to ids, chat template included."""
    decode: Callable[[list[int]], str]
    end_ids: frozenset[int]
    vocab: int
    """Ids the tokenizer has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillConfig:
    work: Path
    """Folder for everything made on the way; created if it is not there."""
    output: Path | None = None
    """Where the draft goes; None: `draft.safetensors` in the work folder."""
    prompt_files: tuple[Path, ...] = ()
    """JSONL with prompts, mixed with our own templates."""
    corpus_files: tuple[Path, ...] = ()
    """Ready-made texts of the target (`corpus.read_texts`), used before any are generated."""
    held_out: tuple[Path, ...] = ()
    """JSONL with prompts for the evaluation only; without any, fresh template prompts."""
    corpus_tokens: int = 1_000_000
    """Answer tokens to train on, ready-made and generated together."""
    layers: int = 8
    frozen: int = 0
    """First layers of the draft that stay the target's own."""
    bits: int = 3
    """Of a stored difference. At 3 a layer of the built-in target takes 1.4 MB."""
    support: int = 16_384
    """Size of the draft's output vocabulary."""
    steps: int = 1500
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    train: TrainConfig | None = None
    """None: the defaults with `steps` and `seed`."""
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    float32: bool = False
    """Train in float32: for CPUs without bfloat16 arithmetic, and tiny models."""
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.corpus_tokens, self.layers, self.support, self.steps) < 1:
            raise ValueError("corpus_tokens, layers, support and steps must be at least 1")
        if not 0 <= self.frozen < self.layers:
            raise ValueError(
                f"frozen={self.frozen} leaves nothing of {self.layers} layers to train"
            )
        if not 2 <= self.bits <= 8:
            raise ValueError(f"bits must be 2 to 8, got {self.bits}")


def quick(work: Path, **changes: Any) -> DistillConfig:
    """Settings that end within a minute on a tiny model: to try the whole path, not to be good."""
    base = DistillConfig(
        work=work,
        corpus_tokens=1500,
        layers=2,
        support=256,
        steps=30,
        bits=4,
        corpus=CorpusConfig(answers_per_shard=32, batch=32, max_new_tokens=24),
        evaluate=EvaluateConfig(prompts_per_task=4, max_new_tokens=16),
        float32=True,
    )
    return dataclasses.replace(base, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run is."""

    stage: str
    """'corpus', 'train', 'evaluate'."""
    done: int
    whole: int
    note: str = ""


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillReport:
    """What came out."""

    path: Path
    bytes: int
    corpus_tokens: int
    steps: int
    seconds: float
    """Of this call; stages found finished cost nothing."""
    before: tuple[Acceptance, ...]
    """Of the untrained layers, by task; the mean last."""
    after: tuple[Acceptance, ...]
    """Of the draft as stored and run."""
    seconds_per_token_before: float
    """Of the layers with bfloat16 products."""
    seconds_per_token_after: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**dataclasses.asdict(self), "path": str(self.path)}


def distill(
    target: Target, config: DistillConfig, on_progress: OnProgress = lambda _progress: None
) -> DistillReport:
    """Make a draft for `target`. Raises EngineError with the reason where that cannot be."""
    begin = time.monotonic()
    geometry = geometry_of(target.model.config)
    if config.layers > geometry.layers:
        raise EngineError(f"{target.name} has {geometry.layers} layers, not {config.layers}")
    state = target.model.state_dict()
    fingerprint = target_fingerprint(state, geometry)
    _claim(config, fingerprint)
    teacher = Teacher(model=target.model.eval(), end_ids=target.end_ids, vocab=target.vocab)
    lessons = _lessons(target, teacher, config, on_progress)
    support = rank_support(lessons, config.support, target.vocab, target.end_ids)
    student = _student(geometry, state, support, config)
    wanted = {"target": target.name, "fingerprint": fingerprint}
    before = export(student, **wanted, provenance={})
    settings = config.train or TrainConfig(steps=config.steps, seed=config.seed)
    trainer = Trainer(student, lessons, geometry.vocab, settings)

    def on_step(step: TrainProgress) -> None:
        note = f"acceptance {step.scores.acceptance:.3f}"
        on_progress(Progress(stage="train", done=step.step, whole=step.steps, note=note))

    trainer.run(config.work / "checkpoint.safetensors", on_step)
    samples = answer(
        teacher,
        _tasks(config),
        target.encode,
        config.evaluate,
        _counter(on_progress, "evaluate", 0),
    )
    made = export(student, **wanted, provenance={})
    engines = [_engine(draft, state, target) for draft in (before, made)]
    was, now = (tuple(acceptance(engine, teacher, samples)) for engine in engines)
    plain = _engine(before, state, target, "float32" if config.float32 else "bfloat16")
    report_costs = (seconds_per_token(plain), seconds_per_token(engines[1]))
    path = config.output or config.work / "draft.safetensors"
    draft = export(
        student,
        **wanted,
        provenance={
            "seed": config.seed,
            "corpus_tokens": sum(len(x.top_ids) for x in lessons),
            "prompt_files": [p.name for p in config.prompt_files],
            "corpus_files": [p.name for p in config.corpus_files],
            "held_out_files": [p.name for p in config.held_out],
            "steps": trainer.step,
            "tokens_seen": trainer.tokens,
            "train": dataclasses.asdict(settings),
            "acceptance": [row.as_dict() for row in now],
        },
    )
    draftfile.save(path, draft)
    return DistillReport(
        path=path,
        bytes=path.stat().st_size,
        corpus_tokens=sum(len(x.top_ids) for x in lessons),
        steps=trainer.step,
        seconds=time.monotonic() - begin,
        before=was,
        after=now,
        seconds_per_token_before=report_costs[0],
        seconds_per_token_after=report_costs[1],
    )


def rank_support(
    lessons: Sequence[Lesson], size: int, vocab: int, end_ids: frozenset[int]
) -> Tensor:
    """The ids of the output head, ascending: the most frequent in the target's text. End ids
    always belong to it, and among unseen ids the lower come first, since tokenizers number
    their ids by frequency."""
    counts: Counter[int] = Counter()
    for lesson in lessons:
        counts.update(lesson.ids[lesson.prompt :].tolist())
    for token in end_ids:
        counts[token] += 1 << 40
    order = sorted(range(vocab), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(order[: min(size, vocab)]))


def _student(geometry: Any, state: Any, support: Tensor, config: DistillConfig) -> Student:
    sources = spread_layers(geometry.layers, config.layers)
    plans = [
        LayerPlan(source=source, bits=0 if place < config.frozen else config.bits)
        for place, source in enumerate(sources)
    ]
    widths = (geometry.hidden, geometry.intermediate, geometry.heads * geometry.head_dim)
    group = next(g for g in (MAX_GROUP, 32, 16, 8, 4, 2, 1) if not any(w % g for w in widths))
    return Student(
        geometry,
        state,
        plans,
        support,
        quantizer=Quantizer(levels={config.bits: bell_levels(config.bits)}, group=group),
        dtype=torch.float32 if config.float32 else torch.bfloat16,
    ).to(state["model.norm.weight"].device)


def _engine(
    draft: draftfile.DraftFile,
    state: Any,
    target: Target,
    compute: str = "auto",
) -> DistilledModel:
    return DistilledModel(
        draft,
        state,
        name="draft",
        vocab_size=target.vocab,
        compute=compute,
        max_slots=1,
    )


def _lessons(
    target: Target, teacher: Teacher, config: DistillConfig, on_progress: OnProgress
) -> list[Lesson]:
    """All shards, made where missing, until there are tokens enough."""
    ready = [text for path in config.corpus_files for text in read_texts(path)]
    source = PromptSource(files=read_prompts(config.prompt_files))
    lessons: list[Lesson] = []
    tokens = index = 0
    while tokens < config.corpus_tokens:
        path = config.work / f"lessons-{index:04d}.safetensors"
        if not path.is_file():
            tick = _counter(on_progress, "corpus", tokens, config.corpus_tokens)
            given = ready[index * TEXTS_PER_SHARD : (index + 1) * TEXTS_PER_SHARD]
            passages = [target.decode(x.ids[x.prompt :].tolist()) for x in lessons[-200:]]
            texts: Sequence[Text] = given or generate_shard(
                teacher,
                source,
                target.encode,
                target.decode,
                index,
                dataclasses.replace(config.corpus, seed=config.seed),
                passages,
                tick,
            )
            save_lessons(path, teach(teacher, texts))
        found = load_lessons(path)
        lessons += found
        tokens += sum(len(x.top_ids) for x in found)
        index += 1
        done = min(tokens, config.corpus_tokens)
        on_progress(Progress(stage="corpus", done=done, whole=config.corpus_tokens))
    return lessons


def _counter(
    on_progress: OnProgress, stage: str, start: int, whole: int = 0
) -> Callable[[int], None]:
    """A callback that adds up amounts and reports the sum."""
    done = [start]

    def advance(amount: int) -> None:
        done[0] += amount
        on_progress(Progress(stage=stage, done=done[0], whole=max(whole, done[0])))

    return advance


def _tasks(config: DistillConfig) -> dict[str, list[str]]:
    """Held-out prompts by task; of our own templates with a seed no shard uses, if none given."""
    if config.held_out:
        return read_tasks(config.held_out)
    draw = random.Random(f"{config.seed}/held out")
    source = PromptSource()
    return {"templates": [source.draw(draw) for _ in range(config.evaluate.prompts_per_task)]}


def _claim(config: DistillConfig, fingerprint: str) -> None:
    """Refuse a work folder that belongs to another target or other settings."""
    config.work.mkdir(parents=True, exist_ok=True)
    facts = {
        name: repr(getattr(config, name))
        for name in ("layers", "frozen", "bits", "support", "corpus", "train", "seed", "steps")
    }
    facts["target"] = fingerprint
    facts["files"] = hashlib.sha256(
        b"".join(p.read_bytes() for p in (*config.prompt_files, *config.corpus_files))
    ).hexdigest()
    path = config.work / "settings.json"
    if path.is_file():
        other = json.loads(path.read_text(encoding="utf-8"))
        changed = sorted(name for name in facts if other.get(name) != facts[name])
        if changed:
            raise EngineError(
                f"{config.work} was begun with other settings ({', '.join(changed)}); "
                "use another work folder or delete this one"
            )
        return
    path.write_text(json.dumps(facts, indent=1), encoding="utf-8")
