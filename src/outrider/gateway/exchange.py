"""One request for answers, from its first byte to its last.

Rules:

* Until the first round is there, a failure is an HTTP status; behind it, an error event in the
  stream, and then the end of it: never a finish that was none (field case 22).
* A client that goes ends the work at once, on both sides, wherever it is: waiting, tokenising,
  before the first token, streaming or not (field case 23).
* Nothing waits for a place before all that can be wrong with a request has been looked at (25).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import msgspec
from fastapi import Response
from pydantic import ValidationError

from outrider.gateway import prompts
from outrider.gateway.admission import Room
from outrider.gateway.answers import Choice, merged
from outrider.gateway.errors import ApiError, explain, from_validation, invalid
from outrider.gateway.keys import OWNER, Keyring, Receive, Scope, Send, send_error
from outrider.gateway.metrics import Metrics
from outrider.gateway.prompts import LONG_BODY, Lanes
from outrider.gateway.schema import ChatRequest, CompletionRequest, refuse
from outrider.gateway.scoring import score
from outrider.gateway.shapes import ChatShape, Head, Shape, TextShape
from outrider.gateway.sse import Teller, comment, event
from outrider.gateway.tracing import Tracing
from outrider.gateway.wishes import MAX_CHOICES, Manner, Wishes, wishes
from outrider.runtime.contact import Contact, Link
from outrider.runtime.discreet import outline
from outrider.runtime.edge import EdgeRuntime
from outrider.session.generation import Step

log = logging.getLogger("outrider.gateway")

MAX_BODY_BYTES: Final = 16 * 1024 * 1024
"""Largest body: several times the text of the longest context here, written as token ids."""
BODY_TIMEOUT_S: Final = 60.0
"""Seconds in which a body must be there."""
SEND_TIMEOUT_S: Final = 60.0
"""Seconds for which a client may take nothing at all of what it is sent."""

Request = ChatRequest | CompletionRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """What the requests of one server share."""

    runtime: EdgeRuntime
    models: tuple[str, ...]
    """Names that the target answers to; the first is its own."""
    fingerprint: str
    """What a seed's text depends on beside the request."""
    manner: Manner
    room: Room
    lanes: Lanes
    metrics: Metrics
    keyring: Keyring
    tracing: Tracing

    def require_model(self, name: str) -> None:
        if name not in self.models:
            raise ApiError(
                404,
                f"The model '{name[:100]}' does not exist or you do not have access to it. "
                f"This server has: {', '.join(self.models)}.",
                param="model",
                code="model_not_found",
            )


class Exchange(Response):
    """The response to a POST: reads the body, makes the answers, sends them."""

    def __init__(self, gateway: Gateway, kind: type[Request]) -> None:
        super().__init__()
        self._gateway = gateway
        self._kind = kind
        self._id = uuid.uuid4().hex
        self._field = "messages" if kind is ChatRequest else "prompt"
        self._grammar = "response_format"
        """The field that a grammar came in."""
        self._status = 0
        """Of the response once it has begun."""
        self._counted: dict[str, object] = {}
        """What the log says of its answers once they are complete."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        self._send_raw = send
        outcome = await self._until_gone(scope, receive)
        gateway, route = self._gateway, scope["path"]
        if outcome == "cancelled":
            gateway.metrics.cancelled()
        else:
            gateway.metrics.answered(route, self._status)
        facts = {
            "request": f"req_{self._id}",
            "route": route,
            "status": self._status,
            "outcome": outcome,
            "seconds": round(time.monotonic() - began, 3),
        }
        log.info("request", extra={"facts": facts | self._counted})

    async def _until_gone(self, scope: Scope, receive: Receive) -> str:
        """Work until it is done or the client has gone; how it ended, for the log."""
        try:
            body = await _read(scope, receive)
        except ApiError as error:
            await self._fail(error)
            return "refused"
        except ConnectionError:
            return "cancelled"
        work = asyncio.create_task(self._work(scope, body), name=f"outrider-answer-{self._id}")
        gone = asyncio.create_task(_gone(receive), name=f"outrider-watch-{self._id}")
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        return "cancelled" if work.cancelled() else work.result()

    async def _work(self, scope: Scope, body: bytes) -> str:
        try:
            await self._answer(scope, body)
        except _NobodyReadsError:
            return "given up: nobody reads"  # nor would they read why
        except Exception as error:  # noqa: BLE001 - the border: a client is told of every failure
            shown = explain(error, prompt=self._field, grammar=self._grammar)
            if shown is None:
                log.error("req_%s failed: %s", self._id, outline(error))
                shown = ApiError(
                    500, "the gateway failed; its log says more", kind="server_error", code=None
                )
            await self._fail(shown)
            return "failed" if shown.status >= 500 else "refused"
        return "answered"

    # ---------------------------------------------------------------- what to do

    async def _answer(self, scope: Scope, body: bytes) -> None:
        gateway = self._gateway
        request, asked = await self._parsed(body)
        self._grammar = "tools" if asked.tools else "response_format"
        if _wants_details(scope):
            asked = replace(asked, details=True)
        total = prompts.count(request) * asked.n
        if total > MAX_CHOICES:
            raise invalid(self._field, f"{total} answers in one request; at most {MAX_CHOICES}")
        gateway.room.check(total)
        tokenizer = gateway.runtime.tokenizer
        found = await gateway.lanes.run(len(body), partial(prompts.encode, request, tokenizer))
        for ids in found:
            prompts.require_room(ids, gateway.runtime.context_length, self._field)
        choices = [
            Choice(
                index=place * asked.n + i,
                request=asked.choice(ids, i),
                tracing=gateway.tracing,
            )
            for place, ids in enumerate(found)
            for i in range(asked.n)
        ]
        owner = scope.get(OWNER, "")
        with gateway.keyring.count(owner, total, time.monotonic()):
            async with gateway.room.hold(total):
                await self._make(request, asked, choices, found)

    async def _parsed(self, body: bytes) -> tuple[Request, Wishes]:
        """A long body is read in the slow lane."""
        if len(body) > LONG_BODY:
            return await self._gateway.lanes.run(len(body), partial(self._parse, body))
        return self._parse(body)

    def _parse(self, body: bytes) -> tuple[Request, Wishes]:
        """Raises ApiError, ParameterError."""
        try:
            request = self._kind.model_validate_json(body)
        except ValidationError as error:
            with contextlib.suppress(msgspec.DecodeError, RecursionError):
                raise from_validation(error, msgspec.json.decode(body)) from None
            raise from_validation(error, None) from None
        self._gateway.require_model(request.model)
        refuse(request)
        return request, wishes(request, self._gateway.manner)

    async def _make(
        self,
        request: Request,
        asked: Wishes,
        choices: Sequence[Choice],
        found: Sequence[tuple[int, ...]],
    ) -> None:
        gateway = self._gateway
        tokenizer = gateway.runtime.tokenizer
        shape: Shape = (
            ChatShape(tokenizer, self._id[:12] if asked.tools else None)
            if isinstance(request, ChatRequest)
            else TextShape(tokenizer)
        )
        head = Head(
            id=f"{shape.prefix}{self._id}",
            created=int(time.time()),
            model=request.model,
            fingerprint=gateway.fingerprint,
        )
        teller = Teller(shape, head, asked, tokenizer, choices, found)
        self._seed = asked.request.params.seed
        wanted = asked.request.params.logprobs
        if asked.echo and wanted is not None:
            teller.scores = await score(found, wanted, gateway.runtime)
        if asked.silent:
            await self._at_once(teller, stream=asked.stream)
            return
        await (self._stream if asked.stream else self._whole)(teller, choices)
        prompt_tokens = sum(map(len, found))
        results = [choice.result for choice in choices]
        gateway.metrics.finished(prompt_tokens, results)
        self._counted = {
            "answers": len(results),
            "prompt_tokens": prompt_tokens,
            "completion_tokens": sum(r.generation.completion_tokens for r in results),
            "forwards": sum(r.generation.counters.rounds for r in results),
        }

    async def _at_once(self, teller: Teller, *, stream: bool) -> None:
        """The echo is all there is."""
        body = teller.at_once() if stream else teller.whole()
        await self._start("text/event-stream" if stream else "application/json", {})
        await self._send(body, more=False)

    async def _stream(self, teller: Teller, choices: Sequence[Choice]) -> None:
        ahead = teller.open()
        async with aclosing(merged(choices, self._gateway.runtime)) as rounds:  # type: ignore[type-var]
            known: Contact | None = None
            async for choice, step in rounds:
                if isinstance(step, Contact):
                    # Before the first round a failure is still a status (rule 1).
                    news = step is not known and (known or step.link is not Link.UP)
                    known = step
                    if self._status and news:
                        await self._send(comment(step.facts(time.monotonic())))
                    continue
                if not self._status:
                    await self._start("text/event-stream", {"cache-control": "no-cache"})
                said = teller.close(choice) if step is None else teller.step(choice, step)
                if ahead or said:
                    await self._send(ahead + said)
                ahead = b""
        await self._send(teller.end(), more=False)

    async def _whole(self, teller: Teller, choices: Sequence[Choice]) -> None:
        async with aclosing(merged(choices, self._gateway.runtime)) as rounds:  # type: ignore[type-var]
            async for choice, step in rounds:
                if isinstance(step, Step):
                    teller.note(choice, step)
        body = teller.whole()
        await self._start("application/json", {"content-length": str(len(body))})
        await self._send(body, more=False)

    # ---------------------------------------------------------------- how to say it

    async def _start(self, content_type: str, more: dict[str, str]) -> None:
        self._status = 200
        headers = {
            "content-type": content_type,
            "x-request-id": f"req_{self._id}",
            "x-outrider-seed": str(self._seed),
            **more,
        }
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send_raw({"type": "http.response.start", "status": 200, "headers": raw})

    async def _send(self, body: bytes, *, more: bool = True) -> None:
        """Returns when the client has taken so much of it that there is room for more."""
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self._send_raw(
                    {"type": "http.response.body", "body": body, "more_body": more}
                )
        except TimeoutError:
            raise _NobodyReadsError from None

    async def _fail(self, error: ApiError) -> None:
        if not self._status:
            self._status = error.status
            error.headers["x-request-id"] = f"req_{self._id}"
            await send_error(error, self._send_raw)
        else:
            with contextlib.suppress(_NobodyReadsError):
                await self._send(event(error.body()), more=False)


class _NobodyReadsError(ApiError):
    def __init__(self) -> None:
        super().__init__(408, "the client reads nothing", code="slow_reader", kind="timeout")


def _wants_details(scope: Scope) -> bool:
    given = (value for name, value in scope["headers"] if name == b"x-outrider-details")
    return next(given, b"").strip().lower() in (b"1", b"true")


async def _read(scope: Scope, receive: Receive) -> bytes:
    """The body. Raises ApiError for one that is no JSON by its headers, too large or too slow;
    ConnectionError where the client has gone."""
    headers = dict(scope["headers"])
    content_type = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if content_type != b"application/json":
        raise ApiError(
            415, "the body must be sent as Content-Type: application/json", code="invalid_type"
        )
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise ApiError(415, "the body must not be compressed", code="invalid_encoding")
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length) > MAX_BODY_BYTES:
        raise _too_large()
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message: Any = await receive()
                if message["type"] == "http.disconnect":
                    raise ConnectionError("the client has gone")
                part = message.get("body", b"")
                size += len(part)
                if size > MAX_BODY_BYTES:
                    raise _too_large()
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise ApiError(408, "the body did not come in time", code="timeout") from None


def _too_large() -> ApiError:
    return ApiError(
        413, f"the body is larger than {MAX_BODY_BYTES} bytes", code="request_too_large"
    )


async def _gone(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
