"""Request values to wire values and back."""

from __future__ import annotations

import math

from outrider.core.divergence import Divergence
from outrider.core.grammar import Grammar, GrammarKind
from outrider.core.ledger import Ledger
from outrider.core.relaxed import Policy, RelaxedRule
from outrider.core.residual import TopKReply, require_ratio
from outrider.core.tokens import GrammarError, ParameterError, Rule, SamplingParams
from outrider.proto.errors import RemoteError
from outrider.proto.messages import Code, GrammarText, Open, Relax, Sampling


def to_wire(params: SamplingParams) -> Sampling:
    """SamplingParams as OPEN carries them."""
    return Sampling(
        temperature=float(params.temperature),
        top_k=params.top_k,
        top_p=float(params.top_p),
        min_p=float(params.min_p),
        repetition_penalty=float(params.repetition_penalty),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        logit_bias={token: float(bias) for token, bias in params.logit_bias.items()},
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop=params.stop,
        stop_token_ids=tuple(sorted(params.stop_token_ids)),
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        given=params.given,
        seed=params.seed,
        grammar=_grammar_to_wire(params.grammar),
    )


def _grammar_to_wire(grammar: Grammar | None) -> GrammarText | None:
    return None if grammar is None else GrammarText(kind=grammar.kind.value, text=grammar.text)


def _grammar_from_wire(grammar: GrammarText | None) -> Grammar | None:
    if grammar is None:
        return None
    try:
        return Grammar(kind=GrammarKind(grammar.kind), text=grammar.text)
    except ValueError:
        raise GrammarError(f"must be one of the kinds {', '.join(GrammarKind)}") from None


def from_wire(sampling: Sampling, session: int) -> SamplingParams:
    """Checked parameters (I5). Raises RemoteError naming the field that is out of range."""
    fields = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
    fields["stop_token_ids"] = frozenset(sampling.stop_token_ids)
    try:
        fields["grammar"] = _grammar_from_wire(sampling.grammar)
        return SamplingParams(**fields)
    except GrammarError as error:
        raise RemoteError(Code.GRAMMAR, str(error), session) from None
    except ParameterError as error:
        raise RemoteError(Code.PARAMETER, str(error), session) from None


def relax_to_wire(policy: Policy, ledger: Ledger) -> Relax:
    """A relaxed session as OPEN carries it: what was spent before goes with it."""
    return Relax(
        rule=policy.rule.value,
        threshold=float(policy.threshold),
        divergence=policy.divergence.value,
        epsilon=float(policy.epsilon),
        delta=float(policy.delta),
        budget=None if math.isinf(ledger.budget) else float(ledger.budget),
        spent=float(ledger.spent),
        relaxed=ledger.relaxed,
        max_jsd=float(ledger.max_jsd),
    )


def relax_from_wire(relax: Relax, session: int) -> tuple[Policy, Ledger]:
    """Checked policy and ledger (I5). Raises RemoteError naming what is out of range."""
    try:
        policy = Policy(
            rule=RelaxedRule(relax.rule),
            threshold=relax.threshold,
            divergence=Divergence(relax.divergence),
            epsilon=relax.epsilon,
            delta=relax.delta,
        )
        ledger = Ledger(
            budget=math.inf if relax.budget is None else relax.budget,
            spent=relax.spent,
            relaxed=relax.relaxed,
            max_jsd=relax.max_jsd,
        )
    except ValueError as error:  # ParameterError is one
        raise RemoteError(Code.PARAMETER, str(error), session) from None
    return policy, ledger


def reply_from_wire(message: Open, rule: Rule) -> TopKReply:
    """How rejections are to be answered, checked (I5); its budget is what is left of the edge's.
    Raises RemoteError naming what is out of range."""
    try:
        reply = TopKReply(k=message.top_k_reply, budget=message.tv_left)
        require_ratio(rule, reply)
    except ParameterError as error:
        raise RemoteError(Code.PARAMETER, str(error), message.session) from None
    return reply
