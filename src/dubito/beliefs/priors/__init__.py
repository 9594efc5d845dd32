"""Priors: what is believed about the weights before the data.

- ``Normal(0, 1)``; ``Normal("model", 0.1)`` around the trained weights; ``Normal(scale="learn")`` by empirical Bayes
- ``Laplace``, ``StudentT``, ``Cauchy``: heavier tails; ``ScaleMixture((1, 0.0025))``: spike and slab
- ``Mixture(16)``: components that are learned with the weights: soft weight sharing
- ``LogUniform()``, ``ARD()``: let the data decide which weights there are
- ``NormalJeffreys()``, ``Horseshoe(1e-5)``, ``TruncatedLogUniform()``: the same of groups of weights, hence of units
- ``LogNormal``, ``HalfCauchy``: for scales, positive only
- ``ByName({"head.*": ...})``: another prior for each parameter
"""

from dubito.beliefs.priors.base import Prior
from dubito.beliefs.priors.by_name import ByName
from dubito.beliefs.priors.cauchy import Cauchy, HalfCauchy
from dubito.beliefs.priors.group import GroupPrior
from dubito.beliefs.priors.horseshoe import Horseshoe
from dubito.beliefs.priors.laplace import Laplace
from dubito.beliefs.priors.log_normal import LogNormal
from dubito.beliefs.priors.log_uniform import ARD, LogUniform
from dubito.beliefs.priors.mixture import Mixture
from dubito.beliefs.priors.normal import Normal
from dubito.beliefs.priors.normal_jeffreys import NormalJeffreys
from dubito.beliefs.priors.scale_mixture import ScaleMixture
from dubito.beliefs.priors.student_t import StudentT
from dubito.beliefs.priors.truncated_log_uniform import TruncatedLogUniform

__all__ = [
    "ARD",
    "ByName",
    "Cauchy",
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
