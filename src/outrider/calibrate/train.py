"""Training of the five-layer predictor g(r, dr) -> (omega, W) on a sweep (torch).

E2-SCI trains on the lookup table with the loss E sum (T_seg - lambda L_acc) (docs/papers.md, 1,
Predictor) and says no more. Ours: first the network imitates the labels, then the published loss
itself is lowered on the sweep's surfaces, interpolated between their thresholds and windows so
that it has a gradient; lambda is the labels' gamma. Acc below delta costs extra, and moves the
threshold alone: a window of one draft has the best Acc of all, and is no answer to it.
Full batches, Adam, a seed: the same sweep gives the same weights on the same machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.calibrate.trace import F64Array
from outrider.control.calibration import Layer, PredictorWeights, Table, ThresholdLaw
from outrider.control.predictor import INPUTS, LAYERS, OUTPUTS

WIDTH: Final = 16
"""Of the hidden layers (our default: two inputs need no more)."""
STEPS: Final = 600
"""Half of them imitate."""
RATE: Final = 5e-3
PENALTY: Final = 10.0
"""Price of Acc falling short of delta by 1, in tokens a segment."""

Told = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What is to be learnt."""

    table: Table
    law: ThresholdLaw
    pairs: F64Array
    """[n, 2]: credit and change of the replayed segments."""
    gamma: float
    delta: float


def train(
    lesson: Lesson, *, seed: int, steps: int = STEPS, told: Told = lambda _done, _whole: None
) -> PredictorWeights:
    """The trained network, as `control.predictor` runs it."""
    windows = lesson.table.windows
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = _network()
    loss = _Loss(lesson)
    inputs = torch.tensor(lesson.pairs, dtype=torch.float32)
    adam = _Adam(list(network.parameters()))
    for step in range(steps):
        threshold, window = _decide(network(inputs), inputs[:, 0], lesson.law, windows)
        value = loss.imitation(threshold, window)
        if step >= steps // 2:
            value = value * 0.1 + loss.published(threshold, window)
        adam.step(value)
        told(step + 1, steps)
    layers = [
        Layer(weights=part.weight.tolist(), bias=part.bias.tolist())
        for part in network
        if isinstance(part, nn.Linear)
    ]
    return PredictorWeights(layers=layers, window_min=windows[0], window_max=windows[-1])


def _network() -> nn.Sequential:
    widths = (INPUTS, *(WIDTH,) * (LAYERS - 1), OUTPUTS)
    parts: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        parts += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


class _Adam:
    """Kingma and Ba's, with their constants. torch.optim has it too, and importing that brings
    in torch's compiler: many times the work of training these few weights."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self._parameters = parameters
        self._means = [torch.zeros_like(p) for p in parameters]
        self._squares = [torch.zeros_like(p) for p in parameters]
        self._steps = 0

    def step(self, value: Tensor) -> None:
        """One step downhill on `value`."""
        self._steps += 1
        slopes = torch.autograd.grad(value, self._parameters)
        first, second = 1 - 0.9**self._steps, 1 - 0.999**self._steps
        with torch.no_grad():
            for p, slope, mean, square in zip(
                self._parameters, slopes, self._means, self._squares, strict=True
            ):
                mean.lerp_(slope, 0.1)
                square.lerp_(slope * slope, 0.001)
                p -= RATE * (mean / first) / ((square / second).sqrt() + 1e-8)


def _decide(
    out: Tensor, credit: Tensor, law: ThresholdLaw, windows: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """(T, W) [n] each, as `control.predictor` and `ThresholdLaw` have them, T not yet clipped."""
    omega = F.softplus(out[:, 0])
    span = windows[-1] - windows[0]
    threshold = law.t_base + law.alpha * omega * (credit - law.tau_credit)
    return threshold, windows[0] + span * torch.sigmoid(out[:, 1])


class _Loss:
    def __init__(self, lesson: Lesson) -> None:
        table = lesson.table
        bins = np.searchsorted(table.edges, lesson.pairs[:, 0], side="right")
        self._bins = torch.tensor(bins)
        self._best_t = torch.tensor(np.array(table.best_threshold)[bins], dtype=torch.float32)
        self._best_w = torch.tensor(np.array(table.best_window)[bins], dtype=torch.float32)
        self._law = lesson.law
        self._thresholds = torch.tensor(table.thresholds, dtype=torch.float32)
        self._windows = torch.tensor(table.windows, dtype=torch.float32)
        objective = np.array(table.seconds) - lesson.gamma * np.array(table.tokens)
        regret = objective - objective.min(axis=(1, 2), keepdims=True)
        short = np.maximum(0.0, lesson.delta - np.array(table.quality))
        self._regret = torch.tensor(regret / lesson.gamma, dtype=torch.float32)[self._bins]
        self._short = torch.tensor(short, dtype=torch.float32)[self._bins]

    def imitation(self, threshold: Tensor, window: Tensor) -> Tensor:
        """Squared distance from the labels, in units of the axes."""
        t = (threshold - self._best_t) / self._thresholds[-1]
        w = (window - self._best_w) / self._windows[-1]
        return (t**2 + w**2).mean()

    def published(self, threshold: Tensor, window: Tensor) -> Tensor:
        """E (T_seg - gamma tokens) / gamma at the clipped (T, W): tokens lost a segment."""
        clipped = threshold.clamp(self._law.t_min, self._law.t_max)
        lost = self._at(self._regret, clipped, window)
        return (lost + PENALTY * self._at(self._short, clipped, window.detach())).mean()

    def _at(self, surface: Tensor, threshold: Tensor, window: Tensor) -> Tensor:
        """Bilinear, [n]; `surface` [n, N, M]."""
        i, x = _between(self._thresholds, threshold)
        j, y = _between(self._windows, window)
        rows = torch.arange(len(i))
        below = surface[rows, i, j] * (1 - y) + surface[rows, i, j + 1] * y
        above = surface[rows, i + 1, j] * (1 - y) + surface[rows, i + 1, j + 1] * y
        return below * (1 - x) + above * x


def _between(axis: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the axis point below x, and how far x is towards the next one, in [0, 1]."""
    i = (torch.searchsorted(axis, x.detach().contiguous(), right=True) - 1).clamp(0, len(axis) - 2)
    return i, ((x - axis[i]) / (axis[i + 1] - axis[i])).clamp(0.0, 1.0)
