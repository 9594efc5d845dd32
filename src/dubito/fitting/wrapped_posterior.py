"""A posterior inside of another one that changes its predictions, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.core.constraints import Count
from dubito.core.params import Params
from dubito.fitting.functions import Functions
from dubito.fitting.history import History
from dubito.fitting.posterior import Posterior


class WrappedPosterior(Posterior):
    """Base class of posteriors that change predictions; weights, prior and evidence are those of the posterior inside.

    A subclass defines `predictor`, `state` (with `inside_state`) and `from_state` (with `inside_of`).
    """

    def __init__(self, posterior: Posterior) -> None:
        super().__init__(posterior.model, posterior.likelihood, posterior.recipe, posterior.num_data)
        self.posterior = posterior
        self.draws_functions = posterior.draws_functions

    @property
    def default_samples(self) -> int:
        """The default of the posterior inside."""
        return self.posterior.default_samples

    def sample(self, num_samples: int, *, generator: torch.Generator | None = None) -> Params:
        """Draw weights of the posterior inside."""
        return self.posterior.sample(num_samples, generator=generator)

    def functions(self, num_functions: Count, *, generator: torch.Generator | None = None) -> Functions:
        """Draw functions of the posterior inside."""
        return self.posterior.functions(num_functions, generator=generator)

    def marginals(self) -> tuple[Params, Params]:
        """Return means and variances of the posterior inside."""
        return self.posterior.marginals()

    def prior(self) -> tuple[Params, Params]:
        """Return the prior of the posterior inside."""
        return self.posterior.prior()

    def log_evidence(self) -> Tensor:
        """Return the evidence of the posterior inside."""
        return self.posterior.log_evidence()

    def precision_diagonal(self) -> Params:
        """Return the precision of the posterior inside."""
        return self.posterior.precision_diagonal()

    def conditional_mean(self, keep: Mapping[str, Tensor]) -> Params:
        """Return the conditional mean of the posterior inside."""
        return self.posterior.conditional_mean(keep)

    def history(self) -> History | None:
        """Return that of the posterior inside."""
        return self.posterior.history()

    def inside_state(self) -> dict[str, Any]:
        """Return the family and the state of the posterior inside."""
        return {"family": self.posterior.family, "inside": self.posterior.state()}

    @staticmethod
    def inside_of(model: nn.Module, likelihood: Likelihood, recipe: Any, num_data: int, state: Any) -> Posterior:
        """Undo `inside_state`."""
        inside = Posterior._families[state["family"]]
        return inside.from_state(model, likelihood, recipe, num_data, state["inside"])
