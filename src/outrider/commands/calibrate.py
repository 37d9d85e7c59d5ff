"""`outrider calibrate`: fit the `credit` controller to a pair of models."""

from __future__ import annotations

import importlib.util
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
    from outrider.calibrate.run import Settings
    from outrider.control.calibration import Calibration

SWEEP = "Sweep"


class PipelineName(StrEnum):
    SYNC = "sync"
    PLC = "plc"


def _ms(text: str) -> Any:
    return typer.Option(
        metavar="MS", min=0.0, max=60_000.0, help=text, show_default=False, rich_help_panel=SWEEP
    )


def calibrate(
    folder: Annotated[Path, typer.Argument(help="Folder for calibration.json and the picture.")],
    target: TargetOption = None,
    draft: DraftOption = None,
    traces: TracesOption = None,
    prompts: PromptsOption = None,
    samples: SamplesOption = 16,
    max_tokens: TokensOption = 128,
    temperature: TemperatureOption = 0.7,
    round_trip: Annotated[
        float,
        typer.Option(
            metavar="MS", min=0.0, max=60_000.0, help="Network round trip.", rich_help_panel=SWEEP
        ),
    ] = 50.0,
    draft_time: Annotated[float | None, _ms("A draft token; else as measured.")] = None,
    verify_time: Annotated[
        float | None, _ms("A target forward of any rows; else the measured curve.")
    ] = None,
    gamma: Annotated[
        float | None,
        _ms("What a token is worth in the labels; else found, so that ms per token is least."),
    ] = None,
    delta: Annotated[
        float,
        typer.Option(
            metavar="ACC",
            min=0.0,
            max=1.0,
            help="Least strictly accepted share of the accepted drafts.",
            rich_help_panel=SWEEP,
        ),
    ] = 0.8,
    pipeline: Annotated[
        PipelineName,
        typer.Option(metavar="NAME", help="Whose T_seg: sync or plc.", rich_help_panel=SWEEP),
    ] = PipelineName.SYNC,
    seed: SeedOption = 0,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Calibrate the credit controller: threshold and window by recent acceptance.

    Records the target's own text, replays it under every threshold and window, stores the best
    ones by credit, and a small network trained on them. Minutes for 16 prompts.

    Examples:

    ```
    outrider calibrate calibration
    outrider calibrate calibration --draft large --traces traces.jsonl --round-trip 80
    ```
    """
    _require_torch()
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
        from outrider.calibrate import run
        from outrider.calibrate.costs import Pipeline

        settings = run.Settings(
            pipeline=Pipeline(pipeline.value),
            round_trip=round_trip / 1e3,
            draft_seconds=None if draft_time is None else draft_time / 1e3,
            verify_seconds=None if verify_time is None else verify_time / 1e3,
            gamma=None if gamma is None else gamma / 1e3,
            delta=delta,
        )
        made = run.calibrate(found, settings, seed=seed, told=show)
        path = run.save(folder, made)
        rows = run.comparison(found, folder, settings)
    picture = _draw(made, folder)
    facts = _facts(made, settings, rows)
    facts["path"], facts["picture"] = str(path), picture and str(picture)
    if as_json:
        console.print_json(facts)
    else:
        _show(made, facts)


def _require_torch() -> None:
    """Before minutes of work, not after."""
    if importlib.util.find_spec("torch") is None:
        raise CommandError('torch is not installed: pip install "outrider[torch]"')


def _draw(made: Calibration, folder: Path) -> Path | None:
    if importlib.util.find_spec("matplotlib") is None:
        console.messages().print("no picture: pip install 'outrider[plots]'", markup=False)
        return None
    from outrider.calibrate.plot import draw_surface

    path = folder / "surface.png"
    draw_surface(made, path)
    return path


def _facts(made: Calibration, settings: Settings, rows: list[dict[str, Any]]) -> dict[str, Any]:
    table, provenance = made.table, made.provenance
    edges = [0.0, *table.edges, 1.0]
    return {
        "target": provenance.target.name,
        "draft": provenance.draft.name,
        "positions": provenance.positions,
        "data": provenance.data,
        "pipeline": settings.pipeline.value,
        "round_trip_ms": 1e3 * provenance.round_trip,
        "draft_ms": 1e3 * provenance.draft_seconds,
        "verify_ms": [[rows_, 1e3 * s] for rows_, s in provenance.verify_seconds],
        "gamma_ms": 1e3 * provenance.gamma,
        "delta": provenance.delta,
        "law": {name: getattr(made.law, name) for name in made.law.__struct_fields__},
        "table": [
            {
                "credit": [edges[b], edges[b + 1]],
                "windows_seen": table.visits[b],
                "threshold": table.best_threshold[b],
                "window": table.best_window[b],
            }
            for b in range(len(table.visits))
        ],
        "held_out": rows,
    }


def _show(made: Calibration, facts: dict[str, Any]) -> None:
    out = console.facts()
    labels = Table(title="labels by credit")
    for heading in ("credit", "windows seen", "T*", "W*"):
        labels.add_column(heading, justify="right")
    for row in facts["table"]:
        if row["windows_seen"]:
            low, high = row["credit"]
            labels.add_row(
                f"{low:.1f}-{high:.1f}",
                str(row["windows_seen"]),
                f"{row['threshold']:.2f}",
                str(row["window"]),
            )
    out.print(labels)
    held = Table(title="replay of held-out answers (T > 0: recorded text stands in)")
    held.add_column("way to decide")
    for heading in ("ms/token", "window", "accepted", "Acc", "right", "TV/token"):
        held.add_column(heading, justify="right")
    for row in facts["held_out"]:
        held.add_row(
            row["name"] + (", relaxed" if row["relaxed"] else ""),
            f"{row['ms_per_token']:.1f}",
            f"{row['window']:.1f}",
            f"{row['acceptance']:.2f}",
            f"{row['quality']:.2f}",
            f"{row['right']:.2f}",
            f"{row['tv_per_token']:.3f}",
        )
    out.print(held)
    out.print(
        f"{facts['path']}: {made.provenance.positions} positions of {facts['target']} with "
        f"{facts['draft']}, gamma {facts['gamma_ms']:.1f} ms",
        markup=False,
        soft_wrap=True,
    )
