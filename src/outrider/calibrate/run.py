"""Traces in, calibration out: sweep, labels, threshold law, predictor, and what they bring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np

from outrider.calibrate.costs import Pipeline, SegmentCosts
from outrider.calibrate.replay import replay
from outrider.calibrate.sweep import THRESHOLDS, WINDOWS, Swept, sweep
from outrider.calibrate.trace import Answer, TraceHeader, Traces
from outrider.control.base import CalibrationError, ControllerFacts
from outrider.control.calibration import (
    FILE,
    Calibration,
    Provenance,
    ThresholdLaw,
    encode,
)
from outrider.control.costs import RowCosts
from outrider.control.credit import BETA, DELTA, HISTORY, Credit
from outrider.control.fixed import Fixed

HELD_OUT: Final = 4
"""Every fourth answer is kept out of the sweep and judges what came of it."""
Told = Callable[[str, int, int], None]
"""Called with the stage, how much of it is done, and the whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to calibrate. Times in seconds; None: as measured while recording."""

    pipeline: Pipeline = Pipeline.SYNC
    round_trip: float = 0.05
    draft_seconds: float | None = None
    verify_seconds: float | None = None
    """Of a forward, however many rows it has; None: the measured row costs."""
    gamma: float | None = None
    """Seconds a token is worth; None: found (`calibrate.sweep`)."""
    delta: float = DELTA
    k: int = HISTORY
    beta: float = BETA
    thresholds: tuple[float, ...] = THRESHOLDS
    windows: tuple[int, ...] = WINDOWS

    def costs(self, header: TraceHeader) -> SegmentCosts:
        """The costs to sweep with."""
        rows = header.verify_seconds if self.verify_seconds is None else [(1, self.verify_seconds)]
        draft = header.draft_seconds if self.draft_seconds is None else self.draft_seconds
        return SegmentCosts(
            pipeline=self.pipeline, round_trip=self.round_trip, draft=draft, verify=RowCosts(rows)
        )


def calibrate(
    traces: Traces,
    settings: Settings,
    *,
    seed: int = 0,
    told: Told = lambda _stage, _done, _whole: None,
) -> Calibration:
    """Sweep, label and train on three answers of four. Needs torch.

    Raises CalibrationError when the traces are too few or too short.
    """
    from outrider.calibrate.train import Lesson, train

    costs = settings.costs(traces.header)
    learnt, _ = split(traces.answers)
    try:
        swept = sweep(
            learnt,
            costs,
            k=settings.k,
            beta=settings.beta,
            delta=settings.delta,
            gamma=settings.gamma,
            thresholds=settings.thresholds,
            windows=settings.windows,
        )
    except ValueError as error:
        raise CalibrationError(f"{error}: record more or longer answers") from None
    law = threshold_law(swept)
    pairs = np.array([(v.credit, v.change) for v in swept.visits])
    lesson = Lesson(
        table=swept.table, law=law, pairs=pairs, gamma=swept.gamma, delta=settings.delta
    )
    weights = train(lesson, seed=seed, told=lambda done, whole: told("train", done, whole))
    header = traces.header
    return Calibration(
        provenance=Provenance(
            outrider=version("outrider"),
            target=header.target,
            draft=header.draft,
            temperature=header.temperature,
            data=header.data,
            data_digest=header.data_digest,
            positions=traces.positions,
            seed=seed,
            schedule=settings.pipeline.value,
            round_trip=settings.round_trip,
            draft_seconds=costs.draft,
            verify_seconds=costs.verify.curve(),
            gamma=swept.gamma,
            delta=settings.delta,
            k=settings.k,
            beta=settings.beta,
        ),
        law=law,
        table=swept.table,
        predictor=weights,
    )


def split(answers: Sequence[Answer]) -> tuple[list[Answer], list[Answer]]:
    """(to learn from, held out)."""
    held = [answer for i, answer in enumerate(answers) if i % HELD_OUT == HELD_OUT - 1]
    return [answer for i, answer in enumerate(answers) if i % HELD_OUT != HELD_OUT - 1], held


def threshold_law(swept: Swept) -> ThresholdLaw:
    """tau_credit: the mean credit; T_base: T* there; T_max: the largest T*. alpha stays at its
    default, since omega is learnt."""
    table = swept.table
    tau = float(np.mean([v.credit for v in swept.visits]))
    return ThresholdLaw(
        t_base=table.lookup(tau)[0], tau_credit=tau, t_max=max(table.best_threshold)
    )


def save(folder: Path, calibration: Calibration) -> Path:
    """The whole file or none of it: written beside its place, then renamed."""
    folder.mkdir(parents=True, exist_ok=True)
    path, partial = folder / FILE, folder / (FILE + ".partial")
    try:
        partial.write_bytes(encode(calibration))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def comparison(
    traces: Traces, folder: Path, settings: Settings, *, held_out_only: bool = True
) -> list[dict[str, Any]]:
    """The stored calibration against fixed lengths and its own ablations, by replay.

    One row a way to decide; rows that relax say how much of the text they changed.
    """
    costs = settings.costs(traces.header)
    answers = split(traces.answers)[1] if held_out_only else list(traces.answers)
    stored = str(folder)
    rows: list[dict[str, Any]] = []

    def add(name: str, controller: Credit | Fixed, *, relaxed: bool) -> None:
        result = replay(answers, controller, costs, relaxed=relaxed)
        rows.append({"name": name, "relaxed": relaxed, **result.as_dict()})

    for length in settings.windows:
        add(f"fixed {length}", Fixed(ControllerFacts(fixed_length=length)), relaxed=False)
    best = min(rows, key=lambda row: float(row["ms_per_token"]))
    rows[:] = [{**best, "name": f"best fixed: {best['name'].removeprefix('fixed ')}"}]

    def credit(stored_in: str | None, **options: float) -> Credit:
        top = settings.windows[-1]
        return Credit(ControllerFacts(calibration=stored_in, max_length=top, options=options))

    add("window only, default rule", credit(None), relaxed=False)
    add("window only, table", credit(stored, predictor=0), relaxed=False)
    add("window only, predictor", credit(stored), relaxed=False)
    add("default rule", credit(None), relaxed=True)
    add("table", credit(stored, predictor=0), relaxed=True)
    add("predictor", credit(stored), relaxed=True)
    add("predictor, k=1", credit(stored, k=1), relaxed=True)
    add("predictor, k=10", credit(stored, k=10), relaxed=True)
    add("predictor, no history", credit(stored, history=0), relaxed=True)
    add("predictor, T fixed", credit(stored, threshold=0), relaxed=True)
    return rows
