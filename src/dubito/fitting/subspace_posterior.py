"""Run any recipe on the coordinates of a subspace, and return a posterior over the network's weights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.core import params
from dubito.core.batches import Data
from dubito.core.errors import InputError
from dubito.core.params import Params
from dubito.core.settings import Setting
from dubito.fitting.functions import Functions
from dubito.fitting.history import History
from dubito.fitting.inference import Inference, Problem, State
from dubito.fitting.posterior import Posterior, Predictor
from dubito.fitting.recipe import Recipe
from dubito.fitting.traceable import Traceable
from dubito.networks.selection import Selection
from dubito.networks.subspace import Subspace, SubspaceNetwork
from dubito.networks.twin import copied


def build_on_subspace(
    recipe: Recipe, problem: Problem, subspace: Subspace, inner_recipe: Recipe | None = None
) -> Inference:
    """Return the inference of a recipe on the coordinates, whose posterior is over the network's own weights.

    Args:
        recipe: The recipe that the posterior names.
        problem: Model, data and likelihood.
        subspace: The subspace.
        inner_recipe: The recipe that is run on the coordinates, if it is another one.
    """
    if recipe.redraws:
        raise InputError("A subspace is centred on the trained weights: use start='model'.")
    network = SubspaceNetwork(problem.model, subspace)
    on_coordinates = dataclasses.replace(problem, model=network, selection=Selection.all_of(network))
    inner = (inner_recipe or recipe).on_subspace().build(on_coordinates)

    def init(initial: Params, buffers: Params, generator: torch.Generator) -> State:
        return inner.init(params.of(network), params.buffers_of(network), generator)  # not those of `problem.model`

    def posterior(state: State) -> SubspacePosterior:
        return lift_posterior(inner.posterior(state), recipe, problem.model, subspace)

    return inner._replace(init=init, posterior=posterior)


def lift_posterior(found: Posterior, recipe: Any, model: nn.Module, subspace: Subspace) -> SubspacePosterior:
    """Turn a posterior over coordinates into one over weights."""
    center = found.mean()["z"].reshape(-1)
    network = params.load_(copied(model), subspace.merge(params.of(model), center))
    return SubspacePosterior(network, found.likelihood, recipe, found.num_data, subspace, found)


class SubspacePosterior(Posterior):
    """A posterior over weights that is given by one over the coordinates of a subspace.

    Args:
        model: The network at the centre.
        likelihood, recipe, num_data: As for `Posterior`.
        selection: The subspace.
        inner: The posterior over the coordinates.
    """

    family = "Subspace"
    passes_options = True

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        recipe: Any,
        num_data: int,
        selection: Subspace,
        inner: Posterior,
    ) -> None:
        super().__init__(model, likelihood, recipe, num_data)
        self.selection, self.inner = selection, inner

    def sample(self, num_samples: int, *, generator: torch.Generator | None = None) -> Params:
        """Draw coordinates, and return the weights there."""
        drawn = self.inner.sample(num_samples, generator=generator)["z"]
        return self.selection.merge(self.mean(), drawn.reshape(num_samples, -1))

    def marginals(self) -> tuple[Params, Params]:
        r"""Return the weights at the centre and the diagonal of $P \Sigma P^\top$."""
        self.inner.marginals()  # raises an error if there are none
        return self.mean(), self._weight_variance(self.covariance())

    def prior(self) -> tuple[Params, Params]:
        """Return mean and variance of the weights under the prior of the coordinates."""
        mean, variance = self.inner.prior()
        center = self.selection.merge(self.mean(), mean["z"].reshape(-1))
        return center, self._weight_variance(torch.diag(variance["z"].flatten()))

    def covariance(self) -> Tensor:
        """Return the covariance of the coordinates, ``[r, r]`` in float64."""
        inner: Any = self.inner
        if hasattr(inner, "flat"):  # particles
            return torch.cov(inner.flat[:, : self.selection.num_weights].double().mT, correction=0).reshape(
                self.selection.num_weights, -1
            )
        if hasattr(inner, "covariance"):
            return inner.covariance.solve(
                torch.eye(self.selection.num_weights, dtype=torch.float64, device=self.device)
            )
        return torch.diag(inner.marginals()[1]["z"].flatten().double())

    def _weight_variance(self, covariance: Tensor) -> Params:
        basis = self.selection.basis.to(covariance)
        variance = ((basis @ covariance) * basis).sum(1).clamp_min(0.0).to(self.device, self.dtype)
        return self.selection.weights.merge(params.zeros_like(self.mean()), variance)

    def predictor(self, num_samples: int, generator: torch.Generator, **options: Any) -> Predictor:
        """Return the predictive of the posterior over the coordinates."""
        return self.inner.predictor(num_samples, generator, **options)

    def forms(self, example: Any, num_samples: int, generator: torch.Generator, **options: Any) -> Iterator[Traceable]:
        """Yield the forms of the posterior over the coordinates."""
        yield from self.inner.forms(example, num_samples, generator, **options)

    def functions(self, num_functions: int, *, generator: torch.Generator | None = None) -> Functions:
        """Draw functions from the posterior over the coordinates: linearized ones, if it predicts so."""
        return self.inner.functions(num_functions, generator=generator)

    def log_evidence(self) -> Tensor:
        """Return the log-evidence, if the method defines one."""
        return self.inner.log_evidence()

    def diagnose(self) -> Any:
        """Return the diagnosis of the posterior over the coordinates."""
        return self.inner.diagnose()

    def history(self) -> History | None:
        """Return the history of the posterior over the coordinates."""
        return self.inner.history()

    @property
    def draws_functions(self) -> bool:  # type: ignore[override]
        """Whether the posterior over the coordinates draws functions."""
        return self.inner.draws_functions

    def _updated(self, data: Data, **options: Any) -> SubspacePosterior:
        """Update the posterior with new data, within the subspace."""
        found = self.inner.update(data, **options)
        return lift_posterior(found, self.recipe, self.model, self.selection)

    def state(self) -> dict[str, Any]:
        """Return the subspace and the posterior over its coordinates."""
        tensors: dict[str, Tensor] = {}
        recipe = json.dumps(self.inner.recipe.to_json(tensors))
        return {
            "subspace": self.selection.to_state(),
            "coordinates": self.inner.mean()["z"].reshape(-1),
            "family": self.inner.family,
            "recipe": recipe,
            "recipe_tensors": tensors,
            "inner": self.inner.state(),
        }

    @classmethod
    def from_state(cls, model: nn.Module, likelihood: Likelihood, recipe: Any, num_data: int, state: Any) -> Self:
        """Undo `state`."""
        subspace = Subspace.from_state(state["subspace"], model)
        network = SubspaceNetwork(model, subspace, state["coordinates"])
        own = Setting.from_json(json.loads(state["recipe"]), state["recipe_tensors"])
        family = Posterior._families[state["family"]]
        inner = family.from_state(network, likelihood, own, num_data, state["inner"])
        return cls(model, likelihood, recipe, num_data, subspace, inner)
