"""`outrider chat`: a conversation in the terminal."""

from __future__ import annotations

import asyncio
import io
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from outrider.commands import console, gateway, models, remote
from outrider.commands.chatting import COMMANDS, SETTINGS, Chat, settings_of
from outrider.commands.errors import CommandError
from outrider.commands.options import (
    DEFAULT_DRAFT_LENGTH,
    DEFAULT_TARGET,
    NETWORK,
    OUTPUT,
    CaFile,
    Cloud,
    Device,
    Draft,
    Insecure,
    LinkOption,
    Target,
    Threads,
    TokenFile,
)
from outrider.commands.voices import SILENCE_S, EdgeVoice, GatewayVoice
from outrider.session.schedules import DEFAULT_WINDOW, Schedule

PROMPT: Final = "> "
LOCAL_THREADS: Final = 1
"""Of the draft beside a target on this machine; the other cores are the target's."""


def chat(
    target: Target = DEFAULT_TARGET,
    draft: Draft = None,
    device: Device = "auto",
    threads: Threads = None,
    cloud: Cloud = None,
    gateway_url: Annotated[
        str | None,
        typer.Option(
            "--gateway",
            metavar="URL",
            help="Ask a gateway at http://HOST:PORT (outrider serve, outrider edge) instead; this "
            "side then loads no model.",
            show_default=False,
            rich_help_panel=NETWORK,
        ),
    ] = None,
    link: LinkOption = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    insecure: Insecure = False,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A setting from the start, as /set; may be repeated.",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
) -> None:
    """Chat in the terminal; each token has the colour of who wrote it: the draft or the target.

    Without --cloud or --gateway the target runs here, in a process of its own. Lines that begin
    with / are commands: /set NAME VALUE changes how answers are made while you talk, /stats says
    what they took, /compare NAME=VALUE answers the last message again on the same seed, /help
    lists the rest. Ctrl-C stops an answer, and leaves where there is none. Without a terminal it
    reads a message a line.

    Examples:

    ```
    outrider chat
    outrider chat --link rtt=50ms --set schedule=sync --set controller=auto
    outrider chat --cloud ws://127.0.0.1:8765
    outrider chat --gateway http://127.0.0.1:8000
    echo "Why is the sky blue?" | outrider chat --set seed=7
    ```
    """
    settings = settings_of(setting or [])
    out = Console(highlight=False)
    if gateway_url is not None:
        _refuse_with_gateway({"--cloud": cloud, "--draft": draft, "--link": link})
        asyncio.run(_through(gateway_url, token_file, ca_file, settings, out))
        return
    gateway.refuse_bare(target, draft)
    back = gateway.Back(
        target=target,
        draft=draft,
        device=device,
        threads=threads if cloud else LOCAL_THREADS,
        manner=gateway.manner(
            schedule=Schedule.FREERUN,
            controller="fixed",
            draft_length=DEFAULT_DRAFT_LENGTH,
            window=DEFAULT_WINDOW,
            calibration=None,
        ),
    )
    asyncio.run(
        _here(
            back, cloud, settings, out,
            threads=threads, link=link, token_file=token_file, ca_file=ca_file, insecure=insecure,
        )
    )  # fmt: skip


def _refuse_with_gateway(given: dict[str, object]) -> None:
    for option, value in given.items():
        if value is not None:
            raise CommandError(f"{option} is the gateway's own: leave it or --gateway out")


async def _through(
    url: str, key_file: Path | None, ca_file: Path | None, settings: dict[str, Any], out: Console
) -> None:
    import ssl

    import httpx

    key = remote.bearer_token(key_file)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    verify = ssl.create_default_context(cafile=str(ca_file)) if ca_file else True
    try:
        http = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=SILENCE_S, trust_env=False, verify=verify
        )
    except httpx.InvalidURL as error:
        raise CommandError(f"--gateway: {error}; give http://HOST:PORT") from None
    async with http:
        voice = GatewayVoice(http, url)
        model = await voice.model()
        await talk(Chat(voice, model, out, settings=settings), f"{model} at {url}")


async def _here(
    back: Any,
    cloud: str | None,
    settings: dict[str, Any],
    out: Console,
    *,
    threads: int | None,
    link: str | None,
    token_file: Path | None,
    ca_file: Path | None,
    insecure: bool,
) -> None:
    from dataclasses import replace

    from outrider.core.link import parse_link
    from outrider.runtime.edge import EdgeRuntime
    from outrider.runtime.edgeconfig import EdgeConfig
    from outrider.runtime.shaping import load_trace

    config = EdgeConfig(
        url=cloud or "ws://127.0.0.1",
        token=remote.bearer_token(token_file) if cloud else None,
        ca_file=str(ca_file) if ca_file else None,
        link=None if link is None else parse_link(link, load=load_trace),
        insecure=insecure,
    )
    if cloud:
        remote.must_resolve(cloud)
    async with AsyncExitStack() as stack:
        if cloud is None:
            url = await stack.enter_async_context(_verifier(back, threads))
            config = replace(config, url=url)
        vocabulary, drafter = back.load()
        info = vocabulary.model.info
        runtime = await stack.enter_async_context(
            EdgeRuntime(
                config,
                vocabulary.tokenizer,
                drafter,
                context_length=info.context_length,
                target=info,
            )
        )
        manner = replace(back.manner, drafts=drafter is not None)
        voice = EdgeVoice(runtime, manner)
        who = f"{back.target} with {drafter.name if drafter else 'no draft'}"
        await talk(Chat(voice, back.target, out, settings=settings), who)


@asynccontextmanager
async def _verifier(back: Any, threads: int | None) -> AsyncIterator[str]:
    """The target in a process of its own; its address."""
    from outrider.runtime.process import CloudProcess, CloudProcessError

    name = back.draft or models.default_draft(back.target)
    arguments = ["--model", back.target, "--draft", name, "--device", back.device]
    arguments += [] if threads is None else ["--threads", str(threads)]
    process = CloudProcess(arguments)
    try:
        with console.waiting(f"starting a verifier with {back.target}"):
            await process.start()
    except CloudProcessError as error:
        raise CommandError(f"the verifier did not start: {error}") from None
    try:
        yield process.url
    finally:
        await process.stop()


async def talk(conversation: Chat, who: str) -> None:
    """Lines until one says to leave, or there are no more."""
    typing = sys.stdin.isatty()
    if typing:
        console.messages().print(f"{who}. /help lists the commands.", style="dim", markup=False)
    async for line in _typed() if typing else _piped():
        if not await conversation.take(line):
            return


async def _typed() -> AsyncIterator[str]:
    """Lines from a terminal, with history and completion; Ctrl-C and Ctrl-D end them."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter

    words = sorted({name.split()[0] for name in COMMANDS})
    completer = WordCompleter([*words, *(f"/set {name}" for name in SETTINGS)], sentence=True)
    session: PromptSession[str] = PromptSession(completer=completer, complete_while_typing=False)
    while True:
        try:
            yield await session.prompt_async(PROMPT)
        except (EOFError, KeyboardInterrupt):
            return


async def _piped() -> AsyncIterator[str]:
    """Lines of a pipe or file, with U+FFFD for what is no text. A thread of its own reads them: the
    link must not wait for it."""
    lines: asyncio.Queue[str | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")

    def read() -> None:
        try:
            for line in sys.stdin:
                loop.call_soon_threadsafe(lines.put_nowait, line)
        finally:
            loop.call_soon_threadsafe(lines.put_nowait, None)

    threading.Thread(target=read, name="outrider-stdin", daemon=True).start()
    while (line := await lines.get()) is not None:
        yield line
