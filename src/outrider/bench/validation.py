"""The simulator held against life: each live answer beside its twin in virtual time.

Before each live answer a short one is asked for in the same process and through the same verifier,
on a connection that is not shaped. From these, and never from the answers that are judged, comes
what machines take (`Meter`): t_v(rows), t_d, and what lies between engines. Figures follow the
machine as it drifts, but on a busy one no neighbour in time is equal; so each twin plays a second
time with what the judged answer's own forwards and drafts took (`Costs.own`). The first error is
that of a prediction, the second that of the model alone.

Which guesses stand is read off the judged answer itself by the draft that made it (`standing`):
same seed, same luck. The twin is `sim.run` with these figures; what is left between the two is what
the simulator does not know.

Terms, in seconds, each the mean of its newest samples (an answer is a sum of them):

* t_v(rows), t_d and a job's start, with the other side idle and while both work (`beside`): edge
  and cloud share a machine here, its memory and its caches;
* between two forwards of a verifier that waits for nobody: event loop, frames, thread;
* a round trip without a link: sockets, both event loops, less what is counted above;
* at the edge between a verdict and the frame that answers it, less the drafting itself; and what
  its first job takes longer, which reads the prompt.

Calibration answers have the length of those that are judged: what a forward takes depends on the
places it covers (with fixed-shape forwards a block that crosses a border of the span is two).
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np

from outrider.bench.figures import Estimate, bootstrap, median
from outrider.bench.journal import Cell, Twin
from outrider.bench.runner import marks
from outrider.control.costs import RowCosts
from outrider.core.link import Link
from outrider.core.tokens import Rule, SamplingParams
from outrider.engines.drafters import Drafter
from outrider.session.generation import Step
from outrider.session.schedules import DEFAULT_GROWTH, STREAMING, Schedule
from outrider.sim.acceptance import Recorded
from outrider.sim.devices import CloudTimes, EdgeTimes, fit_line
from outrider.sim.links import Conditions
from outrider.sim.run import Sample, play
from outrider.sim.scenario import Arm, Scenario, Workload

LIMIT: Final = 0.10
"""Error of a figure beyond which a cell is marked."""
NEWEST: Final = 8
"""Samples of a kind that count: older ones are of another mood of the machine."""
Steps = Sequence[tuple[float, Step]]
Job = tuple[int, float]
"""Tokens, seconds."""


class _Newest:
    """Means of newest samples by key."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}

    def add(self, key: int, value: float) -> None:
        self._samples.setdefault(key, deque(maxlen=NEWEST)).append(value)

    def items(self) -> list[tuple[int, float]]:
        return [(key, statistics.fmean(v)) for key, v in sorted(self._samples.items())]

    def one(self, key: int = 0) -> float | None:
        found = self._samples.get(key)
        return statistics.fmean(found) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a simulation is told of two machines. Seconds."""

    verify: tuple[tuple[int, float], ...]
    draft: float
    edge_start: float
    """Of a drafting job, before its first token."""
    edge_turn: float
    """From a verdict to the job that follows it and from that to its frame: the edge's event loop
    and thread."""
    edge_prompt: float
    """An id of the prompt, which the first job reads."""
    cloud_start: float
    round_trip: float
    """Without a link."""

    def own(self, steps: Steps, jobs: Sequence[Job], prompt: int) -> Costs:
        """With the engines' times of an answer behind `prompt` ids: what its own forwards and jobs
        took; sizes that it did not have are as much slower as those that it had."""
        seen: dict[int, list[float]] = {}
        for _, step in steps[1:]:
            if step.round is not None:
                seen.setdefault(step.round.drafted + 1, []).append(step.round.step_s)
        table = RowCosts(self.verify)
        means = {rows: statistics.fmean(found) for rows, found in seen.items()}
        slower = _slower(means.items(), [(rows, table.seconds(rows)) for rows in means])
        # What was not seen has no weight of its own.
        points = {rows: (seconds * slower, 1e-6) for rows, seconds in self.verify}
        points |= {rows: (means[rows], float(len(found))) for rows, found in seen.items()}
        made = [(count, seconds) for count, seconds in jobs[1:] if count]
        expected = sum(self.edge_start + self.draft * count for count, _ in made)
        factor = sum(seconds for _, seconds in made) / expected if expected else 1.0
        found = replace(
            self,
            verify=rising([(rows, *point) for rows, point in sorted(points.items())]),
            draft=self.draft * factor,
            edge_start=self.edge_start * factor,
        )
        if not jobs:
            return found
        count, seconds = jobs[0]
        rest = seconds - found.edge_start - found.draft * count
        return replace(found, edge_prompt=max(0.0, rest) / max(1, prompt))

    def as_dict(self) -> dict[str, Any]:
        return {
            "verify_ms": [[rows, 1e3 * s] for rows, s in self.verify],
            "draft_ms": 1e3 * self.draft,
            "edge_start_ms": 1e3 * self.edge_start,
            "edge_turn_ms": 1e3 * self.edge_turn,
            "edge_prompt_ms": 1e3 * self.edge_prompt,
            "cloud_start_ms": 1e3 * self.cloud_start,
            "round_trip_ms": 1e3 * self.round_trip,
        }


def rising(points: Sequence[tuple[int, float, float]]) -> tuple[tuple[int, float], ...]:
    """The nearest (rows, seconds) that never fall, to (rows, seconds, weight) by rows ascending:
    neighbours that noise has put in the wrong order get their weighted mean."""
    groups: list[tuple[list[int], float, float]] = []
    for rows, seconds, weight in points:
        group = ([rows], seconds, weight)
        while groups and groups[-1][1] > group[1]:
            left, value, mass = groups.pop()
            whole = mass + group[2]
            group = (left + group[0], (value * mass + group[1] * group[2]) / whole, whole)
        groups.append(group)
    return tuple((rows, value) for members, value, _ in groups for rows in members)


class Meter:
    """Calibration answers in, costs out."""

    def __init__(self) -> None:
        self._steps, self._beside = _Newest(), _Newest()
        """t_v by rows: with an idle edge, and with one that drafts."""
        self._jobs, self._jobs_beside = _Newest(), _Newest()
        """Seconds of a drafting job by its tokens."""
        self._gap, self._trip, self._turn = _Newest(), _Newest(), _Newest()
        self._read = _Newest()
        """Seconds an id of the prompt."""

    def alone(self, steps: Steps) -> None:
        """An answer of cloud-only."""
        for (before, _), (at, step) in pairwise(steps):
            if step.round is not None:
                self._steps.add(1, step.round.step_s)
                self._gap.add(0, max(0.0, at - before - step.round.step_s))

    def synchronous(self, steps: Steps, jobs: Sequence[Job], prompt: int) -> None:
        """An answer of the plain loop: one job, then one forward. `jobs`: in order, the first of
        which read the `prompt` ids."""
        drafted = [job for job in jobs if job[0]]
        for count, seconds in drafted[1:]:
            self._jobs.add(count, seconds)
        rounds = [
            (before, at, step.round)
            for (before, _), (at, step) in pairwise(steps)
            if step.round is not None and step.round.drafted
        ]
        for place, ((before, at, told), (count, seconds)) in enumerate(
            zip(rounds, drafted, strict=False)
        ):
            if told.drafted != count or told.network_s is None:
                continue
            self._steps.add(count + 1, told.step_s)
            way = told.queue_s + told.network_s
            self._trip.add(0, way)
            if place:
                self._turn.add(0, max(0.0, at - before - told.step_s - way - seconds))
        if len(drafted) > 1:
            (count, seconds), (other, usual) = drafted[:2]
            self._read.add(0, max(0.0, seconds - usual * count / other) / max(1, prompt))

    def streamed(self, steps: Steps, jobs: Sequence[Job]) -> None:
        """An answer made while the edge drafts ahead."""
        for _, step in steps[1:]:
            if step.round is not None:
                self._beside.add(step.round.drafted + 1, step.round.step_s)
        for count, seconds in jobs[1:]:
            if count:
                self._jobs_beside.add(count, seconds)

    def costs(self, *, beside: bool) -> Costs:
        """Of an answer in which one side works at a time, or both (`beside`). Raises ValueError
        before there was one calibration answer of each kind."""
        gap, trip, turn = self._gap.one(), self._trip.one(), self._turn.one()
        if gap is None or trip is None or turn is None:
            raise ValueError("calibrate first: nothing was measured yet")
        start, draft = fit_line(self._jobs.items())
        verify = self._steps.items()
        if beside:
            slower = _slower(self._beside.items(), verify)
            verify = [(rows, seconds * slower) for rows, seconds in verify]
            slower = _slower(self._jobs_beside.items(), self._jobs.items())
            start, draft = start * slower, draft * slower
        return Costs(
            verify=rising([(rows, seconds, 1.0) for rows, seconds in verify]),
            draft=draft,
            edge_start=start,
            edge_turn=turn,
            edge_prompt=self._read.one() or 0.0,
            cloud_start=gap,
            # The wait before the forward is in the gap already.
            round_trip=max(0.0, trip - gap),
        )


def _slower(there: Iterable[tuple[int, float]], here: Iterable[tuple[int, float]]) -> float:
    """Median over the sizes that both have; 1 where there are none."""
    known = dict(here)
    factors = [seconds / known[size] for size, seconds in there if size in known]
    return statistics.median(factors) if factors else 1.0


def standing(
    drafter: Drafter,
    prompt: tuple[int, ...],
    output: Sequence[int],
    params: SamplingParams,
    rule: Rule,
) -> tuple[bool, ...]:
    """bool by output position: does the draft's own guess behind the text before it equal the
    text? Its guesses have an address (seed, position), so it says again what it said."""
    session = drafter.session(len(prompt), params, rule)
    try:
        return tuple(
            session.propose((*prompt, *output[:i]), 1).tokens == (token,)
            for i, token in enumerate(output)
        )
    finally:
        session.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a twin is asked."""

    arm: str
    schedule: Schedule
    rule: Rule
    link: Link
    prompt: int
    """Ids."""
    stands: tuple[bool, ...]
    """As many as the answer has tokens."""
    draft_length: int
    window: int


def twin(case: Case, costs: Costs, own: Costs) -> Twin:
    """The same answer in virtual time, with `costs` and once more with its `own`. Raises ValueError
    for an empty one."""
    sample, again = _played(case, costs), _played(case, own)
    return Twin(
        first=sample.first,
        rest=sample.rest,
        later=_later(sample),
        own_rest=again.rest,
        own_later=_later(again),
        forwards=sample.forwards,
        drafted=sample.drafted,
        accepted=sample.accepted,
        marks=marks(sample.steps),
        costs=costs.as_dict(),
    )


def _later(sample: Sample) -> int:
    """Tokens behind the first block."""
    return sample.tokens - len(sample.steps[0][1].tokens)


def _played(case: Case, costs: Costs) -> Sample:
    link = replace(case.link, rtt_s=case.link.rtt_s + costs.round_trip)
    arm = Arm(name=case.arm, schedule=case.schedule, rule=case.rule)
    record = Recorded(answers=(case.stands,))
    scenario = Scenario(
        title="",
        seed=0,
        seeds=1,
        conditions=Conditions(link=link),
        cuts=(),
        edges=1,
        edge=EdgeTimes(
            draft=costs.draft, start=costs.edge_start + costs.edge_turn, prefill=costs.edge_prompt
        ),
        clouds=1,
        cloud=CloudTimes(verify=costs.verify, start=costs.cloud_start, draft=costs.draft),
        colocated_assumed=True,
        batch_rows=64,
        acceptance=lambda _: record,
        curve=None,
        workload=Workload(
            requests=1, rate=None, prompt=case.prompt, max_tokens=(len(case.stands),) * 2
        ),
        draft_length=case.draft_length,
        window=case.window,
        growth=DEFAULT_GROWTH,
        arms=(arm,),
        duration=0.0,
    )
    return play(scenario, arm).samples[0]


def works_beside(schedule: Schedule) -> bool:
    """Edge and cloud work at the same time in it."""
    return schedule in STREAMING


# ------------------------------------------------------------------------------ the verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """An arm at a point, live and simulated."""

    point: str
    arm: str
    answers: int
    live_ms: float
    """A token; median over answers."""
    simulated_ms: float
    error: Estimate
    """Simulated over live, less 1: median over answers, with its interval."""
    noise: float | None
    """Half of the middle half of the answers' errors: what one answer scatters by."""
    own: float
    """Error when the twin is told what the answer's own forwards and drafts took."""
    live_forwards: float
    """A token, over all answers."""
    simulated_forwards: float
    live_accepted: int
    simulated_accepted: int

    @property
    def forwards_error(self) -> float:
        return self.simulated_forwards / self.live_forwards - 1.0

    @property
    def beyond(self) -> bool:
        """One of the two figures is off by more than the limit."""
        return max(abs(self.error.value), abs(self.forwards_error)) > LIMIT


def held(cells: Sequence[Cell]) -> list[Held]:
    """Each (point, arm) that has twins, in the order of measurement."""
    groups: dict[tuple[str, str], list[tuple[Cell, Twin]]] = {}
    for cell in cells:
        if cell.twin is not None and cell.answers[0].later and cell.twin.later:
            groups.setdefault((cell.key.point, cell.key.arm), []).append((cell, cell.twin))
    return [_held(point, arm, found) for (point, arm), found in groups.items()]


def _held(point: str, arm: str, found: Sequence[tuple[Cell, Twin]]) -> Held:
    live = [1e3 * c.answers[0].rest / c.answers[0].later for c, _ in found]
    simulated = [1e3 * t.rest / t.later for _, t in found]
    errors = np.array([[ours / real - 1.0] for ours, real in zip(simulated, live, strict=True)])
    tokens = sum(c.answers[0].tokens for c, _ in found)
    low, high = np.quantile(errors, [0.25, 0.75])
    return Held(
        point=point,
        arm=arm,
        answers=len(found),
        live_ms=statistics.median(live),
        simulated_ms=statistics.median(simulated),
        error=bootstrap(errors, median),
        noise=float(high - low) / 2 if len(found) > 1 else None,
        own=statistics.median(
            t.own_rest / t.own_later / ours * 1e3 - 1.0
            for (_, t), ours in zip(found, live, strict=True)
        ),
        live_forwards=sum(c.forwards for c, _ in found) / tokens,
        simulated_forwards=sum(t.forwards for _, t in found) / tokens,
        live_accepted=sum(c.answers[0].accepted for c, _ in found),
        simulated_accepted=sum(t.accepted for _, t in found),
    )


def verdict(found: Sequence[Held]) -> str:
    """In words."""
    if not found:
        return "no cell has a twin"
    off = [h for h in found if h.beyond]
    worst = max(found, key=lambda h: abs(h.error.value))
    return (
        f"{len(found) - len(off)} of {len(found)} cells within {100 * LIMIT:.0f} % in time and "
        f"forwards a token; largest error of time {100 * worst.error.value:+.1f} % "
        f"({worst.arm}, {worst.point or 'the only point'})"
    )


def as_rows(found: Sequence[Held]) -> list[Mapping[str, Any]]:
    """For JSON."""
    return [
        {
            "point": h.point,
            "arm": h.arm,
            "answers": h.answers,
            "live_ms_per_token": h.live_ms,
            "simulated_ms_per_token": h.simulated_ms,
            "error": h.error.value,
            "error_low": h.error.low,
            "error_high": h.error.high,
            "noise": h.noise,
            "own_error": h.own,
            "live_forwards_per_token": h.live_forwards,
            "simulated_forwards_per_token": h.simulated_forwards,
            "forwards_error": h.forwards_error,
            "live_accepted": h.live_accepted,
            "simulated_accepted": h.simulated_accepted,
            "beyond": h.beyond,
        }
        for h in found
    ]
