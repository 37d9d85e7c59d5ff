"""A verifier's facts in Prometheus' text format, without a library: counters and gauges only.

Every metric is a row of METRICS, which reads the status of `CloudServer.status`; docs/operations.md
lists the same names. Means are left to whoever asks: a sum of seconds beside a count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

PREFIX: Final = "outrider_verifier_"

Status = Mapping[str, Any]
Sample = tuple[str | float, float]
"""Value of the label, and of the metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric."""

    name: str
    """Behind PREFIX; a counter's ends in _total."""
    help: str
    read: Callable[[Status], float | Iterable[Sample]]
    label: str = ""
    """Name of its label, where `read` gives samples."""

    @property
    def full(self) -> str:
        return PREFIX + self.name

    @property
    def kind(self) -> str:
        return "counter" if self.name.endswith("_total") else "gauge"


def _plain(name: str, key: str, help_: str) -> Metric:
    return Metric(name=name, help=help_, read=lambda status: float(status[key]))


def _tenants(key: str) -> Callable[[Status], Iterable[Sample]]:
    return lambda status: [(name, facts[key]) for name, facts in status["tenants"].items()]


METRICS: Final = (
    _plain("connections", "connections", "Edges connected."),
    _plain("sessions", "sessions", "Answers held, those of lost connections included."),
    _plain("sessions_under_way", "under_way", "Answers that had a forward in the last 2 s."),
    _plain("sessions_limited", "limited", "Answers that are told to guess less."),
    _plain("draining", "draining", "1 while no new answers are taken."),
    _plain("slots", "slots", "Caches in use."),
    _plain("slots_parked", "parked_slots", "Caches kept for a prompt that may come again."),
    _plain("sessions_opened_total", "opened", "Answers begun here."),
    Metric(
        name="refused_total",
        help="Answers refused or ended with an error, by the protocol's code.",
        label="code",
        read=lambda status: status["refused"].items(),
    ),
    _plain("forwards_total", "forwards", "Forwards of the target."),
    _plain("rows_total", "rows", "Rows judged: tokens and drafts."),
    _plain("fed_ids_total", "fed", "Ids appended to caches, prompts included."),
    _plain("shared_ids_total", "shared_ids", "Prompt ids taken from another cache."),
    _plain("evictions_total", "evictions", "Caches given to another answer."),
    _plain("late_frames_total", "late_frames", "Frames for answers that were over."),
    _plain("forward_seconds_total", "forward_s", "Time in forwards."),
    _plain("forward_sessions_total", "shares", "Answers in forwards, summed over the forwards."),
    _plain("queue_seconds_total", "queued_s", "Time that answers waited for a forward, summed."),
    Metric(
        name="forward_seconds",
        help="What a forward over so many rows of one answer takes.",
        label="rows",
        read=lambda status: [(rows, ms / 1e3) for rows, ms in status["row_ms"]],
    ),
    Metric(name="tenant_sessions", help="Answers held.", label="tenant", read=_tenants("sessions")),
    Metric(
        name="tenant_share",
        help="Rows of the engine in the recent past, by which a fair share is told.",
        label="tenant",
        read=_tenants("rows"),
    ),
)


def exposition(status: Status) -> str:
    """All of METRICS for a scrape."""
    lines: list[str] = []
    for metric in METRICS:
        lines.append(f"# HELP {metric.full} {metric.help}")
        lines.append(f"# TYPE {metric.full} {metric.kind}")
        found = metric.read(status)
        if isinstance(found, float):
            lines.append(f"{metric.full} {found!r}")
        else:
            lines += [
                f'{metric.full}{{{metric.label}="{_escaped(str(label))}"}} {float(value)!r}'
                for label, value in found
            ]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
