r"""A low-rank matrix: :math:`H = U \mathrm{diag}(e) U^\top` with few orthonormal columns."""

from __future__ import annotations

import torch
from torch import Tensor

from dubito.curvature.matrices.base import Covariance, Matrix, check_finite, check_positive


class LowRank(Matrix):
    """``U [D, K]`` and eigenvalues ``e [K]``; what lies outside of the span of `U` has no curvature."""

    saved = ("vectors", "values")

    def __init__(self, vectors: Tensor, values: Tensor) -> None:
        self.vectors, self.values = vectors.double(), check_finite(values).double().clamp_min(0.0)
        self.size = len(vectors)

    def diagonal(self) -> Tensor:
        """``Σ_k e_k U_dk²``."""
        return self.vectors.square() @ self.values

    def matmul(self, vectors: Tensor) -> Tensor:
        """``U (e ∘ Uᵀ v)``."""
        return ((vectors.double() @ self.vectors) * self.values) @ self.vectors.mT

    def log_det(self, prior: Tensor, scale: Tensor) -> Tensor:
        r"""Determinant lemma: :math:`\sum \log\lambda + \log\det(I + s\,e^{1/2} U^\top \Lambda^{-1} U e^{1/2})`."""
        if prior.ndim == 0:
            rest = self.size - len(self.values)
            return rest * prior.log() + (scale * self.values + prior).log().sum()
        root = self.vectors * self.values.sqrt()
        identity = torch.eye(len(self.values), dtype=torch.float64, device=root.device)
        inner = identity + scale * (root / prior[:, None]).mT @ root
        return prior.double().log().sum() + torch.logdet(inner)

    def covariance(self, prior: Tensor, scale: Tensor) -> LowRankCovariance:
        """Through the singular vectors of ``Λ^{-1/2} U (s e)^{1/2}``."""
        spread = check_positive(prior).double().rsqrt().to(self.vectors.device).expand(self.size)
        if prior.ndim == 0:
            return LowRankCovariance(spread, self.vectors, (scale * self.values / prior).double())
        root = spread[:, None] * self.vectors * (scale * self.values).sqrt()
        left, lengths, _ = torch.linalg.svd(root, full_matrices=False)
        return LowRankCovariance(spread, left, lengths.square())


class LowRankCovariance(Covariance):
    r""":math:`\Lambda^{-1/2} (I - V \mathrm{diag}(g/(1+g)) V^\top) \Lambda^{-1/2}` with orthonormal ``V [D, K]``."""

    def __init__(self, spread: Tensor, basis: Tensor, gains: Tensor) -> None:
        self.spread, self.basis, self.gains = spread, basis, gains
        self.shrink = gains / (1 + gains)

    @property
    def is_uniform(self) -> bool:
        """Whether all weights have the same λ, so that `V` does not depend on it."""
        return self.spread.stride(0) == 0

    def variance(self) -> Tensor:
        """The diagonal."""
        return self.spread.square() * (1 - self.basis.square() @ self.shrink)

    def solve(self, vectors: Tensor) -> Tensor:
        """``P⁻¹ v`` by two thin products."""
        scaled = vectors.double() * self.spread
        return (scaled - ((scaled @ self.basis) * self.shrink) @ self.basis.mT) * self.spread

    def color(self, noise: Tensor) -> Tensor:
        """Shrink the noise along `V` by ``1/√(1+g)``."""
        along = (noise @ self.basis) * (1 - (1 + self.gains).rsqrt())
        return (noise - along @ self.basis.mT) * self.spread


def add(first: LowRank, second: LowRank, rank: int) -> LowRank:
    """The best rank-`rank` approximation of the sum of two low-rank matrices, through their joint span."""
    both = torch.cat([m.vectors * m.values.sqrt() for m in (first, second)], dim=1)
    left, singular, _ = torch.linalg.svd(both, full_matrices=False)
    return LowRank(left[:, :rank], singular[:rank].square())
