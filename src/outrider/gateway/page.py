"""The chat page: files from this package, and the facts that it shows and offers.

Rules:

* The files hold no secret and answer without a key: the page itself asks for one. The facts, as
  everything else, want it.
* A browser is told to load and ask nothing but this server (CSP): no inline script, no other host.
* What can be served is a list, read at the start: no path of a request ever meets the disk.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

from fastapi import FastAPI, Request, Response

from outrider.control.registry import CONTROLLERS
from outrider.core.relaxed import RelaxedRule
from outrider.core.tokens import Rule
from outrider.gateway.exchange import Gateway
from outrider.gateway.openpaths import PAGE_FILES
from outrider.gateway.wishes import DEFAULT_BUDGET, DEFAULT_THRESHOLD, OBJECTIVES
from outrider.session.schedules import Schedule

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
FACTS: Final = "/v1/outrider"


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    kind: str
    tag: str


def mount(app: FastAPI, gateway: Gateway) -> None:
    """Serve the page at `/` and its facts at FACTS."""
    root = files("outrider.gateway") / "static"
    for path, name in PAGE_FILES.items():
        app.add_api_route(path, _reader(_load(root, name)), include_in_schema=False)

    @app.get(FACTS)
    async def facts() -> dict[str, Any]:
        return _facts(gateway)


def _load(root: Any, name: str) -> _File:
    content = root.joinpath(*name.split("/")).read_bytes()
    kind = TYPES[name.rpartition(".")[2]]
    return _File(content, kind, f'"{hashlib.sha256(content).hexdigest()[:16]}"')


def _reader(file: _File) -> Any:
    async def read(request: Request) -> Response:
        headers = HEADERS | {"ETag": file.tag}
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.kind, headers=headers)

    return read


def _facts(gateway: Gateway) -> dict[str, Any]:
    """Who answers, how it is done unless a request says otherwise, and what may be chosen."""
    runtime, manner = gateway.runtime, gateway.manner
    peer, link = runtime.peer, runtime.config.link
    drafts = runtime.drafter is not None
    schedules = [s.value for s in Schedule if s is not Schedule.EDGE_ONLY]
    return {
        "models": list(gateway.models),
        "target": peer.model if peer else None,
        "draft": runtime.drafter.name if runtime.drafter else None,
        "cloud": "up" if runtime.connected else "down",
        "link": link.text if link else None,
        "context_length": runtime.context_length,
        "target_pace_ms": peer.pace_ms if peer else None,
        "row_ms": [list(pair) for pair in peer.row_ms] if peer else [],
        "defaults": {
            "schedule": manner.schedule.value,
            "controller": manner.controller,
            "draft_length": manner.draft_length,
            "window": manner.window,
            "verify": Rule.COUPLED.value,
            "rule": RelaxedRule.RELAXED.value,
            "threshold": DEFAULT_THRESHOLD,
            "budget": DEFAULT_BUDGET,
        },
        "objectives": {
            name: {"schedule": schedule.value, "controller": controller}
            for name, (schedule, controller) in OBJECTIVES.items()
        },
        "schedules": schedules if drafts else [Schedule.CLOUD_ONLY.value, Schedule.COLOCATED.value],
        "controllers": list(CONTROLLERS),
        "rules": [rule.value for rule in Rule],
        "relaxed_rules": [rule.value for rule in RelaxedRule],
    }
