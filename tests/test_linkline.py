"""What is said of the link while somebody waits."""

from __future__ import annotations

import io
import time
from dataclasses import replace

import pytest
from rich.console import Console

from outrider.commands import console
from outrider.commands.linkline import LinkLine
from outrider.runtime.contact import Contact, Link, after
from outrider.session.events import LinkDown, LinkHeard, LinkQuiet, LinkUp

WELL = Contact(link=Link.UP, since=0.0)
CUT = LinkDown(reason="cut", redial_at=21.0, attempts=0, gives_up_at=50.0)


def test_events_in_words():
    quiet = after(WELL, LinkQuiet(since=10.0, dead_at=20.0), 13.0)
    assert quiet.words(13.0) == "nothing heard of the verifier for 3 s; reconnecting in 7 s"
    assert quiet.facts(13.0) == {"link": "quiet", "since_s": 3.0, "dead_s": 7.0}
    down = after(quiet, CUT, 20.0)
    again = after(down, replace(CUT, reason="refused", attempts=1), 21.0)
    assert again.since == 10.0, "the whole silence counts"
    assert again.words(22.0) == (
        "no link to the verifier (refused): reconnecting, attempt 2, gives up in 28 s"
    )
    assert again.facts(22.0) == {
        "link": "down", "since_s": 12.0, "attempt": 2, "gives_up_s": 28.0,
    }  # fmt: skip
    assert after(again, LinkUp(attempts=2), 23.0).link is Link.UP
    assert after(quiet, LinkHeard(), 14.0).link is Link.UP


@pytest.mark.parametrize(
    "event", [LinkUp(attempts=1), LinkHeard(), LinkDown(reason="refused", redial_at=None)]
)
def test_nothing_new_is_not_told(event: LinkUp | LinkHeard | LinkDown):
    """A link that nobody waits for, and one that comes up for the first time."""
    assert after(WELL, event, 1.0) is WELL


def lines(monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> io.StringIO:
    file = io.StringIO()
    made = Console(file=file, force_terminal=terminal, width=200, highlight=False)
    monkeypatch.setattr(console, "messages", lambda: made)
    return file


def down(attempt: int, *, first: bool = False) -> Contact:
    now = time.monotonic()
    return Contact(
        link=Link.DOWN, since=now - 3, reason="cut", attempt=attempt, until=now + 28, first=first
    )


def test_a_file_gets_a_line_for_each_change(monkeypatch: pytest.MonkeyPatch):
    file = lines(monkeypatch, terminal=False)
    with LinkLine() as line:
        line.wait()
        for attempt in (1, 2, 3):
            line.show(down(attempt))
        line.show(WELL)
        line.show(WELL)
    told = file.getvalue().splitlines()
    assert len(told) == 2
    assert "attempt 1" in told[0]
    assert told[1].startswith("the verifier is there again after 3")


def test_a_terminal_gets_one_that_goes_on(monkeypatch: pytest.MonkeyPatch):
    file = lines(monkeypatch, terminal=True)
    with LinkLine() as line:
        line.wait()
        while "waiting for the verifier" not in file.getvalue():
            time.sleep(0.01)
        line.show(down(1))
        line.show(down(2))
        while "attempt 2" not in file.getvalue():
            time.sleep(0.01)
        assert file.getvalue().count("\n") == 0, "drawn in its place"
        line.clear()
        assert file.getvalue().endswith("\x1b[2K"), "and taken away for the answer"


def test_of_a_first_contact_the_error_says_enough(monkeypatch: pytest.MonkeyPatch):
    file = lines(monkeypatch, terminal=False)
    with LinkLine() as line:
        line.show(down(1, first=True))
        line.show(WELL)
    assert file.getvalue() == ""
