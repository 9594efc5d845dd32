"""A full matrix over few weights, in float64.

The upper half of a symmetric matrix defines it. Over thousands of weights the matrix is the largest object in memory,
and a root of the covariance would be a second one: a `PackedTriangle` takes the lower half, with little extra memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dubito.core.limits import slices
from dubito.core.memory import TensorMemory
from dubito.curvature.matrices.base import (
    Covariance,
    Covariances,
    Matrix,
    check_finite,
    check_positive,
    column_blocks,
    eigh,
    singular,
)

# The number of columns of a root that are computed at a time.
AT_ONCE = 128

# The number of rows and columns of one block.
BLOCK = 256


class Dense(Matrix):
    """A full ``[D, D]`` matrix; with one λ for all weights every step after one eigendecomposition is O(D).

    Args:
        matrix: The matrix; only its upper half is read.
        lends: Whether no one else reads its lower half, so that the root of the first covariance may overwrite it.
    """

    saved = ("matrix",)

    def __init__(self, matrix: Tensor, *, lends: bool = False) -> None:
        self.upper, self.size, self.lends = matrix.double(), len(matrix), lends

    @property
    def matrix(self) -> Tensor:
        """A copy with both halves."""
        return self.upper.triu() + self.upper.triu(1).mT

    @cached_property
    def eigen(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors."""
        return eigh(self.upper.mT)  # `eigh` reads the lower half

    def diagonal(self) -> Tensor:
        """The diagonal."""
        return self.upper.diagonal()

    def matmul(self, vectors: Tensor) -> Tensor:
        """``H v``."""
        return times_symmetric(vectors, self.upper)

    def log_det(self, prior: Tensor, scale: Tensor) -> Tensor:
        """Return it from the eigenvalues for one λ; by Cholesky if each weight has its own."""
        if prior.ndim == 0:
            return (scale * self.eigen[0] + prior).log().sum()
        own = torch.diag(prior.double())
        factor, failed = torch.linalg.cholesky_ex(scale * check_finite(self.matrix) + own)
        if failed:
            factor, failed = torch.linalg.cholesky_ex(scale * self._positive_part() + own)
        if failed:
            raise singular()
        return 2 * factor.diagonal().log().sum()

    def covariances(self, priors: Tensor, scale: Tensor) -> DenseCovariances:
        """Return covariances in one eigenbasis, so that a Jacobian is rotated once for all of them."""
        return DenseCovariances(self, priors, scale)

    def covariance(self, prior: Tensor, scale: Tensor) -> DenseCovariance:
        """Return it by Cholesky; the inverse of the factor is stored in the lower half of the matrix, or of a copy."""
        prior, scale = prior.detach().expand(self.size).double(), scale.detach().double()
        lent, self.lends = self.lends, False
        half = inverse_factor(check_finite(self.upper if lent else self.upper.clone()), prior, scale)
        if half is None:
            half, lent = inverse_factor(self._positive_part(), prior, scale), False
        if half is None:
            raise singular()
        return DenseCovariance(half if lent else half.alone().mT, is_triangular=True)

    def _positive_part(self) -> Tensor:
        """Return the matrix without the slightly negative eigenvalues that sums in float32 may have."""
        values, vectors = self.eigen
        return (vectors * values) @ vectors.mT


class DenseCovariances(Covariances):
    """The covariances for several numbers λ, which are diagonal in the eigenbasis of the matrix."""

    matrix: Dense

    @cached_property
    def variances(self) -> Tensor:
        """The variances ``[G, D]`` along the eigenvectors."""
        values = self.matrix.eigen[0]
        return check_positive(self.scale * values + self.priors[:, None].to(values)).reciprocal()

    def __getitem__(self, index: Any) -> Any:
        """Return one covariance, or several."""
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(len(self)))]
        return DenseCovariance(self.matrix.eigen[1], self.variances[index].sqrt())


class DenseCovariance(Covariance):
    """``R Rᵀ`` for a square root ``R [D, D]``, or for ``R = Q diag(c)`` in a basis ``Q`` that several share.

    Args:
        basis: ``R``; or ``Q`` if there are scales; or a `PackedTriangle` that holds ``Rᵀ``.
        scales: ``c``, or None.
        is_triangular: Whether the root is upper triangular, as the inverse of a Cholesky factor is.
    """

    def __init__(
        self, basis: Tensor | PackedTriangle, scales: Tensor | None = None, *, is_triangular: bool = False
    ) -> None:
        self.basis, self.scales, self.is_triangular = basis, scales, is_triangular
        self.memory = TensorMemory()  # values that contractions cache between batches

    @cached_property
    def root(self) -> Tensor:
        """The root ``R``; a packed one is unpacked on each access."""
        return self._root()

    def _root(self) -> Tensor:
        if isinstance(self.basis, PackedTriangle):
            return self.basis.whole().mT
        return self.basis if self.scales is None else self.basis * self.scales

    def root_columns(self) -> Iterator[Tensor]:
        """Yield some columns of the root at a time, without the last rows that are all zero."""
        for block in slices(len(self.basis), AT_ONCE):
            if isinstance(self.basis, PackedTriangle):
                yield self.basis.rows(block).mT
            else:
                yield self.root[: block.stop if self.is_triangular else None, block]

    @property
    def matrix(self) -> Tensor:
        """The whole covariance."""
        return self.root @ self.root.mT

    def times_root(self, rows: Tensor) -> Tensor:
        """``V R`` for rows ``V [..., D]``, in their precision."""
        return torch.cat(list(self._times_root(rows.flatten(0, -2))), dim=-1).reshape(rows.shape)

    def variance_along(self, rows: Tensor) -> Tensor:
        """The diagonal of ``V R Rᵀ Vᵀ`` for rows ``V [..., D]``, in their precision."""
        parts = (part.square_().sum(-1) for part in self._times_root(rows.flatten(0, -2)))
        return functools.reduce(Tensor.add_, parts).reshape(rows.shape[:-1])

    def _times_root(self, rows: Tensor) -> Iterator[Tensor]:
        """Yield ``V R``, some columns at a time; most zeros of a triangular root are skipped."""
        key = f"root {rows.dtype}"
        if key not in self.memory:
            self.memory[key] = self._root().to(rows)
        root = self.memory[key]
        if not self.is_triangular:
            yield rows @ root
            return
        for block in column_blocks(len(root)):
            yield rows[:, : block.stop] @ root[: block.stop, block]

    def variance(self) -> Tensor:
        """The squared lengths of the rows of the root."""
        return self.root.square().sum(1)

    def solve(self, vectors: Tensor) -> Tensor:
        """``R Rᵀ v``."""
        return (vectors.to(self.root.dtype) @ self.root) @ self.root.mT

    def color(self, noise: Tensor) -> Tensor:
        """``R ε``."""
        return noise @ self.root.mT


@dataclass
class PackedTriangle:
    """A lower triangular matrix `X`, stored below the diagonal of another matrix."""

    matrix: Tensor  # holds `X` below its diagonal, and other values above
    diagonal: Tensor  # the diagonal of `X`

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
    return slices(size, BLOCK)
