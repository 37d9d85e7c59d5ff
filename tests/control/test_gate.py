"""On and off, strike by strike."""

from __future__ import annotations

from itertools import pairwise

import pytest

from outrider.control.base import ControllerFacts
from outrider.control.gate import Gate
from outrider.core.tokens import ParameterError


def walk(gate: Gate, words: str, *, excess: float = 0.0) -> str:
    """One round per letter: + the model says it pays, - that it does not. Answers 1 and 0."""
    answers = ""
    for word in words:
        on = gate.speculate(worth=word == "+", excess=excess)
        assert gate.speculate(worth=word == "+", excess=excess) == on
        gate.round_ended(speculated=on)
        answers += "1" if on else "0"
    return answers


def test_two_strikes():
    assert walk(Gate(probe=0.0), "++-+--++-+") == "1111100111"


def test_strikes_in_a_row_only():
    assert walk(Gate(probe=0.0, strikes=3), "--+--+---++-+++") == "111111110000001"


def test_a_state_lasts():
    assert walk(Gate(probe=0.0, dwell=5), "--+++++++---") == "100000111110"


def test_a_hopping_word_switches_at_most_once_in_dwell_rounds():
    words = "-+" * 20 + "--++" * 20 + "---+++" * 20
    answers = walk(Gate(probe=0.0, dwell=8), words)
    switches = [i for i in range(1, len(answers)) if answers[i] != answers[i - 1]]
    assert switches
    assert all(b - a >= 8 for a, b in pairwise(switches))


def test_probes():
    assert walk(Gate(probe=0.25), "-" * 13) == "1000100010001"
    assert walk(Gate(probe=1.0), "-----") == "11111"


def test_a_probe_waits_until_it_was_paid_for():
    # 0.2 plain steps lost at 2 % of the time: every tenth round
    assert walk(Gate(probe=0.25, burden=0.02), "-" * 22, excess=0.2) == "1" + "0000000001" * 2 + "0"


def test_always():
    gate = Gate(always=True)
    assert not gate.may_stop
    assert walk(gate, "-" * 9) == "1" * 9


def test_a_round_nobody_asked_about():
    gate = Gate(probe=0.0)
    walk(gate, "-")
    gate.round_ended(speculated=True)
    assert walk(gate, "+-+") == "111", "it counted no second strike"


def test_from_facts():
    gate = Gate.from_facts(ControllerFacts(options={"strikes": 1, "probe": 0.0}), dwell=0)
    assert gate.may_stop
    assert walk(gate, "-+-") == "010"
    with pytest.raises(ParameterError, match="probe must be in"):
        Gate.from_facts(ControllerFacts(options={"probe": 1.5}), dwell=0)
