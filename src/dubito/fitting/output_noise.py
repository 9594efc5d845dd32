"""Fit the noise of a trained regression network, and the temperature of a trained classifier."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.beliefs.likelihoods.kinds import ClassLikelihood
from dubito.core import distributed, params
from dubito.core.batches import Source
from dubito.core.numeric import minimize_scalar
from dubito.fitting.inference import Problem


@torch.no_grad()
def outputs_of(module: nn.Module, source: Source) -> list[tuple[Tensor, Tensor]]:
    """Return the outputs of `module` in float64 and the targets, batch by batch, for this process's rows."""
    module.eval()
    parts = (batch for batch in source.replay() if batch.num_rows)
    return [(params.call(module, batch.inputs).double(), batch.targets) for batch in parts]


def tune_temperature(module: nn.Module, likelihood: Likelihood, validation: Source) -> float:
    """Return the temperature that maximizes the validation likelihood, by golden section on its logarithm.

    For a softmax the negative log-likelihood is convex in 1/T, so it has one minimum in log T. A standard normal prior
    on log T keeps T finite if a classifier makes no error on the validation data; a few errors outweigh the prior.
    """
    parts = outputs_of(module, validation)
    log_prior_factor = 0.5 if isinstance(likelihood, ClassLikelihood) else 0.0

    def loss(log_temperature: float) -> float:
        total = torch.zeros((), dtype=torch.float64, device=validation.device)
        for outputs, targets in parts:
            tempered, scaled = likelihood.temper(outputs, math.exp(log_temperature))
            total -= scaled.log_prob(tempered, targets).sum()
        distributed.sum_([total])
        return float(total) + log_prior_factor * log_temperature**2

    return math.exp(minimize_scalar(loss, math.log(1e-2), math.log(1e2)))


def fit_log_noise(module: nn.Module, problem: Problem) -> Tensor:
    """Return the log-noise that maximizes the likelihood: the logarithm of the root mean square residual.

    Training the noise by gradient steps along with the weights converges to the same value, but slowly.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=problem.source.device)
    for outputs, targets in outputs_of(module, problem.source):
        residuals = outputs - targets.reshape(outputs.shape)
        sums += torch.stack([residuals.square().sum(), residuals.new_tensor(residuals.numel())])
    distributed.sum_([sums])
    return (sums[0] / sums[1]).clamp_min(1e-12).log() / 2
