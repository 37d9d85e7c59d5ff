"""`outrider inertia`: does acceptance have inertia, beyond some prompts being easier?"""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from outrider.commands import console
from outrider.commands.errors import CommandError
from outrider.commands.options import Json, Threads
from outrider.commands.traces import (
    DraftOption,
    PromptsOption,
    Recording,
    SamplesOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
    TokensOption,
    TracesOption,
    bars,
    calibration_errors,
    obtain,
)

if TYPE_CHECKING:
    from outrider.calibrate.trace import Traces

STATISTICS = "Statistics"


class CutName(StrEnum):
    ROUNDS = "rounds"
    TILES = "tiles"


def _count(text: str) -> Any:
    return typer.Option(metavar="N", min=1, max=64, help=text, rich_help_panel=STATISTICS)


def _share(text: str) -> Any:
    return typer.Option(metavar="A", min=0.0, max=1.0, help=text, rich_help_panel=STATISTICS)


def inertia(
    target: TargetOption = None,
    draft: DraftOption = None,
    traces: TracesOption = None,
    prompts: PromptsOption = None,
    samples: SamplesOption = 40,
    max_tokens: TokensOption = 128,
    temperature: TemperatureOption = 0.7,
    window: Annotated[int, _count("Drafts a window.")] = 4,
    history: Annotated[int, _count("Windows in the history H.")] = 5,
    tau_high: Annotated[float, _share("A high history: mean(H) above this.")] = 0.8,
    tau_low: Annotated[float, _share("A low history: mean(H) below this.")] = 0.4,
    cut: Annotated[
        CutName,
        typer.Option(
            metavar="NAME",
            help="rounds: windows as speculation cuts them; tiles: side by side.",
            rich_help_panel=STATISTICS,
        ),
    ] = CutName.ROUNDS,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", dir_okay=False, help="Picture: .png, .svg or .pdf.", show_default=False
        ),
    ] = None,
    seed: SeedOption = 0,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Measure credit inertia: do windows accepted well follow windows accepted well?

    Every figure stands beside its control, the same windows in random order within each answer:
    prompts that differ from each other look like inertia, and that is not it. Intervals are 95 %.

    Examples:

    ```
    outrider inertia --draft large --traces traces.jsonl
    outrider inertia --traces traces.jsonl --cut tiles --plot inertia.png
    ```
    """
    if tau_low >= tau_high:
        raise CommandError("--tau-low must be less than --tau-high")
    _check_plot(plot)
    with calibration_errors(), bars() as show:
        found = obtain(
            Recording(
                target=target,
                draft=draft,
                path=traces,
                prompts=prompts or (),
                samples=samples,
                max_tokens=max_tokens,
                temperature=temperature,
                seed=seed,
                threads=threads,
            ),
            show,
        )
    asked = {"window": window, "history": history, "tau_high": tau_high, "tau_low": tau_low}
    groups = _measure(found, asked, cut, seed)
    facts = {
        "target": found.header.target.name,
        "draft": found.header.draft.name,
        "temperature": found.header.temperature,
        "positions": found.positions,
        "cut": cut.value,
        **asked,
        "seed": seed,
        "groups": groups,
        "plot": plot and str(plot),
    }
    if plot is not None:
        from outrider.calibrate.plot import draw_inertia

        draw_inertia(groups, _title(facts), plot)
    if as_json:
        console.print_json(facts)
    else:
        _show(facts)


def _check_plot(path: Path | None) -> None:
    if path is None:
        return
    from outrider.calibrate import plot

    if path.suffix not in plot.FORMATS:
        raise CommandError(f"--plot must end in one of {', '.join(plot.FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise CommandError(f"--plot: there is no folder {path.parent}")
    plot.require()


def _measure(found: Traces, asked: dict[str, Any], cut: CutName, seed: int) -> list[dict[str, Any]]:
    import numpy as np

    from outrider.bench import inertia as statistics

    kind = statistics.Cut(cut.value)
    series = [
        statistics.Series(
            task=answer.task, rates=statistics.window_rates(answer.strict, asked["window"], kind)
        )
        for answer in found.answers
    ]
    chosen = {name: value for name, value in asked.items() if name != "window"}
    try:
        measured = statistics.measure(
            series, statistics.Question(**chosen), np.random.default_rng(seed)
        )
    except ValueError as error:
        raise CommandError(str(error)) from None
    return [dataclasses.asdict(group) for group in measured]


def _title(facts: dict[str, Any]) -> str:
    return (
        f"{facts['draft']} for {facts['target']}, T={facts['temperature']:g}, "
        f"windows of {facts['window']} ({facts['cut']}), history {facts['history']}"
    )


def _show(facts: dict[str, Any]) -> None:
    out = console.facts()
    out.print(_title(facts), markup=False, soft_wrap=True)
    first = _table(
        "adjacent windows", ("answers", "windows", "rate", "corr.", "shuffled", "excess")
    )
    first.add_column("p", justify="right")
    second = _table(
        f"after mean(H) > {facts['tau_high']:g} and < {facts['tau_low']:g}",
        ("n high", "rate", "n low", "rate", "gap", "shuffled", "excess"),
    )
    for group in facts["groups"]:
        found = group["figures"]
        first.add_row(
            group["group"],
            str(group["answers"]),
            str(group["windows"]),
            f"{group['mean']:.2f}",
            *_with_control(found["correlation"]),
            "-" if found["correlation"]["p"] is None else f"{found['correlation']['p']:.3f}",
        )
        second.add_row(
            group["group"],
            str(group["after_high"]),
            _number(found["high"]["value"]),
            str(group["after_low"]),
            _number(found["low"]["value"]),
            *_with_control(found["gap"]),
        )
    out.print(first)
    out.print(second)
    out.print(
        "shuffled: the windows of each answer in random order. Inertia is the excess over it; "
        "brackets: 95 % intervals over answers.",
        markup=False,
        soft_wrap=True,
    )


def _table(title: str, headings: tuple[str, ...]) -> Table:
    table = Table(title=title)
    table.add_column("group")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _with_control(found: dict[str, Any]) -> tuple[str, str, str]:
    return (
        _number(found["value"]),
        _number(found["control"]),
        _number(found["excess"], found["excess_interval"]),
    )


def _number(value: float | None, interval: tuple[float, float] | None = None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")
