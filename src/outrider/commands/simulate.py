"""`outrider simulate`: a scenario on a virtual clock, fault campaigns, many edges."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich import box
from rich.table import Table

from outrider.commands import console
from outrider.commands.errors import FAILED, CommandError
from outrider.commands.options import Json
from outrider.commands.traces import bars
from outrider.core.reasons import why

if TYPE_CHECKING:
    from outrider.session.schedules import Schedule
    from outrider.sim.campaign import Campaign, Report
    from outrider.sim.scenario import Record, Scenario

FAULTS = "Fault campaigns"
MAX_FAULTS: Final = 10_000_000
SHOWN_PROBLEMS: Final = 5
"""Problems of a failed case that are shown; a replay shows all."""


def simulate(
    scenario: Annotated[
        Path | None,
        typer.Argument(
            metavar="[SCENARIO]",
            help="A TOML file (docs/simulator.md); left out, our defaults: a phone at 50 ms from a "
            "target of 60 ms a step.",
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Another value for a key of the scenario, as in link.rtt=80ms; may be repeated.",
            show_default=False,
        ),
    ] = None,
    scale: Annotated[
        bool,
        typer.Option(
            "--scale",
            metavar="",
            help="Thousands of edges: round by round instead of frame by frame (docs/simulator.md "
            "says what that leaves out). Needs workload.rate.",
        ),
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="S",
            min=0,
            help="Of chance: the scenario's own when left out. With --faults the first case.",
            show_default=False,
        ),
    ] = None,
    faults: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=MAX_FAULTS,
            help="No scenario: play N random cases of what can go wrong (cuts, restarts, late and "
            "repeated frames, cancels, drains, slow readers) and check every invariant.",
            show_default=False,
            rich_help_panel=FAULTS,
        ),
    ] = None,
    replay: Annotated[
        int | None,
        typer.Option(
            metavar="SEED",
            min=0,
            help="Play one case of a campaign again and tell what happened.",
            show_default=False,
            rich_help_panel=FAULTS,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Know before you deploy: what every schedule would come to, on your link and machines.

    The protocol, the sessions and the controllers are the very code that runs live; only the clock,
    the link and the engines are models. The same scenario and seed give the same run, and the event
    hash shows it. Cloud-only, co-located, synchronous and edge-only decoding are always compared.

    Examples:

    ```
    outrider simulate
    outrider simulate scenarios/phone.toml --set link.rtt=120ms --set acceptance.alpha=0.6
    outrider simulate scenarios/campus.toml --scale
    outrider simulate --faults 1000
    ```
    """
    if faults is not None or replay is not None:
        _refuse_scenario(scenario, settings, scale=scale)
        if faults is not None and replay is not None:
            raise CommandError("--faults plays many cases and --replay one: give one of them")
        if replay is not None:
            _replay(replay, as_json=as_json)
        elif faults is not None:
            _campaign(range(seed or 0, (seed or 0) + faults), as_json=as_json)
        return
    made = _load(scenario, [*(settings or ()), *([] if seed is None else [f"seed={seed}"])])
    if scale:
        _scale(made, as_json=as_json)
    else:
        _compare(made, as_json=as_json)


def _refuse_scenario(scenario: Path | None, settings: Sequence[str] | None, *, scale: bool) -> None:
    if scenario is not None or settings or scale:
        raise CommandError(
            "--faults and --replay have scenarios of their own: leave the file, --set and --scale "
            "out"
        )


# ------------------------------------------------------------------------------ scenarios


def _load(path: Path | None, overrides: Sequence[str]) -> Scenario:
    from outrider.runtime.shaping import load_trace
    from outrider.sim.scenario import Loaders, ScenarioError, parse

    text, name = "", "the defaults"
    if path is not None:
        name = path.name
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CommandError(f"cannot read the scenario {path}: {why(error)}") from None
    folder = path.parent if path is not None else Path()
    loaders = Loaders(
        link=lambda file: load_trace(str(folder / file)),
        record=lambda file: record_of(folder / file),
    )
    try:
        return parse(text, name=name, overrides=overrides, loaders=loaders)
    except ScenarioError as error:
        raise CommandError(str(error)) from None


def record_of(path: Path) -> Record:
    """What a trace file (outrider calibrate --traces) says of a pair."""
    from outrider.calibrate import trace
    from outrider.sim.scenario import Record

    found = trace.read(path)
    answers = tuple(tuple(bool(x) for x in a.strict) for a in found.answers if len(a))
    if not answers:
        raise ValueError(f"{path.name} holds no answer: record it anew")
    return Record(
        answers=answers,
        draft=found.header.draft_seconds,
        verify=tuple((int(n), float(s)) for n, s in found.header.verify_seconds),
    )


def _compare(scenario: Scenario, *, as_json: bool) -> None:
    from outrider.sim.run import compare, rows_of

    with bars() as show:
        total, done = len(scenario.arms) * scenario.seeds, 0

        def told() -> None:
            nonlocal done
            done += 1
            show("runs", done, total)

        rows = rows_of(compare(scenario, told=told))
    facts = {
        "title": scenario.title,
        "seed": scenario.seed,
        "seeds": scenario.seeds,
        "colocated_draft_assumed": scenario.colocated_assumed,
        "event_hash": _hash([h for row in rows for h in row["event_hashes"]]),
        "rows": rows,
    }
    if as_json:
        console.print_json(facts)
    else:
        _show(scenario, facts)


def _hash(parts: Sequence[str]) -> str:
    return hashlib.blake2b(" ".join(parts).encode(), digest_size=8).hexdigest()


Cell = Callable[[dict[str, Any]], str]


def _figure(name: str, digits: int = 1) -> Cell:
    def cell(row: dict[str, Any]) -> str:
        value = row[name]
        return "-" if value is None else f"{value:.{digits}f}"

    return cell


def _times(row: dict[str, Any]) -> str:
    return "-" if row["speedup"] is None else f"{row['speedup']:.2f}x"


COLUMNS: Final[tuple[tuple[str, Cell], ...]] = (
    ("ms per\ntoken", _figure("ms_per_token")),
    ("speed", _times),
    ("TTFT\nms", _figure("ttft_ms", 0)),
    ("for-\nwards", _figure("forwards_per_token", 2)),
    ("cloud\nms", _figure("cloud_ms_per_token")),
    ("queue\nms", _figure("queue_ms_per_token")),
    ("up\nB", _figure("bytes_up_per_token")),
    ("down\nB", _figure("bytes_down_per_token")),
)
"""Those that fit 80 columns; --json has all figures."""


def _table(facts: dict[str, Any], columns: Sequence[tuple[str, Cell]]) -> Table:
    table = Table(title=facts["title"] or None, box=box.SIMPLE_HEAD)
    table.add_column("way to decode", no_wrap=True)
    for heading, _ in columns:
        table.add_column(heading, justify="right")
    for row in facts["rows"]:
        table.add_row(row["name"], *(cell(row) for _, cell in columns))
    return table


def _show(scenario: Scenario, facts: dict[str, Any]) -> None:
    out = console.facts()
    out.print(_table(facts, COLUMNS))
    notes = [
        "Simulated. forwards, cloud time, queue and bytes are a token's share; speed is against "
        "cloud-only; edge-only is another text, the draft's own."
    ]
    if scenario.colocated_assumed:
        notes.append("The cloud's own draft is taken to be as fast as the edge's (cloud.draft).")
    if any(row["unfinished"] for row in facts["rows"]):
        lost = ", ".join(f"{r['name']} {r['unfinished']}" for r in facts["rows"] if r["unfinished"])
        notes.append(f"Answers that failed and are not in the figures: {lost}.")
    notes.append(f"seed {facts['seed']}, event hash {facts['event_hash']}")
    for note in notes:
        out.print(note, markup=False, soft_wrap=True)


# ------------------------------------------------------------------------------ campaigns


def _campaign(seeds: range, *, as_json: bool) -> None:
    from outrider.sim.campaign import campaign

    with bars() as show:
        for found in campaign(seeds):
            sums = found
            show("cases", found.cases, len(seeds))
    facts = _campaign_facts(seeds, sums)
    if as_json:
        console.print_json(facts)
    else:
        _show_campaign(facts)
    if not facts["passed"]:
        raise typer.Exit(FAILED)


def _campaign_facts(seeds: range, sums: Campaign) -> dict[str, Any]:
    return {
        "first_seed": seeds.start,
        "cases": sums.cases,
        "answers": sums.answers,
        "tokens": sums.tokens,
        "faults": dict(sorted(sums.faults.items())),
        "ratio_law_p_value": sums.law,
        "passed": not sums.failed and sums.lawful,
        "failed": [
            {"seed": report.case.seed, "problems": list(report.problems)} for report in sums.failed
        ],
    }


def _show_campaign(facts: dict[str, Any]) -> None:
    out = console.facts()

    def line(text: str) -> None:
        out.print(text, markup=False, soft_wrap=True)

    happened = ", ".join(f"{count} {name}" for name, count in facts["faults"].items())
    line(
        f"{facts['cases']} cases from seed {facts['first_seed']}: {facts['answers']} answers, "
        f"{facts['tokens']} tokens; faults: {happened or 'none'}"
    )
    if facts["ratio_law_p_value"] is not None:
        line(f"law of the ratio rule: p = {facts['ratio_law_p_value']:.3g}")
    for failed in facts["failed"]:
        for problem in failed["problems"][:SHOWN_PROBLEMS]:
            line(f"seed {failed['seed']}: {problem}")
        line(f"  again: outrider simulate --replay {failed['seed']}")
    line("every invariant held" if facts["passed"] else "FAILED")


def _replay(seed: int, *, as_json: bool) -> None:
    from outrider.sim.campaign import play
    from outrider.sim.faults import draw

    report = play(draw(seed))
    facts = {
        "seed": seed,
        "passed": not report.problems,
        "problems": list(report.problems),
        "faults": dict(sorted(report.seen.items())),
        "seconds": report.seconds,
        "event_hash": report.fingerprint,
        "log": list(report.log),
    }
    if as_json:
        console.print_json(facts)
    else:
        _show_replay(report)
    if report.problems:
        raise typer.Exit(FAILED)


def _show_replay(report: Report) -> None:
    out = console.facts()
    for line in report.log:
        out.print(line, markup=False, soft_wrap=True)
    happened = ", ".join(f"{n} {name}" for name, n in sorted(report.seen.items())) or "none"
    out.print(f"faults: {happened}; event hash {report.fingerprint}", markup=False)
    for problem in report.problems:
        out.print(f"problem: {problem}", markup=False, soft_wrap=True)
    out.print("FAILED" if report.problems else "every invariant held")


# ------------------------------------------------------------------------------ many edges


def _scale(scenario: Scenario, *, as_json: bool) -> None:
    from outrider.sim.scale import crowds, schedules
    from outrider.sim.scenario import ScenarioError

    with bars() as show:
        known = schedules(scenario)

        def told(schedule: Schedule, share: float) -> None:
            done = int(scenario.duration * share)
            show(schedule, done, int(scenario.duration))

        try:
            rows = [found.as_dict() for found in crowds(scenario, told=told)]
        except ScenarioError as error:
            raise CommandError(str(error)) from None
    facts = {
        "title": scenario.title,
        "seed": scenario.seed,
        "edges": scenario.edges,
        "verifiers": scenario.clouds,
        "seconds": scenario.duration,
        "colocated_draft_assumed": scenario.colocated_assumed,
        "event_hash": _hash([row["event_hash"] for row in rows]),
        "left_out": [arm.name for arm in scenario.arms if arm.name not in known],
        "rows": rows,
    }
    if as_json:
        console.print_json(facts)
    else:
        _show_crowds(facts)


def _share(row: dict[str, Any]) -> str:
    return f"{100 * row['busy']:.0f} %"


def _complete(row: dict[str, Any]) -> str:
    return f"{row['answers']}/{row['asked']}"


CROWD_COLUMNS: Final[tuple[tuple[str, Cell], ...]] = (
    ("ms per\ntoken", _figure("ms_per_token")),
    ("TTFT\nms", _figure("ttft_ms", 0)),
    ("p95", _figure("ttft_p95_ms", 0)),
    ("for-\nwards", _figure("forwards_per_token", 3)),
    ("rows", _figure("rows_per_token", 2)),
    ("busy", _share),
    ("tokens/s", _figure("tokens_per_second", 0)),
    ("complete", _complete),
)


def _show_crowds(facts: dict[str, Any]) -> None:
    out = console.facts()
    out.print(_table(facts, CROWD_COLUMNS))
    out.print(
        f"Simulated round by round: {facts['edges']} edges, {facts['verifiers']} verifiers, "
        f"{facts['seconds']:g} virtual seconds. forwards and rows are a token's share.",
        markup=False,
        soft_wrap=True,
    )
    if facts["left_out"]:
        out.print(f"Not known here: {', '.join(facts['left_out'])}.", markup=False)
    out.print(f"seed {facts['seed']}, event hash {facts['event_hash']}", markup=False)
