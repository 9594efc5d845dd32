"""The Laplace prior, with a peak at its centre and heavier tails than the normal prior."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dubito.beliefs.priors.base import Prior, Value, blank, like, log
from dubito.core.constraints import FiniteValue, PositiveValue
from dubito.core.settings import setting


@setting
class Laplace(Prior):
    r"""$p(w) = \frac{1}{2b} e^{-|w - m| / b}$; its logarithm is an L1 penalty.

    The KL divergence of a normal posterior is exact, because with $d = \mu - m$

    $$\mathbb E_q |w - m| = \sigma \sqrt{2/\pi}\, e^{-d^2 / 2\sigma^2} + d\,\mathrm{erf}(d / \sigma\sqrt 2) .$$

    Args:
        loc: The centre m.
        scale: The scale b; the variance is $2 b^2$.
    """

    setting_name = "priors.Laplace"
    loc: FiniteValue = 0.0
    scale: PositiveValue = 1.0

    def log_prob(self, w: Tensor) -> Tensor:
        """Return the log-density."""
        scale = like(self.scale, w)
        return -(w - like(self.loc, w)).abs() / scale - log(scale) - math.log(2)

    def kl(self, q_mean: Tensor, q_scale: Tensor) -> Tensor:
        """Return the exact KL divergence of each weight."""
        scale, distance = like(self.scale, q_mean), q_mean - like(self.loc, q_mean)
        ratio = distance / q_scale
        expected = q_scale * math.sqrt(2 / math.pi) * (-0.5 * ratio.square()).exp()
        expected = expected + distance * torch.erf(ratio / math.sqrt(2))
        entropy = q_scale.log() + 0.5 * math.log(2 * math.pi * math.e)
        return expected / scale + log(scale) + math.log(2) - entropy

    def sample(
        self, shape: Sequence[int], *, dtype: torch.dtype = torch.float32, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw weights as exponential variables with a random sign."""
        size = blank(shape, dtype, generator).exponential_(generator=generator)
        sign = blank(shape, dtype, generator).bernoulli_(0.5, generator=generator) * 2 - 1
        return like(self.loc, size) + like(self.scale, size) * sign * size

    def mean(self) -> Value:
        """Return m."""
        return self.loc

    def variance(self) -> Value:
        """Return 2b²."""
        return 2 * self.scale**2
