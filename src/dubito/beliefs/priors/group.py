"""Priors over groups of weights that share one scale: `GroupPrior`, the horseshoe and the normal-Jeffreys prior."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Literal

import torch
from torch import Tensor

from dubito.beliefs.priors.base import Prior
from dubito.beliefs.priors.log_uniform import LogUniform
from dubito.core.constraints import Positive
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.settings import setting


@setting
class GroupPrior(Prior):
    r"""A prior of $w_{gi} = z_g\, \tilde w_{gi}$ with a scale $z_g$ for each group of weights.

    The weights of one input (or output) of a layer are removed together, so that whole neurons, channels or words can
    be removed from the network. A prior of this kind is a prior of the scales z; `Variational` learns a posterior over
    both z and $\tilde w$.

    Args:
        groups: ``"inputs"``: one scale per input of a layer; ``"outputs"``: one per output; ``"auto"``: inputs of
            linear layers, output channels of convolutions, words of embeddings, and inputs, hidden units and gates of
            recurrent layers.
    """

    groups: Literal["auto", "inputs", "outputs"] = field(default="auto", kw_only=True)

    @property
    def random_weights(self) -> bool:
        r"""Whether $\tilde w$ is random, with a standard normal prior; otherwise it is a point without a prior."""
        return True

    def resolve(self, name: str, weights: Tensor) -> Prior:
        """Raise an error, because it cannot be the prior of a single parameter."""
        raise InputError(
            f"{self!r} is a prior of groups and applies to all selected weights: use it as Variational(prior=...), "
            "without any other prior."
        )

    def log_prob(self, w: Tensor) -> Tensor:
        """Raise an error, because a single weight has no density."""
        raise UnsupportedError(f"{self!r} is a joint prior of the weights of a group: a single weight has no density.")


@setting
class Horseshoe(GroupPrior):
    r"""Half-Cauchy scales of groups of weights, multiplied by a half-Cauchy scale of the whole layer.

    $$w_{gi} = s\, t_g\, \tilde w_{gi}, \qquad s \sim \mathrm C^+(0, \tau), \quad t_g \sim \mathrm C^+(0, 1), \quad
      \tilde w_{gi} \sim \mathcal N(0, 1)$$

    (Carvalho et al. 2010; Louizos et al. 2017, https://arxiv.org/abs/1705.08665). A half-Cauchy variable is the root
    of a product, $s^2 = a b$ with $a \sim \mathrm{Gamma}(\frac12, \text{scale } \tau^2)$ and $b \sim
    \mathrm{InvGamma}(\frac12, 1)$, and with log-normal posteriors of both factors each KL divergence has a closed form.

    Args:
        scale: The scale τ of the layer; the smaller it is, the fewer groups remain.
        groups: Which weights share a scale; see `GroupPrior`.
    """

    setting_name = "priors.Horseshoe"
    scale: Positive = 1e-5


def log_normal_kl_gamma(mean: Tensor, variance: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    r"""Return the KL divergence of $\log a \sim \mathcal N(m, v)$ from $\mathrm{Gamma}(\frac12, \text{scale } \tau^2)$.

    $$\mathrm{KL} = \log \tau + \frac{e^{m + v/2}}{\tau^2} - \tfrac12 (m + \log v + 1 + \log 2)$$

    >>> one = torch.ones((), dtype=torch.float64)
    >>> shifted = log_normal_kl_gamma(one + math.log(4), one, 2.0)  # log a and log τ² moved by the same
    >>> torch.testing.assert_close(log_normal_kl_gamma(one, one, 1.0), shifted)
    """
    log_scale = torch.as_tensor(scale, dtype=mean.dtype, device=mean.device).log()
    return log_scale + (mean + variance / 2 - 2 * log_scale).exp() - 0.5 * (mean + variance.log() + 1 + math.log(2))


def log_normal_kl_inverse_gamma(mean: Tensor, variance: Tensor) -> Tensor:
    r"""Return the KL divergence of $\log b \sim \mathcal N(m, v)$ from $\mathrm{InvGamma}(\frac12, 1)$.

    It equals that of $1/b$ from $\mathrm{Gamma}(\frac12, 1)$: $e^{-m + v/2} - \tfrac12 (-m + \log v + 1 + \log 2)$.
    """
    return log_normal_kl_gamma(-mean, variance)


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
