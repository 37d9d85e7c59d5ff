"""Where an edge finds its verifier, and what it shows on the way in."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit, urlunsplit

from websockets.exceptions import InvalidURI
from websockets.uri import parse_uri

from outrider.core.link import Link
from outrider.core.tokens import ParameterError
from outrider.proto.connection import HEARTBEAT, usable
from outrider.runtime.access import is_loopback, sendable
from outrider.runtime.discreet import without_secrets
from outrider.runtime.routes import PATH
from outrider.session.client import GIVE_UP_AFTER


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeConfig:
    """Where the cloud is and how to reach it."""

    url: str
    """ws://host:port or wss://host:port; the protocol's path is added when there is none."""
    token: str | None = field(default=None, repr=False)
    """Bearer token; never logged."""
    ca_file: str | None = None
    """Trust this certificate authority instead of the system's."""
    link: Link | None = None
    """Shape the link in user space."""
    link_seed: int = 0
    give_up: float = GIVE_UP_AFTER
    """Seconds without a working link before an answer fails."""
    heartbeat: float = HEARTBEAT
    """Seconds of silence before a PING; after two such pauses a link is dead."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    insecure: bool = False
    """Send a login unencrypted to other hosts than this one."""

    def __post_init__(self) -> None:
        """Raises ParameterError, LinkError."""
        try:
            uri = parse_uri(self.url)
            uri.host.encode("idna")  # labels that are empty or too long
            if urlsplit(self.url).port == 0:
                raise ValueError("port 0")
        except (InvalidURI, ValueError):
            seen = without_secrets(self.url)
            raise ParameterError(
                "cloud", f"must be ws://HOST:PORT or wss://HOST:PORT, got {seen!r}"
            ) from None
        # Said without the value: it is a secret.
        if self.token and not sendable(self.token):
            raise ParameterError("token", "must be visible ASCII characters without blanks")
        if any(not (text.isascii() and text.isprintable()) for text in self.headers.values()):
            raise ParameterError("headers", "must be printable ASCII")
        if self.ca_file is not None and not uri.secure:
            raise ParameterError("ca_file", "is for wss:// only, and the cloud's address is ws://")
        login = self.token or uri.username or any(map(_is_login, self.headers))
        if login and not (uri.secure or self.insecure or is_loopback(uri.host)):
            raise ParameterError(
                "cloud",
                f"is ws://, which would send the login unencrypted to {uri.host}: use wss://, or "
                "--insecure on a network you trust",
            )
        if self.link is not None:
            usable(self.link, self.heartbeat)

    @property
    def endpoint(self) -> str:
        """The address of the protocol itself."""
        parts = urlsplit(self.url)
        return urlunsplit(parts._replace(path=parts.path.rstrip("/") or PATH))

    @property
    def shown(self) -> str:
        """The address as messages may show it."""
        return without_secrets(self.url)

    def authorization(self) -> dict[str, str]:
        """The headers of every request to the verifier."""
        if not self.token:
            return dict(self.headers)
        return {**self.headers, "Authorization": f"Bearer {self.token}"}

    def tls(self) -> ssl.SSLContext | None:
        """What a wss:// address is dialled with. Raises OSError when `ca_file` cannot be read."""
        if not parse_uri(self.url).secure:
            return None
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:  # ssl.SSLError included, whose text names no file
            raise OSError(f"cannot use the certificates of {self.ca_file}: {error}") from None


def _is_login(header: str) -> bool:
    return header.lower() in ("authorization", "proxy-authorization", "cookie")
