"""Who answers in `outrider chat`: an edge in this process, or a gateway somewhere.

Both take the body of a chat completion (docs/api.md), so a setting means the same to either, and
tell the rounds of the answer; behind the last one `account` holds what it took.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from outrider.commands import remote
from outrider.commands.errors import CommandError
from outrider.core.tokens import Origin
from outrider.runtime.contact import COMMENT, Contact

SILENCE_S: Final = 120.0
"""Seconds for which a gateway may send nothing: a long prompt on a slow target takes so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one round added."""

    ids: tuple[int, ...]
    pieces: tuple[str, ...]
    origins: tuple[Origin, ...]
    network_s: float | None
    """There and back; None: not known."""


class Voice(Protocol):
    """An answerer. Everything raises CommandError with words for a person."""

    account: Mapping[str, Any] | None
    """Of the last answer: the JSON of `outrider generate --cloud`. None: it was cut short."""

    def check(self, body: Mapping[str, Any]) -> None:
        """Whether a request could be answered, as far as that is known before it is asked."""
        ...

    def ask(self, body: Mapping[str, Any]) -> AsyncIterator[Part | Contact]: ...


class EdgeVoice:
    """An edge in this process."""

    def __init__(self, runtime: Any, manner: Any) -> None:
        """`runtime`: EdgeRuntime; `manner`: gateway.wishes.Manner."""
        self._runtime = runtime
        self._manner = manner
        self.account: Mapping[str, Any] | None = None

    def check(self, body: Mapping[str, Any]) -> None:
        self._wishes(body)

    def _wishes(self, body: Mapping[str, Any]) -> tuple[Any, Any]:
        from pydantic import ValidationError

        from outrider.core.tokens import ParameterError
        from outrider.gateway.errors import ApiError, from_validation
        from outrider.gateway.schema import ChatRequest
        from outrider.gateway.wishes import wishes

        try:
            request = ChatRequest.model_validate_json(json.dumps(body))
            return request, wishes(request, self._manner)
        except ValidationError as error:
            raise CommandError(str(from_validation(error, body))) from None
        except (ApiError, ParameterError) as error:
            raise CommandError(str(error)) from None

    async def ask(self, body: Mapping[str, Any]) -> AsyncIterator[Part | Contact]:
        from outrider.gateway import prompts
        from outrider.gateway.errors import explain

        runtime = self._runtime
        self.account = None
        request, asked = self._wishes(body)
        try:
            (ids,) = prompts.encode(request, runtime.tokenizer)
            prompts.require_room(ids, runtime.context_length, "messages")
            stream = await runtime.stream(asked.choice(ids, 0))
            try:
                async for step in remote.told(stream, runtime):
                    if isinstance(step, Contact):
                        yield step
                        continue
                    way = step.round.network_s if step.round else None
                    yield Part(
                        ids=step.tokens, pieces=step.pieces, origins=step.origins, network_s=way
                    )
            finally:
                stream.close()
                self.account = stream.result.as_dict()
        except Exception as error:
            shown = explain(error, prompt="messages")
            if shown is None:
                raise
            raise CommandError(str(shown)) from None


class GatewayVoice:
    """A gateway, through its API."""

    def __init__(self, http: Any, url: str) -> None:
        """`http`: httpx.AsyncClient with the gateway's address and key."""
        self._http = http
        self._url = url
        self.account: Mapping[str, Any] | None = None

    async def model(self) -> str:
        """The first name that it answers to."""
        async with _Worded(self._url):
            response = await self._http.get("/v1/models")
            await _require(response)
        return str(response.json()["data"][0]["id"])

    def check(self, body: Mapping[str, Any]) -> None:
        """The gateway checks what it is asked."""

    async def ask(self, body: Mapping[str, Any]) -> AsyncIterator[Part | Contact]:
        self.account = None
        request = {
            "url": "/v1/chat/completions",
            "json": {**body, "stream": True},
            "headers": {"X-Outrider-Details": "1"},
        }
        async with _Worded(self._url), self._http.stream("POST", **request) as response:
            await _require(response)
            async for line in response.aiter_lines():
                if line.startswith(COMMENT):
                    yield Contact.of(json.loads(line.removeprefix(COMMENT)), time.monotonic())
                    continue
                data = line.removeprefix("data: ")
                if not data or line.startswith(":"):
                    continue
                if data == "[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise CommandError(f"the answer broke off: {event['error']['message']}")
                told = event.get("outrider") or {}
                if "summary" in told:
                    self.account = told["summary"]
                elif told:
                    yield _part(told)
        raise CommandError("the gateway ended the stream before the answer: ask again")


def _part(told: Mapping[str, Any]) -> Part:
    tokens = told["tokens"]
    return Part(
        ids=tuple(token["id"] for token in tokens),
        pieces=tuple(token["text"] for token in tokens),
        origins=tuple(Origin(token["origin"]) for token in tokens),
        network_s=told["round"].get("network_s"),
    )


class _Worded:
    """Failures of the way to a gateway, in words."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        import httpx

        if isinstance(error, httpx.HTTPError):
            why = str(error) or type(error).__name__
            raise CommandError(
                f"no answer from the gateway at {self._url} ({why}): is outrider serve or outrider "
                "edge running there?"
            ) from None


async def _require(response: Any) -> None:
    if response.status_code == 200:
        return
    await response.aread()
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"HTTP {response.status_code}: is this an Outrider gateway?"
    if response.status_code == 401:
        message += " Give --token-file, or set OUTRIDER_TOKEN."
    raise CommandError(message)
