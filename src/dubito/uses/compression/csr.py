"""Run linear layers with sparse weights, where that is measured to be faster than the dense layer."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from dubito.networks.swapping import put
from dubito.networks.twin import copied
from dubito.networks.watching import inputs_of


class SparseLinear(nn.Module):
    """A linear layer whose weight is kept as compressed sparse rows; for inference.

    >>> dense = nn.Linear(3, 2)
    >>> x = torch.randn(4, 3)
    >>> torch.allclose(SparseLinear(dense)(x), dense(x), atol=1e-6)
    True
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, dense: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = dense.in_features, dense.out_features
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # sparse rows are called a beta feature
            self.register_buffer("weight", dense.weight.detach().to_sparse_csr())
        self.register_buffer("bias", None if dense.bias is None else dense.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return ``W x + b`` at every position."""
        rows = x.reshape(-1, self.in_features)
        found = (self.weight @ rows.T).T.reshape(*x.shape[:-1], self.out_features)
        return found if self.bias is None else found + self.bias


def seconds(work: Any, at_least: float = 0.05) -> float:
    """Return the shortest of several timings of one call, in seconds."""
    work()
    best, total = float("inf"), 0.0
    while total < at_least:
        start = time.perf_counter()
        work()
        taken = time.perf_counter() - start
        best, total = min(best, taken), total + taken
    return best


def _time(layer: nn.Module, x: Tensor) -> float:
    return seconds(lambda: layer(x))


def faster_layers(model: nn.Module, example: Any) -> nn.Module:
    """Return a copy in which each linear layer is sparse rows if that is faster on the inputs that it gets here."""
    faster = copied(model).eval()
    names = [name for name, module in faster.named_modules() if type(module) is nn.Linear]
    seen = inputs_of(faster, {name: faster.get_submodule(name) for name in names}, example)
    with torch.no_grad():
        for name in names:
            dense = faster.get_submodule(name)
            assert isinstance(dense, nn.Linear)
            rows = SparseLinear(dense)
            if name in seen and _time(rows, seen[name]) < _time(dense, seen[name]):
                put(faster, name, rows)
    return faster


def break_even(
    num_inputs: int = 784, num_outputs: int = 300, batch_size: int = 128, *, generator: torch.Generator | None = None
) -> dict[float, float]:
    """Return the time of sparse rows over that of a dense layer, by sparsity; below 1 sparse rows are faster."""
    found = {}
    x = torch.randn(batch_size, num_inputs, generator=generator)
    for sparsity in (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998):
        dense = nn.Linear(num_inputs, num_outputs)
        with torch.no_grad():
            dense.weight.mul_(torch.rand(dense.weight.shape, generator=generator) >= sparsity)
            rows = SparseLinear(dense)
            found[sparsity] = _time(rows, x) / _time(dense, x)
    return found
