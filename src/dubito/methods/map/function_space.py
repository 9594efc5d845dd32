"""Train to the most probable weights under a prior over functions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dubito.beliefs.priors import FunctionSpace
from dubito.core import params
from dubito.core.batches import Batch
from dubito.core.params import Params
from dubito.fitting.gradient_training import GradientDescent, negative_log_likelihood
from dubito.fitting.inference import Problem


class FunctionDescent(GradientDescent):
    r"""Gradient steps on $-\frac1B \sum_n \log p(y_n \mid x_n, w) + \frac{\tau}{2N} \|W (f_w(C) - m)\|^2$.

    Every step runs the network on the context points too. They are run in evaluation mode, as predictions are, so that
    they change no statistics of batch normalization.

    Args:
        problem: Data, likelihood and model.
        prior: The prior over functions.
        weight: τ.
        epochs: The number of epochs of the learning rate schedule.
    """

    def __init__(self, problem: Problem, prior: FunctionSpace, weight: float, epochs: int) -> None:
        self.weight, self.prior = weight, prior.at_context(problem.source)
        self.explain = negative_log_likelihood(problem)
        super().__init__(problem, problem.model, self._loss, hyper=problem.likelihood.hyper(), epochs=epochs)

    def _loss(self, module: nn.Module, batch: Batch, hyper: Params, generator: torch.Generator) -> Tensor:
        share = self.weight * batch.num_rows / batch.size / self.problem.num_data
        module.eval()
        energy = self.prior.energy(params.call(module, self.prior.points))
        module.train()
        return self.explain(module, batch, hyper, generator) + share * energy
