"""The published claims: what is printed of them follows from numbers, not from opinion."""

from __future__ import annotations

import math

import pytest

from outrider.bench.claims import (
    Cell,
    best_length_claims,
    comparison_claims,
    contextual_claims,
    critical_delay_claim,
    growth_claims,
    static_gap_claim,
)
from outrider.control.base import ControllerFacts
from outrider.control.oracle import Oracle
from outrider.control.registry import make


def registered(name: str):
    return lambda world, luck, seed: make(name, ControllerFacts(max_length=world.max_length))


def all_knowing(world, luck, seed):
    return Oracle.foresight(world.seconds(luck.delays), world.tokens())


def test_a_cell_by_hand():
    """Values 1, 2, 3: mean 2, standard deviation 1, error 1.96/sqrt(3)."""
    cell = Cell([0.01, 0.02, 0.03])
    assert cell.show() == "2.00±1.13"
    assert cell.as_dict() == {
        "mean": pytest.approx(2.0),
        "error": pytest.approx(1.96 / math.sqrt(3)),
        "seeds": 3,
    }
    assert cell.between(0.02)
    assert not cell.between(0.031)
    assert cell.spread() == "1.1 to 2.9 %"
    assert math.isnan(Cell([1.0]).error)


def test_what_the_model_says_of_the_published_tables():
    """The simulation and Thm 5 come out as printed; the testbeds' table and gap do not follow
    from the testbeds' printed costs and acceptance."""
    qwen, llama, simulation = best_length_claims()
    assert (qwen.holds, llama.holds, simulation.holds) == (False, False, True)
    assert "5 of 8" in qwen.here
    assert critical_delay_claim().holds
    assert critical_delay_claim().published.startswith("1.6020 ms")
    gap = static_gap_claim()
    assert (gap.holds, gap.here) == (False, "5.1 %, 11.4 %")


def test_an_oracle_in_the_place_of_ucb_specstop_has_no_gap():
    claims = comparison_claims({"ucb-specstop": all_knowing, "naive-ucb": all_knowing}, 2)
    assert len(claims) == 8
    assert all(c.here.startswith(("0.00±", "-0.00±")) and not c.holds for c in claims)


def test_claims_about_controllers_that_are_left_out_are_left_out():
    assert comparison_claims({"ucb-specstop": all_knowing}, 2) == []
    assert contextual_claims({"contextual": all_knowing}, 2) == []


def test_no_gain_between_equals():
    for found in contextual_claims({"ucb-specstop": all_knowing, "contextual": all_knowing}, 3):
        assert found.here.startswith("0.00±0.00 %")
        assert "more from the state than 0.00 % of sum N / sum B" in found.here
        assert not found.holds


def test_regret_of_a_fixed_length_grows_with_the_rounds():
    makers = {"ucb-specstop": registered("fixed"), "oracle": all_knowing}
    claims, figures = growth_claims(makers, 64, 2)
    assert [c.holds for c in claims] == [False, False]
    assert figures["qwen d=55 ucb-specstop"]["growth"] == pytest.approx(2.0)
    assert figures["qwen d=55 ucb-specstop"]["regret_ms"] > 1000.0
    assert figures["llama d=55 oracle"]["regret_ms"] == pytest.approx(0.0, abs=1e-6)
