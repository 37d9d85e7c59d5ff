"""What goes over an edge's link, counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

WS_HEADER_UP: Final = 6
"""Bytes WebSocket adds to a short client frame: two of header, four of mask."""
WS_HEADER_DOWN: Final = 2
_LONG_FRAME: Final = 126
"""From this payload size the WebSocket header is two bytes longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """What went over an edge's link in some time. Answers that run at the same time share the link,
    and each counts all of it."""

    payload_up: int
    """Bytes of protocol frames."""
    payload_down: int
    bytes_up: int
    """With WebSocket headers; TCP/IP and TLS not counted."""
    bytes_down: int
    reconnects: int

    def since(self, before: LinkUse) -> LinkUse:
        """What has come on top of an earlier count."""
        return LinkUse(
            payload_up=self.payload_up - before.payload_up,
            payload_down=self.payload_down - before.payload_down,
            bytes_up=self.bytes_up - before.bytes_up,
            bytes_down=self.bytes_down - before.bytes_down,
            reconnects=self.reconnects - before.reconnects,
        )


@dataclass(slots=True)
class LinkMeter:
    """Counts the frames of an edge's life."""

    payload_up: int = 0
    payload_down: int = 0
    bytes_up: int = 0
    bytes_down: int = 0

    def sent(self, size: int) -> None:
        self.payload_up += size
        self.bytes_up += size + WS_HEADER_UP + (2 if size >= _LONG_FRAME else 0)

    def received(self, size: int) -> None:
        self.payload_down += size
        self.bytes_down += size + WS_HEADER_DOWN + (2 if size >= _LONG_FRAME else 0)

    def use(self, reconnects: int) -> LinkUse:
        """So far."""
        return LinkUse(
            payload_up=self.payload_up,
            payload_down=self.payload_down,
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
            reconnects=reconnects,
        )
