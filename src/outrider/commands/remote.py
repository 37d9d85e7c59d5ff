"""`outrider generate --cloud`: the same answer with the target behind a network."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from outrider.commands import console, models
from outrider.commands.errors import CommandError
from outrider.core.relaxation import Relaxation
from outrider.core.tokens import Rule, SamplingParams
from outrider.session.generation import Step
from outrider.session.schedules import Schedule

TOKEN_VARIABLE: Final = "OUTRIDER_TOKEN"
PATIENCE_S: Final = 10.0
"""How long a person at a prompt waits for a cloud that cannot be reached."""
NO_DRAFTER: Final = frozenset({Schedule.CLOUD_ONLY, Schedule.COLOCATED})
"""Schedules in which the edge itself drafts nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """Where the cloud is and how the edge works with it."""

    url: str
    schedule: Schedule
    window: int
    draft_length: int
    growth: float
    controller: str
    calibration: Path | None
    link: str | None
    token_file: Path | None
    ca_file: Path | None
    trace: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to ask."""

    target: str
    draft: str | None
    device: str
    threads: int | None
    text: str
    raw: bool
    system: str | None
    params: SamplingParams
    rule: Rule
    relaxation: Relaxation | None = None


def bearer_token(file: Path | None) -> str | None:
    """The token to log in with: the file's first line (a name and colon before it are fine),
    else the environment variable OUTRIDER_TOKEN."""
    if file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    token = next((line for line in lines if line and not line.startswith("#")), "")
    token = token.rpartition(":")[2].strip()
    if not token:
        raise CommandError(f"{file} holds no token")
    return token


def answer(remote: Remote, question: Question, *, as_json: bool) -> None:
    """Ask, stream, report."""
    from outrider.control.registry import parse as parse_controller
    from outrider.core.link import parse_link
    from outrider.engines.load import load_drafter, load_vocabulary
    from outrider.runtime.edge import EdgeConfig, EdgeRequest
    from outrider.runtime.shaping import load_trace

    controller, options = parse_controller(remote.controller)
    config = EdgeConfig(
        url=remote.url,
        token=bearer_token(remote.token_file),
        ca_file=str(remote.ca_file) if remote.ca_file else None,
        link=parse_link(remote.link, load=load_trace) if remote.link else None,
        give_up=PATIENCE_S,
    )
    with console.waiting(f"loading the tokenizer of {question.target}"):
        vocabulary = load_vocabulary(question.target)
    drafter = None
    if remote.schedule not in NO_DRAFTER:
        name = question.draft or models.default_draft(question.target)
        with console.waiting(f"loading the draft {name}"):
            drafter = load_drafter(
                name, vocabulary, device=question.device, threads=question.threads
            )
    ids = models.encode(
        vocabulary.tokenizer, question.text, raw=question.raw, system=question.system
    )
    request = EdgeRequest(
        prompt_ids=ids,
        params=question.params,
        rule=question.rule,
        relaxation=question.relaxation,
        schedule=remote.schedule,
        draft_length=remote.draft_length,
        window=remote.window,
        growth=remote.growth,
        controller=controller,
        controller_options=options,
        calibration=str(remote.calibration) if remote.calibration else None,
    )
    asyncio.run(_ask(config, request, vocabulary, drafter, remote, as_json=as_json))


async def _ask(
    config: Any, request: Any, vocabulary: Any, drafter: Any, remote: Remote, *, as_json: bool
) -> None:
    from outrider.runtime.edge import EdgeRuntime

    context = vocabulary.model.info.context_length
    with ExitStack() as stack:
        trace = None
        if remote.trace is not None:
            trace = stack.enter_context(remote.trace.open("w", encoding="utf-8"))
        async with EdgeRuntime(
            config, vocabulary.tokenizer, drafter, context_length=context
        ) as runtime:
            stream = await runtime.stream(request)
            began = time.monotonic()
            try:
                async for step in stream:
                    if not as_json:
                        sys.stdout.write(step.text)
                        sys.stdout.flush()
                    if trace is not None:
                        trace.write(_record(time.monotonic() - began, step))
            finally:
                stream.close()
                if not as_json and stream.result.generation.token_ids:
                    sys.stdout.write("\n")
                    sys.stdout.flush()
    result = stream.result
    if as_json:
        console.print_json(result.as_dict())
        return
    line = f"{models.summary(result.generation)} · {result.schedule.value} · {_traffic(result)}"
    console.messages().print(line, style="dim", markup=False)


def _record(seconds: float, step: Step) -> str:
    """One round as a JSON line: when its tokens came, who wrote each, and what it took."""
    fact: dict[str, Any] = {
        "t_s": round(seconds, 6),
        "tokens": list(step.tokens),
        "origins": [o.value for o in step.origins],
    }
    if step.round is not None:
        fact |= asdict(step.round)
    return json.dumps(fact) + "\n"


def _traffic(result: Any) -> str:
    use = result.link
    text = f"{use.bytes_up} bytes up, {use.bytes_down} down"
    if use.reconnects:
        text += f", {use.reconnects} reconnects"
    return text
