"""Train a posterior over weights and the scales of their groups."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from dubito.core import params
from dubito.core.batches import Batch
from dubito.fitting.inference import State
from dubito.methods.variational.groups.module import GroupModule
from dubito.methods.variational.groups.posterior import GroupPosterior, factors_of
from dubito.methods.variational.trainer import EVALUATION_DRAWS, VariationalTrainer


class GroupTrainer(VariationalTrainer):
    """The steps of `Variational` with a group prior, whose network at the means has scaled weights."""

    @torch.no_grad()
    def score(self, state: State, batch: Batch) -> Tensor:
        """Return the log-probability of validation targets under the network at the means."""
        module = cast(GroupModule, self._loaded(state))
        values = dict(module.network.named_parameters()) | dict(module.network.named_buffers())
        outputs = params.functional_call(self.plain, {**values, **module.expected_weights()}, batch.inputs)
        return self.problem.likelihood.log_prob(outputs, batch.targets, state["hyper"])

    @torch.no_grad()
    def posterior(self, state: State) -> GroupPosterior:
        """Return the posterior, and measure how well it fits the training data."""
        module, problem = cast(GroupModule, self._loaded(state)), self.problem
        network = self._plain_network(module)
        draws = [module.sample_weights() for _ in range(EVALUATION_DRAWS)]
        likelihood = self._likelihood(state, network, draws)
        record = self._record(state, module, network, draws, likelihood)
        found = (module.selection, factors_of(module), record)
        return GroupPosterior(network, likelihood, self.recipe, problem.num_data, *found)
