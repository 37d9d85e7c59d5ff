"""Prompts to ids, off the event loop: one long text must not stop running answers (case 33)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from outrider.engines.tokenizer import Message, Tokenizer
from outrider.gateway import calls
from outrider.gateway.errors import ApiError, invalid, too_long
from outrider.gateway.schema import ChatMessage, ChatRequest, CompletionRequest
from outrider.gateway.wishes import toolbox

T = TypeVar("T")

SHORT_BODY: Final = 2048
"""Bytes up to which a request is read at once: less work than handing it to a thread and back."""
LONG_BODY: Final = 64 * 1024
"""Bytes from which a request goes through the slow lane, so that short ones pass it by."""


class Lanes:
    """Two threads for work that takes time by the length of a text: one for long ones."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(1, thread_name_prefix="outrider-short-prompts")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="outrider-long-prompts")

    async def run(self, size: int, call: Callable[[], T]) -> T:
        """`call()` on the thread for texts of `size` bytes; the shortest need none."""
        if size <= SHORT_BODY:
            return call()
        lane = self._long if size > LONG_BODY else self._short
        return await asyncio.get_running_loop().run_in_executor(lane, call)

    def close(self) -> None:
        self._short.shutdown(wait=False, cancel_futures=True)
        self._long.shutdown(wait=False, cancel_futures=True)


def encode(request: ChatRequest | CompletionRequest, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The prompts of a request: one for a chat, one or several for a completion. Raises ApiError,
    EngineError."""
    if isinstance(request, ChatRequest):
        return [_checked(tokenizer.chat(_conversation(request)), "messages")]
    return [_checked(ids, "prompt") for ids in _completion(request.prompt, tokenizer)]


def count(request: ChatRequest | CompletionRequest) -> int:
    """How many prompts `encode` will give."""
    if isinstance(request, ChatRequest) or isinstance(request.prompt, str):
        return 1
    return 1 if isinstance(request.prompt[0], int) else len(request.prompt)


def _conversation(request: ChatRequest) -> list[Message]:
    """The messages, the first of them with what is to be said of tools."""
    names = {c.id: c.function.name for m in request.messages for c in m.tool_calls or ()}
    messages = [_message(m, names) for m in request.messages]
    box = toolbox(request)
    if box is not None:
        told = calls.briefing(box.functions, must=box.must, parallel=box.parallel)
        if messages[0]["role"] == "system":
            told = f"{messages.pop(0)['content']}\n\n{told}"
        messages.insert(0, {"role": "system", "content": told})
    return messages


def _message(message: ChatMessage, names: Mapping[str, str]) -> Message:
    """`names`: of the functions called, by the call's id. Templates differ in how they write calls
    and results, and many know none: both are written in plain text (docs/api.md)."""
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if not isinstance(content, str):
        content = "\n".join(part.text or "" for part in content or ())
    lines = [calls.line(c.function.name, c.function.arguments) for c in message.tool_calls or ()]
    if role == "tool":
        called = message.tool_call_id or ""
        role, content = "user", f"Result of {names.get(called, called)}: {content}"
    return {"role": role, "content": "\n".join([*([content] if content else []), *lines])}


def _completion(
    prompt: str | list[str] | list[int] | list[list[int]], tokenizer: Tokenizer
) -> list[Sequence[int]]:
    if isinstance(prompt, str):
        return [tokenizer.encode(prompt)]
    found: list[Sequence[int]] = []
    numbers: list[int] = []
    for item in prompt:
        if isinstance(item, int):
            numbers.append(item)
        else:
            found.append(tokenizer.encode(item) if isinstance(item, str) else item)
    found += [numbers] if numbers else []
    size = tokenizer.vocab_size
    if any(not 0 <= token < size for ids in found for token in ids):
        raise invalid("prompt", f"token ids are from 0 to {size - 1}")
    return found


def _checked(ids: Sequence[int], name: str) -> tuple[int, ...]:
    if not ids:
        raise ApiError(400, f"{name}: has no tokens", param=name, code="invalid_value")
    return tuple(ids)


def require_room(prompt: Sequence[int], context: int, name: str) -> None:
    """Raises ApiError unless a token of an answer fits behind the prompt; nothing is cut silently
    (field case 24)."""
    if len(prompt) >= context:
        raise too_long(
            name,
            f"This model's maximum context length is {context} tokens. However, your {name} "
            f"resulted in {len(prompt)} tokens, which leaves no room for an answer. Please "
            "shorten it.",
        )
