"""Several answers at once: throughput of one verifier against one answer alone, and the same ids.

Each arm answers the same prompts: one after the other, all at once on one connection (one edge,
one draft engine), and all at once on as many connections (edges that share this process and one
core). Ids must equal those of the runs alone. Ratios are within one run.

    python bench/sessions.py --sessions 8 --seeds 3
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from contextlib import AsyncExitStack

from outrider.bench.live import answer_over
from outrider.bench.prompts import PROMPTS
from outrider.core.link import parse_link
from outrider.core.tokens import SamplingParams
from outrider.engines.load import load_drafter, load_vocabulary
from outrider.runtime.cores import cores
from outrider.runtime.edge import EdgeRuntime
from outrider.runtime.edgeconfig import EdgeConfig
from outrider.runtime.edgerequest import EdgeRequest
from outrider.runtime.edgestream import EdgeResult
from outrider.runtime.process import CloudProcess
from outrider.session.schedules import Schedule

SCHEDULES = (
    Schedule.CLOUD_ONLY,
    Schedule.SYNC,
    Schedule.MULTIPLEX,
    Schedule.HYBRID,
    Schedule.FREERUN,
    Schedule.COLOCATED,
)


async def together(
    runtimes: list[EdgeRuntime], requests: list[EdgeRequest], *, at_once: bool
) -> tuple[float, list[EdgeResult]]:
    """Seconds for all, and the results in order."""
    began = time.monotonic()
    if at_once:
        pairs = [(runtimes[i % len(runtimes)], r) for i, r in enumerate(requests)]
        results = list(await asyncio.gather(*(answer_over(t, r) for t, r in pairs)))
    else:
        results = [await answer_over(runtimes[0], r) for r in requests]
    return time.monotonic() - began, results


def facts(results: list[tuple[float, list[EdgeResult]]]) -> dict[str, float]:
    tokens = sum(r.generation.completion_tokens for _, part in results for r in part)
    paces = [
        r.generation.timing.tpot_s
        for _, part in results
        for r in part
        if r.generation.timing.tpot_s is not None
    ]
    return {
        "tokens_per_s": tokens / sum(seconds for seconds, _ in results),
        "ms_per_token_p50": 1e3 * statistics.median(paces),
        "ms_per_token_max": 1e3 * max(paces),
    }


async def run(args: argparse.Namespace) -> dict[str, object]:
    vocabulary = load_vocabulary("builtin:smollm2")
    drafter = load_drafter(args.draft, vocabulary, threads=1)
    link = parse_link(args.link)
    prompts = [
        tuple(vocabulary.tokenizer.chat([{"role": "user", "content": PROMPTS[i % len(PROMPTS)]}]))
        for i in range(args.sessions)
    ]
    table: dict[str, object] = {}
    flags = ["--threads", "1", "--draft", args.draft, "--target-pace", str(args.pace)]
    async with AsyncExitStack() as stack:
        cloud = await stack.enter_async_context(CloudProcess(flags, core=cores().cloud))
        pinned = cores().pin_edge() and cloud.pinned
        runtimes = [
            await stack.enter_async_context(
                EdgeRuntime(
                    EdgeConfig(url=cloud.url, link=link),
                    vocabulary.tokenizer,
                    drafter,
                    context_length=vocabulary.model.info.context_length,
                )
            )
            for _ in range(args.sessions)
        ]
        for schedule in (Schedule(name) for name in args.schedules.split(",")):
            arms: dict[str, list[tuple[float, list[EdgeResult]]]] = {
                "alone": [],
                "one connection": [],
                "a connection each": [],
            }
            different = 0
            for seed in range(-1, args.seeds):  # the first round warms up
                requests = [
                    EdgeRequest(
                        prompt_ids=prompt,
                        params=SamplingParams(
                            temperature=0.7,
                            seed=1000 * (seed + 1) + i,
                            max_tokens=args.tokens,
                            ignore_eos=True,
                        ),
                        schedule=schedule,
                        draft_length=args.k,
                    )
                    for i, prompt in enumerate(prompts)
                ]
                found = {
                    "alone": await together(runtimes[:1], requests, at_once=False),
                    "one connection": await together(runtimes[:1], requests, at_once=True),
                    "a connection each": await together(runtimes, requests, at_once=True),
                }
                if seed < 0:
                    continue
                single = [r.generation.token_ids for r in found["alone"][1]]
                for name, result in found.items():
                    arms[name].append(result)
                    different += sum(
                        a != b.generation.token_ids for a, b in zip(single, result[1], strict=True)
                    )
            rows = {name: facts(results) for name, results in arms.items()}
            base = rows["alone"]["tokens_per_s"]
            for name, row in rows.items():
                row["against_alone"] = row["tokens_per_s"] / base
                print(
                    f"{schedule.value:<11} {name:<18} {row['tokens_per_s']:6.1f} tokens/s  "
                    f"x{row['against_alone']:.2f}  ms/token p50 {row['ms_per_token_p50']:6.1f} "
                    f"max {row['ms_per_token_max']:6.1f}",
                    file=sys.stderr,
                    flush=True,
                )
            table[schedule.value] = {"arms": rows, "different": different}
            print(f"{schedule.value:<11} answers with other ids: {different}", file=sys.stderr)
    return {"arguments": vars(args), "pinned": pinned, "schedules": table}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--draft", default="small")
    parser.add_argument("--link", default="rtt=50ms,up=5mbit,down=20mbit")
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--pace", type=float, default=0.0)
    found = asyncio.run(run(parser.parse_args()))
    print(json.dumps(found))
    return int(any(s["different"] for s in found["schedules"].values()))  # type: ignore[attr-defined]


if __name__ == "__main__":
    raise SystemExit(main())
