"""What the service of a verifier is told and gives out: its limits, work for the engine side, the
engine's answers, messages for connections."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from outrider.core.draft import Draft as CoreDraft
from outrider.core.grammar import Constraint
from outrider.core.tokens import Rule, SamplingParams
from outrider.proto.messages import Message
from outrider.session.batching import DEFAULT_STRETCH
from outrider.session.cloud import VerifyJob

MAX_SESSIONS: Final = 256
"""Sessions of a verifier (our default): four times what one forward takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """Facts of the target and limits of the service. Every limit has a name (I7)."""

    vocab_size: int
    context_length: int
    eos: frozenset[int]
    deterministic: bool
    rules: frozenset[Rule] = frozenset(Rule)
    known_ids: int | None = None
    """Of each row; None: all. Requests that need more are refused (core.partial)."""
    max_sessions: int = MAX_SESSIONS
    max_sessions_per_connection: int = 64
    max_sessions_per_tenant: int = MAX_SESSIONS
    max_window: int = 256
    max_prompt_tokens: int = 1_000_000
    max_batch_rows: int = 64
    """Most rows in one batch: bounds how long everybody waits for one forward."""
    max_under_way: int = MAX_SESSIONS
    """Most sessions at work at once: as many as the engine has caches, or they would take them from
    each other at every step. One that waits for its edge does not count."""
    stretch: float = DEFAULT_STRETCH
    """How much longer a forward may become for tenants over their share (session.batching)."""
    max_token_s: float = math.inf
    """No new session once a forward over all that are under way would take longer (seconds)."""
    grace: float = 30.0
    """Seconds a detached session is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A message for a connection."""

    connection: int
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One session's part of a batch, for the engine side."""

    key: int
    """Names the session's cache slot for as long as the session lives."""
    job: VerifyJob
    params: SamplingParams
    rule: Rule
    prompt_length: int
    cloud_draft: int
    """Draft this many here first (co-located speculation); 0: judge job.drafts."""
    room: int
    """Most ids of its prompt that this forward takes in."""
    tenant: str
    constraint: Constraint | None
    """Of the request's grammar, for the drafts made here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The engine's answer to one Work: rows, float32 [drafts + 1, vocab], and drafts made here.
    Rows of shape [0, ...]: committed ids are still missing in the slot, the work is to be run
    again."""

    key: int
    rows: npt.NDArray[np.float32]
    fed: int
    """Tokens the forward appended for this session: more than rows in a prefill or rebuild."""
    draft: CoreDraft | None = None
