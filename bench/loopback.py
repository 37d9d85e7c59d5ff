"""A round trip over loopback: sockets, event loop, threads, codec, sessions, acceptance.

Verifier and edge share one process and one event loop and talk over a real WebSocket, so a round
costs both sides' work one after the other and nothing is hidden behind the other side. The
schedule is `sync`: draft K ids, send, judge, answer. The engines' own time (the target's
forwards; making a draft, sampling from it included) is measured and taken out, as it is in
bench/wire_cost.py, which has the machines alone; everything else, thread hand-overs and system
calls included, is ours.
Wall time needs a quiet machine; processor time does not.

    python bench/loopback.py [--rounds 2000] [--draft-length 4] [--profile] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import platform
import pstats
import time
from collections.abc import Sequence

import numpy as np

from outrider.core.tokens import SamplingParams
from outrider.engines.base import Block, FloatRow
from outrider.engines.desk import SlotDesk
from outrider.engines.drafters import ModelDrafter
from outrider.engines.tokenizer import TableTokenizer
from outrider.engines.toy import Law, ToyModel
from outrider.runtime.cloud import CloudConfig, CloudServer
from outrider.runtime.edge import EdgeRuntime
from outrider.runtime.edgeconfig import EdgeConfig
from outrider.runtime.edgerequest import EdgeRequest
from outrider.session.schedules import Schedule

VOCAB = 64
ANSWER = 400
"""Tokens an answer: copies of the committed prefix grow with it."""


class Timed(ToyModel):
    """A toy that adds up the seconds spent in its forwards."""

    def __init__(self, law: Law, tokenizer: TableTokenizer) -> None:
        super().__init__(law, vocab_size=VOCAB, fingerprint=tokenizer.fingerprint)
        self.seconds = 0.0

    def forward(self, blocks: Sequence[Block]) -> list[FloatRow]:
        began = time.perf_counter()
        rows = super().forward(blocks)
        self.seconds += time.perf_counter() - began
        return rows


def cycle(peak: float, wrong: int) -> Law:
    """Mostly certain of the next id; at one position in `wrong` of another one."""
    rows = np.zeros((VOCAB, VOCAB), dtype=np.float32)
    for i in range(VOCAB):
        rows[i, (i + 1) % VOCAB] = peak
        if wrong and i % wrong == 0:
            rows[i, (i + 2) % VOCAB] = 2 * peak
    return lambda context: rows[context[-1]]


async def measure(rounds: int, draft_length: int, profile: cProfile.Profile | None) -> dict:
    tokenizer = TableTokenizer(
        [bytes([65 + i % 26]) for i in range(VOCAB)], special_ids=set(), eos_token_ids=set()
    )
    target = Timed(cycle(40.0, 0), tokenizer)
    draft = ToyModel(cycle(40.0, 7), vocab_size=VOCAB, fingerprint=tokenizer.fingerprint)
    walls: list[float] = []
    cpus: list[float] = []
    async with (
        CloudServer(SlotDesk(target), tokenizer, CloudConfig(port=0)) as cloud,
        EdgeRuntime(
            EdgeConfig(url=f"ws://127.0.0.1:{cloud.port}"),
            tokenizer,
            ModelDrafter("toy", model=draft),
            context_length=4096,
        ) as edge,
    ):
        seed = 0
        while len(walls) < rounds:
            seed += 1
            params = SamplingParams(seed=seed, max_tokens=ANSWER, ignore_eos=True)
            request = EdgeRequest(
                prompt_ids=(1, 2, 3),
                params=params,
                schedule=Schedule.SYNC,
                draft_length=draft_length,
            )
            stream = await edge.stream(request)
            last: tuple[float, float, float] | None = None
            if profile is not None and seed == 2:
                profile.enable()
            async for _ in stream:
                engines = target.seconds + edge.drafting.seconds
                now = (time.perf_counter(), time.process_time(), engines)
                if last is not None and seed > 1:  # the first answer warms up
                    out = now[2] - last[2]
                    walls.append(now[0] - last[0] - out)
                    cpus.append(now[1] - last[1] - out)
                last = now
        if profile is not None:
            profile.disable()
    walls.sort()
    cpus.sort()

    def at(values: list[float], share: float) -> float:
        return round(1e3 * values[min(len(values) - 1, int(share * len(values)))], 4)

    return {
        "rounds": len(walls),
        "draft_length": draft_length,
        "vocab": VOCAB,
        "wall_ms": {"p50": at(walls, 0.5), "p90": at(walls, 0.9), "p99": at(walls, 0.99)},
        "cpu_ms": {"p50": at(cpus, 0.5), "p90": at(cpus, 0.9), "p99": at(cpus, 0.99)},
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--profile", action="store_true", help="where the loop's thread spends it")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    profile = cProfile.Profile() if options.profile else None
    facts = asyncio.run(measure(options.rounds, options.draft_length, profile))
    if options.json:
        print(json.dumps(facts))
        return
    print(f"{facts['rounds']} rounds of {options.draft_length} drafts, engines excluded, ms")
    for kind in ("wall_ms", "cpu_ms"):
        values = "  ".join(f"{name} {value:.3f}" for name, value in facts[kind].items())
        print(f"  {kind.removesuffix('_ms'):5} {values}")
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(35)


if __name__ == "__main__":
    main()
