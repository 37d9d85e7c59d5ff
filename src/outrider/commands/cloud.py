"""`outrider cloud`: serve a target to edges."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from outrider.commands import console, logs, specs
from outrider.commands.configfile import ConfigOption
from outrider.commands.errors import CommandError
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
    from outrider.runtime.cloud import CloudServer
    from outrider.runtime.rotation import LoginFile

DEFAULT_SLOTS: Final = 64
MAX_SLOTS: Final = 4096
TENANT_PART: Final = 4
"""Where logins are told apart, one may have this part of sessions and connections."""


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
    from outrider.control.costs import RowCosts
    from outrider.engines.desk import SlotDesk
    from outrider.engines.load import load_drafter, load_target
    from outrider.engines.measure import row_costs
    from outrider.runtime.access import ConfigurationError, Logins, read_logins
    from outrider.runtime.cloud import CloudServer
    from outrider.runtime.cloudruntime import CloudConfig
    from outrider.runtime.listening import MAX_CONNECTIONS, tls_context
    from outrider.runtime.rotation import LoginFile
    from outrider.session.service import MAX_SESSIONS, ServiceConfig

    logs.start(log_format, log_level)
    host, port = address(listen)
    if math.isnan(drain):
        raise CommandError("--drain is a number of seconds")
    specs.refuse_bare("--model", model)
    specs.refuse_bare("--draft", draft)
    try:
        logins = read_logins(token_file) if token_file else Logins()
        config = CloudConfig(
            host=host,
            port=port,
            tokens=logins.tokens,
            limits=logins.limits,
            certificate=tls_cert,
            private_key=tls_key,
            insecure=insecure,
            pace=target_pace / 1e3,
            tenant_connections=MAX_CONNECTIONS // TENANT_PART if token_file else MAX_CONNECTIONS,
        )
        tls_context(config.certificate, config.private_key)  # before the model takes its time
    except ConfigurationError as error:
        raise CommandError(str(error)) from None
    with console.waiting(f"loading {model}"):
        loaded = load_target(
            model,
            dtype=dtype.value,
            device=device,
            deterministic=deterministic,
            threads=threads,
            max_slots=slots,
        )
        drafter = load_drafter(
            draft, loaded, device=device, threads=threads, max_slots=max(slots, 1)
        )
        costs = row_costs(loaded.model, added=config.pace)
    desk = SlotDesk(loaded.model, drafter)
    info = loaded.model.info
    limits = ServiceConfig(
        vocab_size=info.vocab_size,
        context_length=info.context_length,
        eos=info.eos_token_ids,
        deterministic=info.deterministic,
        rules=info.rules,
        known_ids=info.known_ids,
        max_batch_rows=batch_rows,
        max_sessions_per_tenant=tenant_sessions
        or MAX_SESSIONS // (TENANT_PART if token_file else 1),
        max_under_way=slots,
        stretch=tenant_stretch,
        max_token_s=max_token_ms / 1e3 or math.inf,
    )
    server = CloudServer(desk, loaded.tokenizer, config, service=limits)
    server.service.costs = RowCosts(costs)
    watched = LoginFile(token_file, logins, server.admit) if token_file else None
    asyncio.run(_serve(server, drain, costs, watched, until_eof=until_eof))


async def _serve(
    server: CloudServer,
    drain: float,
    costs: list[tuple[int, float]],
    watched: LoginFile | None,
    *,
    until_eof: bool,
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
    if until_eof:
        watch_input(hurry)
    watching = watch_logins(watched)
    scheme = "wss" if config.certificate else "ws"
    host = f"[{config.host}]" if ":" in config.host else config.host
    sys.stdout.write(f"{LISTENING}{scheme}://{host}:{server.port}\n")
    sys.stdout.flush()
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


def watch_logins(file: LoginFile | None) -> asyncio.Task[None]:
    """Read a token file again when it changes, and on SIGHUP; without one SIGHUP does nothing.
    Cancel the task to stop."""
    loop = asyncio.get_running_loop()
    if hasattr(signal, "SIGHUP"):
        loop.add_signal_handler(signal.SIGHUP, file.look if file else lambda: None)
    waiting = file.watch() if file else asyncio.Event().wait()
    return asyncio.ensure_future(waiting)  # type: ignore[arg-type]


def watch_input(ended: Callable[[], None]) -> None:
    """Call `ended` in this event loop once standard input ends. A thread, because not every kind
    of standard input can be waited for in a loop; what is read is thrown away."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        with contextlib.suppress(OSError, ValueError):
            while os.read(0, 4096):
                pass
        with contextlib.suppress(RuntimeError):  # the loop is closed: it is over anyway
            loop.call_soon_threadsafe(ended)

    threading.Thread(target=read, name="until-eof", daemon=True).start()
