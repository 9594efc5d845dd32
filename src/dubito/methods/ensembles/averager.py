"""SWAG for training loops of your own: collect the weights, then make a posterior of their moments."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.core import io, params
from dubito.core.arguments import checked_arguments
from dubito.core.batches import Data
from dubito.core.errors import InputError
from dubito.core.settings import setting
from dubito.fitting.inference import Inference, Problem
from dubito.fitting.recipe import Recipe
from dubito.fitting.training import Training
from dubito.methods.ensembles.swag import SWAG, SWAGPosterior, _SWAGRun, collect, nothing_collected


class Averager:
    """Collects the weights of a network that a loop of yours trains, as `SWAG` does.

    Args:
        model: The network. It is read by `collect`, and not changed.
        recipe: A `SWAG`; its settings of the training loop are ignored.

    >>> model = nn.Linear(2, 3)
    >>> averager = Averager(model)
    >>> averager.collect()
    >>> averager.count
    1
    """

    @checked_arguments
    def __init__(self, model: nn.Module, recipe: SWAG | None = None) -> None:
        self.model, self.recipe = params.unwrapped(model), recipe or SWAG()
        self.selection = self.recipe.weights.resolve(self.model)
        self._moments = nothing_collected(params.of(self.model), self.selection)

    @property
    def count(self) -> int:
        """The number of networks collected so far."""
        return int(self._moments["count"])

    def collect(self) -> None:
        """Add the current weights; call it every so many steps at the end of training, at a constant learning rate."""
        self._moments = collect(self._moments, params.of(self.model), self.selection, self.recipe.rank)

    def to_posterior(
        self,
        data: Data,
        *,
        likelihood: str | Likelihood = "categorical",
        num_data: int | None = None,
        generator: torch.Generator | None = None,
    ) -> SWAGPosterior:
        """Return the Gaussian of the collected weights, as `SWAG.fit` would.

        Args:
            data: The training data, for BatchNorm statistics and the noise of ``"gaussian"``.
            likelihood: The distribution of targets given outputs.
            num_data: The number of examples, if the data has no length.
            generator: The source of randomness; by default the same call gives the same numbers.
        """
        if self.count < 2:
            raise InputError(f"A SWAG posterior needs at least 2 collected networks, got {self.count}: call collect().")
        options: dict[str, Any] = {"likelihood": likelihood, "num_data": num_data, "generator": generator}
        finished = _Collected(self.recipe, self.selection, io.clone(self._moments))
        found = finished.fit(self.model, data, training=Training(epochs=0), progress=False, **options)
        return cast("SWAGPosterior", found)


@setting
class _Collected(Recipe):
    """A `SWAG` fit without training, of moments that were collected elsewhere."""

    setting_name = "ensembles.Collected"
    swag: SWAG
    selection: Any
    moments: Any

    def build(self, problem: Problem) -> Inference:
        """Return an inference without steps."""
        run = _SWAGRun(self.swag, problem, self.selection, self.moments)
        return Inference(run.init, run.update, run.posterior, epochs=0)
