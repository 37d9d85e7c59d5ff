"""Errors as OpenAI's clients know them: {"error": {"message", "type", "param", "code"}}.

    where it comes from                    status  code
    a field that is unknown or refused     400     unknown_parameter, unsupported_parameter
    a value of a wrong kind or range       400     invalid_type, invalid_value
    prompt and answer do not fit           400     context_length_exceeded
    no key, or a wrong one                 401     invalid_api_key
    another model's name                   404     model_not_found
    a body that never ends, or too large   408/413
    more than this key may ask for         429     rate_limit_exceeded, with Retry-After
    no room here or in the cloud           503     overloaded, with Retry-After
    this gateway is about to stop          503     draining, with Retry-After
    the cloud does not answer              503     cloud_unreachable, with Retry-After
    the cloud refuses this edge, or breaks 502     cloud_error

Every error becomes an `ApiError` here, once; `app` and `exchange` only show it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from outrider.core.tokens import GrammarError, ParameterError
from outrider.engines.base import EngineError
from outrider.proto.messages import Code
from outrider.runtime.failures import CloudError

RETRY_AFTER_S: Final = 2
"""Seconds a client is asked to wait: a few answers end meanwhile, a link is redialled."""
MAX_RETRY_S: Final = 3600.0
"""Most that a client is asked to wait."""
MAX_SHOWN: Final = 300
"""Characters of a message: a client's own text is not sent back at length."""

_OWN_OPTIONS: Final = frozenset(
    {
        "schedule",
        "controller",
        "verify",
        "draft_length",
        "window",
        "growth",
        "budget",
        "threshold",
        "sketch",
        "calibration",
        "rule",
        "top_k_reply",
        "tv_budget",
    }
)
"""Parameters that a request gives inside its `outrider` object."""


class ApiError(Exception):
    """An error that a client sees."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.kind = kind
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        message = str(self)
        if len(message) > MAX_SHOWN:
            message = message[: MAX_SHOWN - 3] + "..."
        error = {"message": message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def unsupported(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="unsupported_parameter")


def invalid(param: str, message: str) -> ApiError:
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")


def too_long(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="context_length_exceeded")


def overloaded(message: str) -> ApiError:
    return _later(message, "overloaded")


def draining() -> ApiError:
    return _later("this server is about to stop; ask again, here or elsewhere", "draining")


def limited(message: str, *, seconds: float = RETRY_AFTER_S) -> ApiError:
    """More than a key may have; `seconds` until it may ask again."""
    headers = {"Retry-After": str(max(1, math.ceil(min(seconds, MAX_RETRY_S))))}
    return ApiError(
        429, message, code="rate_limit_exceeded", kind="rate_limit_error", headers=headers
    )


def _later(message: str, code: str) -> ApiError:
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return ApiError(503, message, code=code, kind="server_error", headers=headers)


def explain(
    error: BaseException, *, prompt: str = "prompt", grammar: str = "response_format"
) -> ApiError | None:
    """The error as a client is to see it; None for a fault of ours. `prompt`, `grammar`: the
    fields that those came in."""
    match error:
        case ApiError():
            return error
        case GrammarError():
            return invalid(grammar, str(error).removeprefix("grammar: "))
        case CloudError(code=Code.GRAMMAR):
            message = str(error).removesuffix(f" ({error.code.value})")
            return invalid(grammar, message.removeprefix("grammar: "))
        case ParameterError():
            return _parameter(error, prompt)
        case CloudError():
            return _cloud(error, prompt)
        case EngineError():
            return ApiError(400, str(error), param=prompt, code="invalid_value")
    return None


def _parameter(error: ParameterError, prompt: str) -> ApiError:
    if error.field == "prompt":
        return too_long(prompt, str(error))
    param = f"outrider.{error.field}" if error.field in _OWN_OPTIONS else error.field
    message = str(error).removeprefix(f"{error.field}: ")
    return invalid(param, message)


def _cloud(error: CloudError, prompt: str) -> ApiError:
    message = str(error).removesuffix(f" ({error.code.value})")
    match error.code:
        case Code.PARAMETER:
            return ApiError(400, message, code="invalid_value")
        case Code.CONTEXT | Code.TOO_LARGE:
            return too_long(prompt, message)
        case Code.BUSY | Code.DRAINING:
            return overloaded(message)
        case Code.UNREACHABLE:
            return _later(message, "cloud_unreachable")
    return ApiError(502, f"the cloud: {message}", code="cloud_error", kind="server_error")


def from_validation(error: ValidationError, body: object) -> ApiError:
    """Of all that is wrong with a request the first, in OpenAI's words. `body`: as it was parsed,
    to tell a path in it from pydantic's names of alternatives."""
    found = error.errors(include_url=False, include_context=False)
    kind = found[0]["type"]
    if kind == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {found[0]['msg']}", code="invalid_json")
    # Of the alternatives of a field the one that went furthest is the one that was meant.
    field = [item for item in found if item["loc"][:1] == found[0]["loc"][:1]]
    paths = [_path(item["loc"], body, missing=item["type"] == "missing") for item in field]
    path = max(paths, key=lambda steps: (len(steps), steps))
    meant = [item for item, steps in zip(field, paths, strict=True) if steps == path]
    kind, where = meant[0]["type"], "".join(path).removeprefix(".")
    if kind == "extra_forbidden":
        message = f"Unrecognized request argument supplied: {where}"
        return ApiError(400, message, param=where, code="unknown_parameter")
    if kind == "missing":
        message = f"Missing required parameter: '{where}'."
        return ApiError(400, message, param=where, code="missing_required_parameter")
    words = " or ".join(dict.fromkeys(item["msg"] for item in meant))
    code = "invalid_value" if kind in ("enum", "literal_error") else "invalid_type"
    return ApiError(400, f"{where or 'body'}: {words}", param=where or None, code=code)


def _path(location: tuple[int | str, ...], body: object, *, missing: bool) -> tuple[str, ...]:
    """The steps of a location that lead somewhere in the body: (.messages, [0], .content).
    `missing`: its last step leads nowhere, which is the fault."""
    steps: list[str] = []
    for place, step in enumerate(location):
        absent = missing and place == len(location) - 1
        if isinstance(body, dict) and isinstance(step, str) and (step in body or absent):
            steps.append(f".{step}")
            body = body.get(step)
        elif isinstance(body, list) and isinstance(step, int) and step < len(body):
            steps.append(f"[{step}]")
            body = body[step]
    return tuple(steps)
