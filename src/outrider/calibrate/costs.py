"""T_seg: what a segment of W drafts takes, from drafting to verdict, and what it commits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from outrider.control.costs import RowCosts


class Pipeline(StrEnum):
    """Whose T_seg."""

    SYNC = "sync"
    """Draft, send, wait. T_seg = W t_d + R + t_v(W + 1); L_acc + 1 tokens."""
    PLC = "plc"
    """Drafts go on while the target judges: T_seg = max(T_edge, T_cloud) + T_re
    (docs/papers.md, 1), with T_edge = W t_d, T_cloud = R + t_v(W + 1), and T_re = the smaller of
    the two after a rejection, since drafting then begins anew. A window that stands whole brings W
    tokens: its bonus token comes too late (docs/papers.md, 0, one-block run-ahead)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentCosts:
    """Times in seconds."""

    pipeline: Pipeline
    round_trip: float
    """R."""
    draft: float
    """t_d."""
    verify: RowCosts
    """t_v(rows)."""

    def seconds(self, window: int, whole: float) -> float:
        """T_seg of `window` drafts; `whole`: chance (or 0 or 1) that all of them stand."""
        edge, cloud = window * self.draft, self.round_trip + self.verify.seconds(window + 1)
        if self.pipeline is Pipeline.SYNC or window == 0:
            return edge + cloud
        return max(edge, cloud) + (1.0 - whole) * min(edge, cloud)

    def tokens(self, accepted: float, whole: float) -> float:
        """Committed when `accepted` drafts stand, all of them with chance `whole`."""
        return accepted + 1.0 - (whole if self.pipeline is Pipeline.PLC else 0.0)
