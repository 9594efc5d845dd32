r"""Sparsity priors for single weights: automatic relevance determination and the log-uniform prior.

The KL divergence of both depends on a weight only through $\alpha = \sigma^2 / \mu^2$, the variance of its
multiplicative noise. A weight with a large α carries no signal and can be removed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dubito.beliefs.priors.base import Prior, unchecked
from dubito.beliefs.priors.normal import Normal
from dubito.core.errors import UnsupportedError
from dubito.core.settings import setting

# Molchanov et al. 2017, equation 14.
K1, K2, K3 = 0.63576, 1.87320, 1.48695


@setting
class LogUniform(Prior):
    r"""The improper prior $p(|w|) \propto 1 / |w|$, uniform in $\log |w|$: sparse variational dropout.

    The KL divergence has no elementary closed form. A formula with three constants approximates it within 0.009 nats
    (Molchanov et al. 2017, https://arxiv.org/abs/1701.05369), up to the constant that makes it 0 for α → ∞:

    $$\mathrm{KL} \approx \tfrac12 \log(1 + \alpha^{-1}) + k_1\, \mathrm{sigmoid}(-k_2 - k_3 \log \alpha) .$$

    The evidence is defined only up to that constant; `ARD` is a proper prior with an exact KL divergence.
    """

    setting_name = "priors.LogUniform"
    proper = False
    adapts = True
    heavy_tails = True

    def log_prob(self, w: Tensor) -> Tensor:
        """Return −log |w|, the log-density up to a constant."""
        return -w.abs().log()

    def kl(self, q_mean: Tensor, q_scale: Tensor) -> Tensor:
        """Return the approximate KL divergence of each weight."""
        ratio = (q_mean / q_scale).square()
        # not 0, where the logarithm has no gradient; the sigmoid vanishes there anyway
        log_ratio = ratio.clamp_min(torch.finfo(ratio.dtype).tiny).log()
        return 0.5 * torch.log1p(ratio) + K1 * torch.sigmoid(K3 * log_ratio - K2)

    def mean(self) -> float:
        """Raise an error, because the prior is improper."""
        raise UnsupportedError("A log-uniform prior is improper and has no mean; priors.ARD() has one.")

    def variance(self) -> float:
        """Raise an error, because the prior is improper."""
        raise UnsupportedError("A log-uniform prior is improper and has no variance; priors.Normal() has one.")


@setting
class ARD(Prior):
    r"""A zero-mean normal prior with a learned variance for every weight, $s^2 = \mu^2 + \sigma^2$ in closed form.

    At this variance the KL divergence is $\tfrac12 \log(1 + \alpha^{-1}) = \tfrac12\,\mathrm{softplus}(-\log \alpha)$
    (Kharitonov et al. 2018, https://arxiv.org/abs/1811.00596).

    >>> round(ARD().kl(torch.tensor(1.0), torch.tensor(1.0)).item(), 4)  # log(2) / 2
    0.3466
    """

    setting_name = "priors.ARD"
    adapts = True
    needs_normal = True

    def log_prob(self, w: Tensor) -> Tensor:
        """Raise an error, because the variances must be fitted to a posterior first."""
        raise UnsupportedError("ARD learns a variance for each weight: call `fitted(mean, scale)` before `log_prob`.")

    def kl(self, q_mean: Tensor, q_scale: Tensor) -> Tensor:
        """Return the exact KL divergence of each weight."""
        return 0.5 * torch.log1p((q_mean / q_scale).square())

    def fitted(self, mean: Tensor, scale: Tensor) -> Normal:
        """Return the normal prior with the learned variances."""
        return unchecked(Normal(), scale=(mean.square() + scale.square()).sqrt())

    def mean(self) -> float:
        """Return 0."""
        return 0.0

    def variance(self) -> float:
        """Raise an error, because the variances must be fitted to a posterior first."""
        raise UnsupportedError("ARD learns a variance for each weight: fit it to a posterior first.")
