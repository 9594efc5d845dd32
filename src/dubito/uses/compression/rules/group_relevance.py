"""Rank weights by the relevance of their group."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from dubito.core.errors import UnsupportedError
from dubito.core.params import Params
from dubito.core.settings import setting
from dubito.uses.compression.rules.base import Masks, Rule, Threshold, WeightStatistics


@setting
class GroupRelevance(Rule):
    r"""Remove the groups that a prior of groups has switched off: whole neurons, channels, words or gates.

    The score of a weight is that of its group, the least one where it is in several: how far the group's relevance lies
    above the level at which it is noise (group normal-Jeffreys and horseshoe: Louizos et al. 2017,
    https://arxiv.org/abs/1705.08665; gates: a signal to noise of 1, Neklyudov et al. 2017,
    https://arxiv.org/abs/1705.07283).

    Args:
        threshold: By how much a relevance must lie above that level; by evidence, the nats that a removal may cost.
        by: ``"relevance"``, or ``"evidence"`` for gates: remove where the evidence does not fall (Wright et al. 2024).
    """

    setting_name = "rules.GroupRelevance"
    threshold: Threshold | None = None
    by: Literal["relevance", "evidence"] = "relevance"
    needs_variance = False
    default_threshold = 0.0

    def scores(self, statistics: WeightStatistics, *, generator: torch.Generator | None = None) -> Params:
        """Return the score of each weight's group; +∞ where a weight is in none."""
        if not statistics.groups:
            raise UnsupportedError(
                "GroupRelevance needs a prior of groups: fit Variational(prior=priors.NormalJeffreys()), Horseshoe() "
                "or TruncatedLogUniform()."
            )
        found = statistics.map(lambda mean: torch.full_like(mean, math.inf), statistics.mean)
        for kind in statistics.groups:
            score = self._of(kind).double()
            for member in (one for one in kind.members if one.parameter in found):
                whole = found[member.parameter]
                shape = [-1 if axis == member.axis else 1 for axis in range(whole.ndim)]
                found[member.parameter] = torch.minimum(whole, score.reshape(shape).to(whole.device))
        return found

    def keep(self, relevance: Params) -> Masks:
        """Return masks as `Rule.keep`; a group that a target would split is kept whole."""
        masks = super().keep(relevance)
        return {n: relevance[n] >= relevance[n][m].min() if bool(m.any()) else m for n, m in masks.items()}

    def _stays(self, relevance: Tensor, threshold: float) -> Tensor:
        return relevance > threshold if self.by == "evidence" else super()._stays(relevance, threshold)

    def _of(self, kind: Any) -> Tensor:
        if self.by == "relevance":
            return kind.relevance - kind.threshold
        if kind.evidence_gain is None:
            raise UnsupportedError("The evidence is known only for gates: fit with priors.TruncatedLogUniform().")
        return -kind.evidence_gain
