"""The normal-Jeffreys prior over groups of weights."""

from __future__ import annotations

from torch import Tensor

from dubito.beliefs.priors.group import GroupPrior
from dubito.beliefs.priors.log_uniform import LogUniform
from dubito.core.settings import setting


@setting
class NormalJeffreys(GroupPrior):
    r"""A Jeffreys prior of the scale of each group (Louizos et al. 2017, https://arxiv.org/abs/1705.08665).

    $$w_{gi} = z_g \tilde w_{gi}, \qquad p(z_g) \propto \frac{1}{|z_g|}, \qquad \tilde w_{gi} \sim \mathcal N(0, 1) .$$

    The posterior is $q(z_g) = \mathcal N(m_g, m_g^2 \alpha_g)$ and $q(\tilde w) = \mathcal N(\mu, \sigma^2)$. The KL
    divergence of z is that of `LogUniform`, a function of $\alpha_g$ alone; a group with a large $\alpha_g$ carries no
    signal. `LogUniform`, in contrast, is a prior of single weights.

    Args:
        groups: Which weights share a scale; see `GroupPrior`.
    """

    setting_name = "priors.NormalJeffreys"
    proper = False

    def scale_kl(self, mean: Tensor, scale: Tensor) -> Tensor:
        """Return the KL divergence of each $q(z_g)$, given its mean and standard deviation, up to a constant."""
        return LogUniform().kl(mean, scale)
