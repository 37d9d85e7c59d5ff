"""Who may talk to whom: bearer tokens, their file, their hash, and what counts as loopback."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

from outrider.session.quotas import NO_LIMITS, TenantLimits

_SENDABLE: Final = re.compile(r"[!-~]+")
"""RFC 9110, 5.5: other characters are no field content. Blanks would be, but a parser may trim
or fold them."""
_HASHED: Final = "sha256"
"""Between name and hash, where a line holds no token but its hash. Plain SHA-256: a token of ours
has 256 random bits, which no dictionary holds, and a slow hash would cost every request."""
_DIGEST: Final = re.compile(r"[0-9a-fA-F]{64}")
_LIMITS: Final[Mapping[str, Callable[[str], float]]] = MappingProxyType(
    {"sessions": int, "rate": float, "connections": int}
)
MAX_LIMIT: Final = 1_000_000
"""Of a limit in a token file: anything above is a slip."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Logins:
    """Who may log in, and how much each may ask for."""

    tokens: Mapping[str, str] = field(default_factory=dict, repr=False)
    """SHA-256 (hex) of a token to its owner's name; empty: no login."""
    limits: Mapping[str, TenantLimits] = field(default_factory=dict)
    """Of owners that have their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLine:
    """One line of a token file."""

    number: int
    name: str
    """May be empty."""
    token: str = field(repr=False)
    """As it is sent; empty where the line holds its hash only."""
    digest: str
    """SHA-256 (hex) of the token; empty where the line holds none."""
    limits: TenantLimits

    @property
    def tenant(self) -> str:
        return self.name or f"tenant-{self.number}"


def read_tokens(path: Path) -> dict[str, str]:
    """The `tokens` of read_logins."""
    return dict(read_logins(path).tokens)


def read_logins(path: Path) -> Logins:
    """A token file: one `NAME:sha256:HEX`, `NAME:TOKEN` or bare token a line, limits behind a blank
    (`sessions=8 rate=2 connections=1`), # for comments. A name may stand on several lines; the last
    limits count. Raises ConfigurationError, which shows a line's number and never its text."""
    tokens: dict[str, str] = {}
    limits: dict[str, TenantLimits] = {}
    for line in token_lines(path):
        if not line.digest:
            raise ConfigurationError(f"{path} line {line.number}: no token behind the name")
        if line.token and not sendable(line.token):
            raise ConfigurationError(
                f"{path} line {line.number}: a token is visible ASCII without blanks, or no edge "
                "can send it"
            )
        if tokens.setdefault(line.digest, line.tenant) != line.tenant:
            raise ConfigurationError(
                f"{path} line {line.number}: this token is another name's already"
            )
        if line.limits != NO_LIMITS:
            limits[line.tenant] = line.limits
    if not tokens:
        raise ConfigurationError(f"{path} holds no token")
    return Logins(tokens=tokens, limits=limits)


def token_lines(path: Path) -> list[TokenLine]:
    """Each line that is no comment. Raises ConfigurationError for a file that is no text or limits
    that are none, OSError for one that cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path} is not a text file") from None
    found = []
    for number, raw in enumerate(lines, start=1):
        line = raw.strip()
        if line and not line.startswith("#"):
            try:
                found.append(_token_line(number, line))
            except ConfigurationError as error:
                raise ConfigurationError(f"{path} line {number}: {error}") from None
    return found


def _token_line(number: int, line: str) -> TokenLine:
    words = line.split()
    known = {word.partition("=")[0] for word in words[1:] if "=" in word}
    limits = NO_LIMITS
    if known & set(_LIMITS):  # otherwise the blank is in the token, which is refused as such
        line, limits = words[0], _limits(words[1:])
    name, _, token = line.rpartition(":")
    token = token.strip()
    if name.endswith(f":{_HASHED}") or name == _HASHED:
        if not _DIGEST.fullmatch(token):
            raise ConfigurationError(f"{_HASHED}: wants 64 hexadecimal digits behind it")
        name = name.removesuffix(_HASHED).removesuffix(":")
        return TokenLine(number=number, name=name, token="", digest=token.lower(), limits=limits)
    digest = hash_token(token) if token else ""
    return TokenLine(number=number, name=name, token=token, digest=digest, limits=limits)


def _limits(words: Sequence[str]) -> TenantLimits:
    found: dict[str, float] = {}
    for word in words:
        key, _, text = word.partition("=")
        if key not in _LIMITS:
            raise ConfigurationError(f"no limit of that name: there is {', '.join(_LIMITS)}")
        try:
            found[key] = _LIMITS[key](text)
        except ValueError:
            found[key] = -1
        if not 0 < found[key] <= MAX_LIMIT:
            raise ConfigurationError(f"{key} is a number above 0, at most {MAX_LIMIT}")
    return TenantLimits(**found)  # type: ignore[arg-type]


def hash_token(token: str) -> str:
    # A header may hold bytes that are no text; they are nobody's token, not an error.
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def new_token() -> str:
    """256 random bits, as text that travels anywhere."""
    return secrets.token_urlsafe(32)


def hashed_line(name: str, token: str) -> str:
    """The line of a token file that lets `token` in and does not tell it."""
    return f"{name}:{_HASHED}:{hash_token(token)}"


def login_of(headers: Sequence[str], tokens: Mapping[str, str]) -> str | None:
    """Which of `tokens` (SHA-256, hex, to its owner) a request's Authorization headers hold; None:
    none. Compared in constant time."""
    scheme, _, token = headers[0].partition(" ") if len(headers) == 1 else ("", "", "")
    if scheme.lower() != "bearer" or not token.strip():
        return None
    offered = hash_token(token.strip())
    found = None
    for known in tokens:
        if hmac.compare_digest(known, offered):
            found = known
    return found


def tenant_of(headers: Sequence[str], tokens: Mapping[str, str]) -> str | None:
    """Whom a request's Authorization headers stand for; None: nobody."""
    login = login_of(headers, tokens)
    return None if login is None else tokens[login]


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
