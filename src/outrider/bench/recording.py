"""Records what a draft says along the target's own answers, for `engines.replay`."""

from __future__ import annotations

import fcntl
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Final

from msgspec.structs import asdict

from outrider.core.tokens import FinishReason, Rule, SamplingParams
from outrider.engines.base import EngineError
from outrider.engines.drafters import Drafter, DraftSession
from outrider.engines.loaded import Loaded
from outrider.engines.replay import (
    RecordedAnswer,
    RecordHeader,
    Shape,
    TargetFacts,
    encoded,
    resume,
    shared,
)
from outrider.runtime.local import GenerationRequest, LocalGenerator

Question = tuple[str, tuple[int, ...]]
"""Task and prompt ids."""
REPEATS: Final = 9
"""Timed blocks behind `token_seconds`, of which the median holds."""
TIMED_TOKENS: Final = 4
Clock = Callable[[], float]


def header(
    target: Loaded, draft: str, shape: Shape, *, seed: int, window: int, spent: float
) -> RecordHeader:
    """`spent`: seconds of a guess (`token_seconds`)."""
    info = target.model.info
    return RecordHeader(
        outrider=version("outrider"),
        target=TargetFacts(
            name=info.name,
            fingerprint=info.fingerprint,
            dtype=info.dtype,
            deterministic=info.deterministic,
        ),
        draft=draft,
        sampling=shape,
        seed=seed,
        window=window,
        token_seconds=spent,
    )


def token_seconds(
    drafter: Drafter,
    prompt: tuple[int, ...],
    params: SamplingParams,
    *,
    clock: Clock = time.perf_counter,
) -> float:
    """Seconds of a guess behind `prompt`: the median of warm blocks, forward and draw."""
    session = drafter.session(len(prompt), params, Rule.COUPLED)
    spent = []
    try:
        for _ in range(REPEATS + 1):
            # Asked behind the same ids, a session starts again from its prompt's last one.
            began = clock()
            made = len(session.propose(prompt, TIMED_TOKENS))
            spent.append((clock() - began) / max(1, made))
    finally:
        session.close()
    return statistics.median(spent[1:])  # the first took the prompt in


def record(
    target: Loaded,
    drafter: Drafter,
    questions: Sequence[tuple[int, Question]],
    shape: Shape,
    *,
    window: int,
    clock: Clock = time.perf_counter,
) -> Iterator[RecordedAnswer]:
    """An answer to each (seed, question), with the draft's guesses along it."""
    generator = LocalGenerator(target.model, target.tokenizer, drafter)
    ends = frozenset[int]() if shape.ignore_eos else target.model.info.eos_token_ids
    try:
        for seed, (task, prompt) in questions:
            params = shape.params(seed)
            made = generator.generate(GenerationRequest(prompt_ids=prompt, params=params))
            output = made.token_ids
            # The last token a limit allows is the target's own: nobody guesses it.
            guessed = len(output) - (made.finish_reason is FinishReason.LENGTH)
            session = drafter.session(len(prompt), params, Rule.COUPLED)
            try:
                began = clock()
                session.propose(prompt, 1)
                prefill = clock() - began
                walk = _Walk(session, prompt, output, window, params.max_tokens - 1, ends)
                walk.along(guessed)
            finally:
                session.close()
            yield RecordedAnswer(
                task=task,
                seed=seed,
                prompt=prompt,
                output=output,
                chains=walk.chains,
                ended=tuple(sorted(walk.ended)),
                prefill_seconds=prefill,
            )
    finally:
        generator.close()


class _Walk:
    """Along an answer, and off it wherever the draft goes another way."""

    def __init__(
        self,
        session: DraftSession,
        prompt: tuple[int, ...],
        output: tuple[int, ...],
        window: int,
        limit: int,
        ends: frozenset[int],
    ) -> None:
        """`limit`: output positions from here on are never guessed."""
        self._session, self._prompt, self._output = session, prompt, output
        self._window, self._limit, self._ends = window, limit, ends
        self.chains: dict[int, tuple[int, ...]] = {}
        self.ended: set[int] = set()

    def along(self, guessed: int) -> None:
        """Record the guesses of the first `guessed` positions."""
        at = 0
        while at < guessed:
            block = self._say(at, ())
            right = shared(self._output[at:], block)
            at += right
            if right < len(block) or not right:
                self._leave(at, block[right:])
                at += 1

    def _leave(self, at: int, chain: tuple[int, ...]) -> None:
        """The draft goes another way at `at`: follow it to the end of the window."""
        if chain and chain[-1] not in self._ends:
            chain += self._say(at, chain)
        self.chains[at] = chain
        if len(chain) < self._window or chain[-1] in self._ends:
            self.ended.add(at)

    def _say(self, at: int, chain: tuple[int, ...]) -> tuple[int, ...]:
        """Guesses behind output[:at] and `chain`, as many as the window has left."""
        count = min(self._window, self._limit - at) - len(chain)
        context = (*self._prompt, *self._output[:at], *chain)
        return self._session.propose(context, count).tokens


def differences(held: RecordHeader, wanted: RecordHeader) -> list[str]:
    """What keeps a recording from going on in a file, in words. Times may differ."""
    parts = {
        "--target": (held.target, wanted.target),
        "--draft": (held.draft, wanted.draft),
        "--seed": (held.seed, wanted.seed),
        "--window": (held.window, wanted.window),
    }
    old, new = asdict(held.sampling), asdict(wanted.sampling)
    parts |= {f"--{name.replace('_', '-')}": (old[name], new[name]) for name in old}
    return [f"{name} {_shown(a)}, not {_shown(b)}" for name, (a, b) in parts.items() if a != b]


def _shown(value: object) -> str:
    if isinstance(value, TargetFacts):
        return f"{value.name} ({value.dtype})"
    return str(value)


@contextmanager
def alone_in(path: Path) -> Iterator[None]:
    """Nobody else records into the file at `path` meanwhile, which is made where there is none:
    a second one would begin it anew under the first. Raises EngineError where one is at it."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EngineError(
                f"another outrider record is writing {path.name}: name another file, or wait"
            ) from None
        yield


class RecordFile:
    """A recording that grows answer by answer; whatever stops it, whole answers stay."""

    def __init__(self, path: Path, wanted: RecordHeader) -> None:
        """Go on in the file at `path` where there is one. Raises EngineError when that was
        recorded in another way, or is none of ours."""
        self.path = path
        self.header = wanted
        self.done: set[tuple[int, tuple[int, ...]]] = set()
        """(seed, prompt) of the answers that the file holds."""
        self._begun = path.exists() and path.stat().st_size > 0
        if not self._begun:
            return
        self.header, answers, size = resume(path)
        if differs := differences(self.header, wanted):
            raise EngineError(
                f"{path.name} was recorded with {'; '.join(differs)}: name another file, or give "
                "the same options to go on"
            )
        self.done = {(answer.seed, answer.prompt) for answer in answers}
        with path.open("r+b") as file:
            file.truncate(size)

    @property
    def fresh(self) -> bool:
        """Nothing is written yet."""
        return not self._begun

    def begin(self, header: RecordHeader) -> None:
        self.header, self._begun = header, True
        self.path.write_bytes(encoded(header))

    def add(self, answer: RecordedAnswer) -> None:
        with self.path.open("ab") as file:
            file.write(encoded(answer))
        self.done.add((answer.seed, answer.prompt))
