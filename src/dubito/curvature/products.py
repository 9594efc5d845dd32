"""Products of gradients and inputs, in parts that fit into the processor's cache, in memory that is used again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor

from dubito.core import limits
from dubito.core.limits import numbers, slices
from dubito.core.tracing import is_tracing
from dubito.curvature.matrices.base import column_blocks

# The fewest columns of one block of a symmetric product.
NARROWEST = 64

# Numbers in a cache line.
ALIGNED = 16


def explicit_products(
    grads: Tensor, inputs: Tensor, left: Tensor | None = None
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield slices of examples and of entries of the matrix ``[O, I]``, and their gradients ``[b, V, x]``.

    The gradients are in a buffer that is reused for the next ones; the caller may overwrite them.

    Args:
        grads: Rows of output gradients, ``[V, B, T, O]``.
        inputs: Rows of inputs, ``[B, T, I]``.
        left: A basis ``[O, O]`` into which the matrices are rotated; they must be small enough (`fits`).
    """
    columns, size, _, num_outputs = grads.shape
    width = inputs.shape[-1]
    cached = numbers(limits.current().cached_products)
    outputs = slices(num_outputs, cached // max(columns * width, 1))
    height = outputs[0].stop
    parts = slices(size, cached // max(columns * width * height, 1))
    buffer = grads.new_empty(parts[0].stop, columns, height, width)
    for examples in parts:
        for some in outputs:
            product = buffer[: examples.stop - examples.start, :, : some.stop - some.start]
            for n, each in enumerate(product, examples.start):  # all examples at once would copy the gradients
                torch.bmm(grads[:, n, :, some].mT, inputs[n].expand(columns, -1, -1), out=each)
            rotated = product if left is None else left.mT @ product
            yield examples, slice(some.start * width, some.stop * width), rotated.flatten(2)


def rotated_square_sum(grads: Tensor, inputs: Tensor, left: Tensor) -> Tensor:
    r"""Return :math:`\sum_{vn} (Q^\top M_{vn})^2`, flat in the order ``[O, I]``, of products that `fits` allows.

    One product per example has the columns side by side, which is faster where they have few outputs.

    Args:
        grads: Rows of output gradients, ``[V, B, T, O]``.
        inputs: Rows of inputs, ``[B, T, I]``.
        left: The basis `Q`, ``[O, O]``.
    """
    (columns, size, count, height), width = grads.shape, inputs.shape[-1]
    parts = slices(size, numbers(limits.current().cached_products) // (columns * height * width))
    merged, buffer = grads.new_empty(count, columns, height), grads.new_empty(parts[0].stop, width, columns * height)
    total = grads.new_zeros(width, height)
    for examples in parts:
        products = buffer[: examples.stop - examples.start]
        for n, each in enumerate(products, examples.start):
            merged.copy_(grads[:, n].transpose(0, 1))
            torch.mm(inputs[n].mT, merged.flatten(1), out=each)
        squares = (products.view(-1, height) @ left).square_()
        total += squares.view(-1, width, columns, height).sum((0, 2))
    return total.mT.flatten()


def fits(grads: Tensor, inputs: Tensor) -> bool:
    """Return whether `explicit_products` yields whole matrices, even with a bias."""
    return grads.shape[0] * grads.shape[-1] * (inputs.shape[-1] + 1) <= numbers(limits.current().cached_products)


def gram(rows: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return ``Σ_n a_n a_nᵀ`` of rows ``[..., N, I]``; only the upper half is computed, the other half is its mirror.

    With `weights` ``[P, N]`` it is ``Σ_n w_pn a_n a_nᵀ`` for every `p`.

    >>> gram(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]])).tolist()
    [[[3.0, 6.0], [6.0, 12.0]]]
    """
    width, columns = rows.shape[-1], rows.mT
    shape = rows.shape[:-2] if weights is None else weights.shape[:1]
    found = rows.new_empty(*shape, width, width)
    for block in column_blocks(width, NARROWEST):
        left = columns[..., block, :] if weights is None else weights[:, None] * columns[block]
        half = left @ rows[..., block.start :]
        found[..., block, block.start :] = half
        found[..., block.stop :, block] = half[..., block.stop - block.start :].mT
    return found


def weighted_outer(grads: Tensor, inputs: Tensor, weight: Tensor, closing: bool) -> Tensor:
    """Return `Factor.weighted_square` of outer products of grads ``[V, B, O]`` and inputs ``[B, I]``."""
    per_output = inputs.square() @ weight.mT
    if is_shared(grads):
        return closed(grads[:, 0], closing).square() @ per_output.mT
    if is_tracing():
        return (closed(grads, closing).square() * per_output).sum(-1)
    root, found = per_output.clamp_min_(0).sqrt_(), []
    total = torch.zeros_like(root)
    for each in grads:  # one column at a time takes little memory
        scaled = each * root
        if closing:
            total += scaled
        found.append(scaled.square_().sum(-1))
    if closing:
        found.append(total.square_().sum(-1))
    return torch.stack(found)


def closed(columns: Tensor, closing: bool) -> Tensor:
    """Return columns ``[V, ...]``; if `closing`, also their sum: minus the column that makes all sum to zero."""
    return torch.cat([columns, columns.sum(0, keepdim=True)]) if closing else columns


def is_shared(grads: Tensor) -> bool:
    """Return whether gradients ``[V, B, ...]`` are one set, expanded over the examples."""
    return grads.ndim > 2 and grads.shape[1] > 1 and grads.stride(1) == 0


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
