"""From the options that name models to a generator that is ready to answer."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Any, Final

from outrider.commands import console
from outrider.commands.errors import CommandError
from outrider.commands.options import Dtype
from outrider.core.ledger import Account
from outrider.core.relaxation import Relaxation
from outrider.core.tokens import Rule, SamplingParams
from outrider.diagnose import shipped_drafts
from outrider.engines import builtin
from outrider.engines.base import EngineError, LanguageModel
from outrider.engines.grammar import GrammarReader
from outrider.runtime.local import (
    GenerationRequest,
    GenerationResult,
    GenerationStream,
    LocalGenerator,
)

ONE_REQUEST: Final = 2
"""Slots for a command that answers one request: its own, and company for the self-check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A loaded target, its tokenizer, and maybe a drafter, behind one generator."""

    tokenizer: Any
    generator: LocalGenerator

    def encode(self, prompt: str, *, raw: bool, system: str | None) -> tuple[int, ...]:
        return encode(self.tokenizer, prompt, raw=raw, system=system)

    def stream(
        self,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        rule: Rule,
        draft_length: int,
        relaxation: Relaxation | None = None,
    ) -> GenerationStream:
        return self.generator.stream(
            GenerationRequest(
                prompt_ids=prompt_ids,
                params=params,
                rule=rule,
                draft_length=draft_length,
                relaxation=relaxation,
            )
        )


def encode(tokenizer: Any, prompt: str, *, raw: bool, system: str | None) -> tuple[int, ...]:
    """Prompt to ids: through the tokenizer's chat template, or as it is."""
    if raw:
        return tuple(tokenizer.encode(prompt))
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": prompt})
    try:
        return tuple(tokenizer.chat(messages))
    except EngineError as error:
        raise CommandError(f"{error} (--raw continues the prompt as it is)") from error


def default_draft(target: str) -> str:
    """Who drafts when nobody says: the shipped draft fits the built-in target alone, needs torch,
    and a build may come without it."""
    ours = target == builtin.SPEC and importlib.util.find_spec("torch") is not None
    return "lookup+small" if ours and "small.safetensors" in shipped_drafts() else "lookup"


def load(
    *,
    target: str,
    draft: str | None,
    draft_length: int,
    dtype: Dtype,
    device: str,
    deterministic: bool,
    threads: int | None,
) -> Pair:
    """Load what the options name. A spinner shows on stderr meanwhile."""
    from outrider.engines.load import load_drafter, load_target

    # The hub's client reports every retry by itself; one line at the end is enough.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    draft = default_draft(target) if draft is None else draft
    with console.waiting(f"loading {target}"):
        loaded = load_target(
            target,
            dtype=dtype.value,
            device=device,
            deterministic=deterministic,
            threads=threads,
            max_slots=ONE_REQUEST,
        )
        drafter = None
        if draft_length > 0:
            drafter = load_drafter(
                draft, loaded, device=device, threads=threads, max_slots=ONE_REQUEST
            )
    generator = LocalGenerator(
        loaded.model, loaded.tokenizer, drafter, grammars=GrammarReader(loaded.tokenizer)
    )
    return Pair(tokenizer=loaded.tokenizer, generator=generator)


def load_edge_only(*, target: str, draft: str | None, device: str, threads: int | None) -> Pair:
    """The draft model as the one who answers, with the target's tokenizer and chat template."""
    from outrider.engines.load import load_drafter, load_vocabulary

    name = default_draft(target) if draft is None else draft
    vocabulary = load_vocabulary(target)
    with console.waiting(f"loading {name}"):
        drafter = load_drafter(
            name, vocabulary, device=device, threads=threads, max_slots=ONE_REQUEST
        )
    model: LanguageModel | None = getattr(drafter, "model", None)
    if model is None:
        raise CommandError(f"edge-only needs a draft model, and {name!r} has none: give --draft")
    grammars = GrammarReader(vocabulary.tokenizer)
    return Pair(
        tokenizer=vocabulary.tokenizer,
        generator=LocalGenerator(model, vocabulary.tokenizer, grammars=grammars),
    )


def summary(result: GenerationResult) -> str:
    """One line about a finished answer, for people."""
    parts = [f"{result.completion_tokens} tokens"]
    acceptance = result.counters.acceptance
    if acceptance is not None:
        parts.append(f"draft {result.draft}: {acceptance:.0%} of guesses accepted")
    if result.completion_tokens:
        calls = result.counters.rounds / result.completion_tokens
        parts.append(f"{calls:.2f} target calls per token")
    if result.timing.tpot_s is not None:
        parts.append(f"{result.timing.tpot_s * 1e3:.0f} ms per token")
    if result.relaxed is not None:
        parts.append(f"{result.relaxed.relaxed} relaxed tokens, {_distance(result.relaxed)}")
    if result.tv is not None and result.tv.events:
        parts.append(f"{result.tv.events} tokens from cut-off lists, {_distance(result.tv)}")
    parts.append(f"seed {result.seed}")
    if result.counters.near_ties:
        parts.append(f"{result.counters.near_ties} near-ties (see --deterministic)")
    return " · ".join(parts)


def _distance(account: Account) -> str:
    """What a lossy answer's charges say of its law."""
    if account.spent > 1.0:
        return f"charges of {account.spent:.3g} in all, which bound no law"
    return f"within TV {account.spent:.2g} of the exact law"
