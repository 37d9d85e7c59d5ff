"""What servers answer, read strictly: which token stood at a position and which were likely.

Shapes seen on live servers (vLLM 0.32, llama-server of llama.cpp b11549) and in SGLang's documents:

* llama-server: `logprobs.content[]` with `id`, `logprob`, `top_logprobs[]` of the same.
* vLLM with `return_tokens_as_token_ids`: `logprobs.tokens[]` of "token_id:7", `token_logprobs[]`,
  `top_logprobs[]` of objects with such keys; with `return_token_ids`: `token_ids[]`.
* SGLang `/generate`: `meta_info.input_top_logprobs[]` and `output_top_logprobs[]` of
  [logprob, id, text].

Text is never turned back into ids: two ids may share a text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from outrider.engines.base import ServerError

T = TypeVar("T")

_BY_ID: Final = "token_id:"
_STRANGE: Final = (KeyError, IndexError, TypeError, ValueError, AttributeError)


@dataclass(frozen=True, slots=True)
class Position:
    """What a server says of one position."""

    token: int | None
    """The id it put there; None: it only scored the position."""
    top: tuple[tuple[int, float], ...]
    """Ids and natural log-probabilities, likeliest first; the token need not be the first."""


PROBE: Final = "outrider probe says what it can do"


def reading(what: str, read: Callable[[], T], *, advice: str = PROBE) -> T:
    """`read()`, with every surprise in a reply as a ServerError that names `what` was read."""
    try:
        return read()
    except _STRANGE as error:
        raise ServerError(
            f"the server's {what} has a form that is not understood ({type(error).__name__}); "
            + advice
        ) from error


def positions_of(choice: Mapping[str, Any]) -> list[Position]:
    """The generated positions of one choice of a completion, or of one event of it."""
    return reading("completion", lambda: _positions(choice))


def _positions(choice: Mapping[str, Any]) -> list[Position]:
    told = choice.get("logprobs")
    if told and told.get("content"):
        return [_by_entry(entry) for entry in told["content"]]
    ids = choice.get("token_ids") or choice.get("tokens")
    if told and told.get("tokens"):
        return _by_key(told, ids)
    if ids:
        return [Position(_id(token), ()) for token in ids]
    if choice.get("text"):
        raise ServerError(
            "the server tells texts and no token ids (logprobs.content[].id, token_ids), so its "
            "answers cannot be compared with guesses"
        )
    return []


def _by_entry(entry: Mapping[str, Any]) -> Position:
    top = tuple((_id(e["id"]), _log(e["logprob"])) for e in entry.get("top_logprobs") or ())
    return Position(_id(entry["id"]), _ranked(top))


def _by_key(told: Mapping[str, Any], ids: Sequence[int] | None) -> list[Position]:
    names = told["tokens"]
    tops = told.get("top_logprobs") or [None] * len(names)
    tokens = ids if ids is not None else [_named(name) for name in names]
    return [
        Position(_id(token), _ranked(tuple((_named(k), _log(v)) for k, v in (top or {}).items())))
        for token, top in zip(tokens, tops, strict=True)
    ]


def _named(name: str) -> int:
    if not name.startswith(_BY_ID):
        raise ServerError(
            "the server names likely tokens by text and not by id, although it was asked to "
            "(return_tokens_as_token_ids)"
        )
    return _id(int(name.removeprefix(_BY_ID)))


def scored_of(meta: Mapping[str, Any], drafts: int) -> list[Position]:
    """SGLang's `meta_info` of a request that was scored from one id before `drafts` drafts on."""
    return reading("meta_info", lambda: _scored(meta, drafts))


def _scored(meta: Mapping[str, Any], drafts: int) -> list[Position]:
    lists: list[Any] = []
    if drafts:
        inputs = meta["input_top_logprobs"]
        # The entry of the first scored id is null: nothing is known before it.
        if len(inputs) != drafts + 1:
            raise ServerError(
                f"the server scored {len(inputs)} positions where {drafts + 1} were asked for: "
                "it ignores logprob_start_len"
            )
        lists += inputs[1:]
    lists.append(meta["output_top_logprobs"][0])
    return [Position(None, _ranked(tuple((_id(e[1]), _log(e[0])) for e in row))) for row in lists]


def _ranked(top: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted((e for e in top if e[1] > -math.inf), key=lambda e: (-e[1], e[0])))


def _id(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError("no token id")
    return value


def _log(value: Any) -> float:
    number = float(value)
    if math.isnan(number) or number > 1e-3:  # rounding leaves log 1 a little above 0
        raise ValueError("no log-probability")
    return number
