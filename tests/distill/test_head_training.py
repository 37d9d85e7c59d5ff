"""Examples, labels, training and figures of the stop head."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the torch extra is not installed")

from laws import normal_tail  # noqa: E402
from outrider.core import rng  # noqa: E402
from outrider.core.rng import Purpose  # noqa: E402
from outrider.core.sampling import Distribution  # noqa: E402
from outrider.core.tokens import Rule, SamplingParams  # noqa: E402
from outrider.distill.examples import Examples, collect, joined, standing  # noqa: E402
from outrider.distill.head import (  # noqa: E402
    HeadConfig,
    auc,
    figures,
    predictions,
    train_head,
    weighted_loss,
)
from outrider.engines.base import EngineError, FloatRow  # noqa: E402
from outrider.engines.drafters import ModelDrafter  # noqa: E402
from outrider.engines.toy import ToyModel, blend_law, random_law  # noqa: E402

F = np.float32
WIDTH = 12


def law(*p: float, ids: tuple[int, ...] | None = None) -> Distribution:
    names = np.array(ids or range(len(p)), dtype=np.int64)
    with np.errstate(divide="ignore"):
        return Distribution(names, np.log(np.array(p, F)), rng.token_offsets(names))


def test_a_guess_stands_with_its_share_of_the_match():
    """Two ids: both sides draw x with probability min(p, q)."""
    p, q = law(0.7, 0.3), law(0.4, 0.6)
    assert standing(p, q, 0) == pytest.approx(1.0, abs=1e-6)
    assert standing(p, q, 1) == pytest.approx(0.3 / 0.6, rel=1e-6)
    assert standing(law(0.0, 1.0), q, 0) == 0.0
    # A draft with a smaller head: 1 / (max(1, 1) + max(1, 1) + .5/.3) / .5 for id 3
    assert standing(law(0.5, 0.0, 0.2, 0.3), law(0.4, 0.6, ids=(2, 3)), 3) == pytest.approx(
        1 / ((1 + 0.5 / 0.3 + max(0.2 / 0.3, 0.4 / 0.6)) * 0.6), rel=1e-6
    )


def test_the_closed_form_against_the_noise_itself():
    """20,000 positions of real noise; two-sided p-value above 1e-3 for each id."""
    p, q = law(0.4, 0.3, 0.2, 0.06, 0.04), law(0.1, 0.4, 0.1, 0.2, 0.2)
    drawn, matched = np.zeros(5), np.zeros(5)
    for at in range(20_000):
        key = rng.key(11, Purpose.TOKEN, at)
        x = q.draw(key)
        drawn[x] += 1
        matched[x] += x == p.draw(key)
    for x in range(5):
        share = standing(p, q, x)
        z = (matched[x] - drawn[x] * share) / math.sqrt(drawn[x] * share * (1 - share) + 1e-9)
        assert normal_tail(z) > 1e-3 or matched[x] == drawn[x] * round(share)


class Telling(ToyModel):
    """Its hidden state is its own row of logits: all there is to know."""

    def hidden(self, slot: int) -> FloatRow:
        return self._law(self.tokens(slot))


def pair(share: float = 0.5) -> tuple[ToyModel, ModelDrafter]:
    first = random_law(3, WIDTH)
    other = blend_law(first, random_law(4, WIDTH), share, 9)
    target, draft = ToyModel(first, vocab_size=WIDTH), Telling(other, vocab_size=WIDTH)
    return target, ModelDrafter("toy", model=draft)


def text(target: ToyModel, prompt: tuple[int, ...], count: int, seed: int) -> list[int]:
    ids = list(prompt)
    for at in range(len(ids), len(ids) + count):
        row = target._law(tuple(ids))
        names = np.arange(WIDTH)
        q = Distribution(names, row, rng.token_offsets(names))
        ids.append(q.draw(rng.key(seed, Purpose.TOKEN, at)))
    return ids


def test_examples_are_of_the_very_guesses_a_session_makes():
    target, drafter = pair()
    params = SamplingParams(seed=21)
    ids = text(target, (1, 2, 3), 30, seed=21)
    found = collect(target, drafter, ids, 3, params)
    assert len(found) == 30
    assert found.hidden.shape == (30, WIDTH)
    assert (target.open_slots, drafter.model.open_slots) == (0, 0)
    session = drafter.session(3, params, Rule.COUPLED)
    stood = [session.propose(ids[:at], 1).tokens[0] == ids[at] for at in range(3, 33)]
    assert found.stood.tolist() == stood
    assert 3 < sum(stood) < 28
    for i, at in enumerate(range(3, 33)):
        row = drafter.model._law(tuple(ids[:at]))
        np.testing.assert_array_equal(found.hidden[i], row)
        q = np.exp(row - np.logaddexp.reduce(row))
        assert found.entropy[i] == pytest.approx(-(q * np.log(q)).sum(), abs=1e-5)
        assert np.isclose(np.log(q), found.log_q[i], atol=1e-4).any()


def test_a_perfect_draft_always_stands_and_more_draws_are_others():
    target, drafter = pair(share=0.0)
    ids = text(target, (1, 2), 12, seed=2)
    found = collect(target, drafter, ids, 2, SamplingParams(seed=2), draws=3)
    assert len(found) == 36
    assert found.stood.all()
    assert found.label == pytest.approx(np.ones(36), abs=1e-5)
    assert len(set(found.log_q[:3].tolist()) | set(found.log_q[3:6].tolist())) > 2


def test_a_draft_without_hidden_states_cannot_be_collected_from():
    target, drafter = pair()
    blind = ModelDrafter("toy", model=ToyModel(drafter.model._law, vocab_size=WIDTH))
    with pytest.raises(EngineError, match="shows no hidden state"):
        collect(target, blind, [1, 2, 3], 1, SamplingParams())
    assert target.open_slots == 0


def test_guesses_that_are_end_ids_are_examples_too():
    target, drafter = pair()
    ends = frozenset(range(0, WIDTH, 2))
    ending = Telling(drafter.model._law, vocab_size=WIDTH, eos_token_ids=ends)
    ids = text(target, (1, 2, 3), 20, seed=21)
    params = SamplingParams(seed=21)
    same = collect(target, ModelDrafter("toy", model=ending), ids, 3, params)
    assert same.label.tolist() == collect(target, drafter, ids, 3, params).label.tolist()
    with pytest.raises(ValueError, match="min_tokens"):
        collect(target, drafter, ids, 3, SamplingParams(min_tokens=1))


EASY = HeadConfig(size=16, state_scale=1.0, rate=4e-3)
"""Six components that say much: nothing to be careful about."""


def synthetic(count: int, seed: int) -> Examples:
    """Stands with sigmoid(2 h0 - h1 + log q + 1); the other states are noise."""
    draw = np.random.default_rng(seed)
    hidden = draw.normal(size=(count, 6)).astype(F) * F(3) + F(5)
    logs = -draw.exponential(size=count).astype(F)
    logit = 2 * (hidden[:, 0] - 5) / 3 - (hidden[:, 1] - 5) / 3 + logs + 1
    label = (1 / (1 + np.exp(-logit))).astype(F)
    return Examples(
        hidden=hidden,
        log_q=logs,
        entropy=draw.uniform(0, 4, count).astype(F),
        label=label,
        stood=draw.uniform(size=count) < label,
    )


@pytest.fixture(scope="module")
def trained():
    return train_head(synthetic(6000, 1), draft="toy", config=EASY, data="made up")


def test_training_finds_what_there_is_to_find(trained):
    held_out = synthetic(4000, 2)
    best = figures(held_out.label.astype(np.float64), held_out)
    found = figures(predictions(trained, held_out), held_out)
    assert best["auc"] > 0.8
    assert found["auc"] > best["auc"] - 0.02
    assert found["brier"] < best["brier"] + 0.01 < best["base"]


def test_a_weight_of_six_does_not_bend_the_calibration(trained):
    held_out = synthetic(4000, 3)
    predicted = predictions(trained, held_out)
    assert predicted.mean() == pytest.approx(held_out.label.mean(), abs=0.03)
    bent = np.mean(
        [
            trained.weighted(h, math.exp(q), float(e))
            for h, q, e in zip(held_out.hidden, held_out.log_q, held_out.entropy, strict=True)
        ]
    )
    assert bent < held_out.label.mean() - 0.15


def test_a_small_state_scale_keeps_the_noise_of_many_components_out():
    """300 components that say nothing, 600 guesses that the entropy decides."""

    def noisy(seed: int) -> Examples:
        draw = np.random.default_rng(seed)
        entropy = draw.uniform(0, 4, 600).astype(F)
        label = (1 / (1 + np.exp(2 * entropy - 4))).astype(F)
        return Examples(
            hidden=draw.normal(size=(600, 300)).astype(F),
            log_q=np.zeros(600, F),
            entropy=entropy,
            label=label,
            stood=draw.uniform(size=600) < label,
        )

    held_out, found = noisy(2), []
    for scale in (1.0, 0.02):
        config = HeadConfig(size=16, rate=4e-3, epochs=20, state_scale=scale)
        made = train_head(noisy(1), draft="toy", config=config)
        found.append(auc(predictions(made, held_out), held_out.stood))
    assert found[1] > found[0] + 0.03
    assert found[1] > auc(-held_out.entropy.astype(np.float64), held_out.stood) - 0.02


def test_the_same_seed_gives_the_same_head(trained):
    state = torch.random.get_rng_state()
    again = train_head(synthetic(6000, 1), draft="toy", config=EASY, data="made up")
    assert torch.equal(torch.random.get_rng_state(), state)  # nobody else's draws have moved
    assert again.to_bytes()[-500:] == trained.to_bytes()[-500:]
    assert np.array_equal(again.project, trained.project)
    assert trained.about["data"] == "made up"
    assert trained.about["training"]["weight"] == 6.0
    assert trained.draft == "toy"


def test_heads_without_blocks_and_without_examples():
    few = synthetic(50, 4)
    flat = train_head(few, draft="toy", config=HeadConfig(size=4, blocks=0, epochs=1))
    assert np.isfinite(predictions(flat, few)).all()
    none = Examples(**{n: getattr(few, n)[:0] for n in Examples.__dataclass_fields__})
    with pytest.raises(ValueError, match="no examples"):
        train_head(none, draft="toy")


def test_the_loss_by_hand():
    logit, label = torch.tensor([0.0, math.log(3)]), torch.tensor([1.0, 0.25])
    # .75 * 6 of a rejection at P(falls) = 1/4, .25 of an acceptance at 3/4, one at 1/2
    expected = (math.log(2) + 4.5 * math.log(4) + 0.25 * math.log(4 / 3)) / (1 + 4.5 + 0.25)
    assert float(weighted_loss(logit, label, 6.0)) == pytest.approx(expected, rel=1e-6)


def test_figures_by_hand():
    stood = np.array([True, False, True, False])
    assert auc(np.array([0.9, 0.1, 0.5, 0.5]), stood) == 3.5 / 4
    assert math.isnan(auc(np.array([0.5]), np.array([True])))
    some = synthetic(4, 5)
    fixed = Examples(
        hidden=some.hidden, log_q=some.log_q, entropy=some.entropy, label=some.label, stood=stood
    )
    found = figures(np.array([0.9, 0.1, 0.5, 0.5]), fixed)
    assert found["brier"] == pytest.approx((0.01 + 0.01 + 0.25 + 0.25) / 4)
    assert found["base"] == 0.25
    assert found["calibration"] == [[1, 0.1, 0.0], [1, 0.5, 1.0], [1, 0.5, 0.0], [1, 0.9, 1.0]]
    assert set(figures(some.log_q, fixed, calibrated=False)) == {"guesses", "stood", "auc"}
    assert len(joined([fixed, fixed, fixed])) == 12
