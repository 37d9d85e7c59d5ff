"""Ways to send drafts and rejections over lopsided links, for 1 and for many requests on one edge.

AsymSpec's table and its ablations, with the fair baseline beside them: most of what the paper gains
comes from sending ids and q(x) instead of whole rows of q, which others do as well. One edge with a
real draft, one verifier, links shaped in user space. `full q` is ids and q(x) whose frames travel
behind the bytes that float16 rows of q would have. All arms answer the same prompts; warm-up
excluded; arms take turns.

    python bench/links.py --links strong,weak,.5/5,.1/2 --requests 1,8
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import outrider.runtime.edge as edge_module
from outrider.bench.live import answer_over
from outrider.bench.prompts import PROMPTS
from outrider.core.link import parse_link
from outrider.core.residual import TopKReply
from outrider.core.tokens import Rule, SamplingParams
from outrider.engines.load import load_drafter, load_vocabulary
from outrider.proto.codec import decode
from outrider.proto.messages import Draft
from outrider.runtime.cores import cores
from outrider.runtime.edge import EdgeRuntime
from outrider.runtime.edgeconfig import EdgeConfig
from outrider.runtime.edgerequest import EdgeRequest
from outrider.runtime.process import CloudProcess
from outrider.runtime.socket import FrameSocket
from outrider.session.schedules import Schedule

VOCABULARY = 49152
HALF = 2
"""Bytes of a float16."""


class FullRows(FrameSocket):
    """Each drafted token travels behind a whole row of q."""

    def send(self, frame: bytes) -> None:
        message = decode(frame)
        if isinstance(message, Draft) and self._up is not None:
            self._up.occupy(len(message.tokens) * VOCABULARY * HALF)
        super().send(frame)


@dataclass(frozen=True)
class Arm:
    """A way to speculate."""

    wishes: dict[str, Any] = field(default_factory=dict)
    socket: Callable[..., FrameSocket] = FrameSocket


RATIO: dict[str, Any] = {"rule": Rule.RATIO}
ARMS = {
    "cloud-only": Arm({"schedule": Schedule.CLOUD_ONLY}),
    "colocated": Arm({"schedule": Schedule.COLOCATED}),
    "full q, sync": Arm({**RATIO, "schedule": Schedule.SYNC}, FullRows),
    "q(x), sync": Arm({**RATIO, "schedule": Schedule.SYNC}),
    "q(x), top-K": Arm({**RATIO, "schedule": Schedule.SYNC, "reply": TopKReply(k=64, budget=1.0)}),
    "q(x), multiplex": Arm({**RATIO, "schedule": Schedule.MULTIPLEX}),
    "coupled, sync": Arm({"schedule": Schedule.SYNC}),
    "coupled, multiplex": Arm({"schedule": Schedule.MULTIPLEX}),
    "coupled, hybrid": Arm({"schedule": Schedule.HYBRID}),
    "coupled, freerun": Arm({"schedule": Schedule.FREERUN}),
}


async def measure(
    runtime: EdgeRuntime,
    arm: Arm,
    prompts: list[tuple[int, ...]],
    args: argparse.Namespace,
    seed: int,
) -> tuple[float, int, int, int]:
    """Seconds, tokens and bytes up and down of all prompts answered at once."""
    requests = [
        EdgeRequest(
            prompt_ids=prompt,
            params=SamplingParams(
                temperature=0.7, seed=100 * seed + i, max_tokens=args.tokens, ignore_eos=True
            ),
            draft_length=args.k,
            **arm.wishes,
        )
        for i, prompt in enumerate(prompts)
    ]
    before, began = runtime.link_use, time.monotonic()
    results = await asyncio.gather(*(answer_over(runtime, r) for r in requests))
    seconds, after = time.monotonic() - began, runtime.link_use
    tokens = sum(r.generation.completion_tokens for r in results)
    up = after.payload_up - before.payload_up
    return seconds, tokens, up, after.payload_down - before.payload_down


async def run(args: argparse.Namespace) -> dict[str, Any]:
    vocabulary = load_vocabulary("builtin:smollm2")
    drafter = load_drafter(args.draft, vocabulary, threads=1, max_slots=64)
    ids = [
        tuple(vocabulary.tokenizer.chat([{"role": "user", "content": text}])) for text in PROMPTS
    ]
    names = args.arms.split(";") if args.arms else list(ARMS)
    cells: list[dict[str, Any]] = []
    flags = ["--threads", "1", "--draft", args.draft, "--target-pace", str(args.pace)]
    flags += [] if args.deterministic else ["--no-deterministic"]
    async with CloudProcess(flags, core=cores().cloud) as cloud:
        pinned = cores().pin_edge() and cloud.pinned
        for link in args.links.split(","):
            for count in (int(n) for n in args.requests.split(",")):
                prompts = [ids[i % len(ids)] for i in range(count)]
                found: dict[str, list[tuple[float, int, int, int]]] = {n: [] for n in names}
                for seed in range(-1, args.seeds):
                    for name in names:
                        arm = ARMS[name]
                        edge_module.FrameSocket = arm.socket  # type: ignore[misc]
                        config = EdgeConfig(
                            url=cloud.url, link=parse_link(f"{link},rtt={args.rtt}")
                        )
                        async with EdgeRuntime(
                            config,
                            vocabulary.tokenizer,
                            drafter,
                            context_length=vocabulary.model.info.context_length,
                        ) as runtime:
                            result = await measure(runtime, arm, prompts, args, seed + 1)
                        if seed >= 0:
                            found[name].append(result)
                base = None
                for name, results in found.items():
                    rate = statistics.median(t / s for s, t, _, _ in results)
                    base = base or rate
                    tokens = sum(t for _, t, _, _ in results)
                    up = sum(u for _, _, u, _ in results) / tokens
                    down = sum(d for _, _, _, d in results) / tokens
                    cell = {
                        "link": link, "requests": count, "arm": name, "tokens_per_s": rate,
                        "against_cloud_only": rate / base, "up": up, "down": down,
                    }  # fmt: skip
                    cells.append(cell)
                    print(
                        f"{link:<8} {count:>3} requests  {name:<19} {rate:7.1f} tokens/s  "
                        f"x{rate / base:.2f}  {up:6.1f} B up, {down:6.1f} down a token",
                        file=sys.stderr,
                        flush=True,
                    )
    return {"arguments": vars(args), "pinned": pinned, "cells": cells}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--links", default="strong,medium,weak,5/20,.5/5,.1/2")
    parser.add_argument("--requests", default="1,8")
    parser.add_argument("--rtt", default="20ms")
    parser.add_argument(
        "--arms", default="", help="with ; between, cloud-only first: " + "; ".join(ARMS)
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--draft", default="large")
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--no-deterministic", dest="deterministic", action="store_false")
    print(json.dumps(asyncio.run(run(parser.parse_args()))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
