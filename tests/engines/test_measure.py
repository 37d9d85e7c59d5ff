"""The row-cost curve a verifier measures before it serves."""

from __future__ import annotations

import dataclasses
import itertools

from outrider.engines.measure import row_costs, row_seconds, step_seconds
from outrider.engines.toy import ToyModel, random_law


def toy(context_length: int = 512) -> ToyModel:
    return ToyModel(random_law(1, 50), vocab_size=50, context_length=context_length)


def test_each_row_count_is_measured_on_a_fresh_slot_and_the_slot_is_given_back():
    ticks = iter(range(100))
    model = toy()
    spent = row_seconds(model, 4, repeats=3, clock=lambda: float(next(ticks)))
    assert spent == [1.0, 1.0, 1.0]
    assert model.passes == 4  # the context, then three times the rows
    assert model.open_slots == 0


def test_costs_hold_what_is_added_and_only_rows_that_fit():
    costs = row_costs(toy(context_length=9), added=2.0)
    assert [rows for rows, _ in costs] == [1, 2, 4, 8]
    assert all(seconds > 2.0 for _, seconds in costs)


def test_a_model_that_takes_a_step_a_token_costs_its_steps():
    model = toy()
    model._info = dataclasses.replace(model.info, stepwise=True)
    ticks = (float(n * n) for n in itertools.count())
    assert step_seconds(model, steps=4, clock=lambda: next(ticks)) == [5.0, 9.0, 13.0]
    assert model.passes == 4
    assert model.open_slots == 0
    (_, one), *more = row_costs(model, rows=(1, 2, 9))
    assert more == [(2, 2 * one), (9, 9 * one)]
