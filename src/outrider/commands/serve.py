"""`outrider serve`: verifier and gateway in one command, for one machine."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final

import typer

from outrider.commands import console, gateway, logs, models
from outrider.commands.configfile import ConfigOption
from outrider.commands.errors import CommandError
from outrider.commands.gateway import (
    DEFAULT_LISTEN,
    Answers,
    Back,
    Certificate,
    Checked,
    Controller,
    Drain,
    Front,
    KeyFile,
    Listen,
    Names,
    Origins,
    Otel,
    PrivateKey,
    Waiting,
)
from outrider.commands.options import (
    DEFAULT_DRAFT_LENGTH,
    DEFAULT_TARGET,
    MODELS,
    NETWORK,
    Device,
    Draft,
    DraftLength,
    Dtype,
    DtypeOption,
    ScheduleOption,
    Target,
    Threads,
    Window,
)
from outrider.session.schedules import DEFAULT_WINDOW, Schedule

DRAFT_THREADS: Final = 1
"""The draft is small; the other cores are the target's."""


def serve(
    target: Target = DEFAULT_TARGET,
    draft: Draft = None,
    listen: Listen = DEFAULT_LISTEN,
    dtype: DtypeOption = Dtype.AUTO,
    device: Device = "auto",
    threads: Threads = None,
    schedule: ScheduleOption = Schedule.FREERUN,
    controller: Controller = "fixed",
    draft_length: DraftLength = DEFAULT_DRAFT_LENGTH,
    window: Window = DEFAULT_WINDOW,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="Put a shaped link between the two, as if the target were far away: rtt=50ms,...",
            show_default=False,
            rich_help_panel=NETWORK,
        ),
    ] = None,
    target_pace: Annotated[
        float,
        typer.Option(
            metavar="MS",
            min=0.0,
            max=60_000.0,
            help="Add this many ms to every forward of the target, standing for a larger one.",
            rich_help_panel=MODELS,
        ),
    ] = 0.0,
    api_key_file: KeyFile = None,
    tls_cert: Certificate = None,
    tls_key: PrivateKey = None,
    model_name: Names = None,
    cors_origin: Origins = None,
    max_answers: Answers = 64,
    max_waiting: Waiting = 256,
    drain: Drain = 30.0,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            metavar="",
            help="Allow other hosts without keys and TLS.",
            rich_help_panel=NETWORK,
        ),
    ] = False,
    otel: Otel = False,
    log_format: logs.FormatOption = logs.LogFormat.TEXT,
    log_level: logs.LevelOption = logs.LogLevel.WARNING,
    _config: ConfigOption = None,
) -> None:
    """Serve OpenAI's API on this machine alone: the target in a process of its own, the draft and
    the API in this one. To have them on two machines: outrider cloud there, outrider edge here.

    Examples:

    ```
    outrider serve
    outrider serve --target ./my-model --draft lookup --listen 127.0.0.1:9000
    outrider serve --link rtt=50ms --target-pace 30
    ```
    """
    from outrider.core.link import parse_link
    from outrider.proto.connection import usable
    from outrider.runtime.shaping import load_trace

    logs.start(log_format, log_level)
    gateway.refuse_bare(target, draft)
    shaped = None if link is None else parse_link(link, load=load_trace)
    if shaped is not None:
        usable(shaped)
    name = models.default_draft(target) if draft is None else draft
    back = Back(
        target=target,
        draft=name,
        device=device,
        threads=DRAFT_THREADS,
        manner=gateway.manner(
            schedule=schedule,
            controller=controller,
            draft_length=draft_length,
            window=window,
            calibration=None,
        ),
    )
    front = Front(
        listen=listen,
        key_file=api_key_file,
        certificate=tls_cert,
        private_key=tls_key,
        names=tuple(model_name or ()),
        origins=tuple(cors_origin or ()),
        answers=max_answers,
        waiting=max_waiting,
        drain=drain,
        insecure=insecure,
        otel=otel,
    ).checked(target)
    arguments = ["--model", target, "--draft", name, "--dtype", dtype.value, "--device", device]
    arguments += ["--target-pace", str(target_pace)]
    arguments += ["--log-format", log_format.value, "--log-level", log_level.value]
    arguments += [] if threads is None else ["--threads", str(threads)]
    asyncio.run(_serve(arguments, shaped, front, back))


async def _serve(arguments: list[str], link: Any, front: Checked, back: Back) -> None:
    from outrider.runtime.edgeconfig import EdgeConfig
    from outrider.runtime.process import CloudProcess, CloudProcessError

    cloud = CloudProcess(arguments, heard=logs.Relay())
    try:
        with console.waiting(f"starting a verifier with {back.target}"):
            await cloud.start()
    except CloudProcessError as error:
        raise CommandError(f"the verifier did not start: {error}") from None
    try:
        vocabulary, drafter = back.load()
        edge = EdgeConfig(url=cloud.url, link=link)
        lost = await gateway.run(edge, front, back, vocabulary, drafter, cloud_ended=cloud.wait)
        if lost:
            said = cloud.said[-1] if cloud.said else "it said nothing"
            raise CommandError(f"the verifier has ended: {said}")
    finally:
        await cloud.stop()
