"""How it stands with the verifier, for whoever waits for an answer: an event of the session's
machine in words, with the times that a person wants to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Self

from outrider.session.events import LinkDown, LinkHeard, LinkQuiet, LinkUp

COMMENT: Final = ": outrider "
"""Begins the comment by which a gateway tells its facts between the events of an answer
(docs/api.md)."""


class Link(StrEnum):
    """State of the link."""

    UP = "up"
    QUIET = "quiet"
    """It stands, and nothing is heard."""
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """Times are seconds of the runtime's clock."""

    link: Link
    since: float
    """When the link came up again, was last heard of, or was lost."""
    reason: str = ""
    """Why it is down; may name the verifier's address."""
    attempt: int = 0
    """Number of the attempt that is under way or comes next."""
    until: float | None = None
    """QUIET: when the link counts as dead; DOWN: when the answer fails."""
    first: bool = False
    """No verifier has ever answered: it may not be there at all."""

    def words(self, now: float) -> str:
        """A line for a person."""
        left = "" if self.until is None else f"{max(0.0, self.until - now):.0f} s"
        match self.link:
            case Link.UP:
                return "the verifier is there again"
            case Link.QUIET:
                silent = f"nothing heard of the verifier for {now - self.since:.0f} s"
                return f"{silent}; reconnecting in {left}" if left else silent
        why = f" ({self.reason})" if self.reason else ""
        line = f"no link to the verifier{why}: reconnecting, attempt {self.attempt}"
        return f"{line}, gives up in {left}" if left else line

    def facts(self, now: float) -> dict[str, Any]:
        """The same for programs, without addresses."""
        found: dict[str, Any] = {"link": self.link.value, "since_s": round(now - self.since, 1)}
        if self.attempt:
            found["attempt"] = self.attempt
        if self.until is not None:
            name = "gives_up_s" if self.link is Link.DOWN else "dead_s"
            found[name] = round(max(0.0, self.until - now), 1)
        return found

    @classmethod
    def of(cls, facts: Mapping[str, Any], now: float) -> Self:
        """What `facts` of another process say, on the clock of this one."""
        left = facts.get("gives_up_s", facts.get("dead_s"))
        return cls(
            link=Link(facts["link"]),
            since=now - float(facts.get("since_s", 0.0)),
            attempt=int(facts.get("attempt", 0)),
            until=None if left is None else now + float(left),
        )


def after(before: Contact, event: LinkUp | LinkQuiet | LinkHeard | LinkDown, now: float) -> Contact:
    """How it stands after an event; `before` itself where there is nothing new to tell."""
    match event:
        case LinkUp() | LinkHeard():
            return before if before.link is Link.UP else Contact(link=Link.UP, since=now)
        case LinkQuiet():
            return Contact(link=Link.QUIET, since=event.since, until=event.dead_at)
        case LinkDown() if event.redial_at is None:
            return before
    since = now if before.link is Link.UP else before.since
    return Contact(
        link=Link.DOWN,
        since=since,
        reason=event.reason,
        attempt=event.attempts + 1,
        until=event.gives_up_at,
    )
