"""Experiments: a scenario of the simulator (sim.scenario) and what to vary, as one TOML file.

[bench]     where it runs, what is warmed up, the arm that speeds are against
[points]    name = ["SECTION.KEY=VALUE", ...]: the same scenario with other values
[live]      the pair, the questions, the temperature of a live run
[paper]     what a published table says, where it is from, what it leaves out
[published] arm = { point = figure }, [unmatched] the same for methods that nothing here is
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from outrider.bench.live import wishes_of
from outrider.bench.questions import BUILT_IN, name_of
from outrider.core.link import Link
from outrider.core.tokens import ParameterError, Rule
from outrider.session.schedules import Schedule
from outrider.sim import scenario as simulated
from outrider.sim.scenario import ANY, Language, Loaders, Scenario, ScenarioError, Source

BASELINES: Final = ("cloud-only", "colocated", "sync/ratio", "sync", "edge-only")
"""In every table: streaming, speculation beside the target, the plain loop with ids and q(x) up
(the field's fair baseline) and ours, and the draft by itself."""
DEFAULT_ARMS: Final = ("pearl", "stream", "freerun")
MAX_POINTS: Final = 1000
MAX_PACE_MS: Final = 60_000.0
MAX_PROMPTS: Final = 10_000
QUICK_REQUESTS: Final = 4
"""Answers of a run with --quick, where the file says nothing else."""
MODELLED: Final = ("edge", "cloud", "acceptance", "scale")
"""Sections that only a simulation has: live they are measured."""


SIMULATED: Final = (("workload", "rate"), ("schedule", "rule"), ("schedule", "growth"))
"""Keys that only a simulation knows. A live arm names its rule itself (`sync/ratio`)."""
SHARED: Final = ("seed", "title", "bench.", "points.", "schedule.names", "paper.", "published.")
"""Beginnings of keys that no point may change."""


class System(StrEnum):
    """Where an experiment runs."""

    SIMULATOR = "simulator"
    LIVE = "live"
    VALIDATE = "validate"
    """Live, and each answer once more in the simulator."""

    @property
    def live(self) -> bool:
        """Answers come from a pair."""
        return self is not System.SIMULATOR


FIGURES: Final = (
    "ms_per_token",
    "mean_ms_per_token",
    "tokens_per_second",
    "speed",
    "forwards_per_token",
    "cloud_share",
    "score",
)
"""What a published table may hold (bench.figures)."""


_text, _whole, _number = simulated.some_text, simulated.whole, simulated.number
_texts = simulated.list_of(_text, what='texts, such as ["link.rtt=20ms"]')
_sets = simulated.list_of(_text, what='data sets, such as ["gsm8k", "mmlu"]')


def _data(value: Any) -> tuple[str, ...]:
    names: tuple[str, ...] = _sets(value)
    for name in names:
        name_of(name)
    if not names:
        raise ValueError(f'must name at least one set, such as "{BUILT_IN}"')
    return names


def _one_of(*names: str) -> simulated.Check:
    def check(value: Any) -> str:
        if value not in names:
            raise ValueError(f"must be one of {', '.join(names)}")
        return str(value)

    return check


def _row(value: Any) -> dict[str, float]:
    ok = isinstance(value, dict) and all(
        isinstance(v, int | float) and not isinstance(v, bool) for v in value.values()
    )
    if not ok:
        raise ValueError("must be { POINT = number, ... }")
    return {str(k): float(v) for k, v in value.items()}


MORE: Final[Language] = {
    "bench": {
        "system": (_one_of(*System), System.SIMULATOR.value),
        "base": (_text, "cloud-only"),
        "warm-up": (_whole(0, 100), 1),
        "quick": (_texts, ()),
    },
    "points": {ANY: (_texts, None)},
    "live": {
        "target": (_text, "builtin:smollm2"),
        "draft": (_text, "small"),
        "pace": (_number(0.0, MAX_PACE_MS), 0.0),
        "temperature": (_number(0.0, 100.0), 0.0),
        "data": (_data, ("built-in",)),
        "prompts": (_whole(1, MAX_PROMPTS), 4),
        "calibration": (_text, None),
    },
    "paper": {
        "source": (_text, ""),
        "table": (_text, ""),
        "figure": (_one_of(*FIGURES), "mean_ms_per_token"),
        "left-out": (_text, ""),
        "reason": (_text, ""),
        "not-found": (_text, ""),
    },
    "labels": {ANY: (_text, None)},
    "published": {ANY: (_row, None)},
    "unmatched": {ANY: (_row, None)},
}
"""Sections beside those of the simulator. `live.pace`: ms added to each of the target's forwards;
`live.prompts`: of each data set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What a live run asks, and whom."""

    target: str
    draft: str
    pace_ms: float
    temperature: float
    data: tuple[str, ...]
    prompts: int
    max_tokens: int
    draft_length: int
    window: int
    calibration: str | None
    """Folder of `outrider calibrate`, for `credit`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One set of circumstances; `scenario` of a simulation, `pair` and `link` of a live run."""

    name: str
    scenario: Scenario | None = None
    pair: Pair | None = None
    link: Link | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """A published table beside which ours is shown."""

    source: str
    table: str
    figure: str
    left_out: str
    reason: str
    not_found: str
    labels: Mapping[str, str]
    """Arm to the paper's name for it."""
    published: Mapping[str, Mapping[str, float]]
    """Arm to point to figure."""
    unmatched: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A checked experiment."""

    title: str
    system: System
    base: str
    warm_up: int
    seeds: tuple[int, ...]
    arms: tuple[str, ...]
    points: tuple[Point, ...]
    paper: Paper | None


def parse(
    text: str,
    *,
    name: str = "scenario",
    overrides: Sequence[str] = (),
    loaders: Loaders | None = None,
    quick: bool = False,
) -> Experiment:
    """An experiment from the text of its file. `quick`: few answers. Raises ScenarioError."""
    tables, source, _ = simulated.read(text, name=name, overrides=overrides, more=MORE)
    less = _less(tables) if quick else ()
    try:
        tables, source, written = simulated.read(
            text, name=name, overrides=(*less, *overrides), more=MORE
        )
    except ScenarioError as error:
        source.fail("bench", "quick", str(error).removeprefix("--set "))
    overrides = (*less, *overrides)
    system = System(tables["bench"]["system"])
    arms = _arms(tables, source, system)
    points = tables["points"] or {"": ()}
    if len(points) > MAX_POINTS:
        source.fail("points", "", f"at most {MAX_POINTS}")
    for point, changes in points.items():
        for change in changes:
            if change.partition("=")[0].strip().startswith(SHARED):
                source.fail("points", point, f"{change}: is the same at all points: set it above")
    made = _Points(text, name, overrides, arms, loaders, source)
    build = made.live if system.live else made.simulated
    if system.live:
        _refuse_modelled(source, written)
    if "controller" in written:
        source.fail("controller", "", 'name it with its schedule: names = ["sync/auto"]')
    paper = _paper(tables, source, arms, points)
    if tables["bench"]["base"] not in arms:
        source.fail("bench", "base", f"must be one of {', '.join(arms)}")
    first = tables[""]["seed"]
    return Experiment(
        title=tables[""]["title"],
        system=system,
        base=tables["bench"]["base"],
        warm_up=tables["bench"]["warm-up"],
        seeds=tuple(range(first, first + tables[""]["seeds"])),
        arms=arms,
        points=tuple(build(point, changes) for point, changes in points.items()),
        paper=paper,
    )


def _refuse_modelled(source: Source, written: frozenset[str]) -> None:
    for section in MODELLED:
        if section in written:
            source.fail(section, "", "is measured in a live run: leave it out")
    for section, key in SIMULATED:
        if source.wrote(section, key):
            source.fail(section, key, "means nothing in a live run: leave it out")


def _less(tables: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Overrides of a quick run."""
    few = min(QUICK_REQUESTS, tables["workload"]["requests"])
    prompts = min(QUICK_REQUESTS, tables["live"]["prompts"])
    return (
        f"workload.requests={few}",
        f"live.prompts={prompts}",
        "seeds=1",
        *tables["bench"]["quick"],
    )


def _arms(
    tables: Mapping[str, Mapping[str, Any]], source: Source, system: System
) -> tuple[str, ...]:
    wanted = tables["schedule"]["names"]
    always = (Schedule.CLOUD_ONLY.value,) if system is System.VALIDATE else BASELINES
    names = tuple(dict.fromkeys((*always, *(DEFAULT_ARMS if wanted is None else wanted))))
    if system.live:
        calibration, learners = tables["live"]["calibration"], False
        for name in names:
            if name == Schedule.EDGE_ONLY:
                continue
            try:
                wishes = wishes_of(name)
            except ParameterError as error:
                source.fail("schedule", "names", str(error))
            if wishes.get("controller") == "credit":
                learners = True
                if not calibration:
                    need = "credit needs live.calibration, a folder of outrider calibrate"
                    source.fail("schedule", "names", f"{name}: {need}")
        if calibration and not learners:
            need = "is for credit: name an arm of it, as plc/credit/e2sci, or leave it out"
            source.fail("live", "calibration", need)
    if system is System.VALIDATE:
        for name in names:
            if name in (Schedule.EDGE_ONLY, Schedule.COLOCATED) or not comparable(name):
                known = "the schedules over a link, with the coupled or the ratio rule"
                source.fail("schedule", "names", f"{name!r}: a validation knows {known}")
    return names


def comparable(arm: str) -> bool:
    """The simulator can play a live answer of it again: nothing learns from answer to answer, and
    which guesses stand can be read off the text."""
    wishes = wishes_of(arm)
    exact = wishes.get("rule", Rule.COUPLED) in (Rule.COUPLED, Rule.RATIO)
    return exact and "reply" not in wishes and "controller" not in wishes


def _paper(
    tables: Mapping[str, Mapping[str, Any]],
    source: Source,
    arms: Sequence[str],
    points: Mapping[str, Any],
) -> Paper | None:
    table = tables["paper"]
    if not table["source"]:
        return None
    for section in ("published", "unmatched"):
        for arm, row in tables[section].items():
            if section == "published" and arm not in arms:
                source.fail(section, arm, f"is no arm of this file: {', '.join(arms)}")
            for point in row:
                if point not in points:
                    source.fail(section, arm, f"{point!r} is none of {', '.join(points)}")
    return Paper(
        source=table["source"],
        table=table["table"],
        figure=table["figure"],
        left_out=table["left-out"],
        reason=table["reason"],
        not_found=table["not-found"],
        labels=tables["labels"],
        published=tables["published"],
        unmatched=tables["unmatched"],
    )


class _Points:
    """Builds points: the file once more, with a point's own values."""

    def __init__(
        self,
        text: str,
        name: str,
        overrides: Sequence[str],
        arms: Sequence[str],
        loaders: Loaders | None,
        source: Source,
    ) -> None:
        self._text, self._name, self._loaders, self._source = text, name, loaders, source
        names = ", ".join(f'"{arm}"' for arm in arms)
        self._overrides = (*overrides, f"schedule.names=[{names}]")

    def simulated(self, point: str, changes: Sequence[str]) -> Point:
        try:
            scenario = simulated.parse(
                self._text,
                name=self._name,
                overrides=(*changes, *self._overrides),
                loaders=self._loaders,
                more=MORE,
            )
        except ScenarioError as error:
            raise self._named(point, error) from None
        return Point(name=point, scenario=scenario)

    def live(self, point: str, changes: Sequence[str]) -> Point:
        overrides = (*changes, *self._overrides)
        try:
            tables, source, _ = simulated.read(
                self._text, name=self._name, overrides=overrides, more=MORE
            )
            link = self._link(tables, source)
        except ScenarioError as error:
            raise self._named(point, error) from None
        live, schedule = tables["live"], tables["schedule"]
        pair = Pair(
            target=live["target"],
            draft=live["draft"],
            pace_ms=live["pace"],
            temperature=live["temperature"],
            data=live["data"],
            prompts=live["prompts"],
            max_tokens=tables["workload"]["max-tokens"][1],
            draft_length=schedule["draft-length"],
            window=schedule["window"],
            calibration=live["calibration"],
        )
        return Point(name=point, pair=pair, link=link)

    def _link(self, tables: dict[str, dict[str, Any]], source: Source) -> Link:
        table = tables["link"]
        for key in ("levels", "outages", "cuts"):
            if table[key]:
                source.fail("link", key, "only a simulation can do that: leave it out")
        return simulated.link_of(tables, source, self._loaders)

    def _named(self, point: str, error: ScenarioError) -> ScenarioError:
        """What a point's own value brought about is named by the point."""
        text = str(error)
        if not point or text.startswith(f"{self._name}, line "):
            return error
        text = text.removeprefix("--set ").removeprefix(f"{self._name}: ")
        try:
            self._source.fail("points", point, text)
        except ScenarioError as named:
            return named
