"""The mask in the sampling pipeline: every filter behind it, ends where the text may end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from outrider.core import rng
from outrider.core.grammar import MAX_GRAMMAR_BYTES, Allowed, Constraint, Grammar, GrammarKind
from outrider.core.sampling import DeadEndError, History, RowError, SamplingPipeline
from outrider.core.tokens import GrammarError, ParameterError, SamplingParams
from outrider.session.verifier import Verifier

WIDTH = 12
END = 11
FREE = Grammar(kind=GrammarKind.JSON_OBJECT)


class Fixed:
    """The same answer everywhere; what it was asked about is kept."""

    def __init__(self, ids: Sequence[int], *, end: bool = False) -> None:
        self.mask = np.zeros(WIDTH, dtype=bool)
        self.mask[list(ids)] = True
        self.end = end
        self.asked: list[tuple[int, ...]] = []

    def allowed(self, output: Sequence[int]) -> Allowed:
        self.asked.append(tuple(output))
        return Allowed(self.mask, self.end)

    def fork(self) -> Constraint:
        return self


def pipeline(
    constraint: Constraint | None, support: list[int] | None = None, **params: object
) -> SamplingPipeline:
    return SamplingPipeline(
        SamplingParams(**params),  # type: ignore[arg-type]
        vocab_size=WIDTH,
        support=None if support is None else np.array(support),
        end_ids=frozenset({END}),
        constraint=constraint,
    )


def row(seed: int, width: int = WIDTH) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, width).astype(np.float32)


FILTERS: list[dict[str, object]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_k": 2},
    {"top_p": 0.7},
    {"min_p": 0.1, "temperature": 2.0},
    {"repetition_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": {3: 4.0}},
]


@pytest.mark.parametrize("filters", FILTERS)
def test_masking_is_the_same_as_logits_of_minus_infinity(filters: dict[str, object]):
    history = History((1, 2), (3, 4))
    for seed in range(40):
        logits = row(seed)
        ids = [0, 3, 4, 7] if seed % 2 else [7]
        cut = logits.copy()
        cut[[i for i in range(WIDTH) if i not in ids]] = -np.inf
        masked = pipeline(Fixed(ids), **filters).distribution(logits, history)
        plain = pipeline(None, **filters).distribution(cut, history)
        assert np.allclose(masked.dense(WIDTH), plain.dense(WIDTH))
        key = rng.key(seed, rng.Purpose.TOKEN, 5)
        assert masked.draw(key) == plain.draw(key)


def test_the_row_is_left_as_it_was():
    logits = row(1)
    before = logits.copy()
    pipeline(Fixed([2])).distribution(logits, History(()))
    assert (logits == before).all()


@pytest.mark.parametrize("end", [True, False])
def test_an_end_id_may_occur_where_the_text_may_end(end: bool):
    constraint = Fixed([2], end=end)
    for temperature in (0.0, 1.0):
        p = pipeline(constraint, temperature=temperature, stop_token_ids=(5,))
        loud = np.zeros(WIDTH, dtype=np.float32)
        loud[END] = loud[5] = 20.0
        found = p.distribution(loud, History(()))
        assert (found.likeliest() in (END, 5)) is end
    assert constraint.mask.sum() == 1, "the mask is the constraint's own"


def test_the_constraint_is_asked_about_the_output_alone():
    constraint = Fixed([2])
    pipeline(constraint).distribution(row(0), History((8, 9), (2, 2)))
    assert constraint.asked == [(2, 2)]


def test_behind_an_end_nothing_is_asked():
    """A block may go on behind an end that stands; nobody reads what is drawn there."""
    constraint = Fixed([2])
    pipeline(constraint).distribution(row(0), History((), (2, END)))
    pipeline(constraint).distribution(row(0), History((), (2, END, 4)))
    assert constraint.asked == []


def test_where_nothing_may_follow_there_is_an_error():
    with pytest.raises(DeadEndError):
        pipeline(Fixed([])).distribution(row(0), History(()))
    impossible = np.full(WIDTH, -np.inf, dtype=np.float32)
    impossible[1] = 0.0
    with pytest.raises(DeadEndError):
        pipeline(Fixed([2])).distribution(impossible, History(()))
    # A grammar that must end and a request that must not.
    with pytest.raises(DeadEndError):
        pipeline(Fixed([], end=True), min_tokens=3).distribution(row(0), History(()))


def test_a_reduced_vocabulary_is_masked_by_id():
    found = pipeline(Fixed([3, 4]), support=[0, 3, 7]).distribution(row(0, 3), History(()))
    assert found.ids.tolist() == [3]
    with pytest.raises(DeadEndError):
        pipeline(Fixed([4]), support=[0, 3, 7]).distribution(row(0, 3), History(()))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_rows_stay_errors(bad: float, temperature: float):
    logits = row(0)
    logits[2] = bad
    with pytest.raises(RowError) as caught:
        pipeline(Fixed([2, 3]), temperature=temperature).distribution(logits, History(()))
    assert not isinstance(caught.value, DeadEndError)


def test_a_grammar_is_checked_with_the_parameters():
    SamplingParams(grammar=FREE)
    SamplingParams(grammar=Grammar(kind=GrammarKind.REGEX, text="a" * MAX_GRAMMAR_BYTES))
    with pytest.raises(GrammarError, match=str(MAX_GRAMMAR_BYTES)):
        SamplingParams(grammar=Grammar(kind=GrammarKind.REGEX, text="é" * MAX_GRAMMAR_BYTES))
    with pytest.raises(GrammarError, match="kinds"):
        SamplingParams(grammar=Grammar(kind="prose", text=""))  # type: ignore[arg-type]
    with pytest.raises(GrammarError, match="kinds"):
        SamplingParams(grammar="a|b")  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="ignore_eos"):
        SamplingParams(grammar=FREE, ignore_eos=True)


def test_a_verifier_takes_a_grammar_and_its_constraint_together():
    from outrider.core.tokens import Rule

    for params, constraint in ((SamplingParams(grammar=FREE), None), (SamplingParams(), Fixed([]))):
        with pytest.raises(ValueError, match="together"):
            Verifier(
                params,
                Rule.COUPLED,
                prompt=(1,),
                vocab_size=WIDTH,
                end_ids=frozenset(),
                constraint=constraint,
            )
