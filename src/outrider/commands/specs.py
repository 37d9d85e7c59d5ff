"""Names of models that can be refused before anything is loaded or asked of a network."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from outrider.commands.errors import CommandError

_KNOWN: Final = frozenset({"toy", "none", "lookup", "small", "large"})


def refuse_bare(option: str, spec: str | None) -> None:
    """Refuse a bare word that is no folder and none of our names: asking the hub for it takes
    most of a minute where there is no network, and most often it is a slip."""
    name = (spec or "").removeprefix("lookup+")
    if not name or name in _KNOWN or any(sign in name for sign in ":/."):
        return
    if not Path(name).expanduser().is_dir():
        raise CommandError(
            f"{option}: no model {spec!r}; use builtin:smollm2, toy:N, a folder, a .gguf file, or "
            "owner/name for one on the hub"
        )
