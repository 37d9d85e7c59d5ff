"""What the WebSocket library may write to logs: never a login nor what a frame says, at no level
(field case 34). And what a message may carry to the other side."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import MutableMapping
from typing import Any, Final

from websockets.frames import Frame

HIDDEN: Final = "[hidden]"
_SECRET_HEADERS: Final = frozenset({"authorization", "proxy-authorization", "cookie"})
_USER_INFO: Final = re.compile(r"(?<=//)[^/?#\s]*@")
_QUERY: Final = re.compile(r"\?[^\s#]*")

_ADDRESS: Final = re.compile(r"\b(?:https?|wss?)://\S*[^\s:;,.]")

_STRANGER: Final = "opening handshake failed"


def without_secrets(url: str) -> str:
    """A URL (or a request target) fit for eyes: no user, no password, no query."""
    return _QUERY.sub("", _USER_INFO.sub("", url))


def without_addresses(message: str) -> str:
    """An error fit for the other side: it says what is wrong with a server, and not where that one
    stands."""
    return _ADDRESS.sub("the server", message)


def _fit(argument: object) -> object:
    """An argument of a log line: frames by their kind and size alone."""
    if isinstance(argument, Frame):
        return f"{argument.opcode.name} [{len(argument.data)} bytes]"
    return without_secrets(argument) if isinstance(argument, str) else argument


class _Discreet(logging.LoggerAdapter[logging.Logger]):
    """Hides header values that log somebody in, the query of a request, and what frames say."""

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        if msg == _STRANGER:  # scanners and cut handshakes: no traceback, no line of what they sent
            level, kwargs["exc_info"] = logging.DEBUG, None
        elif isinstance(msg, str) and msg.startswith("! "):
            kwargs["exc_info"] = None  # a parser's error quotes the line it could not read
        if len(args) == 2 and str(args[0]).lower() in _SECRET_HEADERS:
            args = (args[0], HIDDEN)
        else:
            args = tuple(_fit(a) for a in args)
        super().log(level, msg, *args, **kwargs)

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, kwargs


def discreet(name: str) -> logging.LoggerAdapter[logging.Logger]:
    """The logger `name`, with what must not be seen hidden."""
    return _Discreet(logging.getLogger(name), {})


def outline(error: BaseException) -> str:
    """A traceback without what the exceptions say: that may quote a prompt (field case 34)."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    return f"{type(error).__name__}\n{frames}"
