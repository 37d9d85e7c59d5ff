"""What can go wrong on the wire, and whose fault it is.

ProtocolError
+-- RemoteError   the peer broke the rules; carries the code to answer with
+-- LocalError    we were asked to do something the state does not allow: a bug on this side
"""

from __future__ import annotations

from outrider.proto.messages import Code


class ProtocolError(Exception):
    """Base of wire errors."""


class RemoteError(ProtocolError):
    """The peer's message cannot be accepted. `session` None: the connection must end."""

    def __init__(self, code: Code, message: str, session: int | None = None) -> None:
        super().__init__(f"{code.value}: {message}")
        self.code = code
        self.message = message
        self.session = session


class LocalError(ProtocolError):
    """This side asked for something its own state forbids."""
