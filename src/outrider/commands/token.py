"""`outrider token`: tokens for the token files of verifiers and gateways."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Final

import typer

from outrider.commands import console
from outrider.commands.errors import CommandError

app = typer.Typer(no_args_is_help=True)

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@app.callback()
def token() -> None:
    """Make tokens for --token-file and --api-key-file.

    Examples:

    ```
    outrider token new alice
    outrider token new alice --sessions 8 --rate 2
    ```
    """


@app.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose token it is.")],
    sessions: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Most answers at once; else as everybody.", show_default=False
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            metavar="R", min=0.001, help="Most answers begun a second.", show_default=False
        ),
    ] = None,
    connections: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Most links to a verifier; not for API keys.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print a fresh token, once, and the line for the token file, which holds its hash only.

    The token goes to whoever logs in (a file for --token-file of outrider edge, or OUTRIDER_TOKEN);
    the line goes into the file that the server reads. To change a token, add the new line under the
    same name, hand the new token out, and take the old line away: no restart is needed.

    Example:

    ```
    outrider token new alice
    ```
    """
    from outrider.runtime.access import hashed_line, new_token

    if not _NAME.fullmatch(name):
        raise CommandError("NAME: letters, digits, dots, hyphens and underscores, at most 64")
    fresh = new_token()
    limits = {"sessions": sessions, "rate": rate, "connections": connections}
    words = [f"{key}={value:g}" for key, value in limits.items() if value is not None]
    console.messages().print(
        "first line: the token, shown this once; second line: for the token file", style="dim"
    )
    sys.stdout.write(f"{fresh}\n{' '.join((hashed_line(name, fresh), *words))}\n")
