"""What the HTTP gateway adds to an answer: the same one asked of the edge and over HTTP, in turn.

Verifier, edge, gateway and client share one process and one event loop, so the client's own work
counts against the gateway. The target is a toy; `--pace` makes each of its forwards take so long.
First token: from asking to the first round, or to the first bytes of the body. Per token: from
there to the last, by tokens. Processor time per token has no pace in it.
Wall time needs a quiet machine.

    python bench/gateway.py [--answers 200] [--tokens 64] [--pace 5] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import time
from dataclasses import dataclass

import numpy as np

from outrider.core.tokens import SamplingParams
from outrider.engines.desk import SlotDesk
from outrider.engines.tokenizer import ByteTokenizer
from outrider.engines.toy import ToyModel
from outrider.gateway.app import GatewayConfig, make_app
from outrider.gateway.server import GatewayServer
from outrider.gateway.wishes import Manner
from outrider.runtime.cloud import CloudConfig, CloudServer
from outrider.runtime.edge import EdgeRuntime
from outrider.runtime.edgeconfig import EdgeConfig
from outrider.runtime.edgerequest import EdgeRequest
from outrider.session.schedules import Schedule

WARM_UP = 5
"""Answers of each kind that are not counted."""
PROMPT = "Why is the sky blue?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Seconds of one answer."""

    first: float
    each: float
    cpu: float
    """Of the whole process, by tokens."""


class Watch:
    """Notes when the first and the last part of an answer came."""

    def __init__(self) -> None:
        self._cpu = time.process_time()
        self._began = self._first = self._last = time.perf_counter()
        self._parts = 0

    def part(self) -> None:
        self._last = time.perf_counter()
        if not self._parts:
            self._first = self._last
        self._parts += 1

    def answer(self, tokens: int) -> Answer:
        return Answer(
            first=self._first - self._began,
            each=(self._last - self._first) / (tokens - 1),
            cpu=(time.process_time() - self._cpu) / tokens,
        )


async def plain(edge: EdgeRuntime, seed: int, tokens: int) -> Answer:
    watch = Watch()
    params = SamplingParams(seed=seed, max_tokens=tokens, ignore_eos=True)
    ids = tuple(edge.tokenizer.encode(PROMPT))
    request = EdgeRequest(prompt_ids=ids, params=params, schedule=Schedule.CLOUD_ONLY)
    async for _ in await edge.stream(request):
        watch.part()
    return watch.answer(tokens)


async def over_http(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seed: int, tokens: int
) -> Answer:
    watch = Watch()
    body = {"model": "toy", "prompt": PROMPT, "max_tokens": tokens, "seed": seed, "stream": True}
    data = json.dumps(body | {"ignore_eos": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    await reader.readuntil(b"\r\n\r\n")
    chunks = 0
    while True:
        size = int(await reader.readline(), 16)
        part = await reader.readexactly(size + 2)
        if not size:
            break
        if b'"finish_reason":null' in part:
            chunks += part.count(b"data: ")
            watch.part()
    assert chunks == tokens, f"{chunks} chunks of {tokens} tokens"
    return watch.answer(tokens)


async def measure(answers: int, tokens: int, pace: float) -> list[tuple[Answer, Answer]]:
    """Pairs of the same answer, first as it is, then over HTTP."""
    tokenizer = ByteTokenizer()
    row = np.zeros(tokenizer.vocab_size, dtype=np.float32)
    row[:97] = row[123:] = -np.inf  # letters only: a token is a piece of text
    target = ToyModel(
        lambda _context: row,
        vocab_size=tokenizer.vocab_size,
        fingerprint=tokenizer.fingerprint,
        eos_token_ids=tokenizer.eos_token_ids,
    )
    found: list[tuple[Answer, Answer]] = []
    async with (
        CloudServer(SlotDesk(target), tokenizer, CloudConfig(port=0, pace=pace)) as cloud,
        EdgeRuntime(EdgeConfig(url=f"ws://127.0.0.1:{cloud.port}"), tokenizer) as edge,
    ):
        manner = Manner(schedule=Schedule.CLOUD_ONLY, drafts=False)
        app = make_app(edge, GatewayConfig(models=("toy",), manner=manner))
        async with GatewayServer(app, "127.0.0.1", 0) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            for seed in range(answers + WARM_UP):
                pair = (
                    await plain(edge, seed, tokens),
                    await over_http(reader, writer, seed, tokens),
                )
                found.append(pair)
            writer.close()
        app.state.gateway.lanes.close()
    return found[WARM_UP:]


def report(pairs: list[tuple[Answer, Answer]]) -> dict[str, dict[str, float]]:
    """Milliseconds, medians, and the 99th percentile of `added`: the differences of pairs."""
    facts = {}
    for name in ("first", "each", "cpu"):
        both = [(1e3 * getattr(a, name), 1e3 * getattr(b, name)) for a, b in pairs]
        added = [b - a for a, b in both]
        facts[name] = {
            "edge": round(statistics.median(a for a, _ in both), 4),
            "http": round(statistics.median(b for _, b in both), 4),
            "added": round(statistics.median(added), 4),
            "added_p99": round(float(np.percentile(added, 99)), 4),
        }
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pace", type=float, default=5.0, help="ms of a forward")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    pairs = asyncio.run(measure(options.answers, options.tokens, options.pace / 1e3))
    facts = report(pairs)
    if options.json:
        machine = f"{platform.machine()}, Python {platform.python_version()}"
        print(json.dumps(facts | vars(options) | {"machine": machine}))
        return
    print(f"{options.answers} answers of {options.tokens} tokens, {options.pace:g} ms a forward")
    print(f"{'ms, p50':24}{'edge':>10}{'over HTTP':>12}{'added':>10}{'p99':>10}")
    for name, text in (
        ("first", "first token"),
        ("each", "per token"),
        ("cpu", "processor, per token"),
    ):
        row = facts[name]
        print(
            f"{text:24}{row['edge']:10.3f}{row['http']:12.3f}{row['added']:10.3f}{row['added_p99']:10.3f}"
        )


if __name__ == "__main__":
    main()
