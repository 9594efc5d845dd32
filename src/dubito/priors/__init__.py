"""Priors: what is believed about the weights before the data.

- ``Normal(0, 1)``; ``Normal("model", 0.1)`` around the trained weights; ``Normal(scale="learn")`` by empirical Bayes
- ``Laplace``, ``StudentT``, ``Cauchy``: heavier tails; ``ScaleMixture((1, 0.0025))``: spike and slab
- ``Mixture(16)``: components that are learned with the weights: soft weight sharing
- ``LogUniform()``, ``ARD()``: let the data decide which weights there are
- ``NormalJeffreys()``, ``Horseshoe(1e-5)``, ``TruncatedLogUniform()``: the same of groups of weights, hence of units
- ``LogNormal``, ``HalfCauchy``: for scales, positive only
- ``ByName({"head.*": ...})``: another prior for each parameter
"""

from dubito.priors.base import Prior
from dubito.priors.by_name import ByName
from dubito.priors.cauchy import Cauchy, HalfCauchy
from dubito.priors.group import GroupPrior
from dubito.priors.horseshoe import Horseshoe
from dubito.priors.laplace import Laplace
from dubito.priors.log_normal import LogNormal
from dubito.priors.log_uniform import ARD, LogUniform
from dubito.priors.mixture import Mixture
from dubito.priors.normal import Normal
from dubito.priors.normal_jeffreys import NormalJeffreys
from dubito.priors.scale_mixture import ScaleMixture
from dubito.priors.student_t import StudentT
from dubito.priors.truncated_log_uniform import TruncatedLogUniform

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
