"""Small posteriors that decisions are tested on: quick to fit, and wrong often enough to need judging."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from dubito import MAP, Laplace, Posterior, Training, Variational

TRAINING = Training(epochs=15, lr=1e-2, batch_size=32)
CLASSIFIERS = ("map", "laplace", "variational")
REGRESSORS = ("map", "laplace", "variational")


def blobs(num: int, seed: int, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    """Three overlapping clouds in the plane."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (num,), generator=generator)
    angle = 2 * torch.pi * y / 3
    x = torch.stack([angle.cos(), angle.sin()], dim=1) + 0.7 * torch.randn(num, 2, generator=generator)
    return x + shift, y


def line(num: int, seed: int) -> tuple[Tensor, Tensor]:
    """A curve whose noise grows with its input."""
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(num, 1, generator=generator) - 1
    return x, (3 * x).sin() + (0.1 + 0.4 * x.abs()) * torch.randn(num, 1, generator=generator)


def network(inputs: int, outputs: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


@cache
def classifier(method: str = "laplace") -> Posterior:
    data = blobs(120, 0)
    point = MAP().fit(network(2, 3), data, training=TRAINING)
    if method == "map":
        return point
    if method == "laplace":
        return Laplace(prior_precision=1.0).fit(point.model, data)
    return Variational().fit(point.model, data, training=TRAINING)


@cache
def regressor(method: str = "laplace") -> Posterior:
    data = line(80, 0)
    point = MAP().fit(network(1, 1), data, likelihood="gaussian", training=TRAINING)
    if method == "map":
        return point
    if method == "laplace":
        return Laplace(prior_precision=1.0).fit(point.model, data, likelihood="gaussian")
    return Variational().fit(point.model, data, likelihood="gaussian", training=TRAINING)
