"""Plain decoding against co-located speculation, on the same prompts: the numbers of
`outrider demo`. Arms take turns prompt by prompt, so that a busy machine disturbs all alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from outrider.core.tokens import SamplingParams
from outrider.runtime.local import GenerationRequest, GenerationResult, LocalGenerator

PROMPTS: Final = (
    "Write a Python function that checks whether a number is prime, and explain how it works.",
    "What causes the seasons on Earth? Answer in a few sentences.",
    "Write a short letter to a neighbour who found my lost cat.",
    "List five things to check before a long bicycle tour, with a reason for each.",
    "Tom has 12 apples, gives away 5 and buys 8 more. How many has he? Explain step by step.",
    "Rewrite this sentence more politely: Send me the report now, I have been waiting for days.",
    "Explain to a child why the sky is blue.",
    "What is the difference between a list and a tuple in Python? Give an example of each.",
)
"""Different tasks, none of them taken from a benchmark."""
WARM_UP_TOKENS: Final = 8
"""Tokens each arm makes before anything is counted (field case 39)."""


@dataclass(slots=True)
class Arm:
    """One way to decode, and the sums over its answers."""

    name: str
    generator: LocalGenerator
    draft_length: int
    answers: list[tuple[int, ...]] = field(default_factory=list)
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    decode_s: float = 0.0
    decode_tokens: int = 0

    def answer(self, prompt_ids: tuple[int, ...], params: SamplingParams) -> GenerationResult:
        request = GenerationRequest(
            prompt_ids=prompt_ids, params=params, draft_length=self.draft_length
        )
        return self.generator.generate(request)

    def add(self, result: GenerationResult) -> None:
        self.answers.append(result.token_ids)
        self.tokens += result.completion_tokens
        self.rounds += result.counters.rounds
        self.drafted += result.counters.drafted
        self.accepted += result.counters.accepted
        if result.timing.tpot_s is not None:
            self.decode_s += result.timing.tpot_s * result.completion_tokens
            self.decode_tokens += result.completion_tokens

    @property
    def calls_per_token(self) -> float | None:
        """Calls to the target; each would be a network round trip if the target were remote."""
        return self.rounds / self.tokens if self.tokens else None

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    @property
    def seconds_per_token(self) -> float | None:
        """While decoding: the prompt's own pass is left out, it is the same in every arm."""
        return self.decode_s / self.decode_tokens if self.decode_tokens else None

    def same_answers(self, other: Arm) -> int:
        """How many prompts got the same ids from both."""
        return sum(a == b for a, b in zip(self.answers, other.answers, strict=True))

    def as_dict(self) -> dict[str, object]:
        return {
            "name": self.name,
            "tokens": self.tokens,
            "target_calls_per_token": self.calls_per_token,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance": self.acceptance,
            "seconds_per_token": self.seconds_per_token,
        }


def compare(
    arms: Sequence[Arm], prompts: Sequence[tuple[int, ...]], params: SamplingParams
) -> Iterator[int]:
    """Run every arm on every prompt; yields the number of answers so far."""
    short = replace(params, max_tokens=min(WARM_UP_TOKENS, params.max_tokens))
    for arm in arms:
        arm.answer(prompts[0], short)
    done = 0
    for prompt in prompts:
        for arm in arms:
            arm.add(arm.answer(prompt, params))
            done += 1
            yield done
