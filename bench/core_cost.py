"""What the exact core costs beside the models: filters, noise, draw and accept test a token.

    python bench/core_cost.py [--draft-ms 5] [--share 5]

Rows are Zipf-like with shuffled ids and a given entropy, as language models make them. `draft`
is one drafted token (filters and draw over the draft's output vocabulary); `verify` is one
judged row of the target (filters, draw and comparison over the whole vocabulary). Medians over
`--rounds` passes through `--rows` different rows, so no row is warm in the cache by itself.
One thread: the core's numpy calls are elementwise and never start another.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from outrider.core import rng
from outrider.core.draft import Draft
from outrider.core.rng import Purpose
from outrider.core.sampling import History, SamplingPipeline
from outrider.core.tokens import Rule, SamplingParams
from outrider.session.verifier import Verifier

SETTINGS: dict[str, SamplingParams] = {
    "T=0": SamplingParams(temperature=0.0),
    "T=.7": SamplingParams(temperature=0.7),
    "T=1": SamplingParams(temperature=1.0),
    "T=1 top-p .9": SamplingParams(top_p=0.9),
    "T=1 top-k 50": SamplingParams(top_k=50),
    "T=1 min-p .05": SamplingParams(min_p=0.05),
    "T=.7 top-k 50 top-p .9": SamplingParams(temperature=0.7, top_k=50, top_p=0.9),
    "T=.7 penalties": SamplingParams(
        temperature=0.7, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.2
    ),
}


def zipf_rows(count: int, width: int, entropy: float, seed: int) -> np.ndarray:
    """Logits -a*ln(rank) with some noise, ids shuffled, `a` such that the entropy is right."""
    source = np.random.default_rng(seed)
    ranks = np.log(np.arange(1, width + 1, dtype=np.float64))

    def measured(a: float) -> float:
        p = np.exp(-a * ranks)
        p /= p.sum()
        return float(-(p * np.log(p)).sum())

    low, high = 0.5, 6.0
    for _ in range(60):
        a = (low + high) / 2
        low, high = (a, high) if measured(a) > entropy else (low, a)
    rows = -a * ranks + source.normal(0.0, 0.3, size=(count, width))
    return source.permuted(rows, axis=1).astype(np.float32)


def median_us(work: Callable[[int], object], rows: int, rounds: int) -> float:
    """Median over all (round, row) of the time of work(row), in microseconds."""
    times = []
    for _ in range(rounds):
        for i in range(rows):
            began = time.perf_counter()
            work(i)
            times.append(time.perf_counter() - began)
    return float(np.median(times[rows:])) * 1e6  # the first round warms up


def history(vocabulary: int, prompt: int, output: int, seed: int) -> History:
    source = np.random.default_rng(seed)
    ids = (source.zipf(1.3, size=prompt + output) % vocabulary).tolist()
    return History(ids[:prompt], ids[prompt:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=49_152, help="ids of the target")
    parser.add_argument("--support", type=int, default=16_384, help="ids of the draft's output")
    parser.add_argument("--entropy", type=float, default=2.0, help="of the rows, in nats")
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--context", type=int, default=800, help="tokens behind the penalties")
    parser.add_argument("--draft-ms", type=float, default=5.0, help="time of one draft token")
    parser.add_argument("--share", type=float, default=5.0, help="aim: percent of it")
    args = parser.parse_args()

    wide = zipf_rows(args.rows, args.vocabulary, args.entropy, seed=1)
    source = np.random.default_rng(2)
    support = np.sort(source.choice(args.vocabulary, size=args.support, replace=False))
    narrow = zipf_rows(args.rows, args.support, args.entropy, seed=3)
    seen = history(args.vocabulary, args.context // 2, args.context // 2, seed=4)
    aim = args.draft_ms * 1e3 * args.share / 100

    print(f"microseconds a token, medians; rows of {args.entropy:g} nats; aim {aim:.0f}")
    print(f"{'':24}{'draft':>9}{'draft':>9}{'verify':>9}{'draft+verify':>14}{'of a draft':>12}")
    print(
        f"{'':24}{args.vocabulary:>9}{args.support:>9}{args.vocabulary:>9}"
        f"{args.support:>14}{'token, %':>12}"
    )
    for name, params in SETTINGS.items():
        full = SamplingPipeline(params, vocab_size=args.vocabulary)
        small = SamplingPipeline(params, vocab_size=args.vocabulary, support=support)

        def draft(pipeline: SamplingPipeline, rows: np.ndarray, i: int, seed: int = 0) -> int:
            return pipeline.distribution(rows[i], seen).draw(rng.key(seed, Purpose.TOKEN, i))

        judge = Verifier(
            params,
            Rule.COUPLED,
            prompt=sorted(seen.prompt),
            vocab_size=args.vocabulary,
            end_ids=frozenset(),
        )
        for token in seen.output:
            judge.history.push(token)

        def verify(i: int, judge: Verifier = judge) -> None:
            judge.judge(Draft(), wide[i : i + 1], 1000 + i)
            judge.history.pop()

        costs = [
            median_us(lambda i, p=full: draft(p, wide, i), args.rows, args.rounds),
            median_us(lambda i, p=small: draft(p, narrow, i), args.rows, args.rounds),
            median_us(verify, args.rows, args.rounds),
        ]
        both = costs[1] + costs[2]
        share = both / (args.draft_ms * 1e3) * 100
        print(f"{name:24}" + "".join(f"{c:9.0f}" for c in costs) + f"{both:14.0f}{share:12.1f}")


if __name__ == "__main__":
    main()
