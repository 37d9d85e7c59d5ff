"""Reaching a verifier: the WebSocket, the edge's HELLO, and why it did not work, in words."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Final

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidMessage, InvalidStatus, WebSocketException
from websockets.uri import parse_uri

from outrider.core.grammar import GrammarKind
from outrider.core.tokens import Rule
from outrider.engines.grammar import available
from outrider.engines.tokenizer import Tokenizer
from outrider.proto.codec import MAX_FRAME_BYTES
from outrider.proto.messages import PROTOCOL_VERSION, Code, Hello, Limits
from outrider.runtime.discreet import discreet
from outrider.runtime.edgeconfig import EdgeConfig
from outrider.session.schedules import MAX_WINDOW

DIAL_TIMEOUT: Final = 10.0
"""Seconds for TCP, TLS and the WebSocket handshake together."""


class RefusedError(Exception):
    """The verifier will not have this edge, or this edge not the verifier, however often it
    dials."""

    def __init__(self, code: Code, why: str) -> None:
        super().__init__(why)
        self.code = code


class UnreachableError(Exception):
    """No link this time."""


async def dial(
    config: EdgeConfig, tls: ssl.SSLContext | None, headers: Mapping[str, str]
) -> ClientConnection:
    """A WebSocket to the verifier. `headers` go in front of the configured ones. Raises
    RefusedError, UnreachableError."""
    url = config.endpoint
    try:
        return await connect(
            url,
            additional_headers={**headers, **config.authorization()},
            compression=None,
            max_size=MAX_FRAME_BYTES,
            open_timeout=DIAL_TIMEOUT,
            close_timeout=1.0,
            ping_interval=None,
            ssl=tls,
            user_agent_header=None,
            proxy=None,
            logger=discreet("outrider.edge.socket"),
        )
    except InvalidStatus as error:
        raise _refusal(config, error.response.status_code) from None
    except ssl.SSLCertVerificationError as error:
        raise RefusedError(Code.UNREACHABLE, _distrust(config, error)) from None
    except (OSError, TimeoutError, WebSocketException, UnicodeError) as error:
        reason = f"cannot reach {config.shown}: {reason_of(error)}{_other_scheme(url, error)}"
        raise UnreachableError(reason) from None


def _refusal(config: EdgeConfig, status: int) -> RefusedError | UnreachableError:
    if status in (401, 403):
        why = (
            "the verifier refuses this token: check --token-file or OUTRIDER_TOKEN"
            if config.token
            else "the verifier wants a token: give --token-file or set OUTRIDER_TOKEN"
        )
        return RefusedError(Code.UNAUTHORIZED, why)
    if status == 404:
        return RefusedError(Code.VERSION, "no Outrider verifier at this address and path")
    return UnreachableError(f"the verifier answered HTTP {status}")


def _distrust(config: EdgeConfig, error: ssl.SSLCertVerificationError) -> str:
    by = f"by {config.ca_file} (--ca-file)" if config.ca_file else "(--ca-file FILE trusts another)"
    return f"the certificate of {config.shown} is not trusted {by}: {error.verify_message}"


def _other_scheme(url: str, error: BaseException) -> str:
    """A hint where the peer seems to speak TLS and we do not, or the other way round."""
    if parse_uri(url).secure:
        plain = isinstance(error, (ssl.SSLError, ConnectionResetError))
        return "; perhaps it speaks no TLS: try ws://" if plain else ""
    return "; perhaps it wants TLS: try wss://" if isinstance(error, InvalidMessage) else ""


def reason_of(error: BaseException) -> str:
    """Some exceptions say nothing."""
    return str(error) or type(error).__name__


def greeting(tokenizer: Tokenizer, context_length: int) -> Hello:
    """An edge's HELLO."""
    return Hello(
        versions=(PROTOCOL_VERSION,),
        role="edge",
        agent="outrider",
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        logits_width=tokenizer.vocab_size,
        context_length=min(context_length, 2**31 - 1),
        limits=Limits(
            frame_bytes=MAX_FRAME_BYTES,
            window=MAX_WINDOW,
            sessions=256,
            prompt_tokens=1_000_000,
        ),
        rules=tuple(sorted(r.value for r in Rule)),
        grammars=tuple(GrammarKind) if available() else (),
    )
