"""What our own code costs a round trip: codec, connections, sessions, acceptance; no engine.

Both machines in one process, frames handed over as bytes. One round: the edge takes a block of
K drafts, DRAFT is encoded, decoded, judged (one draw from p for each row), VERDICT is encoded,
decoded and committed. Making rows and drafts is the engines' work and is left out of the times;
drawing from the rows is ours and stays in, over a vocabulary of 64 ids (bench/core_cost.py has
real widths). Seven of ten drafts are right, so blocks end in the middle. Times are this thread's
processor time: what other processes do in between does not count.

    python bench/wire_cost.py [--rounds 3000] [--json]
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from outrider.core import rng
from outrider.core.draft import Draft
from outrider.core.rng import Purpose
from outrider.core.sampling import History, SamplingPipeline
from outrider.core.tokens import Rule, SamplingParams
from outrider.proto.codec import MAX_FRAME_BYTES, decode, encode
from outrider.proto.connection import Connection, Role
from outrider.proto.messages import PROTOCOL_VERSION, Hello, Limits, Verdict
from outrider.proto.messages import Draft as DraftFrame
from outrider.session.client import EdgeClient
from outrider.session.events import Progress
from outrider.session.generation import Generation
from outrider.session.schedules import Schedule, plan
from outrider.session.service import CloudService, Done, ServiceConfig

VOCAB = 64
ANSWER = 512
"""Tokens an answer: copies of the committed prefix grow with it."""


class Words:
    def push(self, token: int) -> str:
        return chr(97 + token % 26)

    def flush(self) -> str:
        return ""


def greeting(role: Role) -> Hello:
    return Hello(
        versions=(PROTOCOL_VERSION,),
        role=role.value,
        agent="bench",
        fingerprint="bench",
        vocab_size=VOCAB,
        logits_width=VOCAB,
        context_length=4096,
        limits=Limits(frame_bytes=MAX_FRAME_BYTES, window=256, sessions=64, prompt_tokens=4096),
        rules=("coupled",),
    )


@dataclass
class Watch:
    """Sums up the spans between `start` and `stop`."""

    spent: int = 0
    spans: list[int] = field(default_factory=list)
    _since: int = 0

    def start(self) -> None:
        self._since = time.thread_time_ns()

    def stop(self) -> None:
        self.spent += time.thread_time_ns() - self._since

    def lap(self) -> None:
        self.spans.append(self.spent)
        self.spent = 0


@dataclass
class Pair:
    """An edge and a cloud, connected."""

    client: EdgeClient
    service: CloudService
    up: Connection
    bytes_up: int = 0
    bytes_down: int = 0


def connect() -> Pair:
    client = EdgeClient(greeting(Role.EDGE), now=0.0, uid=lambda: bytes(16))
    config = ServiceConfig(
        vocab_size=VOCAB, context_length=4096, eos=frozenset(), deterministic=True
    )
    pair = Pair(
        client, CloudService(config, Words), Connection(Role.CLOUD, greeting(Role.CLOUD), now=0.0)
    )
    pair.service.connected(1, "bench")
    return pair


def one_answer(seed: int, drafts: int, context: int, watch: Watch) -> tuple[int, int, int]:
    """Rounds, bytes up, bytes down of one answer; times go to `watch`."""
    pair = connect()
    client, service, cloud = pair.client, pair.service, pair.up
    rows = np.random.default_rng(seed).normal(size=(ANSWER + context + 64, VOCAB))
    rows = rows.astype(np.float32)
    prompt = tuple(range(1, 1 + context)) if context < VOCAB else (1,) * context
    params = SamplingParams(seed=seed, max_tokens=ANSWER)
    generation = Generation(prompt, params, context_length=4096, eos=frozenset(), text=Words())
    client.start(
        generation,
        plan(Schedule.SYNC, draft_length=drafts, window=drafts),
        rule=Rule.COUPLED,
        now=0.0,
    )
    first = client.take(0.0)
    assert first.dial
    client.connected(0.0)
    rounds, ends, now = 0, False, 0.0
    pipeline = SamplingPipeline(params, vocab_size=VOCAB, end_ids=frozenset())
    seen = History(prompt)
    guess = np.random.default_rng(seed + 1)
    while not ends:
        now += 0.01
        watch.start()
        out = client.take(now)
        for frame in out.frames:
            message = cloud.receive(frame, now)
            if message is not None and not isinstance(message, Hello):
                for reply in service.receive(1, message, now):
                    cloud.send(reply.message)
        watch.stop()
        for number, job in (*first.drafts, *out.drafts) if now < 0.015 else out.drafts:
            at = len(job.context)
            keys = (rng.key(seed, Purpose.TOKEN, at + i) for i in range(job.count))
            own = (pipeline.distribution(rows[at + i], seen).draw(k) for i, k in enumerate(keys))
            tokens = tuple(t if guess.random() < 0.7 else (t + 1) % VOCAB for t in own)
            watch.start()
            client.drafted(number, Draft(tokens=tokens), now)
            watch.stop()
        ends = any(isinstance(e, Progress) and e.step.finish for e in out.events)
        watch.start()
        work = service.batch(now)
        watch.stop()
        if work:
            (item,) = work
            start, count = len(item.job.committed), item.job.rows
            done = Done(key=item.key, rows=rows[start : start + count], fed=count)
            watch.start()
            for reply in service.finished([done], started=now, now=now + 0.01):
                cloud.send(reply.message)
            watch.stop()
        watch.start()
        frames = cloud.take()
        for frame in frames:
            client.receive(frame, now)
        watch.stop()
        if any(frame[0] == 0x21 for frame in frames):
            rounds += 1
            watch.lap()
    return rounds, client.bytes_up, client.bytes_down


def codec_alone() -> float:
    """Microseconds to encode and decode one DRAFT of 8 ids and one VERDICT."""
    draft = DraftFrame(session=1, epoch=3, start=900, tokens=tuple(range(40_000, 40_008)))
    verdict = Verdict(session=1, epoch=3, start=900, drafted=8, accepted=5, token=40_000)
    began = time.perf_counter_ns()
    for _ in range(5000):
        decode(encode(draft))
        decode(encode(verdict))
    return (time.perf_counter_ns() - began) / 5000 / 1e3


def report(rounds: int, show: Callable[[str], None] | None) -> list[dict[str, float]]:
    found = []
    for drafts in (1, 4, 8, 16):
        for context in (16, 2048):
            watch, total, up, down, seed = Watch(), 0, 0, 0, 0
            one_answer(99, drafts, context, Watch())  # warm
            while total < rounds:
                n, u, d = one_answer(seed, drafts, context, watch)
                total, up, down, seed = total + n, up + u, down + d, seed + 1
            spans = np.array(watch.spans) / 1e3
            row = {
                "drafts": drafts,
                "prompt": context,
                "rounds": total,
                "p50_us": float(np.percentile(spans, 50)),
                "p99_us": float(np.percentile(spans, 99)),
                "bytes_up_a_round": up / total,
                "bytes_down_a_round": down / total,
            }
            found.append(row)
            if show:
                show(
                    f"{drafts:6d} {context:7d} {row['p50_us']:9.0f} {row['p99_us']:9.0f} "
                    f"{row['bytes_up_a_round']:9.1f} {row['bytes_down_a_round']:11.1f}"
                )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.json:
        rows = report(options.rounds, None)
        print(
            json.dumps(
                {"rows": rows, "codec_us": codec_alone(), "python": platform.python_version()}
            )
        )
        return
    print(
        f"our own code, both sides, one round trip; Python {platform.python_version()}, no engine"
    )
    print("drafts  prompt    p50 us    p99 us  bytes up  bytes down   (session opening included)")
    report(options.rounds, print)
    print(f"codec alone, DRAFT of 8 and VERDICT, both ways: {codec_alone():.1f} us")


if __name__ == "__main__":
    main()
