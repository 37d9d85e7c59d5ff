"""docs/controllers.md and docs/relaxed.md say what the code does."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from outrider.commands.options import DEFAULT_BUDGET, DEFAULT_THRESHOLD
from outrider.control import registry
from outrider.control.base import ControllerFacts, Decision, Outcome
from outrider.control.estimators import Estimators
from outrider.control.registry import CONTROLLERS, make
from outrider.core.ledger import Ledger
from outrider.core.relaxation import DEFAULT_SKETCH
from outrider.core.relaxed import Fate, RelaxedRule, e2sci
from outrider.core.sampling import History, SamplingPipeline
from outrider.core.tokens import ParameterError, SamplingParams
from outrider.session.pilot import ControlledPilot
from outrider.session.schedules import DEFAULT_GROWTH, STREAMING, Schedule
from toys import TARGET, VOCAB, draft
from world import World, alone

DOCS = Path(__file__).parent.parent / "docs"
TEXT = (DOCS / "controllers.md").read_text(encoding="utf-8")
RELAXED = (DOCS / "relaxed.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### `([\w-]+)`\n(.*?)(?=^#)", TEXT, re.DOTALL | re.MULTILINE))
MAX_BYTES = 80_000
"""Of a picture: a page with all of them stays under half a megabyte."""


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_controllers", DOCS / "draw_controllers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


# -- names and options -------------------------------------------------------------------------


def test_every_controller_has_its_section_and_no_section_outlives_it():
    assert set(SECTIONS) == set(CONTROLLERS)
    for name in CONTROLLERS:
        assert f"`{name}`" in TEXT.split("## How one is asked")[0], f"{name}: not in the choice"


def options_of(name: str) -> set[str]:
    """As the refusal of an unknown one lists them."""
    with pytest.raises(ParameterError) as refused:
        make(name, ControllerFacts(draft="small", options={"?": 1.0}))
    listed = str(refused.value).rpartition("it has ")[2]
    return set() if listed == "none" else set(listed.split(", "))


def documented(name: str) -> dict[str, str]:
    """Option to default, from the section's table."""
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| .+ \|$", SECTIONS[name], re.MULTILINE)
    return dict(rows)


@pytest.mark.parametrize("name", CONTROLLERS)
def test_every_option_stands_in_its_section(name: str):
    assert set(documented(name)) == options_of(name)


class Spy(ControllerFacts):
    """Writes down what a factory asks for."""

    def option(self, name: str, default: float, low: float, high: float) -> float:
        ASKED[name] = default
        return ControllerFacts.option(self, name, default, low, high)


ASKED: dict[str, float] = {}


@pytest.mark.parametrize("name", CONTROLLERS)
def test_defaults_are_the_documented_ones(name: str):
    ASKED.clear()
    make(name, Spy(draft="small"))
    shown = documented(name)
    assert set(shown) == set(ASKED)
    for option, text in shown.items():
        if re.fullmatch(r"[\d.]+", text):
            assert float(text) == ASKED[option], option
        else:
            assert option in {"pace", "window_max", "threshold"}, f"{option}: a number is due"


def test_defaults_of_the_command_line():
    assert f"`--growth`, default {DEFAULT_GROWTH:g}".replace("0.", ".") in TEXT
    assert f"B = {DEFAULT_BUDGET:g} and T = {DEFAULT_THRESHOLD:g}".replace("0.", ".") in RELAXED
    assert f"`--sketch`, default {DEFAULT_SKETCH}" in RELAXED


def test_every_relaxed_rule_is_explained():
    rules = set(re.findall(r"^\| `(\w+)`(?: \(default\))? \|", RELAXED, re.MULTILINE))
    assert rules == set(RelaxedRule)


NEAR = tuple(
    SamplingPipeline(SamplingParams(temperature=1.0), vocab_size=3).distribution(
        np.log(np.array(row, dtype=np.float32)), History(())
    )
    for row in ((0.6, 0.3, 0.1), (0.5, 0.35, 0.15))
)
"""Two laws .006 nats apart: any threshold but 0 lets the one stand for the other."""


@pytest.mark.parametrize(("options", "stand"), [({"t_min": 0.0}, 0), ({}, 4)])
def test_the_published_rule_locks_at_threshold_zero(options: dict[str, float], stand: int):
    """docs/relaxed.md: after a bad stretch T is t_min, and at 0 nothing is accepted ever again."""
    p, q = NEAR
    controller: Any = make("credit", ControllerFacts(options=options))

    def told(accepted: int, strict: int, drafted: int = 4) -> None:
        controller.observe(
            Outcome(
                decision=Decision(length=drafted),
                drafted=drafted,
                accepted=accepted,
                strict=strict,
                tokens=accepted + 1,
                seconds=0.1,
            ),
            0.0,
        )

    for _ in range(30):
        told(0, 0)
    assert controller.threshold == options.get("t_min", 0.02)
    for _ in range(30):  # the text is easy again: every draft is the target's own token
        ruling = e2sci(p, q, 0, threshold=controller.threshold, ledger=Ledger(budget=math.inf))
        accepted = 4 if ruling.fate is Fate.STANDS else 0
        told(accepted, accepted)
    assert accepted == stand


# -- pictures and drawn tables -----------------------------------------------------------------


def test_pictures_are_there_small_and_shown():
    """Every picture is shown by some page; those of these two are small drawings."""
    found = {
        page: set(
            re.findall(r"!\[[^\]]+\]\((?:docs/)?pictures/([\w.-]+)\)", page.read_text("utf-8"))
        )
        for page in (*DOCS.glob("*.md"), DOCS.parent / "README.md")
    }
    assert set().union(*found.values()) == {path.name for path in (DOCS / "pictures").iterdir()}
    for name in found[DOCS / "controllers.md"] | found[DOCS / "relaxed.md"]:
        path = DOCS / "pictures" / name
        assert path.stat().st_size < MAX_BYTES, name
        assert ElementTree.parse(path).getroot().tag.endswith("svg"), name


def test_drawn_tables_are_current():
    module = script()
    assert module.filled(TEXT) == TEXT, "run: python docs/draw_controllers.py"
    assert set(re.findall(r"<!-- drawn: (\w+) -->", TEXT)) == set(module.TABLES)
    assert module.phases_best() == [7, 9, 0]


def test_the_bounds_picture_shows_what_its_caption_says():
    module = script()
    for temperature in (1.0, 0.7):
        true, bounds = module.certified(temperature)
        assert all(low <= true <= high for low, high in bounds)
        widths = [high - low for low, high in bounds]
        assert widths == sorted(widths, reverse=True)


# -- a controller of your own ------------------------------------------------------------------


@pytest.fixture
def cover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file and the line of the page, as a reader would put them in."""
    part = TEXT.split("## A controller of your own")[1]
    code, line = re.findall(r"^```python\n(.*?)^```", part, re.DOTALL | re.MULTILINE)
    entry = re.fullmatch(r'\s*"(\w+)": "outrider\.control\.(\w+):(\w+)",\s*', line)
    assert entry is not None
    name, module, factory = entry.groups()
    (tmp_path / f"{module}.py").write_text(code, encoding="utf-8")
    full = f"outrider.control.{module}"
    spec = importlib.util.spec_from_file_location(full, tmp_path / f"{module}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    monkeypatch.setitem(sys.modules, full, loaded)
    monkeypatch.setitem(registry.CONTROLLERS, name, f"{full}:{factory}")


@pytest.mark.parametrize("schedule", [Schedule.SYNC, Schedule.STREAM])
@pytest.mark.usefixtures("cover")
def test_the_controller_of_the_page_runs(schedule: Schedule):
    """By name through the registry, in a virtual-time session: it changes lengths and no token."""
    name, options = registry.parse("cover:share=0.5")
    controller = make(name, ControllerFacts(max_length=10, options=options))
    estimators = Estimators()
    w = World(TARGET, draft(0.2), vocab_size=VOCAB, rtt=0.08, draft_time=0.007)
    decided = []
    decide = controller.decide

    def watched(observation):
        decided.append(decide(observation).length)
        return decide(observation)

    controller.decide = watched  # type: ignore[method-assign]
    for seed in range(4):
        pilot = ControlledPilot(controller, estimators, streaming=schedule in STREAMING, now=w.now)
        params = SamplingParams(seed=seed, max_tokens=40)
        number = w.edges[0].ask(
            (1, 2, 3), params, schedule=schedule, draft_length=10, window=10, pilot=pilot
        )
        w.run()
        answer = w.edges[0].answers[number]
        assert tuple(answer.ids) == alone(TARGET, (1, 2, 3), params, vocab_size=VOCAB)
    # Half of 80 ms at 7 ms a draft is 5.7: what it settles on, where the answer leaves room.
    assert max(decided[-8:]) == 6
    assert len(decided) > 20


@pytest.mark.usefixtures("cover")
def test_its_options_are_checked_like_any_other_s():
    with pytest.raises(ParameterError, match="no option 'shore': it has share"):
        make("cover", ControllerFacts(options={"shore": 1.0}))
    with pytest.raises(ParameterError, match="share must be in"):
        make("cover", ControllerFacts(options={"share": -1.0}))
