"""A draft model's guesses, recorded once and given again without a model.

Under the coupled rule a guess hangs on its context alone (draft model, seed, sampling), and the
text that is committed on the target, prompt, seed and sampling. So an answer is recorded whole by
its ids, the places where the guess behind the text is not the text's next id, and for each of
those the *chain* of guesses that goes on from the wrong one, as far as the recorded window. Every
block that any schedule can ask for is then a walk along text and chain.

What was not recorded is never made up: another prompt, seed, sampling or target, or a chain asked
for beyond the window, is an UnrecordedError that says what differs. Replay takes the time that the
draft took, asleep, so that one machine can stand for many edges.

A file is JSON lines: a header, then a line an answer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from outrider.core.draft import NO_DRAFT, Draft, StopRule
from outrider.core.grammar import Constraint
from outrider.core.relaxation import DEFAULT_SKETCH
from outrider.core.tokens import ParameterError, Rule, SamplingParams
from outrider.engines.base import EngineError, UnrecordedError

PREFIX: Final = "replay:"
FORMAT: Final = "outrider-drafts"
VERSION: Final = 1
DEFAULT_WINDOW: Final = 16
"""Guesses of a chain: the run-ahead of the streaming schedules and more than any block of sync."""
MAX_WINDOW: Final = 256
"""Longest chain: what a schedule may have under way at most."""
MAX_IDS: Final = 1_000_000
"""Ids of a prompt or an answer; no context here is longer (I7)."""
MAX_FILE_BYTES: Final = 1 << 30
"""A file is held in memory: a gibibyte is some hundred thousand answers."""
MAX_PACE_MS: Final = 60_000.0

Id = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
Ids = Annotated[tuple[Id, ...], msgspec.Meta(max_length=MAX_IDS)]
Chain = Annotated[tuple[Id, ...], msgspec.Meta(max_length=MAX_WINDOW)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_PACE_MS)]


class TargetFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose text it is."""

    name: str
    fingerprint: str
    """Of the tokenizer."""
    dtype: str
    deterministic: bool


class Shape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling of every answer, but for the seed: what `outrider record` can be told."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    max_tokens: int
    ignore_eos: bool

    def params(self, seed: int) -> SamplingParams:
        return SamplingParams(seed=seed, **msgspec.structs.asdict(self))


class RecordHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the answers of a file have in common."""

    format: str = FORMAT
    version: int = VERSION
    outrider: str
    """Version of the package that wrote it."""
    target: TargetFacts
    draft: str
    sampling: Shape
    seed: int
    """Answer number i was drawn with seed + i."""
    window: Annotated[int, msgspec.Meta(ge=1, le=MAX_WINDOW)]
    token_seconds: Seconds
    """Of a guess, measured: forward and draw."""


class RecordedAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One answer of the target, and what the draft said along it."""

    task: str
    seed: int
    prompt: Ids
    output: Ids
    chains: dict[int, Chain]
    """By output position: guesses behind output[:position], the first of them not the output's
    next id. A position that is not here had the right guess."""
    ended: tuple[int, ...] = ()
    """Positions whose chain the draft itself ended: an end id, or a full window."""
    prefill_seconds: Seconds
    """Of the first guess: the prompt goes in with it."""

    def __post_init__(self) -> None:
        if any(not 0 <= at <= len(self.output) for at in (*self.chains, *self.ended)):
            raise ValueError("a chain that begins outside the answer")

    def guesses(self, output: Sequence[int], count: int, window: int) -> tuple[int, ...]:
        """Up to `count` guesses behind prompt + `output`. UnrecordedError where that was not
        recorded."""
        at = shared(self.output, output)
        tail = tuple(output[at:])
        if tail:
            if not self._went(at, tail):
                raise UnrecordedError(
                    f"the text leaves the recorded one at its token {at}: recorded with another "
                    "target (or other numerics), or damaged"
                )
            return self._along(at, len(tail), count, window)
        said: tuple[int, ...] = ()
        while len(said) < count and at not in self.chains:
            if at == len(self.output):
                return said  # behind the end there is nothing to guess
            said += (self.output[at],)
            at += 1
        return said + self._along(at, 0, count - len(said), window)

    def _went(self, at: int, tail: tuple[int, ...]) -> bool:
        """Could `tail` be guesses of the chain at `at`? True also beyond the window."""
        chain = self.chains.get(at, ())
        if len(tail) > len(chain):
            return bool(chain) and at not in self.ended and tail[: len(chain)] == chain
        return chain[: len(tail)] == tail

    def _along(self, at: int, depth: int, count: int, window: int) -> tuple[int, ...]:
        """`count` guesses of the chain at `at`, from its `depth` on."""
        if count < 1:
            return ()
        chain = self.chains[at]
        if depth + count > len(chain) and at not in self.ended:
            raise UnrecordedError(
                f"{depth + count} guesses beside the recorded text are wanted, recorded with "
                f"--window {window}: record with a larger one, or draft fewer ahead"
            )
        return chain[depth : depth + count]


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids two sequences begin with in common."""
    if tuple(a[: len(b)]) == tuple(b):
        return len(b)  # the common case, compared in C
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A file in memory."""

    name: str
    header: RecordHeader
    answers: tuple[RecordedAnswer, ...]

    def find(self, prompt: tuple[int, ...], seed: int) -> RecordedAnswer:
        """The answer to `prompt` drawn with `seed`. Raises UnrecordedError, which says which of
        the two is not there."""
        seeded = [answer for answer in self.answers if answer.seed == seed]
        if not seeded:
            seeds = [answer.seed for answer in self.answers]
            held = f"{min(seeds)} to {max(seeds)}" if seeds else "none"
            raise UnrecordedError(f"{self.name} was recorded with seeds {held}, not {seed}")
        for answer in seeded:
            if answer.prompt == prompt:
                return answer
        raise UnrecordedError(f"{self.name} was recorded with another prompt for seed {seed}")

    def require(self, params: SamplingParams, rule: Rule) -> None:
        """Raises UnrecordedError where a request is not of the kind that was recorded. Fewer
        tokens are the beginning of the same text."""
        if rule is not Rule.COUPLED:
            raise UnrecordedError(
                f"a replayed draft is for the coupled rule: under {rule.value} the text hangs on "
                "the draft's own distributions, which are not recorded"
            )
        shape = self.header.sampling
        if params.max_tokens > shape.max_tokens:
            raise UnrecordedError(
                f"{self.name} was recorded with --max-tokens {shape.max_tokens}, not "
                f"{params.max_tokens}"
            )
        wanted = shape.params(params.seed)
        for field in SamplingParams.__dataclass_fields__:
            held, asked = getattr(wanted, field), getattr(params, field)
            if field not in ("max_tokens", "logprobs") and held != asked:
                option = field.replace("_", "-")
                raise UnrecordedError(f"{self.name} was recorded with {option} {held}, not {asked}")


class ReplayDrafter:
    """A recorded draft behind the `Drafter` protocol."""

    def __init__(
        self,
        recorded: Recorded,
        *,
        token_seconds: float | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`token_seconds`: what a guess takes; as recorded when None. The prompt's share goes
        with it in proportion."""
        self.recorded = recorded
        measured = recorded.header.token_seconds
        self.token_seconds = measured if token_seconds is None else token_seconds
        self.slowness = self.token_seconds / measured if measured else 0.0
        """The replayed device's time over the recorded one's."""
        self.sleep = sleep

    @property
    def name(self) -> str:
        return f"{self.recorded.header.draft} (replayed)"

    def session(
        self,
        prompt_length: int,
        params: SamplingParams,
        rule: Rule,
        *,
        sketch: int = DEFAULT_SKETCH,  # noqa: ARG002 - of the relaxed rule, refused below
        constraint: Constraint | None = None,  # noqa: ARG002 - what was guessed was guessed
    ) -> _ReplaySession:
        self.recorded.require(params, rule)
        return _ReplaySession(self, prompt_length, params.seed)


class _ReplaySession:
    def __init__(self, drafter: ReplayDrafter, prompt_length: int, seed: int) -> None:
        self._drafter = drafter
        self._prompt_length = prompt_length
        self._seed = seed
        self._answer: RecordedAnswer | None = None

    def propose(self, committed: Sequence[int], count: int, stop: StopRule | None = None) -> Draft:
        if stop is not None:
            raise UnrecordedError(
                "a replayed draft knows its guesses and not how sure it was: choose a controller "
                "that does not ask (fixed, auto, specstop, ...)"
            )
        if count < 1:
            return NO_DRAFT
        recorded, drafter = self._drafter.recorded, self._drafter
        wait = 0.0
        if self._answer is None:
            self._answer = recorded.find(tuple(committed[: self._prompt_length]), self._seed)
            extra = self._answer.prefill_seconds - recorded.header.token_seconds
            wait = max(0.0, extra) * drafter.slowness
        output = committed[self._prompt_length :]
        tokens = self._answer.guesses(output, count, recorded.header.window)
        wait += len(tokens) * drafter.token_seconds
        if wait:
            drafter.sleep(wait)
        return Draft(tokens=tokens)

    def close(self) -> None:
        """Nothing is held."""


def load_replay(spec: str, *, target: str, fingerprint: str) -> ReplayDrafter:
    """`replay:FILE`, or `replay:FILE?pace=MS` for another time a guess (0: none). `target`,
    `fingerprint`: of the target it is to draft for. Raises EngineError."""
    path, query, wish = spec.removeprefix(PREFIX).partition("?")
    token_seconds = _pace(wish) if query else None
    if not path:
        raise EngineError("replay: names no file; use replay:FILE, as outrider record wrote it")
    recorded = read(Path(path).expanduser())
    held = recorded.header.target
    if held.name != target:
        raise UnrecordedError(
            f"{recorded.name} was recorded with --target {held.name}, not {target}"
        )
    if held.fingerprint != fingerprint:
        raise UnrecordedError(f"{recorded.name} was recorded with another tokenizer of {target}")
    return ReplayDrafter(recorded, token_seconds=token_seconds)


def _pace(wish: str) -> float:
    name, _, value = wish.partition("=")
    try:
        ms = float(value) if name == "pace" else math.nan
    except ValueError:
        ms = math.nan
    if not 0.0 <= ms <= MAX_PACE_MS:
        raise EngineError(f"?{wish}: use ?pace=MS, milliseconds a guess from 0 to {MAX_PACE_MS:g}")
    return ms / 1e3


def read(path: Path) -> Recorded:
    """A whole file. Raises EngineError, naming file and line, for anything else."""
    text = _bytes(path)
    if text and not text.endswith(b"\n"):
        number = text.count(b"\n") + 1
        raise EngineError(
            f"{path.name}, line {number}: cut short; run outrider record again to go on"
        )
    header, answers = _parsed(path.name, text)
    if not answers:
        raise EngineError(f"{path.name} holds no answer yet: run outrider record again to go on")
    return Recorded(name=path.name, header=header, answers=answers)


def resume(path: Path) -> tuple[RecordHeader, tuple[RecordedAnswer, ...], int]:
    """What an interrupted recording holds, and how many bytes of it are whole lines: one that was
    being written is to be made anew."""
    text = _bytes(path)
    whole = text[: text.rfind(b"\n") + 1]
    return *_parsed(path.name, whole), len(whole)


def encoded(row: RecordHeader | RecordedAnswer) -> bytes:
    """A line of the file."""
    return msgspec.json.encode(row) + b"\n"


def _bytes(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise EngineError(f"{path.name} is larger than {MAX_FILE_BYTES} bytes: no recording")
        return path.read_bytes()
    except OSError as error:
        raise EngineError(f"cannot read the recording {path}: {error.strerror}") from None


def _parsed(name: str, text: bytes) -> tuple[RecordHeader, tuple[RecordedAnswer, ...]]:
    first, *rest = text.split(b"\n")
    header = _header(name, first)
    lines = enumerate(rest, 2)
    return header, tuple(_decode(name, at, line, RecordedAnswer) for at, line in lines if line)


def _header(name: str, line: bytes) -> RecordHeader:
    try:
        kind = msgspec.json.decode(line)
    except msgspec.DecodeError:
        kind = None
    if not isinstance(kind, dict) or kind.get("format") != FORMAT:
        raise EngineError(f"{name} is no recording of drafts: make one with outrider record")
    if kind.get("version") != VERSION:
        raise EngineError(
            f"{name} is {FORMAT} version {kind.get('version')!r}; this Outrider reads version "
            f"{VERSION}: record it anew"
        )
    header: RecordHeader = _decode(name, 1, line, RecordHeader)
    try:
        header.sampling.params(header.seed)
    except ParameterError as error:
        raise EngineError(f"{name}, line 1: {error}; record it anew") from None
    return header


def _decode(name: str, number: int, line: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineError(f"{name}, line {number}: {error}; record it anew") from None
