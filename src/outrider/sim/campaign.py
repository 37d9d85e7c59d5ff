"""Fault campaigns: many random cases against a toy target, and what must hold in each of them.

A case has failed when one of these does not hold (docs/architecture.md, Invariants):

* an answer that ends has exactly the ids of the target alone (coupled, relaxed without a budget,
  every rule at temperature 0), at most `max_tokens`, and ends for the same reason (I1, I2, I3);
* an answer that was cancelled, or whose edge died, is a prefix of that;
* under the ratio rule at temperature 1 the tokens of all cases together follow the target's law,
  and those behind a rejection the residual's;
* every answer ends well, but for those that met a draining verifier or a link that broke the rules
  time and again; an end that no fault touched is confirmed by the digest of the very same ids;
* where only lawful faults happen no side ever refuses a frame of the other, and no link ends but by
  a fault: the machines do not need their own mending;
* a slot holds the ids that its session claimed at every forward (I10), and in the end every table
  is empty, on both sides (I7).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from outrider.core.draft import NO_DRAFT
from outrider.core.link import Link
from outrider.core.tokens import FinishReason, Origin, Rule, SamplingParams
from outrider.engines.base import EngineError
from outrider.engines.desk import DeskResult
from outrider.engines.drafters import ModelDrafter
from outrider.engines.toy import Law, ToyModel, blend_law, random_law, remember
from outrider.proto.errors import LocalError, RemoteError
from outrider.proto.messages import Code, Load
from outrider.session.events import Ended, Failed, LinkDown
from outrider.session.generation import Generation
from outrider.session.pilot import Judged, Pilot
from outrider.session.service import Work
from outrider.session.verifier import Judgement, Verifier
from outrider.sim.devices import EdgeTimes
from outrider.sim.events import Chance, RestlessError
from outrider.sim.faults import Case, Mischief, Question, draw
from outrider.sim.laws import fit
from outrider.sim.links import Conditions
from outrider.sim.world import Answer, Cloud, Setup, UserError, Words, World

F64Array = npt.NDArray[np.float64]

VOCABULARY: Final = 8
PROMPT: Final = (1, 2, 3)
EOS: Final = frozenset({0})
CONTEXT: Final = 4096
ALARM: Final = 1e-6
"""Smallest p-value of the ratio rule's law that is no failure: a right implementation meets it once
in a million campaigns."""
LEAST_TOKENS: Final = 100
"""Of one context, or corrections, from which on their law is tested."""
BINS: Final = 10
LAST: Final = 1.0 - 1e-9
GRACE: Final = 100.0
"""Seconds after which nothing may be left: more than the service keeps a lost session."""
MOST_EVENTS: Final = 200_000
"""Of one case: a hundred times what the longest takes."""
STEP: Final = 0.03
ROW: Final = 0.0005
DRAFT: Final = 0.005
"""Seconds of the toy machines; answers then take about a second."""
FAULTLESS: Final = frozenset({"the link was cut", "the verifier drains"})
"""Reasons for the end of a link that are a fault's doing, or a wish."""

TARGET: Final = remember(random_law(1, VOCABULARY, order=1, sharpness=1.0), 1)


@functools.cache
def _draft(share: float) -> Law:
    other = random_law(2, VOCABULARY, order=2, sharpness=0.7)
    return remember(blend_law(TARGET, other, share, 3), 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What became of a case."""

    case: Case
    problems: tuple[str, ...]
    seen: dict[str, int]
    """Faults that happened."""
    tokens: int
    seconds: float
    """Virtual."""
    pairs: tuple[tuple[int, int], ...]
    """(token before, token) of answers of the ratio rule whose law is known."""
    ranks: tuple[float, ...]
    """Of its corrections: where each lies in the residual's law, in [0, 1)."""
    fingerprint: str
    log: tuple[str, ...] = ()
    """What happened, for a replay."""


@dataclass(slots=True)
class Campaign:
    """Sums over cases."""

    cases: int = 0
    answers: int = 0
    tokens: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    failed: list[Report] = field(default_factory=list)
    """Cases with a problem, the first ones."""
    _counts: npt.NDArray[np.int64] = field(
        default_factory=lambda: np.zeros((VOCABULARY, VOCABULARY), dtype=np.int64)
    )
    _ranks: list[int] = field(default_factory=lambda: [0] * BINS)

    def add(self, report: Report) -> None:
        self.cases += 1
        self.answers += len(report.case.questions)
        self.tokens += report.tokens
        for name, count in report.seen.items():
            self.faults[name] = self.faults.get(name, 0) + count
        if report.problems:
            self.failed.append(report)
        for before, token in report.pairs:
            self._counts[before, token] += 1
        for rank in report.ranks:
            self._ranks[int(rank * BINS)] += 1

    @property
    def law(self) -> float | None:
        """p-value of the ratio rule's tokens and corrections: the smallest of all tests, times
        their number. None: too few tokens."""
        rows = [(i, row) for i, row in enumerate(self._counts) if row.sum() >= LEAST_TOKENS]
        found = [fit([int(n) for n in row], _law(TARGET, (i,))) for i, row in rows]
        if sum(self._ranks) >= LEAST_TOKENS:
            found.append(fit(self._ranks, [1.0 / BINS] * BINS))
        return min(1.0, min(found) * len(found)) if found else None

    @property
    def lawful(self) -> bool:
        return self.law is None or self.law > ALARM


def _law(law: Law, context: tuple[int, ...]) -> F64Array:
    """float64 [VOCABULARY]: the probabilities of every id at temperature 1."""
    weights = np.exp(law(context).astype(np.float64))
    return np.asarray(weights / weights.sum())


def _rank(share: float, context: tuple[int, ...], token: int, luck: float) -> float:
    """Where a token lies in the residual's law, in [0, 1): uniform if it is drawn from it.

    Ids are put in the order of the share of p that is left, because wrong draws prefer one end of
    it. `luck`, in [0, 1), places the token within its own probability."""
    p, q = _law(TARGET, context), _law(_draft(share), context)
    left = np.maximum(p - q, 0.0)
    order = np.argsort(left / p, kind="stable")
    below = np.cumsum(left[order]) / left.sum()
    at = int(np.flatnonzero(order == token)[0])
    before = float(below[at - 1]) if at else 0.0
    return min(before + luck * (float(below[at]) - before), LAST)


def campaign(seeds: Sequence[int], *, most_failed: int = 10) -> Iterator[Campaign]:
    """Play the cases of all seeds, the sums so far after each; stops early after `most_failed`."""
    sums = Campaign()
    for seed in seeds:
        sums.add(play(draw(seed)))
        yield sums
        if len(sums.failed) >= most_failed:
            return


# ------------------------------------------------------------------------------ one case


def alone(
    law: Law,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    vocab_size: int,
    eos: frozenset[int] = frozenset(),
    context_length: int = CONTEXT,
) -> tuple[tuple[int, ...], FinishReason]:
    """The target decoding by itself: no engine, no draft, no wire. The oracle of I1."""
    generation = Generation(prompt, params, context_length=context_length, eos=eos, text=Words())
    ends = frozenset() if params.ignore_eos else eos
    verifier = Verifier(params, Rule.COUPLED, prompt=prompt, vocab_size=vocab_size, end_ids=ends)
    while generation.finish is None:
        committed = generation.sequence.committed
        judgement = verifier.judge(NO_DRAFT, law(committed)[None, :], len(committed))
        assert isinstance(judgement, Judgement), "no draft, no rejection"
        generation.apply(NO_DRAFT, judgement)
    return generation.sequence.output, generation.finish


class Moody(Pilot):
    """A controller of moods: now and then another length, 0 (let the cloud stream alone) too."""

    LENGTHS: Final = (0, 0, 1, 3, 6)

    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self._left = 0
        self._length = 0

    def length(self, now: float, room: int) -> int:  # noqa: ARG002
        return min(self._length, room)

    def verdict(self, judged: Judged, now: float) -> None:  # noqa: ARG002
        self._round()

    def streamed(self, tokens: int, load: Load, now: float) -> None:  # noqa: ARG002
        self._round()

    def _round(self) -> None:
        if self._left == 0:
            self._left = self._chance.between(1, 4)
            self._length = self._chance.choice(self.LENGTHS)
        self._left -= 1


def play(case: Case) -> Report:
    """Let a case happen and look at what came of it."""
    return _Play(case).report()


class _Play:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.problems: list[str] = []
        self.answers: list[tuple[Question, Answer | None]] = []
        self.mischief = Mischief(case)
        self.draft = self._model()
        drafter = ModelDrafter("draft", model=self.draft)
        self.world = World(
            Setup(
                target=lambda: ToyModel(
                    TARGET, vocab_size=VOCABULARY, context_length=CONTEXT, eos_token_ids=EOS
                ),
                drafter=drafter,
                cloud_drafter=lambda: ModelDrafter("cloud", model=self._model()),
                vocab_size=VOCABULARY,
                context_length=CONTEXT,
                eos=EOS,
                conditions=Conditions(link=Link(rtt_s=case.rtt, jitter_s=case.jitter)),
                forward=lambda load: STEP + ROW * load.rows,
                drafting=EdgeTimes(draft=DRAFT),
            ),
            edges=case.edges,
            seed=case.seed,
            faults=self.mischief,
        )
        self.world.watch = self._watch

    def _model(self) -> ToyModel:
        law = _draft(self.case.share)
        return ToyModel(law, vocab_size=VOCABULARY, context_length=CONTEXT)

    def report(self) -> Report:
        try:
            self._happen()
        except (UserError, RestlessError, AssertionError, EngineError, LocalError) as error:
            self.problems.append(f"{type(error).__name__}: {error}")
        except (RemoteError, ValueError, LookupError) as error:  # a machine fell over
            self.problems.append(f"{type(error).__name__}: {error}")
        else:
            self._judge()
        return Report(
            case=self.case,
            problems=tuple(self.problems),
            seen=self.mischief.seen,
            tokens=sum(len(a.ids) for _, a in self.answers if a),
            seconds=self.world.now,
            pairs=tuple(self._pairs()),
            ranks=tuple(self._ranks()),
            fingerprint=self.world.heap.fingerprint,
            log=tuple(self._log()),
        )

    def _happen(self) -> None:
        world, case = self.world, self.case
        for number, question in enumerate(case.questions):
            world.heap.later(question.at, self._asking(number, question))
        self.mischief.plan(world)
        world.run(steps=MOST_EVENTS)
        world.heap.run(world.now + GRACE, steps=MOST_EVENTS)

    def _asking(self, number: int, question: Question) -> Callable[[], None]:
        def ask() -> None:
            world, edge = self.world, self.world.edges[question.edge]
            pilot = Moody(Chance(self.case.seed, 3, number)) if question.moody else None
            try:
                answer = edge.ask(
                    PROMPT,
                    question.params,
                    question.plan,
                    rule=question.rule,
                    pilot=pilot,
                    relaxation=question.relaxation,
                )
            except RemoteError as error:
                self.problems.append(f"answer {number} was refused: {error}")
                return
            self.answers.append((question, answer))
            if question.cancel is not None:
                world.heap.later(
                    world.now + question.cancel, lambda: self.mischief.cancel(edge, answer)
                )

        return ask

    def _watch(self, cloud: Cloud, work: Sequence[Work], results: Sequence[DeskResult]) -> None:
        """I10, behind a forward."""
        for item, result in zip(work, results, strict=True):
            if not len(result.rows):
                continue
            drafts = result.draft.tokens if result.draft is not None else item.job.drafts
            if cloud.desk.ids(item.key) != (*item.job.committed, *drafts):
                self.problems.append("I10: a slot holds other ids than its session claims")

    # ---------------------------------------------------------------- what must hold

    def _judge(self) -> None:
        for number, (question, answer) in enumerate(self.answers):
            if answer is not None:
                self._judge_answer(f"answer {number}", question, answer)
        self._judge_links()
        self._judge_tables()

    def _judge_answer(self, name: str, question: Question, answer: Answer) -> None:
        ids, end = tuple(answer.ids), answer.end
        params = question.params
        if len(ids) > params.max_tokens:
            self.problems.append(f"I3: {name} has {len(ids)} tokens of {params.max_tokens}")
        if self._fixed(question):
            self._compare(name, question, ids, end)
        given_up = self.case.drain is not None or self.case.lawless
        if isinstance(end, Failed) and not given_up:
            self.problems.append(f"{name} failed: {end.code.value}: {end.message}")
        if isinstance(end, Failed) and end.code is Code.DIGEST:
            self.problems.append(f"{name}: edge and cloud hold different ids")
        if isinstance(end, Ended) and not end.confirmed and not self.mischief.seen:
            self.problems.append(f"{name} was not confirmed, and nothing had gone wrong")
        if not answer.over:
            self.problems.append(f"{name} never ended")

    @staticmethod
    def _fixed(question: Question) -> bool:
        """Is the text a function of prompt, parameters and seed?"""
        return question.rule is not Rule.RATIO or question.params.temperature == 0.0

    def _compare(
        self, name: str, question: Question, ids: tuple[int, ...], end: Ended | Failed | None
    ) -> None:
        wanted, reason = alone(TARGET, PROMPT, question.params, vocab_size=VOCABULARY, eos=EOS)
        if ids != wanted[: len(ids)]:
            self.problems.append(f"I1: {name} is {ids}, the target alone says {wanted}")
        elif isinstance(end, Ended) and (len(ids) != len(wanted) or end.reason is not reason):
            self.problems.append(
                f"{name} ends with {end.reason.value} behind {len(ids)} tokens; the target alone "
                f"with {reason.value} behind {len(wanted)}"
            )

    def _judge_links(self) -> None:
        if self.case.lawless:
            return
        for cloud in self.world.clouds:
            for error in cloud.refusals:
                if error.code is not Code.DRAINING:
                    self.problems.append(f"the cloud refused a frame: {error}")
        for edge in self.world.edges:
            for when, event in edge.events:
                if isinstance(event, LinkDown) and event.reason not in FAULTLESS:
                    self.problems.append(f"edge {edge.number} at {when:.3f} s: {event.reason}")

    def _judge_tables(self) -> None:
        cloud = self.world.clouds[0]
        held = {
            "sessions in the cloud": cloud.service.sessions,
            "slots of the target": cloud.desk.held,
            "slots of the draft": self.draft.open_slots,
            "sessions at an edge": sum(e.client.sessions for e in self.world.edges),
        }
        for what, count in held.items():
            if count:
                self.problems.append(f"I7: {count} {what} are left")

    # ---------------------------------------------------------------- for the campaign

    def _known(self) -> Iterator[Answer]:
        """Answers of the ratio rule whose length no fault decides: else the law is that of the
        lucky."""
        if self.case.lawless or self.case.drain is not None or self.case.death is not None:
            return
        for question, answer in self.answers:
            known = question.rule is Rule.RATIO and question.params.temperature == 1.0
            if answer is not None and known and question.cancel is None:
                yield answer

    def _pairs(self) -> Iterator[tuple[int, int]]:
        for answer in self._known():
            yield from zip((PROMPT[-1], *answer.ids), answer.ids, strict=False)

    def _ranks(self) -> Iterator[float]:
        chance = Chance(self.case.seed, 4)
        for answer in self._known():
            ids = (*PROMPT, *answer.ids)
            for i, origin in enumerate(answer.origins, len(PROMPT)):
                if origin is Origin.CORRECTION:
                    yield _rank(self.case.share, ids[:i], ids[i], chance.uniform())

    def _log(self) -> Iterator[str]:
        for number, (question, answer) in enumerate(self.answers):
            if answer is not None:
                yield (
                    f"answer {number}: edge {question.edge}, {question.schedule.value}, "
                    f"{question.rule.value}, T={question.params.temperature:g}, "
                    f"{len(answer.ids)}/{question.params.max_tokens} tokens, "
                    f"{_fate(answer)}"
                )
        for edge in self.world.edges:
            for when, event in edge.events:
                if isinstance(event, LinkDown):
                    yield f"{when:8.3f} s  edge {edge.number}: link down ({event.reason})"


def _fate(answer: Answer) -> str:
    match answer.end:
        case Ended(confirmed=confirmed, reason=reason):
            return f"{reason.value}, {'confirmed' if confirmed else 'not confirmed'}"
        case Failed(code=code):
            return f"failed ({code.value})"
    if answer.cancelled:
        return "cancelled"
    return "its edge died" if answer.abandoned else "never ended"
