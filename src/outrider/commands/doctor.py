"""`outrider doctor`: what is here, what is missing, how to get it."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape

from outrider.commands import console
from outrider.commands.doctorcloud import look
from outrider.commands.errors import FAILED, CommandError
from outrider.commands.options import (
    DEFAULT_TARGET,
    NETWORK,
    CaFile,
    Insecure,
    Json,
    Target,
    TokenFile,
)
from outrider.diagnose import PACKAGES, Report, examine


def doctor(
    as_json: Json = False,
    cloud: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Look at this verifier and the way to it instead: login, clock, vocabulary, "
            "round trip, bandwidth (at most 512 KiB).",
            show_default=False,
            rich_help_panel=NETWORK,
        ),
    ] = None,
    target: Target = DEFAULT_TARGET,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    insecure: Insecure = False,
) -> None:
    """Check what is installed, which devices can be used, and what is missing; or, with --cloud,
    whether a verifier can be used from here.

    Exit code 0: it can be used. 1: something is missing or wrong, and what to do is shown. Nothing
    is changed, and the verifier is asked for no answer.

    Examples:

    ```
    outrider doctor
    outrider doctor --json
    outrider doctor --cloud ws://127.0.0.1:8765
    ```
    """
    if cloud is not None:
        look(cloud, target, token_file, ca_file, insecure=insecure, as_json=as_json)
        return
    if token_file or ca_file or insecure or target != DEFAULT_TARGET:
        raise CommandError("--target, --token-file, --ca-file and --insecure go with --cloud")
    with console.waiting("looking"):
        report = examine()
    if as_json:
        console.print_json({**asdict(report), "ok": report.ok})
    else:
        _show(report)
    if not report.ok:
        raise typer.Exit(FAILED)


def _show(report: Report) -> None:
    out = console.facts()
    rows = _rows(report)
    indent = 2 + max(len(name) for name, _ in rows)
    for name, value in rows:
        first, *more = _lines(value, out.width - indent)
        out.print(f"[bold]{name:<{indent}}[/bold]{escape(first)}", soft_wrap=True)
        for line in more:
            out.print(" " * indent + escape(line), soft_wrap=True)
    out.print()
    for problem in report.problems:
        out.print(f"[red]missing[/red]  {escape(problem.what)}")
        out.print(f"         to get it: [bold]{escape(problem.fix)}[/bold]")
    if report.ok:
        out.print("[green]ready[/green]    outrider generate can run")


def _lines(value: str, width: int) -> list[str]:
    """`value` in lines that break between words only: a path that is cut cannot be copied."""
    return textwrap.wrap(value, max(width, 20), break_long_words=False, break_on_hyphens=False) or [
        ""
    ]


def _rows(report: Report) -> list[tuple[str, str]]:
    memory = "unknown" if report.memory_gib is None else f"{report.memory_gib} GiB"
    features = f" ({', '.join(report.cpu_features)})" if report.cpu_features else ""
    rows = [
        ("outrider", report.version),
        ("Python", report.python),
        ("system", report.system),
        ("cores", f"{report.cores}{features}"),
        ("memory", memory),
    ]
    for extra, names in PACKAGES.items():
        found = [f"{name} {report.packages[name] or '(missing)'}" for name in names]
        rows.append(("packages" if extra == "base" else f"extra {extra}", ", ".join(found)))
    if report.torch is not None:
        build = "CPU build" if report.torch["cuda_build"] is None else report.torch["cuda_build"]
        kernels, threads = report.torch["cpu_kernels"], report.torch["threads"]
        rows.append(
            ("torch", f"{build}, {kernels} kernels, {threads} thread{'s' if threads != 1 else ''}")
        )
        rows.append(("devices", ", ".join(report.torch["devices"])))
    weights = report.weights
    rows += [
        ("weights", weights.file or "not here"),
        ("unpacked", _files(weights.unpacked) or "not yet: outrider pull, or the first use"),
        ("drafts", _files(weights.drafts) or "none in this package"),
        ("cache", weights.cache),
    ]
    return rows


def _files(sizes: dict[str, float]) -> str:
    return ", ".join(f"{name} ({size:g} MB)" for name, size in sizes.items())
