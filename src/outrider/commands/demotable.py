"""What `outrider demo` shows of a comparison over a network: legend, table, and what it means."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from outrider.bench.schedules import TRUNCATED, Arm
from outrider.commands import console
from outrider.core.relaxed import RelaxedRule
from outrider.core.tokens import Origin
from outrider.session.schedules import Schedule

if TYPE_CHECKING:
    from outrider.commands.netdemo import NetDemo

COLOURS: Final = {
    Origin.DRAFT: "green",
    Origin.CORRECTION: "yellow",
    Origin.BONUS: "cyan",
    Origin.TARGET: "blue",
    Origin.RELAXED: "magenta",
    Origin.TRUNCATED: "red",
}
LEGEND: Final = {
    Origin.DRAFT: "guessed by the draft, accepted",
    Origin.CORRECTION: "corrected by the target",
    Origin.BONUS: "target, behind accepted guesses",
    Origin.TARGET: "target alone (free-run)",
    Origin.RELAXED: "guessed by the draft, near enough",
    Origin.TRUNCATED: "corrected from a truncated list",
}
WORTH: Final = 1.03
"""A ratio of times within 3 % of 1 counts as equal (our bound for "never slower")."""


def legend(origins: Sequence[Origin], *, coloured: bool) -> Text:
    """Who wrote the answer, a line each: with its colour, or in words alone."""
    counts = Counter(origins)
    text = Text(f"{len(origins)} tokens:", style="dim")
    for origin, meaning in LEGEND.items():
        if origin in (Origin.RELAXED, Origin.TRUNCATED) and not counts[origin]:
            continue
        text.append("\n")
        if coloured:
            text.append("■ ", style=COLOURS[origin])
        text.append(f"{counts[origin]:>4} {meaning}", style="dim")
    return text


class Promise(StrEnum):
    """What an arm promises of its text; the value is its mark in the table."""

    EXACT = ""
    LAW = "*"
    LOSSY = "+"
    OTHER = "~"


FOOTNOTES: Final = {
    Promise.EXACT: "no mark: exact, the ids of cloud-only",
    Promise.LAW: "*: the target's distribution; ids may differ",
    Promise.LOSSY: "+: lossy, near the target's distribution",
    Promise.OTHER: "~: the draft's own text, not the target's",
}
_LOSSY: Final = frozenset((TRUNCATED, *(rule.value for rule in RelaxedRule)))


def promise(arm: Arm) -> Promise:
    """By the rule that the arm's name holds (bench.live)."""
    if arm.exact:
        return Promise.EXACT
    if arm.schedule is Schedule.EDGE_ONLY:
        return Promise.OTHER
    lossy = _LOSSY & set(re.findall(r"[\w-]+", arm.name))
    return Promise.LOSSY if lossy else Promise.LAW


def report(demo: NetDemo, draft: str, arms: list[Arm], *, pinned: bool) -> None:
    baseline = arms[0]
    out = console.facts()
    out.print()
    out.print(f"[bold]{escape(demo.target)} with {escape(draft)}[/bold]", soft_wrap=True)
    where = f"{demo.link}, T={demo.temperature:g}"
    pace = f", {demo.pace_ms:g} ms added to a forward" if demo.pace_ms else ""
    out.print(f"{escape(where)}{pace}", soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("schedule", no_wrap=True, overflow="ignore")
    for heading in ("ms/token", "ratio", "forwards", "accepted", "bytes"):
        table.add_column(heading, justify="right", overflow="fold")
    for arm in arms:
        accepted = "-" if arm.acceptance is None else f"{arm.acceptance:.0%}"
        table.add_row(
            escape(arm.name + promise(arm)),
            f"{arm.ms_per_token:.1f}",
            f"{arm.ratio(baseline):.2f}",
            f"{arm.forwards_per_token:.2f}",
            accepted,
            f"{arm.bytes_up + arm.bytes_down:.1f}",
        )
    out.print(table)
    notes = ["ratio: to the time of cloud-only; forwards, bytes: a token"]
    notes += [FOOTNOTES[p] for p in Promise if any(promise(a) is p for a in arms)]
    for line in (*notes, "", *verdict(demo, draft, arms, pinned=pinned)):
        out.print(line, style="dim", markup=False)


def verdict(demo: NetDemo, draft: str, arms: list[Arm], *, pinned: bool) -> list[str]:
    """What the table means, in words, also where it speaks against speculation."""
    baseline, exact = arms[0], [a for a in arms if a.exact]
    answers = len(baseline.samples)
    same = all(a.same(baseline) == answers for a in exact)
    lines = [
        f"Same ids in all {len(exact)} exact arms: {answers} of {answers} answers."
        if same
        else "Answers differ between exact arms: please report this."
    ]
    lines += [
        f"{a.name} is lossy: {a.relaxed} of {a.tokens} tokens are not the target's choice."
        for a in arms
        if a.relaxed
    ]
    rivals = [a for a in arms[1:] if promise(a) is not Promise.OTHER]
    losing = [a.name for a in rivals if a.ratio(baseline) > WORTH]
    if losing:
        lines.append(f"Slower than plain streaming from the cloud here: {', '.join(losing)}.")
    faithful = [a for a in rivals if promise(a) is not Promise.LOSSY]
    best = min(faithful, key=lambda a: a.ratio(baseline))
    gain = 1 / best.ratio(baseline)
    if gain > WORTH:
        lines.append(f"Fastest: {best.name}, {gain:.2f}x cloud-only streaming.")
    else:
        lines.append("Speculation does not pay here: no schedule gains over 3 % on cloud-only.")
        lines.append(_why(demo, draft, arms))
    if not pinned:
        lines.append("Edge and cloud share all cores of this machine: read ratios, not times.")
    return lines


def _why(demo: NetDemo, draft: str, arms: list[Arm]) -> str:
    """One sentence: what stood against it, by this run's own figures, and what to try."""
    rates = [a.acceptance for a in arms if a.exact and a.acceptance is not None]
    stood = (
        f"at best {max(rates):.0%} of the guesses stood" if rates else "no guess was judged in time"
    )
    tries = []
    if demo.target.startswith("builtin:") and "large" not in draft:
        tries.append("--draft large (guesses better)")
    if not demo.pace_ms:
        tries.append("--target-pace 60 (a slower target, as larger ones are)")
    return (
        f"Why: the target alone streams a token in {arms[0].ms_per_token:.0f} ms and {stood}: "
        "drafting and the link cost more than that saves; "
        f"try {' or '.join(tries) or 'a shorter --link'}."
    )
