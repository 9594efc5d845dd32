"""Targets and networks that tests of samplers share."""

from __future__ import annotations

from typing import Any

import torch
from dubito.likelihoods import Categorical, Likelihood
from torch import Tensor, nn

from dubito.core.batches import Batch, Source
from dubito.fitting.inference import Problem
from dubito.fitting.training import Training

PRECISION = torch.tensor([[2.0, 0.6, 0.0], [0.6, 1.0, -0.3], [0.0, -0.3, 0.5]], dtype=torch.float64)
MEAN = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


def gaussian_potential(position: Tensor) -> tuple[Tensor, Tensor]:
    away = position - MEAN
    return 0.5 * away @ PRECISION @ away, PRECISION @ away


def banana_potential(position: Tensor) -> tuple[Tensor, Tensor]:
    """x ~ N(0, 1), y | x ~ N((x² − 1) / 2, 1)."""
    x, y = position
    rest = y - (x * x - 1) / 2
    return 0.5 * x * x + 0.5 * rest * rest, torch.stack([x - x * rest, rest])


def funnel_potential(position: Tensor) -> tuple[Tensor, Tensor]:
    """v ~ N(0, 1), x | v ~ N(0, exp(v)) in two dimensions."""
    v, rest = position[0], position[1:]
    squares = 0.5 * rest.square().sum() * (-v).exp()
    return 0.5 * v * v + squares + v, torch.cat([(v - squares + 1).reshape(1), rest * (-v).exp()])


def classes(rows: int = 60, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(dtype), (x[:, 0] > 0).long() + (x[:, 1] > 1)


def network(dtype: torch.dtype = torch.float64, seed: int = 3) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def problem(model: nn.Module, data: Any, likelihood: Likelihood | None = None, **training: Any) -> Problem:
    weight = next(model.parameters())
    settings = Training(**{"batch_size": 20, "shuffle": False, **training})
    source = Source(data, batch_size=settings.batch_size, dtype=weight.dtype, device=weight.device)
    generator = torch.Generator().manual_seed(0)
    return Problem(model, likelihood or Categorical(), source, None, settings, generator, progress=False)


def whole(data: tuple[Tensor, Tensor]) -> Batch:
    return Batch(data[0], data[1], len(data[0]))
