"""What a person sees when something cannot be done: one line that names the fix.

    exception                      exit   shown
    ParameterError, EngineError     2     error: <the message>
    CommandError, a usage error     2     error: <the message>
    an optional package is missing  2     error: <the extra to install>
    LinkError                       2     error: --link: <the message>
    CloudError                      2     where the request or the login is at fault, else 1
    a file that is named wrongly    2     error: <its name>: <why>
    any other OSError               1     error: <the message>
    Ctrl-C                        130     nothing; what was printed stays
    a closed pipe (`| head`)        1     nothing (typer sees to it)

Anything else is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

from typing import Final

import typer

from outrider.core.link import LinkError
from outrider.core.reasons import why
from outrider.core.tokens import GrammarError, ParameterError
from outrider.engines.base import EngineError
from outrider.proto.messages import Code
from outrider.runtime.failures import CloudError

USAGE_ERROR: Final[type[Exception]] = typer.BadParameter.__mro__[2]
"""click's base of all usage errors. Found, not imported: typer carries click inside itself in
some versions and depends on it in others."""

_BROUGHT_BY: Final = {
    "torch": "torch transformers tokenizers safetensors gguf accelerate jinja2",
    "chat": "prompt_toolkit httpx",
    "otel": "opentelemetry",
    "data": "huggingface_hub pyarrow",
    "gateway": "fastapi starlette pydantic uvicorn prometheus_client",
}
OPTIONAL: Final = {
    module: extra for extra, modules in _BROUGHT_BY.items() for module in modules.split()
}
"""Top-level modules to the extra that brings them (pyproject.toml)."""

OWN_FAULT: Final = frozenset(
    {
        Code.UNAUTHORIZED,
        Code.VOCABULARY,
        Code.PARAMETER,
        Code.GRAMMAR,
        Code.CONTEXT,
        Code.TOO_LARGE,
    }
)
"""Refusals of the cloud that another try cannot cure."""
BAD_INPUT: Final = 2
FAILED: Final = 1
INTERRUPTED: Final = 130
"""128 + SIGINT, as shells report it."""


class CommandError(Exception):
    """Bad input that only the command line can see. The message names the fix."""


def describe(error: Exception) -> tuple[str, int] | None:
    """The line to show and the exit code; None when the error is a bug."""
    match error:
        case GrammarError():  # it came in more than one option
            return _one_line(str(error)), BAD_INPUT
        case ParameterError():
            return str(error).replace(error.field, _option(error.field), 1), BAD_INPUT
        case CommandError() | EngineError():
            return _one_line(str(error)), BAD_INPUT
        case ModuleNotFoundError(name=str(name)) if name.split(".")[0] in OPTIONAL:
            module = name.split(".")[0]
            fix = f'pip install "outrider[{OPTIONAL[module]}]"'
            return f"{module} is not installed: {fix}", BAD_INPUT
        case LinkError():
            return f"--link: {_one_line(str(error))}", BAD_INPUT
        case CloudError():
            return _one_line(str(error)), BAD_INPUT if error.code in OWN_FAULT else FAILED
        case (
            FileNotFoundError() | IsADirectoryError() | NotADirectoryError() | PermissionError()
        ) if error.filename is not None:
            return _one_line(f"{error.filename}: {why(error)}"), BAD_INPUT
        case OSError():
            return _one_line(str(error)), FAILED
    if isinstance(error, USAGE_ERROR):
        message: str = error.format_message()  # type: ignore[attr-defined]
        return _one_line(message.replace("Value error, ", "")), BAD_INPUT
    return None


def _option(field: str) -> str:
    """A parameter as the command line knows it. The prompt is an argument, not an option."""
    return field if field == "prompt" else "--" + field.replace("_", "-")


def _one_line(message: str) -> str:
    return " ".join(message.split())
