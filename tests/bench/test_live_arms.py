"""Arms by their spec."""

from __future__ import annotations

import math

import pytest

from outrider.bench.live import RELAX_BUDGET, wishes_of
from outrider.core.relaxed import RelaxedRule
from outrider.core.residual import TopKReply
from outrider.core.tokens import ParameterError, Rule
from outrider.session.schedules import Schedule


def test_words_in_any_order():
    assert wishes_of("sync") == {"schedule": Schedule.SYNC}
    assert wishes_of("auto") == {
        "schedule": Schedule.SYNC,
        "controller": "auto",
        "controller_options": {},
    }
    found = wishes_of("e2sci/credit:k=3,beta=0.5/plc")
    assert found["schedule"] is Schedule.PLC
    assert (found["controller"], found["controller_options"]) == ("credit", {"k": 3, "beta": 0.5})
    assert found["rule"] is Rule.RELAXED
    assert found["relaxation"].policy.rule is RelaxedRule.E2SCI
    assert math.isinf(found["relaxation"].budget), "the published rules know no budget"
    assert wishes_of("freerun/relaxed")["relaxation"].budget == RELAX_BUDGET
    assert wishes_of("ratio")["rule"] is Rule.RATIO
    assert "reply" not in wishes_of("ratio")
    listing = wishes_of("sync/top-k")
    assert listing["rule"] is Rule.RATIO
    assert listing["reply"] == TopKReply(k=64, budget=RELAX_BUDGET)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fast",
        "sync/plc",
        "auto/never",
        "ratio/fsd",
        "edge-only",
        "auto:x",
        "sync/",
        "auto:magic=1",
    ],
)
def test_other_words_are_refused(text: str):
    with pytest.raises(ParameterError, match=r"arm|controller"):
        wishes_of(text)
