"""Verify that the smaller network computes the same function as the masked one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dubito.core import batches, params
from dubito.core.errors import UnsupportedError

TOLERANCE = 1e-5
MORE_ROWS = 16


def varied(example: Any) -> Any:
    """Return the batch and some of its rows again, their numbers scaled at random: what depends on the data shows."""
    generator = torch.Generator().manual_seed(0)

    def more(leaf: Tensor) -> Tensor:
        some = leaf[:MORE_ROWS]
        if leaf.is_floating_point():
            some = some * (0.5 + torch.rand(some.shape, generator=generator)).to(some)
        return torch.cat([leaf, some])

    return batches.map_leaves(more, example)


def largest_difference(first: nn.Module, second: nn.Module, example: Any) -> float:
    """Return the largest difference of two networks' outputs, relative to the largest output if that is above 1."""
    with torch.no_grad():
        expected, found = (params.call(model.eval(), example).double() for model in (first, second))
    if expected.shape != found.shape or not bool(found.isfinite().all()):
        return float("inf")
    return float((expected - found).abs().max() / expected.abs().max().clamp_min(1.0))


def require_same(reference: nn.Module, small: nn.Module, example: Any, tolerance: float = TOLERANCE) -> float:
    """Return the difference, if it is within the tolerance."""
    difference = largest_difference(reference, small, example)
    tolerance = max(tolerance, 4 * torch.finfo(next(reference.parameters()).dtype).eps)  # half precision
    if not difference <= tolerance:
        raise UnsupportedError(
            f"The smaller network differs from the masked one by {difference:.2g}, more than {tolerance:g}: units of "
            'this network cannot be removed exactly; use structure="weights".'
        )
    return difference
