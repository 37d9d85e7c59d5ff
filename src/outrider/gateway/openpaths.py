"""The paths that answer without a key: whether the server lives, and the files of the chat page."""

from __future__ import annotations

from typing import Final

_SCRIPTS: Final = (
    *("main", "api", "answer", "settings", "plots", "savings", "tip", "say"),
    "vendor/uPlot.esm",
)
PAGE_FILES: Final = {
    "/": "index.html",
    "/favicon.ico": "icon.svg",
    "/static/icon.svg": "icon.svg",
    "/static/page.css": "page.css",
    "/static/vendor/uPlot.min.css": "vendor/uPlot.min.css",
    **{f"/static/{name}.js": f"{name}.js" for name in _SCRIPTS},
}
"""Path to the file under static/."""
OPEN: Final = frozenset({"/health", *PAGE_FILES})
"""Everything that needs no key."""
