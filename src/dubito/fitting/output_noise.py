"""Fit the noise of a trained regression network or another number of its likelihood, and a classifier's temperature."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Gaussian, Likelihood
from dubito.beliefs.likelihoods.kinds import ClassLikelihood
from dubito.core import distributed, params
from dubito.core.batches import Source
from dubito.core.errors import UnsupportedError
from dubito.core.numeric import minimize_scalar
from dubito.core.params import Params
from dubito.curvature.leave_one_out import MOST_OUTPUTS, predictive_noise
from dubito.fitting.inference import Problem
from dubito.fitting.posterior import Posterior

# The scale of the prior on the logarithm of a temperature, and the number of steps in which the best is looked for.
LOG_TEMPERATURE_SCALE, TRIED = 0.3, 40
# The numbers of rows and of samples from which the epistemic variance is measured, and the least share of the noise.
SHARING_ROWS, SHARING_SAMPLES, LEAST_SHARE = 256, 32, 0.25

# The noise on new data is taken in place of the learned one if it is larger by this factor.
CLEARLY_LARGER = 1.1
# The number of rows from which the variance of targets is measured.
TARGET_ROWS = 1024

# The logarithm of a learned number is looked for between plus and minus this.
NUMBER_RANGE = 8


@torch.no_grad()
def outputs_of(module: nn.Module, source: Source) -> list[tuple[Tensor, Tensor]]:
    """Return the outputs of `module` in float64 and the targets, batch by batch, for this process's rows."""
    module.eval()
    parts = (batch for batch in source.replay() if batch.num_rows)
    return [(params.call(module, batch.inputs).double(), batch.targets) for batch in parts]


def tune_temperature(module: nn.Module, likelihood: Likelihood, validation: Source) -> float:
    """Return the best temperature of a network for validation data; see `best_temperature`."""
    return best_temperature(outputs_of(module, validation), likelihood)


def best_temperature(parts: list[tuple[Tensor, Tensor]], likelihood: Likelihood) -> float:
    r"""Return the temperature that maximizes the likelihood of targets, by golden section on its logarithm.

    For classes, see `penalized_temperature`. It is 1 for a likelihood that has no temperature.

    Args:
        parts: Outputs of the network and targets, batch by batch.
        likelihood: The likelihood.
    """
    if not likelihood.tempers:
        return 1.0
    device = parts[0][0].device if parts else "cpu"

    def loss(log_temperature: float) -> float:
        total = torch.zeros((), dtype=torch.float64, device=device)
        for outputs, targets in parts:
            tempered, scaled = likelihood.temper(outputs, math.exp(log_temperature))
            total -= scaled.log_prob(tempered, targets).sum()
        distributed.sum_([total])
        return float(total)

    return penalized_temperature(loss, isinstance(likelihood, ClassLikelihood))


def penalized_temperature(loss: Callable[[float], float], of_classes: bool) -> float:
    r"""Return the temperature of the smallest loss, which is a function of log T.

    For classes, a Cauchy prior on log T of scale s adds $\log(1 + (\log T / s)^2)$. Without it, a classifier that makes
    no error on a few examples would become certain of everything; a network that is far too sure is still corrected,
    as the tails are heavy. (Tried on wine, digits and iris with 50 validation examples, also with wrong labels: s = 0.3
    is as good as the best of all scales, or nearly so, and better than normal priors.)
    """
    ends = math.log(1e-2), math.log(1e2)

    def penalized(log_temperature: float) -> float:
        extra = math.log1p((log_temperature / LOG_TEMPERATURE_SCALE) ** 2) if of_classes else 0.0
        return loss(log_temperature) + extra

    if not of_classes:
        return math.exp(minimize_scalar(penalized, *ends))
    step = (ends[1] - ends[0]) / TRIED
    best = min((ends[0] + k * step for k in range(TRIED + 1)), key=penalized)  # there may be two valleys
    return math.exp(minimize_scalar(penalized, best - step, best + step))


def share_noise(posterior: Posterior, noise: float, source: Source) -> Posterior:
    """Return the posterior with the part of a known predictive noise that its epistemic uncertainty does not explain.

    Args:
        posterior: The posterior of a regression.
        noise: The root mean square of the residuals of held-out examples, which have both causes.
        source: The training data.
    """
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in source.spread(SHARING_ROWS):
        prediction: Any = posterior.predict(batch.inputs, num_samples=SHARING_SAMPLES)
        epistemic = prediction.epistemic.double()
        sums += torch.tensor([float(epistemic.sum()), float(epistemic.numel())], dtype=torch.float64)
    distributed.sum_([sums])
    variance = max(noise**2 - float(sums[0] / sums[1].clamp_min(1.0)), LEAST_SHARE * noise**2)
    return posterior.with_likelihood(posterior.likelihood.replace(noise=math.sqrt(variance)))


def unfitted_noise(model: nn.Module, learned: float, source: Source, validation: Source | None) -> float | None:
    """Return the noise to be expected on new data, if it is clearly larger than the learned one; else None.

    The learned noise is that of the training data, to which the network was fitted. Trained long enough, it goes to 0.

    Args:
        model: The trained network of a regression.
        learned: The noise that was learned with it.
        source: The training data.
        validation: The validation data, or None; see `predictive_noise` for what is done without them.
    """
    if source.first().targets[0].numel() > MOST_OUTPUTS:
        return None
    try:
        expected = predictive_noise(model, source, validation, with_rule=True)
    except UnsupportedError:  # the curvature of the last layer cannot be computed
        return None
    return expected if expected > CLEARLY_LARGER * learned else None


def noise_share(noise: float, source: Source) -> float:
    r"""Return $\min(1, \sigma^2 / \max_o \operatorname{Var} y_o)$: how much of the variance of targets is noise.

    >>> noise_share(1.0, Source((torch.zeros(4, 1), torch.tensor([[-2.0], [2.0], [-2.0], [2.0]]))))
    0.25
    """
    sums = None
    for batch in source.spread(TARGET_ROWS):
        targets = batch.targets.reshape(batch.num_rows, -1).double()
        own = torch.stack([torch.ones_like(targets), targets, targets.square()]).sum(1)
        sums = own if sums is None else sums + own
    if sums is None:
        return 1.0
    distributed.sum_([sums])
    count, total, squares = sums.cpu()
    variance = float((squares / count - (total / count).square()).max())
    return 1.0 if variance <= noise**2 else noise**2 / variance


def fit_hyper(module: nn.Module, problem: Problem) -> Params:
    """Return the learned number of the likelihood that fits a network best, by name; empty if there is none."""
    start = problem.likelihood.hyper()
    if "log_noise" in start:
        return {"log_noise": fit_log_noise(module, problem)}
    return {name: _best_number(name, module, problem) for name in start}


def with_known_numbers(problem: Problem) -> Likelihood:
    """Return the likelihood with its learned number fitted to the network; the noise of a Gaussian stays open."""
    likelihood = problem.likelihood
    return likelihood if isinstance(likelihood, Gaussian) else likelihood.resolved(fit_hyper(problem.model, problem))


def _best_number(name: str, module: nn.Module, problem: Problem) -> Tensor:
    parts = outputs_of(module, problem.source)

    def loss(number: float) -> float:
        total = torch.zeros((), dtype=torch.float64, device=problem.source.device)
        for outputs, targets in parts:
            total -= problem.likelihood.log_prob(outputs, targets, {name: outputs.new_tensor(number)}).sum()
        distributed.sum_([total])
        return float(total)

    best = min(range(-NUMBER_RANGE, NUMBER_RANGE + 1), key=loss)
    return torch.tensor(minimize_scalar(loss, best - 1, best + 1), dtype=torch.float64)


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
