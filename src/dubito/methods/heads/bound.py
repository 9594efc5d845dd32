"""The expected log-likelihood under independent Gaussian outputs, in closed form or as a lower bound."""

from __future__ import annotations

from torch import Tensor

from dubito.beliefs.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from dubito.beliefs.likelihoods.base import Hyper
from dubito.core.errors import UnsupportedError


def check_likelihood(likelihood: Likelihood) -> None:
    """Raise an error for a likelihood without a closed form."""
    if not isinstance(likelihood, Gaussian | Categorical | Bernoulli):
        raise UnsupportedError(
            f"VBLL and DKL are trained by a closed form, which {likelihood!r} does not have: use SNGP(), or "
            "Variational(weights=select.last_layer())."
        )


def expected_log_prob(
    likelihood: Likelihood, mean: Tensor, variance: Tensor, targets: Tensor, hyper: Hyper = None
) -> Tensor:
    r"""Return $\mathbb E \log p(y \mid f)$ for $f \sim \mathcal N(m, \mathrm{diag}\, v)$ ``[B]``, or a lower bound.

    Exact for a Gaussian likelihood, $\log p(y \mid m) - v / 2\sigma^2$. For classes, by Jensen's inequality,

    $$m_y - \log \sum_c e^{m_c + v_c/2} \qquad \text{and} \qquad -\log\big(1 + e^{-s m + v/2}\big), \; s = \pm 1.$$

    Args:
        likelihood: One that `check_likelihood` accepts.
        mean: The mean of the outputs, in the model's layout.
        variance: Their variance, in the same layout.
        targets: The targets.
        hyper: The hyper-parameters of the likelihood.
    """
    if isinstance(likelihood, Bernoulli):
        signs = 2 * targets.reshape(mean.shape).to(mean.dtype) - 1
        return likelihood.log_prob(mean - signs * variance / 2, targets, hyper)
    if isinstance(likelihood, Categorical):
        kept, labels = likelihood.observed(targets), likelihood.aligned(targets).long()
        own = likelihood.canonical(variance).gather(-1, labels.where(kept, 0).unsqueeze(-1)).squeeze(-1)
        own = own.where(kept, 0.0).reshape(len(own), -1).sum(1)
        return likelihood.log_prob(mean + variance / 2, targets, hyper) - own / 2
    curvature = likelihood.hessian(mean, targets, hyper).diagonal(dim1=-2, dim2=-1)
    return likelihood.log_prob(mean, targets, hyper) - 0.5 * (curvature * likelihood.canonical(variance)).sum(-1)
