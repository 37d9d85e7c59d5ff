"""A token file that is read again when it changes: nobody restarts a server for a new token.

Rules:

1. What is in force is always a whole file that was right. A file that is gone, empty or broken
   changes nothing; the log says so once, by line number, never by content.
2. It is looked at every LOOK_S seconds, and at once when `look` is called (SIGHUP).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from outrider.runtime.access import ConfigurationError, Logins, read_logins

log = logging.getLogger("outrider.logins")

LOOK_S: Final = 2.0
"""One stat() each time; a revoked token works so much longer."""


class LoginFile:
    """Watches one file; `changed` is told of each new content, in the event loop."""

    def __init__(self, path: Path, in_force: Logins, changed: Callable[[Logins], None]) -> None:
        self._path = path
        self._in_force = in_force
        self._changed = changed
        self._seen = self._mark()

    def look(self, *, always: bool = True) -> None:
        """Read the file again; with `always` off only where it is not the one seen last."""
        mark = self._mark()
        if not always and mark == self._seen:
            return
        self._seen = mark
        try:
            found = read_logins(self._path)
        except (OSError, ConfigurationError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            log.warning("%s is not taken, the logins before it stay: %s", self._path, why)
            return
        if found == self._in_force:
            return
        gone = set(self._in_force.tokens) - set(found.tokens)
        new = set(found.tokens) - set(self._in_force.tokens)
        log.info(
            "%s: %d tokens, %d new, %d gone", self._path, len(found.tokens), len(new), len(gone)
        )
        self._in_force = found
        self._changed(found)

    async def watch(self) -> None:
        """Look for ever; cancel it to stop."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look(always=False)

    def _mark(self) -> tuple[int, int, int] | None:
        """Differs where the content may."""
        try:
            facts = self._path.stat()
        except OSError:
            return None
        return facts.st_mtime_ns, facts.st_size, facts.st_ino
