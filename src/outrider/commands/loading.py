"""What `outrider load` does with its options: check, start what is needed, run, report."""

from __future__ import annotations

import asyncio
import shlex
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from outrider.commands import console, models, remote, specs
from outrider.commands.cloud import DEFAULT_SLOTS, MAX_SLOTS
from outrider.commands.errors import CommandError
from outrider.commands.options import DEFAULT_TEMPERATURE
from outrider.commands.traces import bars, calibration_errors
from outrider.session.schedules import Schedule

if TYPE_CHECKING:
    from outrider.bench.loadrun import Job, LoadPlan
    from outrider.engines.loaded import Loaded
    from outrider.runtime.edge import EdgeRuntime
    from outrider.runtime.edgeconfig import EdgeConfig
    from outrider.runtime.edgerequest import EdgeRequest

MAX_MODEL_EDGES: Final = 8
"""Edges that may have a draft model each: they share this machine, which a recording spares."""
DEFAULT_LOAD_TOKENS: Final = 64
MAX_PROMPTS: Final = 512
"""Prompts taken from files at most."""


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
    cloud_options: str
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


async def run(wish: LoadWish, plan: LoadPlan) -> dict[str, Any]:
    """Check everything that can be checked, start what is needed, run, report."""
    from outrider.bench.load import summary
    from outrider.bench.loadrun import LoadRun
    from outrider.diagnose import machine
    from outrider.engines.base import UnrecordedError
    from outrider.engines.load import load_vocabulary
    from outrider.runtime.status import fetch_status

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
        url, pinned, pinning = await stack.enter_async_context(_verifier(wish, plan.places))
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
                status=lambda: fetch_status(config_of(url, 0)),
            )
            try:
                outcome = await run.run(stop)
            except UnrecordedError as error:
                raise _explained(error, wish, runtimes) from None
        peer = runtimes[0].peer
    if not outcome.served and run.error is not None:
        raise run.error
    return {
        "machine": here | {"pinned_cores": pinned, "pinning": pinning},
        "cloud": {
            "started_here": wish.cloud is None,
            "target": peer.model if peer else wish.target,
            "deterministic": peer.deterministic if peer else None,
            "target_pace_ms": peer.pace_ms if peer else wish.pace_ms,
            "options": wish.cloud_options or None,
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
    if wish.cloud is not None and wish.given & {"target_pace", "cloud_draft", "cloud_options"}:
        raise CommandError(
            "--target-pace, --cloud-draft and --cloud-options are for a verifier that is started "
            "here: give them to outrider cloud"
        )
    _more_options(wish)
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
    from outrider.runtime.edgerequest import EdgeRequest

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
    from outrider.runtime.edgeconfig import EdgeConfig
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
async def _verifier(wish: LoadWish, places: int) -> AsyncIterator[tuple[str, bool, str]]:
    """Address of the verifier, whether it and this process keep to a core each, and which or why
    not."""
    from outrider.runtime.cores import cores
    from outrider.runtime.process import CloudProcess, CloudProcessError

    if wish.cloud is not None:
        remote.must_resolve(wish.cloud)
        yield wish.cloud, False, "not pinned: the verifier was not started here"
        return
    arguments = ["--model", wish.target, "--draft", wish.own_draft or "none"]
    arguments += ["--target-pace", str(wish.pace_ms)]
    arguments += ["--threads", str(wish.threads or 1)]
    # A cache for every answer that can be under way; what the user says of it comes behind.
    arguments += ["--slots", str(min(max(DEFAULT_SLOTS, wish.edges * places), MAX_SLOTS))]
    arguments += _more_options(wish)
    alone = (wish.threads or 1) == 1
    cloud = CloudProcess(arguments, core=cores().cloud if alone else None)
    with console.waiting(f"starting a verifier with {wish.target}"):
        try:
            await cloud.start()
        except CloudProcessError as error:
            raise CommandError(f"the verifier did not start: {error}") from None
    try:
        pinned = alone and cores().pin_edge() and cloud.pinned
        yield cloud.url, pinned, cores().words if alone else "not pinned: --threads"
    finally:
        await cloud.stop()


def _more_options(wish: LoadWish) -> list[str]:
    try:
        return shlex.split(wish.cloud_options)
    except ValueError as error:  # a quotation mark without its fellow
        raise CommandError(f"--cloud-options: {error}") from None


def _stopped_by_ctrl_c() -> asyncio.Event:
    """Set by SIGINT from now on, so that what there is can be shown."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    return stop
