"""The requests of OpenAI's API as types, with our own extensions. Shapes only: kinds of values,
unknown fields, and what is refused by name. Ranges are `core.tokens.SamplingParams`' business.

A field that would change the answer and cannot be honoured is refused, never passed over. A field
that only names somebody or something for bookkeeping is taken and has no effect.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from outrider.core.relaxed import RelaxedRule
from outrider.core.tokens import Rule
from outrider.gateway.errors import ApiError, unsupported
from outrider.session.schedules import Schedule

MAX_TOOLS: Final = 128
"""Most tools of a request (OpenAI's limit)."""
MAX_MESSAGES: Final = 4096
"""Most messages of a conversation: far above any context window here."""


class Strict(BaseModel):
    """No coercion (a string is no number), no unknown field."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """With include_usage: every chunk says how much there is so far."""
    include_obfuscation: Literal[False] | None = None


class OutriderOptions(Strict):
    """How the answer is to be made. Under the rule `coupled` none of it changes the text."""

    objective: Literal["latency", "balanced", "cost"] | None = None
    """A schedule and controller by what they are for (OBJECTIVES); the two override it."""
    schedule: Schedule | None = None
    controller: str | None = None
    """NAME or NAME:OPTION=NUMBER,..."""
    draft_length: int | None = None
    window: int | None = None
    growth: float | None = None
    verify: Rule | None = None
    tv_budget: float | None = None
    """With verify 'ratio': as --tv-budget; 0: exact."""
    top_k_reply: int | None = None
    """With verify 'ratio': as --top-k-reply."""
    rule: RelaxedRule | None = None
    """With verify 'relaxed': relaxed, fsd, e2sci or typical."""
    threshold: float | None = None
    budget: float | Literal["inf"] | None = None
    sketch: int | None = None
    details: bool | None = None
    """As the header X-Outrider-Details: who wrote each token, and what it took."""


class Common(Strict):
    """Fields that both endpoints share."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None

    # Widely used beside OpenAI's own
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None

    outrider: OutriderOptions | None = None


class TextPart(Strict):
    type: str
    text: str | None = None
    # Known kinds of parts that a text model cannot read; named so that the error says so.
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: str | None = None


class JsonSchema(Strict):
    name: str
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class FunctionTool(Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Strict):
    name: str
    arguments: str


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[TextPart], Field(min_length=1)] | None = None
    name: str | None = None
    # Clients send an assistant's message back as it came, with what was null in it.
    refusal: None = None
    audio: None = None
    function_call: Any = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    annotations: Any = None


class ChatRequest(Common):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    # Taken, without effect: they name the caller, or where to keep things.
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    # Refused unless neutral (REFUSED)
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    moderation: Any = None
    store: Any = None
    service_tier: Any = None
    prompt_cache_retention: Any = None


class CompletionRequest(Common):
    """POST /v1/completions"""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[Annotated[list[int], Field(min_length=1)]], Field(min_length=1)]
    )
    logprobs: int | None = None
    echo: bool | None = None

    # Refused unless neutral
    suffix: Any = None
    best_of: Any = None


REFUSED: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    "functions": ((None, []), "is the old name of tools; give those"),
    "function_call": ((None, "none", "auto"), "is the old name of tool_choice; give that"),
    "modalities": ((None, ["text"]), "this model writes text only; supported is ['text']"),
    "audio": ((None,), "this model writes text only"),
    "prediction": ((None,), "is not supported: the draft model predicts the answer"),
    "reasoning_effort": ((None, "none"), "this model has no reasoning setting; supported: 'none'"),
    "verbosity": ((None,), "this model has no verbosity setting"),
    "web_search_options": ((None,), "this server searches nothing"),
    "moderation": ((None,), "this server moderates nothing"),
    "store": ((None, False), "answers are not kept; supported is false"),
    "service_tier": ((None, "auto", "default"), "there is one tier; supported are auto, default"),
    "prompt_cache_retention": ((None, "in_memory"), "prompts are kept in memory only"),
    "suffix": ((None, ""), "this server does not fill in the middle; leave suffix out"),
}
"""Fields that are known and not supported: the values that ask for nothing, and what is said to
any other."""


def refuse(request: ChatRequest | CompletionRequest) -> None:
    """Raise ApiError for the first field that asks for what is not there."""
    for name, (neutral, why) in REFUSED.items():
        value = getattr(request, name, None)
        if not any(type(value) is type(other) and value == other for other in neutral):
            raise unsupported(name, f"{name}: {why}")
    match request:
        case CompletionRequest():
            _refuse_completion(request)
        case ChatRequest():
            _refuse_messages(request.messages)


def _refuse_completion(request: CompletionRequest) -> None:
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise unsupported("best_of", "best_of: supported is only a value equal to n")


def _refuse_messages(messages: list[ChatMessage]) -> None:
    for i, message in enumerate(messages):
        at = f"messages[{i}]"
        if message.role == "function":
            raise unsupported(f"{at}.role", f"{at}.role: is the old name of 'tool'; give that")
        for name in ("function_call", "annotations"):
            if getattr(message, name) not in (None, []):
                raise unsupported(f"{at}.{name}", f"{at}.{name}: is not supported")
        if message.tool_calls and message.role != "assistant":
            raise unsupported(f"{at}.tool_calls", f"{at}.tool_calls: an assistant's alone")
        if (message.tool_call_id is None) is (message.role == "tool"):
            raise unsupported(
                f"{at}.tool_call_id",
                f"{at}.tool_call_id: role 'tool' needs it, and no other has it",
            )
        if message.name is not None:
            raise unsupported(
                f"{at}.name", f"{at}.name: the model's chat template knows no names; say it in text"
            )
        if message.content is None and not message.tool_calls:
            raise ApiError(
                400, f"{at}.content: must be text", param=f"{at}.content", code="invalid_type"
            )
        if isinstance(message.content, list):
            _refuse_parts(f"{at}.content", message.content)


def _refuse_parts(at: str, parts: list[TextPart]) -> None:
    for j, part in enumerate(parts):
        if part.type != "text":
            raise unsupported(
                f"{at}[{j}].type", f"{at}[{j}].type: this model reads text only, not {part.type!r}"
            )
        if part.text is None:
            raise ApiError(
                400,
                f"Missing required parameter: '{at}[{j}].text'.",
                param=f"{at}[{j}].text",
                code="missing_required_parameter",
            )
