"""`outrider edge`: OpenAI's API on this machine, the target somewhere else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from outrider.commands import gateway, logs, remote
from outrider.commands.configfile import ConfigOption
from outrider.commands.gateway import (
    DEFAULT_LISTEN,
    Answers,
    Back,
    Certificate,
    Controller,
    Drain,
    Front,
    KeyFile,
    Listen,
    Names,
    Origins,
    Otel,
    Patience,
    PrivateKey,
    Waiting,
)
from outrider.commands.options import (
    DEFAULT_DRAFT_LENGTH,
    DEFAULT_TARGET,
    NETWORK,
    SPECULATION,
    CaFile,
    Device,
    Draft,
    DraftLength,
    LinkOption,
    ScheduleOption,
    Target,
    Threads,
    TokenFile,
    Window,
)
from outrider.session.schedules import DEFAULT_WINDOW, Schedule


def edge(
    cloud: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="The verifier at ws://HOST:PORT or wss://HOST:PORT (outrider cloud).",
            show_default=False,
            rich_help_panel=NETWORK,
        ),
    ],
    listen: Listen = DEFAULT_LISTEN,
    target: Target = DEFAULT_TARGET,
    draft: Draft = None,
    device: Device = "auto",
    threads: Threads = None,
    schedule: ScheduleOption = Schedule.FREERUN,
    controller: Controller = "fixed",
    draft_length: DraftLength = DEFAULT_DRAFT_LENGTH,
    window: Window = DEFAULT_WINDOW,
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            exists=True,
            help="What outrider calibrate wrote, for the controller credit.",
            show_default=False,
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    link: LinkOption = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    api_key_file: KeyFile = None,
    tls_cert: Certificate = None,
    tls_key: PrivateKey = None,
    model_name: Names = None,
    cors_origin: Origins = None,
    max_answers: Answers = 64,
    max_waiting: Waiting = 256,
    give_up: Patience = 30.0,
    drain: Drain = 30.0,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            metavar="",
            help="Allow what is unencrypted: other hosts here without keys and TLS, the token over "
            "ws://.",
            rich_help_panel=NETWORK,
        ),
    ] = False,
    otel: Otel = False,
    log_format: logs.FormatOption = logs.LogFormat.TEXT,
    log_level: logs.LevelOption = logs.LogLevel.WARNING,
    _config: ConfigOption = None,
) -> None:
    """Serve OpenAI's API here, with a draft model beside it; the target is behind --cloud.

    Any client of OpenAI's API works: give it http://127.0.0.1:8000/v1 as its base URL, and any
    key where none is set here. Same seed, same text, whatever drafts and however far the cloud.

    Examples:

    ```
    outrider edge --cloud ws://127.0.0.1:8765
    outrider edge --cloud wss://gpu.example:8765 --token-file token --draft large
    outrider edge --cloud ws://127.0.0.1:8765 --listen 127.0.0.1:9000 --api-key-file keys
    ```
    """
    from outrider.core.link import parse_link
    from outrider.runtime.edgeconfig import EdgeConfig
    from outrider.runtime.shaping import load_trace

    logs.start(log_format, log_level)
    gateway.refuse_bare(target, draft)
    config = EdgeConfig(
        url=cloud,
        token=remote.bearer_token(token_file),
        ca_file=str(ca_file) if ca_file else None,
        link=None if link is None else parse_link(link, load=load_trace),
        give_up=give_up,
        insecure=insecure,
    )
    back = Back(
        target=target,
        draft=draft,
        device=device,
        threads=threads,
        manner=gateway.manner(
            schedule=schedule,
            controller=controller,
            draft_length=draft_length,
            window=window,
            calibration=calibration,
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
    remote.must_resolve(config.url)
    vocabulary, drafter = back.load()
    asyncio.run(gateway.run(config, front, back, vocabulary, drafter))
