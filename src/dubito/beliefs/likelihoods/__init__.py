"""Likelihoods: distributions of the targets given the network's outputs.

Of classes: `Categorical`, `Bernoulli`, `Ordinal` and `BradleyTerry` (preferences). Of numbers: `Gaussian`,
`HeteroscedasticGaussian`, `MultivariateGaussian`, `StudentT`, `Quantile`, `MixtureDensity`, of counts `Poisson` and
`NegativeBinomial`, of shares `Dirichlet`. All share one contract, `Likelihood`: log-probability, its derivatives with
respect to the outputs (with a square root of the Hessian for curvature), and predictions.
"""

from __future__ import annotations

from dubito.beliefs.likelihoods.base import Likelihood
from dubito.beliefs.likelihoods.bernoulli import Bernoulli
from dubito.beliefs.likelihoods.categorical import Categorical
from dubito.beliefs.likelihoods.counts import NegativeBinomial, Poisson
from dubito.beliefs.likelihoods.dirichlet import Dirichlet
from dubito.beliefs.likelihoods.gaussian import Gaussian
from dubito.beliefs.likelihoods.heteroscedastic import HeteroscedasticGaussian
from dubito.beliefs.likelihoods.mixture_density import MixtureDensity
from dubito.beliefs.likelihoods.multivariate import MultivariateGaussian
from dubito.beliefs.likelihoods.ordinal import Ordinal
from dubito.beliefs.likelihoods.preferences import BradleyTerry
from dubito.beliefs.likelihoods.quantile import Quantile
from dubito.beliefs.likelihoods.student_t import StudentT
from dubito.core.arguments import checked_arguments
from dubito.core.errors import InputError

__all__ = [
    "Bernoulli",
    "BradleyTerry",
    "Categorical",
    "Dirichlet",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "MixtureDensity",
    "MultivariateGaussian",
    "NegativeBinomial",
    "Ordinal",
    "Poisson",
    "Quantile",
    "StudentT",
    "resolve",
]

NAMES: dict[str, type[Likelihood]] = {
    "categorical": Categorical,
    "bernoulli": Bernoulli,
    "gaussian": Gaussian,
    "heteroscedastic": HeteroscedasticGaussian,
    "student-t": StudentT,
    "quantile": Quantile,
    "poisson": Poisson,
    "negative-binomial": NegativeBinomial,
    "ordinal": Ordinal,
    "bradley-terry": BradleyTerry,
    "mixture-density": MixtureDensity,
    "dirichlet": Dirichlet,
}


@checked_arguments
def resolve(likelihood: str | Likelihood) -> Likelihood:
    """Return the likelihood of this name with its default settings; a `Likelihood` is returned as it is.

    >>> resolve("gaussian")
    likelihoods.Gaussian()
    """
    if isinstance(likelihood, Likelihood):
        return likelihood
    if not isinstance(likelihood, str) or likelihood.lower() not in NAMES:
        raise InputError(f"There is no likelihood {likelihood!r}: use one of {', '.join(NAMES)}.")
    return NAMES[likelihood.lower()]()
