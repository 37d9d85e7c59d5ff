"""Scenarios: a TOML file to checked values. What is wrong is named with its line and the fix.

`KEYS` is the whole language: sections, their keys, what each value may be and what it is when
left out. Times and rates carry their unit ("50ms", "1mbit"), because a bare 50 was meant in some
unit and nobody can tell in which.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

from outrider.control.registry import parse as parse_controller
from outrider.core.link import Link, LinkError, Server, parse_link, seconds
from outrider.core.survival import Survival
from outrider.core.tokens import ParameterError, Rule
from outrider.proto.connection import usable
from outrider.session.schedules import DEFAULT_GROWTH, DEFAULT_WINDOW, MAX_WINDOW, Schedule
from outrider.session.service import MAX_CLOUD_DRAFT
from outrider.session.window import MAX_GROWTH
from outrider.sim.acceptance import (
    Acceptance,
    ByDepth,
    Constant,
    Recorded,
    Swinging,
)
from outrider.sim.devices import CloudTimes, EdgeTimes, fit_line
from outrider.sim.links import Conditions

MAX_EDGES: Final = 10_000
MAX_REQUESTS: Final = 100_000
MAX_TOKENS: Final = 100_000
MAX_SEEDS: Final = 1000
MAX_SECONDS: Final = 86_400.0
"""A virtual day: longer times are slips of a unit."""
MARK: Final = "\ufeff"
"""Some editors begin a file with it."""
PER: Final = 1000
"""`context` is given for so many ids: for one it would be nanoseconds."""

BASELINES: Final = (
    Schedule.CLOUD_ONLY,
    Schedule.COLOCATED,
    Schedule.SYNC,
    Schedule.EDGE_ONLY,
)
"""In every comparison, asked for or not."""
BLIND: Final = frozenset({"adaedl", "specdecpp"})
"""Controllers that look at a draft's distribution, which a simulated draft has not."""


class ScenarioError(ValueError):
    """A scenario that means nothing; the message says where and what to write instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A way to decode."""

    name: str
    schedule: Schedule
    controller: str = "fixed"
    options: tuple[tuple[str, float], ...] = ()
    rule: Rule = Rule.COUPLED
    asked: bool = False
    """By its name; else it stands there by default, or as a baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A recorded pair: what commands read from a trace file."""

    answers: tuple[tuple[bool, ...], ...]
    """Does the guess at each position stand?"""
    draft: float
    """t_d, seconds, as measured."""
    verify: tuple[tuple[int, float], ...]
    """(rows, seconds)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaders:
    """How files that a scenario names are read: this layer does no I/O."""

    link: Callable[[str], Callable[[], Server]] | None = None
    record: Callable[[str], Record] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What users ask."""

    requests: int
    """Of each edge."""
    rate: float | None
    """Arrivals a second at each edge (Poisson); None: the next is asked when one has ended."""
    prompt: int
    """Ids."""
    max_tokens: tuple[int, int]
    """An answer has as many tokens as this allows, uniform in [low, high]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A checked scenario."""

    title: str
    seed: int
    seeds: int
    conditions: Conditions
    cuts: tuple[float, ...]
    """Seconds into the measured time at which every link is cut."""
    edges: int
    edge: EdgeTimes
    clouds: int
    cloud: CloudTimes
    colocated_assumed: bool
    """`cloud.draft` was not given: the edge's draft time stands in."""
    batch_rows: int
    acceptance: Callable[[int], Acceptance]
    """Of a seed."""
    curve: Survival | None
    """S(k) where the model has one that does not change."""
    workload: Workload
    draft_length: int
    window: int
    growth: float
    arms: tuple[Arm, ...]
    duration: float
    """Of `--scale`, virtual seconds."""


# ------------------------------------------------------------------------------ single values

Check = Callable[[Any], Any]


def whole(low: int, high: int) -> Check:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"must be a whole number in [{low}, {high}]")
        return value

    return check


def number(low: float, high: float) -> Check:
    def check(value: Any) -> float:
        bad = isinstance(value, bool) or not isinstance(value, int | float)
        if bad or not low <= value <= high:
            raise ValueError(f"must be a number in [{low:g}, {high:g}]")
        return float(value)

    return check


def _time(value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError(f'has no unit: write "{value:g}ms" (or us, s)')
    try:
        found = seconds("", str(value))
    except LinkError:
        raise ValueError('must be a time with its unit, such as "50ms"') from None
    if found > MAX_SECONDS:
        raise ValueError(f"must be at most {MAX_SECONDS:g}s")
    return found


def list_of(check: Check, *, what: str, least: int = 0) -> Check:
    def each(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) < least:
            raise ValueError(f"must be a list of {what}")
        return tuple(check(item) for item in value)

    return each


def _pair(value: Any) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError('must be a list of [begin, length], such as [["10s", "2s"]]')
    return _time(value[0]), _time(value[1])


def _verify(value: Any) -> tuple[tuple[int, float], ...]:
    """A time for any number of rows, or measured (rows, time)."""
    if not isinstance(value, list):
        return ((1, _above_zero(value)),)
    example = 'must be a time, or a list of [rows, time] such as [[1, "60ms"], [9, "72ms"]]'
    if not value or not all(isinstance(p, list) and len(p) == 2 for p in value):
        raise ValueError(example)
    points = tuple((whole(1, 100_000)(rows), _above_zero(time)) for rows, time in value)
    if [p[0] for p in points] != sorted({p[0] for p in points}):
        raise ValueError("must have ascending rows")
    return points


def _above_zero(value: Any) -> float:
    found = _time(value)
    if found <= 0.0:
        raise ValueError("must be above 0")
    return found


def _tokens(value: Any) -> tuple[int, int]:
    one = whole(1, MAX_TOKENS)
    if not isinstance(value, list):
        return one(value), one(value)
    if len(value) != 2 or one(value[0]) > one(value[1]):
        raise ValueError("must be a number of tokens, or [least, most]")
    return value[0], value[1]


def some_text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be a text in quotes")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _link_part(name: str) -> Check:
    def check(value: Any) -> str:
        part = f"{name}={value}"
        if "," in part and not name.endswith("-trace"):
            raise ValueError("takes one value: other parts of a link are keys of their own")
        if not name.endswith("-trace"):  # files are read when all else is right
            try:
                parse_link(part)
            except LinkError as error:
                raise ValueError(f"means nothing: {error}") from None
        return part

    return check


_SHARE: Final = number(0.0, 1.0)

Language = Mapping[str, Mapping[str, tuple[Check, Any]]]
"""Section to key to (check, value when left out). None: something else decides."""
ANY: Final = "*"
"""As a key: whatever a section's author calls it."""

KEYS: Final[Language] = {
    "": {
        "title": (some_text, ""),
        "seed": (whole(0, 2**62), 0),
        "seeds": (whole(1, MAX_SEEDS), 1),
    },
    "link": {
        **{k: (_link_part(k), None) for k in ("rtt", "jitter", "loss", "up", "down")},
        **{k: (_link_part(k), None) for k in ("up-trace", "down-trace")},
        "levels": (list_of(_time, what="round trips", least=1), ()),
        "switch": (_SHARE, 0.1),
        "every": (_above_zero, 0.1),
        "outages": (list_of(_pair, what="[begin, length]"), ()),
        "cuts": (list_of(_time, what="times"), ()),
    },
    "edge": {
        "count": (whole(1, MAX_EDGES), 1),
        "draft": (_time, None),
        "start": (_time, 0.0),
        "prefill": (_time, 0.0),
        "beside": (_time, None),
    },
    "cloud": {
        "count": (whole(1, MAX_EDGES), 1),
        "verify": (_verify, None),
        "fit": (_flag, False),
        "start": (_time, 0.0),
        "session": (_time, 0.0),
        "context": (_time, 0.0),
        "prefill": (_time, 0.0),
        "draft": (_time, None),
        "batch-rows": (whole(1, 100_000), 64),
    },
    "acceptance": {
        "alpha": (_SHARE, None),
        "spread": (_SHARE, None),
        "memory": (number(1.0, 1e6), None),
        "curve": (list_of(_SHARE, what="shares S(1), S(2), ...", least=1), None),
        "tail": (_SHARE, None),
        "trace": (some_text, None),
    },
    "workload": {
        "requests": (whole(1, MAX_REQUESTS), 20),
        "rate": (number(1e-6, 1e4), None),
        "prompt": (whole(1, MAX_TOKENS), 64),
        "max-tokens": (_tokens, (128, 128)),
    },
    "schedule": {
        "names": (list_of(some_text, what='names such as "freerun" or "sync/auto"'), None),
        "draft-length": (whole(1, MAX_CLOUD_DRAFT), 4),
        "window": (whole(1, MAX_WINDOW), DEFAULT_WINDOW),
        "growth": (number(0.0, MAX_GROWTH), DEFAULT_GROWTH),
        "rule": (some_text, Rule.COUPLED.value),
    },
    "controller": {"name": (some_text, None)},
    "scale": {"duration": (_above_zero, 600.0)},
}

DEFAULT_DRAFT: Final = 0.006
DEFAULT_VERIFY: Final = ((1, 0.060),)
DEFAULT_ALPHA: Final = 0.8
DEFAULT_RTT: Final = 0.05
"""A phone and a data centre (our defaults)."""


# ------------------------------------------------------------------------------ the file


class Source:
    """Where a value was written, to say so."""

    def __init__(self, text: str, name: str, overrides: Sequence[str]) -> None:
        self._name = name
        self._lines = self._find(text.removeprefix(MARK))
        self._set = {item.partition("=")[0].strip() for item in overrides}

    @staticmethod
    def _find(text: str) -> dict[tuple[str, str], int]:
        """(section, key) to line; tomllib knows no lines, so by what they look like."""
        found: dict[tuple[str, str], int] = {}
        section = ""
        for number, line in enumerate(text.splitlines(), 1):
            bare = line.strip()
            if bare.startswith("["):
                section = bare.strip("[] \t").partition("]")[0].strip().strip("\"'")
                found.setdefault((section, ""), number)
            elif "=" in bare and not bare.startswith("#"):
                key = bare.partition("=")[0].strip()
                found.setdefault((section, key.strip("\"'")), number)
                table, dot, inner = key.partition(".")
                if dot and not section:  # link.rtt = "5ms", above all sections
                    found.setdefault((table.strip(), inner.strip()), number)
        return found

    def wrote(self, section: str, key: str) -> bool:
        """Does the file, or a setting, give this key?"""
        return (section, key) in self._lines or f"{section}.{key}" in self._set

    def fail(self, section: str, key: str, message: str) -> NoReturn:
        path = f"{section}.{key}" if section and key else section or key
        if path in self._set:
            raise ScenarioError(f"--set {path}: {message}")
        at = self._lines
        places = ((section, key), (section, ""), (key, ""), ("", section))
        line = next((at[place] for place in places if place in at), None)
        where = f"{self._name}, line {line}" if line else self._name
        label = f"[{section}] {key}".strip() if section else key
        raise ScenarioError(f"{where}: {label}: {message}")


def _value(text: str) -> Any:
    """A value as TOML writes it, or else a text."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def _override(document: dict[str, Any], overrides: Sequence[str]) -> None:
    for item in overrides:
        path, equals, value = item.partition("=")
        section, dot, key = path.strip().rpartition(".")
        if not equals or not path.strip():
            raise ScenarioError(f"--set {item}: write SECTION.KEY=VALUE, as in link.rtt=80ms")
        table = document.setdefault(section, {}) if dot else document
        if not isinstance(table, dict):
            raise ScenarioError(f"--set {item}: {section} is no section")
        table[key] = _value(value.strip())


def _suggest(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]}? " if near else ""


def _tables(
    document: Mapping[str, Any], source: Source, language: Language
) -> dict[str, dict[str, Any]]:
    """Every known key with its checked value."""
    tables = {
        section: {key: default for key, (_, default) in keys.items() if key != ANY}
        for section, keys in language.items()
    }
    for section, content in document.items():
        if not isinstance(content, dict):
            _put(tables, "", section, content, source, language)
            continue
        if section not in language or not section:
            known = [f"[{s}]" for s in language if s]
            hint = _suggest(f"[{section}]", known)
            source.fail(section, "", f"no such section; {hint}there are {', '.join(known)}")
        for key, value in content.items():
            _put(tables, section, key, value, source, language)
    return tables


def _put(
    tables: dict[str, dict[str, Any]],
    section: str,
    key: str,
    value: Any,
    source: Source,
    language: Language,
) -> None:
    known = language[section]
    if not section and key in language:
        source.fail("", key, f"is a section: write [{key}] once, and its keys below")
    found = known.get(key) or known.get(ANY)
    if found is None:
        hint = _suggest(key, [*known, *([s for s in language if s] if not section else ())])
        source.fail(section, key, f"no such key; {hint}known here: {', '.join(known)}")
    try:
        tables[section][key] = found[0](value)
    except ValueError as error:
        source.fail(section, key, str(error))


def read(
    text: str,
    *,
    name: str = "scenario",
    overrides: Sequence[str] = (),
    more: Language | None = None,
) -> tuple[dict[str, dict[str, Any]], Source, frozenset[str]]:
    """Checked values by section and key, where each was written, and the sections written.
    `more`: sections beside KEYS. Raises ScenarioError."""
    try:
        document = tomllib.loads(text.removeprefix(MARK))
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"{name} is no TOML: {error}") from None
    _override(document, overrides)
    source = Source(text, name, overrides)
    tables = _tables(document, source, {**KEYS, **(more or {})})
    return tables, source, frozenset(k for k, v in document.items() if isinstance(v, dict))


def parse(
    text: str,
    *,
    name: str = "scenario",
    overrides: Sequence[str] = (),
    loaders: Loaders | None = None,
    more: Language | None = None,
) -> Scenario:
    """A scenario from the text of its file, and SECTION.KEY=VALUE that win over it. `more`:
    sections that others read. Raises ScenarioError."""
    tables, source, _ = read(text, name=name, overrides=overrides, more=more)
    return _Maker(tables, source, loaders or Loaders()).scenario()


def link_of(tables: dict[str, dict[str, Any]], source: Source, loaders: Loaders | None) -> Link:
    """The link alone, as a live run has it. Raises ScenarioError."""
    return _Maker(tables, source, loaders or Loaders()).link()


class _Maker:
    """Checked tables to a scenario: what only shows when values are seen together."""

    def __init__(self, tables: dict[str, dict[str, Any]], source: Source, loaders: Loaders) -> None:
        self._tables = tables
        self._source = source
        self._loaders = loaders

    def scenario(self) -> Scenario:
        top, work = self._tables[""], self._tables["workload"]
        schedule, cloud = self._tables["schedule"], self._tables["cloud"]
        record = self._record()
        acceptance, curve = self._acceptance(record)
        edge = self._edge(record)
        return Scenario(
            title=top["title"],
            seed=top["seed"],
            seeds=top["seeds"],
            conditions=self._conditions(),
            cuts=tuple(sorted(self._tables["link"]["cuts"])),
            edges=self._tables["edge"]["count"],
            edge=edge,
            clouds=cloud["count"],
            cloud=self._cloud(record, edge),
            colocated_assumed=cloud["draft"] is None,
            batch_rows=cloud["batch-rows"],
            acceptance=acceptance,
            curve=curve,
            workload=Workload(
                requests=work["requests"],
                rate=work["rate"],
                prompt=work["prompt"],
                max_tokens=work["max-tokens"],
            ),
            draft_length=schedule["draft-length"],
            window=schedule["window"],
            growth=schedule["growth"],
            arms=self._arms(),
            duration=self._tables["scale"]["duration"],
        )

    # -------------------------------------------------------------------------- link

    def _conditions(self) -> Conditions:
        table = self._tables["link"]
        link = self.link()
        for key in ("switch", "every"):
            if not table["levels"] and self._source.wrote("link", key):
                self._source.fail("link", key, "means nothing without levels")
        for (begin, length), (after, _) in zip(
            table["outages"], table["outages"][1:], strict=False
        ):
            if begin + length >= after:
                self._source.fail("link", "outages", "must ascend and not touch each other")
        if table["levels"] and table["rtt"]:
            self._source.fail("link", "levels", "are round trips already: leave rtt out")
        for trip in table["levels"] or (link.rtt_s,):
            try:
                usable(replace(link, rtt_s=trip))
            except LinkError as error:
                self._source.fail("link", "levels" if table["levels"] else "rtt", str(error))
        return Conditions(
            link=link,
            levels=table["levels"],
            switch=table["switch"],
            every=table["every"],
            outages=table["outages"],
        )

    def link(self) -> Link:
        table = self._tables["link"]
        for way in ("up", "down"):
            if table[way] and table[f"{way}-trace"]:
                self._source.fail("link", way, f"and {way}-trace say the same thing: keep one")
            if table[f"{way}-trace"]:
                try:
                    parse_link(table[f"{way}-trace"], load=self._loaders.link)
                except LinkError as error:
                    self._source.fail("link", f"{way}-trace", str(error))
        names = ("rtt", "jitter", "loss", "up", "down", "up-trace", "down-trace")
        parts = [table[name] for name in names if table[name]]
        text = ",".join(parts)
        link = parse_link(text, load=self._loaders.link) if parts else Link()
        if table["rtt"] is None and not table["levels"]:
            return replace(link, rtt_s=DEFAULT_RTT)
        return link

    # -------------------------------------------------------------------------- machines

    def _record(self) -> Record | None:
        path = self._tables["acceptance"]["trace"]
        if path is None:
            return None
        if self._loaders.record is None:
            self._source.fail("acceptance", "trace", "files cannot be read here")
        try:
            return self._loaders.record(path)
        except (ValueError, OSError) as error:
            self._source.fail("acceptance", "trace", str(error))

    def _edge(self, record: Record | None) -> EdgeTimes:
        table = self._tables["edge"]
        draft = table["draft"]
        if draft is None:
            draft = DEFAULT_DRAFT if record is None else record.draft
        return EdgeTimes(
            draft=draft, start=table["start"], prefill=table["prefill"], beside=table["beside"]
        )

    def _cloud(self, record: Record | None, edge: EdgeTimes) -> CloudTimes:
        table = self._tables["cloud"]
        points = table["verify"]
        if points is None:
            points = DEFAULT_VERIFY if record is None else record.verify
        if table["fit"]:
            base, slope = fit_line(points)
            points = ((1, base + slope), (2, base + 2 * slope))
        return CloudTimes(
            verify=points,
            session=table["session"],
            context=table["context"] / PER,
            prefill=table["prefill"],
            draft=edge.draft if table["draft"] is None else table["draft"],
            start=table["start"],
        )

    # -------------------------------------------------------------------------- acceptance

    def _acceptance(
        self, record: Record | None
    ) -> tuple[Callable[[int], Acceptance], Survival | None]:
        table = self._tables["acceptance"]
        given = [name for name in ("alpha", "curve", "trace") if table[name] is not None]
        if len(given) > 1:
            self._source.fail("acceptance", given[1], f"and {given[0]} exclude each other")
        if record is not None:
            recorded = Recorded(answers=record.answers)
            return lambda _seed: recorded, None
        if table["curve"] is not None:
            return self._curve(table)
        alpha = DEFAULT_ALPHA if table["alpha"] is None else table["alpha"]
        if table["spread"] is None and table["memory"] is None:
            flat = Survival.constant(alpha)
            return lambda seed: Constant(alpha=alpha, seed=seed), flat
        spread, memory = table["spread"], table["memory"]
        if spread is None or memory is None:
            missing = "spread" if spread is None else "memory"
            self._source.fail("acceptance", "alpha", f"swings only with {missing} as well")
        if not spread <= alpha <= 1.0 - spread:
            self._source.fail("acceptance", "spread", f"takes alpha={alpha:g} out of [0, 1]")
        return (
            lambda seed: Swinging(alpha=alpha, spread=spread, memory=memory, seed=seed),
            None,
        )

    def _curve(
        self, table: Mapping[str, Any]
    ) -> tuple[Callable[[int], Acceptance], Survival | None]:
        points, tail = table["curve"], table["tail"]
        try:
            curve = Survival.of(points) if tail is None else Survival(points, tail)
        except ValueError as error:
            self._source.fail("acceptance", "curve", str(error))
        return lambda seed: ByDepth(curve=curve, seed=seed), curve

    # -------------------------------------------------------------------------- arms

    def _arms(self) -> tuple[Arm, ...]:
        wanted = self._tables["schedule"]["names"]
        default = [s.value for s in Schedule]
        names = default if wanted is None else list(wanted)
        arms = {arm.name: replace(arm, asked=wanted is not None) for arm in map(self._arm, names)}
        for schedule in BASELINES:
            if not any(_plain(arm, schedule) for arm in arms.values()):
                arms[schedule.value] = Arm(name=schedule.value, schedule=schedule)
        first = arms.pop(Schedule.CLOUD_ONLY.value)
        return (first, *arms.values())

    def _arm(self, text: str) -> Arm:
        """From 'SCHEDULE', 'SCHEDULE/CONTROLLER', 'SCHEDULE/RULE' or all three."""
        head, *words = text.split("/")
        if head not in set(Schedule):
            known = ", ".join(Schedule)
            hint = _suggest(head, list(Schedule))
            self._source.fail("schedule", "names", f"no schedule {head!r}; {hint}known: {known}")
        arm = Arm(name=text, schedule=Schedule(head), rule=self._rule())
        fixed = (Schedule.CLOUD_ONLY, Schedule.COLOCATED, Schedule.EDGE_ONLY)
        named = self._tables["controller"]["name"]
        if named is not None and arm.schedule not in fixed:
            arm = self._controlled(arm, named, "controller", "name")
            arm = replace(arm, name=f"{text}/{named}")
        for word in words:
            if word in (Rule.COUPLED, Rule.RATIO):
                arm = replace(arm, rule=Rule(word))
            elif arm.schedule in fixed:
                self._source.fail("schedule", "names", f"{head} leaves a controller nothing to do")
            else:
                arm = self._controlled(replace(arm, name=text), word, "schedule", "names")
        return arm

    def _rule(self) -> Rule:
        text = self._tables["schedule"]["rule"]
        if text not in (Rule.COUPLED, Rule.RATIO):
            self._source.fail(
                "schedule", "rule", "must be coupled or ratio: relaxing needs real distributions"
            )
        return Rule(text)

    def _controlled(self, arm: Arm, text: str, section: str, key: str) -> Arm:
        try:
            name, options = parse_controller(text)
        except ParameterError as error:
            self._source.fail(section, key, str(error))
        if name in BLIND or name == "credit":
            need = "a calibration" if name == "credit" else "a draft's distributions"
            self._source.fail(section, key, f"{name} needs {need}, which no simulation has")
        return replace(arm, controller=name, options=tuple(sorted(options.items())))


def _plain(arm: Arm, schedule: Schedule) -> bool:
    return arm.schedule is schedule and arm.controller == "fixed"
