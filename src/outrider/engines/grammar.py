"""Grammars as masks over a vocabulary, by llguidance.

A grammar is read once for an owner and a text, which may take tens of milliseconds, and kept; every
answer works on a copy. The mask says which ids may follow by their bytes alone: the library's habit
of allowing only one way to cut a forced text into tokens is off (`no_forcing`), since that way
hangs on a tokenizer's code and not on its table, and edge and cloud share the table.

A grammar comes from outside: its size, what reading it may cost, and what each token may cost are
bounded, and a step past a bound ends the answer that asked for it.
"""

from __future__ import annotations

import importlib.util
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np

from outrider.core.grammar import Allowed, Grammar, GrammarKind
from outrider.core.sampling import DeadEndError
from outrider.core.tokens import GrammarError
from outrider.engines.base import MissingExtraError, plan_prefix

MAX_KEPT: Final = 64
"""Grammars kept ready; a service has few, each in many requests."""
MAX_KEPT_OF_ONE: Final = 16
"""Of one owner: nobody pushes out what belongs to others."""
MAX_GRAMMAR_SYMBOLS: Final = 50_000
MAX_READING_FUEL: Final = 500_000
"""Units of llguidance: 50 000 are a millisecond, by its manual. Half of its own default."""
MAX_STEP_FUEL: Final = 100_000
"""7 milliseconds, likewise."""
MAX_STEP_ITEMS: Final = 20_000
"""A millisecond, likewise."""
MAX_LEXER_STATES: Final = 20_000
"""Up to 2 kB each, likewise; an answer has its own."""
MAX_SHOWN: Final = 200
"""Characters of the library's words in an error."""

_PLACE: Final = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_BLANK: Final = " ?"
"""What may stand between the parts of JSON: at most one blank. Small models, once they may, write
blanks for ever."""
_HEAD: Final = '%llguidance {"no_forcing": true}\n'


class Vocabulary(Protocol):
    """What a grammar needs to know of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token: int) -> bytes: ...


def available() -> bool:
    """The extra `grammar` is installed."""
    return importlib.util.find_spec("llguidance") is not None


class GrammarReader:
    """A `core.grammar.Grammars`. May be used by several threads; its constraints by one each."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokens: Any = None
        """llguidance's form of the vocabulary, made when it is first needed (most of a second)."""
        self._kept: OrderedDict[tuple[str, Grammar], MaskConstraint | str] = OrderedDict()
        """What a grammar came to: an error is not found out twice either."""
        self._lock = threading.Lock()

    def constraint(self, grammar: Grammar, owner: str = "") -> MaskConstraint:
        """Raises GrammarError, MissingExtraError."""
        key = (owner, grammar)
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            elif self._tokens is None:
                self._tokens = _tokens(self._vocabulary)
        if found is None:
            found = self._read(grammar)  # unlocked: nobody waits for another one's grammar
            with self._lock:
                self._kept[key] = found
                self._trim(owner)
        if isinstance(found, str):
            raise GrammarError(found)
        return found.fork()

    def _trim(self, owner: str) -> None:
        mine = [key for key in self._kept if key[0] == owner]
        for key in mine[: max(0, len(mine) - MAX_KEPT_OF_ONE)]:
            del self._kept[key]
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    def _read(self, grammar: Grammar) -> MaskConstraint | str:
        """Ready to be forked, or what is wrong with it."""
        import llguidance

        try:
            text = llguidance.LLMatcher.grammar_from_lark(_lark(grammar))
        except ValueError as error:
            return str(error)
        limits = llguidance.LLParserLimits(
            initial_lexer_fuel=MAX_READING_FUEL,
            step_lexer_fuel=MAX_STEP_FUEL,
            step_max_items=MAX_STEP_ITEMS,
            max_lexer_states=MAX_LEXER_STATES,
            max_grammar_size=MAX_GRAMMAR_SYMBOLS,
            precompute_large_lexemes=False,
            verbose_errors=False,
        )
        matcher = llguidance.LLMatcher(self._tokens, text, log_level=0, limits=limits)
        if matcher.is_error():
            return _said(matcher)
        read = MaskConstraint(matcher, self._vocabulary.vocab_size)
        try:
            read.allowed(())
        except DeadEndError:
            return "allows no text at all, or reading it costs too much"
        return read


class MaskConstraint:
    """A `core.grammar.Constraint`."""

    def __init__(self, begin: Any, width: int) -> None:
        """`begin`: an LLMatcher that has read nothing, and never will."""
        self._begin = begin
        self._width = width
        self._matcher: Any = None
        self._read: list[int] = []

    def fork(self) -> MaskConstraint:
        # The copy has a lexer of its own: no answer waits for, or pays for, another one's.
        return MaskConstraint(self._begin.deep_copy(), self._width)

    def allowed(self, output: Sequence[int]) -> Allowed:
        self._go_to(output)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        ids = np.unpackbits(bits, count=self._width, bitorder="little").view(np.bool_)
        return Allowed(ids, bool(self._matcher.is_accepting()))

    def _go_to(self, output: Sequence[int]) -> None:
        """Make what was read the output, from what both have in common."""
        common = plan_prefix(self._read, output)
        back = len(self._read) - common
        if self._matcher is None or (back and not self._matcher.rollback(back)):
            self._matcher, common = self._begin.deep_copy(), 0
        self._read = list(output[:common])
        for token in output[common:]:
            if not self._matcher.consume_token(token):
                self._check()
            self._read.append(token)

    def _check(self) -> None:
        """A matcher in an error never leaves it: the next question begins anew. The library's own
        words quote the answer, so they are not passed on."""
        if self._matcher.is_error():
            self._matcher, self._read = None, []
            raise DeadEndError(
                "the answer cannot go on: it is not of the grammar, or reading it costs too much"
            )


def _said(matcher: Any) -> str:
    """The library's reason in one short line."""
    words = str(matcher.get_error()).split("\n")
    line = _PLACE.sub("", words[0].strip()) or "it cannot be read"
    return line if len(line) <= MAX_SHOWN else line[: MAX_SHOWN - 3] + "..."


def _lark(grammar: Grammar) -> str:
    """The grammar in the dialect that all kinds are read in. Raises ValueError."""
    import llguidance

    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return f"{_HEAD}start: {json_rule({'type': 'object'})}"
        case GrammarKind.JSON_SCHEMA:
            return f"{_HEAD}start: {json_rule(_schema(grammar.text))}"
        case GrammarKind.REGEX:
            return f"{_HEAD}start: /{llguidance.regex_to_lark(grammar.text)}/"
        case GrammarKind.LARK:
            if "%llguidance" in grammar.text:
                raise ValueError("must not set options of the library (%llguidance)")
            return _HEAD + grammar.text


def json_rule(schema: object) -> str:
    """JSON of a schema as a part of a Lark rule."""
    if schema is True:
        schema = {}
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": {"whitespace_pattern": _BLANK}}
    return f"%json {json.dumps(schema)}"


def _schema(text: str) -> object:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the schema is not valid JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise ValueError("a JSON schema is an object, true or false")
    return schema


class _Wrapped:
    """The vocabulary as llguidance wants it."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        size = vocabulary.vocab_size
        self.tokens = [vocabulary.token_bytes(token) for token in range(size)]
        self.special_token_ids = sorted(vocabulary.special_ids)
        # Which ids end a text is the pipeline's business; the library must have one for itself.
        self.eos_token_id = size
        self.tokens.append(b"")
        self.special_token_ids.append(size)

    def __call__(self, _text: str) -> list[int]:
        """Never needed: nothing is forced."""
        return []


def _tokens(vocabulary: Vocabulary) -> Any:
    if not available():
        raise MissingExtraError(
            "an answer under a grammar needs llguidance: pip install 'outrider[grammar]'"
        )
    import llguidance
    from llguidance import TokenizerWrapper

    return llguidance.LLTokenizer(TokenizerWrapper(_Wrapped(vocabulary)))
