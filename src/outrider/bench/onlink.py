"""Cells of an experiment on a real pair: a verifier in a process of its own, a shaped link."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from outrider.bench.experiment import Experiment, Pair, Point
from outrider.bench.journal import Answer, Cell, Key
from outrider.bench.live import wishes_of
from outrider.bench.questions import Question, load
from outrider.bench.runner import marks
from outrider.bench.schedules import WARM_UP_TOKENS
from outrider.bench.scoring import score
from outrider.bench.validation import Case, Meter, standing, twin, works_beside
from outrider.core.link import Link
from outrider.core.tokens import Rule, SamplingParams
from outrider.engines.base import EngineError
from outrider.engines.drafters import Drafter
from outrider.engines.load import load_drafter, load_vocabulary
from outrider.runtime.cores import cores
from outrider.runtime.edge import EdgeRuntime
from outrider.runtime.edgeconfig import EdgeConfig
from outrider.runtime.edgerequest import EdgeRequest
from outrider.runtime.local import GenerationRequest, GenerationResult, LocalGenerator
from outrider.runtime.process import CloudProcess
from outrider.session.generation import Step
from outrider.session.schedules import Schedule

CALIBRATION_BLOCKS: Final = 5
"""Behind which an answer that only measures is left: some of each kind, and short beside what is
judged."""
OTHER_SEEDS: Final = 1 << 32
"""Seeds of those begin here."""
Steps = list[tuple[float, Step]]


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What answers questions at one point."""

    pair: Pair
    tokenizer: Any
    runtime: EdgeRuntime
    alone: LocalGenerator


@dataclass(frozen=True, slots=True)
class _Server:
    """A verifier that runs, and what the edge loaded beside it."""

    models: tuple[str, str, float]
    cloud: CloudProcess
    vocabulary: Any
    drafter: Any


class Live:
    """Answers through a verifier; a cell is one answer."""

    def __init__(self, experiment: Experiment, *, run_code: bool, pins: Mapping[str, str]) -> None:
        self._experiment = experiment
        self._pins = pins
        self._run_code = run_code
        self._questions: dict[tuple[str, int], list[Question]] = {}
        self._server: _Server | None = None

    def _asked(self, pair: Pair, data: str) -> list[Question]:
        key = (data, pair.prompts)
        if key not in self._questions:
            self._questions[key] = load(data, pair.prompts, self._pins)
        return self._questions[key]

    def keys(self, point: Point) -> list[Key]:
        assert point.pair is not None
        return [
            Key(point=point.name, data=data, item=question.name, arm=arm, seed=seed)
            for seed in self._experiment.seeds
            for data in point.pair.data
            for question in self._asked(point.pair, data)
            for arm in self._experiment.arms
        ]

    async def measure(self, point: Point, keys: Sequence[Key]) -> AsyncIterator[Cell]:
        pair, link = point.pair, point.link
        assert pair is not None
        assert link is not None
        server = await self._served(pair)
        async with EdgeRuntime(
            EdgeConfig(url=server.cloud.url, link=link),
            server.vocabulary.tokenizer,
            server.drafter,
            context_length=server.vocabulary.model.info.context_length,
        ) as runtime:
            alone = LocalGenerator(server.drafter.model, server.vocabulary.tokenizer)
            loaded = _Loaded(pair, server.vocabulary.tokenizer, runtime, alone)
            async for cell in self._cells(loaded, keys, server):
                yield cell

    async def close(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.cloud.stop()

    async def _served(self, pair: Pair) -> _Server:
        """The verifier and the draft of a pair: kept from point to point while they are the same,
        because loading them takes longer than many a cell."""
        models = (pair.target, pair.draft, pair.pace_ms)
        if self._server is not None and self._server.models == models:
            return self._server
        await self.close()
        flags = ["--model", pair.target, "--draft", pair.draft, "--threads", "1"]
        cloud = CloudProcess([*flags, "--target-pace", str(pair.pace_ms)], core=cores().cloud)
        await cloud.start()
        try:
            cores().pin_edge()
            vocabulary = load_vocabulary(pair.target)
            drafter = load_drafter(pair.draft, vocabulary, threads=1)
            if getattr(drafter, "model", None) is None:
                raise EngineError(
                    f"live.draft must be a model, such as small, and not {pair.draft}: what the "
                    "edge does alone is in every table"
                )
        except BaseException:
            await cloud.stop()
            raise
        self._server = _Server(models, cloud, vocabulary, drafter)
        return self._server

    async def _cells(
        self,
        loaded: _Loaded,
        keys: Sequence[Key],
        server: _Server,  # noqa: ARG002
    ) -> AsyncIterator[Cell]:
        """One after the other."""
        await self._warm_up(loaded, keys)
        known: set[tuple[str, str]] = set()
        for key in keys:
            if (key.data, key.item) not in known:
                known.add((key.data, key.item))
                await self._show(loaded, key)
            cell, _, _ = await self._cell(loaded, key)
            yield cell

    async def _warm_up(self, loaded: _Loaded, keys: Sequence[Key]) -> None:
        """Short answers of every arm, not measured (field case 39)."""
        question = self._asked(loaded.pair, keys[0].data)[0]
        for arm in dict.fromkeys(key.arm for key in keys):
            for _ in range(self._experiment.warm_up):
                params = SamplingParams(seed=0, max_tokens=WARM_UP_TOKENS, temperature=0.0)
                await _answer(loaded, arm, _ids(loaded, question), params)

    async def _show(self, loaded: _Loaded, key: Key) -> None:
        """Let the verifier see a question. It keeps prompts, so the arm that came first would pay
        alone for what the others then find."""
        question = self._question(loaded.pair, key)
        params = SamplingParams(seed=0, max_tokens=1, temperature=0.0)
        await _answer(loaded, Schedule.CLOUD_ONLY, _ids(loaded, question), params)

    def _question(self, pair: Pair, key: Key) -> Question:
        return next(q for q in self._asked(pair, key.data) if q.name == key.item)

    async def _cell(self, loaded: _Loaded, key: Key) -> tuple[Cell, GenerationResult, Steps]:
        question = self._question(loaded.pair, key)
        params = self._params(loaded.pair, key)
        before, began = loaded.runtime.link_use, time.monotonic()
        result, steps = await _answer(loaded, key.arm, _ids(loaded, question), params)
        seconds, after = time.monotonic() - began, loaded.runtime.link_use
        found = score(question, result.text, run_code=self._run_code)
        cell = Cell(
            key=key,
            answers=(replace(answer_of(result), score=found),),
            forwards=0 if key.arm == Schedule.EDGE_ONLY else result.target_forwards,
            busy=None if key.arm == Schedule.EDGE_ONLY else _busy(steps),
            seconds=seconds,
            bytes_up=after.payload_up - before.payload_up,
            bytes_down=after.payload_down - before.payload_down,
            warm_up=self._experiment.warm_up,
            marks=marks(steps),
        )
        return cell, result, steps

    def _params(self, pair: Pair, key: Key) -> SamplingParams:
        return SamplingParams(
            temperature=pair.temperature, seed=key.seed, max_tokens=pair.max_tokens
        )


def _busy(steps: Steps) -> float:
    return sum(step.round.step_s for _, step in steps if step.round is not None)


def _ids(loaded: _Loaded, question: Question) -> tuple[int, ...]:
    if question.raw:
        return tuple(loaded.tokenizer.encode(question.prompt))
    return tuple(loaded.tokenizer.chat([{"role": "user", "content": question.prompt}]))


async def _answer(
    loaded: _Loaded,
    arm: str,
    prompt: tuple[int, ...],
    params: SamplingParams,
    *,
    blocks: int | None = None,
) -> tuple[GenerationResult, Steps]:
    """`blocks`: leave it behind so many."""
    if arm == Schedule.EDGE_ONLY:
        request = GenerationRequest(prompt_ids=prompt, params=params, draft_length=0)
        return await asyncio.to_thread(loaded.alone.generate, request), []
    wishes = wishes_of(arm)
    if wishes.get("controller") == "credit":
        wishes["calibration"] = loaded.pair.calibration
    stream = await loaded.runtime.stream(
        EdgeRequest(
            prompt_ids=prompt,
            params=params,
            draft_length=loaded.pair.draft_length,
            window=loaded.pair.window,
            **{"rule": Rule.COUPLED, **wishes},
        )
    )
    began, steps = time.monotonic(), []
    async for step in stream:
        steps.append((time.monotonic() - began, step))
        if len(steps) == blocks:
            break
    stream.close()  # behind its end, this does nothing
    return stream.result.generation, steps


def answer_of(result: GenerationResult) -> Answer:
    """What is kept of an answer: tokens and not blocks are counted (field case 38)."""
    timing = result.timing
    rest = timing.total_s - timing.ttft_s
    later = round(rest / timing.tpot_s) if timing.tpot_s else 0
    ids = " ".join(map(str, result.token_ids)).encode()
    return Answer(
        tokens=result.completion_tokens,
        first=timing.ttft_s,
        rest=rest,
        later=later,
        finish=result.finish_reason.value if result.finish_reason else "",
        drafted=result.counters.drafted,
        accepted=result.counters.accepted,
        relaxed=result.relaxed.relaxed if result.relaxed else 0,
        digest=hashlib.blake2b(ids, digest_size=8).hexdigest(),
    )


class Validation(Live):
    """Live answers, each with its twin in the simulator (bench.validation)."""

    def __init__(self, experiment: Experiment, *, pins: Mapping[str, str]) -> None:
        super().__init__(experiment, run_code=False, pins=pins)
        self._standing: dict[tuple[str, str, int, Rule], tuple[bool, ...]] = {}

    def _params(self, pair: Pair, key: Key) -> SamplingParams:
        """To the limit, so that live and simulated answers are equally long."""
        return replace(super()._params(pair, key), ignore_eos=True)

    async def _cells(
        self, loaded: _Loaded, keys: Sequence[Key], server: _Server
    ) -> AsyncIterator[Cell]:
        pair, link = loaded.pair, self._link(keys[0].point)
        # A draft engine of its own: a session that ends is closed behind the answer.
        drafter = load_drafter(pair.draft, server.vocabulary, threads=1)
        assert drafter is not None, "the edge's own was there"
        async with EdgeRuntime(
            EdgeConfig(url=server.cloud.url),
            loaded.tokenizer,
            drafter,
            context_length=loaded.runtime.context_length,
        ) as direct:
            meter, near = Meter(), replace(loaded, runtime=direct)
            await self._warm_up(loaded, keys)
            kinds = _kinds(pair)
            for kind in kinds:
                await self._calibrate(near, meter, keys[0], kind)
            known: set[tuple[str, str]] = set()
            turns = itertools.cycle(kinds)
            for key in keys:
                if (key.data, key.item) not in known:
                    known.add((key.data, key.item))
                    await self._show(loaded, key)
                await self._calibrate(near, meter, key, next(turns))
                with _jobs_of(loaded.runtime) as jobs:
                    cell, result, steps = await self._cell(loaded, key)
                case = await self._case(loaded, key, link, drafter, result)
                costs = meter.costs(beside=works_beside(case.schedule))
                own = costs.own(steps, jobs, case.prompt)
                yield replace(cell, twin=await asyncio.to_thread(twin, case, costs, own))

    def _link(self, point: str) -> Link:
        link = next(p.link for p in self._experiment.points if p.name == point)
        assert link is not None
        return link

    async def _calibrate(self, near: _Loaded, meter: Meter, key: Key, kind: _Kind) -> None:
        """A short answer on the plain connection, at a seed that is not judged."""
        pair = replace(near.pair, draft_length=kind.length, window=kind.length)
        params = replace(self._params(near.pair, key), seed=OTHER_SEEDS + key.seed)
        prompt = _ids(near, self._question(near.pair, key))
        near = replace(near, pair=pair)
        with _jobs_of(near.runtime) as jobs:
            _, steps = await _answer(near, kind.arm, prompt, params, blocks=CALIBRATION_BLOCKS)
        match kind.arm:
            case Schedule.CLOUD_ONLY:
                meter.alone(steps)
            case Schedule.SYNC:
                meter.synchronous(steps, jobs, len(prompt))
            case _:
                meter.streamed(steps, jobs)

    async def _case(
        self,
        loaded: _Loaded,
        key: Key,
        link: Link,
        drafter: Drafter,
        result: GenerationResult,
    ) -> Case:
        wishes = wishes_of(key.arm)
        schedule, rule = wishes["schedule"], wishes.get("rule", Rule.COUPLED)
        prompt = _ids(loaded, self._question(loaded.pair, key))
        place = (key.data, key.item, key.seed, rule)
        if place not in self._standing:  # the coupled text is the same in every arm and point
            params = self._params(loaded.pair, key)
            self._standing[place] = await asyncio.to_thread(
                standing, drafter, prompt, result.token_ids, params, rule
            )
        return Case(
            arm=key.arm,
            schedule=schedule,
            rule=rule,
            link=link,
            prompt=len(prompt),
            stands=self._standing[place],
            draft_length=loaded.pair.draft_length,
            window=loaded.pair.window,
        )


@dataclass(frozen=True, slots=True)
class _Kind:
    """A calibration answer."""

    arm: str
    length: int
    """K of the plain loop, or the window."""


def _kinds(pair: Pair) -> list[_Kind]:
    """Every row count that judged answers can have is measured, or lies between two that are:
    blocks of one draft and of K, of a window less one and of a window."""
    lengths = sorted({1, pair.draft_length, max(1, pair.window - 1), pair.window})
    return [
        _Kind(Schedule.CLOUD_ONLY, 1),
        *(_Kind(Schedule.SYNC, length) for length in lengths),
        _Kind(Schedule.FREERUN, pair.window),
    ]


@contextmanager
def _jobs_of(runtime: EdgeRuntime) -> Iterator[list[tuple[int, float]]]:
    """Tokens and seconds of the drafting jobs of what runs meanwhile."""
    jobs: list[tuple[int, float]] = []
    runtime.drafting.timed = lambda count, seconds: jobs.append((count, seconds))
    try:
        yield jobs
    finally:
        runtime.drafting.timed = None
