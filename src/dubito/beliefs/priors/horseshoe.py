"""The horseshoe prior over groups of weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dubito.beliefs.priors.group import GroupPrior
from dubito.core.constraints import Positive
from dubito.core.settings import setting


@setting
class Horseshoe(GroupPrior):
    r"""Half-Cauchy scales of groups of weights, multiplied by a half-Cauchy scale of the whole layer.

    $$w_{gi} = s\, t_g\, \tilde w_{gi}, \qquad s \sim \mathrm C^+(0, \tau), \quad t_g \sim \mathrm C^+(0, 1), \quad
      \tilde w_{gi} \sim \mathcal N(0, 1)$$

    (Carvalho et al. 2010; Louizos et al. 2017, https://arxiv.org/abs/1705.08665). A half-Cauchy variable is the root
    of a product, $s^2 = a b$ with $a \sim \mathrm{Gamma}(\frac12, \text{scale } \tau^2)$ and $b \sim
    \mathrm{InvGamma}(\frac12, 1)$, and with log-normal posteriors of both factors each KL divergence has a closed form.

    Args:
        scale: The scale τ of the layer; the smaller it is, the fewer groups remain.
        groups: Which weights share a scale; see `GroupPrior`.
    """

    setting_name = "priors.Horseshoe"
    scale: Positive = 1e-5


def log_normal_kl_gamma(mean: Tensor, variance: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    r"""Return the KL divergence of $\log a \sim \mathcal N(m, v)$ from $\mathrm{Gamma}(\frac12, \text{scale } \tau^2)$.

    $$\mathrm{KL} = \log \tau + \frac{e^{m + v/2}}{\tau^2} - \tfrac12 (m + \log v + 1 + \log 2)$$

    >>> one = torch.ones((), dtype=torch.float64)
    >>> shifted = log_normal_kl_gamma(one + math.log(4), one, 2.0)  # log a and log τ² moved by the same
    >>> torch.testing.assert_close(log_normal_kl_gamma(one, one, 1.0), shifted)
    """
    log_scale = torch.as_tensor(scale, dtype=mean.dtype, device=mean.device).log()
    return log_scale + (mean + variance / 2 - 2 * log_scale).exp() - 0.5 * (mean + variance.log() + 1 + math.log(2))


def log_normal_kl_inverse_gamma(mean: Tensor, variance: Tensor) -> Tensor:
    r"""Return the KL divergence of $\log b \sim \mathcal N(m, v)$ from $\mathrm{InvGamma}(\frac12, 1)$.

    It equals that of $1/b$ from $\mathrm{Gamma}(\frac12, 1)$: $e^{-m + v/2} - \tfrac12 (-m + \log v + 1 + \log 2)$.
    """
    return log_normal_kl_gamma(-mean, variance)
