"""Priors: what is believed about the weights before the data.

- ``Normal(0, 1)``; ``Normal("model", 0.1)`` around the trained weights; ``Normal(scale="learn")`` by empirical Bayes
- ``Laplace``, ``StudentT``, ``Cauchy``: heavier tails; ``ScaleMixture((1, 0.0025))``: spike and slab
- ``LogUniform()``, ``ARD()``: let the data decide which weights there are
- ``LogNormal``, ``HalfCauchy``: for scales, positive only
- ``ByName({"head.*": ...})``: another prior for each parameter
"""

from dubito.priors.base import Prior
from dubito.priors.by_name import ByName
from dubito.priors.cauchy import Cauchy, HalfCauchy
from dubito.priors.laplace import Laplace
from dubito.priors.log_normal import LogNormal
from dubito.priors.log_uniform import ARD, LogUniform
from dubito.priors.normal import Normal
from dubito.priors.scale_mixture import ScaleMixture
from dubito.priors.student_t import StudentT

__all__ = [
    "ARD",
    "ByName",
    "Cauchy",
    "HalfCauchy",
    "Laplace",
    "LogNormal",
    "LogUniform",
    "Normal",
    "Prior",
    "ScaleMixture",
    "StudentT",
]
