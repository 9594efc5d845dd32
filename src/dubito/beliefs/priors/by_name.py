"""A prior that differs by parameter name."""

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
        priors: A dict from shell patterns of parameter names to priors; the first pattern that matches is used.
    """

    setting_name = "priors.ByName"
    refers_to_model = True  # to the names of its parameters
    priors: Mapping[str, Prior]

    def __post_init__(self) -> None:
        if not self.priors:
            raise InputError("`priors` must be a dict from names or patterns to priors, got an empty one.")
        for prior in self.priors.values():
            require_real(prior)

    def resolve(self, name: str, weights: Tensor) -> Prior:
        """Return the prior of the named parameter."""
        for pattern, prior in self.priors.items():
            if fnmatch.fnmatchcase(name, pattern):
                return prior.resolve(name, weights)
        raise InputError(f"No pattern of priors.ByName matches '{name}': add \"*\" for all other parameters.")

    def log_prob(self, w: Tensor) -> Tensor:
        """Raise an error, because the density depends on the parameter."""
        raise InputError("priors.ByName has a density for each parameter: call `resolve` with a name first.")
