"""What a hostile login does to the answers of another: the time between two tokens.

The victim streams one answer after the other: alone, beside one ordinary answer of another login
(which is that login's fair share), and beside a hostile login. The hostile login has, all at once:
sessions whose drafts are junk and as many as the protocol allows, a connection that never reads,
and loops that open sessions with long prompts and drop them. Rounds take turns. The hostile login
is a process of its own, of the lowest priority, on the core of the victim's edge; the verifier has
the other.

    python bench/hostile.py --rounds 3
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from outrider.bench.prompts import PROMPTS
from outrider.core.draft import Draft
from outrider.core.link import parse_link
from outrider.core.tokens import SamplingParams
from outrider.engines.load import load_vocabulary
from outrider.runtime.cores import cores
from outrider.runtime.edge import EdgeRuntime
from outrider.runtime.edgeconfig import EdgeConfig
from outrider.runtime.edgerequest import EdgeRequest
from outrider.runtime.failures import CloudError
from outrider.runtime.process import CloudProcess
from outrider.runtime.status import fetch_status
from outrider.session.schedules import MAX_WINDOW, Schedule

TOKENS = {"victim": "victim-token", "hostile": "hostile-token"}


class Junk:
    """Guesses at random, as many as are asked for."""

    name = "junk"
    model = None

    def __init__(self, vocab_size: int) -> None:
        self._ids = random.Random(1)
        self._vocab_size = vocab_size

    def session(self, *_: object, **__: object) -> Junk:
        return self

    def propose(self, _committed: Sequence[int], count: int, _stop: object = None) -> Draft:
        return Draft(tokens=tuple(self._ids.randrange(self._vocab_size) for _ in range(count)))

    def close(self) -> None:
        """Nothing is held."""


async def flood(runtime: EdgeRuntime, prompt: tuple[int, ...], schedule: Schedule) -> None:
    """Answers with junk drafts, for ever."""
    seed = 0
    while True:
        seed += 1
        params = SamplingParams(seed=seed, max_tokens=2000, ignore_eos=True)
        request = EdgeRequest(
            prompt_ids=prompt, params=params, schedule=schedule, window=MAX_WINDOW, draft_length=64
        )
        with contextlib.suppress(CloudError):
            async for _ in await runtime.stream(request):
                pass
        await asyncio.sleep(0.1)


async def drop(runtime: EdgeRuntime, prompt: tuple[int, ...]) -> None:
    """Opens sessions with a long prompt and drops them, as fast as it goes."""
    source = random.Random(2)
    while True:
        ids = tuple(source.sample(range(1000, 40000), len(prompt) * 8))
        params = SamplingParams(seed=1, max_tokens=10)
        request = EdgeRequest(prompt_ids=ids, params=params, schedule=Schedule.CLOUD_ONLY)
        with contextlib.suppress(CloudError):
            stream = await runtime.stream(request)
            await asyncio.sleep(0.02)
            stream.close()


async def deaf(runtime: EdgeRuntime, prompt: tuple[int, ...]) -> None:
    """Asks for much and never reads."""
    for seed in range(16):
        params = SamplingParams(seed=seed, max_tokens=4000, ignore_eos=True, logprobs=20)
        request = EdgeRequest(prompt_ids=prompt, params=params, schedule=Schedule.CLOUD_ONLY)
        await runtime.stream(request)
    await asyncio.sleep(0.5)
    if runtime._socket is not None:
        with contextlib.suppress(AttributeError):
            runtime._socket._raw.transport.pause_reading()
    await asyncio.sleep(1e6)


async def attack(url: str) -> None:
    """Everything at once, until the process is ended."""
    vocabulary = load_vocabulary("builtin:smollm2")
    prompt = tuple(vocabulary.tokenizer.chat([{"role": "user", "content": PROMPTS[0]}]))
    async with contextlib.AsyncExitStack() as stack:
        runtimes = [
            await stack.enter_async_context(
                EdgeRuntime(
                    EdgeConfig(url=url, token=TOKENS["hostile"]),
                    vocabulary.tokenizer,
                    Junk(vocabulary.model.info.vocab_size),  # type: ignore[arg-type]
                    context_length=vocabulary.model.info.context_length,
                )
            )
            for _ in range(6)
        ]
        reader, opener, *flooders = runtimes
        works = [deaf(reader, prompt), *(drop(opener, prompt) for _ in range(4))]
        for i, runtime in enumerate(8 * flooders):
            works.append(flood(runtime, prompt, (Schedule.FREERUN, Schedule.SYNC)[i % 2]))
        await asyncio.gather(*works)


@contextlib.asynccontextmanager
async def hostility(url: str) -> AsyncIterator[None]:
    """The hostile login at work."""
    child = await asyncio.create_subprocess_exec(
        "nice", "-n", "19", sys.executable, __file__, "--attack", url
    )  # fmt: skip
    try:
        await asyncio.sleep(8.0)
        if child.returncode is not None:
            raise SystemExit("the attack has ended by itself")
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        await child.wait()
        await asyncio.sleep(1.0)


async def gaps(
    runtime: EdgeRuntime, prompt: tuple[int, ...], args: argparse.Namespace, tokens: int = 0
) -> list[float]:
    """Seconds between the tokens of one answer."""
    request = EdgeRequest(
        prompt_ids=prompt,
        params=SamplingParams(seed=5, max_tokens=tokens or args.tokens, ignore_eos=True),
        schedule=Schedule(args.schedule),
    )
    found, last = [], None
    async for _ in await runtime.stream(request):
        now = time.monotonic()
        if last is not None:
            found.append(now - last)
        last = now
    return found[2:]


async def run(args: argparse.Namespace) -> dict[str, object]:
    vocabulary = load_vocabulary("builtin:smollm2")
    prompt = tuple(vocabulary.tokenizer.chat([{"role": "user", "content": PROMPTS[0]}]))
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens"
        tokens.write_text("".join(f"{name}:{token}\n" for name, token in TOKENS.items()))
        flags = ["--threads", "1", "--token-file", str(tokens)]
        async with CloudProcess(flags, core=cores().cloud) as cloud:
            pinned = cores().pin_edge() and cloud.pinned
            config = EdgeConfig(url=cloud.url, token=TOKENS["victim"], link=parse_link(args.link))
            waits: dict[str, list[float]] = {"alone": [], "beside one": [], "hostile": []}
            other = EdgeConfig(url=cloud.url, token=TOKENS["hostile"])
            async with (
                EdgeRuntime(config, vocabulary.tokenizer) as victim,
                EdgeRuntime(other, vocabulary.tokenizer) as polite,
            ):
                await gaps(victim, prompt, args)  # warms up
                for _ in range(args.rounds):
                    waits["alone"] += await gaps(victim, prompt, args)
                    beside = asyncio.create_task(gaps(polite, prompt[:-9], args, 100_000))
                    await asyncio.sleep(1.0)
                    waits["beside one"] += await gaps(victim, prompt, args)
                    beside.cancel()
                    await asyncio.gather(beside, return_exceptions=True)
                    async with hostility(cloud.url):
                        waits["hostile"] += await gaps(victim, prompt, args)
                        status = await fetch_status(config)
    shown = ("step_ms", "queue_ms", "sessions_per_forward", "sessions", "forwards", "rows", "fed")
    print({name: (status or {}).get(name) for name in shown}, file=sys.stderr)
    row = {
        name: {
            "p50_ms": 1e3 * statistics.median(values),
            "p95_ms": 1e3 * statistics.quantiles(values, n=20)[-1],
            "max_ms": 1e3 * max(values),
        }
        for name, values in waits.items()
    }
    for name, facts in row.items():
        print(f"{name:<8}", {k: round(v, 1) for k, v in facts.items()}, file=sys.stderr)
    p95 = {name: facts["p95_ms"] for name, facts in row.items()}
    ratios = {name: p95["hostile"] / p95[name] for name in ("alone", "beside one")}
    print(f"p95 beside the hostile login, to {ratios}", file=sys.stderr)
    return {"arguments": vars(args), "pinned": pinned, "gaps": row, "ratios": ratios}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--schedule", default="cloud-only")
    parser.add_argument("--link", default="rtt=20ms")
    parser.add_argument("--attack", metavar="URL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.attack:
        asyncio.run(attack(args.attack))
    else:
        print(json.dumps(asyncio.run(run(args))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
