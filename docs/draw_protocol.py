"""Fills the drawn parts of docs/protocol.md from the code: `python docs/draw_protocol.py`.

A drawn part stands between `<!-- drawn: NAME -->` and `<!-- end -->`. A test compares.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

from outrider.proto import connection, messages
from outrider.session import standing

DOCUMENT = Path(__file__).with_name("protocol.md")


def connection_states() -> str:
    edges = [
        f"    {state} --> {after}: {event}"
        for state, moves in connection.TRANSITIONS.items()
        for event, after in moves.items()
        if (state, after) != (connection.State.CLOSED, connection.State.CLOSED)
    ]
    return _mermaid([f"    [*] --> {connection.State.HELLO}", *edges, "    closed --> [*]"])


def session_phases() -> str:
    edges = [
        f"    {phase.value} --> {after.value}: {event}"
        for phase, moves in standing.PHASES.items()
        for event, after in moves.items()
    ]
    ends = ["    running --> [*]: DONE, CANCEL, ERROR"]
    return _mermaid([f"    [*] --> {standing.Phase.NEW.value}", *edges, *ends])


def _mermaid(lines: list[str]) -> str:
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])


def receives() -> str:
    """The table of what may be received."""
    lines = ["| role | state | may receive |", "| --- | --- | --- |"]
    for role, states in connection.RECEIVES.items():
        for state, kinds in states.items():
            names = ", ".join(sorted(k.__name__.upper() for k in kinds)) or "nothing: dropped"
            lines.append(f"| {role} | {state} | {names} |")
    return "\n".join(lines)


def codes() -> str:
    lines = ["| code | meaning |", "| --- | --- |"]
    for node in _class("Code").body:
        match node:
            case ast.Assign(value=ast.Constant(value=str(code))):
                lines.append(f"| `{code}` | {_CODES[code]} |")
    return "\n".join(lines)


_CODES = {
    "unauthorized": "no valid login; ends the connection, redialling is useless",
    "version": "no common protocol version; ends the connection, redialling is useless",
    "vocabulary": "other tokenizer; ends the connection, redialling is useless",
    "malformed": "not decodable (ends the connection), or contents no honest edge sends",
    "too-large": "a frame, a count or a prompt above a limit",
    "state": "a message the tables do not allow here",
    "parameter": "a request parameter out of range; the message names it",
    "grammar": "a grammar that cannot be used here, or under which an answer cannot go on",
    "context": "the prompt leaves no room in the target's context, or is empty",
    "duplicate-session": "the number is in use; the session that has it goes on",
    "unknown-session": "RESUME of a session that is not held: OPEN it anew",
    "digest": "RESUME with another prefix: the session is dropped, OPEN it anew",
    "busy": "at a limit: later, or elsewhere",
    "draining": "no new sessions here: elsewhere",
    "engine": "the forward failed",
    "internal": "a fault of the sender's own",
    "unreachable": "never sent: the edge's own word for a link that stays down",
}


def fields() -> str:
    """Every message, its fields, types and meanings, from the source."""
    parts = []
    for node in ast.parse(inspect.getsource(messages)).body:
        is_message = isinstance(node, ast.ClassDef) and any(
            "Frozen" in ast.unparse(b) or "Struct" in ast.unparse(b) for b in node.bases
        )
        if is_message and isinstance(node, ast.ClassDef) and node.name != "Frozen":
            parts.append(_fields(node))
    return "\n\n".join(parts)


def _fields(node: ast.ClassDef) -> str:
    about = " ".join((ast.get_docstring(node) or "").split())
    cold = any("Frozen" in ast.unparse(b) for b in node.bases)
    tag = next((k.value for k in node.keywords if k.arg == "tag"), None)
    kind = f"type `{tag.value}`" if isinstance(tag, ast.Constant) else "a part of others"
    title = f"**{node.name}** ({kind if cold else 'packed'})"
    lines = [f"{title}{': ' + about if about else ''}"]
    rows = []
    for i, item in enumerate(node.body):
        if not isinstance(item, ast.AnnAssign):
            continue
        following = node.body[i + 1] if i + 1 < len(node.body) else None
        text = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = " ".join(str(following.value.value).split())
        default = f" = {ast.unparse(item.value)}" if item.value is not None else ""
        annotation = ast.unparse(item.annotation).replace("|", "or")
        rows.append(f"| `{ast.unparse(item.target)}` | {annotation}{default} | {text} |")
    if rows:
        lines += ["", "| field | type | meaning |", "| --- | --- | --- |", *rows]
    return "\n".join(lines)


def _class(name: str) -> ast.ClassDef:
    for node in ast.parse(inspect.getsource(messages)).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise LookupError(name)


PARTS = {
    "connection": connection_states,
    "session": session_phases,
    "receives": receives,
    "codes": codes,
    "fields": fields,
}


def drawn(text: str) -> str:
    """The document with every drawn part made anew."""

    def fill(found: re.Match[str]) -> str:
        return f"<!-- drawn: {found[1]} -->\n{PARTS[found[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- drawn: (\w+) -->.*?<!-- end -->", fill, text, flags=re.DOTALL)


if __name__ == "__main__":
    DOCUMENT.write_text(drawn(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
