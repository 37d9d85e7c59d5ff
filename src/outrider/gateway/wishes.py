"""From a request's fields to what the edge is asked: sampling parameters, and how to make them.

Everything is checked here, before a request waits for anything (field case 25).
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from outrider.control.registry import parse as parse_controller
from outrider.core.grammar import Grammar, GrammarKind
from outrider.core.relaxation import DEFAULT_SKETCH, Relaxation
from outrider.core.relaxed import Policy, RelaxedRule
from outrider.core.residual import DEFAULT_TOP_K, TopKReply
from outrider.core.rng import choice_seed
from outrider.core.tokens import MAX_TOKENS_LIMIT, ParameterError, Rule, SamplingParams
from outrider.gateway import calls
from outrider.gateway.calls import Function
from outrider.gateway.errors import invalid, unsupported
from outrider.gateway.schema import (
    ChatRequest,
    Common,
    CompletionRequest,
    NamedTool,
    OutriderOptions,
    Tool,
)
from outrider.runtime.edgerequest import EdgeRequest
from outrider.session.schedules import DEFAULT_WINDOW, Schedule

MAX_CHOICES: Final = 128
"""Most answers of one request, choices and prompts together (OpenAI's limit of n)."""
DEFAULT_COMPLETION_TOKENS: Final = 16
"""max_tokens of /v1/completions where it is not given: OpenAI's default. A chat's default is what
is left of the context."""
DEFAULT_THRESHOLD: Final = 0.1
DEFAULT_BUDGET: Final = 1.0
"""Of verify 'relaxed', as on the command line."""

OBJECTIVES: Final[Mapping[str, tuple[Schedule, str]]] = {
    "latency": (Schedule.FREERUN, "fixed"),
    "balanced": (Schedule.STREAM, "auto"),
    "cost": (Schedule.SYNC, "auto"),
}
"""What an objective chooses (docs/controllers.md): the cloud never waits; it waits for drafts that
are on their way; it runs only for whole blocks of drafts, where those pay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How the gateway makes answers when a request does not say."""

    schedule: Schedule = Schedule.FREERUN
    controller: str = "fixed"
    """NAME or NAME:OPTION=NUMBER,..."""
    draft_length: int = 4
    window: int = DEFAULT_WINDOW
    calibration: str | None = None
    """Folder of `outrider calibrate`; the gateway's own, never a request's."""
    drafts: bool = True
    """There is a draft model here."""

    def request(self, params: SamplingParams | None = None) -> EdgeRequest:
        """Raises ParameterError."""
        name, options = parse_controller(self.controller)
        return EdgeRequest(
            prompt_ids=(0,),  # until it is tokenised
            params=params or SamplingParams(),
            schedule=self.schedule,
            controller=name,
            controller_options=options,
            draft_length=self.draft_length,
            window=self.window,
            calibration=self.calibration,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """A request, checked."""

    request: EdgeRequest
    """Its prompt is still missing."""
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    details: bool
    echo: bool = False
    tools: bool = False
    """The answer may call tools."""
    silent: bool = False
    """Nothing is to be said behind the echo."""

    def choice(self, prompt: tuple[int, ...], index: int) -> EdgeRequest:
        """What to ask for choice number `index` of a prompt."""
        params = self.request.params
        return replace(
            self.request,
            prompt_ids=prompt,
            params=replace(params, seed=choice_seed(params.seed, index)),
        )


def wishes(request: ChatRequest | CompletionRequest, manner: Manner) -> Wishes:
    """Raises ApiError, or ParameterError naming one of our parameters."""
    newer = _completion_limit(request) is not None
    renamed = {"max_tokens": "max_completion_tokens"} if newer else {}
    if isinstance(request, ChatRequest):
        renamed["logprobs"] = "top_logprobs"
    try:
        n = _count(request.n)
        params = _params(request)
        asked = _manner(request.outrider or OutriderOptions(), manner, params)
    except ParameterError as error:
        named = renamed.get(error.field)
        if named is None:
            raise
        raise invalid(named, str(error).removeprefix(f"{error.field}: ")) from None
    stream = bool(request.stream)
    options = request.stream_options
    if options is not None and not stream:
        raise invalid("stream_options", "is for stream: true only")
    include_usage = bool(options and options.include_usage)
    continuous = bool(options and options.continuous_usage_stats)
    if continuous and not include_usage:
        raise invalid("stream_options.continuous_usage_stats", "is for include_usage: true only")
    return Wishes(
        request=asked,
        n=n,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous,
        details=bool(request.outrider and request.outrider.details),
        echo=isinstance(request, CompletionRequest) and bool(request.echo),
        tools=isinstance(request, ChatRequest) and toolbox(request) is not None,
        silent=_silent(request),
    )


def _silent(request: Common) -> bool:
    """max_tokens 0 beside echo: the prompt alone is asked about."""
    return isinstance(request, CompletionRequest) and bool(request.echo) and request.max_tokens == 0


def _count(n: int | None) -> int:
    if n is not None and not 1 <= n <= MAX_CHOICES:
        raise invalid("n", f"must be in [1, {MAX_CHOICES}], got {n}")
    return n or 1


def _completion_limit(request: Common) -> int | None:
    return request.max_completion_tokens if isinstance(request, ChatRequest) else None


def _limit(request: Common) -> int | None:
    """max_tokens by whichever of its names; None: what the context holds."""
    newer = _completion_limit(request)
    if newer is not None and request.max_tokens is not None:
        raise unsupported(
            "max_tokens", "max_tokens: give it or max_completion_tokens, its newer name, not both"
        )
    if newer is None and request.max_tokens is None and isinstance(request, CompletionRequest):
        return DEFAULT_COMPLETION_TOKENS
    return request.max_tokens if newer is None else newer


def _logprobs(request: Common) -> int | None:
    """How many alternatives a token is reported with; None: nothing is."""
    if isinstance(request, CompletionRequest):
        return request.logprobs
    assert isinstance(request, ChatRequest), "there are two kinds of requests"
    if not request.logprobs:
        if request.top_logprobs is not None:
            raise invalid("top_logprobs", "is for logprobs: true only")
        return None
    return request.top_logprobs or 0


def _params(request: Common) -> SamplingParams:
    limit = _limit(request)
    stop = [request.stop] if isinstance(request.stop, str) else request.stop
    given = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": request.min_p,
        "repetition_penalty": request.repetition_penalty,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "min_tokens": request.min_tokens,
        "ignore_eos": request.ignore_eos,
        "seed": secrets.randbelow(2**32) if request.seed is None else request.seed,
    }
    return SamplingParams(
        **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
        max_tokens=MAX_TOKENS_LIMIT if limit is None or _silent(request) else limit,
        logprobs=_logprobs(request),
        grammar=_grammar(request) if isinstance(request, ChatRequest) else None,
        logit_bias=_bias(request.logit_bias or {}),
        stop=tuple(stop or ()),
        stop_token_ids=frozenset(request.stop_token_ids or ()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolbox:
    """The tools that a request offers."""

    functions: tuple[Function, ...]
    must: bool
    """One is to be called."""
    parallel: bool


def toolbox(request: ChatRequest) -> Toolbox | None:
    """None: no tool may be called. Raises ApiError."""
    choice, tools = request.tool_choice, request.tools or []
    named = choice.function.name if isinstance(choice, NamedTool) else None
    functions = [_function(tool, i) for i, tool in enumerate(tools)]
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise invalid("tools", "two of them have one name")
    if named is not None and named not in names:
        raise invalid("tool_choice", f"there is no tool {named!r:.80}")
    if choice == "required" and not tools:
        raise invalid("tool_choice", "'required' needs tools")
    if choice == "none" or not tools:
        return None
    return Toolbox(
        functions=tuple(f for f in functions if named in (None, f.name)),
        must=named is not None or choice == "required",
        parallel=request.parallel_tool_calls is not False and named is None,
    )


def _function(tool: Tool, index: int) -> Function:
    given = tool.function.parameters or {"properties": {}}
    if given.get("type", "object") != "object":
        raise invalid(f"tools[{index}].function.parameters", "must be the schema of an object")
    return Function(
        name=tool.function.name,
        description=tool.function.description,
        parameters={**given, "type": "object"},
    )


def _grammar(request: ChatRequest) -> Grammar | None:
    """What the answer has to be, by tools or format. Raises ApiError."""
    box, wanted = toolbox(request), request.response_format
    kind = "text" if wanted is None else wanted.type
    if box is not None:
        if kind != "text":
            raise unsupported("response_format", "response_format: with tools, only 'text'")
        return calls.grammar(box.functions, must=box.must, parallel=box.parallel)
    if wanted is None or kind == "text":
        return None
    if kind == "json_object":
        return Grammar(kind=GrammarKind.JSON_OBJECT)
    if wanted.json_schema is None or wanted.json_schema.json_schema is None:
        raise invalid("response_format.json_schema", "must have a name and a schema")
    schema = json.dumps(wanted.json_schema.json_schema)
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=schema)


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    """JSON has no numbers as keys. Raises ApiError for a key that is no token id."""
    for text in given:
        if not (text.isascii() and text.isdecimal() and len(text) <= len(str(2**31))):
            raise invalid("logit_bias", f"keys are token ids, got {text!r:.40}")
    return {int(text): bias for text, bias in given.items()}


def _manner(options: OutriderOptions, manner: Manner, params: SamplingParams) -> EdgeRequest:
    """The gateway's own manner, then the objective, then what is named outright."""
    schedule, controller = OBJECTIVES.get(
        options.objective or "", (manner.schedule, manner.controller)
    )
    schedule = options.schedule or schedule
    rule = options.verify or Rule.COUPLED
    if schedule is Schedule.EDGE_ONLY:
        raise invalid("outrider.schedule", "edge-only asks no cloud, and this gateway has one")
    if options.controller is not None:
        controller = options.controller
    elif rule is Rule.RELAXED and options.rule is RelaxedRule.E2SCI:
        controller = "credit"  # which moves its threshold
    if schedule in (Schedule.CLOUD_ONLY, Schedule.COLOCATED) or not manner.drafts:
        controller = _idle(options.controller)
    name, chosen = parse_controller(controller)
    asked = replace(
        manner.request(params),
        schedule=schedule,
        controller=name,
        controller_options=chosen,
        rule=rule,
        relaxation=_relaxation(options, rule),
        reply=_reply(options, rule, schedule),
    )
    given = {
        "draft_length": options.draft_length,
        "window": options.window,
        "growth": options.growth,
    }
    return replace(asked, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def _idle(asked: str | None) -> str:
    """The controller where nothing is drafted at the edge: none, and none may be asked for."""
    if asked is not None and asked.partition(":")[0] not in ("fixed", "never"):
        raise invalid("outrider.controller", "decides about drafts, and there are none here")
    return "fixed"


def _reply(options: OutriderOptions, rule: Rule, schedule: Schedule) -> TopKReply:
    """How rejections are answered. Raises ApiError, ParameterError."""
    budget, k = options.tv_budget, options.top_k_reply
    for name, value in (("tv_budget", budget), ("top_k_reply", k)):
        if value is not None and rule is not Rule.RATIO:
            raise invalid(f"outrider.{name}", "is for verify: 'ratio' only")
        if value and schedule in (Schedule.CLOUD_ONLY, Schedule.COLOCATED):
            raise invalid(f"outrider.{name}", "is about guesses of the edge, and none are made")
    if k is None:
        k = DEFAULT_TOP_K if budget else 0
    return TopKReply(k=k, budget=budget or 0.0)


def _relaxation(options: OutriderOptions, rule: Rule) -> Relaxation | None:
    given = [
        name
        for name in ("rule", "threshold", "budget", "sketch")
        if getattr(options, name) is not None
    ]
    if rule is not Rule.RELAXED:
        if given:
            raise invalid(f"outrider.{given[0]}", "is for verify: 'relaxed' only")
        return None
    policy = Policy(
        rule=options.rule or RelaxedRule.RELAXED,
        threshold=DEFAULT_THRESHOLD if options.threshold is None else options.threshold,
    )
    budget = DEFAULT_BUDGET if options.budget is None else options.budget
    return Relaxation(
        policy=policy,
        budget=math.inf if budget == "inf" else budget,
        sketch=DEFAULT_SKETCH if options.sketch is None else options.sketch,
    )
