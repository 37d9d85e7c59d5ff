"""What a verifier logs about connections and answers: numbers and codes, nothing that was said."""

from __future__ import annotations

import logging
from typing import Any, Final

from outrider.proto.messages import Done, Error, Message, Opened

log: Final = logging.getLogger("outrider.cloud")


def note(event: str, **facts: Any) -> None:
    """One line at level info."""
    log.info(event, extra={"facts": facts})


def note_message(connection: int, tenant: str, message: Message) -> None:
    """What a message to an edge says about an answer's life; most say nothing."""
    facts: dict[str, Any] = {}
    match message:
        case Opened():
            event = "answer opened"
        case Done():
            event = "answer done"
            facts = {"reason": message.reason, "tokens": message.output_tokens}
        case Error():  # without its text, which may quote what was asked for
            event, facts = "answer failed", {"code": message.code.value}
        case _:
            return
    note(event, connection=connection, session=message.session, tenant=tenant, **facts)
