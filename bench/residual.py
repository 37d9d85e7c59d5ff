"""What a rejection costs on the wire: which step ends it, bytes, round trips, the certificate.

    OMP_NUM_THREADS=1 python bench/residual.py [--tokens 24] [--draws 3] [--json]

Rows p of the built-in target along its own answers, q of its drafts behind the same text, at
T = .7 and 1. At each position `--draws` drafts x ~ q meet the accept test; each that falls is
resolved once for every K and budget, both ends in this process, every frame encoded and decoded.
The budget is that of one rejection: a list serves if its certificate is not above it.

The last table compares how often the first n proposals all failed with (1 - Z)^n, Z = TV(p, q) of
each rejection; n is chosen by the cloud from q(x) - p(x) <= Z. Exit code 1 if they differ by more
than 4 standard errors, or if a charge lies below the distance that was truly cut off.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from outrider.bench.dialogues import Talk
from outrider.bench.prompts import PROMPTS
from outrider.core import rng
from outrider.core.residual import TopKReply
from outrider.core.rng import Purpose
from outrider.core.sampling import Distribution, History, SamplingPipeline
from outrider.core.tokens import SamplingParams
from outrider.core.verify import ResidualStep, accepts, leftover
from outrider.engines.base import Block
from outrider.engines.load import load_draft_model, load_target
from outrider.proto.messages import Proposals, TopK

SIZES = (16, 64, 256)
BUDGETS = (0.0, 0.01, 0.05, 0.2)
"""Of total variation, a rejection."""
WISHES = (TopKReply(), *(TopKReply(k=k, budget=b) for b in BUDGETS for k in SIZES))
TEMPERATURES = (0.7, 1.0)
NOTHING = History(())


@dataclass
class Group:
    """Everything about the rejections of one draft at one temperature under one wish."""

    steps: Counter[str] = field(default_factory=Counter)
    down: list[int] = field(default_factory=list)
    up: list[int] = field(default_factory=list)
    frames: list[int] = field(default_factory=list)
    charges: list[float] = field(default_factory=list)
    wrong: int = 0
    """Charges below what was cut off."""
    distances: list[float] = field(default_factory=list)
    failed: int = 0
    """First batches of proposals that all failed, and how often that was to be expected."""
    expected: float = 0.0
    variance: float = 0.0

    def add(self, talk: Talk, p: Distribution, q: Distribution) -> None:
        choice = talk.run()
        left = np.maximum(leftover(p, q), 0.0)
        distance = float(left.sum())
        self.steps[choice.step.value] += 1
        self.down.append(talk.bytes_down)
        self.up.append(talk.bytes_up)
        self.frames.append(len(talk.frames))
        self.charges.append(choice.charge)
        self.distances.append(distance)
        if choice.charge:
            listed = [i for f in talk.frames if isinstance(f, TopK) for i in f.ids]
            inside = float(left[np.searchsorted(p.ids, listed)].sum())
            self.wrong += 1.0 - inside / distance > choice.charge
        batches = [f for f in talk.frames if isinstance(f, Proposals)]
        if batches:
            chance = (1.0 - distance) ** len(batches[0].tokens)
            self.failed += choice.step is not ResidualStep.FIRST_PROPOSALS
            self.expected += chance
            self.variance += chance * (1.0 - chance)

    @property
    def surprise(self) -> float:
        """Standard errors between failures seen and expected."""
        return (self.failed - self.expected) / math.sqrt(self.variance) if self.variance else 0.0

    def summary(self) -> dict[str, object]:
        return {
            "rejections": len(self.down),
            "steps": dict(self.steps),
            "bytes_down": statistics.fmean(self.down),
            "bytes_down_max": max(self.down),
            "bytes_up": statistics.fmean(self.up),
            "round_trips_more": statistics.fmean(self.frames) - 1.0,
            "charge": statistics.fmean(self.charges),
            "wrong": self.wrong,
            "tv": statistics.fmean(self.distances),
            "first_failed": self.failed,
            "first_expected": self.expected,
            "surprise": self.surprise,
        }


def forward(model, slot: int, ids: list[int], rows: int) -> np.ndarray:
    at = model.length(slot)
    return model.forward([Block(slot=slot, start=at, tokens=tuple(ids[at:]), rows=rows)])[0]


def answers(target, pipeline: SamplingPipeline, seed: int, prompts: int, tokens: int) -> Iterator:
    """(ids of prompt and answer, p in front of each id of the answer)."""
    for prompt in PROMPTS[:prompts]:
        ids = list(target.tokenizer.chat([{"role": "user", "content": prompt}]))
        slot, found = target.model.open(), []
        while len(found) < tokens:
            row = forward(target.model, slot, ids, 1)[0].copy()
            found.append(pipeline.distribution(row, NOTHING))
            ids.append(found[-1].draw(rng.key(seed, Purpose.TOKEN, len(ids))))
            if ids[-1] in target.model.info.eos_token_ids:
                break
        target.model.close(slot)
        yield ids, found


def fallen(
    p: Distribution, q: Distribution, position: int, draws: int, seed: int
) -> Iterator[tuple[int, int]]:
    """(seed, token) of the drafts of q that fall."""
    for i in range(draws):
        own = seed + i
        token = q.draw(rng.key(own, Purpose.DRAFT, position))
        if not accepts(p.prob(token), q.prob(token), seed=own, position=position):
            yield own, token


def measure(options: argparse.Namespace) -> dict[str, list[Group]]:
    """'draft, T' to a group for each of WISHES."""
    target = load_target("builtin:smollm2", threads=1)
    drafts = {name: load_draft_model(name, target, threads=1) for name in options.drafts.split(",")}
    width = target.model.info.vocab_size
    groups: dict[str, list[Group]] = {}
    for temperature in TEMPERATURES:
        params = SamplingParams(temperature=temperature)
        of_p = SamplingPipeline(params, vocab_size=width)
        asked = answers(target, of_p, options.seed, options.prompts, options.tokens)
        for ids, rows in asked:
            for name, model in drafts.items():
                of_q = SamplingPipeline(params, vocab_size=width, support=model.support)
                slot = model.open()
                others = forward(model, slot, ids[:-1], len(rows))
                model.close(slot)
                found = groups.setdefault(f"{name}, T={temperature:g}", [Group() for _ in WISHES])
                for i, (p, row) in enumerate(zip(rows, others, strict=True)):
                    q, at = of_q.distribution(row, NOTHING), len(ids) - len(rows) + i
                    for seed, token in fallen(p, q, at, options.draws, options.seed):
                        for group, wish in zip(found, WISHES, strict=True):
                            talk = Talk(p, q, token, wish, seed=seed, position=at, vocab_size=width)
                            group.add(talk, p, q)
        print(f"T={temperature:g} done", file=sys.stderr)
    return groups


def show(groups: dict[str, list[Group]]) -> None:
    names = [step.value for step in ResidualStep]
    for rows, found in groups.items():
        some = found[0]
        print(
            f"\n{rows}: {len(some.down)} rejections, mean Z {statistics.fmean(some.distances):.3f}"
        )
        print(
            "\n| K | budget | "
            + " | ".join(names)
            + " | bytes down | most | up | more trips | charge |"
        )
        print("|---|---|" + "---|" * (len(names) + 5))
        for wish, group in zip(WISHES, found, strict=True):
            facts = group.summary()
            ended = " | ".join(f"{100 * group.steps[n] / len(group.down):.0f} %" for n in names)
            print(
                f"| {wish.k or '-'} | {wish.budget:g} | {ended} | {facts['bytes_down']:.0f} | "
                f"{facts['bytes_down_max']} | {facts['bytes_up']:.1f} | "
                f"{facts['round_trips_more']:.2f} | {facts['charge']:.4f} |"
            )
    print("\nFirst batch of proposals failed, without lists\n")
    print("| rows | seen | (1-Z)^n | standard errors |")
    print("|---|---|---|---|")
    for rows, found in groups.items():
        g = found[0]
        print(f"| {rows} | {g.failed} of {len(g.down)} | {g.expected:.1f} | {g.surprise:+.2f} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=4, help=f"1 to {len(PROMPTS)}")
    parser.add_argument("--tokens", type=int, default=24, help="answer tokens a prompt")
    parser.add_argument("--draws", type=int, default=3, help="drafts drawn at each position")
    parser.add_argument("--drafts", default="small,large")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if min(options.prompts, options.tokens, options.draws) < 1:
        parser.error("--prompts, --tokens and --draws must be at least 1")
    groups = measure(options)
    wrong = sum(g.wrong for found in groups.values() for g in found)
    odd = any(abs(found[0].surprise) > 4.0 for found in groups.values())
    if options.json:
        facts = [
            {"rows": rows, "k": w.k, "budget": w.budget, **g.summary()}
            for rows, found in groups.items()
            for w, g in zip(WISHES, found, strict=True)
        ]
        print(json.dumps({"groups": facts, "wrong": wrong}, allow_nan=False))
    else:
        show(groups)
        print(f"\n{wrong} charges below what was cut off")
    return 1 if wrong or odd else 0


if __name__ == "__main__":
    sys.exit(main())
