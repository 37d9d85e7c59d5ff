"""Two processes, many prompts: ids over the network against ids of the target alone, here.

Each prompt is answered by the target in this process without any draft, and through a verifier
process in a random schedule over a random link. Every answer must be identical. Exit code 1 if
one is not.

    OUTRIDER_DATA=... python bench/identity_network.py --prompts 100 --tokens 16
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time

from prompts import mixed

from outrider.bench.live import answer_over
from outrider.core.link import parse_link
from outrider.core.tokens import SamplingParams
from outrider.engines.load import load_drafter, load_target
from outrider.runtime.edge import EdgeRuntime
from outrider.runtime.edgeconfig import EdgeConfig
from outrider.runtime.edgerequest import EdgeRequest
from outrider.runtime.local import GenerationRequest, LocalGenerator
from outrider.runtime.process import CloudProcess
from outrider.session.schedules import Schedule

SCHEDULES = (Schedule.SYNC, Schedule.STREAM, Schedule.FREERUN, Schedule.COLOCATED)
LINKS = ("rtt=5ms", "rtt=50ms,up=1mbit,down=10mbit,jitter=10ms", "rtt=120ms,loss=1%")


async def run(args: argparse.Namespace) -> dict[str, object]:
    rng = random.Random(args.seed)
    target = load_target("builtin:smollm2", threads=1)
    alone = LocalGenerator(target.model, target.tokenizer)
    drafter = load_drafter(args.draft, target, threads=1)
    began = time.monotonic()
    wrong: list[dict[str, object]] = []
    done = tokens = unconfirmed = 0
    by_schedule: dict[str, int] = {}
    async with CloudProcess(["--threads", "1", "--draft", args.draft]) as cloud:
        runtimes = [
            EdgeRuntime(EdgeConfig(url=cloud.url, link=parse_link(text)), target.tokenizer, drafter)
            for text in LINKS
        ]
        try:
            for task, text in mixed(4 * args.prompts):
                ids = tuple(target.tokenizer.chat([{"role": "user", "content": text}]))
                if len(ids) > args.prompt_tokens:
                    continue
                params = SamplingParams(
                    temperature=(0.0, 0.7, 1.0)[done % 3],
                    seed=rng.randrange(2**40),
                    max_tokens=args.tokens,
                )
                request = GenerationRequest(prompt_ids=ids, params=params, draft_length=0)
                plain = await asyncio.to_thread(alone.generate, request)
                schedule = SCHEDULES[done % len(SCHEDULES)]
                result = await answer_over(
                    runtimes[done % len(runtimes)],
                    EdgeRequest(
                        prompt_ids=ids,
                        params=params,
                        schedule=schedule,
                        draft_length=rng.randint(1, 8),
                        window=rng.randint(1, 24),
                    ),
                )
                by_schedule[schedule.value] = by_schedule.get(schedule.value, 0) + 1
                tokens += plain.completion_tokens
                unconfirmed += not result.confirmed
                if result.generation.token_ids != plain.token_ids:
                    wrong.append({"task": task, "schedule": schedule.value, "seed": params.seed})
                done += 1
                if done % 10 == 0:
                    left = (time.monotonic() - began) / done * (args.prompts - done)
                    print(
                        f"{done}/{args.prompts}, {len(wrong)} wrong, {left:.0f} s left",
                        file=sys.stderr,
                        flush=True,
                    )
                if done == args.prompts:
                    break
        finally:
            for runtime in runtimes:
                await runtime.close()
    return {
        "prompts": done,
        "tokens": tokens,
        "by_schedule": by_schedule,
        "different": len(wrong),
        "unconfirmed": unconfirmed,
        "cases": wrong,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=200, help="skip longer prompts")
    parser.add_argument("--draft", default="lookup+small")
    parser.add_argument("--seed", type=int, default=1)
    facts = asyncio.run(run(parser.parse_args()))
    print(json.dumps(facts))
    return 1 if facts["different"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
