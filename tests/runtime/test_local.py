"""Co-located generation on toy pairs: the oracle is the same request with draft_length = 0."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math

import numpy as np
import pytest

from faults import fails, refuses_truncation
from laws import ALARM, fit
from outrider.core.relaxation import Relaxation
from outrider.core.relaxed import Policy, RelaxedRule
from outrider.core.tokens import FinishReason, Origin, ParameterError, Rule, SamplingParams
from outrider.engines.base import EngineError
from outrider.engines.drafters import ModelDrafter
from outrider.engines.toy import (
    ToyModel,
    blend_law,
    logits_law,
    random_law,
    scripted_law,
    table_law,
)
from outrider.runtime.local import MAX_DRAFT_LENGTH, GenerationRequest, LocalGenerator
from pair import KINDS, Pieces, Saying, ask, drafters, generator, letters
from toys import remember

WIDTH = 12
LAW = remember(random_law(1, WIDTH), 2)
PROMPT = (3, 1, 4, 1, 5, 3, 1, 4)

SETTINGS = {
    "plain": SamplingParams(),
    "T=0": SamplingParams(temperature=0.0),
    "T=.7": SamplingParams(temperature=0.7),
    "top-k": SamplingParams(temperature=0.7, top_k=3),
    "top-p": SamplingParams(top_p=0.8),
    "min-p": SamplingParams(min_p=0.1),
    "penalties": SamplingParams(
        repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.4
    ),
    "penalties at T=0": SamplingParams(temperature=0.0, frequency_penalty=0.9),
    "bias": SamplingParams(temperature=0.7, logit_bias={2: 3.0, 5: -100.0}),
    "minimum": SamplingParams(min_tokens=12, stop_token_ids=frozenset({2, 7})),
    "all": SamplingParams(
        temperature=0.7,
        top_k=9,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        logit_bias={1: 1.0},
        min_tokens=5,
        stop=("AB", "LA"),
    ),
}
LENGTHS = itertools.cycle(range(1, 13))


def facts(result) -> tuple:
    return result.token_ids, result.text, result.finish_reason, result.logprobs


REQUEST_AT_ZERO = GenerationRequest(
    prompt_ids=(0,), params=SamplingParams(temperature=0.0), draft_length=4
)


# -- I1: the same ids with any draft ----------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_any_draft_changes_nothing(setting, kind):
    params = dataclasses.replace(SETTINGS[setting], max_tokens=14, logprobs=2)
    for seed, lengths in ((0, (1, next(LENGTHS))), (2**63 - 1, (next(LENGTHS),))):
        alone = ask(generator(LAW, width=WIDTH), PROMPT, params, seed=seed, k=0)
        own = PROMPT + alone.token_ids
        assert alone.counters.acceptance is None
        for k in lengths:
            made = generator(LAW, drafters(LAW, WIDTH, own)[kind], width=WIDTH)
            result = ask(made, PROMPT, params, seed=seed, k=k)
            assert facts(result) == facts(alone)
            if kind == "same":
                assert result.counters.acceptance == 1.0
            if kind == "always wrong":
                assert result.counters.accepted == 0


@pytest.mark.parametrize("kind", [k for k in KINDS if "wrong" not in k])
def test_ratio_at_zero_is_greedy(kind):
    alone = ask(generator(LAW, width=WIDTH), PROMPT, temperature=0.0, max_tokens=40, k=0)
    for k in (1, 4, 9):
        made = generator(LAW, drafters(LAW, WIDTH, ())[kind], width=WIDTH)
        result = ask(made, PROMPT, temperature=0.0, max_tokens=40, k=k, rule=Rule.RATIO)
        assert result.token_ids == alone.token_ids
        assert sum(result.counters.residual.values()) == rejections(result)


def rejections(result) -> int:
    return sum(result.counters.drafted_at) - sum(result.counters.accepted_at)


@pytest.mark.parametrize("kind", ["lookup+model", "reduced"])
def test_ratio_has_the_targets_law(kind):
    """Second and third token of 200 seeds, by chi-square (laws: tests/core/test_verify.py)."""
    rows = {i: np.random.default_rng(i).dirichlet(np.ones(4)).tolist() for i in range(4)}
    law = table_law(rows, 4)
    counts = np.zeros((4, 4))
    for seed in range(200):
        made = generator(law, drafters(law, 4, ())[kind], width=4)
        ids = ask(made, (0, 1, 2, 0, 1, 2), seed=seed, max_tokens=3, k=3, rule=Rule.RATIO).token_ids
        counts[ids[1], ids[2]] += 1
    first = np.array(rows[2])
    joint = np.array(
        [
            [(first @ [rows[a][b] for a in range(4)]) * rows[b][c] for c in range(4)]
            for b in range(4)
        ]
    )
    assert fit(counts.ravel(), joint.ravel()) > ALARM


def test_field_case_09():
    """200 random pairs at T=0."""
    kinds = itertools.cycle(["same", "random", "always wrong", "half right"])
    for n in range(200):
        width = 3 + n % 9
        law = remember(random_law(n, width, order=1), 1)
        source = np.random.default_rng(n)
        prompt = source.integers(0, width, 1 + n % 17).tolist()
        if n % 5 == 0:
            prompt = [1] * len(prompt)  # a long run of one token
        alone = ask(generator(law, width=width), prompt, temperature=0.0, max_tokens=64, k=0)
        own = [*prompt, *alone.token_ids]
        made = generator(law, drafters(law, width, own)[next(kinds)], width=width)
        result = ask(made, prompt, temperature=0.0, max_tokens=64, k=1 + n % 8)
        assert result.token_ids == alone.token_ids


# -- end events (field cases 01, 02, 03, 37) ----------


@pytest.mark.parametrize("ends", [(9,), (9, 8)])
@pytest.mark.parametrize("at", range(6))
def test_field_case_01(at, ends):
    script = [0, 1, 2, 3, 4, 5]
    script[at] = ends[-1]  # of two end ids, the second occurs
    script += [6, 6, 6]
    law = scripted_law(script, start=2, width=10, filler=6)
    more = {"width": 10, "eos_token_ids": frozenset(ends)}
    alone = ask(generator(law, **more), (0, 0), temperature=0.0, k=0)
    result = ask(generator(law, law, **more), (0, 0), temperature=0.0, k=5)
    assert facts(result) == facts(alone)
    assert result.token_ids == tuple(script[: at + 1])
    assert result.text == "ABCDEF"[:at]
    assert result.finish_reason is FinishReason.STOP
    assert result.completion_tokens == at + 1


def test_ignore_eos_goes_on():
    law = scripted_law([0, 9, 1], start=1, width=10, filler=2)
    made = generator(law, law, width=10, eos_token_ids=frozenset({9}))
    result = ask(made, (0,), temperature=0.0, ignore_eos=True, max_tokens=5)
    assert result.token_ids == (0, 9, 1, 2, 2)
    assert result.finish_reason is FinishReason.LENGTH


WORDS = Pieces(["A", "B", "<END>", "C", "D", "E", "<E", "ND>"])


@pytest.mark.parametrize("k", [0, 1, 5])
@pytest.mark.parametrize(
    ("limit", "text", "reason"),
    [
        (6, "AB", "stop"),
        (5, "AB", "stop"),
        (3, "AB", "stop"),
        (2, "AB", "length"),
        (1, "A", "length"),
    ],
)
def test_field_case_02(k, limit, text, reason):
    law = scripted_law([0, 1, 2, 3, 4, 5], start=1, width=8)
    made = generator(law, law, width=8, tokenizer=WORDS)
    result = ask(made, (0,), temperature=0.0, k=k, max_tokens=limit, stop=("<END>",))
    assert (result.text, result.finish_reason) == (text, reason)
    assert result.token_ids == (0, 1, 2)[:limit]


def test_field_case_02_early_stop_in_a_long_block():
    law = scripted_law([0, 2, *[3] * 30], start=1, width=8)
    made = generator(law, law, width=8, tokenizer=WORDS)
    result = ask(made, (0,), temperature=0.0, k=32, max_tokens=100, stop=("<END>",))
    assert (result.text, result.finish_reason) == ("A", "stop")
    assert result.token_ids == (0, 2)


@pytest.mark.parametrize("k", [0, 1, 2, 3, 4, 8])
def test_field_case_19_whatever_the_block(k):
    tokenizer = Pieces(["Hi", "\nUs", "er", ":", " more", "ual", "x", "\n"])
    cases = [
        (["Hi", "\nUs", "er", ":", " more"], ("\nUser:",), 5, "Hi", "stop"),
        (["Hi", "\nUs", "ual"], ("\nUser:",), 3, "Hi\nUsual", "length"),
        (["x", "\n", "\n", "x"], ("\n\n",), 4, "x", "stop"),
    ]
    for pieces, stop, limit, text, reason in cases:
        law = scripted_law(tokenizer.ids(*pieces), start=1, width=8)
        made = generator(law, law, width=8, tokenizer=tokenizer)
        result = ask(made, (0,), temperature=0.0, k=k, max_tokens=limit, stop=stop)
        assert (result.text, result.finish_reason) == (text, reason)


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_field_case_03(limit, k):
    alone = ask(generator(LAW, width=WIDTH), PROMPT, max_tokens=limit, k=0)
    made = generator(LAW, LAW, width=WIDTH)
    result = ask(made, PROMPT, max_tokens=limit, k=k)
    assert result.token_ids == alone.token_ids
    assert len(result.token_ids) == limit
    assert result.finish_reason is FinishReason.LENGTH
    assert result.target_forwards == math.ceil(limit / (k + 1))
    assert result.counters.drafted == limit - result.target_forwards  # K lowered to what is left


def test_field_case_37_an_end_token_in_the_block():
    law = scripted_law([1, 2, 9, 4, 5, 6], start=1, width=10, filler=7)
    tokens = [1, 2, 9, 4, 5]
    made = generator(
        law, Saying(lambda committed, n: tokens), width=10, eos_token_ids=frozenset({9})
    )
    result = ask(made, (0,), temperature=0.0, k=5)
    assert result.token_ids == (1, 2, 9)
    assert (result.counters.drafted, result.counters.accepted) == (3, 3)
    assert result.counters.drafted_at == result.counters.accepted_at == [1, 1, 1]


def test_field_case_37_numbers_add_up():
    for seed in range(100):
        law = remember(random_law(seed, WIDTH), 2)
        draft = remember(blend_law(law, random_law(seed + 1, WIDTH), 0.4, seed), 3)
        made = generator(law, draft, width=WIDTH, eos_token_ids=frozenset({0}))
        request = GenerationRequest(
            prompt_ids=PROMPT,
            params=SamplingParams(seed=seed, max_tokens=20),
            draft_length=1 + seed % 7,
            rule=Rule.RATIO if seed % 2 else Rule.COUPLED,
        )
        stream = made.stream(request)
        steps = list(stream)
        result, counters = stream.result, stream.result.counters
        origins = [o for s in steps for o in s.origins]
        assert sum(len(s.tokens) for s in steps) == result.completion_tokens == len(origins)
        assert counters.rounds == len(steps) == result.target_forwards
        assert counters.accepted == origins.count(Origin.DRAFT) == sum(counters.accepted_at)
        assert counters.drafted == sum(counters.drafted_at)
        assert counters.drafted - counters.accepted == origins.count(Origin.CORRECTION)
        assert sum(counters.residual.values()) == (
            origins.count(Origin.CORRECTION) if request.rule is Rule.RATIO else 0
        )
        assert counters.acceptance is None or 0.0 <= counters.acceptance <= 1.0
        assert tuple(t for s in steps for t in s.tokens) == result.token_ids
        assert "".join(s.text for s in steps) == result.text
    assert (
        ask(generator(LAW, width=WIDTH), PROMPT, k=0, max_tokens=3).as_dict()["acceptance"] is None
    )


# -- seeds (field case 06) ----------


def test_field_case_06():
    params = SamplingParams(seed=42, temperature=2.0, max_tokens=10)
    first = ask(generator(LAW, width=WIDTH), PROMPT, params, k=0).token_ids
    shared = generator(LAW, remember(random_law(5, WIDTH), 2), width=WIDTH)
    for n in range(10):
        ask(shared, PROMPT[: 1 + n % 8], seed=n, max_tokens=5)  # another request in between
        assert ask(shared, PROMPT, params, k=n).token_ids == first
    again = generator(LAW, LAW, width=WIDTH)  # a restart, with another draft
    assert ask(again, PROMPT, params).token_ids == first
    others = {ask(shared, PROMPT, params, seed=seed).token_ids for seed in range(10)}
    assert len(others) >= 2


# -- penalties and biases on every row (field cases 07, 08) ----------


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize(("penalty", "text"), [(0.4, "hhwhwhwh"), (0.0, "hhhhhhhh")])
@pytest.mark.parametrize("rule", Rule)
def test_field_case_07(k, penalty, text, rule):
    law = logits_law([2.0, 1.5, 0.0])
    for draft in (law, logits_law([1.0, 2.0, 0.0])):
        made = generator(law, draft, width=3, tokenizer=Pieces("hwx"))
        result = ask(
            made, (2,), temperature=0.0, frequency_penalty=penalty, max_tokens=8, k=k, rule=rule
        )
        assert result.text == text
    assert k == 0 or penalty == 0.0 or result.counters.drafted > 0


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_field_case_08(rule, temperature):
    law = logits_law([0, 0, 0, 0, 0, 4, 0, 0])
    made = generator(law, law, width=8)
    params = SamplingParams(temperature=temperature, max_tokens=32)
    banned = ask(made, (0,), params, logit_bias={5: -100}, rule=rule).token_ids
    assert len(banned) == 32
    assert 5 not in banned
    forced = ask(made, (0,), params, logit_bias={6: 100}, rule=rule).token_ids
    assert set(forced) == {6}


# -- slots, windows, reuse (field cases 10, 13, 14, 15, 17) ----------


def test_field_case_10_slots_equal_claims():
    """100 rounds with 0..K accepted; both sides hold the committed ids without the newest."""
    own = ask(generator(LAW, width=WIDTH), PROMPT, max_tokens=300, k=0).token_ids
    law = remember(blend_law(LAW, random_law(7, WIDTH), 0.35, 3), 3)
    drafting = ToyModel(law, vocab_size=WIDTH)
    target = ToyModel(LAW, vocab_size=WIDTH)
    made = LocalGenerator(target, letters(WIDTH), ModelDrafter("toy", model=drafting))
    request = GenerationRequest(
        prompt_ids=PROMPT, params=SamplingParams(max_tokens=300), draft_length=5
    )
    committed, accepted, rounds = list(PROMPT), set(), 0
    for step in made.stream(request):
        committed += step.tokens
        accepted.add(step.origins.count(Origin.DRAFT))
        rounds += 1
        (slot,) = target._slots
        assert target.tokens(slot) == tuple(committed[:-1])
    assert rounds > 60
    assert accepted == {0, 1, 2, 3, 4, 5}
    assert tuple(committed[len(PROMPT) :]) == own
    assert drafting.open_slots == 0
    assert target.open_slots == 1


def test_field_case_10_the_draft_keeps_all_it_can():
    """Not an id that is wrong, and not one too few: cutting a little too far fails nothing, it
    only makes drafts worse or dearer, round by round."""
    drafting = ToyModel(LAW, vocab_size=WIDTH)
    session = ModelDrafter("toy", model=drafting).session(3, SamplingParams(), Rule.COUPLED)
    (slot,) = drafting._slots
    source = np.random.default_rng(4)
    committed, at_first_forward = [1, 2, 3], []
    real = drafting.forward

    def spy(blocks):
        at_first_forward.append(drafting.tokens(slot))
        return real(blocks)

    drafting.forward = spy
    for _ in range(100):
        held = drafting.tokens(slot)
        shared = [a == b for a, b in zip(held, committed[:-1], strict=False)]
        right = (*shared, False).index(False)
        at_first_forward.clear()
        drafts = session.propose(committed, 4).tokens
        assert at_first_forward[0] == tuple(committed[:right])
        assert drafting.tokens(slot) == (*committed, *drafts[:-1])
        committed += [*drafts[: int(source.integers(0, 5))], int(source.integers(0, WIDTH))]
        committed += source.integers(0, WIDTH, source.choice((0, 2, 3, 4))).tolist()  # free-run
    session.close()


@pytest.mark.parametrize("k", [1, 4, 7])
def test_field_case_10_acceptance_does_not_sink(k):
    made = generator(LAW, LAW, width=WIDTH)
    result = ask(made, PROMPT, max_tokens=100 * (k + 1), k=k)
    assert result.counters.rounds == 100
    assert result.counters.acceptance == 1.0
    assert result.counters.accepted_at == [100] * k


@pytest.mark.parametrize("window", [64, 128])
@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("length", [60, 63, 64, 65, 95])
def test_field_case_13(length, rule, window):
    """The draft's window is smaller than the target's 96, or larger."""
    prompt = np.random.default_rng(length).integers(0, WIDTH, length).tolist()
    target = ToyModel(LAW, vocab_size=WIDTH, context_length=96)
    draft = ModelDrafter("other", model=ToyModel(LAW, vocab_size=WIDTH, context_length=window))
    alone = ask(LocalGenerator(target, letters(WIDTH)), prompt, max_tokens=50, k=0)
    made = LocalGenerator(target, letters(WIDTH), draft)
    result = ask(made, prompt, max_tokens=50, k=5, rule=rule)
    assert len(result.token_ids) == 96 - length
    assert result.finish_reason is FinishReason.LENGTH
    if rule is not Rule.RATIO:  # relaxed without a budget is exact
        assert result.token_ids == alone.token_ids
    assert (result.counters.drafted > 0) == (length <= window and length + 1 < 96)
    assert len(ask(made, (1, 2), max_tokens=5).token_ids) == 5  # both still alive


def test_a_prompt_that_fills_the_window_is_refused():
    made = generator(LAW, width=WIDTH, context_length=8)
    with pytest.raises(ParameterError, match="at most 7 tokens") as caught:
        ask(made, PROMPT)
    assert caught.value.field == "prompt"
    assert ask(made, PROMPT[:7], max_tokens=9).completion_tokens == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("length", [1, 15, 16, 17])
def test_field_case_14(length, temperature):
    """Reused prefixes hold committed tokens only: hit and miss give the same ids."""
    law = remember(blend_law(LAW, random_law(8, WIDTH), 0.5, 3), 3)
    prompt = np.random.default_rng(length).integers(0, WIDTH, length).tolist()
    params = SamplingParams(temperature=temperature, max_tokens=20)
    kept = generator(LAW, law, width=WIDTH)

    def fresh(p):
        return ask(generator(LAW, law, width=WIDTH), p, params)

    first, second = ask(kept, prompt, params), ask(kept, prompt, params)
    assert first.token_ids == second.token_ids == fresh(prompt).token_ids
    for n in (0, 1, 5, 19, 20):
        longer = [*prompt, *first.token_ids[:n], 2, 0, 2]
        assert ask(kept, longer, params).token_ids == fresh(longer).token_ids
        ask(kept, prompt, params)
    assert kept.target.open_slots == 1


def test_prefix_reuse_computes_only_what_is_new():
    target = ToyModel(LAW, vocab_size=WIDTH)
    fed = []
    real = target.forward
    target.forward = lambda blocks: fed.append(len(blocks[0].tokens)) or real(blocks)
    made = LocalGenerator(target, letters(WIDTH))
    answer = ask(made, PROMPT, max_tokens=4, k=0).token_ids
    fed.clear()
    ask(made, [*PROMPT, *answer, 1, 2], max_tokens=1, k=0)
    assert fed == [3]  # the newest answer token was never fed, and the two new ones


def test_field_case_15():
    made = generator(LAW, LAW, width=WIDTH)
    source = np.random.default_rng(2)
    long, short = source.integers(0, WIDTH, 500).tolist(), source.integers(0, WIDTH, 40).tolist()
    for prompt in (long, short, long):
        assert ask(made, prompt, max_tokens=40).counters.acceptance == 1.0


def test_field_case_17():
    """While drafting pauses the draft falls behind; its first block afterwards is right."""
    own = list(PROMPT + ask(generator(LAW, width=WIDTH), PROMPT, max_tokens=40, k=0).token_ids)
    for lookup in (False, True):
        drafter = ModelDrafter("toy", model=ToyModel(LAW, vocab_size=WIDTH), lookup=lookup)
        session = drafter.session(len(PROMPT), SamplingParams(), Rule.COUPLED)
        at = len(PROMPT)
        for count in (4, 0, 0, 0, 4, 0, 2, 1, 7):
            drafts = session.propose(own[:at], count)
            assert len(drafts) == count
            if not lookup:
                assert list(drafts.tokens) == own[at : at + count]
            at += 1 + (count if not lookup else 0)
        session.close()


@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("rule", Rule)
def test_a_session_after_rejections_drafts_as_a_fresh_one(rule, lookup):
    """Slot, penalties' history and lookup table follow the committed ids, nothing else."""
    drafter = ModelDrafter("toy", model=ToyModel(LAW, vocab_size=WIDTH), lookup=lookup)
    params = SamplingParams(frequency_penalty=0.8, repetition_penalty=1.3, min_tokens=9)
    session = drafter.session(len(PROMPT), params, rule)
    source = np.random.default_rng(9)
    committed = list(PROMPT)
    for _ in range(30):
        fresh = drafter.session(len(PROMPT), params, rule)
        expected, drafts = fresh.propose(committed, 5), session.propose(committed, 5)
        fresh.close()
        assert drafts.tokens == expected.tokens
        assert drafts.q == expected.q
        committed += [*drafts.tokens[: int(source.integers(0, 5))], int(source.integers(0, WIDTH))]
        committed += source.integers(0, WIDTH, source.choice((0, 2, 3, 4))).tolist()  # free-run
    session.close()


# -- logprobs (field case 26), closed form (field case 40) ----------


def test_field_case_26():
    """Chosen ids of probability .5, .3 and .2, each as a draft, a correction and a bonus."""
    wanted = [-0.693147, -1.203973, -1.609438]

    def law(context):
        return np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32))

    seed, own = next(
        (s, ids)
        for s in range(1000)
        if (ids := ask(generator(law, width=3), (0,), seed=s, max_tokens=3, k=0).token_ids)
        == (0, 1, 2)
    )
    plans = {
        "accepted, accepted, bonus": [0, 1],
        "correction, then target": [2],
        "accepted, corrected": [0, 0],
    }
    for plan in plans.values():
        guess = Saying(lambda c, n, g=plan: g[len(c) - 1 :])
        result = ask(generator(law, guess, width=3), (0,), seed=seed, max_tokens=3, k=3, logprobs=0)
        assert result.token_ids == own
        assert [e.logprob for e in result.logprobs] == pytest.approx(wanted, abs=1e-5)


def test_field_case_40():
    """Acceptance .8, K=4: (1 - .8**5)/(1 - .8) = 3.3616 tokens a round. All sixteen patterns of
    right and wrong drafts with their weights, so without sampling error."""
    law = logits_law([0.0, 30.0])
    mean = 0.0
    for right in itertools.product((True, False), repeat=4):
        guess = Saying(lambda committed, n, r=right: [int(x) for x in r][:n])
        first = next(iter(generator(law, guess, width=2).stream(REQUEST_AT_ZERO)))
        weight = math.prod(0.8 if x else 0.2 for x in right)
        mean += weight * len(first.tokens)
    assert mean == pytest.approx(3.3616, abs=1e-9)
    result = ask(generator(law, law, width=2), (0,), max_tokens=7)
    assert (result.completion_tokens, result.finish_reason) == (7, "length")


# -- I2: what was shown stays ----------


def test_steps_only_ever_add():
    made = generator(LAW, remember(random_law(3, WIDTH), 2), width=WIDTH)
    request = GenerationRequest(
        prompt_ids=PROMPT, params=SamplingParams(max_tokens=40, stop=("ABCDE",)), draft_length=6
    )
    ids, text = [], ""
    stream = made.stream(request)
    for step in stream:
        ids += step.tokens
        text += step.text
        assert step.tokens
        assert stream._life.generation.sequence.output == tuple(ids)
    assert stream.result.token_ids == tuple(ids)
    assert stream.result.text == text


# -- the end of a request, planned or not ----------


class Boom(Exception):
    pass


def good_after(made: LocalGenerator) -> None:
    """Slots freed, and the next request is right."""
    assert made.target.open_slots <= 1
    if isinstance(made.drafter, ModelDrafter):
        assert made.drafter.model.open_slots == 0
    for prompt in (PROMPT, PROMPT[:3]):
        alone = ask(generator(LAW, width=WIDTH), prompt, max_tokens=20, k=0)
        assert ask(made, prompt, max_tokens=20).token_ids == alone.token_ids


def pair() -> LocalGenerator:
    return generator(LAW, remember(random_law(6, WIDTH), 2), width=WIDTH)


REQUEST = GenerationRequest(prompt_ids=PROMPT, params=SamplingParams(max_tokens=20))


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_close_in_the_middle(rounds):
    made = pair()
    stream = made.stream(REQUEST)
    shown = [t for _, step in zip(range(rounds), stream, strict=False) for t in step.tokens]
    stream.close()
    stream.close()
    assert stream.result.finish_reason is None
    assert stream.result.token_ids == tuple(shown)
    assert list(stream) == []
    good_after(made)


def test_with_closes():
    made = pair()
    with made.stream(REQUEST) as stream:
        for _ in stream:
            break
    assert stream.result.completion_tokens > 0
    good_after(made)


@pytest.mark.parametrize("error", [Boom(), KeyboardInterrupt(), EngineError("out of memory")])
@pytest.mark.parametrize("call", [1, 2, 5])
@pytest.mark.parametrize("after", [None, 1])
@pytest.mark.parametrize("side", ["target", "draft"])
def test_an_engine_fails_in_the_middle(side, call, after, error):
    made = pair()
    model = made.target if side == "target" else made.drafter.model
    stream = made.stream(REQUEST)
    steps = []
    with fails(model, error, call=call, after=after), pytest.raises(type(error)):
        steps.extend(stream)
    assert stream.result.finish_reason is None
    good_after(made)


def test_a_caller_fails_in_the_middle():
    made = pair()
    with contextlib.suppress(Boom), made.stream(REQUEST) as stream:
        for _ in stream:
            raise Boom
    assert stream.result.completion_tokens > 0
    good_after(made)


def test_a_target_that_cannot_clean_up_loses_its_slot():
    made = pair()
    stream = made.stream(REQUEST)
    next(iter(stream))
    with refuses_truncation(made.target, Boom()), pytest.raises(Boom):
        stream.close()
    assert made.target.open_slots == 0
    assert stream.result.completion_tokens > 0
    good_after(made)


def test_a_request_that_cannot_begin_holds_nothing():
    made = pair()
    made.drafter.model._max_slots = 0
    with pytest.raises(EngineError, match="slots are taken"):
        made.stream(REQUEST)
    made.drafter.model._max_slots = 4
    good_after(made)
    ask(made, PROMPT, max_tokens=2)
    with refuses_truncation(made.target, Boom()), pytest.raises(Boom):
        made.stream(REQUEST)
    good_after(made)


def test_one_request_at_a_time():
    made = pair()
    stream = made.stream(REQUEST)
    with pytest.raises(RuntimeError, match="one request at a time"):
        made.stream(REQUEST)
    with pytest.raises(RuntimeError, match="still running"):
        _ = stream.result
    stream.close()
    good_after(made)


def test_closing_the_generator_frees_its_slot():
    made = pair()
    made.close()
    ask(made, PROMPT, max_tokens=3)
    made.close()
    assert made.target.open_slots == 0
    good_after(made)


@pytest.mark.parametrize("side", ["target", "draft"])
@pytest.mark.parametrize("rule", Rule)
def test_rows_that_cannot_be_sampled_name_the_model(side, rule):
    def broken(context):
        return np.full(WIDTH, np.nan if len(context) > 10 else 0.0, dtype=np.float32)

    laws = {"target": LAW, "draft": LAW, side: broken}
    target = ToyModel(laws["target"], vocab_size=WIDTH, name="big")
    draft = ToyModel(laws["draft"], vocab_size=WIDTH, name="tiny")
    made = LocalGenerator(target, letters(WIDTH), ModelDrafter("toy", model=draft))
    with pytest.raises(EngineError, match="big" if side == "target" else "tiny"):
        ask(made, PROMPT, rule=rule, max_tokens=30)
    assert draft.open_slots == 0


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("prompt", {"prompt_ids": ()}),
        ("prompt", {"prompt_ids": (1, WIDTH)}),
        ("prompt", {"prompt_ids": (-1,)}),
        ("logit_bias", {"params": SamplingParams(logit_bias={WIDTH: 1.0})}),
        ("stop_token_ids", {"params": SamplingParams(stop_token_ids=frozenset({WIDTH}))}),
        ("draft_length", {"draft_length": -1}),
        ("draft_length", {"draft_length": MAX_DRAFT_LENGTH + 1}),
        ("draft_length", {"draft_length": True}),
        ("draft_length", {"draft_length": 2.0}),
    ],
)
def test_refused_requests_name_the_field(field, changes):
    made = pair()
    with pytest.raises(ParameterError) as caught:
        made.stream(dataclasses.replace(REQUEST, **changes))
    assert caught.value.field == field
    good_after(made)


def test_the_result_as_json():
    made = pair()
    clock = itertools.count()
    made.clock = lambda: float(next(clock))
    result = ask(made, PROMPT, max_tokens=9, logprobs=2, rule=Rule.RATIO)
    facts = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert facts["token_ids"] == list(result.token_ids)
    assert facts["completion_tokens"] == 9
    assert facts["finish_reason"] == "length"
    assert len(facts["logprobs"]) == 9
    assert sum(facts["residual"]["steps"].values()) == facts["drafted"] - facts["accepted"]
    assert set(facts["residual"]) == {"steps"}, "no wire, no bytes"
    assert facts["timing"]["ttft_s"] > 0
    assert facts["timing"]["tpot_s"] > 0
    one = ask(made, PROMPT, max_tokens=1).as_dict()
    assert one["timing"]["tpot_s"] is None
    assert "residual" not in one


def test_relaxed_tokens_behind_a_stop_are_not_counted_here_either():
    """As at an edge (tests/session/test_relaxed_wire.py): all that is reported was committed."""
    draft = ModelDrafter("other", model=ToyModel(random_law(5, WIDTH), vocab_size=WIDTH))
    target = ToyModel(random_law(6, WIDTH), vocab_size=WIDTH)
    made = LocalGenerator(target, letters(WIDTH), draft)
    relaxation = Relaxation(
        policy=Policy(rule=RelaxedRule.FSD, threshold=math.log(2)), budget=math.inf
    )
    # Strings: a draft does not see them coming and goes on behind them.
    stops = tuple(letters(WIDTH).decode([i]) for i in range(4))
    behind = 0
    for seed in range(20):
        params = SamplingParams(seed=seed, max_tokens=60, temperature=1.5, stop=stops)
        stream = made.stream(
            GenerationRequest(
                prompt_ids=PROMPT,
                params=params,
                rule=Rule.RELAXED,
                relaxation=relaxation,
                draft_length=8,
            )
        )
        shown = sum(step.origins.count(Origin.RELAXED) for step in stream)
        assert stream.result.relaxed is not None
        assert stream.result.relaxed.relaxed == shown
        behind += stream._life._verifier.ledger.relaxed - shown
    assert behind > 0, "some did lie behind a stop"
