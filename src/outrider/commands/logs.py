"""What a server logs: --log-format, --log-level. To stderr, one event a line.

A log holds events and numbers: which connection, which answer, how long, how many. Never a prompt,
a token id, a text, a header or a key, at no level (field case 34).
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

LOGGING: Final = "Log"
ROOT: Final = "outrider"
SOCKETS: Final = ("outrider.cloud.socket", "outrider.edge.socket")
"""Loggers of the WebSocket library (runtime.discreet)."""

_BEGINS: Final = re.compile(r"\{|\d{4}-\d\d-\d\dT")
"""How a log line begins, of either form."""


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


FormatOption = Annotated[
    LogFormat,
    typer.Option(
        "--log-format",
        metavar="FORM",
        help="text, or json: an object a line on stderr.",
        rich_help_panel=LOGGING,
    ),
]
LevelOption = Annotated[
    LogLevel,
    typer.Option(
        "--log-level",
        metavar="LEVEL",
        help="debug, info (connections and answers), warning, error. No prompt, token or key is "
        "logged at any level.",
        rich_help_panel=LOGGING,
    ),
]


class JsonLines(logging.Formatter):
    """A record as one JSON object: time, level, logger, event, and its facts."""

    def format(self, record: logging.LogRecord) -> str:
        made: dict[str, Any] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **_facts(record),
        }
        if record.exc_info:
            made["exception"] = _outline(record.exc_info)
        return json.dumps(made, default=str)


class TextLines(logging.Formatter):
    """The same for people."""

    def format(self, record: logging.LogRecord) -> str:
        facts = "".join(f" {name}={value}" for name, value in _facts(record).items())
        line = f"{_utc(record.created)} {record.levelname.lower()} {record.getMessage()}{facts}"
        if record.exc_info:
            line = f"{line}\n{_outline(record.exc_info)}"
        return line


def _outline(found: Any) -> str:
    """Where it happened, without what the exception says: that may quote a prompt."""
    from outrider.runtime.discreet import outline

    return outline(found[1]) if found[1] is not None else ""


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    """What was logged with extra={"facts": {...}}."""
    facts: dict[str, Any] = getattr(record, "facts", {})
    return facts


def _utc(seconds: float) -> str:
    """RFC 3339, milliseconds."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds * 1e3) % 1000:03d}Z"


class _Stderr(logging.StreamHandler[Any]):
    """Writes to what stderr is at that moment, as logging's own last resort does."""

    def __init__(self, form: LogFormat, level: LogLevel) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(JsonLines() if form is LogFormat.JSON else TextLines())
        self._sockets = level is LogLevel.DEBUG

    @property
    def stream(self) -> Any:
        return sys.stderr

    def filter(self, record: logging.LogRecord) -> bool:
        """Without what the library says of each socket: our own events say it better."""
        loud = self._sockets or record.levelno >= logging.WARNING or record.name not in SOCKETS
        return loud and bool(super().filter(record))


class Relay:
    """Passes on what a verifier of ours logs, from its first log line on: what it says before that
    is for whoever starts it."""

    def __init__(self) -> None:
        self._begun = False

    def __call__(self, line: str) -> None:
        self._begun = self._begun or _BEGINS.match(line) is not None
        if self._begun:
            sys.stderr.write(f"{line}\n")


def start(form: LogFormat, level: LogLevel) -> None:
    """Log this package's events to stderr from now on; other libraries from warnings up."""
    root = logging.getLogger()
    for earlier in [handler for handler in root.handlers if isinstance(handler, _Stderr)]:
        root.removeHandler(earlier)
    root.addHandler(_Stderr(form, level))
    logging.getLogger(ROOT).setLevel(level.upper())
