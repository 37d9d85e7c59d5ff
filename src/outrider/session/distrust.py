"""What an edge looks at in its cloud's words before it takes them in."""

from __future__ import annotations

from outrider.proto.messages import Error, Message, Proposals, Relaxed, Row, Tokens, TopK, Verdict


def largest_id(message: Message) -> int | None:
    """Of the token ids that a message brings: none outside the vocabulary may reach the text stream
    or the draft engine. None: it brings none."""
    match message:
        case Verdict() | Relaxed():
            return message.token
        case Tokens() | Proposals():
            return max(message.tokens, default=None)
        case TopK(ids=listed) | Row(ids=tuple(listed)):
            return listed[-1] if listed else None  # ascending
        case Row():
            return len(message.weights) // 4 - 1
    return None


def printable(error: Error) -> Error:
    """A peer's words as they may reach a terminal: no control characters."""
    text = "".join(c if c.isprintable() else " " for c in error.message)
    return Error(code=error.code, message=text, session=error.session)
