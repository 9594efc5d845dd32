"""Memory that is reused from one part of a batch to the next."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor

from dubito.core.tracing import is_tracing

# Numbers in a cache line.
ALIGNED = 16


class Workspace:
    """Arrays that are lent for the length of a block, and reused in the next block.

    New memory is zeroed by the operating system, which can cost more than the computation itself.
    """

    overwrites: ClassVar[bool] = False
    """Whether arrays are filled with NaN at the end of their block, so that tests see it when one is used after it."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self.taken = 0

    @contextmanager
    def lend(self) -> Iterator[Workspace]:
        """Lend arrays until the end of the block; a nested block gets other arrays."""
        start = self.taken
        try:
            yield self
        finally:
            if self.overwrites:
                for array in self.kept[start : self.taken]:
                    array.fill_(math.nan)
            self.taken = start

    def empty(self, like: Tensor, *shape: int) -> Tensor:
        """Return the next array, uninitialized."""
        if is_tracing():
            return like.new_empty(shape)
        size = math.prod(shape)
        if self.taken == len(self.kept):
            self.kept.append(like.new_empty(0))
        kept = self.kept[self.taken]
        if kept.numel() < size or kept.dtype != like.dtype or kept.device != like.device:
            kept = self.kept[self.taken] = like.new_empty(size)
        self.taken += 1
        return kept[:size].view(shape)

    def aligned(self, like: Tensor, *shape: int) -> Tensor:
        """Return the next array, with each row aligned to a cache line, which makes products up to a tenth faster."""
        *lead, width = shape
        return self.empty(like, *lead, -(-width // ALIGNED) * ALIGNED)[..., :width]

    def times(self, rows: Tensor, matrix: Tensor) -> Tensor:
        """Return ``rows @ matrix`` for rows ``[..., I]`` in the next array."""
        if is_tracing():
            return rows @ matrix
        found = self.aligned(rows, *rows.shape[:-1], matrix.shape[1])
        torch.mm(rows.flatten(0, -2), matrix, out=found.flatten(0, -2))
        return found
