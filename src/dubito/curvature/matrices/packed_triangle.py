r"""The inverse of a Cholesky factor, stored below the diagonal of the factorized matrix.

The upper half of a symmetric matrix defines it. Over thousands of weights the matrix is the largest object in memory,
and a root of the covariance would be a second one. Here the root takes the lower half, with little extra memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# The number of rows and columns of one block.
BLOCK = 256


@dataclass
class PackedTriangle:
    """A lower triangular matrix `X`, stored below the diagonal of another matrix.

    Args:
        matrix: Holds `X` below its diagonal, and other values above.
        diagonal: The diagonal of `X`.
    """

    matrix: Tensor
    diagonal: Tensor

    def __len__(self) -> int:
        return len(self.matrix)

    def rows(self, block: slice) -> Tensor:
        """Return ``X[block, :block.stop]``; all entries to the right are zero."""
        rows = self.matrix[block, : block.stop].clone()
        corner = rows[:, block.start :].tril_(-1)
        corner.diagonal().copy_(self.diagonal[block])
        return rows

    def whole(self) -> Tensor:
        """Return ``X`` in new memory."""
        found = self.matrix.tril(-1)
        found.diagonal().copy_(self.diagonal)
        return found

    def alone(self) -> Tensor:
        """Return ``X`` in the same memory; the upper half is lost."""
        found = self.matrix.tril_(-1)
        found.diagonal().copy_(self.diagonal)
        return found

    def put(self, block: slice, corner: Tensor) -> None:
        """Write a block on the diagonal of `X`."""
        mine = self.matrix[block, block]
        mine.copy_(mine.triu() + corner.tril(-1))
        self.diagonal[block] = corner.diagonal()

    def corner(self, block: slice) -> Tensor:
        """Return a block on the diagonal of `X`."""
        found = self.matrix[block, block].tril(-1)
        found.diagonal().copy_(self.diagonal[block])
        return found


def times_symmetric(vectors: Tensor, matrix: Tensor) -> Tensor:
    """``V H`` for vectors ``V [..., D]`` and a symmetric `H` that is read above the diagonal only, without a copy."""
    found = torch.zeros_like(vectors)
    for block in _blocks(len(matrix)):
        corner, right = matrix[block, block].triu(), matrix[block, block.stop :]
        found[..., block] += vectors[..., block] @ (corner + corner.triu(1).mT)
        found[..., block] += vectors[..., block.stop :] @ right.mT
        found[..., block.stop :] += vectors[..., block] @ right
    return found


def inverse_factor(matrix: Tensor, prior: Tensor, scale: Tensor) -> PackedTriangle | None:
    r"""Write $L^{-1}$, where $L L^\top = s\,H + \mathrm{diag}(\lambda)$, below the diagonal of `matrix`.

    `H` is read from the diagonal and above, which stay as they are. None where it is not positive definite.
    """
    size = len(matrix)
    half = PackedTriangle(matrix, torch.empty(size, dtype=matrix.dtype, device=matrix.device))
    blocks = _blocks(size)
    for block in blocks:
        if not _factorize(half, block, prior[block], scale):
            return None
    for block in reversed(blocks):
        _invert(half, block, blocks)
    return half


def _factorize(half: PackedTriangle, block: slice, prior: Tensor, scale: Tensor) -> bool:
    """Put the columns `block` of the factor in place, given those to their left."""
    matrix, left = half.matrix, half.matrix[block, : block.start]
    corner = matrix[block, block].triu()
    corner = scale * (corner + corner.triu(1).mT)
    corner.diagonal().add_(prior)
    factor, failed = torch.linalg.cholesky_ex(corner.addmm_(left, left.mT, alpha=-1))
    below = scale * matrix[block, block.stop :]
    below.addmm_(left, matrix[block.stop :, : block.start].mT, alpha=-1)
    matrix[block.stop :, block] = torch.linalg.solve_triangular(factor, below, upper=False).mT
    half.put(block, factor)
    return not bool(failed)


def _invert(half: PackedTriangle, block: slice, blocks: list[slice]) -> None:
    """Turn the columns `block` of the factor into those of its inverse, given those to their right."""
    corner = half.corner(block)
    inverse = torch.linalg.solve_triangular(corner, torch.eye(len(corner)).to(corner), upper=False)
    below = half.matrix[block.stop :, block] @ inverse  # of the factor; of its inverse it is -X times this
    for rows in blocks:
        if rows.start >= block.stop:
            done = half.matrix[rows, block.stop : rows.start] @ below[: rows.start - block.stop]
            own = below[rows.start - block.stop : rows.stop - block.stop]
            half.matrix[rows, block] = done.addmm_(half.corner(rows), own).neg_()
    half.put(block, inverse)


def _blocks(size: int) -> list[slice]:
    return [slice(start, min(start + BLOCK, size)) for start in range(0, size, BLOCK)]
