"""The Student-t prior, with polynomial tails: a normal prior whose variance is inverse gamma distributed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dubito.beliefs.priors.base import Prior, Value, blank, like, log
from dubito.core.constraints import FiniteValue, Positive, PositiveValue
from dubito.core.settings import setting


@setting
class StudentT(Prior):
    r"""$p(w) \propto \big(1 + \tfrac{1}{\nu} \big(\tfrac{w - m}{s}\big)^2\big)^{-(\nu+1)/2}$.

    Args:
        df: The degrees of freedom ν; 1 is the Cauchy distribution, ∞ the normal one.
        loc: The centre m.
        scale: The scale s; the variance is $s^2 \nu / (\nu - 2)$ for ν > 2.
    """

    setting_name = "priors.StudentT"
    heavy_tails = True
    df: Positive = 3.0
    loc: FiniteValue = 0.0
    scale: PositiveValue = 1.0

    def log_prob(self, w: Tensor) -> Tensor:
        """Return the log-density."""
        scale, df = like(self.scale, w), self.df
        square = ((w - like(self.loc, w)) / scale).square()
        normalizer = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi)
        return normalizer - log(scale) - 0.5 * (df + 1) * torch.log1p(square / df)

    def sample(
        self, shape: Sequence[int], *, dtype: torch.dtype = torch.float32, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw weights as a normal variable divided by the root of a scaled chi-squared one."""
        normal = blank(shape, dtype, generator).normal_(generator=generator)
        half = torch._standard_gamma(torch.full_like(normal, self.df / 2), generator=generator)
        return like(self.loc, normal) + like(self.scale, normal) * normal * (2 * half / self.df).rsqrt()

    def mean(self) -> Value:
        """Return m, if ν > 1."""
        return self.loc if self.df > 1 else super().mean()

    def variance(self) -> Value:
        """Return the variance, if ν > 2."""
        return self.scale**2 * (self.df / (self.df - 2)) if self.df > 2 else super().variance()
