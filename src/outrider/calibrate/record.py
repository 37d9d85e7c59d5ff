"""Records traces: the target answers, then both models are read at every position of the answer.

The answer is made with the draft's help, which changes nothing in it (coupled rule) and saves
time. Then target and draft are fed the finished text in one go. A deterministic target gives the
same bits as while decoding, which `record` checks: drawing again from its rows must give the
answer again. With other engines a near-tie may fall the other way; such positions keep the
token of the answer.
"""

from __future__ import annotations

import hashlib
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import version

import numpy as np
import numpy.typing as npt

from outrider.calibrate.trace import Answer, TraceHeader
from outrider.control.base import CalibrationError
from outrider.control.calibration import ModelFacts
from outrider.core import rng
from outrider.core.divergence import Divergence, compare
from outrider.core.rng import Purpose
from outrider.core.sampling import Distribution, History, SamplingPipeline
from outrider.core.tokens import SamplingParams
from outrider.engines.base import Block, LanguageModel, ModelInfo
from outrider.engines.drafters import ModelDrafter
from outrider.engines.loaded import Loaded
from outrider.engines.measure import row_costs, row_seconds
from outrider.runtime.local import GenerationRequest, LocalGenerator

Told = Callable[[int, int], None]
"""Called with the number of answers made and the number wanted."""
FloatRows = npt.NDArray[np.float32]


def facts(info: ModelInfo) -> ModelFacts:
    """What a calibration remembers of a model."""
    return ModelFacts(
        name=info.name,
        vocabulary=info.fingerprint,
        dtype=info.dtype,
        parameters=info.parameters,
    )


def record(
    target: Loaded,
    draft: LanguageModel,
    questions: Sequence[tuple[str, str]],
    *,
    temperature: float,
    max_tokens: int,
    seed: int,
    told: Told = lambda _done, _whole: None,
) -> tuple[TraceHeader, list[Answer]]:
    """Answer every (task, prompt) and read both models along it. Answers of fewer than two
    tokens teach nothing and are left out."""
    for model in (target.model, draft):
        row_seconds(model, 1)  # the first forwards of a process are slow and not counted
    header = TraceHeader(
        outrider=version("outrider"),
        target=facts(target.model.info),
        draft=facts(draft.info),
        temperature=temperature,
        seed=seed,
        max_tokens=max_tokens,
        data=dict(Counter(task for task, _ in questions)),
        data_digest=hashlib.sha256("\0".join(p for _, p in questions).encode()).hexdigest(),
        draft_seconds=statistics.median(row_seconds(draft, 1, repeats=9)),
        verify_seconds=row_costs(target.model),
    )
    drafter = ModelDrafter(draft.info.name, model=draft)
    generator = LocalGenerator(target.model, target.tokenizer, drafter)
    answers = []
    for number, (task, text) in enumerate(questions):
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed + number)
        prompt = tuple(target.tokenizer.chat([{"role": "user", "content": text}]))
        made = generator.generate(GenerationRequest(prompt_ids=prompt, params=params))
        if made.completion_tokens > 1:
            answers.append(_read(task, prompt, made.token_ids, params, (target.model, draft)))
        told(number + 1, len(questions))
    generator.close()
    return header, answers


def _read(
    task: str,
    prompt: tuple[int, ...],
    output: tuple[int, ...],
    params: SamplingParams,
    models: tuple[LanguageModel, LanguageModel],
) -> Answer:
    columns: dict[str, list[float]] = {"jsd": [], "tv": [], "p": [], "q": []}
    drafts = []
    p_rows, q_rows = (_distributions(model, prompt, output, params) for model in models)
    for i, token in enumerate(output):
        p, q = p_rows(i), q_rows(i)
        draw_key = rng.key(params.seed, Purpose.TOKEN, len(prompt) + i)
        if models[0].info.deterministic and p.draw(draw_key) != token:
            raise CalibrationError(
                f"{models[0].info.name} claims to be deterministic, but draws another token than "
                f"its own answer holds at position {len(prompt) + i}: use --no-deterministic"
            )
        draft = q.draw(draw_key)
        drafts.append(draft)
        distance = compare(p, q)
        columns["jsd"].append(round(distance.value(Divergence.JSD), 7))
        columns["tv"].append(round(distance.value(Divergence.TV), 7))
        columns["p"].append(round(p.prob(draft), 7))
        columns["q"].append(round(q.prob(draft), 7))
    return Answer(task=task, tokens=list(output), drafts=drafts, **columns)


def _distributions(
    model: LanguageModel, prompt: tuple[int, ...], output: tuple[int, ...], params: SamplingParams
) -> Callable[[int], Distribution]:
    """The model's distribution behind the prompt and output[:i], as a function of i."""
    slot = model.open()
    try:
        fed = prompt + output[:-1]
        block = Block(slot=slot, start=0, tokens=fed, rows=len(output))
        rows: FloatRows = model.forward([block])[0]
    finally:
        model.close(slot)
    pipeline = SamplingPipeline(params, vocab_size=model.info.vocab_size, support=model.support)
    history = History(prompt)
    return lambda i: pipeline.distribution(rows[i], history)
