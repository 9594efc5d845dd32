"""Rank weights at random."""

from __future__ import annotations

from typing import Any

import torch

from dubito.core.params import Params
from dubito.core.randomness import default_generator
from dubito.core.settings import setting
from dubito.uses.compression.rules.base import Rule, Target, WeightStatistics


@setting
class Random(Rule):
    """Remove weights at random."""

    setting_name = "rules.Random"
    target: Target | None = None
    needs_variance = False

    def scores(self, statistics: WeightStatistics, *, generator: torch.Generator | None = None) -> Params:
        """Return uniform noise."""
        source = default_generator(generator)
        draw: dict[str, Any] = {"generator": source, "dtype": torch.float64, "device": source.device}
        return {name: torch.rand(mean.shape, **draw).to(mean.device) for name, mean in statistics.mean.items()}
