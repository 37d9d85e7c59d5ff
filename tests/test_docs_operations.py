"""docs/troubleshooting.md quotes what the code says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
QUOTED = re.findall(
    r"^\| `(.+?)` \|", (ROOT / "docs/troubleshooting.md").read_text("utf-8"), re.MULTILINE
)


def texts() -> list[str]:
    """Every string of the package, what is filled in left out."""
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                case ast.JoinedStr(values=values):
                    parts = [v.value if isinstance(v, ast.Constant) else "{}" for v in values]
                    found.append("".join(map(str, parts)))
                case ast.Constant(value=str(text)):
                    found.append(text)
    return found


SAID = texts()


@pytest.mark.parametrize("quoted", QUOTED)
def test_what_is_quoted_is_said(quoted: str):
    filled = quoted.replace("--token-file", "{}", 1) if quoted.startswith("needs") else quoted
    assert any(quoted in text or filled in text for text in SAID)


def test_there_is_something_to_look_up():
    assert len(QUOTED) > 25
    assert len(set(QUOTED)) == len(QUOTED)
