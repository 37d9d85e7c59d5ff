"""Ways to have rows of a target from a server that knows nothing of drafts.

| way | requests of a forward | a row holds | the server's work for k drafts |
| --- | --- | --- | --- |
| `openai` | a stream of its own greedy answer a sequence | the likeliest id | a step a token |
| `vllm` | one, with k + 1 prompts and one token each | N likeliest ids | one step of k + 1 rows |
| `sglang` | one, which scores the drafts as input | N likeliest ids | one step of k + 1 rows |

Log-probabilities are asked for at temperature 1 and without any filter, with every default of the
server overridden; temperature, filters, noise and acceptance are ours (core.sampling), so the same
seed gives the same text as long as the server's numbers do not move.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from outrider.core.tokens import Rule
from outrider.engines.base import ServerError
from outrider.engines.remote_http import Endpoint, EventStream
from outrider.engines.remote_replies import Position, positions_of, reading, scored_of

log = logging.getLogger("outrider.remote")

COMPLETIONS: Final = "/v1/completions"
GENERATE: Final = "/generate"
TOP: Final = 20
"""Likeliest ids asked for: vLLM refuses more unless it was started with --max-logprobs."""
AHEAD: Final = 64
"""Most tokens a stream runs to: what is generated in vain when an answer ends early."""
CACHE_TOLD: Final = 256
"""A server that had this many ids of a sequence before and computes them all anew has no cache."""
NEUTRAL: Final = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Servers take defaults from the model's own generation config, so each is said."""
NAMED: Final = {"return_tokens_as_token_ids": True, "return_token_ids": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One sequence's part of a forward: the rows behind `context` and behind each draft."""

    slot: int
    context: tuple[int, ...]
    drafts: tuple[int, ...]


class Way(Protocol):
    """See the module docstring."""

    known_ids: int
    rules: frozenset[Rule]
    stepwise: bool

    def rows(self, asks: Sequence[Ask]) -> list[list[Position]]:
        """For each ask its positions, len(drafts) + 1 of them; fewer where the server's own token
        differs from a draft: behind that one nothing is known, and nothing needs to be."""
        ...

    def forget(self, slot: int) -> None:
        """The slot is closed."""
        ...


def checked_model(reply: Any, model: str) -> Any:
    """The reply, if it is `model`'s (or says nothing of it)."""
    told = reading("reply", lambda: reply.get("model"))
    if told is not None and told != model:
        raise ServerError(f"{model!r} was asked and {told!r} answered: the model was swapped")
    return reply


class FanOut:
    """`vllm`: k + 1 prompts, one token each, in one request.

    Only log-probabilities of *prompt* positions bypass vLLM's prefix cache; those of generated
    tokens do not, so each position to judge is made a generated one."""

    rules = frozenset(Rule)
    stepwise = False

    def __init__(self, server: Endpoint, model: str, *, top: int = TOP) -> None:
        self.known_ids = top
        self._server = server
        self._model = model

    def rows(self, asks: Sequence[Ask]) -> list[list[Position]]:
        prompts = [ask.context + ask.drafts[:i] for ask in asks for i in range(len(ask.drafts) + 1)]
        positions = iter(self._positions(prompts))
        return [[next(positions) for _ in range(len(ask.drafts) + 1)] for ask in asks]

    def _positions(self, prompts: Sequence[Sequence[int]]) -> list[Position]:
        body = {
            "model": self._model,
            "prompt": prompts,
            "max_tokens": 1,
            "temperature": 1.0,
            "logprobs": self.known_ids,
            "stream": False,
            **NEUTRAL,
            **NAMED,
        }
        reply = checked_model(self._server.post(COMPLETIONS, body), self._model)
        choices = reading("reply", lambda: {c["index"]: c for c in reply["choices"]})
        if sorted(choices) != list(range(len(prompts))):
            raise ServerError(
                f"{len(choices)} answers to {len(prompts)} prompts: the server does not take a "
                "list of prompts"
            )
        return [enough(positions_of(choices[i]), self.known_ids) for i in range(len(prompts))]

    def forget(self, slot: int) -> None:
        """Nothing is kept here."""


def enough(positions: Sequence[Position], top: int) -> Position:
    """The one position, which must name `top` ids: fewer would be taken for all there are."""
    if len(positions) != 1:
        raise ServerError(f"one token was asked for and {len(positions)} were told")
    if len(positions[0].top) < top:
        raise ServerError(
            f"{top} likeliest ids were asked for and {len(positions[0].top)} were told; "
            "outrider probe says how many this server tells"
        )
    return positions[0]


class Scoring:
    """`sglang`: the drafts as input, scored from the last committed id on.

    SGLang reuses its cache up to `logprob_start_len`, and the entry at that place is null; so it is
    the last committed id. Log-probabilities of input are those of temperature 1 before any filter,
    whatever the request says; the generated token is asked for the same way."""

    rules = frozenset(Rule)
    stepwise = False

    def __init__(self, server: Endpoint, *, top: int = TOP) -> None:
        self.known_ids = top
        self._server = server
        self._held: dict[int, int] = {}
        """Ids of each slot that the server has computed before."""
        self.lost_caches = 0
        """Rounds whose context was computed anew."""

    def rows(self, asks: Sequence[Ask]) -> list[list[Position]]:
        body = {
            "input_ids": [ask.context + ask.drafts for ask in asks],
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, **NEUTRAL},
            "return_logprob": True,
            "logprob_start_len": [len(ask.context) - 1 for ask in asks],
            "top_logprobs_num": self.known_ids,
            "return_text_in_logprobs": False,
            "stream": False,
        }
        replies = self._server.post(GENERATE, body)
        if not isinstance(replies, list) or len(replies) != len(asks):
            raise ServerError("the server does not answer a list of inputs with a list")
        return [self._read(ask, reply) for ask, reply in zip(asks, replies, strict=True)]

    def _read(self, ask: Ask, reply: Any) -> list[Position]:
        meta = reading("reply", lambda: reply["meta_info"])
        cached = reading("meta_info", lambda: int(meta["cached_tokens"]))
        if self._held.get(ask.slot, 0) >= CACHE_TOLD and cached == 0:
            if not self.lost_caches:
                log.warning(
                    "the server computes whole contexts anew (cached_tokens is 0): its prefix "
                    "cache is off or too small, and each round costs the whole context"
                )
            self.lost_caches += 1
        self._held[ask.slot] = len(ask.context)
        return [enough([p], self.known_ids) for p in scored_of(meta, len(ask.drafts))]

    def forget(self, slot: int) -> None:
        self._held.pop(slot, None)


@dataclass(slots=True)
class _Running:
    """A greedy answer of the server, and what it has said so far."""

    prompt: tuple[int, ...]
    stream: EventStream
    events: Iterator[Any]
    said: list[Position] = field(default_factory=list)
    over: bool = False

    def fits(self, context: tuple[int, ...]) -> bool:
        """Is the next token of `context` one of this answer, said or to come?"""
        n = len(self.prompt)
        if context[:n] != self.prompt or not n <= len(context) <= n + len(self.said):
            return False
        behind = context[n:]
        here = all(p.token == t for p, t in zip(self.said, behind, strict=False))
        return here and not (self.over and len(behind) == len(self.said))


class Streaming:
    """`openai`: the server's own greedy answer, as it streams.

    Its tokens are the target's at temperature 0 whatever was guessed, so a guess saves the server
    nothing; what a guess does save is the edge's wait, where it came in time. A stream is opened
    again, behind what is committed, every AHEAD tokens."""

    known_ids = 1
    stepwise = True
    rules = frozenset({Rule.COUPLED, Rule.RATIO})
    """A relaxed rule may let a wrong guess stand, and what follows it is not in the stream."""

    def __init__(self, server: Endpoint, model: str, *, ahead: int = AHEAD) -> None:
        self._server = server
        self._model = model
        self._ahead = ahead
        self._running: dict[int, _Running] = {}

    def rows(self, asks: Sequence[Ask]) -> list[list[Position]]:
        for ask in asks:  # all are under way before the first is waited for
            self._at(ask.slot, ask.context)
        return [self._follow(ask) for ask in asks]

    def _follow(self, ask: Ask) -> list[Position]:
        out: list[Position] = []
        context = ask.context
        for draft in (*ask.drafts, None):
            position = self._next(ask.slot, context)
            out.append(position)
            if draft is None or position.token != draft:
                break
            context = (*context, draft)
        return out

    def _next(self, slot: int, context: tuple[int, ...]) -> Position:
        for _ in range(2):  # an answer may end where the next token is asked for: once more
            running = self._at(slot, context)
            at = len(context) - len(running.prompt)
            while len(running.said) <= at and not running.over:
                self._hear(running)
            if len(running.said) > at:
                return running.said[at]
        raise ServerError("the server ends an answer without a token")

    def _at(self, slot: int, context: tuple[int, ...]) -> _Running:
        running = self._running.get(slot)
        if running is not None and running.fits(context):
            return running
        self.forget(slot)
        body = {
            "model": self._model,
            "prompt": context,
            "max_tokens": self._ahead,
            "temperature": 0.0,
            "logprobs": 1,
            "stream": True,
            **NEUTRAL,
            **NAMED,
        }
        stream = self._server.stream(COMPLETIONS, body)
        running = _Running(prompt=context, stream=stream, events=iter(stream))
        self._running[slot] = running
        return running

    def _hear(self, running: _Running) -> None:
        """The next event of a stream."""
        event = next(running.events, None)
        if event is None:
            running.over = True
            return
        checked_model(event, self._model)
        if "error" in event:
            raise ServerError("the server broke its answer off with an error")
        for choice in reading("event", lambda: list(event["choices"])):
            running.said += positions_of(choice)

    def forget(self, slot: int) -> None:
        running = self._running.pop(slot, None)
        if running is not None:
            running.stream.close()
