"""Row-cost curve and draft time of each engine on the same model: the built-in one.

`hf` in bfloat16 and float32, deterministic and as shapes come, and `llamacpp` on the weights as
they are stored (q4_1). One row as shapes come is what a token costs when the engine drafts. Says
with each curve whether the engine keeps its bits (engines/selfcheck.py). The machine's load is part
of the result.

    python bench/engines.py --threads 1
"""

from __future__ import annotations

import argparse
import json
import os

from step_cost import ROWS, cost

from outrider.engines.base import MissingExtraError
from outrider.engines.load import load_target
from outrider.engines.selfcheck import keeps_bits

ENGINES = (
    ("hf", "builtin:smollm2", "bfloat16"),
    ("hf", "builtin:smollm2", "float32"),
    ("llamacpp", "builtin:smollm2-gguf", "auto"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--only", default="hf,llamacpp", help="engines, by name")
    args = parser.parse_args()
    facts: dict[str, object] = {
        "cores": os.cpu_count(),
        "threads": args.threads,
        "context": args.context,
        "unit": "ms: median, minimum",
    }
    for engine, spec, dtype in (e for e in ENGINES if e[0] in args.only.split(",")):
        for deterministic in (True, False):
            try:
                model = load_target(
                    spec,
                    dtype=dtype,
                    deterministic=deterministic,
                    threads=args.threads,
                    max_slots=2,
                ).model
            except MissingExtraError as missing:
                print(f"{engine} left out: {missing}", flush=True)
                break
            name = f"{engine} {model.info.dtype} {'deterministic' if deterministic else 'free'}"
            facts[name] = {
                "rows": {
                    n: [round(x, 1) for x in cost(model, args.context, n, args.repeat)]
                    for n in ROWS
                },
                "keeps_bits": keeps_bits(model),
                "load": round(os.getloadavg()[0], 1),
            }
            print(name, facts[name], flush=True)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
