"""The `outrider` command: puts the commands together, turns errors into one line. No logic.

Nothing here or in `outrider.commands` imports torch before a model is asked for, so `--help`
and an install without torch work (tests/test_project.py holds this).
"""

from __future__ import annotations

import sys

try:
    import functools
    import io
    import os
    from collections.abc import Callable
    from pathlib import Path
    from typing import Annotated, Any

    import typer

    from outrider.commands import config, errors, token
    from outrider.commands.bench import bench
    from outrider.commands.calibrate import calibrate
    from outrider.commands.chat import chat
    from outrider.commands.cloud import cloud
    from outrider.commands.demo import demo
    from outrider.commands.distill import distill
    from outrider.commands.doctor import doctor
    from outrider.commands.edge import edge
    from outrider.commands.generate import generate
    from outrider.commands.inertia import inertia
    from outrider.commands.load import load
    from outrider.commands.plan import plan
    from outrider.commands.probe import probe
    from outrider.commands.pull import pull
    from outrider.commands.record import record
    from outrider.commands.report import report
    from outrider.commands.serve import serve
    from outrider.commands.simulate import simulate
    from outrider.commands.version import version
except KeyboardInterrupt:  # Ctrl-C while Python still imports, which takes longest of all
    sys.exit(130)

app = typer.Typer(
    name="outrider",
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    generate,
    chat,
    demo,
    serve,
    cloud,
    edge,
    probe,
    pull,
    distill,
    calibrate,
    inertia,
    record,
    load,
    simulate,
    bench,
    report,
    plan,
    doctor,
    version,
):
    app.command()(command)
app.add_typer(config.app, name="config")
app.add_typer(token.app, name="token")


def _show_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and stop."
        ),
    ] = False,
) -> None:
    """Speculative decoding: a small draft model guesses, a large target checks many guesses in
    one pass, and the text is exactly the target's own.

    Start with: outrider generate "Why is the sky blue?"
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@functools.cache
def _command() -> Callable[..., Any]:
    """The command tree: a tenth of a second to build from all those signatures, so built once."""
    return typer.main.get_command(app)


def run(arguments: list[str] | None = None) -> int:
    """Run one command line; returns the exit code. Shows every foreseen error as one line."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character
    try:
        code = _command()(arguments, standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return errors.INTERRUPTED
    except Exception as error:
        shown = errors.describe(error)
        if shown is None:
            raise
        sys.stderr.write(f"error: {shown[0]}\n")
        return shown[1]
    return code if isinstance(code, int) else 0


def _open_closed_streams() -> None:
    """Streams the caller closed (`>&-`) lead nowhere; Python leaves None in their place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115


def main() -> None:
    try:
        sys.exit(run())
    except KeyboardInterrupt:
        sys.exit(errors.INTERRUPTED)
