"""The routes, and the doors in front of them. What a route does is in `exchange`."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from outrider.gateway import page
from outrider.gateway.admission import MAX_ANSWERS, MAX_WAITING, Room
from outrider.gateway.errors import ApiError
from outrider.gateway.exchange import Exchange, Gateway
from outrider.gateway.keys import Doorkeeper, Keyring
from outrider.gateway.metrics import CONTENT_TYPE, Metrics
from outrider.gateway.prompts import Lanes
from outrider.gateway.schema import ChatRequest, CompletionRequest
from outrider.gateway.tracing import NoTracing, Tracing
from outrider.gateway.wishes import Manner
from outrider.runtime.access import Logins, is_loopback
from outrider.runtime.contact import Contact
from outrider.runtime.edge import EdgeRuntime
from outrider.session.quotas import TenantLimits

log = logging.getLogger("outrider.gateway")

TITLE: Final = "Outrider gateway"
HTTP_WORDS: Final = {404: "not_found", 405: "method_not_allowed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """How a gateway serves."""

    models: tuple[str, ...]
    """Names that the target answers to; the first is its own."""
    manner: Manner = field(default_factory=Manner)
    host: str = "127.0.0.1"
    """Where it listens."""
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    """SHA-256 (hex) of an API key to its owner; empty: no keys."""
    limits: Mapping[str, TenantLimits] = field(default_factory=dict)
    """Of owners that have their own."""
    cors: Sequence[str] = ()
    """Origins whose pages may ask."""
    tracing: Tracing = field(default_factory=NoTracing)
    answers: int = MAX_ANSWERS
    waiting: int = MAX_WAITING


def make_app(runtime: EdgeRuntime, config: GatewayConfig) -> FastAPI:
    """The application. Close its `state.gateway.lanes` behind it; the runtime is the caller's."""
    room = Room(config.answers, most_waiting=config.waiting)
    gateway = Gateway(
        runtime=runtime,
        models=config.models,
        fingerprint=_fingerprint(config.models[0], runtime.tokenizer.fingerprint),
        manner=config.manner,
        room=room,
        lanes=Lanes(),
        metrics=Metrics(room, runtime),
        keyring=Keyring(Logins(tokens=config.keys, limits=config.limits)),
        tracing=config.tracing,
    )
    app = _App(
        title=TITLE,
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.gateway = gateway
    runtime.told = _log_link
    _add_routes(app, gateway)
    page.mount(app, gateway)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ApiError, _api_error)
    app.add_middleware(Doorkeeper, keyring=gateway.keyring, local=is_loopback(config.host))
    if config.cors:  # outside the door: a browser asks for permission without a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Outrider-Details"],
            expose_headers=["X-Request-Id", "X-Outrider-Seed"],
        )
    return app


def _add_routes(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/v1/chat/completions", **_takes(ChatRequest))
    async def chat(_request: Request) -> Response:
        return Exchange(gateway, ChatRequest)

    @app.post("/v1/completions", **_takes(CompletionRequest))
    async def completion(_request: Request) -> Response:
        return Exchange(gateway, CompletionRequest)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(name) for name in gateway.models]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        gateway.require_model(name)
        return _model(name)

    @app.get("/health")
    async def health() -> Response:
        draining = gateway.room.draining
        facts = {
            "status": "draining" if draining else "ok",
            "cloud": "up" if gateway.runtime.connected else "down",
        }
        return JSONResponse(facts, status_code=503 if draining else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(gateway.metrics.text(), media_type=CONTENT_TYPE)


class _App(FastAPI):
    """FastAPI does not see the bodies that `exchange` reads by itself: their parts go in here."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            parts = super().openapi().setdefault("components", {}).setdefault("schemas", {})
            for kind in (ChatRequest, CompletionRequest):
                parts |= _schema(kind).get("$defs", {})
        assert self.openapi_schema is not None, "it was just made"
        return self.openapi_schema


def _schema(kind: type[ChatRequest | CompletionRequest]) -> dict[str, Any]:
    return kind.model_json_schema(ref_template="#/components/schemas/{model}")


def _takes(kind: type[ChatRequest | CompletionRequest]) -> dict[str, Any]:
    """What OpenAPI says of a route that reads its body by itself."""
    schema = {name: part for name, part in _schema(kind).items() if name != "$defs"}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"openapi_extra": {"requestBody": body}}


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "outrider"}


def _fingerprint(model: str, vocabulary: str) -> str:
    digest = hashlib.sha256(f"{model}\n{vocabulary}".encode()).hexdigest()
    return f"fp_{digest[:12]}"


def _log_link(contact: Contact) -> None:
    """Each change of state is worth a warning; further attempts are for those who look closer."""
    level = logging.WARNING if contact.attempt <= 1 else logging.INFO
    now = time.monotonic()
    facts = contact.facts(now) | ({"reason": contact.reason} if contact.reason else {})
    log.log(level, "link to the verifier", extra={"facts": facts})


async def _http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "it is registered for these"
    shown = ApiError(
        error.status_code,
        f"{error.detail}: see docs/api.md for what this server answers",
        code=HTTP_WORDS.get(error.status_code),
    )
    return JSONResponse(shown.body(), status_code=shown.status, headers=error.headers)


async def _api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), "it is registered for these"
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers)
