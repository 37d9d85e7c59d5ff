"""Same seed, same text: ids with a draft against ids of the target alone, on real questions.

Each prompt is answered by the target alone and then with drafts, with random draft lengths, at
one temperature a prompt; every answer must be identical. Exit code 1 if one is not.

    OUTRIDER_DATA=... python bench/identity.py --pairs 200 --tokens 24
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time

from prompts import mixed

from outrider.core.tokens import Rule, SamplingParams
from outrider.engines.load import Loaded, load_drafter, load_target
from outrider.runtime.local import GenerationRequest, LocalGenerator

TEMPERATURES = (0.0, 0.7, 1.0)
MAX_DRAFT = 12


def ids_of(
    target: Loaded, drafter: object, prompt: list[int], params: SamplingParams, length: int
) -> tuple[int, ...]:
    generator = LocalGenerator(target.model, target.tokenizer, drafter)  # type: ignore[arg-type]
    request = GenerationRequest(
        prompt_ids=tuple(prompt), params=params, rule=Rule.COUPLED, draft_length=length
    )
    try:
        return generator.generate(request).token_ids
    finally:
        generator.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=200, help="prompt and seed pairs")
    parser.add_argument("--tokens", type=int, default=24, help="output tokens an answer")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 or float32")
    parser.add_argument("--drafts", default="small,large,lookup,lookup+small")
    parser.add_argument("--per-pair", type=int, default=1, help="drafted runs a pair")
    parser.add_argument("--prompt-tokens", type=int, default=200, help="skip longer prompts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    target = load_target("builtin:smollm2", dtype=args.dtype, threads=args.threads)
    names = args.drafts.split(",")
    drafters = {name: load_drafter(name, target, threads=args.threads) for name in names}
    began = time.monotonic()
    done = runs = tokens = 0
    wrong: list[dict[str, object]] = []
    by_task: dict[str, int] = {}
    for task, prompt in mixed(4 * args.pairs):
        ids = target.tokenizer.chat([{"role": "user", "content": prompt}])
        if len(ids) > args.prompt_tokens:
            continue
        params = SamplingParams(
            temperature=TEMPERATURES[done % len(TEMPERATURES)],
            seed=rng.randrange(2**40),
            max_tokens=args.tokens,
        )
        alone = ids_of(target, None, ids, params, 0)
        tokens += len(alone)
        by_task[task] = by_task.get(task, 0) + 1
        for _ in range(args.per_pair):
            name, length = rng.choice(names), rng.randint(1, MAX_DRAFT)
            runs += 1
            if ids_of(target, drafters[name], ids, params, length) != alone:
                wrong.append({"task": task, "draft": name, "length": length, "seed": params.seed})
        done += 1
        if done % 10 == 0:
            spent = time.monotonic() - began
            left = spent / done * (args.pairs - done)
            print(
                f"{done}/{args.pairs} pairs, {len(wrong)} wrong, {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )
        if done == args.pairs:
            break
    print(
        json.dumps(
            {
                "dtype": args.dtype,
                "pairs": done,
                "by_task": by_task,
                "runs": runs,
                "tokens": tokens,
                "different": len(wrong),
                "cases": wrong,
            }
        )
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
