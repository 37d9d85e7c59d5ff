"""Where things are shown: answers and facts on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.text import Text


def messages() -> Console:
    """stderr: progress, summaries, warnings. Colour only on a terminal; NO_COLOR is obeyed."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def facts() -> Console:
    """stdout: tables and reports."""
    return Console(highlight=False)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A spinner on stderr while something slow goes on; silent where that is no terminal."""
    console = messages()
    if not console.is_terminal:
        yield
        return
    with console.status(f"[dim]{what} ...[/dim]", spinner="dots"):
        yield


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """As `waiting`, for what takes minutes: call it with how far things are, which is a line each
    time where there is no terminal."""
    console = messages()
    if not console.is_terminal:
        yield lambda text: console.print(text, style="dim", markup=False)
        return
    with console.status(f"[dim]{what} ...[/dim]", spinner="dots") as status:
        yield lambda text: status.update(Text(text, style="dim"))


def print_json(value: dict[str, Any]) -> None:
    """The one JSON object of a --json run, on one line."""
    unicode = "utf" in (sys.stdout.encoding or "").lower()
    sys.stdout.write(json.dumps(value, ensure_ascii=not unicode, allow_nan=False) + "\n")
    sys.stdout.flush()
