"""A covariance of which only exact posterior samples are known."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from dubito.core.errors import UnsupportedError
from dubito.curvature.matrices.base import Covariance, Matrix


class Sampled(Matrix):
    r"""Draws ``[K, D]`` of $\mathcal N(0, P^{-1})$ at one prior and noise, in place of the curvature."""

    saved = ("draws",)

    def __init__(self, draws: Tensor) -> None:
        self.draws, self.size = draws, draws.shape[1]

    def diagonal(self) -> Tensor:
        """Not known."""
        raise _unknown()

    def matmul(self, vectors: Tensor) -> Tensor:
        """Not known."""
        raise _unknown()

    def log_det(self, prior: Tensor, scale: Tensor) -> Tensor:
        """Not known."""
        raise _unknown()

    def covariance(self, prior: Tensor, scale: Tensor) -> SampledCovariance:
        """Return the covariance at the prior and scale for which the draws were computed; no others are known."""
        return SampledCovariance(self.draws)


class SampledCovariance(Covariance):
    r"""The estimate $\tfrac1K \sum_k \delta_k \delta_k^\top$, whose mean is the exact covariance."""

    def __init__(self, draws: Tensor) -> None:
        self.draws = draws

    @cached_property
    def root(self) -> Tensor:
        """``R [D, K]`` with ``R Rᵀ`` the covariance."""
        return (self.draws / len(self.draws) ** 0.5).mT

    def variance(self) -> Tensor:
        """The mean squares."""
        return self.draws.square().mean(0)

    def solve(self, vectors: Tensor) -> Tensor:
        """``R Rᵀ v``."""
        return (vectors.to(self.root) @ self.root) @ self.root.mT

    def color(self, noise: Tensor) -> Tensor:
        """Combine the draws linearly; noise ``[S, K]``."""
        return noise.to(self.root) @ self.root.mT

    def sample(self, num_samples: int, size: int, generator: torch.Generator, like: Tensor) -> Tensor:
        """Return the draws in a random order, each with a random sign, and again if more are asked for than there are.

        The distribution is symmetric, so the sign keeps them exact, and makes their mean zero.
        """
        count, device = len(self.draws), generator.device
        turns = -(-num_samples // count)
        order = torch.cat([torch.randperm(count, generator=generator, device=device) for _ in range(turns)])
        signs = torch.randint(2, (num_samples, 1), generator=generator, device=device) * 2 - 1
        return self.draws[order[:num_samples].to(self.draws.device)].to(like) * signs.to(like)


def _unknown() -> UnsupportedError:
    return UnsupportedError(
        "A posterior with structure='sampled' holds samples and no precision matrix, so it has no evidence, density or "
        "conditional mean: use structure='kron'."
    )
