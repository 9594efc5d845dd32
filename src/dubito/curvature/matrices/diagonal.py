"""A diagonal matrix."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dubito.core.memory import TensorMemory
from dubito.curvature.matrices.base import Covariance, Covariances, Matrix, check_positive


class Diagonal(Matrix):
    """``H = diag(h)``.

    >>> import torch
    >>> one = torch.tensor(1.0)
    >>> Diagonal(torch.tensor([1.0, 3.0])).covariance(one, one).variance().tolist()
    [0.5, 0.25]
    """

    saved = ("values",)

    def __init__(self, values: Tensor) -> None:
        self.values, self.size = values, len(values)

    def diagonal(self) -> Tensor:
        """``h``."""
        return self.values

    def matmul(self, vectors: Tensor) -> Tensor:
        """``h ∘ v``."""
        return vectors * self.values

    def log_det(self, prior: Tensor, scale: Tensor) -> Tensor:
        """``Σ log(s h + λ)``."""
        return (scale * self.values + prior).log().sum()

    def covariance(self, prior: Tensor, scale: Tensor) -> DiagonalCovariance:
        """``1 / (s h + λ)``."""
        return DiagonalCovariance(check_positive(scale * self.values + prior).reciprocal())

    def covariances(self, priors: Tensor, scale: Tensor) -> Sequence[Covariance]:
        """Return covariances that are computed when they are asked for."""
        return Covariances(self, priors, scale)


class DiagonalCovariance(Covariance):
    """``diag(v)``."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.memory = TensorMemory()  # what a contraction keeps between batches

    def variance(self) -> Tensor:
        """``v``."""
        return self.values

    def solve(self, vectors: Tensor) -> Tensor:
        """``v ∘ x``."""
        return vectors * self.values

    def color(self, noise: Tensor) -> Tensor:
        """``√v ∘ ε``."""
        return noise * self.values.sqrt()
