"""What an OPEN asks for, checked against the target and the limits, and the session made of it.

Both steps raise RemoteError and hold nothing: whoever admits sessions counts them in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from outrider.core.grammar import Constraint, Grammars
from outrider.core.ledger import Ledger
from outrider.core.partial import require_known
from outrider.core.relaxed import Policy
from outrider.core.tokens import GrammarError, ParameterError, Rule, SamplingParams
from outrider.proto.errors import RemoteError
from outrider.proto.messages import Code, Open
from outrider.session.cloud import CloudSession, StepPolicy, Take
from outrider.session.generation import Generation, TextStream
from outrider.session.verifier import Verifier
from outrider.session.wire import from_wire, relax_from_wire, reply_from_wire
from outrider.session.work import ServiceConfig

MAX_CLOUD_DRAFT: Final = 64
"""Most drafts a block that a co-located session may ask for."""
UID_BYTES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """An OPEN's own words, as values of ours."""

    params: SamplingParams
    rule: Rule
    policy: StepPolicy
    take: Take


def checked(message: Open, config: ServiceConfig) -> Wishes:
    """RemoteError with the code that fits the first thing wrong; nothing else is trusted (I5)."""
    number = message.session
    params = from_wire(message.sampling, number)
    if len(message.uid) != UID_BYTES:
        raise RemoteError(Code.MALFORMED, f"uid must have {UID_BYTES} bytes", number)
    ids = (*message.prompt, *message.committed, *params.given)
    if len(ids) > config.max_prompt_tokens:
        raise RemoteError(Code.TOO_LARGE, f"{len(ids)} ids in OPEN", number)
    if any(not 0 <= t < config.vocab_size for t in ids):
        raise RemoteError(Code.MALFORMED, "token id outside the vocabulary", number)
    for name, named in (
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
    ):
        if any(t >= config.vocab_size for t in named):
            raise RemoteError(Code.PARAMETER, f"{name}: id outside the vocabulary", number)
    if not 0 <= message.cloud_draft <= MAX_CLOUD_DRAFT:
        raise RemoteError(Code.PARAMETER, f"cloud_draft above {MAX_CLOUD_DRAFT}", number)
    try:
        rule, policy = Rule(message.rule), StepPolicy(message.step)
        take = Take(message.take)
    except ValueError as error:
        raise RemoteError(Code.PARAMETER, str(error), number) from None
    if rule not in config.rules:
        raise RemoteError(Code.PARAMETER, f"this target cannot do {rule.value}", number)
    try:
        require_known(params, config.known_ids)
    except ParameterError as error:
        raise RemoteError(Code.PARAMETER, str(error), number) from None
    return Wishes(params=params, rule=rule, policy=policy, take=take)


def opened(
    message: Open,
    wishes: Wishes,
    config: ServiceConfig,
    *,
    text: Callable[[], TextStream],
    grammars: Grammars | None,
    tenant: str,
    now: float,
) -> tuple[CloudSession, Constraint | None]:
    """The session, with what is committed already, and the grammar of drafts made here."""
    number, params, rule = message.session, wishes.params, wishes.rule
    relax = _relaxation(message, rule)
    reply = reply_from_wire(message, rule)
    generation = _generation(message, params, config, text())
    constraint = _constraint(params, grammars, tenant, number)
    verifier = Verifier(
        params,
        rule,
        prompt=message.prompt,
        vocab_size=config.vocab_size,
        end_ids=frozenset() if params.ignore_eos else config.eos,
        watch_ties=not config.deterministic,
        policy=relax and relax[0],
        ledger=relax and relax[1],
        constraint=constraint,
    )
    session = CloudSession(
        number,
        generation,
        verifier,
        rule=rule,
        policy=wishes.policy,
        take=wishes.take,
        vocab_size=config.vocab_size,
        window=config.max_window,
        now=now,
        held=message.held,
        reply=reply,
    )
    session.restore(message.committed)
    return session, constraint.fork() if constraint and message.cloud_draft else None


def _constraint(
    params: SamplingParams, grammars: Grammars | None, tenant: str, number: int
) -> Constraint | None:
    if params.grammar is None:
        return None
    if grammars is None:
        raise RemoteError(Code.GRAMMAR, "there are no grammars here", number)
    try:
        return grammars.constraint(params.grammar, tenant)
    except GrammarError as error:
        raise RemoteError(Code.GRAMMAR, str(error), number) from None


def _relaxation(message: Open, rule: Rule) -> tuple[Policy, Ledger] | None:
    if (message.relax is not None) != (rule is Rule.RELAXED):
        raise RemoteError(
            Code.PARAMETER, "the relaxed rule, and no other, needs `relax`", message.session
        )
    if message.relax is None:
        return None
    return relax_from_wire(message.relax, message.session)


def _generation(
    message: Open, params: SamplingParams, config: ServiceConfig, text: TextStream
) -> Generation:
    try:
        return Generation(
            message.prompt,
            params,
            context_length=config.context_length,
            eos=config.eos,
            text=text,
        )
    except ParameterError as error:
        raise RemoteError(Code.CONTEXT, str(error), message.session) from None
