"""The directions in output space along which uncertainty changes a prediction.

These are all directions at each position. For a softmax, the direction that adds one constant to all logits is left
out, because it does not change the prediction.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from dubito.beliefs.likelihoods import Categorical, Likelihood


def num_directions(likelihood: Likelihood, outputs: Tensor) -> int:
    """Return the number of directions at all positions of one example."""
    *positions, width = likelihood.canonical(outputs).shape[1:]
    return math.prod(positions) * (width - isinstance(likelihood, Categorical))


def direction_columns(likelihood: Likelihood, outputs: Tensor, targets: Tensor | None, most: int) -> Iterator[Tensor]:
    """Yield the directions as orthonormal columns ``[v, *outputs]``, v ≤ `most`; zero where there is no target."""
    basis, canonical = _basis(likelihood, outputs), likelihood.canonical(outputs)
    count = num_directions(likelihood, outputs)
    for start in range(0, count, most):
        numbers = torch.arange(start, min(start + most, count), device=outputs.device)
        alone = basis.new_zeros(len(numbers), 1, count // len(basis), basis.shape[1])
        alone[numbers - start, 0, numbers // len(basis)] = basis[numbers % len(basis)]
        everyone = alone.reshape(-1, 1, *canonical.shape[1:]).expand(-1, *canonical.shape)
        yield likelihood.restore(_kept(likelihood, everyone, targets), outputs)


def random_columns(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor | None, num: int, generator: torch.Generator
) -> Tensor:
    """Return sums of all directions with random signs over √num, ``[num, *outputs]``, for unbiased sums of squares."""
    basis, canonical = _basis(likelihood, outputs), likelihood.canonical(outputs)
    shape = (num, *canonical.shape[:-1], len(basis))
    signs = torch.randint(2, shape, generator=generator, device=generator.device).to(basis)
    mixed = (2 * signs - 1) @ basis / math.sqrt(num)
    return likelihood.restore(_kept(likelihood, mixed, targets), outputs)


def at_each_position(columns: Tensor) -> Tensor:
    """Expand the columns ``[B, T, K, C]`` of each position to ``[T·K, B, T, C]``, zero at all other positions."""
    where = torch.eye(columns.shape[1]).to(columns)
    return (columns.permute(1, 2, 0, 3).unsqueeze(3) * where[:, None, None, :, None]).flatten(0, 1)


def _kept(likelihood: Likelihood, columns: Tensor, targets: Tensor | None) -> Tensor:
    """Set canonical columns to zero at positions without a target."""
    kept = None if targets is None else likelihood.observed(targets)
    return columns if kept is None or bool(kept.all()) else columns * kept.unsqueeze(-1)


def _basis(likelihood: Likelihood, outputs: Tensor) -> Tensor:
    """Return the directions at one position, ``[K, C]``."""
    width = likelihood.num_outputs(outputs)
    basis = _contrasts(width) if isinstance(likelihood, Categorical) else torch.eye(width, dtype=torch.float64)
    return basis.to(outputs)


@functools.lru_cache(maxsize=8)
def _contrasts(size: int) -> Tensor:
    """Return the orthonormal rows of the Helmert matrix, ``[C − 1, C]``: all directions but (1, …, 1).

    >>> rows = _contrasts(4)
    >>> torch.allclose(rows.mT @ rows, torch.eye(4, dtype=rows.dtype) - 0.25)
    True
    """
    count = torch.arange(1, size, dtype=torch.float64)
    rows = torch.ones(size - 1, size, dtype=torch.float64).tril()
    rows[torch.arange(size - 1), torch.arange(1, size)] = -count
    return rows / (count * (count + 1)).sqrt()[:, None]
