"""Every message of the wire, as a frozen value. `Message` is their closed union.

Cold messages (a handful per connection or session) travel as MessagePack maps; hot ones (every
round) are packed by hand, see `codec`. Positions are absolute in the request, the prompt
counts. `session` is a small number chosen by the edge, unique on its connection while open.

Draft chains. All drafts of one `epoch` form one chain: consecutive positions, each drafted on
top of the ones before it. The edge begins a new epoch whenever it rolls back. The cloud judges
a chain while it agrees with what is committed; at the first difference the chain is dead and
every later frame of that epoch is dropped. So a late or repeated frame can cost time, never a
wrong token.
"""

from __future__ import annotations

import enum
from typing import Annotated, Final

import msgspec

from outrider.core.sparse import Sketch

PROTOCOL_VERSION = 1
"""Version spoken here. Peers agree on the highest they share (HELLO lists them)."""


MAX_VALUE: Final = 2**32 - 1
"""Largest session number, id, position or count: what a varint of the hot frames may hold."""

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_VALUE)]
"""An integer that a hot frame can carry as well. Cold frames are held to the same range, or a
negative session number would pass here and break the first hot frame about it."""


class Frozen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the cold messages: named fields on the wire, unknown fields refused."""


class Limits(Frozen, frozen=True, kw_only=True):
    """What a peer is ready to hold (I7). The smaller of both sides holds."""

    frame_bytes: Count
    """Largest frame accepted, in bytes."""
    window: Count
    """Most unjudged drafts in a session."""
    sessions: Count
    """Most open sessions on one connection."""
    prompt_tokens: Count
    """Longest prompt plus committed output that OPEN may carry."""


class Hello(Frozen, tag="hello", frozen=True, kw_only=True):
    """First message, both ways."""

    versions: tuple[Count, ...]
    role: str
    """'edge' or 'cloud'."""
    agent: str
    """Name and version of the software, for logs."""
    fingerprint: str
    """Content hash of the tokenizer; different hashes never open a session (field case 12)."""
    vocab_size: Count
    logits_width: Count
    context_length: Count
    limits: Limits
    rules: tuple[str, ...]
    """Acceptance rules spoken."""
    deterministic: bool = False
    """Cloud: same request, same ids to the bit, whatever the batch (I9)."""
    model: str = ""
    """Display name; never compared."""
    pace_ms: float = 0.0
    """Cloud: milliseconds added to every forward on purpose, standing for a larger target. Every
    report about such a cloud says so."""
    row_ms: tuple[tuple[Count, float], ...] = ()
    """Cloud: (rows, milliseconds of a forward over so many rows), as measured before it served:
    an edge that is to choose a draft length need not learn it from its first answers."""
    grammars: tuple[str, ...] = ()
    """Kinds of grammars that it can hold an answer to; none: it cannot. An edge that cannot drafts
    without, and its drafts fall where they break the grammar."""
    drafts: bool = False
    """Cloud: it has a draft of its own, so OPEN may ask for `cloud_draft`."""


class GrammarText(Frozen, frozen=True, kw_only=True):
    """core.grammar.Grammar on the wire."""

    kind: str
    text: str = ""


class Sampling(Frozen, frozen=True, kw_only=True):
    """core.tokens.SamplingParams on the wire, field by field."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[int, float]
    max_tokens: int
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    logprobs: int | None
    given: tuple[Count, ...] = ()
    seed: int
    grammar: GrammarText | None = None


class Relax(Frozen, frozen=True, kw_only=True):
    """How a session of the rule 'relaxed' is judged: core.relaxed.Policy and Ledger, field by
    field. `spent`, `relaxed` and `max_jsd` go on where an earlier session stopped (I4)."""

    rule: str
    threshold: float
    divergence: str
    epsilon: float
    delta: float
    budget: float | None
    """None: without end (the published rules)."""
    spent: float = 0.0
    relaxed: Count = 0
    max_jsd: float = 0.0


class Open(Frozen, tag="open", frozen=True, kw_only=True):
    """Begin a session, or rebuild one anywhere from its committed tokens (I4)."""

    session: Count
    uid: bytes
    """16 random bytes: names the session across connections."""
    prompt: tuple[Count, ...]
    committed: tuple[Count, ...] = ()
    """Output tokens already fixed; the cloud goes on behind them."""
    sampling: Sampling
    rule: str
    step: str
    """Cloud step policy: 'wait' or 'step' (free-run)."""
    take: str = "all"
    """'all': judge every pending draft at once; 'best': as many as pay."""
    cloud_draft: Count = 0
    """Drafts a block that the cloud makes itself (co-located speculation); 0: none."""
    held: bool = False
    """A DRAFT follows at once: no forward before it. So a rebuilt session judges the drafts that
    an earlier one may have judged already, and never replaces that decision."""
    relax: Relax | None = None
    """For the rule 'relaxed', which needs it; no other rule may have it."""
    top_k_reply: Count = 0
    """Rule 'ratio': answer a rejection with a TOPK of so many ids where that may be of use; 0:
    never."""
    tv_left: float = 0.0
    """Rule 'ratio': what is left of the edge's budget for truncated residuals (core.residual). 0: a
    TOPK is of use only where it holds every id that p can draw."""
    due_ms: Count = 0
    """Milliseconds within which the edge wants its next token, from when the forward could run: of
    one tenant's sessions the earliest goes first. 0: nothing said. It moves no other tenant."""


class Resume(Frozen, tag="resume", frozen=True, kw_only=True):
    """Go on with a session the cloud may still hold."""

    session: Count
    uid: bytes
    base: Count
    """Position behind the edge's last committed token."""
    digest: bytes
    """Digest of the committed prefix [0, base) (`proto.digest`)."""


class Marks(Frozen, tag="marks", frozen=True, kw_only=True):
    """Cloud to edge, relaxed rule: what a VERDICT would have said of the tokens in the next TOKENS
    (drafts of the cloud's own, replay after RESUME)."""

    session: Count
    positions: tuple[Count, ...]
    """Of the tokens that the target did not choose, ascending."""
    spent: float
    """The session's ledger behind them (core.ledger)."""
    max_jsd: float


class Steer(Frozen, tag="steer", frozen=True, kw_only=True):
    """Edge to cloud: from now on run forwards by this step policy. A controller that finds that
    speculation does not pay lets the cloud stream alone, and takes the word back later. The last
    one holds; it is said again after RESUME."""

    session: Count
    step: str
    """As in OPEN: 'wait' or 'step'."""


class Pressure(Frozen, tag="pressure", frozen=True, kw_only=True):
    """Cloud to edge: how many unjudged drafts of a session are of use under the present load.
    Advice: drafts beyond it are not refused, they wait. The last one holds, on this connection."""

    session: Count
    window: Count | None
    """0: speculation is off, the session should ask for 'step'. None: no limit any more."""


class Opened(Frozen, tag="opened", frozen=True, kw_only=True):
    """Answer to OPEN and RESUME: the session runs and the cloud's prefix ends at `base`."""

    session: Count
    base: Count


class Done(Frozen, tag="done", frozen=True, kw_only=True):
    """The answer is complete; the session is closed on the cloud's side."""

    session: Count
    reason: str
    """'stop' or 'length'."""
    output_tokens: Count
    digest: bytes
    """Digest of the whole committed sequence: both sides must agree (I10)."""
    near_ties: Count = 0
    """Committed tokens that another kernel or batch might have decided otherwise; counted by a
    target that does not promise its bits."""
    own_drafted: Count = 0
    """Judged drafts that the cloud made itself (co-located speculation)."""
    own_accepted: Count = 0
    relaxed: Count = 0
    """Tokens that stand although the target's own differs (rule 'relaxed')."""
    spent: float = 0.0
    """Of its budget."""
    max_jsd: float = 0.0


class Code(enum.StrEnum):
    """Error codes. A code is a contract; the text beside it is for people."""

    UNAUTHORIZED = "unauthorized"
    VERSION = "version"
    VOCABULARY = "vocabulary"
    MALFORMED = "malformed"
    TOO_LARGE = "too-large"
    STATE = "state"
    """A message the state table does not allow here."""
    PARAMETER = "parameter"
    GRAMMAR = "grammar"
    """A grammar that cannot be used here, or under which an answer cannot go on."""
    CONTEXT = "context"
    DUPLICATE = "duplicate-session"
    UNKNOWN = "unknown-session"
    DIGEST = "digest"
    """RESUME with a prefix that is not the cloud's."""
    BUSY = "busy"
    """At a limit: try again later, or elsewhere."""
    DRAINING = "draining"
    ENGINE = "engine"
    INTERNAL = "internal"
    UNREACHABLE = "unreachable"
    """Never sent: the edge's own word for a link that stays down."""


class Error(Frozen, tag="error", frozen=True, kw_only=True):
    """Something was refused. session None: the whole connection ends."""

    code: Code
    message: str
    session: Count | None = None


class Cancel(Frozen, tag="cancel", frozen=True, kw_only=True):
    """The edge gives a session up; the cloud frees it and answers nothing."""

    session: Count


class GoAway(Frozen, tag="goaway", frozen=True, kw_only=True):
    """The cloud drains: running sessions finish, new ones go elsewhere."""

    message: str = ""


class Ping(Frozen, tag="ping", frozen=True, kw_only=True):
    """Heartbeat with the sender's clock, echoed back."""

    stamp: float


class Pong(Frozen, tag="pong", frozen=True, kw_only=True):
    stamp: float


class Logprobs(Frozen, tag="logprobs", frozen=True, kw_only=True):
    """Cloud to edge, only when OPEN asked: sent before the frame that commits the tokens. A token
    that the edge chose (ratio rule) is committed by nothing else: its LOGPROBS answer CORRECT, and
    the edge shows it then."""

    session: Count
    start: Count
    entries: tuple[tuple[Count, float, tuple[tuple[Count, float], ...]], ...]
    """(token, log-probability, alternatives best first) of positions start, start+1, ..."""


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """Edge to cloud: drafts for positions start, start+1, ... of chain `epoch`.

    No tokens: the edge has no guess and asks for one step of the target alone.
    """

    session: int
    epoch: int
    start: int
    tokens: tuple[int, ...]
    q: tuple[float, ...] = ()
    """Ratio rule: the probability each token was drawn with, float64, exactly."""
    sketches: tuple[Sketch, ...] = ()
    """Relaxed rule: what each token was drawn from (core.sparse)."""
    threshold: float | None = None
    """Relaxed rule: T from here on, where a controller moves it; None: as before."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What the cloud spent on a block, so that the edge can split its round trip."""

    queue_us: int = 0
    """Microseconds between the block being ready and its forward starting."""
    step_us: int = 0
    """Microseconds of the forward."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Cloud to edge: the first `accepted` of `drafted` judged drafts of chain `epoch` stand at
    positions start..., then the target's own `token`."""

    session: int
    epoch: int
    start: int
    drafted: int
    accepted: int
    token: int
    load: Load = Load()


class Relaxed(msgspec.Struct, frozen=True, kw_only=True):
    """Cloud to edge: a VERDICT of the relaxed rule."""

    session: int
    epoch: int
    start: int
    drafted: int
    accepted: int
    token: int
    strict: int
    """Leading drafts that equal the target's own tokens: what the strict rule had accepted."""
    marks: tuple[int, ...]
    """Indices in the block of the accepted drafts that the target did not choose, ascending."""
    spent: float
    """The session's ledger after this block (core.ledger)."""
    max_jsd: float
    load: Load = Load()


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Cloud to edge: committed tokens that needed no draft (free-run, replay after RESUME)."""

    session: int
    start: int
    tokens: tuple[int, ...]
    load: Load = Load()


class Proposals(msgspec.Struct, frozen=True, kw_only=True):
    """Cloud to edge, ratio rule: draft number `accepted` was rejected; fresh draws from p.

    The position asked about is start + accepted. `first` counts proposals of this rejection
    sent before, so that a repeated reply is recognised.
    """

    session: int
    epoch: int
    start: int
    drafted: int
    accepted: int
    first: int
    tokens: tuple[int, ...]
    p: tuple[float, ...]
    load: Load = Load()


class TopK(msgspec.Struct, frozen=True, kw_only=True):
    """Cloud to edge, ratio rule: draft number `accepted` was rejected; the likeliest ids of p, from
    rank `first` on (core.residual).

    The position asked about is start + accepted. Each frame holds further ids; those before are
    not repeated.
    """

    session: int
    epoch: int
    start: int
    drafted: int
    accepted: int
    first: int
    ids: tuple[int, ...]
    """Ascending."""
    weights: bytes
    """Log-weights aligned with them, little-endian float32: p(id) = exp(weight - log_total)."""
    log_total: float
    rest: float
    """Probability of all ids of higher ranks. 0: there is none, and the list is all of p."""
    load: Load = Load()


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Cloud to edge, the last resort of the residual dialogue: p itself, filters applied.

    `weights` are float32 log-weights, `ids` whose they are: the edge rebuilds the very
    distribution the cloud holds. Counted, because it breaks I6's common path.
    """

    session: int
    position: int
    ids: tuple[int, ...] | None
    """Ascending. None: 0, 1, 2, ..., as many as there are weights."""
    weights: bytes
    """Little-endian float32; -inf for an id that cannot be drawn."""


class Correct(msgspec.Struct, frozen=True, kw_only=True):
    """Edge to cloud: the token chosen from the residual at `position`, or a call for more."""

    session: int
    position: int
    token: int | None = None
    have: int = 0
    """Without a token: proposals judged so far. The cloud sends the next batch, then the row."""
    listed: int = 0
    """Without a token, and not 0: ids listed so far. The cloud sends further ones."""
    left: float | None = None
    """With a token that was charged to the budget: what is left of it now."""


Cold = (
    Hello
    | Open
    | Resume
    | Steer
    | Pressure
    | Marks
    | Opened
    | Done
    | Error
    | Cancel
    | GoAway
    | Ping
    | Pong
    | Logprobs
)
"""What travels as MessagePack maps."""
Message = Cold | Draft | Verdict | Relaxed | Tokens | Proposals | TopK | Row | Correct
