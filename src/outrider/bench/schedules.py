"""Ways to decode, side by side: the rows of `outrider demo` and of the bench.

Honest by construction (field cases 38, 39): every arm warms up before it counts, arms take turns
prompt by prompt and seed by seed so that a busy machine disturbs all alike, times are medians
over answers, tokens are counted as tokens and never as frames, and every figure is shown beside
cloud-only streaming on the same engine and link.
"""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from outrider.core.tokens import SamplingParams
from outrider.session.schedules import Schedule

WARM_UP_TOKENS: Final = 8
"""Tokens of an answer that is not counted."""
TRUNCATED: Final = "top-k"
"""An arm's word for the ratio rule with lists within a budget (bench.live); lossy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer of one arm."""

    seconds_per_token: float
    """While decoding: from the first committed tokens to the last."""
    ttft_s: float
    tokens: int
    forwards: int
    """Target forwards of this session, the prefill's included."""
    drafted: int
    accepted: int
    payload_up: int
    """Bytes of protocol frames."""
    payload_down: int
    ids: tuple[int, ...]
    relaxed: int = 0
    """Tokens that stand although the target chose others (lossy rules)."""


Answer = Callable[[tuple[int, ...], SamplingParams], Awaitable[Sample]]
"""Prompt ids and parameters to a measured answer."""


@dataclass(slots=True)
class Arm:
    """One way to decode, and its answers so far."""

    name: str
    schedule: Schedule | None
    """None: in one process, without a link."""
    answer: Answer
    exact: bool = True
    """Coupled rule on the target's own law: the ids must equal cloud-only's."""
    samples: list[Sample] = field(default_factory=list)
    warm_up_answers: int = 0
    """Answers made before the first that counts; 0: the figures are of a cold start."""

    def _sum(self, value: Callable[[Sample], float]) -> float:
        return sum(value(s) for s in self.samples)

    @property
    def ms_per_token(self) -> float:
        """Median over answers."""
        return 1e3 * statistics.median(s.seconds_per_token for s in self.samples)

    @property
    def ttft_ms(self) -> float:
        return 1e3 * statistics.median(s.ttft_s for s in self.samples)

    @property
    def tokens(self) -> int:
        return int(self._sum(lambda s: s.tokens))

    @property
    def forwards_per_token(self) -> float:
        return self._sum(lambda s: s.forwards) / self.tokens

    @property
    def acceptance(self) -> float | None:
        drafted = self._sum(lambda s: s.drafted)
        return self._sum(lambda s: s.accepted) / drafted if drafted else None

    @property
    def relaxed(self) -> int:
        """Tokens of all answers that the target did not choose."""
        return int(self._sum(lambda s: s.relaxed))

    @property
    def bytes_up(self) -> float:
        """Payload bytes a token, edge to cloud."""
        return self._sum(lambda s: s.payload_up) / self.tokens

    @property
    def bytes_down(self) -> float:
        return self._sum(lambda s: s.payload_down) / self.tokens

    def same(self, other: Arm) -> int:
        """How many answers have the same ids as the other arm's."""
        return sum(a.ids == b.ids for a, b in zip(self.samples, other.samples, strict=True))

    def ratio(self, other: Arm) -> float:
        """Median over answers of this arm's time per token relative to the other's."""
        pairs = zip(self.samples, other.samples, strict=True)
        return statistics.median(a.seconds_per_token / b.seconds_per_token for a, b in pairs)

    def as_dict(self, baseline: Arm) -> dict[str, object]:
        return {
            "name": self.name,
            "schedule": self.schedule and self.schedule.value,
            "answers": len(self.samples),
            "warm_up_answers": self.warm_up_answers,
            "tokens": self.tokens,
            "ms_per_token": self.ms_per_token,
            "ttft_ms": self.ttft_ms,
            "ratio_to_cloud_only": self.ratio(baseline),
            "forwards_per_token": self.forwards_per_token,
            "acceptance": self.acceptance,
            "bytes_up_per_token": self.bytes_up,
            "bytes_down_per_token": self.bytes_down,
            "relaxed_tokens": self.relaxed,
            "identical_to_cloud_only": self.same(baseline) if self.exact else None,
        }


async def compare(
    arms: Sequence[Arm],
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
    *,
    seeds: Sequence[int] = (0,),
    warm_up: int = 1,
) -> AsyncIterator[int]:
    """Run every arm on every prompt and seed; yields the number of answers so far.

    `warm_up`: short answers that each arm makes first and that are not counted."""
    short = replace(params, max_tokens=min(WARM_UP_TOKENS, params.max_tokens), min_tokens=0)
    for arm in arms:
        for _ in range(warm_up):
            await arm.answer(prompts[0], short)
        arm.warm_up_answers = warm_up
    done = 0
    for seed in seeds:
        for prompt in prompts:
            for arm in arms:
                arm.samples.append(await arm.answer(prompt, replace(params, seed=seed)))
                done += 1
                yield done
