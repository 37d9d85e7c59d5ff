"""Answers under a grammar through the wire, in virtual time, on toy laws."""

from __future__ import annotations

from collections import Counter

import pytest

from grammars import MARCH, TRAP, ToyGrammars, march
from laws import ALARM, fit
from outrider.core.grammar import Grammar, GrammarKind
from outrider.core.sampling import History, SamplingPipeline
from outrider.core.tokens import Origin, Rule, SamplingParams
from outrider.proto.messages import Code
from outrider.session.events import Ended, Failed
from outrider.session.schedules import Schedule
from toys import TARGET, VOCAB, draft
from world import Answer, RandomFaults, World, alone

EOS = frozenset({0})
PROMPT = (1, 2, 3)
GRAMMARS = ToyGrammars(VOCAB)
SCHEDULES = tuple(s for s in Schedule if s is not Schedule.EDGE_ONLY)


def params(seed: int, *, temperature: float = 1.0, **changes: object) -> SamplingParams:
    values = {"seed": seed, "max_tokens": 40, "temperature": temperature, "grammar": MARCH}
    return SamplingParams(**{**values, **changes})  # type: ignore[arg-type]


def world(share: float = 0.3, **options: object) -> World:
    return World(
        TARGET,
        draft(share),
        vocab_size=VOCAB,
        eos=EOS,
        grammars=ToyGrammars(VOCAB),
        **options,  # type: ignore[arg-type]
    )


def ask(w: World, wanted: SamplingParams, **options: object) -> Answer:
    number = w.edges[0].ask(PROMPT, wanted, **options)  # type: ignore[arg-type]
    w.run()
    return w.edges[0].answers[number]


def oracle(wanted: SamplingParams, rule: Rule = Rule.COUPLED) -> tuple[int, ...]:
    return alone(TARGET, PROMPT, wanted, vocab_size=VOCAB, eos=EOS, rule=rule, grammars=GRAMMARS)


def obeys(ids: tuple[int, ...]) -> bool:
    text = ids[:-1] if ids[-1] in EOS else ids
    steps = (march(text[:i], VOCAB).ids[token] for i, token in enumerate(text))
    return all(steps) and (ids == text or march(text, VOCAB).end)


def test_the_oracle_obeys_and_a_free_answer_does_not():
    for seed in range(8):
        ids = oracle(params(seed))
        assert obeys(ids)
        assert len(ids) <= 31, "it must end"
        free = params(seed, grammar=None)
        assert not obeys(alone(TARGET, PROMPT, free, vocab_size=VOCAB, eos=EOS))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_text_is_the_masked_targets_in_every_schedule(schedule: Schedule):
    forwards = tokens = 0
    for seed in range(6):
        wanted = params(seed, temperature=(1.0, 0.0, 0.7)[seed % 3], top_p=(1.0, 0.9)[seed % 2])
        w = world(jitter=0.03, seed=seed, lookup=seed % 2 == 1)
        answer = ask(w, wanted, schedule=schedule)
        assert tuple(answer.ids) == oracle(wanted)
        assert isinstance(answer.end, Ended)
        assert answer.end.confirmed
        forwards, tokens = forwards + w.forwards, tokens + len(answer.ids)
    # Drafts of both sides know the grammar: they go on standing under it.
    assert forwards < 0.8 * tokens or schedule is Schedule.CLOUD_ONLY


@pytest.mark.parametrize("schedule", [Schedule.SYNC, Schedule.STREAM, Schedule.FREERUN])
def test_cuts_and_rebuilds_change_nothing(schedule: Schedule):
    """I4: the mask is a function of what is committed."""
    seen = 0
    for seed in range(12):
        wanted = params(seed, temperature=(1.0, 0.0)[seed % 2])
        faults = RandomFaults(seed, cut=0.04, cut_after=0.02, restart=0.04, quiet_after=20.0)
        w = world(jitter=0.02, seed=seed, faults=faults)
        answer = ask(w, wanted, schedule=schedule)
        assert tuple(answer.ids) == oracle(wanted)
        seen += w.restarts
    assert seen > 3


def test_an_edge_that_knows_no_grammar_changes_only_the_pace():
    wanted = params(3)
    w = world(0.0, edge_grammars=False)
    blind = ask(w, wanted, schedule=Schedule.SYNC)
    knowing = ask(world(0.0), wanted, schedule=Schedule.SYNC)
    assert tuple(blind.ids) == tuple(knowing.ids) == oracle(wanted)
    assert blind.origins.count(Origin.DRAFT) < knowing.origins.count(Origin.DRAFT)


@pytest.mark.parametrize("schedule", [Schedule.SYNC, Schedule.FREERUN])
def test_the_ratio_rule_follows_the_masked_law(schedule: Schedule):
    """Chi-square of the second id against its exact law under the mask."""
    counts: Counter[int] = Counter()
    for seed in range(500):
        wanted = params(seed, max_tokens=3)
        w = world(0.6, seed=seed)
        ids = ask(w, wanted, schedule=schedule, rule=Rule.RATIO, draft_length=2).ids
        counts[ids[1]] += 1
    law = [0.0] * VOCAB
    pipeline = SamplingPipeline(
        params(0),
        vocab_size=VOCAB,
        end_ids=EOS,
        constraint=GRAMMARS.constraint(MARCH, ""),
    )
    first = pipeline.distribution(TARGET(PROMPT), History(PROMPT)).dense(VOCAB)
    for token, p in enumerate(first):
        if p:
            row = TARGET((*PROMPT, token))
            second = pipeline.distribution(row, History(PROMPT, (token,))).dense(VOCAB)
            law = [a + float(p) * float(b) for a, b in zip(law, second, strict=True)]
    assert fit([counts[i] for i in range(VOCAB)], law) > ALARM


@pytest.mark.parametrize("schedule", [Schedule.SYNC, Schedule.FREERUN])
def test_relaxed_tokens_are_of_the_grammar_too(schedule: Schedule):
    for seed in range(6):
        answer = ask(world(seed=seed), params(seed), schedule=schedule, rule=Rule.RELAXED)
        assert isinstance(answer.end, Ended)
        assert obeys(tuple(answer.ids))


def test_a_dead_end_ends_that_answer_and_no_other():
    w = world()
    edge = w.edges[0]
    doomed = edge.ask(PROMPT, params(1, grammar=TRAP))
    fine = edge.ask(PROMPT, params(1))
    w.run()
    end = edge.answers[doomed].end
    assert isinstance(end, Failed)
    assert end.code is Code.GRAMMAR
    assert len(edge.answers[doomed].ids) == 4
    assert tuple(edge.answers[fine].ids) == oracle(params(1))
    assert not w.service.sessions


def test_a_row_of_nan_ends_that_answer_and_no_other():
    def broken(context: tuple[int, ...]) -> object:
        row = TARGET(context)
        return row * float("nan") if context[:3] == (9, 9, 9) else row

    w = World(broken, draft(0.3), vocab_size=VOCAB, eos=EOS)  # type: ignore[arg-type]
    edge = w.edges[0]
    free = params(1, grammar=None)
    doomed, fine = edge.ask((9, 9, 9), free), edge.ask(PROMPT, free)
    w.run()
    end = edge.answers[doomed].end
    assert isinstance(end, Failed)
    assert end.code is Code.ENGINE
    assert tuple(edge.answers[fine].ids) == alone(TARGET, PROMPT, free, vocab_size=VOCAB, eos=EOS)


def test_grammars_are_read_for_their_tenant():
    w = world()
    ask(w, params(1))
    assert "tenant" in w.grammars.owners  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("grammars", "grammar"),
    [
        (ToyGrammars(VOCAB), Grammar(kind=GrammarKind.LARK, text="nonsense")),
        (None, MARCH),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_code(grammars: ToyGrammars | None, grammar: Grammar):
    w = World(TARGET, draft(0.3), vocab_size=VOCAB, eos=EOS, grammars=grammars, edge_grammars=False)
    answer = ask(w, params(1, grammar=grammar))
    assert isinstance(answer.end, Failed)
    assert answer.end.code is Code.GRAMMAR
    assert not w.service.sessions


def test_a_cloud_that_greets_without_grammars_is_not_asked():
    w = world()
    w.cloud_hello = type(w.cloud_hello)(
        **{
            **{n: getattr(w.cloud_hello, n) for n in w.cloud_hello.__struct_fields__},
            "grammars": (),
        }
    )
    answer = ask(w, params(1))
    assert isinstance(answer.end, Failed)
    assert answer.end.code is Code.GRAMMAR
    assert not w.forwards
