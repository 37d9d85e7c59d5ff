"""The planner's choice against the simulator's best, on random worlds.

Each world is planned for latency (outrider.plan); then every schedule plays through the simulator's
machines at its planned length, with the same luck. *Same*: the schedule chosen is the simulator's
fastest; *right*: it is, or as fast to a hundredth; *regret*: how much slower than the fastest.

    python bench/planner.py [--worlds 100] [--requests 8] [--tokens 256] [--seed 0]
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict

from outrider.bench.planned import Compared, compare, worlds


def line(found: Compared) -> str:
    facts = found.facts
    step, draft, trip = (1e3 * x for x in (facts.step, facts.draft, facts.round_trip))
    return (
        f"t_v {step:5.1f}  t_d {draft:5.1f}  R {trip:5.1f}  a {facts.curve.alpha:.2f}  "
        f"{found.chosen.schedule.value:>10} {1e3 * found.chosen.seconds:6.2f}  "
        f"{found.best.schedule.value:>10} {1e3 * found.best.seconds:6.2f}  "
        f"regret {100 * found.regret:5.2f} %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, default=100)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    results, errors = [], defaultdict(list)
    for facts in worlds(args.worlds, args.seed):
        found = compare(facts, requests=args.requests, tokens=args.tokens, seed=args.seed)
        results.append(found)
        print(line(found), flush=True)
        for played in found.played:
            errors[played.schedule.value].append(played.error)
    count = len(results)
    regrets = sorted(r.regret for r in results)
    print(f"same {sum(r.same for r in results)}, right {sum(r.right for r in results)} of {count}")
    agreed = sum(r.fastest.schedule is r.best.schedule for r in results)
    print(f"fastest by the plan and by the simulator: {agreed} of {count}")
    print(f"regret: mean {100 * statistics.mean(regrets):.2f} %, most {100 * regrets[-1]:.2f} %")
    for name, values in errors.items():
        most = max(map(abs, values))
        print(
            f"{name:>10}: plan {100 * statistics.mean(values):+.1f} %, at most {100 * most:.1f} %"
        )


if __name__ == "__main__":
    main()
