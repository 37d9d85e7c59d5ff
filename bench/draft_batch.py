"""Drafting for several requests at once: ms a token in lock-step against one after the other.

Both ways draft the same blocks of the same requests, in turns, so load on the machine meets both;
the fastest block of each counts. `same` says whether every block had the same ids both ways.

    python bench/draft_batch.py --drafts small,large --sessions 1,2,4,8,16
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence

from outrider.bench.prompts import PROMPTS
from outrider.core.tokens import Rule, SamplingParams
from outrider.engines.drafters import DraftSession, ModelDrafter
from outrider.engines.load import load_draft_model, load_target
from outrider.engines.lockstep import Ask, propose_together

WARM_UP = 2
"""Rounds that do not count: whoever comes first in them reads the prompts, in other shapes."""
Blocks = dict[int, tuple[int, ...]]


def together(asks: Sequence[Ask]) -> Blocks:
    return {i: draft.tokens for i, draft in propose_together(asks)}  # type: ignore[union-attr]


def in_turn(asks: Sequence[Ask]) -> Blocks:
    return {i: ask.session.propose(ask.committed, ask.count).tokens for i, ask in enumerate(asks)}


def timed(call: Callable[[Sequence[Ask]], Blocks], asks: Sequence[Ask]) -> tuple[float, Blocks]:
    """Seconds a token, and the blocks."""
    began = time.perf_counter()
    blocks = call(asks)
    return (time.perf_counter() - began) / sum(map(len, blocks.values())), blocks


def compare(
    sessions: Sequence[DraftSession], prompts: Sequence[tuple[int, ...]], *, k: int, rounds: int
) -> dict[str, object]:
    """Blocks of `k`; each request goes on from the block before, as if all of it stood."""
    texts = [list(prompt) for prompt in prompts]
    best = {"together": float("inf"), "in turn": float("inf")}
    same = True
    for r in range(rounds):
        asks = [Ask(s, tuple(t), k) for s, t in zip(sessions, texts, strict=True)]
        ways = [("together", together), ("in turn", in_turn)]
        found = {}
        for name, way in ways[:: 1 if r % 2 else -1]:
            seconds, found[name] = timed(way, asks)
            if r >= WARM_UP:
                best[name] = min(best[name], seconds)
        if r >= WARM_UP:
            same = same and found["together"] == found["in turn"]
        for i, text in enumerate(texts):
            text.extend(found["in turn"][i])
    return {
        "ms_together": 1e3 * best["together"],
        "ms_in_turn": 1e3 * best["in turn"],
        "gain": best["in turn"] / best["together"],
        "same": same,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafts", default="small,large")
    parser.add_argument("--sessions", default="1,2,4,8,16")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    counts = [int(n) for n in args.sessions.split(",")]
    target = load_target("builtin:smollm2", threads=args.threads)
    table: dict[str, dict[int, object]] = {}
    for name in args.drafts.split(","):
        model = load_draft_model(name, target, threads=args.threads, max_slots=max(counts))
        drafter = ModelDrafter(name, model=model)
        table[name] = {}
        for n in counts:
            asked = [PROMPTS[i % len(PROMPTS)] for i in range(n)]
            prompts = [
                tuple(target.tokenizer.chat([{"role": "user", "content": text}])) for text in asked
            ]
            sessions = [
                drafter.session(
                    len(prompt),
                    SamplingParams(seed=i, temperature=0.7, ignore_eos=True),
                    Rule.COUPLED,
                )
                for i, prompt in enumerate(prompts)
            ]
            row = compare(sessions, prompts, k=args.k, rounds=args.rounds)
            for session in sessions:
                session.close()
            table[name][n] = row
            print(
                f"{name:<6} {n:>2} sessions: together {row['ms_together']:5.2f} ms/token, "
                f"in turn {row['ms_in_turn']:5.2f}, gain {row['gain']:.2f}, same ids {row['same']}",
                file=sys.stderr,
                flush=True,
            )
    print(json.dumps({"arguments": vars(args), "load": os.getloadavg()[0], "drafts": table}))


if __name__ == "__main__":
    main()
