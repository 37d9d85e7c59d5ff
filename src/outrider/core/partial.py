"""What is exact where a target names only its likeliest ids of each row.

A server that runs the target tells the log-probabilities of the N likeliest ids and no others.
With top-k of at most N the others have probability 0 whatever they are, so temperature, top-k,
top-p and min-p are exact; at temperature 0 one id is enough. Whatever could lift an id from outside
the list into it, or needs the sum over all ids, cannot be done and is refused, never approximated.
"""

from __future__ import annotations

from outrider.core.sampling import GREEDY_BELOW
from outrider.core.tokens import ParameterError, SamplingParams


def require_known(params: SamplingParams, known_ids: int | None) -> None:
    """Raise ParameterError unless rows of the `known_ids` likeliest ids (None: of all) decide
    everything that `params` ask for."""
    if known_ids is None:
        return
    target = f"this target tells the {known_ids} likeliest ids of a position"
    if known_ids == 1:
        target = "this target tells the likeliest id of a position"
    if params.temperature > GREEDY_BELOW and not 0 < params.top_k <= known_ids:
        fix = f"0, or any with top_k from 1 to {known_ids}" if known_ids > 1 else "0"
        raise ParameterError("temperature", f"{target}; use {fix}")
    for name, wanted in (
        ("repetition_penalty", params.repetition_penalty != 1.0),
        ("presence_penalty", params.presence_penalty != 0.0),
        ("frequency_penalty", params.frequency_penalty != 0.0),
        ("logit_bias", bool(params.logit_bias)),
        ("min_tokens", params.min_tokens > 0),
        ("logprobs", params.logprobs is not None),
    ):
        if wanted:
            raise ParameterError(name, f"{target} and cannot do this exactly; leave it out")
