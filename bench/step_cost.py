"""t_v(rows) of the target and t_d of the drafts: medians and minima on this machine.

Rows are verified behind a cached context, as in decoding. A deterministic engine runs passes of
a fixed row count, so its curve is a staircase.

    python bench/step_cost.py --threads 1
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics

from outrider.engines.base import LanguageModel
from outrider.engines.load import load_draft_model, load_target
from outrider.engines.measure import row_seconds

ROWS = (1, 2, 4, 8, 16)


def cost(model: LanguageModel, context: int, rows: int, repeat: int) -> tuple[float, float]:
    """Median and minimum milliseconds of a forward over `rows` rows behind `context` ids."""
    spent = [1e3 * s for s in row_seconds(model, rows, context=context, repeats=repeat + 2)[2:]]
    return statistics.median(spent), min(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--drafts", default="small,large")
    args = parser.parse_args()
    facts: dict[str, object] = {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "threads": args.threads,
        "context": args.context,
    }
    reference = None
    for dtype in args.dtypes.split(","):
        for deterministic in (True, False):
            target = load_target(
                "builtin:smollm2", dtype=dtype, deterministic=deterministic, threads=args.threads
            )
            reference = reference or target
            name = f"target {dtype} {'deterministic' if deterministic else 'as they come'}"
            facts[name] = {
                rows: [round(x, 1) for x in cost(target.model, args.context, rows, args.repeat)]
                for rows in ROWS
            }
            print(name, facts[name], flush=True)
    assert reference is not None
    for name in filter(None, args.drafts.split(",")):
        draft = load_draft_model(name, reference, threads=args.threads)
        facts[f"draft {name}"] = [round(x, 2) for x in cost(draft, args.context, 1, 60)]
        print(f"draft {name}", facts[f"draft {name}"], flush=True)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
