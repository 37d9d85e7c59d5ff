"""`outrider cloud`: serve a target to edges."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from outrider.commands import console, logs, specs
from outrider.commands.configfile import ConfigOption
from outrider.commands.errors import USAGE_ERROR, CommandError, describe
from outrider.commands.options import (
    DEFAULT_TARGET,
    Deterministic,
    Device,
    Dtype,
    DtypeOption,
    Threads,
)
from outrider.runtime.process import LISTENING
from outrider.session.batching import DEFAULT_STRETCH

if TYPE_CHECKING:
    from outrider.runtime.access import Logins
    from outrider.runtime.cloud import CloudServer
    from outrider.runtime.cloudruntime import CloudConfig
    from outrider.runtime.rotation import LoginFile
    from outrider.runtime.serving import Settings

DEFAULT_SLOTS: Final = 64
MAX_SLOTS: Final = 4096
MAX_REPLICAS: Final = 64
"""On one machine; each holds the whole model."""


def address(listen: str) -> tuple[str, int]:
    """HOST:PORT of --listen. Raises CommandError."""
    host, colon, port = listen.rpartition(":")
    if not colon or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise CommandError(f"--listen takes HOST:PORT, got {listen!r}")
    host = host.strip("[]") or "127.0.0.1"
    try:
        host.encode("idna")
    except UnicodeError:
        raise CommandError(f"--listen: {host!r} is no host name") from None
    return host, int(port)


def cloud(
    model: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="The target: builtin:smollm2, builtin:smollm2-gguf, a hub id, a folder, a "
            ".gguf file, or a server that runs it, as vllm:URL#MODEL (docs/engines.md).",
        ),
    ] = DEFAULT_TARGET,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0 takes a free one.")
    ] = "127.0.0.1:8765",
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Bearer tokens, one a line as outrider token new prints it; needed off loopback. "
            "A change is taken over within seconds, or on SIGHUP.",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", exists=True, dir_okay=False, help="TLS certificate chain (PEM)."
        ),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", exists=True, dir_okay=False, help="TLS private key (PEM)."),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", metavar="", help="Allow other hosts without login and TLS."),
    ] = False,
    draft: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="A draft beside the target, for edges that ask for the colocated schedule.",
        ),
    ] = "none",
    target_pace: Annotated[
        float,
        typer.Option(
            metavar="MS",
            min=0.0,
            max=60_000.0,
            help="Add this many ms to every forward, standing for a larger target. It is stated "
            "in the hello, so every report can say so.",
        ),
    ] = 0.0,
    dtype: DtypeOption = Dtype.AUTO,
    device: Device = "auto",
    deterministic: Deterministic = True,
    threads: Threads = None,
    slots: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            max=MAX_SLOTS,
            help="Caches: as many answers can be under way at once, one more is refused. An answer "
            "that waits for its edge gives its cache to another and gets it back. Memory grows "
            "with it.",
        ),
    ] = DEFAULT_SLOTS,
    batch_rows: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, max=4096, help="Most rows (tokens and drafts) in one forward."
        ),
    ] = 64,
    tenant_sessions: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Most answers at once of one login; a quarter of all unless said otherwise.",
        ),
    ] = None,
    tenant_stretch: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            min=0.0,
            max=100.0,
            help="How much longer a forward may become for logins over their fair share: 0.05 is "
            "5 %. More gives more throughput, less protects logins with few answers.",
        ),
    ] = DEFAULT_STRETCH,
    max_token_ms: Annotated[
        float,
        typer.Option(
            metavar="MS",
            min=0.0,
            help="Refuse new answers while a token would take longer than this; 0: never.",
        ),
    ] = 0.0,
    drain: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.0,
            help="After SIGTERM, let running answers finish so long; one that no edge has been "
            "connected to for 3 seconds is not waited for.",
        ),
    ] = 30.0,
    replicas: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=MAX_REPLICAS,
            help="Run N verifiers on this machine behind the one address, on Ray Serve (pip "
            "install 'outrider[ray]'). SIGHUP replaces them one by one, with the --config file "
            "read again. See docs/scale.md.",
        ),
    ] = None,
    until_eof: Annotated[
        bool,
        typer.Option(
            "--until-eof",
            metavar="",
            help="Stop when standard input ends: for a program that starts this one and holds "
            "its input open.",
        ),
    ] = False,
    log_format: logs.FormatOption = logs.LogFormat.TEXT,
    log_level: logs.LevelOption = logs.LogLevel.WARNING,
    _config: ConfigOption = None,
) -> None:
    """Serve a target model: edges send guesses, this side checks them.

    SIGTERM drains: no new sessions, running ones finish. Ctrl-C stops at once; edges resume
    on the next verifier at the same address.

    Examples:

    ```
    outrider cloud
    outrider cloud --listen 0.0.0.0:8765 --token-file tokens --tls-cert c.pem --tls-key k.pem
    outrider generate "Why is the sky blue?" --cloud ws://127.0.0.1:8765
    ```
    """
    from outrider.runtime.access import ConfigurationError
    from outrider.runtime.listening import tls_context

    logs.start(log_format, log_level)
    host, port = address(listen)
    if math.isnan(drain):
        raise CommandError("--drain is a number of seconds")
    specs.refuse_bare("--model", model)
    specs.refuse_bare("--draft", draft)
    settings = settings_of(locals())
    try:
        logins = settings.logins()
        config = settings.config(
            logins,
            host=host,
            port=port,
            certificate=tls_cert,
            private_key=tls_key,
            insecure=insecure,
        )
        tls_context(config.certificate, config.private_key)  # before the model takes its time
    except ConfigurationError as error:
        raise CommandError(str(error)) from None
    if replicas is not None:
        from outrider.commands.replicas import serve_replicas

        serve_replicas(settings, config, replicas, until_eof=until_eof)
        return
    _one(settings, config, logins, until_eof=until_eof)


def settings_of(options: Mapping[str, Any]) -> Settings:
    """What a verifier is made of, of this command's options by their names. Raises CommandError."""
    from outrider.runtime.serving import Settings

    file = options["token_file"]
    return Settings(
        model=options["model"],
        draft=options["draft"],
        dtype=Dtype(options["dtype"]).value,
        device=options["device"],
        deterministic=options["deterministic"],
        threads=options["threads"],
        slots=options["slots"],
        batch_rows=options["batch_rows"],
        tenant_sessions=options["tenant_sessions"],
        tenant_stretch=options["tenant_stretch"],
        max_token_s=options["max_token_ms"] / 1e3 or math.inf,
        pace=options["target_pace"] / 1e3,
        token_file=None if file is None else Path(file),
        drain=options["drain"],
    )


def parsed(words: Sequence[str]) -> dict[str, Any]:
    """Options of this command as a command line gives them, files of settings included. Raises
    CommandError."""
    app = typer.Typer(add_completion=False)
    app.command()(cloud)
    try:
        return dict(typer.main.get_command(app).make_context("cloud", list(words)).params)
    except USAGE_ERROR as error:
        shown = describe(error)
        raise CommandError(shown[0] if shown else str(error)) from None


def _one(settings: Settings, config: CloudConfig, logins: Logins, *, until_eof: bool) -> None:
    """A verifier in this process."""
    from outrider.control.costs import RowCosts
    from outrider.runtime.cloud import CloudServer
    from outrider.runtime.rotation import LoginFile

    if until_eof:
        end_with_input()
    with console.waiting(f"loading {settings.model}"):
        parts = settings.load()
    server = CloudServer(parts.desk, parts.tokenizer, config, service=parts.service)
    server.service.costs = RowCosts(parts.costs)
    file = settings.token_file
    watched = LoginFile(file, logins, server.admit) if file else None
    asyncio.run(_serve(server, settings.drain, parts.costs, watched))


async def _serve(
    server: CloudServer,
    drain: float,
    costs: list[tuple[int, float]],
    watched: LoginFile | None,
) -> None:
    from outrider.runtime.listening import calm_accepts

    desk, config = server.desk, server.config
    asked, hurried = asyncio.Event(), asyncio.Event()

    def hurry() -> None:
        asked.set()
        hurried.set()

    loop = asyncio.get_running_loop()
    calm_accepts(loop)
    try:
        await server.start()
    except OSError as error:
        # asyncio's own words repeat the address and the number of the error.
        why = str(error).rpartition(": ")[2].removeprefix(f"[Errno {error.errno}] ")
        where = f"{config.host}:{config.port}"
        raise OSError(f"cannot listen on {where}: {why}; give another --listen") from None
    loop.add_signal_handler(signal.SIGTERM, asked.set)
    loop.add_signal_handler(signal.SIGINT, hurry)
    watching = watch_logins(watched)
    say_listening(config, server.port)
    console.messages().print(
        f"{desk.model.info.name} ({desk.model.info.dtype}, {desk.model.info.device})"
        + (f", each forward {config.pace * 1e3:.0f} ms slower on purpose" if config.pace else "")
        + "; ms a forward by rows: "
        + ", ".join(f"{rows}: {seconds * 1e3:.0f}" for rows, seconds in costs),
        style="dim",
        markup=False,
    )
    await asked.wait()
    draining = asyncio.create_task(server.stop(drain=drain))
    impatient = asyncio.create_task(hurried.wait())  # Ctrl-C, now or while it drains
    await asyncio.wait((draining, impatient), return_when=asyncio.FIRST_COMPLETED)
    if hurried.is_set():
        await server.stop()
    impatient.cancel()
    await draining
    watching.cancel()


def say_listening(config: CloudConfig, port: int) -> None:
    """The line by which others find out that it is up."""
    scheme = "wss" if config.certificate else "ws"
    host = f"[{config.host}]" if ":" in config.host else config.host
    sys.stdout.write(f"{LISTENING}{scheme}://{host}:{port}\n")
    sys.stdout.flush()


def watch_logins(file: LoginFile | None) -> asyncio.Task[None]:
    """Read a token file again when it changes, and on SIGHUP; without one SIGHUP does nothing.
    Cancel the task to stop."""
    loop = asyncio.get_running_loop()
    if hasattr(signal, "SIGHUP"):
        loop.add_signal_handler(signal.SIGHUP, file.look if file else lambda: None)
    waiting = file.watch() if file else asyncio.Event().wait()
    return asyncio.ensure_future(waiting)  # type: ignore[arg-type]


def end_with_input() -> None:
    """From now on the end of standard input is a Ctrl-C, also while weights are loading: who
    started this is gone. A thread, because not every kind of standard input can be waited for;
    what is read is thrown away."""
    # In the background of a shell it is ignored, by all that is started there.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def read() -> None:
        with contextlib.suppress(OSError, ValueError):
            while os.read(0, 4096):
                pass
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=read, name="until-eof", daemon=True).start()
