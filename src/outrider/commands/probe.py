"""`outrider probe`: can a running server be a target, and what is exact through it?"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from outrider.commands import console
from outrider.commands.errors import FAILED
from outrider.commands.options import Json

if TYPE_CHECKING:
    from outrider.engines.remote_probe import ProbeReport


def probe(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="The server, such as http://127.0.0.1:8000.")
    ],
    model: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Which of its models, where it serves several."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Ask a running server (vLLM, SGLang, llama-server, ...) what it can do as a target.

    Sends it about forty requests, with prompts of up to 769 ids. A key it wants comes from the
    environment variable OUTRIDER_SERVER_KEY. Exit code 0: outrider cloud can use it, in the way
    that is shown. 1: it cannot.

    Examples:

    ```
    outrider probe http://127.0.0.1:8000
    outrider cloud --model "vllm:http://127.0.0.1:8000#Qwen/Qwen3-0.6B"
    ```
    """
    from outrider.engines.remote import KEY_VARIABLE
    from outrider.engines.remote_http import Endpoint
    from outrider.engines.remote_probe import probe as ask

    with console.waiting(f"asking {url}"):
        report = ask(Endpoint(url, key=os.environ.get(KEY_VARIABLE, "")), model)
    if as_json:
        console.print_json({**asdict(report), "usable": report.usable})
    else:
        _show(report)
    if not report.usable:
        raise typer.Exit(FAILED)


def _show(report: ProbeReport) -> None:
    out = console.facts()
    out.print(f"{escape(report.model)} at {escape(report.url)}", soft_wrap=True)
    marks = {True: "[green]yes[/green]", False: "[red]no[/red] ", None: "-  "}
    for finding in report.findings:
        out.print(
            f"{marks[finding.good]} [bold]{escape(finding.question)}[/bold]: "
            + escape(finding.answer),
            soft_wrap=True,
        )
    out.print()
    for way in report.ways:
        word = "[green]can be used[/green]" if way.usable else "[red]cannot[/red]"
        out.print(f"[bold]{way.way}:[/bold] {word}: {escape(way.words)}", soft_wrap=True)
