"""Request values to wire values and back."""

from __future__ import annotations

import math

from outrider.core.divergence import Divergence
from outrider.core.ledger import Ledger
from outrider.core.relaxed import Policy, RelaxedRule
from outrider.core.residual import TopKReply, require_ratio
from outrider.core.tokens import ParameterError, Rule, SamplingParams
from outrider.proto.errors import RemoteError
from outrider.proto.messages import Code, Open, Relax, Sampling


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
        seed=params.seed,
    )


def from_wire(sampling: Sampling, session: int) -> SamplingParams:
    """Checked parameters (I5). Raises RemoteError naming the field that is out of range."""
    fields = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
    fields["stop_token_ids"] = frozenset(sampling.stop_token_ids)
    try:
        return SamplingParams(**fields)
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
