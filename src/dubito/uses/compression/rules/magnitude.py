"""Rank weights by their absolute value."""

from __future__ import annotations

import torch

from dubito.core.params import Params
from dubito.core.settings import setting
from dubito.uses.compression.rules.base import Rule, Target, WeightStatistics


@setting
class Magnitude(Rule):
    r"""Remove the smallest $|\mu|$: the baseline that every other rule must beat."""

    setting_name = "rules.Magnitude"
    target: Target | None = None
    needs_variance = False
    default_reduction = "norm"

    def scores(self, statistics: WeightStatistics, *, generator: torch.Generator | None = None) -> Params:
        r"""Return $|\mu|$."""
        return statistics.map(torch.abs, statistics.mean)
