"""What the target answers, and its own distribution at every position of the answers.

Two steps, kept apart because the first is several times dearer a token than the second:

    generate   sample answers in batches                     texts-0003.safetensors
    teach      one causal pass over finished texts, top-K    teacher-0003.safetensors

Both go shard by shard; a finished shard is never made again, so an interrupted run goes on where
it stopped. Shard i draws from (seed, i) only: the same seed gives the same prompts, and on the
same machine the same answers, in whatever runs they were made. Ready-made texts (a JSONL of ids)
can stand in for the first step.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.distill.prompts import PromptSource

TOP_K: Final = 64
"""Ids kept a position: 95 % of the built-in target's mass at temperature 1, 99 % below .7."""
PASSAGE_TOKENS: Final = 60
"""Answers from this length on serve as passages for later prompts."""
_TEACH_TOKENS: Final = 4096
"""Padded tokens of one teacher batch; bounds the hidden states held at once."""

Encode = Callable[[str], list[int]]
"""A user's prompt to ids, chat template included."""
Decode = Callable[[list[int]], str]
Advance = Callable[[int], None]
"""Called with the number of tokens just finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One answer of the target."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """A causal language model of transformers, as the corpus needs it."""

    model: Any
    end_ids: frozenset[int]
    vocab: int
    """Ids the tokenizer has; columns beyond it are padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """A text with what the target thought while writing it."""

    ids: Tensor
    """int32 [prompt + answer]."""
    prompt: int
    """Length of the prompt."""
    temperature: float
    top_ids: Tensor
    """int32 [answer, K]: the likeliest ids before each token of the answer."""
    top_p: Tensor
    """float16 [answer, K], at temperature 1, normalised over the whole vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusConfig:
    answers_per_shard: int = 256
    batch: int = 64
    """Rows sampled together; weights are read once for all of them."""
    max_new_tokens: int = 160
    max_prompt_tokens: int = 600
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.3, 0.6, 0.8, 1.0)
    """Drawn from with equal weight: users decode greedily more often than at 1."""
    seed: int = 0


# ----------------------------------------------------------------------------- generate


def generate_shard(
    teacher: Teacher,
    source: PromptSource,
    encode: Encode,
    decode: Decode,
    index: int,
    config: CorpusConfig,
    passages: Sequence[str] = (),
    advance: Advance = lambda _tokens: None,
) -> list[Text]:
    """The texts of shard `index`. `passages`: earlier answers that prompts may quote."""
    draw = random.Random(f"{config.seed}/{index}")
    noise = torch.Generator().manual_seed(draw.getrandbits(63))
    texts: list[Text] = []
    while len(texts) < config.answers_per_shard:
        rows = min(config.batch, config.answers_per_shard - len(texts))
        prompts = [_prompt(source, encode, draw, passages, config) for _ in range(rows)]
        temperatures = [draw.choice(config.temperatures) for _ in range(rows)]
        answers = sample(teacher, prompts, temperatures, config.max_new_tokens, noise)
        for prompt, answer, temperature in zip(prompts, answers, temperatures, strict=True):
            texts.append(Text(prompt=tuple(prompt), answer=tuple(answer), temperature=temperature))
        advance(sum(map(len, answers)))
        long = [answer for answer in answers if len(answer) >= PASSAGE_TOKENS]
        passages = (*passages, *(decode(answer) for answer in long))
    return texts


def _prompt(
    source: PromptSource,
    encode: Encode,
    draw: random.Random,
    passages: Sequence[str],
    config: CorpusConfig,
) -> list[int]:
    for _ in range(20):
        ids = encode(source.draw(draw, passages))
        if 0 < len(ids) <= config.max_prompt_tokens:
            return ids
    return ids[-config.max_prompt_tokens :]


@torch.inference_mode()
def sample(
    teacher: Teacher,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    max_new_tokens: int,
    noise: torch.Generator,
) -> list[list[int]]:
    """Answers of the target, an end id included where it came; the whole vocabulary is open.

    Rows are padded on the left, so that all of them append at the same place; finished rows
    go on (what they say is dropped), which keeps the cache in one piece.
    """
    from transformers.cache_utils import DynamicCache

    from outrider.engines.hf_support import cache_keyword

    model, device = teacher.model, teacher.model.device
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros(len(prompts), width + max_new_tokens, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    ids, mask = ids.to(device), mask.to(device)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    keyword = {cache_keyword(model): DynamicCache()}
    heat = torch.tensor(temperatures)
    answers: list[list[int]] = [[] for _ in prompts]
    live = set(range(len(prompts)))
    for step in range(max_new_tokens):
        start = 0 if step == 0 else width + step - 1
        logits = model(
            input_ids=ids,
            attention_mask=mask[:, : width + step],
            position_ids=positions[:, start : width + step],
            use_cache=True,
            logits_to_keep=1,
            **keyword,
        ).logits[:, -1, : teacher.vocab]
        chosen = _draw(logits.float().cpu(), heat, noise)
        for row in sorted(live):
            answers[row].append(int(chosen[row]))
            if answers[row][-1] in teacher.end_ids:
                live.discard(row)
        if not live:
            break
        ids = chosen[:, None].to(device)
    return answers


def _draw(logits: Tensor, temperatures: Tensor, noise: torch.Generator) -> Tensor:
    """One id a row by the inverse of the cumulative sum; temperature 0: the likeliest."""
    best = logits.argmax(-1)
    warm = temperatures > 0
    if not warm.any():
        return best
    hot = logits[warm] / temperatures[warm, None]
    mass = (hot - hot.amax(-1, keepdim=True)).exp().cumsum(-1)
    marks = torch.rand(len(mass), 1, generator=noise) * mass[:, -1:]
    best[warm] = torch.searchsorted(mass, marks)[:, 0].clamp_max(logits.shape[1] - 1)
    return best


# -------------------------------------------------------------------------------- teach


@torch.inference_mode()
def teach(
    teacher: Teacher, texts: Sequence[Text], advance: Advance = lambda _tokens: None
) -> list[Lesson]:
    """The target's top-K before every token of every answer; texts without an answer go."""
    order = sorted(
        (text for text in texts if text.answer), key=lambda t: len(t.prompt) + len(t.answer)
    )
    lessons: list[Lesson] = []
    for batch in _batches(order):
        width = max(len(text.prompt) + len(text.answer) for text in batch) - 1
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        for row, text in enumerate(batch):
            known = torch.tensor((text.prompt + text.answer)[:-1])
            ids[row, : len(known)] = known
        # Padding stands on the right, so causal attention alone keeps it out.
        hidden = teacher.model.model(input_ids=ids.to(teacher.model.device)).last_hidden_state
        for row, text in enumerate(batch):
            first = len(text.prompt) - 1
            lessons.append(_lesson(teacher, text, hidden[row, first : first + len(text.answer)]))
            advance(len(text.answer))
    return lessons


def _lesson(teacher: Teacher, text: Text, hidden: Tensor) -> Lesson:
    """hidden [answer, hidden size], behind the final norm."""
    logits = teacher.model.lm_head(hidden)[:, : teacher.vocab].float()
    top, ids = logits.topk(min(TOP_K, teacher.vocab), -1)
    p = (top - torch.logsumexp(logits, -1, keepdim=True)).exp()
    return Lesson(
        ids=torch.tensor(text.prompt + text.answer, dtype=torch.int32),
        prompt=len(text.prompt),
        temperature=text.temperature,
        top_ids=ids.to(torch.int32).cpu(),
        top_p=p.half().cpu(),
    )


def _batches(texts: Sequence[Text]) -> Iterator[list[Text]]:
    """Runs of neighbours (they have similar lengths) of bounded padded size."""
    batch: list[Text] = []
    for text in texts:
        width = len(text.prompt) + len(text.answer)
        if batch and width * (len(batch) + 1) > _TEACH_TOKENS:
            yield batch
            batch = []
        batch.append(text)
    if batch:
        yield batch


# -------------------------------------------------------------------------------- files


def read_texts(path: Path) -> list[Text]:
    """Ready-made texts: JSONL (plain or .gz), one object a line with the keys `p` (prompt ids),
    `y` (answer ids) and `t` (temperature)."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    try:
        return [
            Text(prompt=tuple(row["p"]), answer=tuple(row["y"]), temperature=float(row["t"]))
            for row in rows
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path.name}: expected objects with p, y and t ({error})") from error


def save_lessons(path: Path, lessons: Sequence[Lesson]) -> None:
    """One shard; a reader never sees half a file."""
    lengths = [[len(x.ids), x.prompt] for x in lessons]
    tensors = {
        "ids": torch.cat([x.ids for x in lessons]),
        "lengths": torch.tensor(lengths, dtype=torch.int32),
        "temperatures": torch.tensor([x.temperature for x in lessons]),
        "top_ids": torch.cat([x.top_ids for x in lessons]),
        "top_p": torch.cat([x.top_p for x in lessons]),
    }
    scratch = path.with_suffix(".part")
    save_file(tensors, scratch)
    scratch.replace(path)


def load_lessons(path: Path) -> list[Lesson]:
    shard = load_file(path)
    lessons: list[Lesson] = []
    token = answer = 0
    rows = zip(shard["lengths"].tolist(), shard["temperatures"].tolist(), strict=True)
    for (length, prompt), temperature in rows:
        size = length - prompt
        lessons.append(
            Lesson(
                ids=shard["ids"][token : token + length],
                prompt=prompt,
                temperature=temperature,
                top_ids=shard["top_ids"][answer : answer + size],
                top_p=shard["top_p"][answer : answer + size],
            )
        )
        token, answer = token + length, answer + size
    return lessons
