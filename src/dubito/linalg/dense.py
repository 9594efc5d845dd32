"""A full matrix over few weights, in float64."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from dubito.errors import InputError
from dubito.linalg.base import Covariance, Matrix, eigh


class Dense(Matrix):
    """A full ``[D, D]`` matrix; with one prior precision for all weights every step after one eigendecomposition is O(D)."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix, self.size = matrix.double(), len(matrix)

    @cached_property
    def eigen(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors."""
        return eigh(self.matrix)

    def diagonal(self) -> Tensor:
        """The diagonal."""
        return self.matrix.diagonal()

    def matmul(self, vectors: Tensor) -> Tensor:
        """``H v``."""
        return vectors @ self.matrix

    def log_det(self, prior: Tensor, scale: Tensor) -> Tensor:
        """From the eigenvalues for one λ; by Cholesky where each weight has its own."""
        if prior.ndim == 0:
            return (scale * self.eigen[0] + prior).log().sum()
        return 2 * self._cholesky(prior, scale).diagonal().log().sum()

    def covariance(self, prior: Tensor, scale: Tensor) -> DenseCovariance:
        """By the eigenvectors for one λ; by Cholesky where each weight has its own."""
        if prior.ndim == 0 and "eigen" in self.__dict__:
            values, vectors = self.eigen
            return DenseCovariance(vectors * (scale * values + prior).rsqrt())
        factor = self._cholesky(prior.expand(self.size), scale)
        identity = torch.eye(self.size, dtype=factor.dtype, device=factor.device)
        return DenseCovariance(torch.linalg.solve_triangular(factor, identity, upper=False).mT)

    def state(self) -> dict[str, Any]:
        """The matrix."""
        return {"matrix": self.matrix}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """Undo `state`."""
        return cls(state["matrix"])

    def _cholesky(self, prior: Tensor, scale: Tensor) -> Tensor:
        factor, failed = torch.linalg.cholesky_ex(scale * self.matrix + torch.diag_embed(prior.double()))
        if bool(failed):
            raise InputError(
                "The precision of the selected weights is singular even in float64: raise prior_precision, or select fewer "
                "weights (some may have no influence on the outputs)."
            )
        return factor


class DenseCovariance(Covariance):
    """``R Rᵀ`` for a square root ``R [D, D]``."""

    def __init__(self, root: Tensor) -> None:
        self.root = root
        self.memory: dict[str, Tensor] = {}  # what a contraction keeps between batches

    @cached_property
    def matrix(self) -> Tensor:
        """The whole covariance."""
        return self.root @ self.root.mT

    def variance(self) -> Tensor:
        """The squared lengths of the rows of the root."""
        return self.root.square().sum(1)

    def solve(self, vectors: Tensor) -> Tensor:
        """``R Rᵀ v``."""
        return (vectors.to(self.root.dtype) @ self.root) @ self.root.mT

    def color(self, noise: Tensor) -> Tensor:
        """``R ε``."""
        return noise @ self.root.mT
