"""Cauchy and half-Cauchy priors, whose tails are so heavy that they have no moments."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dubito.beliefs.priors.base import Prior, blank, like, log
from dubito.core.constraints import FiniteValue, PositiveValue
from dubito.core.settings import setting


@setting
class Cauchy(Prior):
    r"""$p(w) = \frac{1}{\pi \gamma}\, \big(1 + (w - x_0)^2 / \gamma^2\big)^{-1}$.

    Args:
        loc: The centre $x_0$.
        scale: The scale γ, the half-width at half maximum.
    """

    setting_name = "priors.Cauchy"
    heavy_tails = True
    loc: FiniteValue = 0.0
    scale: PositiveValue = 1.0

    def log_prob(self, w: Tensor) -> Tensor:
        """Return the log-density."""
        scale = like(self.scale, w)
        return -math.log(math.pi) - log(scale) - torch.log1p(((w - like(self.loc, w)) / scale).square())

    def kl_from_cauchy(self, q_loc: Tensor, q_scale: Tensor) -> Tensor:
        r"""Return the KL divergence of a Cauchy posterior (Chyzak and Nielsen 2019, https://arxiv.org/abs/1905.10965).

        $$\mathrm{KL} = \log \frac{(\gamma_q + \gamma)^2 + (x_q - x_0)^2}{4 \gamma_q \gamma}$$
        """
        loc, scale = like(self.loc, q_loc), like(self.scale, q_loc)
        return ((q_scale + scale).square() + (q_loc - loc).square()).log() - (4 * q_scale * scale).log()

    def sample(
        self, shape: Sequence[int], *, dtype: torch.dtype = torch.float32, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw weights."""
        drawn = blank(shape, dtype, generator).cauchy_(generator=generator)
        return like(self.loc, drawn) + like(self.scale, drawn) * drawn


@setting
class HalfCauchy(Prior):
    r"""The distribution of the absolute value of a Cauchy variable, a prior for positive scales.

    Args:
        scale: The scale γ.
    """

    setting_name = "priors.HalfCauchy"
    positive = True
    scale: PositiveValue = 1.0

    def log_prob(self, w: Tensor) -> Tensor:
        """Return the log-density, −∞ below zero."""
        inside = Cauchy(0.0, self.scale).log_prob(w) + math.log(2)
        return torch.where(w >= 0, inside, -math.inf)

    def sample(
        self, shape: Sequence[int], *, dtype: torch.dtype = torch.float32, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw scales."""
        return Cauchy(0.0, self.scale).sample(shape, dtype=dtype, generator=generator).abs()
