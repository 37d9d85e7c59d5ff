"""`outrider demo`: two processes, a shaped link, and every schedule on the same prompts."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, replace
from typing import Any, Final

from rich.markup import escape
from rich.progress import Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from outrider.bench.prompts import PROMPTS
from outrider.bench.schedules import Arm, compare
from outrider.commands import console, models, specs
from outrider.commands.errors import CommandError
from outrider.core.link import Link
from outrider.core.tokens import Origin, SamplingParams

COLOURS: Final = {
    Origin.DRAFT: "green",
    Origin.CORRECTION: "yellow",
    Origin.BONUS: "cyan",
    Origin.TARGET: "blue",
    Origin.RELAXED: "magenta",
}
LEGEND: Final = {
    Origin.DRAFT: "guessed by the draft, accepted",
    Origin.CORRECTION: "corrected by the target",
    Origin.BONUS: "target, behind accepted guesses",
    Origin.TARGET: "target alone (free-run)",
}
CLOUD_CORE: Final = 0
EDGE_CORE: Final = 1


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
    from outrider.runtime.edge import EdgeRequest
    from outrider.runtime.shaping import load_trace, usable

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
    from outrider.runtime.edge import EdgeConfig, EdgeRuntime
    from outrider.runtime.local import LocalGenerator
    from outrider.runtime.process import CloudProcess, CloudProcessError, pin

    name = demo.draft or models.default_draft(demo.target)
    arguments = ["--model", demo.target, "--draft", name, "--target-pace", str(demo.pace_ms)]
    threads = demo.threads or 1
    arguments += ["--threads", str(threads)]
    with console.waiting(f"starting a verifier with {demo.target}"):
        cloud = CloudProcess(arguments, core=CLOUD_CORE)
        try:
            await cloud.start()
        except CloudProcessError as error:
            raise CommandError(f"the verifier did not start: {error}") from None
    try:
        pinned = pin(os.getpid(), EDGE_CORE) and cloud.pinned
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
        _report(demo, name, arms, pinned=pinned)


async def _show(runtime: Any, prompt: tuple[int, ...], params: SamplingParams, how: Any) -> None:
    """One streamed answer, each token in its origin's colour."""
    from outrider.runtime.edge import EdgeRequest

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
    legend = Text()
    for origin, meaning in LEGEND.items():
        legend.append("■ ", style=COLOURS[origin])
        legend.append(f"{meaning}   ", style="dim")
    out.print(legend)


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


def _report(demo: NetDemo, draft: str, arms: list[Arm], *, pinned: bool) -> None:
    baseline = arms[0]
    pace = f", target {demo.pace_ms:.0f} ms slower a forward on purpose" if demo.pace_ms else ""
    title = f"{demo.target} with {draft}, {demo.link}, T={demo.temperature:g}{pace}"
    table = Table(title=escape(title))
    table.add_column("schedule")
    for heading in ("ms/token", "ratio", "forwards", "accepted", "bytes"):
        table.add_column(heading, justify="right")
    for arm in arms:
        accepted = "-" if arm.acceptance is None else f"{arm.acceptance:.0%}"
        table.add_row(
            escape(arm.name),
            f"{arm.ms_per_token:.1f}",
            f"{arm.ratio(baseline):.2f}",
            f"{arm.forwards_per_token:.2f}",
            accepted,
            f"{arm.bytes_up + arm.bytes_down:.1f}",
        )
    table.caption = "ratio: time per token to cloud-only's; forwards, bytes: a token"
    out = console.facts()
    out.print()
    out.print(table)
    for line in _verdict(arms, pinned=pinned):
        out.print(line, style="dim")


def _verdict(arms: list[Arm], *, pinned: bool) -> list[str]:
    """What the table means, in words, also where it speaks against speculation."""
    baseline, exact = arms[0], [a for a in arms if a.exact]
    answers = len(baseline.samples)
    same = all(a.same(baseline) == answers for a in exact)
    lines = [
        f"Same ids in all {len(exact)} exact arms: {answers} of {answers} answers."
        if same
        else "Answers differ between exact arms: please report this."
    ]
    lines += [
        f"{a.name} is lossy: {a.relaxed} of {a.tokens} tokens are not the target's choice."
        for a in arms
        if a.relaxed
    ]
    losing = [a.name for a in arms[1:] if a.exact and a.ratio(baseline) > 1.03]
    if losing:
        lines.append(f"Slower than plain streaming from the cloud here: {', '.join(losing)}.")
    best = min((a for a in arms[1:] if a.exact), key=lambda a: a.ratio(baseline))
    gain = 1 / best.ratio(baseline)
    if gain > 1.03:
        lines.append(f"Fastest: {best.name}, {gain:.2f}x cloud-only streaming.")
    else:
        lines.append("Speculation does not pay here: no schedule beats cloud-only streaming.")
    if not pinned:
        lines.append("Edge and cloud share all cores of this machine: read ratios, not times.")
    return lines


def _facts(demo: NetDemo, draft: str, arms: list[Arm], *, pinned: bool) -> dict[str, Any]:
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
        "rows": [arm.as_dict(arms[0]) for arm in arms],
    }
