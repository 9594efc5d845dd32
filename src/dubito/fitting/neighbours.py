r"""Test whether inputs say anything about their targets, without a network: are the targets of neighbours alike?

A network that fits its training data perfectly does so for labels that are noise, too, and its curvature is then zero.
The mean squared difference of the targets of nearest neighbours (of classes, the rate at which they disagree) knows
nothing of the network. It is compared with its distribution under permutations of the targets (Friedman & Rafsky 1979).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from dubito.core.limits import current, numbers

# The neighbours of each example, the permutations, and the most examples that are looked at.
NEIGHBOURS, PERMUTATIONS, MOST_ROWS = 5, 50, 1000
# Fewer examples tell nothing.
FEWEST_ROWS = 30
# A first look at so many examples, which costs little, is enough if it is far beyond chance.
FIRST_ROWS, BEYOND_CHANCE = 64, 6.0


def likeness_of_neighbours(inputs: Tensor, targets: Tensor, *, classes: bool) -> float | None:
    """Return by how many standard deviations neighbours are more alike than chance; None if too few rows tell.

    Args:
        inputs: The inputs ``[N, ...]``; each feature is standardized.
        targets: One label ``[N]`` or some numbers ``[N, O]`` per example.
        classes: Whether targets are labels.

    >>> line = torch.arange(100.0)[:, None]
    >>> likeness_of_neighbours(line, line, classes=False) > 10
    True
    """
    most = numbers(current().compared_inputs) // max(inputs[:1].numel(), 1)
    rows = max(2, min(len(inputs), MOST_ROWS, most))
    if rows > FIRST_ROWS:
        found = _likeness(inputs, targets, FIRST_ROWS, classes)
        if found is not None and found > BEYOND_CHANCE:
            return found
    return _likeness(inputs, targets, rows, classes)


def _likeness(inputs: Tensor, targets: Tensor, rows: int, classes: bool) -> float | None:
    """Return the likeness of so many rows, spread over the data."""
    chosen = torch.linspace(0, len(inputs) - 1, rows).round().long()
    flat = inputs[chosen.to(inputs.device)].flatten(1).cpu().double()  # a copy, whatever its dtype
    flat -= flat.mean(0)
    flat /= flat.square().mean(0).sqrt().clamp_min(1e-12)
    distances = torch.cdist(flat, flat)
    kept = ~(distances <= 1e-6 * distances.mean()).tril(-1).any(1)  # copies of rows say nothing
    rows, values = int(kept.sum()), targets[chosen.to(targets.device)].cpu().reshape(len(chosen), -1)[kept]
    if rows < FEWEST_ROWS:
        return None
    near = distances[kept][:, kept].fill_diagonal_(torch.inf).topk(NEIGHBOURS, largest=False).indices
    differences = _differences(values, classes)
    orders = _orders(rows)
    by_chance = differences[orders[:, :, None], orders[:, near]].mean((1, 2))
    own = differences[torch.arange(rows)[:, None], near].mean()
    return float((by_chance.mean() - own) / by_chance.std().clamp_min(1e-12))


@lru_cache(maxsize=2)
def _orders(rows: int) -> Tensor:
    """Return the permutations, which are always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.stack([torch.randperm(rows, generator=generator) for _ in range(PERMUTATIONS)])


def _differences(values: Tensor, classes: bool) -> Tensor:
    """Return the squared distance of each two targets; for labels, whether they differ."""
    if classes:
        return (values[:, None] != values).any(-1).double()
    centred = values.double() - values.double().mean(0)
    return torch.cdist(centred, centred).square()
