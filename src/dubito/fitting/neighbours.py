r"""Test whether inputs say anything about their targets, without a network: are the targets of neighbours alike?

A network that fits its training data perfectly does so for labels that are noise, too, and its curvature is then zero.
The mean squared difference of the targets of nearest neighbours (of classes, the rate at which they disagree) knows
nothing of the network. It is compared with its distribution under permutations of the targets (Friedman & Rafsky 1979).
"""

from __future__ import annotations

import torch
from torch import Tensor

# The neighbours of each example, the permutations, and the most examples and numbers of all inputs that are looked at.
NEIGHBOURS, PERMUTATIONS, MOST_ROWS, MOST_NUMBERS = 5, 50, 1000, 5_000_000
# Fewer examples tell nothing.
FEWEST_ROWS = 30


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
    rows = min(len(inputs), MOST_ROWS, MOST_NUMBERS // max(inputs[:1].numel(), 1))
    chosen = torch.linspace(0, len(inputs) - 1, max(rows, 2)).round().long()
    flat = inputs[chosen.to(inputs.device)].flatten(1).cpu().double()
    flat = (flat - flat.mean(0)) / flat.std(0).clamp_min(1e-12)
    distances = torch.cdist(flat, flat)
    kept = ~(distances <= 1e-6 * distances.mean()).tril(-1).any(1)  # copies of rows say nothing
    rows, values = int(kept.sum()), targets[chosen.to(targets.device)].cpu().reshape(len(chosen), -1)[kept]
    if rows < FEWEST_ROWS:
        return None
    distances = distances[kept][:, kept].fill_diagonal_(torch.inf)
    near = distances.topk(NEIGHBOURS, largest=False).indices

    def difference(order: Tensor) -> Tensor:
        own = values[order]
        pairs = own[near] - own[:, None]
        return ((pairs != 0).any(-1) if classes else pairs.double().square().sum(-1)).double().mean()

    generator = torch.Generator().manual_seed(0)
    by_chance = torch.stack([difference(torch.randperm(rows, generator=generator)) for _ in range(PERMUTATIONS)])
    return float((by_chance.mean() - difference(torch.arange(rows))) / by_chance.std().clamp_min(1e-12))
