"""What a verifier that runs already can tell a plan: `outrider plan --cloud URL`."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from outrider.bench.prompts import PROMPTS
from outrider.commands import console, models, specs
from outrider.commands.errors import CommandError
from outrider.commands.options import DEFAULT_TARGET
from outrider.commands.planfacts import MEASURED, Known
from outrider.commands.remote import bearer_token, must_resolve
from outrider.commands.traces import Recording
from outrider.core.tokens import SamplingParams
from outrider.plan.facts import Curve
from outrider.session.schedules import Schedule

if TYPE_CHECKING:
    from outrider.control.base import Estimates

CONTROLLER: Final = "ucb-specstop"
"""Who chooses the blocks of the answers that measure: it tries every length, so that S(k) is seen
as far as LONGEST."""
LONGEST: Final = 8


def ask_cloud(
    known: Known,
    url: str,
    asked: Recording,
    link: str | None,
    token_file: Path | None,
    ca_file: Path | None,
    *,
    insecure: bool,
) -> None:
    """Row costs from the verifier's greeting; round trip, t_d and S(k) from a few answers."""
    from outrider.core.link import parse_link
    from outrider.engines.load import load_drafter, load_vocabulary
    from outrider.runtime.edgeconfig import EdgeConfig
    from outrider.runtime.shaping import load_trace

    target = asked.target or DEFAULT_TARGET
    specs.refuse_bare("--target", target)
    specs.refuse_bare("--draft", asked.draft)
    if asked.prompts:
        raise CommandError("--prompts are for --measure: --cloud asks the built-in ones")
    config = EdgeConfig(
        url=url,
        token=bearer_token(token_file),
        ca_file=str(ca_file) if ca_file else None,
        link=None if link is None else parse_link(link, load=load_trace),
        insecure=insecure,
    )
    must_resolve(url)
    name = asked.draft or models.default_draft(target)
    with console.waiting(f"loading the draft {name}"):
        vocabulary = load_vocabulary(target)
        drafter = load_drafter(name, vocabulary, threads=asked.threads)
    with console.waiting("asking the verifier"):
        rows, seen = asyncio.run(_ask(config, vocabulary, drafter, asked))
    if len(rows) > 1 or (rows and "verify" not in known.values):
        known.put("verify", rows, MEASURED)
    known.put("round_trip", seen.round_trip, MEASURED)
    known.put("draft", seen.draft, MEASURED)
    known.put("curve", Curve.of(seen.curve.survival(LONGEST)), MEASURED)


async def _ask(
    config: Any, vocabulary: Any, drafter: Any, asked: Recording
) -> tuple[tuple[tuple[int, float], ...], Estimates]:
    """(rows, seconds) as the verifier says, and what the edge learnt from its answers."""
    from outrider.bench.live import answer_over
    from outrider.runtime.edge import EdgeRuntime
    from outrider.runtime.edgerequest import EdgeRequest

    params = SamplingParams(
        temperature=asked.temperature, max_tokens=asked.max_tokens, seed=asked.seed
    )
    async with EdgeRuntime(
        config,
        vocabulary.tokenizer,
        drafter,
        context_length=vocabulary.model.info.context_length,
    ) as runtime:
        for text in PROMPTS[: min(asked.samples, len(PROMPTS))]:
            ids = models.encode(vocabulary.tokenizer, text, raw=False, system=None)
            request = EdgeRequest(
                prompt_ids=ids,
                params=params,
                schedule=Schedule.SYNC,
                draft_length=LONGEST,
                window=LONGEST,
                controller=CONTROLLER,
            )
            await answer_over(runtime, request)
        assert runtime.peer is not None, "a verifier that answered has greeted"
        rows = tuple((n, ms / 1e3) for n, ms in runtime.peer.row_ms)
        seen = runtime.learnt.estimators.snapshot(time.monotonic())
    if not rows:
        rows = tuple(seen.verify.curve())
    return rows, seen
