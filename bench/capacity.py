"""How much one verifier carries: tokens a second and the time of a token, by edges and schedule.

Edges replay recorded drafts (`outrider record`), so they cost this machine next to nothing and are
honest all the same: every answer is held against the recording. One verifier serves all cells, on
a core of its own; each cell is one run of `outrider load`. The co-located baseline computes its
drafts on the verifier's core. Beside the table: 1 + K t_d/t_v, the gain over co-location that
follows from taking the draft off the verifier when rows cost nothing (docs/papers.md, 5).

    python bench/capacity.py drafts.jsonl --edges 1,4,8,16 --token-ms 200
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from typing import Any

from outrider.runtime.cores import cores
from outrider.runtime.process import CloudProcess

ARMS = ("cloud-only", "colocated", "sync", "freerun", "multiplex")


def load(url: str, args: argparse.Namespace, schedule: str, edges: int) -> dict[str, Any]:
    """One cell: the report of `outrider load`."""
    command = [
        *(sys.executable, "-m", "outrider", "load", "--cloud", url, "--json"),
        *("--edges", str(edges), "--requests", str(args.requests), "--schedule", schedule),
        *("--draft", f"replay:{args.recording}", "--link", args.link, "--threads", "1"),
        *(() if schedule in ("cloud-only", "freerun") else ("--draft-length", str(args.k))),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{schedule}, {edges} edges: {done.stderr.strip()}")
    return json.loads(done.stdout)


def shown(schedule: str, edges: int, row: dict[str, Any]) -> str:
    pace = row["ms_per_token"]
    return (
        f"{schedule:<11} {edges:>3} edges  {row['tokens_per_s']:7.1f} tokens/s  ms/token p50 "
        f"{pace['p50']:6.1f} p95 {pace['p95']:6.1f}  rows/forward "
        f"{row['cloud_rows_per_forward'] or 0:5.1f}  queue p95 {row['queue_ms']['p95']:6.1f} ms  "
        f"fairness {row['fairness']:.2f}"
    )


async def run(args: argparse.Namespace) -> dict[str, Any]:
    flags = ["--threads", "1", "--draft", args.draft, "--target-pace", str(args.pace)]
    flags += [] if args.deterministic else ["--no-deterministic"]
    cells: list[dict[str, Any]] = []
    async with CloudProcess(flags, core=cores().cloud) as cloud:
        pinned = cores().pin_edge() and cloud.pinned
        for turn in range(args.turns):
            for edges in (int(n) for n in args.edges.split(",")):
                for schedule in args.schedules.split(","):
                    row = await asyncio.to_thread(load, cloud.url, args, schedule, edges)
                    cells.append({"turn": turn, "schedule": schedule, "edges": edges, **row})
                    print(shown(schedule, edges, row), file=sys.stderr, flush=True)
    return {"arguments": vars(args), "pinned": pinned, "cells": cells, "best": best(args, cells)}


def best(args: argparse.Namespace, cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each schedule: most tokens a second while the 95th percentile of the time of a token is
    at most --token-ms, and with how many edges."""
    found: dict[str, Any] = {}
    for schedule in args.schedules.split(","):
        fit = [
            (c["tokens_per_s"], c["edges"])
            for c in cells
            if c["schedule"] == schedule and c["ms_per_token"]["p95"] <= args.token_ms
        ]
        rate, edges = max(fit, default=(None, None))
        found[schedule] = {"tokens_per_s": rate, "edges": edges}
        print(f"{schedule:<11} within {args.token_ms:g} ms: {rate} tokens/s, {edges} edges")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recording", help="file of `outrider record`")
    parser.add_argument("--edges", default="1,4,8,16,32")
    parser.add_argument("--schedules", default=",".join(ARMS))
    parser.add_argument("--requests", type=int, default=2, help="answers of each edge")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--link", default="rtt=50ms,up=5mbit,down=20mbit")
    parser.add_argument("--draft", default="large", help="the verifier's own, for colocated")
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--token-ms", type=float, default=200.0)
    parser.add_argument("--no-deterministic", dest="deterministic", action="store_false")
    print(json.dumps(asyncio.run(run(parser.parse_args()))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
