"""Controllers on the live system: each against the best fixed length of the same run.

One verifier process and one edge over a shaped link; the arms take turns answer by answer on the
same prompts and seeds, and each controller goes on learning from answer to answer. Answers that
make up the first `--learn` rounds of an arm are shown apart: what is left is what it settled on.
The loss is relative to the best fixed length of this run, chosen afterwards: an oracle nobody has
while it runs.

    python bench/controllers.py --rtt 50 --fixed 1,2,3,4,6,8 --controllers auto,specstop
    python bench/controllers.py --link rtt=20ms --then rtt=150ms      # a link that changes
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import dataclass, field

from outrider.bench.live import answer_over
from outrider.bench.prompts import PROMPTS
from outrider.control.registry import parse
from outrider.core.link import parse_link
from outrider.core.tokens import SamplingParams
from outrider.engines.load import load_drafter, load_vocabulary
from outrider.runtime.cores import cores
from outrider.runtime.edge import EdgeRuntime
from outrider.runtime.edgeconfig import EdgeConfig
from outrider.runtime.edgerequest import EdgeRequest
from outrider.runtime.learnt import Learnt
from outrider.runtime.process import CloudProcess
from outrider.session.schedules import Schedule


@dataclass
class Arm:
    """One controller in one schedule, with what its answers came to."""

    name: str
    wishes: dict[str, object]
    rounds: int = 0
    seconds: float = 0.0
    tokens: int = 0
    forwards: int = 0
    drafted: int = 0
    early_seconds: float = 0.0
    early_tokens: int = 0
    ids: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def ms(self) -> float:
        return 1e3 * self.seconds / max(1, self.tokens)


def make_arms(args: argparse.Namespace) -> list[Arm]:
    schedule = Schedule(args.schedule)
    arms = [Arm("cloud-only", {"schedule": Schedule.CLOUD_ONLY})]
    for k in (int(x) for x in args.fixed.split(",") if x):
        wishes = {"schedule": schedule, "draft_length": k}
        if schedule in (Schedule.STREAM, Schedule.FREERUN):
            wishes = {"schedule": schedule, "window": k}
        arms.append(Arm(f"fixed {k}", wishes))
    for text in (x for x in args.controllers.split(",") if x):
        name, options = parse(text.replace(";", ","))
        wishes = {
            "schedule": schedule,
            "controller": name,
            "controller_options": options,
            "window": args.window,
        }
        arms.append(Arm(text, wishes))
    return arms


async def run(args: argparse.Namespace) -> dict[str, object]:
    vocabulary = load_vocabulary("builtin:smollm2")
    drafter = load_drafter(args.draft, vocabulary, threads=1)
    tokenizer = vocabulary.tokenizer
    links = [args.link or f"rtt={args.rtt:g}ms,up=5mbit,down=20mbit", *args.then]
    flags = ["--threads", "1", "--draft", args.draft, "--target-pace", str(args.pace)]
    arms = make_arms(args)
    prompts = [tuple(tokenizer.chat([{"role": "user", "content": text}])) for text in PROMPTS]
    params = SamplingParams(temperature=args.temperature, max_tokens=args.tokens)
    learnt = Learnt()
    async with CloudProcess(flags, core=cores().cloud) as cloud:
        pinned = cores().pin_edge() and cloud.pinned
        for part, text in enumerate(links):
            # A change of link is a new connection here; the estimators and controllers go on.
            config = EdgeConfig(url=cloud.url, link=parse_link(text))
            async with EdgeRuntime(
                config,
                tokenizer,
                drafter,
                context_length=vocabulary.model.info.context_length,
                learnt=learnt,
            ) as runtime:
                for n in range(args.answers):
                    for arm in arms:
                        request = EdgeRequest(
                            prompt_ids=prompts[n % len(prompts)],
                            params=SamplingParams(
                                temperature=params.temperature,
                                max_tokens=params.max_tokens,
                                seed=n,
                                ignore_eos=True,
                            ),
                            **{"window": args.window, **arm.wishes},  # type: ignore[arg-type]
                        )
                        result = await answer_over(runtime, request)
                        note(arm, result, args.learn)
                    print(f"\rlink {part}: {n + 1}/{args.answers}", end="", file=sys.stderr)
    return {"arguments": vars(args), "pinned": pinned, "arms": table(arms)}


def note(arm: Arm, result, learn: int) -> None:  # type: ignore[no-untyped-def]
    done = result.generation
    if done.timing.tpot_s is None:
        return
    tokens = done.completion_tokens
    seconds = done.timing.tpot_s * tokens
    arm.ids.append(done.token_ids)
    if arm.rounds < learn:
        arm.early_seconds += seconds
        arm.early_tokens += tokens
    else:
        arm.seconds += seconds
        arm.tokens += tokens
        arm.forwards += done.target_forwards
        arm.drafted += done.counters.drafted
    arm.rounds += done.counters.rounds


def table(arms: list[Arm]) -> list[dict[str, object]]:
    best = min(a.ms for a in arms if a.tokens and a.name.startswith("fixed"))
    plain = arms[0].ms
    rows = []
    for arm in arms:
        rows.append(
            {
                "name": arm.name,
                "rounds": arm.rounds,
                "ms_per_token": arm.ms,
                "against_best_fixed": arm.ms / best,
                "against_cloud_only": arm.ms / plain,
                "while_learning_ms": 1e3 * arm.early_seconds / max(1, arm.early_tokens),
                "forwards_per_token": arm.forwards / max(1, arm.tokens),
                "drafted_per_token": arm.drafted / max(1, arm.tokens),
                "same_ids": arm.ids == arms[0].ids,
            }
        )
        print(
            f"{arm.name:<28} {arm.ms:7.1f} ms/token  x{arm.ms / best:.3f} of the best fixed  "
            f"x{arm.ms / plain:.2f} of cloud-only  {rows[-1]['forwards_per_token']:.2f} forwards  "
            f"same ids {rows[-1]['same_ids']}",
            file=sys.stderr,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rtt", type=float, default=50.0, help="ms")
    parser.add_argument("--link", default="", help="instead of --rtt")
    parser.add_argument("--then", action="append", default=[], help="a link to change to")
    parser.add_argument("--schedule", default="sync")
    parser.add_argument("--fixed", default="1,2,3,4,6,8")
    parser.add_argument("--controllers", default="auto")
    parser.add_argument("--draft", default="large")
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--window", type=int, default=12)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--learn", type=int, default=60, help="first rounds shown apart")
    print(json.dumps(asyncio.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
