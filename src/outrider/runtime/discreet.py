"""What the WebSocket library may write to logs: never a login, at no level (field case 34)."""

from __future__ import annotations

import logging
import re
from collections.abc import MutableMapping
from typing import Any, Final

HIDDEN: Final = "[hidden]"
_SECRET_HEADERS: Final = frozenset({"authorization", "proxy-authorization", "cookie"})
_USER_INFO: Final = re.compile(r"(?<=//)[^/?#\s]*@")
_QUERY: Final = re.compile(r"\?[^\s#]*")

_STRANGER: Final = "opening handshake failed"


def without_secrets(url: str) -> str:
    """A URL (or a request target) fit for eyes: no user, no password, no query."""
    return _QUERY.sub("", _USER_INFO.sub("", url))


class _Discreet(logging.LoggerAdapter[logging.Logger]):
    """Hides header values that log somebody in, and the query of a request."""

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        if msg == _STRANGER:  # scanners and cut handshakes: no traceback, no line of what they sent
            level, kwargs["exc_info"] = logging.DEBUG, None
        elif isinstance(msg, str) and msg.startswith("! "):
            kwargs["exc_info"] = None  # a parser's error quotes the line it could not read
        if len(args) == 2 and str(args[0]).lower() in _SECRET_HEADERS:
            args = (args[0], HIDDEN)
        else:
            args = tuple(without_secrets(a) if isinstance(a, str) else a for a in args)
        super().log(level, msg, *args, **kwargs)

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, kwargs


def discreet(name: str) -> logging.LoggerAdapter[logging.Logger]:
    """The logger `name`, with what must not be seen hidden."""
    return _Discreet(logging.getLogger(name), {})
