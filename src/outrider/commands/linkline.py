"""What becomes of the link to the verifier while somebody waits for an answer: said on stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Final, Self

from rich.status import Status
from rich.text import Text

from outrider.commands import console
from outrider.runtime.contact import Contact, Link

WAITING: Final = "waiting for the verifier"


class LinkLine:
    """A line that goes on counting on a terminal, and goes away with the trouble; elsewhere a line
    when the link is silent or down and one when it is there again. Of a first contact nothing but
    its failure is said there, by the error."""

    def __init__(self) -> None:
        self._out = console.messages()
        self._shown: Contact | None = None
        """Unless all is well."""
        self._status: Status | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.clear()

    def wait(self) -> None:
        """Nothing has come yet: a first contact may take a while before it fails."""
        if self._out.is_terminal:
            self._status = self._out.status(Text(WAITING, style="dim"), spinner="dots")
            self._status.start()

    def show(self, contact: Contact, *, within: bool = False) -> None:
        """`within`: a line of the answer is not at its end yet."""
        before, now = self._shown, time.monotonic()
        if contact.link is Link.UP:
            self.clear()
            if before is not None and not before.first:
                took = f"after {now - before.since:.1f} s"
                self._out.print(f"{contact.words(now)} {took}", style="dim", markup=False)
            self._shown = None
            return
        self._shown = contact
        if self._out.is_terminal:
            self._redraw(contact, within=within)
        elif not contact.first and (before is None or before.link is not contact.link):
            self._out.print(contact.words(now), markup=False)

    def clear(self) -> None:
        """Something else is shown now."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _redraw(self, contact: Contact, *, within: bool) -> None:
        if self._status is not None:
            self._status.update(_Counting(contact))
            return
        if within and sys.stdout.isatty():
            self._out.print()  # what there is of the answer stays; it goes on behind this line
        self._status = self._out.status(_Counting(contact), spinner="dots")
        self._status.start()


class _Counting:
    """The words as they are whenever the line is drawn."""

    def __init__(self, contact: Contact) -> None:
        self._contact = contact

    def __rich__(self) -> Text:
        return Text(self._contact.words(time.monotonic()), style="yellow")
