"""What a live server can do for a verifier, asked and not believed.

Each finding rests on answers to a few short requests; what a server says of itself is shown and
decides nothing. Times are of this moment and this machine: they say what grows with what.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from outrider.engines.base import ServerError
from outrider.engines.remote import RemoteSpec, chosen, context_of, server_ids
from outrider.engines.remote_http import Endpoint
from outrider.engines.remote_replies import Position, positions_of, reading
from outrider.engines.remote_ways import COMPLETIONS, NAMED, NEUTRAL, TOP, Ask, FanOut, Scoring

TEXT: Final = "The sky is blue because the light of the sun"
BLOCK: Final = 128
"""Ids of the widest block of a cache seen: vLLM's on a CPU; on a GPU it has 16."""
LONG: Final = 6 * BLOCK + 1
"""Ids of a long prompt: seconds without a cache."""
SHORT: Final = BLOCK + 1
"""Behind whole blocks both leave one id to compute: what differs in time is the context's."""
SHARED: Final = 320
"""Ids behind which several rows are asked for: half a block more than whole ones, as contexts are
on average, since each row computes those anew; and no minutes where it computes all of them."""
_IDS: Final = range(256, 1280)
"""What made-up texts are of: in every vocabulary, and no control tokens in those seen."""
STEPS: Final = 8
"""Tokens of a greedy answer that is asked for again."""
DRAWS: Final = 12
"""Tokens of a sampled answer: two with other seeds hardly agree on as many."""
REPEATS: Final = 3
DEAR: Final = 3.0
"""Five rows that take more than this many times one bring less than they cost, where two or three
of four guesses stand."""
FLAT: Final = 2.0
"""A request behind a cached context may take so many times one behind a short one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One question and what the server's answers say."""

    question: str
    good: bool | None
    """None: neither good nor bad, or it could not be found out."""
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Usable:
    """Whether a spec of engines.remote works with this server."""

    way: str
    usable: bool
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """Everything that was found."""

    url: str
    model: str
    findings: tuple[Finding, ...]
    ways: tuple[Usable, ...]

    @property
    def usable(self) -> bool:
        return any(way.usable for way in self.ways)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cache:
    """One prompt that is sent again."""

    flat: bool
    """A long one takes as long as a short one."""
    row: float
    """Seconds of a short one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Together:
    """Five rows of one request beside one."""

    times: float
    """How many times as long they take."""
    shared: bool
    """The first five did not take much longer than the next."""
    rest: bool
    """A row computes a part of its context."""
    whole: bool
    """A row computes all of it, as far as is known."""


def probe(
    server: Endpoint,
    served: str | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
    seed: int | None = None,
) -> ProbeReport:
    """Ask a server. ServerError when nobody answers there, or when it is unclear which model is
    meant; everything else is a finding. `seed`: of the texts that its cache is asked about; None:
    others each time, since a server may still hold those of the last probe."""
    wanted = RemoteSpec(way="openai", url=server.url, model="MODEL", served=served)
    card = chosen(server, wanted)
    return _Probe(server, card, clock, random.Random(seed)).run()


class _Probe:
    def __init__(
        self,
        server: Endpoint,
        card: dict[str, Any],
        clock: Callable[[], float],
        source: random.Random,
    ) -> None:
        self._server = server
        self._source = source
        self._card = card
        self._model = str(card["id"])
        self._clock = clock
        self._findings: list[Finding] = []
        told = server_ids(server, TEXT, self._model)
        self._note(
            "tokenizer can be checked",
            bool(told) or None,
            "/tokenize answers" if told else "no /tokenize: a wrong vocabulary goes unnoticed",
        )
        self._ids = tuple(told or range(5, 17))

    def run(self) -> ProbeReport:
        greedy = self._try("token ids in and out", self._greedy)
        if greedy:
            self._try("greedy answer from its middle", lambda: self._middle(greedy))
            self._try("fields honoured", lambda: self._fields(greedy))
        tells = self._try("likeliest ids told", self._likeliest)
        if tells:
            self._try("log-probabilities", self._temperature)
        cached = self._try("prefix cache", self._cache)
        together = self._try("several prompts at once", lambda: self._together(tells or 1, cached))
        scored = self._try("scoring of drafts (/generate)", self._scoring)
        ways = (self._openai(greedy), self._vllm(tells, together), self._sglang(scored))
        return ProbeReport(
            url=self._server.url, model=self._model, findings=tuple(self._findings), ways=ways
        )

    def _note(self, question: str, good: bool | None, answer: str) -> None:  # noqa: FBT001
        self._findings.append(Finding(question=question, good=good, answer=answer))

    def _try(self, question: str, ask: Callable[[], Any]) -> Any:
        """What `ask` finds; None, and a finding that says why, where the server cannot."""
        try:
            return ask()
        except ServerError as error:
            self._note(question, False, str(error).removeprefix(self._server.url))
            return None

    def _complete(self, prompt: Any, **more: Any) -> list[Position]:
        body = {"model": self._model, "prompt": prompt, "stream": False, "temperature": 0.0}
        reply = self._server.post(COMPLETIONS, body | NEUTRAL | NAMED | {"logprobs": 1} | more)
        return positions_of(reading("reply", lambda: reply["choices"][0]))

    def _tokens(self, prompt: Any, count: int, **more: Any) -> tuple[int, ...]:
        return tuple(p.token or 0 for p in self._complete(prompt, max_tokens=count, **more))

    # ------------------------------------------------------------ findings

    def _greedy(self) -> tuple[int, ...]:
        first = self._tokens(self._ids, STEPS)
        if not first:
            raise ServerError("an answer without a token id")
        self._note("token ids in and out", True, f"{len(first)} ids behind {len(self._ids)}")
        same = self._tokens(self._ids, STEPS) == first
        words = "the same ids twice" if same else "other ids the second time"
        self._note("greedy answer repeats", same, words)
        return first

    def _middle(self, greedy: tuple[int, ...]) -> None:
        half = len(greedy) // 2
        rest = self._tokens((*self._ids, *greedy[:half]), len(greedy) - half)
        same = rest == greedy[half:]
        words = (
            "goes on with the same ids"
            if same
            else (
                "goes on with other ids: near-ties fall either way, and an answer may differ from "
                "the server's own one there"
            )
        )
        self._note("greedy answer from its middle", same, words)

    def _fields(self, greedy: tuple[int, ...]) -> None:
        def drawn(**more: Any) -> tuple[int, ...]:
            return self._tokens(self._ids, DRAWS, **{"temperature": 1.0, **more})

        banned = drawn(temperature=0.0, logit_bias={str(greedy[0]): -100})
        honoured = {
            "temperature": len({drawn(temperature=1.5, seed=s) for s in (1, 2, 3)}) > 1,
            "seed": drawn(seed=7) == drawn(seed=7),
            "top_k": drawn(top_k=1, temperature=1.5)[: len(greedy)] == greedy,
            "logit_bias": banned[:1] != greedy[:1],
        }
        dropped = [name for name, kept in honoured.items() if not kept]
        words = f"dropped: {', '.join(dropped)}" if dropped else f"all of {', '.join(honoured)}"
        # None of them is relied on: filters and noise are the verifier's.
        self._note("fields honoured", None if dropped else True, words)

    def _likeliest(self) -> int:
        position = self._complete(self._ids, max_tokens=1, logprobs=TOP)[0]
        told = len(position.top)
        self._note("likeliest ids told", told >= TOP, f"{told} of {TOP} asked for")
        return told if told >= TOP else 0

    def _temperature(self) -> None:
        gaps = []
        for temperature in (1.0, 0.5):
            top = self._complete(self._ids, max_tokens=1, logprobs=TOP, temperature=temperature)[
                0
            ].top
            gaps.append({token: top[0][1] - logprob for token, logprob in top})
        common = max(set(gaps[0]) & set(gaps[1]), key=lambda i: gaps[0][i])
        factor = gaps[1][common] / gaps[0][common] if gaps[0][common] else 1.0
        after = factor > 1.5
        cut = self._complete(self._ids, max_tokens=1, logprobs=TOP, temperature=1.0, top_k=2)[0]
        filtered = sum(p > -1e3 for _, p in cut.top) <= 3
        self._note(
            "log-probabilities",
            True,
            f"{'after' if after else 'before'} temperature, {'after' if filtered else 'before'} "
            "top-k; at temperature 1 without filters, as asked for here, either is the model's own",
        )

    def _cache(self) -> _Cache:
        room = (context_of(self._card) or LONG + BLOCK) - 1
        long = self._made_up(min(LONG, (room - 1) // BLOCK * BLOCK + 1))
        cold = self._seconds(long, repeats=1)
        warm = self._seconds(long)
        short = self._seconds(long[:SHORT])
        flat = warm <= FLAT * short
        self._note(
            "prefix cache",
            flat,
            f"{len(long)} ids {1e3 * cold:.0f} ms, again {1e3 * warm:.0f} ms; {SHORT} ids "
            f"{1e3 * short:.0f} ms: "
            + ("flat in the context" if flat else "grows with the context"),
        )
        return _Cache(flat=flat, row=short)

    def _seconds(self, ids: tuple[int, ...], *, repeats: int = REPEATS) -> float:
        spent = []
        for _ in range(repeats):
            began = self._clock()
            self._complete(ids, max_tokens=1)
            spent.append(self._clock() - began)
        return min(spent)

    def _together(self, top: int, cached: _Cache | None) -> _Together:
        """Rounds of an answer, each with other guesses behind a context that grows: what was asked
        once says nothing about it, since a server may have that very prompt in its cache."""
        way = FanOut(self._server, self._model, top=top)
        context = self._made_up(SHARED)
        spent: dict[int, list[float]] = {1: [], 5: []}
        for rows in (1, 1, 1, 5, 5, 5):
            drafts = self._made_up(rows - 1)
            began = self._clock()
            way.rows([Ask(slot=0, context=context, drafts=drafts)])
            spent[rows].append(1e3 * (self._clock() - began))
            context += self._made_up(1)
        one, five = min(spent[1][1:]), min(spent[5][1:])
        shared = spent[5][0] <= DEAR * five
        words = f"behind {SHARED} ids one row {one:.0f} ms, five rows {five:.0f} ms"
        if not shared:
            words += (
                f", the first time {spent[5][0]:.0f} ms: prompts of a request do not share the "
                "cache, each takes its context in by itself"
            )
        rest = cached is not None and cached.flat and one > DEAR * 1e3 * cached.row
        if rest:
            words += (
                ": its cache holds whole blocks, and every row computes what a context has behind "
                "the last one"
            )
        self._note("several prompts at once", shared, words)
        whole = cached is None or not cached.flat
        return _Together(times=max(five / one, 1.0), shared=shared, rest=rest, whole=whole)

    def _made_up(self, length: int) -> tuple[int, ...]:
        """Ids of a text nobody wrote."""
        return tuple(self._source.choices(_IDS, k=length))

    def _scoring(self) -> bool:
        ask = Ask(slot=0, context=self._ids, drafts=(5, 6))
        Scoring(self._server).rows([ask])
        self._note("scoring of drafts (/generate)", True, f"{TOP} likeliest ids a draft")
        return True

    # ------------------------------------------------------------ verdicts

    def _openai(self, greedy: Any) -> Usable:
        if not greedy:
            return Usable(way="openai", usable=False, words="it does not tell token ids")
        words = "temperature 0; guesses save the server nothing"
        return Usable(way="openai", usable=True, words=words)

    def _vllm(self, tells: Any, together: _Together | None) -> Usable:
        if not tells or together is None:
            words = f"it needs a list of prompts and {TOP} likeliest ids"
            return Usable(way="vllm", usable=False, words=words)
        words = f"temperature 0, or any with top-k from 1 to {TOP}; every rule"
        if together.whole:
            words += "; exact but slow, since each row costs the whole context"
        elif together.times > DEAR:
            words += f"; five rows take {together.times:.1f} times one, so guesses hardly pay"
        if together.rest:
            words += "; smaller blocks of its cache make rows cheaper (vLLM: --block-size)"
        if not (together.whole or together.shared):
            words += "; a row that is new takes its whole context in"
        return Usable(way="vllm", usable=True, words=words)

    def _sglang(self, scored: Any) -> Usable:
        if not scored:
            return Usable(way="sglang", usable=False, words="it does not score drafts")
        words = f"temperature 0, or any with top-k from 1 to {TOP}; every rule"
        return Usable(way="sglang", usable=True, words=words)
