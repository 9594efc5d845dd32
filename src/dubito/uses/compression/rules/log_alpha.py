"""Rank weights by the dropout rate of sparse variational dropout."""

from __future__ import annotations

import torch

from dubito.core.params import Params
from dubito.core.settings import setting
from dubito.uses.compression.rules.base import Rule, Threshold, WeightStatistics


@setting
class LogAlpha(Rule):
    r"""Remove where $\log\alpha = \log(\sigma^2/\mu^2)$ reaches the threshold: a dropout rate above 0.95 for 3.

    The rule of sparse variational dropout (Molchanov et al. 2017, https://arxiv.org/abs/1701.05369).

    >>> statistics = WeightStatistics({"w": torch.tensor([0.1, 1.0])}, {"w": torch.tensor([1.0, 1.0])}, {})
    >>> LogAlpha(3).keep(LogAlpha(3).relevance(statistics))["w"].tolist()  # log α is 4.6 and 0
    [False, True]
    """

    setting_name = "rules.LogAlpha"
    threshold: Threshold | None = None
    removes = "above"
    default_threshold = 3.0

    def scores(self, statistics: WeightStatistics, *, generator: torch.Generator | None = None) -> Params:
        r"""Return $\log\alpha$; +∞ for a mean of zero."""
        return statistics.map(
            lambda mean, variance: variance.log() - mean.square().log(), statistics.mean, statistics.variance
        )
