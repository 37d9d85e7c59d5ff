"""What `outrider edge` and `outrider serve` share: the options of a gateway, and running it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from outrider.commands import console, models, specs
from outrider.commands.cloud import address, watch_logins
from outrider.commands.errors import CommandError, describe
from outrider.commands.options import DEFAULT_DRAFT_LENGTH, SPECULATION
from outrider.commands.remote import NO_DRAFTER
from outrider.core.tokens import SamplingParams
from outrider.runtime.process import LISTENING
from outrider.session.schedules import Schedule

GATEWAY: Final = "Gateway"
DEFAULT_LISTEN: Final = "127.0.0.1:8000"


def _option(name: str, help_: str, **more: Any) -> Any:
    return typer.Option(name, help=help_, rich_help_panel=GATEWAY, **more)


def _file(name: str, help_: str) -> Any:
    return _option(
        name, help_, metavar="FILE", exists=True, dir_okay=False, show_default=False
    )  # fmt: skip


Listen = Annotated[
    str,
    _option("--listen", "Where clients ask; port 0 takes a free one.", metavar="HOST:PORT"),
]
KeyFile = Annotated[
    Path | None,
    _file(
        "--api-key-file",
        "API keys, one a line as outrider token new prints it; needed off loopback. A change is "
        "taken over within seconds, or on SIGHUP.",
    ),
]
Certificate = Annotated[
    Path | None, _file("--tls-cert", "TLS certificate chain (PEM) of the gateway.")
]
PrivateKey = Annotated[Path | None, _file("--tls-key", "TLS private key (PEM).")]
Names = Annotated[
    list[str] | None,
    _option(
        "--model-name",
        "A name that requests may give as model; may be repeated. Default: the target's own.",
        metavar="NAME",
        show_default=False,
    ),
]
Origins = Annotated[
    list[str] | None,
    _option(
        "--cors-origin",
        "Let pages of this origin ask, as in https://chat.example; may be repeated.",
        metavar="URL",
        show_default=False,
    ),
]
Answers = Annotated[
    int,
    _option("--max-answers", "Answers made at once, 1 to 256.", metavar="N", min=1, max=256),
]
Waiting = Annotated[
    int,
    _option(
        "--max-waiting",
        "Requests that may wait for one of them; the next gets 503 and Retry-After.",
        metavar="N",
        min=0,
        max=100_000,
    ),
]
Patience = Annotated[
    float,
    _option(
        "--give-up",
        "Fail an answer (503) when the cloud has been out of reach so long.",
        metavar="SECONDS",
        min=0.1,
        max=86_400.0,
    ),
]
Drain = Annotated[
    float,
    _option(
        "--drain",
        "After SIGTERM, let running and waiting answers finish so long; new requests get 503.",
        metavar="SECONDS",
        min=0.0,
        max=86_400.0,
    ),
]


Otel = Annotated[
    bool,
    _option(
        "--otel",
        "Send a trace span for each answer to OTEL_EXPORTER_OTLP_ENDPOINT (extra otel).",
        metavar="",
    ),
]
Controller = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Who says how many guesses (docs/controllers.md), unless a request says.",
        rich_help_panel=SPECULATION,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """The side that clients see."""

    listen: str
    key_file: Path | None
    certificate: Path | None
    private_key: Path | None
    names: tuple[str, ...]
    origins: tuple[str, ...]
    answers: int
    waiting: int
    drain: float
    insecure: bool
    otel: bool

    def checked(self, name: str) -> Checked:
        """Everything that can be wrong, before a model takes its time. Raises CommandError."""
        from outrider.gateway.app import GatewayConfig
        from outrider.gateway.tracing import Exported, NoTracing
        from outrider.runtime.access import ConfigurationError, Logins, read_logins, require_safe
        from outrider.runtime.listening import tls_context

        host, port = address(self.listen)
        try:
            logins = read_logins(self.key_file) if self.key_file else Logins()
            keys = logins.tokens
            if any(limits.connections for limits in logins.limits.values()):
                raise ConfigurationError(
                    f"{self.key_file}: connections= is for a verifier's tokens"
                )
            if (self.certificate is None) != (self.private_key is None):
                raise ConfigurationError("TLS needs both --tls-cert and --tls-key")
            require_safe(
                host,
                tokens=keys,
                encrypted=self.certificate is not None,
                insecure=self.insecure,
                option="--api-key-file",
            )
            tls = tls_context(self.certificate, self.private_key)
        except ConfigurationError as error:
            raise CommandError(str(error)) from None
        config = GatewayConfig(
            models=self.names or (name,),
            host=host,
            keys=keys,
            limits=logins.limits,
            cors=self.origins,
            answers=self.answers,
            waiting=self.waiting,
            tracing=Exported() if self.otel else NoTracing(),
        )
        return Checked(config=config, port=port, tls=tls, drain=self.drain, key_file=self.key_file)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A front without faults."""

    config: Any
    port: int
    tls: Any
    drain: float
    key_file: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Back:
    """The side that makes the answers."""

    target: str
    draft: str | None
    device: str
    threads: int | None
    manner: Any
    """gateway.wishes.Manner."""

    def load(self) -> tuple[Any, Any]:
        """The target's vocabulary, and the drafter (None: nothing is drafted here)."""
        from outrider.engines.load import load_drafter, load_vocabulary

        with console.waiting(f"loading the tokenizer of {self.target}"):
            vocabulary = load_vocabulary(self.target)
        if self.manner.schedule in NO_DRAFTER and self.draft is None:
            return vocabulary, None
        name = self.draft or models.default_draft(self.target)
        with console.waiting(f"loading the draft {name}"):
            drafter = load_drafter(name, vocabulary, device=self.device, threads=self.threads)
        return vocabulary, drafter


def manner(
    *, schedule: Schedule, controller: str, draft_length: int, window: int, calibration: Path | None
) -> Any:
    """How answers are made unless a request says otherwise; checked. No guesses: cloud-only."""
    from outrider.gateway.wishes import Manner

    if schedule is Schedule.EDGE_ONLY:
        raise CommandError("edge-only asks no cloud: outrider generate --schedule edge-only")
    made = Manner(
        schedule=schedule if draft_length else Schedule.CLOUD_ONLY,
        controller=controller,
        draft_length=draft_length or DEFAULT_DRAFT_LENGTH,
        window=window,
        calibration=str(calibration) if calibration else None,
    )
    made.request()
    return made


def refuse_bare(target: str, draft: str | None) -> None:
    specs.refuse_bare("--target", target)
    specs.refuse_bare("--draft", draft)


async def run(
    edge: Any,
    front: Checked,
    back: Back,
    vocabulary: Any,
    drafter: Any,
    *,
    cloud_ended: Callable[[], Awaitable[object]] | None = None,
) -> bool:
    """Serve until a signal, or until `cloud_ended` returns: then True. Raises OSError."""
    from outrider.gateway.app import make_app
    from outrider.gateway.server import GatewayServer
    from outrider.runtime.edge import EdgeRuntime
    from outrider.runtime.rotation import LoginFile

    info = vocabulary.model.info
    asked, hurried = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    async with EdgeRuntime(
        edge, vocabulary.tokenizer, drafter, context_length=info.context_length, target=info
    ) as runtime:
        config = replace(front.config, manner=replace(back.manner, drafts=drafter is not None))
        app = make_app(runtime, config)
        server = GatewayServer(
            app,
            config.host,
            front.port,
            tls=front.tls,
            drain=front.drain,
            room=app.state.gateway.room,
        )
        try:
            await server.start()
        except OSError as error:
            # Python's own words repeat the address.
            number = error.errno or 0
            why = os.strerror(number) if number > 0 else error.strerror
            where = f"{config.host}:{front.port}"
            raise OSError(f"cannot listen on {where}: {why}; give another --listen") from None

        def hurry() -> None:
            hurried.set()
            asked.set()

        loop.add_signal_handler(signal.SIGTERM, asked.set)
        loop.add_signal_handler(signal.SIGINT, hurry)
        _announce(front, server.port)
        keyring = app.state.gateway.keyring
        file = front.key_file
        watching = watch_logins(LoginFile(file, keyring.logins, keyring.admit) if file else None)
        contact = asyncio.create_task(_contact(runtime), name="outrider-contact")
        ended = asyncio.create_task(_until(asked, cloud_ended), name="outrider-until")
        lost = await ended
        contact.cancel()
        watching.cancel()
        stopping = asyncio.create_task(server.stop(), name="outrider-stop")
        impatient = asyncio.create_task(hurried.wait(), name="outrider-hurry")
        await asyncio.wait((stopping, impatient), return_when=asyncio.FIRST_COMPLETED)
        if hurried.is_set() or lost:
            server.hurry()
        impatient.cancel()
        await stopping
        app.state.gateway.lanes.close()
        await asyncio.to_thread(config.tracing.close)
    return lost


async def _until(asked: asyncio.Event, other: Callable[[], Awaitable[object]] | None) -> bool:
    """Wait for the first of the two; True when it was the other."""
    signalled = asyncio.ensure_future(asked.wait())
    if other is None:
        await signalled
        return False
    ended = asyncio.ensure_future(other())
    await asyncio.wait((signalled, ended), return_when=asyncio.FIRST_COMPLETED)
    signalled.cancel()
    lost = ended.done()
    ended.cancel()
    return lost and not asked.is_set()


def _announce(front: Checked, port: int) -> None:
    host = front.config.host
    shown = f"[{host}]" if ":" in host else host
    url = f"{'https' if front.tls else 'http'}://{shown}:{port}"
    sys.stdout.write(f"{LISTENING}{url}\n")
    sys.stdout.flush()
    console.messages().print(
        f"OpenAI's API at {url}/v1, model {front.config.models[0]}; docs/api.md lists the fields. "
        "Ctrl-C stops.",
        style="dim",
        markup=False,
    )


async def _contact(runtime: Any) -> None:
    """One token from the cloud at the start: what is wrong there is said before a client asks."""
    from outrider.runtime.edgerequest import EdgeRequest
    from outrider.runtime.failures import CloudError

    ids = tuple(runtime.tokenizer.encode("a"))[:1]
    request = EdgeRequest(
        prompt_ids=ids, params=SamplingParams(max_tokens=1), schedule=Schedule.CLOUD_ONLY
    )
    out = console.messages()
    try:
        async for _ in await runtime.stream(request):
            pass
    except CloudError as error:
        shown = describe(error)
        assert shown is not None, "a CloudError has a line"
        out.print(f"warning: the cloud does not answer yet: {shown[0]}", markup=False)
        return
    peer = runtime.peer
    pace = f", each forward {peer.pace_ms:g} ms slower on purpose" if peer.pace_ms else ""
    out.print(f"the cloud serves {peer.model}{pace}", style="dim", markup=False)
