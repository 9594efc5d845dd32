"""Rank weights by the second-order loss of removing them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dubito.core.params import Params
from dubito.core.settings import setting
from dubito.uses.compression.rules.base import Rule, Target, WeightStatistics


@setting
class PosteriorDamage(Rule):
    r"""Remove the weights that lower the log-posterior least, by its second-order expansion around the mode.

    - ``"opd"``: $P_{ii}\,\mu_i^2$ with the posterior's precision P (Dhahri et al. 2024, optimal posterior damage);
    - ``"obd"``: $\tfrac12 H_{ii}\,\mu_i^2$ with the curvature of the data alone, $P$ less the prior's precision
      (LeCun et al. 1990, optimal brain damage);
    - ``"obs"``: $\mu_i^2 / 2\,[P^{-1}]_{ii}$, the loss after the other weights have adapted (Hassibi & Stork 1993).

    Args:
        target: The fraction of weights to remove.
        kind: Which of the three.
        update: Move the weights that stay to their mean given that the others are zero: the update of ``"obs"`` for
            all removed weights at once. Only Laplace posteriors know it; independent weights do not move. If units are
            removed by ``"obs"``, any posterior will do: the layers that read them adapt, see
            `dubito.uses.compression.elimination`.
    """

    setting_name = "rules.PosteriorDamage"
    target: Target | None = None
    default_reduction = "sum"
    needs_precision = True
    kind: Literal["opd", "obd", "obs"] = "opd"
    update: bool = False

    @property
    def adapts(self) -> bool:
        """Whether the weights that stay are moved to their conditional mean: only with `update`."""
        return self.update

    @property
    def eliminates(self) -> bool:
        """Whether the layers that read removed units adapt: with `update` of ``"obs"``; a threshold needs damages."""
        return self.update and self.kind == "obs" and self.threshold is None

    def scores(self, statistics: WeightStatistics, *, generator: torch.Generator | None = None) -> Params:
        """Return the damage."""
        mean, precision, prior = statistics.mean, statistics.precision, statistics.prior
        if self.kind == "obs":
            return statistics.map(lambda m, variance: m.square() / (2 * variance), mean, statistics.variance)
        if self.kind == "opd":
            return statistics.map(lambda m, p: p * m.square(), mean, precision)
        if prior is None:
            return statistics.map(lambda m, p: 0.5 * p * m.square(), mean, precision)
        return statistics.map(_data_damage, mean, precision, prior[1])


def _data_damage(mean: Tensor, precision: Tensor, prior_variance: Tensor) -> Tensor:
    return 0.5 * (precision - 1 / prior_variance).clamp_min(0.0) * mean.square()
