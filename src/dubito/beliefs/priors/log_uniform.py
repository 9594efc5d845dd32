r"""Priors that let data decide which weights there are: automatic relevance determination and the log-uniform prior.

Both depend on a weight only through $\alpha = \sigma^2 / \mu^2$, the variance of its noise as a factor: a weight with a
large α carries no signal and can go.
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

    No closed form of the divergence is elementary; three constants approximate it within 0.009 nats (Molchanov et al.
    2017, https://arxiv.org/abs/1701.05369), up to the constant that makes it 0 for α → ∞:

    $$\mathrm{KL} \approx \tfrac12 \log(1 + \alpha^{-1}) + k_1\, \mathrm{sigmoid}(-k_2 - k_3 \log \alpha) .$$

    Evidence is defined only up to that constant; `ARD` is the proper relative with an exact divergence.
    """

    setting_name = "priors.LogUniform"
    proper = False

    def log_prob(self, w: Tensor) -> Tensor:
        """Return −log |w|: the density up to its constant."""
        return -w.abs().log()

    def kl(self, q_mean: Tensor, q_scale: Tensor) -> Tensor:
        """Return the divergence of each weight by the three constants."""
        ratio = (q_mean / q_scale).square()
        # not 0, of which the logarithm has no gradient; the sigmoid is 0 there long before
        log_ratio = ratio.clamp_min(torch.finfo(ratio.dtype).tiny).log()
        return 0.5 * torch.log1p(ratio) + K1 * torch.sigmoid(K3 * log_ratio - K2)

    def mean(self) -> float:
        """There is none."""
        raise UnsupportedError("A log-uniform prior is improper and has no mean; priors.ARD() has one.")

    def variance(self) -> float:
        """There is none."""
        raise UnsupportedError("A log-uniform prior is improper and has no variance; priors.ARD() has one.")


@setting
class ARD(Prior):
    r"""A zero-mean normal prior for every weight whose variance is learned: $s^2 = \mu^2 + \sigma^2$ in closed form.

    That leaves the exact divergence $\tfrac12 \log(1 + \alpha^{-1}) = \tfrac12\,\mathrm{softplus}(-\log \alpha)$
    (Kharitonov et al. 2018, https://arxiv.org/abs/1811.00596).

    >>> round(ARD().kl(torch.tensor(1.0), torch.tensor(1.0)).item(), 4)  # log(2) / 2
    0.3466
    """

    setting_name = "priors.ARD"

    def log_prob(self, w: Tensor) -> Tensor:
        """There is none before the variances are fitted to a posterior."""
        raise UnsupportedError("ARD learns a variance for each weight: its density needs `fitted(mean, scale)` first.")

    def kl(self, q_mean: Tensor, q_scale: Tensor) -> Tensor:
        """Return the exact divergence of each weight."""
        return 0.5 * torch.log1p((q_mean / q_scale).square())

    def fitted(self, mean: Tensor, scale: Tensor) -> Normal:
        """Return the normal prior with the learned variances."""
        return unchecked(Normal(), scale=(mean.square() + scale.square()).sqrt())

    def mean(self) -> float:
        """Return 0."""
        return 0.0

    def variance(self) -> float:
        """There is none before the variances are fitted to a posterior."""
        raise UnsupportedError("ARD learns a variance for each weight: fit it to a posterior first.")
