"""The contract of a structured curvature matrix and of the covariance that it gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self

import torch
from torch import Tensor

from dubito.errors import InputError


class Covariance(ABC):
    r"""The inverse of a precision :math:`P = s H + \mathrm{diag}(\lambda)`."""

    @abstractmethod
    def variance(self) -> Tensor:
        """The marginal variances, ``[D]``."""

    @abstractmethod
    def solve(self, vectors: Tensor) -> Tensor:
        """``P⁻¹ v`` for vectors ``[..., D]``."""

    @abstractmethod
    def color(self, noise: Tensor) -> Tensor:
        """Turn standard normal noise ``[S, D]`` into draws with this covariance."""

    def sample(self, num_samples: int, size: int, generator: torch.Generator, like: Tensor) -> Tensor:
        """Draw ``[S, D]`` vectors of mean zero."""
        noise = torch.randn(num_samples, size, generator=generator, dtype=torch.float64, device=generator.device)
        return self.color(noise.to(like.device)).to(like.dtype)


class Matrix(ABC):
    """A symmetric positive semi-definite matrix over `size` weights."""

    size: int

    @abstractmethod
    def diagonal(self) -> Tensor:
        """The diagonal, ``[D]``."""

    @abstractmethod
    def matmul(self, vectors: Tensor) -> Tensor:
        """``H v`` for vectors ``[..., D]``."""

    @abstractmethod
    def log_det(self, prior: Tensor, scale: Tensor) -> Tensor:
        r""":math:`\log\det(s H + \mathrm{diag}(\lambda))`, differentiable in both."""

    @abstractmethod
    def covariance(self, prior: Tensor, scale: Tensor) -> Covariance:
        r""":math:`(s H + \mathrm{diag}(\lambda))^{-1}`."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Tensors and plain values from which `from_state` makes the matrix again."""

    @classmethod
    @abstractmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """Undo `state`."""

    def precision_matmul(self, vectors: Tensor, prior: Tensor, scale: Tensor) -> Tensor:
        """``(s H + diag(λ)) v``."""
        return scale * self.matmul(vectors) + prior * vectors


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (negative rounding errors set to 0) and eigenvectors, in float64: float32 fails on degenerate matrices."""
    if not bool(matrix.isfinite().all()):
        raise InputError("The curvature is not finite: look for NaN weights or extreme outputs of the network.")
    values, vectors = torch.linalg.eigh(matrix.double())
    return values.clamp_min(0.0), vectors
