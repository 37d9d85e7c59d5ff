"""`outrider load`: many edges ask one verifier; what each of them got."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from outrider.commands import console, loadtable, models, remote, specs
from outrider.commands.errors import INTERRUPTED, CommandError
from outrider.commands.generate import choose_controller, given_options
from outrider.commands.netdemo import CLOUD_CORE, EDGE_CORE
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
from outrider.commands.traces import bars
from outrider.session.schedules import DEFAULT_WINDOW, Schedule

if TYPE_CHECKING:
    from outrider.bench.loadrun import Job, LoadPlan
    from outrider.engines.load import Loaded
    from outrider.runtime.edge import EdgeConfig, EdgeRequest, EdgeRuntime

LOAD: Final = "Load"
MAX_EDGES: Final = 250
"""Connections that a verifier takes (runtime.listening), less a few for others."""
MAX_PLACES: Final = 64
"""Sessions that a verifier takes on one connection."""
MAX_MODEL_EDGES: Final = 8
"""Edges that may have a draft model each: they share this machine, which a recording spares."""
DEFAULT_LOAD_TOKENS: Final = 64
MAX_PROMPTS: Final = 512
"""Prompts taken from question sets at most."""


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
            help=f"Longest answer. Default: as recorded, else {DEFAULT_LOAD_TOKENS}.",
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
    given |= given_options(context, "target_pace", "cloud_draft", "max_tokens")
    drafts = draft != "none" and schedule not in remote.NO_DRAFTER
    wish = LoadWish(
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
    facts = asyncio.run(_load_it(wish, plan))
    if as_json:
        console.print_json(facts)
    else:
        loadtable.report(facts)
    if facts["interrupted"]:
        raise typer.Exit(INTERRUPTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWish:
    """The options, as they were given."""

    cloud: str | None
    target: str
    draft: str
    cloud_draft: str | None
    edges: int
    schedule: Schedule
    controller: str
    draft_length: int
    window: int
    link: str | None
    token_file: Path | None
    ca_file: Path | None
    insecure: bool
    prompts: tuple[Path, ...]
    max_tokens: int | None
    ignore_eos: bool
    temperature: float | None
    seed: int
    pace_ms: float
    threads: int | None
    given: frozenset[str]
    """Options that stand on the command line."""

    @property
    def replays(self) -> bool:
        return self.draft.startswith("replay:")

    @property
    def edge_draft(self) -> str | None:
        """Of the edges; None where they have none."""
        without = self.draft == "none" or self.schedule in remote.NO_DRAFTER
        return None if without else self.draft

    @property
    def own_draft(self) -> str | None:
        """Of a verifier that is started here."""
        return self.cloud_draft or (self.draft if self.schedule is Schedule.COLOCATED else None)


async def _load_it(wish: LoadWish, plan: LoadPlan) -> dict[str, Any]:
    """Check everything that can be checked, start what is needed, run, report."""
    from outrider.bench.load import summary
    from outrider.bench.loadrun import LoadRun
    from outrider.diagnose import machine
    from outrider.engines.base import UnrecordedError
    from outrider.engines.load import load_vocabulary

    _refuse(wish)
    here = machine()  # before this process pins itself
    request = _template(wish)
    tenants = list(remote.bearer_tokens(wish.token_file))
    config_of = _configs(wish, [token for _, token in tenants])
    config_of("ws://127.0.0.1:1" if wish.cloud is None else wish.cloud, 0)
    with console.waiting(f"loading the tokenizer of {wish.target}"):
        vocabulary = load_vocabulary(wish.target)
    job, workload = _jobs(wish, request, vocabulary)
    job(0)
    with console.waiting(f"loading the draft {wish.draft}"):
        drafters = _drafters(wish, vocabulary, plan.places)
    async with AsyncExitStack() as stack:
        url, pinned = await stack.enter_async_context(_verifier(wish))
        stop = _stopped_by_ctrl_c()
        runtimes = [
            await stack.enter_async_context(
                _runtime(config_of(url, number), vocabulary, drafters[number])
            )
            for number in range(wish.edges)
        ]
        whole = wish.edges * plan.requests
        with bars() as show:
            show("answers", 0, whole)
            run = LoadRun(
                runtimes,
                job,
                plan,
                tenants=[name for name, _ in tenants],
                told=lambda done: show("answers", done, whole),
            )
            try:
                outcome = await run.run(stop)
            except UnrecordedError as error:
                raise _explained(error, wish, runtimes) from None
        peer = runtimes[0].peer
    if not outcome.served and run.error is not None:
        raise run.error
    return {
        "machine": here | {"pinned_cores": pinned},
        "cloud": {
            "started_here": wish.cloud is None,
            "target": peer.model if peer else wish.target,
            "deterministic": peer.deterministic if peer else None,
            "target_pace_ms": peer.pace_ms if peer else wish.pace_ms,
        },
        "settings": {
            "edges": wish.edges,
            "requests": plan.requests,
            "per_edge": plan.places,
            "arrivals": str(plan.arrivals),
            "schedule": wish.schedule.value,
            "controller": wish.controller,
            "draft": wish.edge_draft,
            "cloud_draft": None if wish.cloud else wish.own_draft,
            "draft_length": wish.draft_length,
            "window": wish.window,
            "link": wish.link,
            "seed": wish.seed,
        }
        | workload,
    } | summary(outcome)


def _explained(error: Exception, wish: LoadWish, runtimes: list[EdgeRuntime]) -> Exception:
    """Why an answer was not the recorded one, where the verifier says something else of itself."""
    served = {runtime.peer.model for runtime in runtimes if runtime.peer} - {wish.target}
    if not served:
        return error
    return CommandError(
        f"the verifier serves {', '.join(sorted(served))}, not --target {wish.target}: {error}"
    )


def _refuse(wish: LoadWish) -> None:
    """What cannot be, or would be passed over in silence."""
    specs.refuse_bare("--target", wish.target)
    specs.refuse_bare("--draft", wish.edge_draft)
    specs.refuse_bare("--draft", wish.cloud_draft)
    if wish.cloud is not None and wish.given & {"target_pace", "cloud_draft"}:
        raise CommandError(
            "--target-pace and --cloud-draft are for a verifier that is started here: "
            "give them to outrider cloud"
        )
    own = sorted(wish.given & {"temperature", "prompts", "ignore_eos"})
    if wish.replays and own:
        names = ", ".join("--" + name.replace("_", "-") for name in own)
        raise CommandError(
            f"{names}: a recording has its own prompts and sampling; leave it out, or record anew"
        )
    models_here = wish.edge_draft not in (None, "lookup") and not wish.replays
    if models_here and wish.edges > MAX_MODEL_EDGES:
        raise CommandError(
            f"{wish.edges} edges with a model each would measure this machine: record the draft "
            f"(outrider record drafts.jsonl --draft ...) and give --draft replay:drafts.jsonl, or "
            f"at most {MAX_MODEL_EDGES} edges"
        )


def _template(wish: LoadWish) -> EdgeRequest:
    """Everything about a request but its prompt and seed; checked before anything is loaded."""
    from outrider.control.registry import parse as parse_controller
    from outrider.core.tokens import SamplingParams
    from outrider.runtime.edge import EdgeRequest

    name, options = parse_controller(wish.controller)
    return EdgeRequest(
        prompt_ids=(0,),
        params=SamplingParams(
            temperature=DEFAULT_TEMPERATURE if wish.temperature is None else wish.temperature,
            max_tokens=DEFAULT_LOAD_TOKENS if wish.max_tokens is None else wish.max_tokens,
            ignore_eos=wish.ignore_eos,
            seed=wish.seed,
        ),
        schedule=wish.schedule,
        draft_length=wish.draft_length or 1,
        window=wish.window,
        controller=name,
        controller_options=options,
    )


def _configs(wish: LoadWish, tokens: list[str | None]) -> Callable[[str, int], EdgeConfig]:
    """Edge number to its configuration; tokens take turns."""
    from outrider.core.link import parse_link
    from outrider.runtime.edge import EdgeConfig
    from outrider.runtime.shaping import load_trace

    link = None if wish.link is None else parse_link(wish.link, load=load_trace)

    def config(url: str, number: int) -> EdgeConfig:
        return EdgeConfig(
            url=url,
            token=tokens[number % len(tokens)],
            ca_file=str(wish.ca_file) if wish.ca_file else None,
            link=link,
            link_seed=wish.seed + 2 * number,  # an edge uses two
            insecure=wish.insecure,
            give_up=remote.PATIENCE_S,
        )

    return config


def _jobs(
    wish: LoadWish, like: EdgeRequest, vocabulary: Loaded
) -> tuple[Callable[[int], Job], dict[str, Any]]:
    """What is asked, and the facts of it for the report."""
    from outrider.bench.loadrun import prompted_jobs, recorded_jobs
    from outrider.engines.replay import load_replay

    if wish.replays:
        info = vocabulary.model.info
        drafter = load_replay(wish.draft, target=info.name, fingerprint=info.fingerprint)
        recorded = drafter.recorded
        header = recorded.header
        most = like.plan().window.most
        if most > header.window:
            raise CommandError(
                f"up to {most} guesses under way, and {recorded.name} was recorded with --window "
                f"{header.window}: record it with {most}, or give a smaller --window or "
                "--draft-length"
            )
        job = recorded_jobs(recorded, like, wish.max_tokens)
        recorded.require(job(0).request.params, like.rule)
        return job, {
            "prompts": len(recorded.answers),
            "max_tokens": job(0).request.params.max_tokens,
            "temperature": header.sampling.temperature,
            "recorded_draft": header.draft,
            "draft_ms_per_token": drafter.token_seconds * 1e3,
        }
    texts = _texts(wish)
    ids = [models.encode(vocabulary.tokenizer, text, raw=False, system=None) for text in texts]
    return prompted_jobs(ids, like), {
        "prompts": len(ids),
        "max_tokens": like.params.max_tokens,
        "temperature": like.params.temperature,
    }


def _texts(wish: LoadWish) -> list[str]:
    from outrider.bench.prompts import PROMPTS
    from outrider.calibrate.questions import questions
    from outrider.commands.traces import calibration_errors

    if not wish.prompts:
        return list(PROMPTS)
    with calibration_errors():
        return [text for _, text in questions(MAX_PROMPTS, wish.prompts)]


def _drafters(wish: LoadWish, vocabulary: Loaded, places: int) -> list[Any]:
    """One for each edge: a model belongs to one thread."""
    from outrider.engines.load import DEFAULT_DRAFT_SLOTS, load_drafter

    if wish.edge_draft is None:
        return [None] * wish.edges
    slots = max(DEFAULT_DRAFT_SLOTS, places)
    if wish.replays:
        return [load_drafter(wish.edge_draft, vocabulary)] * wish.edges  # holds nothing that moves
    return [
        load_drafter(wish.edge_draft, vocabulary, threads=wish.threads, max_slots=slots)
        for _ in range(wish.edges)
    ]


def _runtime(config: EdgeConfig, vocabulary: Loaded, drafter: Any) -> EdgeRuntime:
    from outrider.runtime.edge import EdgeRuntime

    info = vocabulary.model.info
    return EdgeRuntime(
        config, vocabulary.tokenizer, drafter, context_length=info.context_length, target=info
    )


@asynccontextmanager
async def _verifier(wish: LoadWish) -> AsyncIterator[tuple[str, bool]]:
    """Address of the verifier, and whether it and this process keep to a core each."""
    from outrider.runtime.process import CloudProcess, CloudProcessError, pin

    if wish.cloud is not None:
        remote.must_resolve(wish.cloud)
        yield wish.cloud, False
        return
    arguments = ["--model", wish.target, "--draft", wish.own_draft or "none"]
    arguments += ["--target-pace", str(wish.pace_ms)]
    arguments += ["--threads", str(wish.threads or 1)]
    alone = (wish.threads or 1) == 1
    cloud = CloudProcess(arguments, core=CLOUD_CORE if alone else None)
    with console.waiting(f"starting a verifier with {wish.target}"):
        try:
            await cloud.start()
        except CloudProcessError as error:
            raise CommandError(f"the verifier did not start: {error}") from None
    try:
        yield cloud.url, alone and pin(os.getpid(), EDGE_CORE) and cloud.pinned
    finally:
        await cloud.stop()


def _stopped_by_ctrl_c() -> asyncio.Event:
    """Set by SIGINT from now on, so that what there is can be shown."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    return stop
