"""The paths of a verifier and who may use them. Deny by default (field case 36): what is not in
`ROUTES` is not there, and a route that asks for a login gets a bearer token whenever tokens are
configured, before a byte of a body is read."""

from __future__ import annotations

import http
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

from outrider.runtime.exposition import exposition

PATH: Final = "/v1/outrider"
"""The one path that speaks the protocol."""
HEALTH_PATH: Final = "/health"
STATUS_PATH: Final = "/status"
METRICS_PATH: Final = "/metrics"
PROBE_PATH: Final = "/probe"
"""Filler, by which an edge tells how fast the link down is."""
PROBE_BYTES: Final = 256 * 1024
"""20 ms at 100 Mbit/s, 4 s at 500 kbit/s."""
AFFINITY_HEADER: Final = "x-session-id"
"""Of a handshake: the same random value from the same edge each time, so that what stands in front
of several verifiers can send it to the one that has its caches. Ray Serve looks for this name
unless told otherwise. It is no login and decides nothing here."""

STATUS_OF: Final = (http.HTTPStatus.OK, http.HTTPStatus.SERVICE_UNAVAILABLE)
"""Of a verifier that serves, and of one that drains."""


class Told(Protocol):
    """What a route tells of."""

    @property
    def draining(self) -> bool: ...

    def status(self, who: str | None = None) -> dict[str, object]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What a path answers, and to whom."""

    login: bool
    """It asks for a bearer token whenever tokens are configured."""
    status: Callable[[Told], http.HTTPStatus] = lambda _: http.HTTPStatus.OK
    body: Callable[[Told, str | None], str] | None = None
    """Makes the whole answer to a login's GET (None: there are no logins); None: the path speaks
    the protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A plain answer over HTTP, text/plain in UTF-8."""

    status: http.HTTPStatus
    body: str


ROUTES: Final[Mapping[str, Route]] = MappingProxyType(
    {
        PATH: Route(login=True),
        HEALTH_PATH: Route(
            login=False,
            status=lambda cloud: STATUS_OF[cloud.draining],
            body=lambda cloud, _who: "draining\n" if cloud.draining else "ok\n",
        ),
        METRICS_PATH: Route(login=True, body=lambda cloud, who: exposition(cloud.status(who))),
        PROBE_PATH: Route(login=True, body=lambda _cloud, _who: "." * PROBE_BYTES),
        STATUS_PATH: Route(
            login=True, body=lambda cloud, who: json.dumps(cloud.status(who)) + "\n"
        ),
    }
)
"""Every path there is; any other is refused."""
