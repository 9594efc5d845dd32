"""The expected log-likelihood under Gaussian outputs: in closed form, as a lower bound, by quadrature or by samples."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from dubito.beliefs.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    Likelihood,
    MultivariateGaussian,
)
from dubito.beliefs.likelihoods.base import Hyper
from dubito.core import distributed

# Nodes of the quadrature over one output, and pairs of samples of several.
NODES, PAIRS = 20, 8


def expected_log_prob(
    likelihood: Likelihood,
    mean: Tensor,
    variance: Tensor,
    targets: Tensor,
    hyper: Hyper = None,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Return $\mathbb E \log p(y \mid f)$ for $f \sim \mathcal N(m, \mathrm{diag}\, v)$ ``[B]``, or a lower bound.

    Exact for a Gaussian likelihood, $\log p(y \mid m) - \tfrac12 \sum_c H_{cc} v_c$. For classes, by Jensen's
    inequality,

    $$m_y - \log \sum_c e^{m_c + v_c/2} \qquad \text{and} \qquad -\log\big(1 + e^{-s m + v/2}\big), \; s = \pm 1.$$

    For others by Gauss-Hermite quadrature if a target depends on one output, and otherwise the mean over random outputs
    $m \pm \sqrt v \odot \varepsilon$, which has the expectation as its own.

    Args:
        likelihood: The likelihood.
        mean: The mean of the outputs, in the model's layout.
        variance: Their variance, in the same layout.
        targets: The targets.
        hyper: The hyper-parameters of the likelihood.
        generator: The source of randomness.
    """
    if isinstance(likelihood, Bernoulli):
        signs = 2 * targets.reshape(mean.shape).to(mean.dtype) - 1
        return likelihood.log_prob(mean - signs * variance / 2, targets, hyper)
    if isinstance(likelihood, Categorical):
        kept, labels = likelihood.observed(targets), likelihood.aligned(targets).long()
        own = likelihood.canonical(variance).gather(-1, labels.where(kept, 0).unsqueeze(-1)).squeeze(-1)
        own = own.where(kept, 0.0).reshape(len(own), -1).sum(1)
        return likelihood.log_prob(mean + variance / 2, targets, hyper) - own / 2
    if isinstance(likelihood, Gaussian | MultivariateGaussian):
        curvature = likelihood.hessian(mean, targets, hyper).diagonal(dim1=-2, dim2=-1)
        return likelihood.log_prob(mean, targets, hyper) - 0.5 * (curvature * likelihood.canonical(variance)).sum(-1)
    spread = variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
    found = torch.zeros_like(mean.reshape(len(mean), -1)[:, 0])
    for share, noise in _draws(likelihood, mean, generator):
        found = found + share * likelihood.log_prob(mean + spread * noise, targets, hyper)
    return found


def _draws(
    likelihood: Likelihood, mean: Tensor, generator: torch.Generator | None
) -> list[tuple[float, Tensor | float]]:
    """Return standard normal noise for the outputs, and the share of each in the mean."""
    if likelihood.num_outputs(mean) == 1:
        nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
        return list(zip((weights / math.sqrt(2 * math.pi)).tolist(), nodes.tolist(), strict=True))
    local = None if generator is None else distributed.local_generator(generator)
    device = mean.device if local is None else local.device
    noise = torch.randn((PAIRS, *mean.shape), generator=local, dtype=mean.dtype, device=device).to(mean.device)
    return [(0.5 / PAIRS, sign * each) for each in noise for sign in (1.0, -1.0)]


def expected_preference(mean: Tensor, roots: Tensor, targets: Tensor) -> Tensor:
    r"""Return a lower bound of $\mathbb E \log p(y \mid f)$ for scores ``[B, T]`` of T items by the same weights.

    By Jensen's inequality, $-\log \sum_i \exp\big(m_i - m_y + \tfrac12 \mathrm{Var}(f_i - f_y)\big)$: items that are
    nearly the same differ by little, however uncertain their scores are.

    Args:
        mean: The mean scores.
        roots: Roots R ``[B, T, P]`` of their covariances ``R Rᵀ``.
        targets: The preferred items ``[B]``.
    """
    own = targets.long().unsqueeze(-1)
    apart = roots - roots.gather(1, own.unsqueeze(-1).expand(-1, 1, roots.shape[2]))
    return -(mean - mean.gather(-1, own) + apart.square().sum(-1) / 2).logsumexp(-1)
