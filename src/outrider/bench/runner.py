"""Runs an experiment cell by cell, on the simulator or live, and leaves out what is done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Container, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from outrider.bench.experiment import Experiment, Point, System
from outrider.bench.journal import MAX_MARKS, Answer, Cell, Key, Mark
from outrider.session.generation import Step
from outrider.sim.run import Measured, Sample, play


class Backend(Protocol):
    """Where cells are measured."""

    def keys(self, point: Point) -> Sequence[Key]:
        """All cells of a point, in the order in which they are measured: arms take turns."""
        ...

    def measure(self, point: Point, keys: Sequence[Key]) -> AsyncIterator[Cell]:
        """Each cell as it is finished."""
        ...

    async def close(self) -> None:
        """Let go of what is kept from point to point."""
        ...


class Simulator:
    """Cells in virtual time: a whole run of one arm with one seed each."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment

    def keys(self, point: Point) -> list[Key]:
        return [
            Key(point=point.name, data="", item="", arm=arm, seed=seed)
            for seed in self._experiment.seeds
            for arm in self._experiment.arms
        ]

    async def measure(self, point: Point, keys: Sequence[Key]) -> AsyncIterator[Cell]:
        assert point.scenario is not None
        arms = {arm.name: arm for arm in point.scenario.arms}
        for key in keys:
            scenario = replace(point.scenario, seed=key.seed, seeds=1)
            yield _cell(key, play(scenario, arms[key.arm]))

    async def close(self) -> None:
        pass


def _cell(key: Key, found: Measured) -> Cell:
    samples = sorted(found.samples, key=lambda s: s.number)
    return Cell(
        key=key,
        answers=tuple(_answer(s) for s in samples),
        forwards=found.forwards,
        busy=found.busy,
        seconds=found.seconds,
        bytes_up=found.bytes_up,
        bytes_down=found.bytes_down,
        unfinished=found.unfinished,
        warm_up=1,
        marks=marks(samples[0].steps) if samples else (),
    )


def _answer(sample: Sample) -> Answer:
    first = len(sample.steps[0][1].tokens) if sample.steps else 1
    return Answer(
        tokens=sample.tokens,
        first=sample.first,
        rest=sample.rest,
        later=sample.tokens - first,
        finish=sample.finish,
        drafted=sample.drafted,
        accepted=sample.accepted,
    )


def marks(steps: Sequence[tuple[float, Step]]) -> tuple[Mark, ...]:
    """The blocks of an answer, by when they were shown (seconds since the question)."""
    found = []
    for at, step in steps[:MAX_MARKS]:
        told = step.round
        found.append(
            Mark(
                at=at,
                tokens=len(step.tokens),
                drafted=told.drafted if told else 0,
                accepted=told.accepted if told else 0,
                queue=told.queue_s if told else 0.0,
                step=told.step_s if told else 0.0,
                network=told.network_s if told else None,
            )
        )
    return tuple(found)


def backend(
    experiment: Experiment, *, run_code: bool = False, pins: Mapping[str, str] | None = None
) -> Backend:
    """Where an experiment runs. Live ones load models. `pins`: commits of data sets of the hub."""
    if experiment.system is System.SIMULATOR:
        return Simulator(experiment)
    from outrider.bench.onlink import Live, Validation

    if experiment.system is System.VALIDATE:
        return Validation(experiment, pins=pins or {})
    return Live(experiment, run_code=run_code, pins=pins or {})


async def run(
    experiment: Experiment, where: Backend, done: Container[Key] = ()
) -> AsyncIterator[Cell]:
    """Every cell that is not in `done`."""
    try:
        for point in experiment.points:
            keys = [key for key in where.keys(point) if key not in done]
            if keys:
                async with aclosing(where.measure(point, keys)) as cells:  # type: ignore[type-var]
                    async for cell in cells:
                        yield cell
                        await asyncio.sleep(0)  # a simulated cell waits for nothing: Ctrl-C
    finally:
        await where.close()


def total(experiment: Experiment, where: Backend) -> int:
    """How many cells an experiment has."""
    return sum(len(where.keys(point)) for point in experiment.points)
