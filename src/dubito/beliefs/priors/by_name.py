"""Another prior for each parameter."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

from torch import Tensor

from dubito.beliefs.priors.base import Prior, require_real
from dubito.core.errors import InputError
from dubito.core.settings import setting


@setting
class ByName(Prior):
    """Priors by parameter name, as in ``ByName({"head.*": Normal(0, 1), "*": Normal("model", 0.1)})``.

    Args:
        priors: From shell patterns over the dotted names to priors; the first that fits holds.
    """

    setting_name = "priors.ByName"
    priors: Mapping[str, Prior]

    def __post_init__(self) -> None:
        if not self.priors:
            raise InputError("`priors` must be a dict from names or patterns to priors, got an empty one.")
        for prior in self.priors.values():
            require_real(prior)

    def resolve(self, name: str, weights: Tensor) -> Prior:
        """Return the prior of this name."""
        for pattern, prior in self.priors.items():
            if fnmatch.fnmatchcase(name, pattern):
                return prior.resolve(name, weights)
        raise InputError(f"No pattern of priors.ByName fits '{name}': add \"*\" for all the rest.")

    def log_prob(self, w: Tensor) -> Tensor:
        """There is none before it is known which parameter is meant."""
        raise InputError("priors.ByName has a density for each name: resolve it with the name of a parameter first.")
