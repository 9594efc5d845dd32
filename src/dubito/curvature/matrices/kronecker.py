r"""A block-diagonal matrix with one block per parameter: a Kronecker product, a diagonal or a small full matrix.

The block of a weight matrix is :math:`(G \otimes A)/n` with :math:`G = \sum g g^\top` over output gradients and
:math:`A = \sum a a^\top` over inputs, from stored sums and counts, so that more data is added by adding sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor

from dubito.core.errors import InputError
from dubito.core.memory import TensorMemory
from dubito.curvature.matrices.base import Covariance, Covariances, Matrix, check_positive, eigh
from dubito.curvature.matrices.dense import Dense, DenseCovariances
from dubito.curvature.matrices.diagonal import Diagonal


@dataclass
class Block:
    """``Q_l diag(e) Q_r`` of one parameter, its entries arranged as a matrix ``[Gr, O, I]``.

    Args:
        values: The eigenvalues, ``[Gr, O, I]``.
        left: Eigenvectors over outputs, ``[Gr, O, O]``, or None for the identity.
        right: Eigenvectors over inputs, ``[Gr, I, I]``, or None.
        order: The flat position in the stored parameter of each entry of the matrix, or None where they agree.
        left_values: The eigenvalues over outputs alone, ``[Gr, O]``, where a bias may share them.
    """

    values: Tensor
    left: Tensor | None
    right: Tensor | None
    order: Tensor | None = None
    left_values: Tensor | None = None

    @property
    def size(self) -> int:
        """The number of weights."""
        return self.values.numel()

    def to_matrix(self, flat: Tensor) -> Tensor:
        """Arrange ``[..., D]`` as ``[..., Gr, O, I]``."""
        ordered = flat if self.order is None else flat[..., self.order]
        return ordered.reshape(*flat.shape[:-1], *self.values.shape)

    def from_matrix(self, matrix: Tensor) -> Tensor:
        """Undo `to_matrix`."""
        flat = matrix.flatten(-3)
        return flat if self.order is None else torch.empty_like(flat).index_copy_(-1, self.order, flat)

    def rotate(self, matrix: Tensor) -> Tensor:
        """Into the eigenbasis: ``Q_lᵀ X Q_r``."""
        matrix = matrix if self.left is None else self.left.mT.to(matrix.dtype) @ matrix
        return matrix if self.right is None else matrix @ self.right.to(matrix.dtype)

    def rotate_back(self, matrix: Tensor) -> Tensor:
        """Out of the eigenbasis: ``Q_l X Q_rᵀ``."""
        matrix = matrix if self.left is None else self.left.to(matrix.dtype) @ matrix
        return matrix if self.right is None else matrix @ self.right.mT.to(matrix.dtype)

    def function_diagonal(self, values: Tensor) -> Tensor:
        """The diagonal of ``Q diag(values) Qᵀ``, flat in the order of the parameter."""
        matrix = values if self.left is None else self.left.to(values.dtype).square() @ values
        matrix = matrix if self.right is None else matrix @ self.right.to(values.dtype).square().mT
        return self.from_matrix(matrix)


def kronecker_block(left: Tensor, right: Tensor | None, count: Tensor, order: Tensor | None = None) -> Block:
    """The block of ``(left ⊗ right) / count``.

    Args:
        left: ``[Gr, O, O]``; ``[Gr, O]`` where it is diagonal.
        right: ``[Gr, I, I]``; ``[Gr, I]`` where it is diagonal; ``[I]`` for the tokens of an embedding; None for a
            bias, which has no inputs.
        count: The number of rows that were summed.
        order: As in `Block`.
    """
    left_values, left_vectors = _eigenpairs(left)
    if right is None:
        return Block(left_values[..., None], left_vectors, None, order)
    if right.ndim == 1:
        values = left_values[..., None, :] * right.double()[:, None] / count  # an embedding: tokens × dimensions
        return Block(values, None, left_vectors, order)
    right_values, right_vectors = _eigenpairs(right)
    values = left_values[..., :, None] * right_values[..., None, :] / count
    return Block(values, left_vectors, right_vectors, order, left_values)


def _eigenpairs(factor: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the eigenvalues ``[Gr, W]``, and the eigenvectors unless the factor is a diagonal ``[Gr, W]``."""
    return (factor.double(), None) if factor.ndim == 2 else eigh(factor)


class Kronecker(Matrix):
    """Blocks of any kind, in the order of the selection."""

    def __init__(self, blocks: list[Block | Dense | Diagonal]) -> None:
        self.blocks = blocks
        self.size = sum(block.size for block in blocks)
        self.slices: list[slice] = []
        start = 0
        for block in blocks:
            self.slices.append(slice(start, start + block.size))
            start += block.size

    def diagonal(self) -> Tensor:
        """The diagonals of the blocks."""
        return torch.cat([b.function_diagonal(b.values) if isinstance(b, Block) else b.diagonal() for b in self.blocks])

    def matmul(self, vectors: Tensor) -> Tensor:
        """Block by block."""
        parts = []
        for block, span in zip(self.blocks, self.slices, strict=True):
            part = vectors[..., span].double()
            if isinstance(block, Block):
                turned = block.rotate(block.to_matrix(part)) * block.values
                parts.append(block.from_matrix(block.rotate_back(turned)))
            else:
                parts.append(block.matmul(part))
        return torch.cat(parts, dim=-1)

    def log_det(self, prior: Tensor, scale: Tensor) -> Tensor:
        """The sum over blocks; λ is constant within a Kronecker block."""
        total = torch.zeros((), dtype=torch.float64)
        for block, span in zip(self.blocks, self.slices, strict=True):
            part = _of_block(prior, span, block)
            if isinstance(block, Block):
                total = total + (scale * block.values + part).log().sum()
            else:
                total = total + block.log_det(part, scale)
        return total

    def covariance(self, prior: Tensor, scale: Tensor) -> KroneckerCovariance:
        """Block by block."""
        parts = [
            _covariance_of(block, _of_block(prior, span, block), scale)
            for block, span in zip(self.blocks, self.slices, strict=True)
        ]
        return KroneckerCovariance(parts, self.slices)

    def covariances(self, priors: Tensor, scale: Tensor) -> KroneckerCovariances:
        """Return covariances that are computed when they are asked for."""
        return KroneckerCovariances(self, priors, scale)

    def state(self) -> dict[str, Any]:
        """The blocks' tensors."""
        saved = []
        for block in self.blocks:
            if isinstance(block, Block):
                saved.append({"kind": "kronecker", **vars(block)})
            else:
                saved.append({"kind": "dense" if isinstance(block, Dense) else "diagonal", **block.state()})
        return {"blocks": saved}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """Undo `state`; a bias has the very basis of its weight again, with which it is computed."""
        blocks = [_block_from(dict(saved)) for saved in state["blocks"]]
        for first, second in pairwise(blocks):
            if isinstance(first, Block) and isinstance(second, Block):
                own, other = second.left, first.left
                second.left = other if own is not None and other is not None and torch.equal(own, other) else own
        return cls(blocks)


class KroneckerCovariances(Covariances):
    """The covariances for several numbers λ; those of a dense block share its eigenbasis."""

    matrix: Kronecker

    @cached_property
    def dense(self) -> dict[int, DenseCovariances]:
        """Those of the blocks that are full matrices, by the place of the block."""
        blocks = enumerate(self.matrix.blocks)
        return {k: block.covariances(self.priors, self.scale) for k, block in blocks if isinstance(block, Dense)}

    def __getitem__(self, index: Any) -> Any:
        """Compute one covariance."""
        parts = [
            self.dense[k][index] if k in self.dense else _covariance_of(block, self.priors[index], self.scale)
            for k, block in enumerate(self.matrix.blocks)
        ]
        return KroneckerCovariance(parts, self.matrix.slices)


class KroneckerCovariance(Covariance):
    """One covariance per block; that of a Kronecker block is kept in its eigenbasis."""

    def __init__(self, parts: list[tuple[Block, Tensor] | Covariance], slices: list[slice]) -> None:
        self.parts, self.slices = parts, slices
        self.memory = TensorMemory()  # what a contraction keeps between batches

    def variance(self) -> Tensor:
        """``(Q_l² V (Q_r²)ᵀ)`` for each block."""
        parts = (p.variance() if isinstance(p, Covariance) else p[0].function_diagonal(p[1]) for p in self.parts)
        return torch.cat(list(parts))

    def solve(self, vectors: Tensor) -> Tensor:
        """Block by block."""
        parts = []
        for part, span in zip(self.parts, self.slices, strict=True):
            vector = vectors[..., span].double()
            if isinstance(part, Covariance):
                parts.append(part.solve(vector))
            else:
                block, values = part
                parts.append(block.from_matrix(block.rotate_back(block.rotate(block.to_matrix(vector)) * values)))
        return torch.cat(parts, dim=-1)

    def color(self, noise: Tensor) -> Tensor:
        """``Q_l (√V ∘ ε) Q_rᵀ``: noise needs no turning into the eigenbasis, it has no direction."""
        parts = []
        for part, span in zip(self.parts, self.slices, strict=True):
            if isinstance(part, Covariance):
                parts.append(part.color(noise[..., span]))
            else:
                block, values = part
                scaled = noise[..., span].reshape(*noise.shape[:-1], *values.shape) * values.sqrt()
                parts.append(block.from_matrix(block.rotate_back(scaled)))
        return torch.cat(parts, dim=-1)


def _covariance_of(block: Block | Dense | Diagonal, prior: Tensor, scale: Tensor) -> tuple[Block, Tensor] | Covariance:
    """Return the covariance of one block; that of a Kronecker block by its eigenvalues."""
    if isinstance(block, Block):
        return block, 1 / check_positive(scale * block.values + prior)
    return block.covariance(prior, scale)


def _block_from(state: dict[str, Any]) -> Block | Dense | Diagonal:
    match state.pop("kind"):
        case "kronecker":
            return Block(**state)
        case "dense":
            return Dense.from_state(state)
        case _:
            return Diagonal.from_state(state)


def _of_block(prior: Tensor, span: slice, block: Block | Dense | Diagonal) -> Tensor:
    """The prior of one block: a number where the block needs one."""
    if prior.ndim == 0:
        return prior
    own = prior[span]
    if not isinstance(block, Block):
        return own
    if not bool((own == own[0]).all()):
        raise InputError(
            "A Kronecker block has one prior precision for all of its weights: use structure='diag' or 'full' for one "
            "per weight."
        )
    return own[0]
