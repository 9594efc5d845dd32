"""What the tests of ensembles share: small problems and networks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dubito import Training
from oracles import seeded_layers

TRAINING = Training(epochs=3, lr=1e-2, batch_size=16)


def classes(size: int = 50, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(dtype), (x[:, 0] > 0).long() + (x[:, 1] > 1).long()


def numbers(size: int = 50, seed: int = 0) -> tuple[Tensor, Tensor]:
    x, _ = classes(size, seed)
    return x, torch.stack([x[:, 0].sin(), x[:, 1]], 1)


def dense(outputs: int = 3) -> nn.Sequential:
    return seeded_layers(
        lambda: nn.Linear(4, 8), nn.Tanh, lambda: nn.Linear(8, 6), nn.Tanh, lambda: nn.Linear(6, outputs)
    )


def normalized(dropout: float = 0.0) -> nn.Sequential:
    return seeded_layers(
        lambda: nn.Linear(4, 8), lambda: nn.BatchNorm1d(8), nn.ReLU,
        lambda: nn.Dropout(dropout), lambda: nn.Linear(8, 3),
    )  # fmt: skip


def images(size: int = 24) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, 1, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x, (x.mean((1, 2, 3)) > 0).long()


def convolutional() -> nn.Sequential:
    return seeded_layers(
        lambda: nn.Conv2d(1, 4, 3), nn.ReLU, lambda: nn.Conv2d(4, 6, 3, groups=2), nn.ReLU, nn.Flatten,
        lambda: nn.Linear(24, 2),
    )  # fmt: skip
