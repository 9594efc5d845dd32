"""What the tests of ensembles share: small problems, networks, and how to interrupt a run."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dubito import Posterior, Training
from dubito.fitting.loop import _Loop

TRAINING = Training(epochs=3, lr=1e-2, batch_size=16)


def classes(size: int = 50, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(dtype), (x[:, 0] > 0).long() + (x[:, 1] > 1).long()


def numbers(size: int = 50, seed: int = 0) -> tuple[Tensor, Tensor]:
    x, _ = classes(size, seed)
    return x, torch.stack([x[:, 0].sin(), x[:, 1]], 1)


def seeded(*layers: Any, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Return a network with the same initial weights each time; layers are made by functions."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(*(make() for make in layers)).to(dtype)


def dense(outputs: int = 3) -> nn.Sequential:
    return seeded(lambda: nn.Linear(4, 8), nn.Tanh, lambda: nn.Linear(8, 6), nn.Tanh, lambda: nn.Linear(6, outputs))


def normalized(dropout: float = 0.0) -> nn.Sequential:
    return seeded(
        lambda: nn.Linear(4, 8), lambda: nn.BatchNorm1d(8), nn.ReLU,
        lambda: nn.Dropout(dropout), lambda: nn.Linear(8, 3),
    )  # fmt: skip


def images(size: int = 24) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, 1, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x, (x.mean((1, 2, 3)) > 0).long()


def convolutional() -> nn.Sequential:
    return seeded(
        lambda: nn.Conv2d(1, 4, 3), nn.ReLU, lambda: nn.Conv2d(4, 6, 3, groups=2), nn.ReLU, nn.Flatten,
        lambda: nn.Linear(24, 2),
    )  # fmt: skip


def weights_of(posterior: Posterior) -> Tensor:
    tensors = (*posterior.model.parameters(), *posterior.model.buffers())
    return torch.cat([tensor.detach().flatten().double() for tensor in tensors])


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C in the middle of one update, counted over all fits."""
    original, count = _Loop._one_update, iter(range(1, 10**6))

    def one_update(self: _Loop, *args: Any) -> None:
        plain = self.inference
        if next(count) == step:

            def update(*args: Any) -> Any:
                os.kill(os.getpid(), signal.SIGINT)
                return plain.update(*args)

            self.inference = plain._replace(update=update)
        original(self, *args)
        self.inference = plain

    monkeypatch.setattr(_Loop, "_one_update", one_update)
