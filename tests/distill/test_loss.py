"""The hand-made gradient against autograd through the dense formulas."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the torch extra is not installed")

from outrider.distill.loss import Teacher, Weights, distill_loss, sharpen  # noqa: E402

ROWS, WIDTH, K = 6, 50, 8


def _case(seed: int) -> tuple[Teacher, torch.Tensor, torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    columns = torch.stack([torch.randperm(WIDTH, generator=noise)[:K] for _ in range(ROWS)])
    p = torch.rand(ROWS, K, generator=noise)
    p = p / p.sum(-1, keepdim=True) * 0.9
    # Two ids outside the head: no probability, a column that another id really owns.
    p[:, -2:] = 0.0
    columns[:, -2:] = columns[:, :1]
    logits = torch.randn(ROWS, WIDTH, generator=noise) * 2
    heat = torch.tensor([1.0, 0.7, 0.4, 1.0, 0.7, 0.4])[:, None]
    return Teacher(columns=columns, p=p), logits, heat


def _dense(logits, teacher, weights, heat):  # type: ignore[no-untyped-def]
    """The same loss written out; rows weighted by T, which the real one leaves out of 1/T."""
    log_q = (logits / heat).log_softmax(-1).gather(1, teacher.columns)
    ce = -(teacher.p * log_q).sum(-1)
    accepted = torch.minimum(teacher.p, log_q.exp()).sum(-1)
    rows = weights.cross_entropy * ce + weights.rejection * (1 - accepted)
    return (rows * heat[:, 0]).mean()


@pytest.mark.parametrize(("ce", "rejection"), [(1.0, 0.0), (0.0, 1.0), (0.1, 1.0)])
@pytest.mark.parametrize("seed", range(5))
def test_gradient_is_that_of_the_dense_formula(ce: float, rejection: float, seed: int) -> None:
    teacher, logits, heat = _case(seed)
    weights = Weights(cross_entropy=ce, rejection=rejection)
    ours = logits.clone().requires_grad_()
    loss, scores = distill_loss(ours, teacher, weights, heat)
    loss.backward()
    dense = logits.clone().requires_grad_()
    _dense(dense, teacher, weights, heat).backward()
    torch.testing.assert_close(ours.grad, dense.grad, atol=1e-6, rtol=1e-4)
    assert scores.loss == pytest.approx(
        ce * scores.cross_entropy + rejection * (1 - scores.acceptance), rel=1e-5
    )


def test_a_perfect_draft_is_accepted_up_to_the_missing_mass() -> None:
    p = torch.tensor([[0.6, 0.3, 0.1]])
    teacher = Teacher(columns=torch.tensor([[0, 1, 2]]), p=p)
    _, scores = distill_loss(
        p.log(), teacher, Weights(cross_entropy=0.0, rejection=1.0), torch.ones(1, 1)
    )
    assert scores.acceptance == pytest.approx(1.0, abs=1e-6)


def test_sharpening_is_the_softmax_at_that_temperature() -> None:
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(2))
    teacher = Teacher(columns=torch.arange(5).expand(3, 5), p=logits.softmax(-1))
    for heat in (1.0, 0.7, 0.4):
        sharp = sharpen(teacher, torch.full((3, 1), heat))
        torch.testing.assert_close(sharp.p, (logits / heat).softmax(-1), atol=1e-4, rtol=1e-3)
