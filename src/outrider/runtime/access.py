"""Who may talk to whom: bearer tokens, their file, their hash, and what counts as loopback."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

_SENDABLE: Final = re.compile(r"[!-~]+")
"""RFC 9110, 5.5: other characters are no field content. Blanks would be, but a parser may trim
or fold them."""


class ConfigurationError(ValueError):
    """The server would be unsafe or cannot start; the message says what to change."""


def sendable(token: str) -> bool:
    """True for a token that can travel in an Authorization header: visible ASCII, no blanks."""
    return _SENDABLE.fullmatch(token) is not None


def is_loopback(host: str) -> bool:
    """True for localhost and loopback addresses."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_tokens(path: Path) -> dict[str, str]:
    """A token file to hashes: one `name:token` (or a bare token) a line, # for comments. Raises
    ConfigurationError, which shows a line's number and never its text."""
    tokens: dict[str, str] = {}
    for number, name, token in token_lines(path):
        if not token:
            raise ConfigurationError(f"{path} line {number}: no token behind the name")
        if not sendable(token):
            raise ConfigurationError(
                f"{path} line {number}: a token is visible ASCII without blanks, or no edge can "
                "send it"
            )
        tokens[hash_token(token)] = name or f"tenant-{number}"
    if not tokens:
        raise ConfigurationError(f"{path} holds no token")
    return tokens


def token_lines(path: Path) -> list[tuple[int, str, str]]:
    """Number, name (may be empty) and token of each line that is no comment. Raises
    ConfigurationError for a file that is no text, OSError for one that cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path} is not a text file") from None
    found = []
    for number, raw in enumerate(lines, start=1):
        line = raw.strip()
        if line and not line.startswith("#"):
            name, _, token = line.rpartition(":")
            found.append((number, name, token.strip()))
    return found


def hash_token(token: str) -> str:
    # A header may hold bytes that are no text; they are nobody's token, not an error.
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def tenant_of(headers: Sequence[str], tokens: Mapping[str, str]) -> str | None:
    """Whom a request's Authorization headers stand for; None: nobody. `tokens`: SHA-256 (hex) of a
    token to its owner. Compared in constant time."""
    scheme, _, token = headers[0].partition(" ") if len(headers) == 1 else ("", "", "")
    if scheme.lower() != "bearer" or not token.strip():
        return None
    offered = hash_token(token.strip())
    found = None
    for known, name in tokens.items():
        if hmac.compare_digest(known, offered):
            found = name
    return found


def require_safe(
    host: str,
    *,
    tokens: Mapping[str, str],
    encrypted: bool,
    insecure: bool,
    option: str = "--token-file",
) -> None:
    """Raises ConfigurationError for a server that other hosts could reach without login and TLS.
    `option`: the one that names its token file."""
    if insecure or is_loopback(host) or (tokens and encrypted):
        return
    raise ConfigurationError(
        f"listening on {host} needs {option} and --tls-cert/--tls-key; "
        "use 127.0.0.1, or --insecure on a network you trust"
    )
