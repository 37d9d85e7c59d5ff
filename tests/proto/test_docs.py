"""docs/protocol.md says what the code does: drawn parts are current, printed bytes are real."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

from outrider.proto.codec import decode, encode
from outrider.proto.digest import EMPTY, of_prefix
from outrider.proto.messages import Code

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "protocol.md").read_text(encoding="utf-8")


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_protocol", DOCS / "draw_protocol.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_drawn_parts_are_current():
    module = script()
    assert module.drawn(TEXT) == TEXT, "run: python docs/draw_protocol.py"
    assert set(re.findall(r"<!-- drawn: (\w+) -->", TEXT)) == set(module.PARTS)


def test_printed_frames_decode_and_encode_to_themselves():
    frames = re.findall(r"^(?: {13}| {4}[A-Z]+ .*?  +)((?:[0-9a-f]{2,} ?)+)$", TEXT, re.MULTILINE)
    frames = [bytes.fromhex(f) for f in frames]
    assert len(frames) >= 7
    for frame in frames:
        assert encode(decode(frame)) == frame


def test_printed_digests():
    assert EMPTY.hex() in TEXT
    assert of_prefix([1, 2, 151935]).hex() in TEXT


def test_every_code_is_explained():
    assert all(f"| `{code.value}` |" in TEXT for code in Code)
