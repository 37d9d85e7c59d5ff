"""A verifier and edges on real sockets in one process, with toy models that remember rows."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np

from outrider.core.tokens import Origin, Rule, SamplingParams
from outrider.engines.base import Block, FloatRow
from outrider.engines.desk import SlotDesk
from outrider.engines.drafters import Drafter, ModelDrafter
from outrider.engines.tokenizer import ByteTokenizer
from outrider.engines.toy import Law, ToyModel, blend_law, random_law
from outrider.runtime.cloud import CloudConfig, CloudServer
from outrider.runtime.edge import EdgeRuntime
from outrider.runtime.edgeconfig import EdgeConfig
from outrider.runtime.edgerequest import EdgeRequest
from outrider.runtime.edgestream import EdgeResult, EdgeStream
from outrider.runtime.local import GenerationRequest, GenerationResult, LocalGenerator
from outrider.session.schedules import Schedule
from outrider.session.service import ServiceConfig
from toys import remember

T = TypeVar("T")

TOKENIZER: Final = ByteTokenizer()
WIDTH: Final = TOKENIZER.vocab_size
PROMPT: Final = (72, 105, 33)
PATIENCE: Final = 60.0
"""Seconds after which a test counts as hung, on the busiest machine."""
SCHEDULES: Final = tuple(s for s in Schedule if s is not Schedule.EDGE_ONLY)


def _words(seed: int) -> Law:
    """Lower-case letters and blanks; an end now and then."""
    inner = random_law(seed, WIDTH)
    mask = np.full(WIDTH, -np.inf, dtype=np.float32)
    mask[[*range(ord("a"), ord("z") + 1), ord(" "), ByteTokenizer.END]] = 0.0
    mask[ByteTokenizer.END] = -4.0
    return lambda context: (inner(context) + mask).astype(np.float32)


TARGET: Final = remember(_words(1), 2)


@functools.cache
def draft_law(share: float) -> Law:
    return remember(blend_law(TARGET, remember(_words(2), 2), share, 3), 3)


def toy(law: Law, **changes: Any) -> ToyModel:
    facts: dict[str, Any] = {
        "vocab_size": WIDTH,
        "eos_token_ids": TOKENIZER.eos_token_ids,
        "fingerprint": TOKENIZER.fingerprint,
        "context_length": 4096,
    }
    return ToyModel(law, **(facts | changes))


class Watched(ToyModel):
    """A toy that can be told to wait, or to fail, before a forward."""

    def __init__(self, law: Law, **changes: Any) -> None:
        model = toy(law, **changes)
        self.__dict__.update(model.__dict__)
        self.before: Callable[[Sequence[Block]], None] = lambda _blocks: None

    def forward(self, blocks: Sequence[Block]) -> list[FloatRow]:
        self.before(blocks)
        return super().forward(blocks)


def drafter(share: float = 0.3, **changes: Any) -> ModelDrafter:
    return ModelDrafter("toy-draft", model=toy(draft_law(share), **changes))


def alone(params: SamplingParams, prompt: tuple[int, ...] = PROMPT) -> GenerationResult:
    """What the target says by itself."""
    request = GenerationRequest(prompt_ids=prompt, params=params, draft_length=0)
    return LocalGenerator(toy(TARGET), TOKENIZER).generate(request)


def run(work: Coroutine[Any, Any, T], *, patience: float = PATIENCE) -> T:
    """A test's coroutine, which must leave no task behind."""

    async def whole() -> T:
        before = asyncio.all_tasks()
        result = await asyncio.wait_for(work, patience)
        left = asyncio.all_tasks() - before
        await asyncio.wait(left, timeout=5.0) if left else None
        assert not [t.get_name() for t in left if not t.done()], "tasks outlive their owner"
        return result

    return asyncio.run(whole())


async def until(true: Callable[[], bool]) -> None:
    """Wait for a condition; a test that hangs here fails by its own time limit."""
    while not true():
        await asyncio.sleep(0.005)


def server(
    model: ToyModel | None = None,
    *,
    own_draft: Drafter | None = None,
    service: dict[str, Any] | None = None,
    **config: Any,
) -> CloudServer:
    target = model or toy(TARGET)
    info = target.info
    facts: dict[str, Any] = {
        "vocab_size": info.vocab_size,
        "context_length": info.context_length,
        "eos": info.eos_token_ids,
        "deterministic": True,
    }
    return CloudServer(
        SlotDesk(target, own_draft),
        TOKENIZER,
        CloudConfig(**({"port": 0} | config)),
        service=ServiceConfig(**(facts | (service or {}))),
    )


def edge(
    port: int, draft: Drafter | None = None, *, context_length: int = 4096, **config: Any
) -> EdgeRuntime:
    url = {"url": f"ws://127.0.0.1:{port}"}
    return EdgeRuntime(
        EdgeConfig(**(url | config)), TOKENIZER, draft, context_length=context_length
    )


@dataclass(slots=True)
class Heard:
    """What the caller of one answer saw."""

    result: EdgeResult
    tokens: tuple[int, ...]
    text: str
    origins: tuple[Origin, ...]


@dataclass(slots=True)
class Pair:
    """One verifier, one edge."""

    cloud: CloudServer
    edge: EdgeRuntime
    target: ToyModel
    draft: ToyModel | None
    own_draft: ToyModel | None
    others: list[EdgeRuntime] = field(default_factory=list)

    async def ask(self, request: EdgeRequest) -> Heard:
        return await hear(await self.edge.stream(request))

    async def idle(self) -> None:
        """Wait until both sides hold nothing."""
        await until(lambda: not any(self.held))

    async def idle_cloud(self) -> None:
        """Wait until the cloud holds no session; `pair` looks at the rest."""
        await until(lambda: not self.cloud.service.sessions)

    @property
    def held(self) -> tuple[int, ...]:
        """Sessions by each of their tables, desk slots and cache slots in the cloud; sessions and
        slots at the edge."""
        service = self.cloud.service
        return (
            service.sessions,
            len(service._by_uid),
            len(service._running),
            sum(len(peer.keys) for peer in service._peers.values()),
            self.cloud.desk.held,
            self.target.open_slots - self.cloud.desk.parked,
            self.own_draft.open_slots if self.own_draft else 0,
            self.edge._client.sessions,
            len(self.edge._running),
            self.draft.open_slots if self.draft else 0,
        )


@contextlib.asynccontextmanager
async def pair(
    *,
    model: ToyModel | None = None,
    draft: ModelDrafter | None = None,
    service: dict[str, Any] | None = None,
    cloud: dict[str, Any] | None = None,
    **config: Any,
) -> AsyncIterator[Pair]:
    """A verifier with a draft of its own, and an edge with one. `config`: of the edge."""
    target = model or toy(TARGET)
    guess = draft or drafter()
    own = drafter()
    async with server(target, own_draft=own, service=service, **(cloud or {})) as verifier:
        async with edge(verifier.port, guess, **config) as runtime:
            both = Pair(verifier, runtime, target, guess.model, own.model)  # type: ignore[arg-type]
            yield both
        await until(lambda: not verifier.service.sessions)
    assert not any(both.held), "something is held after both ends closed"


def ask(
    params: SamplingParams,
    schedule: Schedule = Schedule.FREERUN,
    *,
    rule: Rule = Rule.COUPLED,
    prompt: tuple[int, ...] = PROMPT,
    **how: Any,
) -> EdgeRequest:
    return EdgeRequest(prompt_ids=prompt, params=params, schedule=schedule, rule=rule, **how)


async def hear(stream: EdgeStream) -> Heard:
    """Listen to the end."""
    tokens: list[int] = []
    text: list[str] = []
    origins: list[Origin] = []
    async for step in stream:
        assert len(step.tokens) == len(step.origins) == len(step.pieces)
        tokens += step.tokens
        text.append(step.text)
        origins += step.origins
    return Heard(stream.result, tuple(tokens), "".join(text), tuple(origins))


def same(heard: Heard, reference: GenerationResult) -> None:
    """Identity (I1), and that the stream, the result and the text tell the same story (I2)."""
    got = heard.result.generation
    assert heard.tokens == got.token_ids == reference.token_ids
    assert heard.text == got.text == reference.text
    assert got.finish_reason == reference.finish_reason
