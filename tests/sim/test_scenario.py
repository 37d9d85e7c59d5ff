"""Scenario files: what is wrong is named with its line and the fix."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from outrider.core.tokens import Rule
from outrider.session.schedules import Schedule
from outrider.sim.acceptance import Recorded
from outrider.sim.scenario import KEYS, Loaders, Record, ScenarioError, parse

SCENARIOS = sorted((Path(__file__).parents[2] / "scenarios").glob("*.toml"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[link]\nrtt = 50\n", "line 2: [link] rtt: means nothing: rtt=50: give a number and one"),
        ("[edge]\n# t_d\ndraft = 5\n", 'line 3: [edge] draft: has no unit: write "5ms"'),
        ("[edge]\ndraft = '5 parsec'\n", 'must be a time with its unit, such as "50ms"'),
        ("[link]\nrtt = '50ms,loss=3%'\n", "line 2: [link] rtt: takes one value"),
        ("[link]\nrtt = '-5ms'\n", "line 2: [link] rtt: means nothing: rtt=-5ms: give a number"),
        ("[link]\nup = '0mbit'\n", "line 2: [link] up: means nothing: up must be above 0"),
        ("[link]\nevery = '1s'\n", "line 2: [link] every: means nothing without levels"),
        ("link = 5\n", "line 1: link: is a section: write [link]"),
        ("[[link]]\nrtt = '5ms'\n", "line 1: link: is a section"),
        ("\nlink.rtt = 5\n", "line 2: [link] rtt: means nothing"),
        ("\nlink = {rtt = 5}\n", "line 2: [link] rtt: means nothing"),
        ('["link"]\nrtt = 5\n', "line 2: [link] rtt: means nothing"),
        ("\ufeff[link]\nrtt = 5\n", "line 2: [link] rtt: means nothing"),
        ("[edge]\ndarft = '5ms'\n", "line 2: [edge] darft: no such key; did you mean draft?"),
        ("\n[edges]\n", "line 2: [edges]: no such section; did you mean [edge]?"),
        ("sede = 1\n", "line 1: sede: no such key; did you mean seed?"),
        ("[acceptance]\nalpha = 1.5\n", "must be a number in [0, 1]"),
        ("[acceptance]\nalpha = true\n", "must be a number in [0, 1]"),
        ("[acceptance]\ncurve = [0.5, 0.6]\n", "line 2: [acceptance] curve: S must fall"),
        ("[acceptance]\nalpha=.8\ncurve = [.8]\n", "is no TOML"),
        ("[acceptance]\nalpha=0.8\ncurve = [0.8]\n", "line 3: [acceptance] curve: and alpha"),
        ("[acceptance]\nalpha = 0.8\nspread = 0.1\n", "swings only with memory"),
        ("[acceptance]\nalpha = 0.8\nspread = 0.3\nmemory = 9\n", "takes alpha=0.8 out of"),
        ("[acceptance]\ntrace = 'x'\n", "files cannot be read here"),
        ("[link]\nrtt = '20s'\n", "line 2: [link] rtt: a greeting up and one down take 20 s"),
        ("[link]\nlevels = ['1s', '12s']\n", "[link] levels: a greeting"),
        ("[link]\nlevels = ['1s']\nrtt = '1s'\n", "leave rtt out"),
        ("[link]\nloss = '80%'\n", "loss must be at most 0.5"),
        ("[link]\nup = '1mbit'\nup-trace = 'x'\n", "say the same thing"),
        ("[link]\nup-trace = 'x'\n", "up-trace needs a file, which cannot be read here"),
        ("[link]\noutages = [['1s','2s'],['2s','1s']]\n", "must ascend and not touch"),
        ("[link]\noutages = ['1s']\n", "[begin, length]"),
        ("[cloud]\nverify = []\n", "a list of [rows, time]"),
        ("[cloud]\nverify = [[9, '1ms'], [1, '1ms']]\n", "must have ascending rows"),
        ("[cloud]\nverify = '0ms'\n", "must be above 0"),
        ("[cloud]\nfit = 1\n", "must be true or false"),
        ("[workload]\nmax-tokens = [9, 3]\n", "[least, most]"),
        ("[workload]\nrequests = 1.5\n", "must be a whole number in [1, 100000]"),
        ("[schedule]\nnames = ['sinc']\n", "line 2: [schedule] names: no schedule 'sinc'; did you"),
        ("[schedule]\nnames = ['sync/nobody']\n", "must be one of fixed, never"),
        ("[schedule]\nnames = ['colocated/auto']\n", "leaves a controller nothing to do"),
        ("[schedule]\nnames = ['sync/adaedl']\n", "needs a draft's distributions"),
        ("[schedule]\nrule = 'relaxed'\n", "must be coupled or ratio"),
        (
            "[controller]\nname = 'credit'\n",
            "line 2: [controller] name: credit needs a calibration",
        ),
    ],
)
def test_what_is_wrong_is_named(text: str, says: str):
    with pytest.raises(ScenarioError, match=re.escape(says)):
        parse(text)


def test_a_setting_on_the_command_line_is_named_as_such():
    with pytest.raises(ScenarioError, match=r"^--set link\.rtt: means nothing"):
        parse("[link]\nrtt = '5ms'", overrides=["link.rtt=fast"])
    with pytest.raises(ScenarioError, match=r"SECTION\.KEY=VALUE"):
        parse("", overrides=["link.rtt"])
    assert parse("", overrides=["link.rtt = 80ms"]).conditions.link.rtt_s == 0.08
    assert parse("seed = 1", overrides=["seed=7"]).seed == 7


def test_the_baselines_are_always_there_and_cloud_only_is_first():
    arms = parse("[schedule]\nnames = ['freerun', 'sync/auto']\n").arms
    assert [a.name for a in arms] == [
        "cloud-only",
        "freerun",
        "sync/auto",
        "colocated",
        "sync",
        "edge-only",
    ]
    assert {a.schedule for a in parse("").arms} == set(Schedule)


def test_controllers_and_rules_of_an_arm():
    made = parse(
        "[schedule]\nnames = ['sync', 'stream/ratio/never']\n[controller]\nname = 'auto'\n"
    )
    by_name = {a.name: a for a in made.arms}
    assert by_name["sync/auto"].controller == "auto"
    assert by_name["sync"].controller == "fixed"  # the baseline
    assert by_name["stream/ratio/never"].rule is Rule.RATIO
    assert by_name["stream/ratio/never"].controller == "never"
    assert by_name["colocated"].controller == "fixed"


def test_a_record_brings_its_times():
    record = Record(answers=((True, False),), draft=0.004, verify=((1, 0.03), (9, 0.05)))
    made = parse("[acceptance]\ntrace = 'a.jsonl'\n", loaders=Loaders(record=lambda _name: record))
    assert made.edge.draft == 0.004
    assert made.cloud.rows(5) == pytest.approx(0.04)
    assert isinstance(made.acceptance(0), Recorded)
    given = parse(
        "[acceptance]\ntrace = 'a.jsonl'\n[edge]\ndraft = '9ms'\n[cloud]\nverify = '1ms'\n",
        loaders=Loaders(record=lambda _name: record),
    )
    assert (given.edge.draft, given.cloud.rows(5)) == pytest.approx((0.009, 0.001))

    def broken(_name: str) -> Record:
        raise ValueError("a.jsonl is no trace file")

    with pytest.raises(ScenarioError, match=r"line 2: \[acceptance\] trace: a.jsonl is no"):
        parse("[acceptance]\ntrace = 'a.jsonl'\n", loaders=Loaders(record=broken))


def test_a_fitted_line_goes_through_the_points():
    text = "[cloud]\nverify = [[1, '61ms'], [5, '65ms'], [9, '69ms']]\nfit = true\n"
    assert parse(text).cloud.rows(33) == pytest.approx(0.093)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda p: p.stem)
def test_the_examples_mean_something(path: Path):
    assert parse(path.read_text(encoding="utf-8"), name=path.name).title


def test_the_page_names_every_key():
    page = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text(encoding="utf-8")
    for section, keys in KEYS.items():
        line = next(
            x
            for x in page.splitlines()
            if x.startswith(f"| `[{section}]`" if section else "| (top)")
        )
        for key in keys:
            assert f"`{key}`" in line, (section, key)
