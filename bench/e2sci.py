"""E2-SCI whole, its ablations, FSD and the exact schedules: speed and divergence in one table.

Arms take turns on the same prompts and seeds through one verifier process over a shaped link.
Divergence is what the ledger says (certified bounds) and the mean negative log-likelihood of the
answer under the target's raw rows, beside that of the exact text on the same prompts. Published
rules know no budget, so theirs is infinite here and the sum of their charges is a sum only, no
bound of a law once it passes 1.

    python bench/e2sci.py --rtt 50 --answers 12 --tokens 48
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from dataclasses import dataclass, field

from outrider.bench.live import answer_over
from outrider.bench.prompts import PROMPTS
from outrider.core.link import parse_link
from outrider.core.relaxation import Relaxation
from outrider.core.relaxed import Policy, RelaxedRule
from outrider.core.tokens import Rule, SamplingParams
from outrider.engines.load import load_drafter, load_vocabulary
from outrider.runtime.cores import cores
from outrider.runtime.edge import EdgeRuntime
from outrider.runtime.edgeconfig import EdgeConfig
from outrider.runtime.edgerequest import EdgeRequest
from outrider.runtime.edgestream import EdgeResult
from outrider.runtime.process import CloudProcess
from outrider.session.schedules import Schedule


@dataclass
class Arm:
    name: str
    wishes: dict[str, object]
    paces: list[float] = field(default_factory=list)
    tokens: int = 0
    forwards: int = 0
    drafted: int = 0
    accepted: int = 0
    relaxed: int = 0
    tv: float = 0.0
    jsd: float = 0.0
    nll: float = 0.0
    scored: int = 0
    ids: list[tuple[int, ...]] = field(default_factory=list)

    def note(self, result: EdgeResult) -> None:
        done = result.generation
        if done.timing.tpot_s is None:
            return
        self.paces.append(done.timing.tpot_s)
        self.tokens += done.completion_tokens
        self.forwards += done.target_forwards
        self.drafted += done.counters.drafted
        self.accepted += done.counters.accepted
        self.ids.append(done.token_ids)
        if done.relaxed is not None:
            self.relaxed += done.relaxed.relaxed
            self.tv += done.relaxed.spent
            self.jsd = max(self.jsd, done.relaxed.max_jsd)
        finite = [e.logprob for e in done.logprobs if math.isfinite(e.logprob)]
        self.nll -= sum(finite)
        self.scored += len(finite)


def lossy(rule: RelaxedRule, threshold: float, budget: float, sketch: int) -> dict[str, object]:
    return {
        "rule": Rule.RELAXED,
        "relaxation": Relaxation(
            policy=Policy(rule=rule, threshold=threshold), budget=budget, sketch=sketch
        ),
    }


def make_arms(args: argparse.Namespace) -> list[Arm]:
    def fsd(threshold: float) -> dict[str, object]:
        return lossy(RelaxedRule.FSD, threshold, math.inf, args.sketch)

    def e2sci(**options: float) -> dict[str, object]:
        return {
            **lossy(RelaxedRule.E2SCI, args.threshold, math.inf, args.sketch),
            "controller": "credit",
            "controller_options": options,
            "calibration": args.calibration,
        }

    k = {"draft_length": args.k}
    sync, plc = {"schedule": Schedule.SYNC, **k}, {"schedule": Schedule.PLC, **k}
    ours = lossy(RelaxedRule.RELAXED, args.threshold, args.budget, args.sketch)
    return [
        Arm("cloud-only", {"schedule": Schedule.CLOUD_ONLY}),
        Arm("sync, exact", sync),
        Arm("sync, exact (ratio)", {**sync, "rule": Rule.RATIO}),
        Arm("plc, exact", plc),
        Arm("pearl, exact", {"schedule": Schedule.PEARL, **k}),
        Arm("freerun, exact", {"schedule": Schedule.FREERUN}),
        Arm("colocated, exact", {"schedule": Schedule.COLOCATED, **k}),
        Arm(f"FSD T={args.threshold}", {**sync, **fsd(args.threshold)}),
        Arm(f"FSD T={args.threshold}, plc", {**plc, **fsd(args.threshold)}),
        Arm("E2-SCI", {**plc, **e2sci()}),
        Arm("E2-SCI without PLC", {**sync, **e2sci()}),
        Arm("E2-SCI without threshold", {**plc, **e2sci(threshold=0)}),
        Arm("E2-SCI without history", {**plc, **e2sci(history=0)}),
        Arm("E2-SCI k=1", {**plc, **e2sci(k=1)}),
        Arm("E2-SCI k=10", {**plc, **e2sci(k=10)}),
        Arm(f"ours, budget {args.budget:g}, sync", {**sync, **ours}),
        Arm(f"ours, budget {args.budget:g}, freerun", {"schedule": Schedule.FREERUN, **ours}),
    ]


async def run(args: argparse.Namespace) -> dict[str, object]:
    vocabulary = load_vocabulary("builtin:smollm2")
    drafter = load_drafter(args.draft, vocabulary, threads=1)
    tokenizer = vocabulary.tokenizer
    prompts = [tuple(tokenizer.chat([{"role": "user", "content": text}])) for text in PROMPTS]
    flags = ["--threads", "1", "--draft", args.draft, "--target-pace", str(args.pace)]
    arms = make_arms(args)
    link = parse_link(f"rtt={args.rtt:g}ms,up=5mbit,down=20mbit")
    async with CloudProcess(flags, core=cores().cloud) as cloud:
        pinned = cores().pin_edge() and cloud.pinned
        async with EdgeRuntime(
            EdgeConfig(url=cloud.url, link=link),
            tokenizer,
            drafter,
            context_length=vocabulary.model.info.context_length,
        ) as runtime:
            for n in range(-1, args.answers):  # the first round warms up
                for arm in arms:
                    request = EdgeRequest(
                        prompt_ids=prompts[max(n, 0) % len(prompts)],
                        params=SamplingParams(
                            temperature=args.temperature,
                            max_tokens=args.tokens,
                            seed=max(n, 0),
                            ignore_eos=True,
                            logprobs=0,
                        ),
                        window=args.window,
                        **arm.wishes,  # type: ignore[arg-type]
                    )
                    result = await answer_over(runtime, request)
                    if n >= 0:
                        arm.note(result)
                print(f"\r{n + 1}/{args.answers}", end="", file=sys.stderr, flush=True)
    return {"arguments": vars(args), "pinned": pinned, "arms": table(arms)}


def table(arms: list[Arm]) -> list[dict[str, object]]:
    sync = next(a for a in arms if a.name == "sync, exact")
    plain = arms[0]
    rows: list[dict[str, object]] = []
    print("", file=sys.stderr)
    for arm in arms:
        against_sync = ratio(arm, sync)
        row = {
            "name": arm.name,
            "ms_per_token": 1e3 * median(arm.paces),
            "speed_up_over_sync": 1.0 / against_sync,
            "against_cloud_only": ratio(arm, plain),
            "forwards_per_token": arm.forwards / arm.tokens,
            "acceptance": arm.accepted / arm.drafted if arm.drafted else None,
            "relaxed_share": arm.relaxed / arm.tokens,
            "tv_bound_per_answer": arm.tv / len(arm.ids),
            "max_jsd": arm.jsd,
            "nll": arm.nll / max(1, arm.scored),
            "answers_as_exact": sum(a == b for a, b in zip(arm.ids, plain.ids, strict=True)),
        }
        rows.append(row)
        shown = "-" if row["acceptance"] is None else f"{row['acceptance']:.2f}"
        print(
            f"{arm.name:<28} {row['ms_per_token']:6.1f} ms  x{row['speed_up_over_sync']:.2f} sync"
            f"  {row['against_cloud_only']:.2f} of cloud-only  fwd {row['forwards_per_token']:.2f}"
            f"  acc {shown}  relaxed {row['relaxed_share']:.1%}"
            f"  tv {row['tv_bound_per_answer']:.2f}  jsd {row['max_jsd']:.2f}  nll {row['nll']:.3f}"
            f"  same {row['answers_as_exact']}",
            file=sys.stderr,
        )
    return rows


def ratio(arm: Arm, base: Arm) -> float:
    return median([a / b for a, b in zip(arm.paces, base.paces, strict=True)])


def median(values: list[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rtt", type=float, default=50.0, help="ms")
    parser.add_argument("--draft", default="small")
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--window", type=int, default=12)
    parser.add_argument("--threshold", type=float, default=0.1, help="T of FSD, and where T starts")
    parser.add_argument("--budget", type=float, default=1.0)
    parser.add_argument("--sketch", type=int, default=16)
    parser.add_argument("--calibration", default=None, help="a folder of outrider calibrate")
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.7)
    print(json.dumps(asyncio.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
