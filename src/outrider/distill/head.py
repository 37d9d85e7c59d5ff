"""Training of the stop head (`control.head`) and the figures it is judged by.

As published (SpecDec++, docs/papers.md, 7): residual SiLU blocks (3), cross entropy against soft
labels with weight 6 on rejections, 3 epochs. Ours: the projection to a small width and the two
numbers beside the state (`control.head`), AdamW with cosine decay, and inputs brought to mean 0 and
a common spread, which is folded into the projection afterwards. The same examples, configuration
and torch build give the same head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from outrider.control.head import SCALARS, StopHead
from outrider.distill.examples import Examples

BINS: Final = 10
_TINY: Final = 1e-3
"""Smallest spread an input is divided by: a dead component stays dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    weight: float = 6.0
    """Of a rejection (published)."""
    epochs: int = 3
    """Published."""
    blocks: int = 3
    """Published."""
    size: int = 64
    """Width behind the projection (our default: a head of some 100 kB)."""
    batch: int = 64
    rate: float = 1e-3
    decay: float = 0.05
    state_scale: float = 0.02
    """Spread of each state component after normalisation; log q(x) and H(q) keep 1. A state has
    hundreds of components, each of which says little: at spread 1 the network fits their noise
    first, and ranks guesses it has not seen worse than H(q) alone does (our measurement, 5,000
    positions; card of the shipped heads)."""
    seed: int = 0


class _Network(nn.Module):
    def __init__(self, inputs: int, config: HeadConfig) -> None:
        super().__init__()
        self.project = nn.Linear(inputs, config.size)
        self.blocks = nn.ModuleList(
            nn.Linear(config.size, config.size) for _ in range(config.blocks)
        )
        self.read_out = nn.Linear(config.size, 1)

    def forward(self, x: Tensor) -> Tensor:
        z = self.project(x)
        for block in self.blocks:
            z = z + silu(block(z))
        logit: Tensor = self.read_out(z)[:, 0]
        return logit


def train_head(
    examples: Examples, *, draft: str, config: HeadConfig | None = None, **about: Any
) -> StopHead:
    """A head for `draft` from its examples; `about` is kept in it as provenance."""
    config = config or HeadConfig()
    if not len(examples):
        raise ValueError("no examples to train a stop head on")
    noise = torch.Generator().manual_seed(config.seed)
    x = torch.from_numpy(_inputs(examples))
    mean, spread = x.mean(0), x.std(0, correction=0).clamp_min(_TINY)
    spread[:-SCALARS] /= config.state_scale
    x = (x - mean) / spread
    label = torch.from_numpy(examples.label)
    # Layers draw their first weights from torch's own state: put it back as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        network = _Network(x.shape[1], config)
        _fit(network, x, label, config, noise)
    return _export(network.eval(), mean, spread, config, {"draft": draft, **about})


def _fit(
    network: _Network, x: Tensor, label: Tensor, config: HeadConfig, noise: torch.Generator
) -> None:
    steps = config.epochs * math.ceil(len(x) / config.batch)
    optimizer = torch.optim.AdamW(network.parameters(), lr=config.rate, weight_decay=config.decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))
    network.train()
    for _ in range(config.epochs):
        for picked in torch.randperm(len(x), generator=noise).split(config.batch):
            loss = weighted_loss(network(x[picked]), label[picked], config.weight)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


def weighted_loss(logit: Tensor, label: Tensor, weight: float) -> Tensor:
    """Cross entropy of soft labels, a rejection counting `weight` times; a weighted mean."""
    down, up = weight * (1.0 - label), label
    total: Tensor = (down * softplus(logit) + up * softplus(-logit)).sum() / (down + up).sum()
    return total


def _inputs(examples: Examples) -> npt.NDArray[np.float32]:
    scalars = np.stack([examples.log_q, examples.entropy], axis=1)
    inputs: npt.NDArray[np.float32] = np.concatenate([examples.hidden, scalars], axis=1)
    return inputs


def _export(
    network: _Network, mean: Tensor, spread: Tensor, config: HeadConfig, about: Mapping[str, Any]
) -> StopHead:
    weight = network.project.weight.detach() / spread
    bias = network.project.bias.detach() - weight @ mean
    read_out = torch.cat([network.read_out.weight.detach()[0], network.read_out.bias.detach()])
    size = config.size
    blocks = [block.weight.detach() for block in network.blocks]
    biases = [block.bias.detach() for block in network.blocks]
    head = StopHead(
        project=weight.numpy(),
        project_bias=bias.numpy(),
        blocks=torch.stack(blocks).numpy() if blocks else np.zeros((0, size, size), np.float32),
        block_biases=torch.stack(biases).numpy() if blocks else np.zeros((0, size), np.float32),
        read_out=read_out.numpy(),
        weight=config.weight,
        about={**about, "training": asdict(config)},
    )
    return StopHead.from_bytes(head.to_bytes())  # as it will be read: in float16


def predictions(head: StopHead, examples: Examples) -> npt.NDArray[np.float64]:
    """P(stands) of each guess, unbent, float64 [n], by the run-time's own arithmetic."""
    rows = zip(examples.hidden, examples.log_q, examples.entropy, strict=True)
    return np.array([head.acceptance(h, math.exp(q), float(e)) for h, q, e in rows])


def figures(
    predicted: npt.NDArray[np.float64], examples: Examples, *, calibrated: bool = True
) -> dict[str, Any]:
    """How good predictions are, against what stood with one seed.

    `auc`: P(one that stood is ranked before one that fell). `brier`: mean squared error;
    `base`: that of the best constant. `calibration`: per tenth of the predictions, in their
    order: count, mean prediction, share that stood. `calibrated` False: a score, AUC only."""
    stood = examples.stood
    found: dict[str, Any] = {"guesses": len(examples), "stood": float(stood.mean())}
    found["auc"] = auc(predicted, stood)
    if calibrated:
        found["brier"] = float(np.square(predicted - stood).mean())
        found["base"] = float(stood.mean() * (1 - stood.mean()))
        found["calibration"] = [
            [len(part), float(predicted[part].mean()), float(stood[part].mean())]
            for part in np.array_split(np.argsort(predicted, kind="stable"), BINS)
            if len(part)
        ]
    return found


def auc(score: npt.NDArray[np.float64], stood: npt.NDArray[np.bool_]) -> float:
    """Area under the ROC curve, ties counted half; NaN when all stood or all fell."""
    above = np.sort(score[~stood])
    up, down = int(stood.sum()), len(above)
    if not up or not down:
        return math.nan
    below = np.searchsorted(above, score[stood], side="left")
    equal = np.searchsorted(above, score[stood], side="right") - below
    return float((below + equal / 2).sum() / (up * down))
