"""A target that an unmodified server runs, next to this process.

| spec | the server |
| --- | --- |
| `openai:URL#MODEL` | anything with OpenAI's completions that takes and tells token ids |
| `vllm:URL#MODEL` | the same where a prefix cache makes k + 1 prompts cheap |
| `sglang:URL#MODEL` | SGLang's own /generate |

MODEL is a spec of the model's own (a hub id, a folder, a .gguf file, a built-in): its tokenizer is
loaded here, its weights are not. `URL?model=ID#MODEL` names one of several models served.

Rules:

* A slot is a list of ids here; the cache is the server's. Ids without rows cost no request.
* Rows hold what the server tells, -inf elsewhere (`ModelInfo.known_ids`), and NaN behind a wrong
  draft where that is not known: such a row cannot be sampled from by mistake.
* Who the server says it is (its model list; SGLang's path and version of the weights) is asked
  again every few seconds and after each new connection: another model under a running session
  ends the session with an error instead of a text of two authors. A server that is gone ends the
  sessions of that forward; the verifier goes on and asks it again for the next.
* Nothing is promised about bits: `deterministic` is False, near-ties are counted where the server
  tells more than one id.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import numpy as np

from outrider.engines.base import Block, FloatRow, IdArray, ModelInfo, ServerError
from outrider.engines.remote_http import Endpoint, RefusedError
from outrider.engines.remote_replies import Position, reading
from outrider.engines.remote_ways import Ask, FanOut, Scoring, Streaming, Way
from outrider.engines.slotbook import SlotBook, SlotRecord
from outrider.engines.tokenizer import Tokenizer

WAYS: Final = ("openai", "vllm", "sglang")
KEY_VARIABLE: Final = "OUTRIDER_SERVER_KEY"
"""Environment variable with the server's bearer token: a key on a command line can be read by
everybody on the machine."""
_NO_KEY: Final = f"put a key that it takes into {KEY_VARIABLE}"
_WHOSE: Final = "is this the address of a server of language models?"
_WEIGHTS: Final = ("model_path", "weight_version")
IDENTITY_S: Final = 5.0
"""Seconds between two looks at who the server is."""
SAMPLES: Final = (
    "Hello, world!\n\n  x = 42 + 1337  # two  blanks",
    "Gr\u00fc\u00dfe \u2014 \u00abna\u00efve\u00bb caf\u00e9 \u4f60\u597d \U0001f642",
    "def f(a, b):\n\treturn a**b / 3.14159",
)
"""Texts that two tokenizers hardly cut alike by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSpec:
    """A spec taken apart."""

    way: str
    url: str
    model: str
    """Spec of the vocabulary."""
    served: str | None
    """Which of the server's models; None: the one that is named so, or the only one."""


def parse(spec: str) -> RemoteSpec | None:
    """None for a spec of another engine. Raises ServerError for one that is half right."""
    way, colon, rest = spec.partition(":")
    if not colon or way not in WAYS:
        return None
    address, hash_sign, model = rest.partition("#")
    if not hash_sign or not model:
        raise ServerError(
            f"{spec!r} does not say whose vocabulary it is; use {way}:URL#MODEL, where MODEL is "
            "the model's own name, such as Qwen/Qwen3-0.6B or builtin:smollm2-gguf"
        )
    named = parse_qs(urlsplit(address).query)
    if set(named) - {"model"}:
        raise ServerError(f"{spec!r}: only ?model=ID may stand behind the address")
    served = named.get("model", [None])[0]
    return RemoteSpec(way=way, url=address.partition("?")[0], model=model, served=served)


class Identity:
    """Who the server is, and whether that is still so."""

    def __init__(
        self, server: Endpoint, wanted: RemoteSpec, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._server = server
        self._clock = clock
        card = chosen(server, wanted)
        self.served = str(card["id"])
        self.context_length = context_of(card)
        """Ids; None: it does not say."""
        self._weights_at = _weights_path(server) if wanted.way == "sglang" else None
        self._facts = self._lasting(card)
        self._seen_at = clock()
        self._connects = server.connects

    def check(self) -> None:
        """Look again if it is time to. ServerError when another model answers there now."""
        now = self._clock()
        if now - self._seen_at < IDENTITY_S and self._server.connects == self._connects:
            return
        cards = [c for c in models(self._server) if c.get("id") == self.served]
        if not cards or self._lasting(cards[0]) != self._facts:
            raise ServerError(
                f"{self._server.url} no longer serves the {self.served} it began with; start "
                "outrider cloud again to use what is there now"
            )
        self._seen_at, self._connects = now, self._server.connects

    def _lasting(self, card: dict[str, Any]) -> dict[str, Any]:
        """What does not change while the same model is served: no times, no permissions."""
        facts = {name: card.get(name) for name in ("id", "root", "parent", "max_model_len", "meta")}
        if self._weights_at is None:
            return facts
        told = self._server.get(self._weights_at)
        return facts | reading("model", lambda: {n: told.get(n) for n in _WEIGHTS})


def _weights_path(server: Endpoint) -> str | None:
    """Where SGLang tells which weights it runs: its card of a model says how it was named, and
    stays as it is when weights are loaded anew in place."""
    for path in ("/model_info", "/get_model_info"):  # the second: older releases
        with contextlib.suppress(ServerError):
            server.get(path)
            return path
    return None


def models(server: Endpoint) -> list[dict[str, Any]]:
    """The server's own list of models."""
    try:
        reply = server.get("/v1/models")
    except RefusedError as error:
        advice = _NO_KEY if error.status in (401, 403) else _WHOSE
        raise ServerError(f"{error}; {advice}") from error
    return reading("list of models", lambda: [dict(card) for card in reply["data"]], advice=_WHOSE)


def chosen(server: Endpoint, wanted: RemoteSpec) -> dict[str, Any]:
    """The card of the model that is meant. ServerError where that is not clear."""
    cards = {str(card.get("id")): card for card in models(server)}
    name = wanted.served or (wanted.model if wanted.model in cards else None)
    if name is None and len(cards) == 1:
        return next(iter(cards.values()))
    if name is None or name not in cards:
        there = ", ".join(sorted(cards)) or "none"
        raise ServerError(
            f"{server.url} serves: {there}; name one as {wanted.way}:URL?model=ID#{wanted.model}"
        )
    return cards[name]


def context_of(card: dict[str, Any]) -> int | None:
    """Ids the server takes, prompt and answer; None: it does not say."""
    told = card.get("max_model_len") or (card.get("meta") or {}).get("n_ctx")
    return told if isinstance(told, int) and told > 0 else None


def check_tokenizer(server: Endpoint, tokenizer: Tokenizer, served: str) -> bool:
    """Does the server cut texts into the same ids? False: it has no /tokenize to ask. ServerError
    names the first text where the two differ."""
    for sample in SAMPLES:
        told = server_ids(server, sample, served)
        if told is None:
            return False
        ours = tokenizer.encode(sample)
        # Whether a start token is put in front is the server's setting, not the vocabulary's.
        if told not in (ours, ours[1:]) and told[1:] != ours:
            raise ServerError(
                f"the server's tokenizer is another one: it makes {len(told)} ids of a text of "
                f"which this one makes {len(ours)}, or others; name the model it serves behind '#'"
            )
    return True


def server_ids(server: Endpoint, text: str, served: str) -> list[int] | None:
    """Ids the server makes of a text, by /tokenize; None where it has none."""
    body = {"model": served, "prompt": text, "content": text, "add_special_tokens": False}
    try:
        reply = server.post("/tokenize", body)
    except ServerError:
        return None
    told = reply.get("tokens") if isinstance(reply, dict) else None
    good = isinstance(told, list) and all(isinstance(i, int) for i in told)
    return told if good else None


class RemoteModel(SlotBook[SlotRecord]):
    """A server behind the LanguageModel protocol. See the module docstring."""

    def __init__(
        self,
        way: Way,
        *,
        name: str,
        tokenizer: Tokenizer,
        context_length: int,
        max_slots: int,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`check`: asked before every forward whether the server is still the same one."""
        width = tokenizer.vocab_size
        super().__init__(max_slots=max_slots, context_length=context_length, id_count=width)
        self._way = way
        self._check_server = check
        self._passes = 0
        self._info = ModelInfo(
            name=name,
            vocab_size=width,
            logits_width=width,
            context_length=context_length,
            fingerprint=tokenizer.fingerprint,
            dtype="the server's own",
            device="another process",
            deterministic=False,
            eos_token_ids=tokenizer.eos_token_ids,
            known_ids=way.known_ids,
            stepwise=way.stepwise,
            rules=way.rules,
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def support(self) -> IdArray | None:
        return None

    @property
    def passes(self) -> int:
        """Forwards that asked the server something; it does not tell its own."""
        return self._passes

    def close(self, slot: int) -> None:
        super().close(slot)
        self._way.forget(slot)

    def _compute(self, blocks: Sequence[Block], slots: Sequence[SlotRecord]) -> list[FloatRow]:
        asks = [_ask(block, slot) for block, slot in zip(blocks, slots, strict=True) if block.rows]
        told = iter(self._told(asks))
        return [
            self._rows(next(told), block.rows) if block.rows else self._rows([], 0)
            for block in blocks
        ]

    def _told(self, asks: Sequence[Ask]) -> list[list[Position]]:
        if not asks:
            return []
        self._check_server()
        self._passes += 1
        return self._way.rows(asks)

    def _rows(self, positions: Sequence[Position], count: int) -> FloatRow:
        rows = np.full((count, self._info.vocab_size), np.nan, dtype=np.float32)
        for row, position in zip(rows, positions, strict=False):
            self._fill(row, position)
        return rows

    def _fill(self, row: FloatRow, position: Position) -> None:
        row[:] = -np.inf
        ids = [token for token, _ in position.top]
        if position.token is not None:
            ids.append(position.token)
        if max(ids) >= len(row):
            raise ServerError(
                f"the server told id {max(ids)} of a vocabulary of {len(row)}: another model"
            )
        for token, logprob in position.top:
            row[token] = logprob
        if self._way.known_ids == 1 and position.token is not None:
            # Its choice at temperature 0, whatever the rounding of the numbers beside it says.
            row[position.token] = np.nextafter(row.max(), np.float32(1.0)) if position.top else 0.0

    def _new(self) -> SlotRecord:
        return SlotRecord()

    def _copy(self, source: SlotRecord, target: SlotRecord, length: int) -> None:
        """The ids are all there is."""


def _ask(block: Block, slot: SlotRecord) -> Ask:
    ids = (*slot.ids, *block.tokens)
    head = len(ids) - block.rows + 1
    return Ask(slot=block.slot, context=ids[:head], drafts=ids[head:])


def make_way(way: str, server: Endpoint, served: str) -> Way:
    if way == "sglang":
        return Scoring(server)
    return FanOut(server, served) if way == "vllm" else Streaming(server, served)
