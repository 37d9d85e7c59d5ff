"""Every schedule over shaped links: time, forwards and bytes a token, beside cloud-only streaming.

One verifier process and one edge, a core each where the system can pin them; arms take turns on
the same prompts and seeds; ratios are medians over answers. Closed forms (design notes: sync,
streaming) are printed with the step times and acceptance measured in the same run.

    python bench/network.py --rtts 10,50,100,200 --paces 0,60 --seeds 5
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys

from outrider.bench.live import Settings, standard_arms
from outrider.bench.prompts import PROMPTS
from outrider.bench.schedules import Arm, compare
from outrider.core.link import parse_link
from outrider.core.tokens import SamplingParams
from outrider.engines.load import load_drafter, load_vocabulary
from outrider.runtime.cores import cores
from outrider.runtime.edge import EdgeRuntime
from outrider.runtime.edgeconfig import EdgeConfig
from outrider.runtime.local import LocalGenerator
from outrider.runtime.process import CloudProcess


def closed_forms(arms: list[Arm], rtt: float, k: int, t_d: float) -> dict[str, float]:
    """ms a token by the formulas, with t_v = t_ar = cloud-only's time and the measured
    acceptance of the sync arm (geometric): sync (k t_d + R + t_v)/E[L]; streaming
    (1-a)(g t_d/(1-a^g) + R + t_v) with chunks of g = 1."""
    t_v = arms[0].ms_per_token
    sync = next(a for a in arms if a.name == "sync")
    tokens = sync.tokens / sum(s.forwards for s in sync.samples)  # E[L] as measured
    a = min(0.99, sync.acceptance or 0.0)
    return {
        "sync": (k * t_d + rtt + t_v) / tokens,
        "stream": (1 - a) * (t_d / (1 - a) + rtt + t_v),
        "cloud-only": t_v,
    }


async def cell(args: argparse.Namespace, rtt: float, pace: float) -> dict[str, object]:
    vocabulary = load_vocabulary("builtin:smollm2")
    drafter = load_drafter(args.draft, vocabulary, threads=1)
    model = getattr(drafter, "model", None)
    alone = None if model is None else LocalGenerator(model, vocabulary.tokenizer)
    link = parse_link(f"rtt={rtt:g}ms,up={args.up},down={args.down}")
    flags = ["--threads", "1", "--target-pace", str(pace), "--draft", args.draft]
    async with CloudProcess(flags, core=cores().cloud) as cloud:
        pinned = cores().pin_edge() and cloud.pinned
        async with EdgeRuntime(
            EdgeConfig(url=cloud.url, link=link),
            vocabulary.tokenizer,
            drafter,
            context_length=vocabulary.model.info.context_length,
        ) as runtime:
            settings = Settings(draft_length=args.k, window=args.window)
            arms = standard_arms(runtime, settings, alone=alone)
            prompts = [
                tuple(vocabulary.tokenizer.chat([{"role": "user", "content": text}]))
                for text in PROMPTS[: args.prompts]
            ]
            params = SamplingParams(temperature=args.temperature, max_tokens=args.tokens)
            async for done in compare(arms, prompts, params, seeds=range(args.seeds)):
                print(f"\rrtt {rtt:g} pace {pace:g}: {done} answers", end="", file=sys.stderr)
    t_d = next((a.ms_per_token for a in arms if a.name == "edge-only"), 0.0)
    return {
        "rtt_ms": rtt,
        "pace_ms": pace,
        "pinned": pinned,
        "t_d_ms": t_d,
        "closed_forms_ms": closed_forms(arms, rtt, args.k, t_d),
        "arms": [arm.as_dict(arms[0]) for arm in arms],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rtts", default="10,50,100,200", help="ms, comma separated")
    parser.add_argument("--paces", default="0,60", help="ms added a forward, comma separated")
    parser.add_argument("--up", default="5mbit")
    parser.add_argument("--down", default="20mbit")
    parser.add_argument("--draft", default="lookup+small")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.7)
    args = parser.parse_args()
    cells = []
    for pace in (float(x) for x in args.paces.split(",")):
        for rtt in (float(x) for x in args.rtts.split(",")):
            found = asyncio.run(cell(args, rtt, pace))
            cells.append(found)
            forms = found["closed_forms_ms"]
            print(f"\nRTT {rtt:g} ms, pace {pace:g} ms, closed forms {forms}")
            for arm in found["arms"]:  # type: ignore[attr-defined]
                print(
                    f"  {arm['name']:<14} {arm['ms_per_token']:7.1f} ms  "
                    f"ratio {arm['ratio_to_cloud_only']:.2f}  "
                    f"forwards {arm['forwards_per_token']:.2f}  accepted {arm['acceptance']}  "
                    f"bytes {arm['bytes_up_per_token']:.1f}+{arm['bytes_down_per_token']:.1f}  "
                    f"same {arm['identical_to_cloud_only']}",
                    flush=True,
                )
    print(json.dumps({"arguments": vars(args), "load": os.getloadavg()[0], "cells": cells}))


if __name__ == "__main__":
    main()
