"""Request values to wire values and back."""

from __future__ import annotations

from outrider.core.tokens import ParameterError, SamplingParams
from outrider.proto.errors import RemoteError
from outrider.proto.messages import Code, Sampling


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
