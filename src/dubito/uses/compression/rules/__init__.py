r"""Pruning rules: settings that rank the weights of any posterior with marginals, one rule per file.

A rule gives every weight a score from its mean $\mu$, standard deviation $\sigma$ and prior. How much is removed is
given in one of three ways, for all weights at once or by layer:

- a threshold on the score (`LogAlpha(3)`, `SignalToNoise(1.0)`);
- a target, the fraction of weights to remove (`Magnitude(0.9)`);
- a budget, the accuracy that may be lost on held-out data (`SignalToNoise(max_drop=0.005)`).
"""

from __future__ import annotations

import warnings
from typing import Any

from dubito.uses.compression.rules.base import Masks, Rule, WeightStatistics, lowest_removed
from dubito.uses.compression.rules.group_relevance import GroupRelevance
from dubito.uses.compression.rules.log_alpha import LogAlpha
from dubito.uses.compression.rules.magnitude import Magnitude
from dubito.uses.compression.rules.model_reduction import ModelReduction
from dubito.uses.compression.rules.posterior_damage import PosteriorDamage
from dubito.uses.compression.rules.signal_to_noise import SignalToNoise
from dubito.uses.compression.rules.uniform_random import Random
from dubito.uses.compression.rules.zero_density import ZeroDensity

__all__ = [
    "GroupRelevance",
    "LogAlpha",
    "Magnitude",
    "Masks",
    "ModelReduction",
    "PosteriorDamage",
    "Random",
    "Rule",
    "SignalToNoise",
    "WeightStatistics",
    "ZeroDensity",
    "lowest_removed",
]


def __getattr__(name: str) -> Any:
    if name == "Belief":
        warnings.warn("rules.Belief is now rules.WeightStatistics.", DeprecationWarning, stacklevel=2)
        return WeightStatistics
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
