"""How far a draft's distribution q is from the target's p, with the gradient worked out.

p is known only on K ids a position (`corpus`): ids with more than a sliver of probability, p
normalised over the whole vocabulary, so that the K values sum to a little less than one. q lives
on the support, n of its ids. Both losses then need q's normaliser over the support and q at K
ids, nothing else dense:

    cross entropy   H = -sum_k p_k log q_k             dH/dz_j = (sum_k p_k) q_j - p_j
    acceptance      A = sum_k min(p_k, q_k)            dA/dz_j = q_j ([j in U] - sum_{k in U} q_k)
                                                       U = {k : q_k < p_k}

A is the probability that the ratio rule accepts a token drawn from q (up to the ids left out),
and 1 - A is what the last part of the training lowers. Letting autograd do it would keep several
float32 matrices [positions, support] alive; here there is one, in the dtype of the logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """What the target thinks at `rows` positions."""

    columns: Tensor
    """int64 [rows, K]: columns of the draft's head. Ids outside it point anywhere."""
    p: Tensor
    """float32 [rows, K]; 0 where the id is outside the draft's head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    cross_entropy: float
    rejection: float
    """Of 1 - A."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Means over the rows; plain numbers."""

    loss: float
    cross_entropy: float
    acceptance: float


def sharpen(teacher: Teacher, temperature: Tensor) -> Teacher:
    """The teacher at another temperature: p^(1/T), renormalised; `temperature` [rows, 1].

    The mass outside the K ids is kept as if it sat on one id, which is exact at 1 and matters
    little below, where it all but vanishes.
    """
    rest = (1 - teacher.p.sum(-1, keepdim=True)).clamp_min(0)
    raised = torch.where(teacher.p > 0, teacher.p.clamp_min(1e-12).pow(1 / temperature), 0.0)
    total = raised.sum(-1, keepdim=True) + rest.pow(1 / temperature)
    return Teacher(columns=teacher.columns, p=raised / total.clamp_min(1e-12))


def distill_loss(
    logits: Tensor, teacher: Teacher, weights: Weights, temperature: Tensor
) -> tuple[Tensor, Scores]:
    """Mean loss over the rows of `logits` [rows, support], as a scalar to call backward on.

    `temperature` [rows, 1] divides the logits; `teacher` is expected at the same temperature.
    The gradient leaves out the factor 1/T, so that sharp rows do not drown the others.
    """
    loss, ce, acceptance = _Distill.apply(
        logits, teacher.columns, teacher.p, temperature, weights.cross_entropy, weights.rejection
    )
    return loss, Scores(
        loss=float(loss.detach()), cross_entropy=float(ce), acceptance=float(acceptance)
    )


class _Distill(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        logits: Tensor,
        columns: Tensor,
        p: Tensor,
        temperature: Tensor,
        ce_weight: float,
        rejection_weight: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, width = logits.shape
        scaled = logits.float() / temperature
        normaliser = torch.logsumexp(scaled, -1, keepdim=True)
        # Flat indices: gather and scatter along rows are many times slower on a CPU.
        flat = (columns + torch.arange(rows, device=logits.device)[:, None] * width).view(-1)
        log_q = scaled.view(-1).take(flat).view(columns.shape) - normaliser
        q = log_q.exp()
        under = (q < p).float()
        known = p > 0
        cross_entropy = -(p * torch.where(known, log_q, 0.0)).sum(-1).mean()
        acceptance = torch.minimum(p, q).sum(-1).mean()
        dense = ce_weight * p.sum(-1, keepdim=True)
        dense = dense + rejection_weight * (q * under).sum(-1, keepdim=True)
        gradient = ((scaled - normaliser).exp_() * (dense / rows)).to(logits.dtype)
        # K entries a row are corrected; columns of unknown ids (p = 0) repeat and add nothing.
        at_k = torch.where(known, ce_weight * p + rejection_weight * q * under, 0.0)
        corrections = (-at_k / rows).to(logits.dtype).view(-1)
        gradient.view(-1).index_put_((flat,), corrections, accumulate=True)
        ctx.save_for_backward(gradient)
        loss = ce_weight * cross_entropy + rejection_weight * (1 - acceptance)
        ctx.mark_non_differentiable(cross_entropy, acceptance)
        return loss, cross_entropy, acceptance

    @staticmethod
    def backward(ctx, upstream: Tensor, *_: Tensor):  # type: ignore[no-untyped-def]
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), None, None, None, None, None
