"""`outrider version`."""

from __future__ import annotations

from importlib import metadata

import typer


def version() -> None:
    """Show the version of Outrider."""
    typer.echo(f"outrider {metadata.version('outrider')}")
