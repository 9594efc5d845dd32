"""The log-normal prior for positive scales."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dubito.beliefs.priors.base import Prior, Value
from dubito.beliefs.priors.normal import Normal
from dubito.core.constraints import FiniteValue, PositiveValue
from dubito.core.settings import setting


@setting
class LogNormal(Prior):
    r"""The distribution with $\log w \sim \mathcal N(m, s^2)$, a prior for positive scales.

    Args:
        loc: The mean m of the logarithm.
        scale: Its standard deviation s.
    """

    setting_name = "priors.LogNormal"
    positive = True
    loc: FiniteValue = 0.0
    scale: PositiveValue = 1.0

    def log_prob(self, w: Tensor) -> Tensor:
        """Return the log-density, −∞ at zero and below."""
        logarithm = torch.where(w > 0, w, 1.0).log()
        inside = Normal(self.loc, self.scale).log_prob(logarithm) - logarithm
        return torch.where(w > 0, inside, -math.inf)

    def kl_from_log_normal(self, q_loc: Tensor, q_scale: Tensor) -> Tensor:
        """Return the KL divergence, which is that of the logarithms."""
        return Normal(self.loc, self.scale).kl(q_loc, q_scale)

    def sample(
        self, shape: Sequence[int], *, dtype: torch.dtype = torch.float32, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw scales."""
        return Normal(self.loc, self.scale).sample(shape, dtype=dtype, generator=generator).exp()

    def mean(self) -> Value:
        """Return $e^{m + s^2 / 2}$."""
        return _exp(self.loc + self.scale**2 / 2)

    def variance(self) -> Value:
        """Return $(e^{s^2} - 1) e^{2m + s^2}$."""
        square = self.scale**2
        return (_exp(square) - 1) * _exp(2 * self.loc + square)


def _exp(value: Value) -> Value:
    return value.exp() if isinstance(value, Tensor) else math.exp(value)
