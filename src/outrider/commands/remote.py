"""`outrider generate --cloud`: the same answer with the target behind a network."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, aclosing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TextIO
from urllib.parse import urlsplit

from outrider.commands import console, models, specs
from outrider.commands.errors import CommandError
from outrider.commands.linkline import LinkLine
from outrider.core.relaxation import Relaxation
from outrider.core.residual import TopKReply
from outrider.core.tokens import Rule, SamplingParams
from outrider.proto.messages import Code
from outrider.runtime.contact import Contact
from outrider.session.events import Failed
from outrider.session.generation import Step
from outrider.session.schedules import Schedule

TOKEN_VARIABLE: Final = "OUTRIDER_TOKEN"
PATIENCE_S: Final = 10.0
"""How long a person at a prompt waits for a cloud that was never reached. Once it has greeted,
the edge's own patience holds (session.client.GIVE_UP_AFTER): a verifier may need it to restart."""
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
    insecure: bool = False


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
    reply: TopKReply = field(default_factory=TopKReply)


def bearer_token(file: Path | None) -> str | None:
    """The token to log in with: the file's first line (a name and colon before it are fine),
    else the environment variable OUTRIDER_TOKEN. Raises CommandError for one that cannot be
    sent, and never shows it."""
    return next(bearer_tokens(file))[1]


def bearer_tokens(file: Path | None) -> Iterator[tuple[str, str | None]]:
    """Tenant and token of each line of the file, likewise; without a file there is one, for a
    tenant whose name is not known here."""
    from outrider.runtime.access import ConfigurationError, token_lines

    if file is None:
        token = os.environ.get(TOKEN_VARIABLE, "")
        yield "default", _sendable(token, TOKEN_VARIABLE) if token else None
        return
    try:
        lines = token_lines(file)
    except ConfigurationError as error:
        raise CommandError(f"--token-file: {error}") from None
    if lines and lines[0].digest and not lines[0].token:
        raise CommandError(
            f"--token-file: {file} holds the hash of a token; to log in takes the token itself, "
            "which outrider token new showed once"
        )
    if not lines or not lines[0].token:
        raise CommandError(f"--token-file: {file} holds no token")
    for line in lines:
        yield line.tenant, _sendable(line.token, f"--token-file: {file}")


def _sendable(token: str, source: str) -> str:
    from outrider.runtime.access import sendable

    if not sendable(token):
        raise CommandError(f"{source} holds no token: one is visible ASCII without blanks")
    return token


def answer(remote: Remote, question: Question, *, as_json: bool) -> None:
    """Ask, stream, report."""
    from outrider.control.registry import parse as parse_controller
    from outrider.core.link import parse_link
    from outrider.engines.load import load_drafter, load_vocabulary
    from outrider.runtime.edgeconfig import EdgeConfig
    from outrider.runtime.edgerequest import EdgeRequest
    from outrider.runtime.shaping import load_trace

    specs.refuse_bare("--target", question.target)
    specs.refuse_bare("--draft", question.draft)
    controller, options = parse_controller(remote.controller)
    config = EdgeConfig(
        url=remote.url,
        token=bearer_token(remote.token_file),
        ca_file=str(remote.ca_file) if remote.ca_file else None,
        link=None if remote.link is None else parse_link(remote.link, load=load_trace),
        insecure=remote.insecure,
    )
    request = EdgeRequest(
        prompt_ids=(0,),  # until there is a tokenizer; the rest is checked before it is loaded
        params=question.params,
        rule=question.rule,
        relaxation=question.relaxation,
        reply=question.reply,
        schedule=remote.schedule,
        draft_length=remote.draft_length,
        window=remote.window,
        growth=remote.growth,
        controller=controller,
        controller_options=options,
        calibration=str(remote.calibration) if remote.calibration else None,
    )
    must_resolve(config.url)
    with console.waiting(f"loading the tokenizer of {question.target}"):
        vocabulary = load_vocabulary(question.target)
    drafter = None
    if remote.schedule not in NO_DRAFTER:
        name = question.draft or models.default_draft(question.target)
        with console.waiting(f"loading the draft {name}"):
            drafter = load_drafter(
                name,
                vocabulary,
                device=question.device,
                threads=question.threads,
                max_slots=models.ONE_REQUEST,
            )
    ids = models.encode(
        vocabulary.tokenizer, question.text, raw=question.raw, system=question.system
    )
    request = replace(request, prompt_ids=ids)
    asyncio.run(_ask(config, request, vocabulary, drafter, remote, as_json=as_json))


def must_resolve(url: str) -> None:
    """Raise OSError where the host has no address: a slip that no second try cures. The edge
    itself goes on trying, for it may be between two networks in the middle of an answer."""
    parts = urlsplit(url)
    try:
        socket.getaddrinfo(parts.hostname, None)
    except socket.gaierror as error:
        raise OSError(f"--cloud: cannot find {parts.hostname}: {error.strerror}") from None


async def told(stream: Any, runtime: Any) -> AsyncIterator[Step | Contact]:
    """Steps of an answer, and what becomes of the link meanwhile. Raises CloudError when no
    verifier has greeted for PATIENCE_S."""
    patient = time.monotonic() + PATIENCE_S
    async with aclosing(stream.told()) as items:
        while True:
            item = await _next(items, runtime, patient)
            if item is None:
                return
            if isinstance(item, Contact) and runtime.peer is None:
                item = replace(item, until=patient, first=True)
            yield item


async def _next(items: Any, runtime: Any, patient: float) -> Any:
    """None: there is no further one. `patient`: until when, unless a verifier greets."""
    if runtime.peer is not None:
        return await anext(items, None)
    waiting = asyncio.ensure_future(anext(items, None))
    try:
        await asyncio.wait((waiting,), timeout=max(0.0, patient - time.monotonic()))
        if not waiting.done() and runtime.peer is None:
            message = f"no verifier has answered for {PATIENCE_S:g} s"
            error = runtime.failure(Failed(session=0, code=Code.UNREACHABLE, message=message))
            words = str(error).removesuffix(f" ({error.code.value})")
            error.args = (f"{words}; is outrider cloud running there?",)
            raise error
        return await waiting
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def _ask(
    config: Any, request: Any, vocabulary: Any, drafter: Any, remote: Remote, *, as_json: bool
) -> None:
    from outrider.runtime.edge import EdgeRuntime

    context = vocabulary.model.info.context_length
    with ExitStack() as stack:
        trace = None
        if remote.trace is not None:
            trace = _Trace(stack.enter_context(remote.trace.open("a", encoding="utf-8")))
        async with EdgeRuntime(
            config,
            vocabulary.tokenizer,
            drafter,
            context_length=context,
            target=vocabulary.model.info,
        ) as runtime:
            stream = await runtime.stream(request)
            began = time.monotonic()
            line = stack.enter_context(LinkLine())
            within = False
            line.wait()
            try:
                async for step in told(stream, runtime):
                    if isinstance(step, Contact):
                        line.show(step, within=within)
                        continue
                    line.clear()
                    if not as_json:
                        sys.stdout.write(step.text)
                        sys.stdout.flush()
                        within = not step.text.endswith("\n") if step.text else within
                    if trace is not None:
                        trace.write(_record(time.monotonic() - began, step))
            finally:
                line.clear()
                stream.close()
                if not as_json and stream.result.generation.token_ids:
                    sys.stdout.write("\n")
                    sys.stdout.flush()
    result = stream.result
    pace = runtime.peer.pace_ms if runtime.peer else 0.0
    if as_json:
        console.print_json(result.as_dict() | {"target_pace_ms": pace})
        return
    facts = f"{models.summary(result.generation)} · {result.schedule.value} · {_traffic(result)}"
    if pace:
        facts += f" · each target call {pace:g} ms slower on purpose"
    console.messages().print(facts, style="dim", markup=False)


class _Trace:
    """--trace FILE. It is opened at once, so that one that cannot be written is refused early; what
    an earlier run left in it goes when there is something to put in its place."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._begun = False

    def write(self, line: str) -> None:
        if not self._begun and stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            self._file.truncate(0)
        self._begun = True
        self._file.write(line)


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
