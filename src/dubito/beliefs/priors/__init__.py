"""Priors: distributions of the weights before the data.

- ``Normal(0, 1)``; ``Normal("model", 0.1)`` around the trained weights; ``Normal(scale="learn")`` by empirical Bayes
- ``Laplace``, ``StudentT``, ``Cauchy``: heavier tails; ``ScaleMixture((1, 0.0025))``: spike and slab
- ``Mixture(16)``: a mixture that is learned with the weights, for soft weight sharing
- ``LogUniform()``, ``ARD()``: sparsity of single weights
- ``NormalJeffreys()``, ``Horseshoe(1e-5)``, ``TruncatedLogUniform()``: sparsity of groups of weights, that is, of units
- ``LogNormal``, ``HalfCauchy``: for positive scales
- ``ByName({"head.*": ...})``: a prior for each parameter
- ``FunctionSpace(kernels.RBF())``: a prior of the network's outputs instead of its weights, for `MAP` and `Laplace`
"""

from dubito.beliefs.priors.base import Prior
from dubito.beliefs.priors.by_name import ByName
from dubito.beliefs.priors.cauchy import Cauchy, HalfCauchy
from dubito.beliefs.priors.function_space import FunctionSpace
from dubito.beliefs.priors.group import GroupPrior, Horseshoe, NormalJeffreys
from dubito.beliefs.priors.laplace import Laplace
from dubito.beliefs.priors.log_normal import LogNormal
from dubito.beliefs.priors.log_uniform import ARD, LogUniform
from dubito.beliefs.priors.mixture import Mixture
from dubito.beliefs.priors.normal import Normal
from dubito.beliefs.priors.scale_mixture import ScaleMixture
from dubito.beliefs.priors.student_t import StudentT
from dubito.beliefs.priors.truncated_log_uniform import TruncatedLogUniform

__all__ = [
    "ARD",
    "ByName",
    "Cauchy",
    "FunctionSpace",
    "GroupPrior",
    "HalfCauchy",
    "Horseshoe",
    "Laplace",
    "LogNormal",
    "LogUniform",
    "Mixture",
    "Normal",
    "NormalJeffreys",
    "Prior",
    "ScaleMixture",
    "StudentT",
    "TruncatedLogUniform",
]
