"""From the options of `outrider plan` to `plan.facts.Facts`, and where each number came from."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from outrider.commands.errors import CommandError
from outrider.core.link import Link, LinkError, parse_link, seconds
from outrider.core.tokens import Rule
from outrider.plan.facts import MAX_SECONDS, Curve, Facts, PlanError, Prices

if TYPE_CHECKING:
    from outrider.calibrate.trace import Traces

GIVEN: Final = "given"
MEASURED: Final = "measured"
ASSUMED: Final = "assumed"
MOST_POINTS: Final = 64
"""Points of a curve: as many as a block has at most (control.base.MAX_LENGTH)."""
_NUMBER: Final = re.compile(r"\s*(\d+(\.\d*)?|\.\d+)\s*")
_SEEN: Final = 20
"""Blocks that a point of a measured curve rests on at least."""


@dataclass(slots=True, kw_only=True)
class Known:
    """What is known so far. Seconds."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def put(self, name: str, value: Any, source: str) -> None:
        """Unless it is known already: what was given wins over what was measured, and that over
        what is assumed. None: not known."""
        if value is not None and name not in self.values:
            self.values[name], self.sources[name] = value, source


def time_of(option: str, text: str) -> float:
    """A bare number in milliseconds, or one with its unit. Seconds, MAX_SECONDS at most."""
    try:
        found = seconds(option, f"{text}ms" if _NUMBER.fullmatch(text) else text)
    except LinkError:
        raise CommandError(
            f"{option} {text}: give milliseconds, or a number with its unit us, ms or s, as in 50ms"
        ) from None
    if found > MAX_SECONDS:
        raise CommandError(f"{option} {text}: at most {MAX_SECONDS:g} s")
    return found


def duration_of(option: str, text: str) -> float:
    """A time that something takes: as time_of, and not 0."""
    if not (found := time_of(option, text)):
        raise CommandError(f"{option} {text}: must be above 0")
    return found


def row_times(option: str, text: str) -> tuple[tuple[int, float], ...]:
    """'60' or '60ms' for any number of rows, or a table '1:60,9:72'. (rows, seconds)."""
    if ":" not in text:
        return ((1, duration_of(option, text)),)
    points = []
    for part in text.split(","):
        rows, _, time = part.partition(":")
        if not rows.strip().isdecimal() or not int(rows):
            raise CommandError(
                f"{option} {text}: give one time, or times by rows of a forward, as in 1:60,9:72"
            )
        points.append((int(rows), duration_of(option, time)))
    if len(dict(points)) < len(points):
        raise CommandError(f"{option} {text}: each number of rows once")
    return tuple(sorted(points))


def curve_of(path: Path) -> Curve:
    """S(1), S(2), ... from a file: numbers apart by blanks, commas or lines, or a JSON list."""
    try:
        text = path.read_text(encoding="utf-8")
        numbers = json.loads(text) if text.lstrip().startswith("[") else _numbers(text)
        points = [float(x) for x in numbers]
    except (ValueError, TypeError):
        raise CommandError(
            f"--curve {path.name}: give S(1), S(2), ... as numbers apart by blanks, commas or "
            "lines, as in .8 .64 .51"
        ) from None
    if len(points) > MOST_POINTS:
        raise CommandError(f"--curve {path.name}: at most {MOST_POINTS} points")
    try:
        return Curve.of(points)
    except PlanError as error:
        raise CommandError(f"--curve {path.name}: {error}") from None


def _numbers(text: str) -> list[str]:
    lines = [line.partition("#")[0] for line in text.splitlines()]
    return " ".join(lines).replace(",", " ").split()


def link_of(rtt: str | None, spec: str | None) -> Link:
    """The link of --rtt and --link. Raises LinkError, CommandError."""
    if rtt is None and spec is None:
        raise CommandError("give the link: --rtt 50ms, or --link rtt=50ms,up=1mbit,down=20mbit")
    link = Link() if spec is None else parse_link(spec, load=_no_traces)
    if rtt is None:
        return link
    if link.rtt_s:
        raise CommandError("--rtt and the rtt of --link say the same thing: keep one")
    return replace(link, rtt_s=time_of("--rtt", rtt))


def _no_traces(_: str) -> Any:
    raise LinkError("a plan needs rates, as in up=1mbit; play traces with outrider simulate")


def mean_round_trip(link: Link) -> float:
    """Seconds, jitter and retransmissions at their mean: uniform jitter both ways, and a lost
    packet arrives a timeout later (core.link)."""
    path = link.up()
    return link.rtt_s + link.jitter_s + 2.0 * path.rto_s * link.loss / (1.0 - link.loss)


def survival_of(stands: Sequence[Any]) -> list[float]:
    """S(1), S(2), ... of recorded answers (bool arrays): over every start of a block that has
    room for so many drafts, as far as _SEEN starts have."""
    from outrider.calibrate.trace import runs

    runs_of = [runs(answer) for answer in stands]
    points: list[float] = []
    for k in range(1, MOST_POINTS + 1):
        starts = [answer[: max(0, len(answer) - k + 1)] for answer in runs_of]
        seen = sum(len(s) for s in starts)
        if seen < _SEEN:
            break
        share = sum(int((s >= k).sum()) for s in starts) / seen
        points.append(min(share, points[-1] if points else 1.0))
    return points


def from_traces(known: Known, traces: Traces) -> None:
    """What a recording says: t_d, t_v by rows, S(k)."""
    header = traces.header
    points = survival_of([answer.strict for answer in traces.answers])
    if not points:
        raise CommandError("the recorded answers are too short: give --samples or --max-tokens")
    known.put("curve", Curve.of(points), MEASURED)
    known.put("draft", header.draft_seconds, MEASURED)
    known.put("verify", tuple(header.verify_seconds), MEASURED)


def facts_of(known: Known, *, prices: Prices, rule: Rule, own_text: bool) -> Facts:
    """The whole. Raises CommandError naming what is missing."""
    missing = [
        options
        for name, options in (
            ("curve", "--alpha .8 (or --curve FILE)"),
            ("draft", "--t-draft 5ms"),
            ("verify", "--t-verify 60ms"),
            ("round_trip", "--rtt 50ms"),
        )
        if name not in known.values
    ]
    if missing:
        raise CommandError(
            f"give {', '.join(missing)}; or --measure, which times models on this machine, or "
            "--cloud URL, which asks a verifier"
        )
    if "cloud_draft" not in known.values:
        known.put("cloud_draft", known.values["draft"], ASSUMED)
    values = dict(known.values)
    if math.isinf(values["cloud_draft"]):
        values["cloud_draft"] = None
    try:
        return Facts(prices=prices, rule=rule, own_text=own_text, **values)
    except PlanError as error:
        raise CommandError(str(error)) from None
