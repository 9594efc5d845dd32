"""Likelihoods: distributions of the targets given the network's outputs.

`Categorical`, `Bernoulli`, `Gaussian` and `HeteroscedasticGaussian` share one contract, `Likelihood`: log-probability,
its derivatives with respect to the outputs (with a square root of the Hessian for curvature), and predictions.
"""

from __future__ import annotations

from dubito.beliefs.likelihoods.base import Likelihood
from dubito.beliefs.likelihoods.bernoulli import Bernoulli
from dubito.beliefs.likelihoods.categorical import Categorical
from dubito.beliefs.likelihoods.gaussian import Gaussian
from dubito.beliefs.likelihoods.heteroscedastic import HeteroscedasticGaussian
from dubito.core.arguments import checked_arguments
from dubito.core.errors import InputError

__all__ = ["Bernoulli", "Categorical", "Gaussian", "HeteroscedasticGaussian", "Likelihood", "resolve"]

_BY_NAME: dict[str, type[Likelihood]] = {
    "categorical": Categorical,
    "bernoulli": Bernoulli,
    "gaussian": Gaussian,
    "heteroscedastic": HeteroscedasticGaussian,
}


@checked_arguments
def resolve(likelihood: str | Likelihood) -> Likelihood:
    """Return the likelihood of this name with its default settings; a `Likelihood` is returned as it is.

    >>> resolve("gaussian")
    likelihoods.Gaussian()
    """
    if isinstance(likelihood, Likelihood):
        return likelihood
    if not isinstance(likelihood, str) or likelihood.lower() not in _BY_NAME:
        raise InputError(f"There is no likelihood {likelihood!r}: use one of {', '.join(_BY_NAME)}.")
    return _BY_NAME[likelihood.lower()]()
