"""The words of the domain as values: parameters, drafts, verdicts, stop reasons.

Frozen, checked once at construction, no behaviour beyond questions about themselves.
Positions are absolute in the request: position 0 is the first prompt token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from outrider.core.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind

MAX_SEED: Final = 2**63 - 1
"""Largest seed accepted: fits a signed 64-bit integer everywhere (JSON parsers, torch)."""
MAX_TOKENS_LIMIT: Final = 1_000_000
"""Largest max_tokens accepted: far above any context here, small enough to be a sane int."""
MAX_STOPS: Final = 16
"""Most stop strings a request may carry (OpenAI allows 4, vLLM any; memory is bounded, I7)."""
MAX_STOP_CHARS: Final = 256
"""Longest stop string, in characters: the text held back is bounded by it."""
MAX_TEMPERATURE: Final = 100.0
"""Above this the distribution is uniform for every purpose and float32 loses the order."""
MAX_LOGPROBS: Final = 20
"""Most alternatives reported a token (OpenAI's limit)."""
MAX_BIAS: Final = 100.0
"""Largest absolute logit bias (OpenAI's limit); -100 and 100 ban and force in practice."""
MAX_BIASED_TOKENS: Final = 1024
"""Most ids a logit_bias may name."""
MAX_STOP_IDS: Final = 1024
"""Most ids that may end the text."""
MIN_REPETITION_PENALTY: Final = 0.01
"""Smallest repetition penalty: logits are divided by it and must stay far from overflow."""


class ParameterError(ValueError):
    """A request parameter is out of range. `field` names it; the message says the range."""

    def __init__(self, field_name: str, message: str) -> None:
        super().__init__(f"{field_name}: {message}")
        self.field = field_name


class GrammarError(ParameterError):
    """A grammar that cannot be used here; the message says why."""

    def __init__(self, message: str) -> None:
        super().__init__("grammar", message)


class FinishReason(StrEnum):
    """Why a generation ended (the OpenAI words)."""

    STOP = "stop"
    LENGTH = "length"


class Origin(StrEnum):
    """Who wrote a committed token."""

    DRAFT = "draft"
    """Drafted and accepted."""
    CORRECTION = "correction"
    """The target's own token after a rejection."""
    BONUS = "bonus"
    """The target's own token after a block that was accepted whole."""
    TARGET = "target"
    """The target's own token where nothing was drafted."""
    RELAXED = "relaxed"
    """Drafted and let stand although the target's own token is another one (core.relaxed)."""
    TRUNCATED = "truncated"
    """A correction drawn from a residual that was cut off, and charged for it (core.residual)."""


class Rule(StrEnum):
    """Acceptance rules (docs/architecture.md, Acceptance)."""

    COUPLED = "coupled"
    RATIO = "ratio"
    RELAXED = "relaxed"
    """Lossy, within a budget (core.relaxed); never the default."""


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ParameterError(name, f"must be a number, got {_shown(value)}")
    # Compared before any conversion: an int may be too large for a float. NaN fails both.
    if not low <= value <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise ParameterError(name, f"must be in {bracket}{low:g}, {high:g}], got {_shown(value)}")


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParameterError(name, f"must be an integer, got {_shown(value)}")
    if not low <= value <= high:
        raise ParameterError(name, f"must be in [{low}, {high}], got {_shown(value)}")


def _shown(value: object) -> str:
    """A refused value as it may stand in a message: never long, never an error by itself."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Everything that shapes the distribution and the length of one generation.

    Defaults are neutral: the model's own distribution at temperature 1. Temperature 0 is the
    limit T -> 0 (the most likely token), under the same filters.
    """

    temperature: float = 1.0
    top_k: int = 0
    """Keep the k most likely ids; 0 = off."""
    top_p: float = 1.0
    """Keep the smallest set of most likely ids whose probability reaches top_p; 1 = off."""
    min_p: float = 0.0
    """Drop ids less likely than min_p times the likeliest; 0 = off."""
    repetition_penalty: float = 1.0
    """Divide positive (multiply negative) logits of ids seen in prompt or output; 1 = off."""
    presence_penalty: float = 0.0
    """Subtract once for ids that occur in the output so far."""
    frequency_penalty: float = 0.0
    """Subtract once per occurrence in the output so far."""
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    max_tokens: int = 256
    min_tokens: int = 0
    """No end-of-sequence id before this many output tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; the string itself is not part of it."""
    stop_token_ids: frozenset[int] = frozenset()
    """Ids that end the text, besides the model's own end ids."""
    ignore_eos: bool = False
    """Go on past the model's end ids (not past stop_token_ids)."""
    logprobs: int | None = None
    """Report the log-probability of each token and this many alternatives; None = none."""
    grammar: Grammar | None = None
    """What the whole text has to be; None: anything."""
    given: tuple[int, ...] = ()
    """The output begins with these ids, whatever the models say: how a text that exists already
    gets its log-probabilities."""
    seed: int = 0

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 100.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _integer("max_tokens", self.max_tokens, 1, MAX_TOKENS_LIMIT)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        _integer("seed", self.seed, 0, MAX_SEED)
        if not isinstance(self.ignore_eos, bool):
            raise ParameterError(
                "ignore_eos", f"must be true or false, got {_shown(self.ignore_eos)}"
            )
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        self._check_bias()
        self._check_stops()
        self._check_grammar()
        self._check_given()

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise ParameterError("logit_bias", "must map token ids to numbers")
        if len(self.logit_bias) > MAX_BIASED_TOKENS:
            raise ParameterError("logit_bias", f"at most {MAX_BIASED_TOKENS} ids")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, 2**31 - 1)
            _number("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
        object.__setattr__(self, "logit_bias", MappingProxyType(dict(self.logit_bias)))

    def _check_stops(self) -> None:
        if not isinstance(self.stop, tuple | list):
            raise ParameterError("stop", "must be a tuple of strings")
        object.__setattr__(self, "stop", tuple(self.stop))
        if len(self.stop) > MAX_STOPS:
            raise ParameterError("stop", f"at most {MAX_STOPS} strings, got {len(self.stop)}")
        for text in self.stop:
            if not isinstance(text, str) or not text or len(text) > MAX_STOP_CHARS:
                raise ParameterError("stop", f"each must have 1 to {MAX_STOP_CHARS} characters")
        if not isinstance(self.stop_token_ids, frozenset | set | tuple | list):
            raise ParameterError("stop_token_ids", "must be a set of token ids")
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise ParameterError("stop_token_ids", f"at most {MAX_STOP_IDS} ids")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, 2**31 - 1)
        object.__setattr__(self, "stop_token_ids", frozenset(self.stop_token_ids))

    def _check_grammar(self) -> None:
        grammar = self.grammar
        if grammar is None:
            return
        if not isinstance(grammar, Grammar) or grammar.kind not in tuple(GrammarKind):
            raise GrammarError(f"must be one of the kinds {', '.join(GrammarKind)}")
        size = len(grammar.text.encode("utf-8", "replace"))
        if size > MAX_GRAMMAR_BYTES:
            raise GrammarError(f"has {size} bytes; at most {MAX_GRAMMAR_BYTES}")
        if self.ignore_eos:
            raise ParameterError("ignore_eos", "a grammar says where the text ends: leave it out")

    def _check_given(self) -> None:
        if not isinstance(self.given, tuple | list):
            raise ParameterError("given", "must be a tuple of token ids")
        if self.given and self.grammar is not None:
            raise ParameterError("given", "beside a grammar there is nothing to give")
        if len(self.given) > self.max_tokens:
            raise ParameterError("given", f"{len(self.given)} ids, max_tokens {self.max_tokens}")
        for token in self.given:
            _integer("given", token, 0, 2**31 - 1)
        object.__setattr__(self, "given", tuple(self.given))

    @property
    def filters(self) -> bool:
        """True when ids may be left out: top-k, top-p or min-p is on."""
        return bool(self.top_k or self.top_p < 1.0 or self.min_p)

    @property
    def uses_history(self) -> bool:
        """True when the distribution depends on which ids were seen before."""
        return bool(
            self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log-probability of a committed token under the target's raw row: before every filter."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest ids with their log-probabilities, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a block of drafts came to: `accepted` drafts stand, then one target token."""

    drafted: int
    accepted: int
    token: int
    """The target's own token at the position after the accepted drafts."""

    def __post_init__(self) -> None:
        if not 0 <= self.accepted <= self.drafted:
            raise ValueError(f"accepted={self.accepted} of drafted={self.drafted}")

    @property
    def origin(self) -> Origin:
        """Who the verdict's own token is: correction, bonus, or plain target."""
        if self.drafted == 0:
            return Origin.TARGET
        return Origin.BONUS if self.accepted == self.drafted else Origin.CORRECTION
