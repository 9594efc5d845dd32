"""Rank weights by the posterior's density at zero."""

from __future__ import annotations

import math

import torch

from dubito.core.params import Params
from dubito.core.settings import setting
from dubito.uses.compression.rules.base import Rule, Threshold, WeightStatistics


@setting
class ZeroDensity(Rule):
    r"""Remove where the log-density of the posterior at zero, $\log q(0)$, reaches the threshold (Graves 2011).

    It is a density: unlike the signal to noise it depends on the unit of the weights.
    """

    setting_name = "rules.ZeroDensity"
    removes = "above"
    threshold: Threshold | None = None

    def scores(self, statistics: WeightStatistics, *, generator: torch.Generator | None = None) -> Params:
        r"""Return $-\tfrac12 \log 2\pi\sigma^2 - \mu^2 / 2\sigma^2$."""
        at_mean = statistics.map(lambda variance: -0.5 * (2 * math.pi * variance).log(), statistics.variance)
        return statistics.map(
            lambda top, m, v: top - m.square() / (2 * v), at_mean, statistics.mean, statistics.variance
        )
