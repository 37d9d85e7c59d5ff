"""`outrider demo`: two processes, a shaped link, and every schedule on the same prompts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

from rich.markup import escape
from rich.progress import Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from outrider.bench.prompts import PROMPTS
from outrider.bench.schedules import Arm, compare
from outrider.commands import console, models, specs
from outrider.commands.demotable import COLOURS, legend, report
from outrider.commands.errors import CommandError
from outrider.core.link import Link
from outrider.core.tokens import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class NetDemo:
    """What the demo runs."""

    target: str
    draft: str | None
    draft_length: int
    window: int
    link: str
    pace_ms: float
    threads: int | None
    prompts: int
    seeds: int
    max_tokens: int
    temperature: float
    arms: tuple[str, ...] = ()
    """Further ways to decode (bench.live.wishes_of)."""


def run(demo: NetDemo, *, as_json: bool) -> None:
    """Start a cloud, talk to it over the shaped link, compare, say what it means. What cannot
    work is refused before anything is started."""
    from outrider.bench.live import wishes_of
    from outrider.core.link import parse_link
    from outrider.proto.connection import usable
    from outrider.runtime.edgerequest import EdgeRequest
    from outrider.runtime.shaping import load_trace

    for text in demo.arms:
        wishes_of(text)
    specs.refuse_bare("--target", demo.target)
    specs.refuse_bare("--draft", demo.draft)
    link = parse_link(demo.link, load=load_trace)
    usable(link)
    params = SamplingParams(temperature=demo.temperature, max_tokens=demo.max_tokens)
    EdgeRequest(prompt_ids=(0,), params=params, draft_length=demo.draft_length, window=demo.window)
    asyncio.run(_run(demo, link, params, as_json=as_json))


async def _run(demo: NetDemo, link: Link, params: SamplingParams, *, as_json: bool) -> None:
    from outrider.bench.live import Settings, standard_arms
    from outrider.engines.load import load_drafter, load_vocabulary
    from outrider.runtime.cores import cores
    from outrider.runtime.edge import EdgeRuntime
    from outrider.runtime.edgeconfig import EdgeConfig
    from outrider.runtime.local import LocalGenerator
    from outrider.runtime.process import CloudProcess, CloudProcessError

    name = demo.draft or models.default_draft(demo.target)
    arguments = ["--model", demo.target, "--draft", name, "--target-pace", str(demo.pace_ms)]
    threads = demo.threads or 1
    arguments += ["--threads", str(threads)]
    with console.waiting(f"starting a verifier with {demo.target}"):
        cloud = CloudProcess(arguments, core=cores().cloud)
        try:
            await cloud.start()
        except CloudProcessError as error:
            raise CommandError(f"the verifier did not start: {error}") from None
    try:
        pinned = cores().pin_edge() and cloud.pinned
        with console.waiting(f"loading the draft {name}"):
            vocabulary = load_vocabulary(demo.target)
            drafter = load_drafter(name, vocabulary, threads=threads)
        model: Any = getattr(drafter, "model", None)
        alone = None if model is None else LocalGenerator(model, vocabulary.tokenizer)
        config = EdgeConfig(url=cloud.url, link=link)
        context = vocabulary.model.info.context_length
        async with EdgeRuntime(
            config, vocabulary.tokenizer, drafter, context_length=context
        ) as runtime:
            prompts = [
                models.encode(vocabulary.tokenizer, text, raw=False, system=None)
                for text in PROMPTS[: demo.prompts]
            ]
            settings = Settings(draft_length=demo.draft_length, window=demo.window)
            if not as_json:
                await _show(runtime, prompts[0], params, settings)
            arms = standard_arms(runtime, settings, alone=alone, more=demo.arms)
            await measure(arms, prompts, params, demo.seeds, quiet=as_json)
        if runtime.peer is not None:  # what the verifier says of itself goes into the report
            demo = replace(demo, pace_ms=runtime.peer.pace_ms)
    finally:
        await cloud.stop()
    if as_json:
        console.print_json(_facts(demo, name, arms, pinned=pinned))
    else:
        report(demo, name, arms, pinned=pinned)


async def _show(runtime: Any, prompt: tuple[int, ...], params: SamplingParams, how: Any) -> None:
    """One streamed answer, each token in its origin's colour."""
    from outrider.runtime.edgerequest import EdgeRequest

    out = console.facts()
    out.print(f"[bold]> {escape(PROMPTS[0])}[/bold]")
    stream = await runtime.stream(
        EdgeRequest(
            prompt_ids=prompt, params=params, draft_length=how.draft_length, window=how.window
        )
    )
    try:
        async for step in stream:
            for piece, origin in zip(step.pieces, step.origins, strict=True):
                out.print(Text(piece, style=COLOURS[origin]), end="", soft_wrap=True)
    finally:
        stream.close()
        out.print()
    coloured = out.color_system is not None and not out.no_color
    out.print(legend(stream.result.origins, coloured=coloured))


async def measure(
    arms: list[Arm],
    prompts: list[tuple[int, ...]],
    params: SamplingParams,
    seeds: int,
    *,
    quiet: bool,
) -> None:
    """Run all arms, with a progress bar on stderr unless `quiet`."""
    with Progress(
        *Progress.get_default_columns()[:-1],
        TimeRemainingColumn(),
        TextColumn("left"),
        console=console.messages(),
        transient=True,
        disable=quiet,
    ) as progress:
        task = progress.add_task("measuring", total=len(arms) * len(prompts) * seeds)
        async for done in compare(arms, prompts, params, seeds=range(seeds)):
            progress.update(task, completed=done)


def _facts(demo: NetDemo, draft: str, arms: list[Arm], *, pinned: bool) -> dict[str, Any]:
    from outrider.runtime.cores import cores

    return {
        "target": demo.target,
        "draft": draft,
        "draft_length": demo.draft_length,
        "window": demo.window,
        "link": demo.link,
        "target_pace_ms": demo.pace_ms,
        "temperature": demo.temperature,
        "prompts": demo.prompts,
        "seeds": demo.seeds,
        "pinned_cores": pinned,
        "pinning": cores().words,
        "rows": [arm.as_dict(arms[0]) for arm in arms],
    }
