"""Rank weights by the evidence gained without them."""

from __future__ import annotations

import torch
from torch import Tensor

from dubito.core.errors import UnsupportedError
from dubito.core.params import Params
from dubito.core.settings import setting
from dubito.uses.compression.rules.base import Rule, Threshold, WeightStatistics


@setting
class ModelReduction(Rule):
    r"""Remove weights whose removal does not lower the evidence; there is no threshold to choose.

    With the posterior $\mathcal N(\mu, \sigma^2)$ under the prior $\mathcal N(\mu_p, \sigma_p^2)$, the network without
    the weight has the log evidence of the network with it plus

    $$\Delta F = \log \frac{q(0)}{p(0)}
      = \tfrac12 \ln \frac{\sigma_p^2}{\sigma^2} - \frac{\mu^2}{2\sigma^2} + \frac{\mu_p^2}{2\sigma_p^2}$$

    (the Savage-Dickey ratio; Beckers et al. 2024, "Principled pruning of Bayesian neural networks"). It goes where
    $\Delta F \ge 0$, also where the data has no curvature for it, $\sigma^2 \ge \sigma_p^2$: a value left over from the
    start of training is no evidence. For the weights of a unit the changes add up. What stays moves to its mean given
    that the rest is zero, the posterior of the smaller model; independent weights do not.
    """

    setting_name = "rules.ModelReduction"
    adapts = True
    threshold: Threshold | None = None
    removes = "above"
    default_threshold = 0.0
    default_reduction = "sum"

    def scores(self, statistics: WeightStatistics, *, generator: torch.Generator | None = None) -> Params:
        r"""Return $\Delta F$ in nats."""
        if statistics.prior is None:
            raise UnsupportedError(
                f"ModelReduction compares the posterior with a proper prior. {statistics.no_prior} "
                "Use rules.LogAlpha(3) or rules.SignalToNoise(1.0) here."
            )
        return statistics.map(_evidence_gain, statistics.mean, statistics.variance, *statistics.prior)


def _evidence_gain(mean: Tensor, variance: Tensor, prior_mean: Tensor, prior_variance: Tensor) -> Tensor:
    gain = 0.5 * (prior_variance / variance).log() - mean.square() / (2 * variance)
    gain = gain + prior_mean.square() / (2 * prior_variance)
    # float32 posteriors reach the prior's variance only up to rounding
    told_nothing = (variance >= prior_variance * (1 - 1e-6)) & (prior_mean == 0)
    return torch.where(told_nothing, gain.clamp_min(0.0), gain)
