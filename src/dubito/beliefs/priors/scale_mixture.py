"""A mixture of normal distributions with different scales, such as spike and slab."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dubito.beliefs.priors.base import Prior, Value, blank, like
from dubito.core.constraints import FiniteValue, Positive
from dubito.core.errors import InputError
from dubito.core.settings import setting


@setting
class ScaleMixture(Prior):
    r"""The mixture $p(w) = \sum_k \pi_k\, \mathcal N(w; m, s_k^2)$ for every single weight.

    A wide and a very narrow component are a differentiable spike-and-slab prior (Blundell et al. 2015,
    https://arxiv.org/abs/1505.05424).

    Args:
        scales: The standard deviations $s_k$.
        shares: The probabilities $\pi_k$, which add up to 1; by default equal.
        loc: The common centre m.
    """

    setting_name = "priors.ScaleMixture"
    scales: tuple[Positive, ...] = (1.0, 0.0025)
    shares: tuple[Positive, ...] | None = None
    loc: FiniteValue = 0.0

    def __post_init__(self) -> None:
        if not self.scales:
            raise InputError("`scales` must contain at least one positive number, got an empty tuple.")
        if self.shares is not None and (len(self.shares) != len(self.scales) or abs(sum(self.shares) - 1) > 1e-6):
            wanted = f"{len(self.scales)} positive numbers that add up to 1"
            raise InputError(f"`shares` must be {wanted}, got {self.shares!r}.")

    @property
    def probabilities(self) -> tuple[float, ...]:
        """The probability of each component."""
        return self.shares or (1 / len(self.scales),) * len(self.scales)

    def log_prob(self, w: Tensor) -> Tensor:
        """Return the log-density of each weight."""
        square = (w - like(self.loc, w)).square()
        parts = [
            math.log(share / scale) - 0.5 * math.log(2 * math.pi) - square / (2 * scale**2)
            for share, scale in zip(self.probabilities, self.scales, strict=True)
        ]
        return torch.stack(parts).logsumexp(dim=0)

    def sample(
        self, shape: Sequence[int], *, dtype: torch.dtype = torch.float32, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw a component for each weight, then the weight from that component."""
        normal = blank(shape, dtype, generator).normal_(generator=generator)
        shares = torch.tensor(self.probabilities, device=normal.device)
        chosen = torch.multinomial(shares, normal.numel(), replacement=True, generator=generator).reshape(normal.shape)
        return like(self.loc, normal) + normal.new_tensor(self.scales)[chosen] * normal

    def mean(self) -> Value:
        """Return m."""
        return self.loc

    def variance(self) -> Value:
        r"""Return $\sum_k \pi_k s_k^2$."""
        return sum(share * scale**2 for share, scale in zip(self.probabilities, self.scales, strict=True))
