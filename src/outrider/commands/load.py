"""`outrider load`: many edges ask one verifier; what each of them got."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from outrider.commands import console, loading, loadtable, models, remote
from outrider.commands.errors import INTERRUPTED, CommandError
from outrider.commands.generate import choose_controller, given_options
from outrider.commands.options import (
    DEFAULT_DRAFT_LENGTH,
    DEFAULT_TARGET,
    DEFAULT_TEMPERATURE,
    LENGTH,
    MODELS,
    NETWORK,
    SAMPLING,
    CaFile,
    ControllerOption,
    Draft,
    DraftLength,
    Insecure,
    Json,
    LinkOption,
    ScheduleOption,
    Target,
    Threads,
    TokenFile,
    Window,
)
from outrider.session.schedules import DEFAULT_WINDOW, Schedule

LOAD: Final = "Load"
MAX_EDGES: Final = 250
"""Connections that a verifier takes (runtime.listening), less a few for others."""
MAX_PLACES: Final = 64
"""Sessions that a verifier takes on one connection."""


def _load(metavar: str, text: str, **more: Any) -> Any:
    return typer.Option(metavar=metavar, help=text, rich_help_panel=LOAD, **more)


def load(
    context: typer.Context,
    cloud: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The verifier at ws://HOST:PORT or wss://HOST:PORT. Default: one is started here.",
            show_default=False,
            rich_help_panel=NETWORK,
        ),
    ] = None,
    edges: Annotated[
        int, _load("N", "Edges, each with a connection of its own.", min=1, max=MAX_EDGES)
    ] = 4,
    requests: Annotated[int, _load("M", "Answers of each edge.", min=1, max=100_000)] = 8,
    per_edge: Annotated[
        int, _load("R", "Answers that an edge makes at once.", min=1, max=MAX_PLACES)
    ] = 1,
    arrivals: Annotated[
        str,
        _load(
            "KIND",
            "closed: an edge asks again when it has an answer. poisson:RATE: requests a second "
            "over all edges, whoever is ready; waiting counts.",
        ),
    ] = "closed",
    warmup: Annotated[
        int, _load("N", "Short answers that come before and are not counted.", min=0, max=100)
    ] = 1,
    target: Target = DEFAULT_TARGET,
    draft: Draft = None,
    schedule: ScheduleOption = Schedule.FREERUN,
    controller: ControllerOption = None,
    draft_length: DraftLength = DEFAULT_DRAFT_LENGTH,
    window: Window = DEFAULT_WINDOW,
    link: LinkOption = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    insecure: Insecure = False,
    prompts: Annotated[
        list[Path] | None,
        _load(
            "FILE",
            "JSONL with prompts, asked in turn; repeatable. Else a few of our own.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help=f"Longest answer. Default: as recorded, else {loading.DEFAULT_LOAD_TOKENS}.",
            show_default=False,
            rich_help_panel=LENGTH,
        ),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", metavar="", help="All answers equally long.", rich_help_panel=LENGTH
        ),
    ] = False,
    temperature: Annotated[
        float | None,
        typer.Option(
            metavar="T",
            help=f"Default: as recorded, else {DEFAULT_TEMPERATURE}.",
            show_default=False,
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, max=2**62, help="Of arrivals and answers.", rich_help_panel=SAMPLING
        ),
    ] = 0,
    target_pace: Annotated[
        float,
        _load(
            "MS",
            "Of a verifier that is started here: ms added to every forward, standing for a larger "
            "target.",
            min=0.0,
            max=60_000.0,
        ),
    ] = 0.0,
    cloud_draft: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Of a verifier that is started here: its own draft, for --schedule colocated. "
            "Default: that of --draft.",
            show_default=False,
            rich_help_panel=MODELS,
        ),
    ] = None,
    cloud_options: Annotated[
        str | None,
        _load(
            "TEXT",
            'Of a verifier that is started here: more of its options, as in "--slots 64 '
            '--batch-rows 32" (outrider cloud --help).',
            show_default=False,
        ),
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Load a verifier with many edges, and see what each gets: speed, waiting, fairness, bytes.

    With --draft replay:FILE (outrider record) an edge sleeps where its draft would compute, so one
    machine stands for dozens; prompts, seeds and sampling are then the recording's, and every
    answer is held against it. With a model each edge computes here, eight edges at most. Ctrl-C
    ends it and shows what there is. The columns: docs/load.md.

    Examples:

    ```
    outrider load
    outrider record drafts.jsonl --draft large --samples 32
    outrider load --draft replay:drafts.jsonl --edges 16 --schedule sync --link .5/5,rtt=50ms
    outrider load --cloud ws://127.0.0.1:8765 --draft lookup --arrivals poisson:2 --json
    ```
    """
    from outrider.bench.arrivals import parse_arrivals
    from outrider.bench.loadrun import LoadPlan

    if schedule is Schedule.EDGE_ONLY:
        raise CommandError("--schedule edge-only asks no verifier: choose another schedule")
    given = given_options(context, "draft_length", "temperature", "prompts", "ignore_eos")
    given |= given_options(context, "target_pace", "cloud_draft", "cloud_options")
    drafts = draft != "none" and schedule not in remote.NO_DRAFTER
    wish = loading.LoadWish(
        cloud=cloud,
        target=target,
        draft=draft or models.default_draft(target),
        cloud_draft=cloud_draft,
        edges=edges,
        schedule=schedule,
        controller=choose_controller(
            controller, schedule, drafts=drafts, adapts=False, fixed="draft_length" in given
        ),
        draft_length=draft_length,
        window=window,
        link=link,
        token_file=token_file,
        ca_file=ca_file,
        insecure=insecure,
        prompts=tuple(prompts or ()),
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        temperature=temperature,
        seed=seed,
        pace_ms=target_pace,
        cloud_options=cloud_options or "",
        threads=threads,
        given=frozenset(given),
    )
    plan = LoadPlan(
        requests=requests,
        places=per_edge,
        warm_up=warmup,
        arrivals=parse_arrivals(arrivals),
        seed=seed,
    )
    facts = asyncio.run(loading.run(wish, plan))
    if as_json:
        console.print_json(facts)
    else:
        loadtable.report(facts)
    if facts["interrupted"]:
        raise typer.Exit(INTERRUPTED)
