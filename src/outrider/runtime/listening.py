"""The listening side of sockets: certificates, strangers, and a system that has no sockets left."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import ssl
from pathlib import Path
from typing import Any, Final

from websockets.asyncio.server import ServerConnection

from outrider.runtime.access import ConfigurationError

log = logging.getLogger("outrider.cloud")

MAX_CONNECTIONS: Final = 256
OPEN_TIMEOUT_S: Final = 5.0
"""From accept to upgrade, and for TLS before that: strangers hold a socket no longer."""
MAX_SOCKETS: Final = MAX_CONNECTIONS + 64
"""Sockets that have not asked for the upgrade yet included."""
ACCEPT_NOTICE_S: Final = 60.0
"""How often it is said that the system has no sockets left."""

_MISMATCHES: Final = frozenset(
    {"KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED"}
)
"""What OpenSSL says of a key that is not the certificate's; the last for a key of another kind."""
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Guest(ServerConnection):
    """A socket that is counted from the start: a stranger who never asks for the upgrade too."""

    def __init__(self, guests: set[ServerConnection], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._guests = guests

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._guests.add(self)
        if len(self._guests) > MAX_SOCKETS:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._guests.discard(self)
        super().connection_lost(exc)


def calm_accepts(loop: asyncio.AbstractEventLoop) -> None:
    """One line a minute when the system has no sockets left, where asyncio writes a traceback for
    each attempt, hundreds a second. asyncio itself tries again a second later."""
    said = -math.inf

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal said
        error = context.get("exception")
        exhausted = isinstance(error, OSError) and error.errno in _EXHAUSTED
        if not exhausted or "accept" not in str(context.get("message")):
            loop.default_exception_handler(context)
            return
        if loop.time() - said >= ACCEPT_NOTICE_S:
            said = loop.time()
            log.warning("new connections must wait: %s (ulimit -n)", error.strerror)

    loop.set_exception_handler(handle)


def tls_context(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """TLS with these PEM files; None without. Raises ConfigurationError, which names file and
    option."""
    if certificate is None or key is None:
        return None
    for option, file in (("--tls-cert", certificate), ("--tls-key", key)):
        try:
            file.open("rb").close()
        except OSError as error:
            raise ConfigurationError(f"{option}: cannot read {file}: {error.strerror}") from None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(certificate)
    except ssl.SSLError:
        raise ConfigurationError(f"--tls-cert: {certificate} holds no PEM certificate") from None

    def no_password() -> str:
        raise ConfigurationError(
            f"--tls-key: {key} is encrypted; a server has nobody to ask: decrypt it "
            "(openssl pkey -in KEY -out PLAIN)"
        )

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key, password=no_password)
    except ssl.SSLError as error:
        why = (
            f"does not belong to the certificate {certificate}"
            if error.reason in _MISMATCHES
            else "holds no PEM private key"
        )
        raise ConfigurationError(f"--tls-key: {key} {why}") from None
    return context
