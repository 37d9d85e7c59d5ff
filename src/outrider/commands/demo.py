"""`outrider demo`: an answer to watch, then plain decoding against speculation in numbers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from outrider.bench.prompts import PROMPTS
from outrider.bench.schedules import Arm
from outrider.commands import console, models, netdemo
from outrider.commands.errors import CommandError
from outrider.commands.generate import show
from outrider.commands.options import (
    DEFAULT_DRAFT_LENGTH,
    DEFAULT_TARGET,
    Draft,
    DraftLength,
    Dtype,
    Json,
    Target,
    Threads,
    Window,
)
from outrider.core.tokens import ParameterError, Rule, SamplingParams
from outrider.session.schedules import DEFAULT_WINDOW

if TYPE_CHECKING:
    from outrider.runtime.local import LocalGenerator


def demo(
    target: Target = DEFAULT_TARGET,
    draft: Draft = None,
    draft_length: DraftLength = DEFAULT_DRAFT_LENGTH,
    threads: Threads = None,
    prompts: Annotated[
        int,
        typer.Option(
            min=1, max=len(PROMPTS), metavar="N", help="How many prompts to measure on, 1 to 8."
        ),
    ] = 2,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", help="At most this many tokens an answer.")
    ] = 48,
    link: Annotated[
        str,
        typer.Option(
            metavar="SPEC", help="The link: rtt=50ms,up=1mbit,down=20mbit,jitter=5ms,loss=1%."
        ),
    ] = "rtt=50ms,up=5mbit,down=20mbit",
    window: Window = DEFAULT_WINDOW,
    target_pace: Annotated[
        float,
        typer.Option(
            metavar="MS",
            min=0.0,
            max=60_000.0,
            help="Add this many ms to every forward of the target, standing for a larger one.",
        ),
    ] = 0.0,
    temperature: Annotated[float, typer.Option(metavar="T", help="0: always the likeliest.")] = 0.0,
    seeds: Annotated[int, typer.Option(min=1, max=100, metavar="N", help="Seeds a prompt.")] = 1,
    local: Annotated[
        bool,
        typer.Option(
            "--local",
            metavar="",
            help="One process, no network: the target alone against co-located speculation.",
        ),
    ] = False,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="A further row, as SCHEDULE/CONTROLLER/RULE, any of them: sync/specstop, "
            "plc/credit/e2sci, freerun/relaxed, sync/top-k. May be repeated; sync/auto stands "
            "there anyway.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """See edge and cloud at work: a streamed answer, then every schedule on the same prompts.

    Starts a verifier in a process of its own, shapes the link to it, streams an answer with
    each token in the colour of who wrote it, and compares all schedules and baselines. With
    --local there is no network: the target alone (also without fixed shapes, at its fastest)
    against speculation in one process.

    Examples:

    ```
    outrider demo
    outrider demo --link rtt=100ms,up=1mbit --target-pace 60 --prompts 4
    outrider demo --local --draft large --draft-length 6
    outrider demo --json
    ```
    """
    if draft_length == 0 or draft == "none":
        raise CommandError("the demo compares with a draft: give --draft-length 1 to 64")
    if not local:
        netdemo.run(
            netdemo.NetDemo(
                target=target,
                draft=draft,
                draft_length=draft_length,
                window=window,
                link=link,
                pace_ms=target_pace,
                threads=threads,
                prompts=prompts,
                seeds=seeds,
                max_tokens=max_tokens,
                temperature=temperature,
                arms=tuple(dict.fromkeys(("sync/auto", *(arm or ())))),
            ),
            as_json=as_json,
        )
        return
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    arms, pair = _arms(target, draft, draft_length, threads)
    ids = [pair.encode(text, raw=False, system=None) for text in PROMPTS[:prompts]]
    if not as_json:
        _stream_one(pair, ids[0], params, draft_length)
    asyncio.run(netdemo.measure(arms, ids, params, 1, quiet=as_json))
    if as_json:
        console.print_json(_facts(arms, pair, len(ids)))
    else:
        _report(arms, pair, len(ids))


def _arms(
    target: str, draft: str | None, draft_length: int, threads: int | None
) -> tuple[list[Arm], models.Pair]:
    from outrider.bench.live import in_process

    common: dict[str, Any] = {"target": target, "dtype": Dtype.AUTO, "device": "auto"}
    common["threads"] = threads
    pair = models.load(draft=draft, draft_length=draft_length, deterministic=True, **common)
    free = models.load(draft="none", draft_length=0, deterministic=False, **common)
    drafter = pair.generator.drafter
    if drafter is None:
        raise ParameterError("draft", "must name a draft")

    def arm(name: str, generator: LocalGenerator, length: int, *, exact: bool) -> Arm:
        return Arm(name=name, schedule=None, answer=in_process(generator, length), exact=exact)

    return [
        arm("target alone", pair.generator, 0, exact=True),
        arm(f"with {drafter.name}, K={draft_length}", pair.generator, draft_length, exact=True),
        arm("target alone, free shapes", free.generator, 0, exact=False),
    ], pair


def _stream_one(
    pair: models.Pair, ids: tuple[int, ...], params: SamplingParams, draft_length: int
) -> None:
    out = console.facts()
    out.print(f"[bold]> {PROMPTS[0]}[/bold]")
    stream = pair.stream(ids, params, Rule.COUPLED, draft_length)
    show(stream)
    console.messages().print(models.summary(stream.result), style="dim", markup=False)


def _report(arms: list[Arm], pair: models.Pair, prompts: int) -> None:
    info = pair.generator.target.info
    title = f"{info.name} ({info.dtype}, {info.device}), {prompts} prompts, T=0"
    table = Table(title=escape(title))
    table.add_column("")
    for heading in ("calls per token", "accepted", "ms per token"):
        table.add_column(heading, justify="right")
    for arm in arms:
        table.add_row(
            escape(arm.name),
            f"{arm.forwards_per_token:.2f}",
            "-" if arm.acceptance is None else f"{arm.acceptance:.0%}",
            f"{arm.ms_per_token:.1f}",
        )
    out = console.facts()
    out.print()
    out.print(table)
    for line in _verdict(arms, prompts):
        out.print(line)


def _verdict(arms: list[Arm], prompts: int) -> list[str]:
    """What the table means, in words, also where it speaks against speculation."""
    plain, speculative, free = arms
    lines = [f"Same ids as the target alone: {speculative.same(plain)} of {prompts} answers."]
    factor = min(plain.ms_per_token, free.ms_per_token) / speculative.ms_per_token
    if factor >= 1.0:
        lines.append(f"Speculation is {factor:.2f}x as fast as the fastest plain decoding here.")
    else:
        lines.append(
            f"Speculation does not pay on this machine: {1 / factor:.2f}x the time of the "
            "fastest plain arm."
        )
    lines.append(
        f"It saves {1 - speculative.forwards_per_token:.0%} of the calls to the target. With the "
        "target behind a network each call is a round trip: outrider demo without --local shows "
        "that."
    )
    return lines


def _facts(arms: list[Arm], pair: models.Pair, prompts: int) -> dict[str, Any]:
    plain, speculative, _free = arms
    info = pair.generator.target.info
    return {
        "target": info.name,
        "dtype": info.dtype,
        "device": info.device,
        "prompts": prompts,
        "identical_answers": speculative.same(plain),
        "rows": [arm.as_dict(plain) for arm in arms],
    }
