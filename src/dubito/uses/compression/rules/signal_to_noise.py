"""Rank weights by the ratio of mean and standard deviation."""

from __future__ import annotations

import torch

from dubito.core.params import Params
from dubito.core.settings import setting
from dubito.uses.compression.rules.base import Rule, Threshold, WeightStatistics


@setting
class SignalToNoise(Rule):
    r"""Remove where $|\mu| / \sigma$ is below the threshold (Graves 2011; Blundell et al. 2015).

    The ratio is that of mean and *standard deviation*: it does not change with the unit in which weights are measured.

    >>> statistics = WeightStatistics({"w": torch.tensor([0.001, 1.0])}, {"w": torch.tensor([0.018, 0.1]) ** 2}, {})
    >>> rule = SignalToNoise(1.0)
    >>> rule.keep(rule.relevance(statistics))["w"].tolist()
    [False, True]
    """

    setting_name = "rules.SignalToNoise"
    threshold: Threshold | None = None
    default_threshold = 1.0

    def scores(self, statistics: WeightStatistics, *, generator: torch.Generator | None = None) -> Params:
        r"""Return $|\mu| / \sigma$."""
        return statistics.map(lambda mean, variance: mean.abs() / variance.sqrt(), statistics.mean, statistics.variance)
