"""`outrider config`: look over a settings file, or show what is in force."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final

import typer

from outrider.commands.cloud import cloud
from outrider.commands.configfile import REQUIRED, Command, faults, load, settings
from outrider.commands.edge import edge
from outrider.commands.errors import BAD_INPUT
from outrider.commands.serve import serve

app = typer.Typer(no_args_is_help=True)

SECTIONS: Final[Mapping[str, Command]] = MappingProxyType(
    {"cloud": cloud, "edge": edge, "serve": serve}
)
"""Commands that take --config, and the sections of its file."""


class Section(StrEnum):
    CLOUD = "cloud"
    EDGE = "edge"
    SERVE = "serve"


@app.callback()
def config() -> None:
    """Settings of outrider cloud, edge and serve in a TOML file (their --config).

    A section is named as the command, its keys as the command's options without the dashes in
    front; paths are relative to the file. The command line wins.

    Examples:

    ```
    outrider config show cloud
    outrider config check outrider.toml
    outrider cloud --config outrider.toml
    ```
    """


@app.command()
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False)],
) -> None:
    """Look for keys that do not exist, values of a wrong kind, and secrets that others can read.

    Exit code 0: the file can be used, warnings or not. 2: it cannot.

    Example:

    ```
    outrider config check outrider.toml
    ```
    """
    found = faults(file, SECTIONS)
    for fault in found:
        kind = "error" if fault.serious else "warning"
        sys.stderr.write(f"{kind}: {file}: {fault}\n")
    if any(fault.serious for fault in found):
        raise typer.Exit(BAD_INPUT)
    sys.stdout.write(f"{file}: can be used\n")


@app.command()
def show(
    section: Annotated[Section, typer.Argument(metavar="COMMAND", help="cloud, edge or serve.")],
    file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="With what it sets.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print every setting of a command with its value, as a file for --config.

    Example:

    ```
    outrider config show edge
    ```
    """
    command = SECTIONS[section.value]
    given = load(file, section.value, command) if file else {}
    lines = [f"[{section.value}]"]
    for setting in settings(command).values():
        if setting.parameter in given:
            lines.append(f"{setting.name} = {_toml(given[setting.parameter])}")
        elif setting.default is REQUIRED:
            lines.append(f"# {setting.name} =  # {setting.wants}, must be given")
        elif setting.default is None:
            lines.append(f"# {setting.name} =  # {setting.wants}, not set")
        else:
            lines.append(f"# {setting.name} = {_toml(setting.default)}")
    sys.stdout.write("\n".join(lines) + "\n")


def _toml(value: Any) -> str:
    """JSON's form of these values is TOML's too."""
    return json.dumps(value.value if isinstance(value, StrEnum) else value, ensure_ascii=False)
